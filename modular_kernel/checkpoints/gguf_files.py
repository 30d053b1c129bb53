"""Reads a GGUF model (llama.cpp): shapes from the header, and rows and blocks of tensors.

A quantized GGUF tensor consists of blocks. A block has the codes and scales of 32 or 256
consecutive values of a row, in a byte layout that depends on the tensor's type, such as Q4_0.

    files = GgufFiles(Path("model-Q4_0.gguf"))
    files.shape_and_dtype("blk.0.ffn_up_exps.weight")  # (E, N, K), torch.uint8 (quantized)
    files.read_blocks("blk.0.ffn_up_exps.weight", 3, (0, 8), (0, K))  # (8, K / 32, 18) uint8

`modular_kernel.models.gguf_header` parses the header, and `ggml_blocks` converts blocks.
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
        experts_module="",
        gate="ffn_gate_exps",
        up="ffn_up_exps",
        down="ffn_down_exps",
        stacked=True,
    ),
    ExpertLayout(
        experts_module="", gate="ffn_gate_up_exps", up="", down="ffn_down_exps", stacked=True
    ),
)
_FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufFiles(TensorFiles):
    """The tensors of a GGUF model. A file is mapped into memory when one of its tensors is read.

    path: path of the model's first file.
    """

    def __init__(self, path: Path) -> None:
        self.header = read_header(path)
        super().__init__(path, {name: info.path for name, info in self.header.tensors.items()})
        self._mapped_files: dict[Path, np.memmap[tuple[int], np.dtype[np.uint8]]] = {}

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape of a tensor's values, and its dtype (uint8 if it is quantized)."""
        info = self.header.tensors[name]
        return info.shape, _FLOAT_DTYPES.get(info.type.name, torch.uint8)

    def nbytes(self, name: str) -> int:
        """Return the size of a tensor in bytes."""
        return self.header.tensors[name].nbytes

    def block_type(self, name: str) -> BlockType:
        """Return the block type of a tensor."""
        return self.header.tensors[name].type

    def read(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """Return a slice of a floating-point tensor, as a view of the mapped file.

        Raises WeightsError for a quantized tensor.
        """
        info = self.header.tensors[name]
        dtype = _FLOAT_DTYPES.get(info.type.name)
        if dtype is None:
            need = f"one of {', '.join(_FLOAT_DTYPES)}"
            raise WeightsError(self.qualified_name(name), got=info.type.name, need=need)
        tensor = self._view_bytes(info).view(dtype).view(info.shape)[slices or ...]
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor

    def read_blocks(self, name: str, expert: int, rows: Range, columns: Range) -> torch.Tensor:
        """Return the blocks that cover rows [a, b) and columns [c, d) of one expert's matrix.

        name: name of a tensor (E, N, K).

        Returns a view (rows, blocks, bytes per block) uint8.
        """
        info = self.header.tensors[name]
        block, (_, num_rows, depth) = info.type, info.shape
        blocks = self._view_bytes(info).view(-1, num_rows, depth // block.values, block.nbytes)[
            expert
        ]
        start, stop = columns[0] // block.values, -(-columns[1] // block.values)
        blocks = blocks[rows[0] : rows[1], start:stop]
        self.bytes_read += blocks.numel()
        return blocks

    def _view_bytes(self, info: TensorInfo) -> torch.Tensor:
        if info.path not in self._mapped_files:
            # Use copy-on-write, because torch has no read-only tensors.
            self._mapped_files[info.path] = np.memmap(info.path, np.uint8, mode="c")
        mapped_file = self._mapped_files[info.path]
        if info.offset + info.nbytes > len(mapped_file):  # truncated after the header was read
            raise WeightsError(
                str(info.path), got=f"{len(mapped_file)} bytes", need="a complete file"
            )
        return torch.from_numpy(mapped_file[info.offset : info.offset + info.nbytes])

    def close(self) -> None:
        """Drop the references to the mapped files. Views that were read stay valid."""
        self._mapped_files.clear()
