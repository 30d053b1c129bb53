"""Declared sizes -> one allocation. Parts never allocate; they take named views.

A name owns its bytes for the whole call, unless another buffer is declared over it: then both lie
in the same memory, and the first is dead as soon as the second is taken.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from modular_kernel.errors import ConfigurationError, CorruptionError
from modular_kernel.replay import recording

# The buffer that the experts write and finalize reads, sized for the part's dispatch_shape. What
# came in a call may need less: its output is then the first elements of the buffer.
EXPERT_OUTPUT = "expert_output"

_ALIGNMENT = 256  # bytes: a CUDA allocation's own alignment, and a multiple of a TMA box's 128
_RED_ZONE = 256  # bytes after each buffer that nobody may write; watched in poison mode
_RED_BYTE = 0xA5


@dataclass(frozen=True)
class Fill:
    """What unwritten memory holds in poison mode, by the kind of its dtype.

    real: floating-point values. integer: integers of 16 bits and more. byte: uint8. small: int8.
    """

    real: float
    integer: int
    byte: int
    small: int

    def value(self, dtype: torch.dtype) -> float:
        """Return what an element of `dtype` holds; bool counts as a byte."""
        if dtype.is_floating_point:
            return self.real
        if dtype in (torch.uint8, torch.bool):
            return self.byte
        return self.small if dtype is torch.int8 else min(self.integer, torch.iinfo(dtype).max)


# No single value shows every read of unwritten memory. NaN spreads through sums and products, but
# a maximum may ignore it: a large finite value raises every maximum, and fits every dtype. A huge
# integer is no index, and bytes of 0xFF are -1, which means "no expert" and "no adapter": both are
# skipped. 0 and 1 are ids of real experts, slots and rows, though not of those that were meant;
# bytes of 0 are such ids in a view of more bytes.
FILLS = (
    Fill(math.nan, 0x3F3F3F3F, 0xFF, 127),
    Fill(300.0, 0, 0, -127),
    Fill(-300.0, 1, 0x43, 67),
)


class Fills:
    """Fills in turn, for calls that follow each other."""

    def __init__(self) -> None:
        self._count = 0

    def next(self) -> Fill:
        """Return the fill of the next call."""
        self._count += 1
        return FILLS[(self._count - 1) % len(FILLS)]


@dataclass(frozen=True)
class BufferSpec:
    """A buffer as data: shape in elements, and dtype.

    over: names of buffers in whose memory it may lie. Once it is taken nothing that is launched
    reads or writes them, until they are taken again, for another chunk.
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
    """What an experts part needs for one call: two large workspaces, small extras, the output.

    workspace13 holds what GEMM 1 (and later GEMM 3 of a gated layer) writes, workspace2 what
    GEMM 2 writes; either may be empty (shape (0,)). `output` is the shape finalize receives.
    """

    workspace13: BufferSpec
    workspace2: BufferSpec
    output: BufferSpec
    extra: Mapping[str, BufferSpec] = field(default_factory=dict)

    def buffers(self) -> dict[str, BufferSpec]:
        """Return every buffer but the output, by name."""
        return {"workspace13": self.workspace13, "workspace2": self.workspace2, **self.extra}


