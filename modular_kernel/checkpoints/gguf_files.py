"""Tensors of a GGUF model (llama.cpp): shapes from the header, and reads of rows and blocks.

    files = GgufFiles(Path("model-Q4_0.gguf"))
    files.shape_and_dtype("blk.0.ffn_up_exps.weight")   # (E, N, K), torch.uint8: not floats
    files.read_blocks("blk.0.ffn_up_exps.weight", 3, (0, 8), (0, K))   # (8, blocks, bytes)

`modular_kernel.models.gguf_header` parses the header, `ggml_blocks` converts blocks.
"""

from pathlib import Path

import numpy as np
import torch

from modular_kernel.checkpoints.matrix_layout import Range
from modular_kernel.checkpoints.safetensors_files import TensorFiles
from modular_kernel.errors import WeightsError
from modular_kernel.models.expert_layouts import ExpertLayout
from modular_kernel.models.gguf_header import BlockType, TensorInfo, read_header

LAYOUTS = (
    ExpertLayout(
        block="", gate="ffn_gate_exps", up="ffn_up_exps", down="ffn_down_exps", stacked=True
    ),
    ExpertLayout(block="", gate="ffn_gate_up_exps", up="", down="ffn_down_exps", stacked=True),
)
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufFiles(TensorFiles):
    """The tensors of a GGUF model, which are mapped into memory on first use.

    path: of its first file. A quantized tensor has the shape of its values, and dtype uint8.
    """

    def __init__(self, path: Path) -> None:
        self.header = read_header(path)
        super().__init__(path, {name: info.path for name, info in self.header.tensors.items()})
        self._maps: dict[Path, np.memmap[tuple[int], np.dtype[np.uint8]]] = {}

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape of a tensor's values, and its dtype, uint8 for blocks."""
        info = self.header.tensors[name]
        return info.shape, _FLOATS.get(info.type.name, torch.uint8)

    def nbytes(self, name: str) -> int:
        """Return the size of a tensor in bytes."""
        return self.header.tensors[name].nbytes

    def type_of(self, name: str) -> BlockType:
        """Return the type of a tensor."""
        return self.header.tensors[name].type

    def read(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """Return a slice of a floating tensor, as a view of the mapped file.

        Raises WeightsError for a tensor of blocks.
        """
        info = self.header.tensors[name]
        dtype = _FLOATS.get(info.type.name)
        if dtype is None:
            need = f"one of {', '.join(_FLOATS)}"
            raise WeightsError(self.qualified_name(name), got=info.type.name, need=need)
        tensor = self._bytes(info).view(dtype).view(info.shape)[slices or ...]
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor

    def read_blocks(self, name: str, expert: int, rows: Range, columns: Range) -> torch.Tensor:
        """Return the blocks with columns [c, d) of rows [a, b) of an expert's matrix.

        name: of a tensor (E, N, K). Returns uint8 (rows, blocks, bytes of a block), a view.
        """
        info = self.header.tensors[name]
        kind, (_, size, depth) = info.type, info.shape
        blocks = self._bytes(info).view(-1, size, depth // kind.values, kind.nbytes)[expert]
        first, last = columns[0] // kind.values, -(-columns[1] // kind.values)
        blocks = blocks[rows[0] : rows[1], first:last]
        self.bytes_read += blocks.numel()
        return blocks

    def _bytes(self, info: TensorInfo) -> torch.Tensor:
        if info.path not in self._maps:
            # Copy-on-write, since torch has no read-only tensors.
            self._maps[info.path] = np.memmap(info.path, np.uint8, mode="c")
        mapped = self._maps[info.path]
        if info.offset + info.nbytes > len(mapped):  # it has become shorter
            raise WeightsError(str(info.path), got=f"{len(mapped)} bytes", need="a complete file")
        return torch.from_numpy(mapped[info.offset : info.offset + info.nbytes])

    def close(self) -> None:
        """Forget the files. Views that were read stay valid."""
        self._maps.clear()
