"""Workspaces: the declared buffers of a call, as named views of one allocation.

Parts do not allocate memory themselves. A buffer keeps its contents for the whole call, unless
another buffer is declared `over` it. Both buffers then share memory, and taking the other buffer
overwrites this one.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from modular_kernel.errors import ConfigurationError, CorruptionError
from modular_kernel.replay import recording

# Name of the buffer that the experts write and finalize reads. The buffer is large enough for the
# dispatch_shape of a call. A smaller dispatch uses the first elements of the buffer.
EXPERT_OUTPUT = "expert_output"

_ALIGNMENT = 256  # bytes: alignment of a CUDA allocation, and a multiple of TMA's 128
_RED_ZONE = 256  # bytes after each buffer in poison mode, which no kernel may write
_RED_BYTE = 0xA5


@dataclass(frozen=True)
class Fill:
    """Values that fill unwritten memory in poison mode, by dtype.

    real: value for floating-point dtypes.
    integer: value for integers of 16 bits or more.
    byte: value for uint8 and bool.
    small: value for int8.
    """

    real: float
    integer: int
    byte: int
    small: int

    def value(self, dtype: torch.dtype) -> float:
        """Return the value for an element of `dtype`."""
        if dtype.is_floating_point:
            return self.real
        if dtype in (torch.uint8, torch.bool):
            return self.byte
        return self.small if dtype is torch.int8 else min(self.integer, torch.iinfo(dtype).max)


# No single value exposes every read of unwritten memory. NaN spreads through sums and products, but
# a maximum may ignore NaN. A large finite value changes every maximum and fits every dtype. A huge
# integer is not a valid index. Bytes of 0xFF are -1 in a wider dtype, the id that is skipped. 0 and
# 1 are valid but wrong ids of experts, slots and rows. Bytes of 0 are the id 0 in a wider dtype.
FILLS = (
    Fill(math.nan, 0x3F3F3F3F, 0xFF, 127),
    Fill(300.0, 0, 0, -127),
    Fill(-300.0, 1, 0x43, 67),
)


class Fills:
    """Cycles through FILLS, with one fill for each call."""

    def __init__(self) -> None:
        self._count = 0

    def next(self) -> Fill:
        """Return the fill for the next call."""
        self._count += 1
        return FILLS[(self._count - 1) % len(FILLS)]


@dataclass(frozen=True)
class BufferSpec:
    """Declaration of a buffer: shape in elements, and dtype.

    over: names of buffers whose memory this buffer may share. Taking this buffer overwrites them.
        Launches must not access them again until they are taken for another chunk.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    over: tuple[str, ...] = ()

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WorkspaceShapes:
    """Buffers of an experts part for one call.

    workspace13: output of GEMM 1, which is also the up projection (GEMM 3) of a gated layer. Its
        shape may be (0,).
    workspace2: output of GEMM 2. Its shape may be (0,).
    output: the tensor that finalize receives.
    extra: other buffers, by name.
    """

    workspace13: BufferSpec
    workspace2: BufferSpec
    output: BufferSpec
    extra: Mapping[str, BufferSpec] = field(default_factory=dict)

    def buffers(self) -> dict[str, BufferSpec]:
        """Return every buffer except the output, by name."""
        return {"workspace13": self.workspace13, "workspace2": self.workspace2, **self.extra}