def _layout(specs: Mapping[str, BufferSpec], gap: int) -> tuple[dict[str, tuple[int, int]], int]:
    """Return each buffer's first byte and the byte after its last, and the end of all.

    gap: bytes after each buffer. ConfigurationError for a buffer over one that is itself declared
    over others. Runs in every call of a kernel, so sizes are derived once and without calls.
    """
    sizes, shared = {}, set[str]()
    for name, spec in specs.items():
        sizes[name] = math.prod(spec.shape) * spec.dtype.itemsize
        for other in spec.over:
            if other in specs:
                shared.add(other)
                if specs[other].over:
                    what, got = f"workspace buffer {name}", f"over {other}, which is over others"
                    raise ConfigurationError(what, got=got, need="one over plain ones")
    places, end = {}, 0
    for name, spec in specs.items():
        if name in shared:
            continue
        after, inner = end - (-(sizes[name] + gap) // _ALIGNMENT) * _ALIGNMENT, end
        places[name] = (end, end + sizes[name])
        for other in spec.over:
            if other in specs:
                places[other] = (inner, inner + sizes[other])
                inner -= (-(sizes[other] + gap) // _ALIGNMENT) * _ALIGNMENT
        end = max(after, inner)
    return places, end


def workspace_bytes(specs: Mapping[str, BufferSpec]) -> int:
    """Return the bytes that a Workspace of these buffers takes."""
    return _layout(specs, 0)[1]


class Workspace:
    """Named typed buffers inside one uint8 allocation on `device`, or inside `memory` if given.

    With poison=True each buffer is followed by a red zone, `poison()` fills buffers with the next
    of FILLS and `check_red_zones()` raises CorruptionError if a red zone was written. Buffers in
    the same memory are filled again where one is taken after the other. fills: where the next fill
    comes from, shared by workspaces that are made for one call each; None starts from the first.
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
        places, self.nbytes = _layout(self._specs, gap)
        if memory is None:
            memory = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self._arena = memory
        self._buffers = {}
        for name, spec in self._specs.items():
            start, stop = places[name]
            self._buffers[name] = self._arena[start:stop].view(spec.dtype)
        self._shared: _Shared | None = None
        if not poison:
            return
        self._gaps = {name: self._arena[places[name][1] :][:gap] for name in self._specs}
        self._shared = _Shared(self._specs, self._buffers, self._gaps, fills or Fills())
        self.poison()

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the first elements of buffer `name` as a contiguous tensor of `shape`.

        ConfigurationError if there is no such buffer, or not as many elements: the call would
        launch something else than what it was planned for.
        """
        numel = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or numel > buffer.numel():
            raise self._unplanned(name, shape)
        if self._shared is not None:
            self._shared.take(name)
        return buffer[:numel].view(shape)

    def _unplanned(self, name: str, shape: tuple[int, ...]) -> ConfigurationError:
        declared = self._specs.get(name)
        got = f"{shape} of {name}, declared as {declared.shape if declared else 'nothing'}"
        need = "kernels and plans made where they are called: with the same override of tiles"
        return ConfigurationError("workspace", got=got, need=need)

    def poison(self) -> Fill:
        """Fill every buffer with the next of FILLS, and every red zone with its pattern.

        Returns the fill, for memory that a call writes outside the workspace.
        """
        assert self._shared is not None, "a workspace that is not poisoned has no red zones"
        return self._shared.begin()

    @property
    def fill(self) -> Fill:
        """What buffers that no call wrote hold, in poison mode."""
        assert self._shared is not None, "a workspace that is not poisoned has no fill"
        return self._shared.fill

    def check_red_zones(self, *, replayed: bool = False) -> None:
        """Raise CorruptionError naming the buffers that were overrun. Synchronizes.

        replayed: the call's buffers were not taken, so that nobody knows which of those in the same
        memory came last: their red zones are left out.
        """
        if self._shared is None:
            return
        overrun = self._shared.overrun(replayed)
        if overrun:
            raise CorruptionError(f"written past the end of workspace buffers {overrun}")


class _Shared:
    """Of a poisoned workspace: which buffers hold what they should, where several share memory."""

    def __init__(
        self,
        specs: Mapping[str, BufferSpec],
        buffers: Mapping[str, torch.Tensor],
        gaps: Mapping[str, torch.Tensor],
        fills: Fills,
    ) -> None:
        self._buffers, self._gaps = buffers, gaps
        self._fills, self.fill = fills, FILLS[0]
        self._over = {
            name: tuple(other for other in spec.over if other in specs)
            for name, spec in specs.items()
        }
        self._under = {other: name for name, over in self._over.items() for other in over}
        self._dead = set[str]()
        # What the red zones of dead buffers held when they died; made now, so that a call
        # allocates nothing.
        several = {*self._under, *self._under.values()}
        self._kept = {name: gaps[name].clone() for name in several}

    def begin(self) -> Fill:
        """Every buffer is new; of those in the same memory, the earlier ones hold it."""
        self._dead = set(self._under.values())
        self.fill = self._fills.next()
        for kept in self._kept.values():
            kept.fill_(_RED_BYTE)
        for name in self._dead:
            poison_tensor(self._buffers[name], self.fill)
        self._fill(name for name in self._buffers if name not in self._dead)
        return self.fill

    def take(self, name: str) -> None:
        """`name` is in use from here on: what lay in its memory is dead."""
        if name not in self._dead:
            return
        later = self._under.get(name)
        ends, begins = ((later,), self._over[later]) if later else (self._over[name], (name,))
        self._dead = (self._dead | set(ends)) - set(begins)
        with recording.unrecorded():
            for other in ends:
                self._kept[other].copy_(self._gaps[other])
                poison_tensor(self._buffers[other], self.fill)
            self._fill(begins)

    def overrun(self, replayed: bool) -> list[str]:
        """Return the names of buffers after which something was written."""
        zones = {n: gap for n, gap in self._gaps.items() if n not in self._kept}
        if not replayed:
            living = {n: self._gaps[n] for n in self._kept if n not in self._dead}
            zones |= living
        found = [n for n, gap in zones.items() if bool((gap != _RED_BYTE).any())]
        return found + [n for n, gap in self._kept.items() if bool((gap != _RED_BYTE).any())]

    def _fill(self, names: Iterable[str]) -> None:
        for name in names:
            poison_tensor(self._buffers[name], self.fill)
            self._gaps[name].fill_(_RED_BYTE)


def poison_tensor(tensor: torch.Tensor, fill: Fill = FILLS[0]) -> None:
    """Fill a tensor with what `fill` has for its dtype."""
    tensor.fill_(fill.value(tensor.dtype))
