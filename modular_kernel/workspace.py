"""Declared sizes -> one allocation. Parts never allocate; they take named views.

No two buffers alias: every name owns its bytes for the whole call, so no part has to reason about
which buffer is dead when.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from modular_kernel.errors import CorruptionError

# The buffer that the experts write and finalize reads, sized for the part's dispatch_shape. What
# came in a call may need less: its output is then the first elements of the buffer.
EXPERT_OUTPUT = "expert_output"

_ALIGNMENT = 256  # bytes: a CUDA allocation's own alignment, and a multiple of a TMA box's 128
_RED_ZONE = 256  # bytes after each buffer that nobody may write; watched in poison mode
_RED_BYTE = 0xA5
_POISON_INT = 0x3F3F3F3F  # far outside any index, yet safe to print and to compare


@dataclass(frozen=True)
class BufferSpec:
    """A buffer as data: shape in elements, and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class WorkspaceShapes:
    """What an experts part needs for one call: two large workspaces, small extras, the output.

    workspace13 holds what GEMM 1 (and later GEMM 3 of a gated layer) writes, workspace2 what
    GEMM 2 writes; either may be empty (shape (0,)). `output` is the shape finalize receives.
    """

    workspace13: BufferSpec
    workspace2: BufferSpec
    output: BufferSpec
    extra: Mapping[str, BufferSpec] = field(default_factory=dict)

    def buffers(self) -> dict[str, BufferSpec]:
        """Every buffer but the output, by name."""
        return {"workspace13": self.workspace13, "workspace2": self.workspace2, **self.extra}


class Workspace:
    """Named typed buffers inside one uint8 allocation on `device`.

    With poison=True each buffer is followed by a red zone, `poison()` fills buffers with NaN (or
    a huge integer) and `check_red_zones()` raises CorruptionError if one was written.
    """

    def __init__(
        self, specs: Mapping[str, BufferSpec], device: torch.device, *, poison: bool = False
    ) -> None:
        self._specs = dict(specs)
        self._poison = poison
        gap = _RED_ZONE if poison else 0
        offsets, end = {}, 0
        for name, spec in self._specs.items():
            offsets[name] = end
            end += -(-(spec.nbytes + gap) // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = end
        self._arena = torch.empty(end, dtype=torch.uint8, device=device)
        self._buffers = {
            name: self._arena[offsets[name] : offsets[name] + spec.nbytes].view(spec.dtype)
            for name, spec in self._specs.items()
        }
        self._gaps = {
            name: self._arena[offsets[name] + spec.nbytes :][: gap and _RED_ZONE]
            for name, spec in self._specs.items()
        }
        if poison:
            self.poison()

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The first elements of buffer `name` as a contiguous tensor of `shape`."""
        numel = math.prod(shape)
        buffer = self._buffers[name]
        assert numel <= buffer.numel(), f"{name}: {shape} exceeds declared {self._specs[name]}"
        return buffer[:numel].view(shape)

    def poison(self) -> None:
        """Fill every buffer with NaN or a huge integer, and every red zone with its pattern."""
        for name, buffer in self._buffers.items():
            poison_tensor(buffer)
            self._gaps[name].fill_(_RED_BYTE)

    def check_red_zones(self) -> None:
        """Raise CorruptionError naming the buffers that were overrun. Synchronises."""
        overrun = [n for n, gap in self._gaps.items() if bool((gap != _RED_BYTE).any())]
        if overrun:
            raise CorruptionError(f"written past the end of workspace buffer(s) {overrun}")


def poison_tensor(tensor: torch.Tensor) -> None:
    """Fill with NaN, or with a huge integer where the dtype has no NaN."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(min(_POISON_INT, torch.iinfo(tensor.dtype).max))