def _compute_layout(
    specs: Mapping[str, BufferSpec], gap: int
) -> tuple[dict[str, tuple[int, int]], int]:
    """Return the [start, end) byte range of each buffer, and the total size in bytes.

    gap: bytes after each buffer.

    Raises ConfigurationError if a buffer is declared over a buffer that is over others.
    """
    # This function runs in every kernel call, so sizes are computed once, inline.
    sizes, underlying_names = {}, set[str]()
    for name, spec in specs.items():
        sizes[name] = math.prod(spec.shape) * spec.dtype.itemsize
        for underlying in spec.over:
            if underlying in specs:
                underlying_names.add(underlying)
                if specs[underlying].over:
                    what = f"workspace buffer {name}"
                    got = f"over {underlying}, which is over others"
                    raise ConfigurationError(
                        what, got=got, need="a buffer over buffers that are not over others"
                    )
    ranges, end = {}, 0
    for name, spec in specs.items():
        if name in underlying_names:
            continue
        overlay_end = end - (-(sizes[name] + gap) // _ALIGNMENT) * _ALIGNMENT
        underlying_end = end
        ranges[name] = (end, end + sizes[name])
        for underlying in spec.over:
            if underlying in specs:
                ranges[underlying] = (underlying_end, underlying_end + sizes[underlying])
                underlying_end -= (-(sizes[underlying] + gap) // _ALIGNMENT) * _ALIGNMENT
        end = max(overlay_end, underlying_end)
    return ranges, end


def workspace_bytes(specs: Mapping[str, BufferSpec]) -> int:
    """Return the size in bytes of a Workspace with these buffers."""
    return _compute_layout(specs, 0)[1]


class Workspace:
    """Named typed buffers inside one uint8 allocation.

    poison: follow each buffer with a red zone. `poison()` then fills all buffers with the next of
        FILLS, and `check_red_zones()` raises CorruptionError if a red zone was written. A buffer
        that shares memory is filled again when another buffer in this memory is taken.
    memory: the uint8 tensor that contains all buffers; None allocates one on `device`.
    fills: source of the next fill, shared by the workspaces of several calls. None starts with the
        first of FILLS.
    nbytes: number of bytes of `memory` in use.
    """

    def __init__(
        self,
        specs: Mapping[str, BufferSpec],
        device: torch.device,
        *,
        poison: bool = False,
        memory: torch.Tensor | None = None,
        fills: Fills | None = None,
    ) -> None:
        self._specs = dict(specs)
        gap = _RED_ZONE if poison else 0
        ranges, self.nbytes = _compute_layout(self._specs, gap)
        if memory is None:
            memory = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self.memory = memory
        self._buffers = {}
        for name, spec in self._specs.items():
            start, stop = ranges[name]
            self._buffers[name] = self.memory[start:stop].view(spec.dtype)
        self._shared: _SharedBuffers | None = None
        if not poison:
            return
        self._red_zones = {name: self.memory[ranges[name][1] :][:gap] for name in self._specs}
        self._shared = _SharedBuffers(self._specs, self._buffers, self._red_zones, fills or Fills())
        self.poison()

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the first elements of buffer `name` as a contiguous tensor of `shape`.

        Raises ConfigurationError if the buffer does not exist or is too small.
        """
        numel = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or numel > buffer.numel():
            raise self._make_unplanned_error(name, shape)
        if self._shared is not None:
            self._shared.take(name)
        return buffer[:numel].view(shape)

    def _make_unplanned_error(self, name: str, shape: tuple[int, ...]) -> ConfigurationError:
        declared = self._specs.get(name)
        got = f"{shape} of {name}, declared as {declared.shape if declared else 'nothing'}"
        need = "kernels and plans created and called under the same tile override"
        return ConfigurationError("workspace", got=got, need=need)

    def poison(self) -> Fill:
        """Fill every buffer with the next of FILLS, and every red zone with its pattern.

        Returns the fill, for memory that a call writes outside the workspace.
        """
        assert self._shared is not None, "a workspace that is not poisoned has no red zones"
        return self._shared.begin()

    @property
    def fill(self) -> Fill:
        """Value of unwritten buffers, in poison mode."""
        assert self._shared is not None, "a workspace that is not poisoned has no fill"
        return self._shared.fill

    def check_red_zones(self, *, replayed: bool = False) -> None:
        """Raise CorruptionError with the names of overrun buffers. Synchronizes.

        replayed: the call replayed launches and did not take its buffers. The red zones of buffers
            that share memory are then not checked, because the last used buffer is unknown.
        """
        if self._shared is None:
            return
        overrun_names = self._shared.find_overrun(replayed)
        if overrun_names:
            raise CorruptionError(f"written past the end of workspace buffers {overrun_names}")


class _SharedBuffers:
    """Tracks which buffers of a poisoned workspace are in use.

    A buffer is dead while another buffer in the same memory is in use. It is filled again when it
    is taken.
    """

    def __init__(
        self,
        specs: Mapping[str, BufferSpec],
        buffers: Mapping[str, torch.Tensor],
        red_zones: Mapping[str, torch.Tensor],
        fills: Fills,
    ) -> None:
        self._buffers, self._red_zones = buffers, red_zones
        self._fills, self.fill = fills, FILLS[0]
        self._over = {
            name: tuple(underlying for underlying in spec.over if underlying in specs)
            for name, spec in specs.items()
        }
        self._overlay_of = {
            underlying: name for name, over in self._over.items() for underlying in over
        }
        self._dead = set[str]()
        # Copies of the red zones of buffers that share memory, made when a buffer becomes dead.
        # They are allocated here, so that calls allocate nothing.
        sharing = {*self._overlay_of, *self._overlay_of.values()}
        self._saved_zones = {name: red_zones[name].clone() for name in sharing}

    def begin(self) -> Fill:
        """Start a call: fill all buffers, and mark the buffers declared over others as dead."""
        self._dead = set(self._overlay_of.values())
        self.fill = self._fills.next()
        for zone in self._saved_zones.values():
            zone.fill_(_RED_BYTE)
        for name in self._dead:
            poison_tensor(self._buffers[name], self.fill)
        self._fill(name for name in self._buffers if name not in self._dead)
        return self.fill

    def take(self, name: str) -> None:
        """Mark `name` as in use, and the buffers that share its memory as dead."""
        if name not in self._dead:
            return
        overlay = self._overlay_of.get(name)
        released, acquired = (
            ((overlay,), self._over[overlay]) if overlay else (self._over[name], (name,))
        )
        self._dead = (self._dead | set(released)) - set(acquired)
        with recording.ignore_torch_operations():
            for released_name in released:
                self._saved_zones[released_name].copy_(self._red_zones[released_name])
                poison_tensor(self._buffers[released_name], self.fill)
            self._fill(acquired)

    def find_overrun(self, replayed: bool) -> list[str]:
        """Return the names of buffers whose red zone was written."""
        live = [name for name in self._red_zones if name not in self._saved_zones]
        if not replayed:
            live += [name for name in self._saved_zones if name not in self._dead]
        zones = [(name, self._red_zones[name]) for name in live]
        zones += self._saved_zones.items()
        return [name for name, zone in zones if bool((zone != _RED_BYTE).any())]

    def _fill(self, names: Iterable[str]) -> None:
        for name in names:
            poison_tensor(self._buffers[name], self.fill)
            self._red_zones[name].fill_(_RED_BYTE)


def poison_tensor(tensor: torch.Tensor, fill: Fill = FILLS[0]) -> None:
    """Fill a tensor with the value that `fill` has for its dtype."""
    tensor.fill_(fill.value(tensor.dtype))
