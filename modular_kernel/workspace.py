"""Declared sizes -> one allocation. Parts never allocate; they take named views.

A name owns its bytes for the whole call, unless another buffer is declared over it: then both lie
in the same memory, and the first is dead as soon as the second is taken.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle

import torch

from modular_kernel import replay
from modular_kernel.errors import ConfigurationError, CorruptionError

# The buffer that the experts write and finalize reads, sized for the part's dispatch_shape. What
# came in a call may need less: its output is then the first elements of the buffer.
EXPERT_OUTPUT = "expert_output"

_ALIGNMENT = 256  # bytes: a CUDA allocation's own alignment, and a multiple of a TMA box's 128
_RED_ZONE = 256  # bytes after each buffer that nobody may write; watched in poison mode
_RED_BYTE = 0xA5
# Integers that no call wrote: far outside any index, yet safe to print and to compare; and, as the
# calls of before leave them, an index like any other.
_POISON_INTS = (0x3F3F3F3F, 1)


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

    With poison=True each buffer is followed by a red zone, `poison()` fills buffers with NaN (or
    an integer: huge, every second time small) and `check_red_zones()` raises CorruptionError if a
    red zone was written. Buffers in the same memory are filled again where one is taken after the
    other.
    """

    def __init__(
        self,
        specs: Mapping[str, BufferSpec],
        device: torch.device,
        *,
        poison: bool = False,
        memory: torch.Tensor | None = None,
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
        self._shared = _Shared(self._specs, self._buffers, self._gaps)
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

    def poison(self) -> None:
        """Fill every buffer with NaN or an integer, and every red zone with its pattern.

        The integer is huge at first and then, in turn, small and huge: kernels leave out what is
        huge, and take what is small for an index.
        """
        assert self._shared is not None, "a workspace that is not poisoned has no red zones"
        self._shared.begin()

    def check_red_zones(self, *, replayed: bool = False) -> None:
        """Raise CorruptionError naming the buffers that were overrun. Synchronises.

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
    ) -> None:
        self._buffers, self._gaps = buffers, gaps
        self._integers = cycle(_POISON_INTS)
        self._integer = _POISON_INTS[0]
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

    def begin(self) -> None:
        """Every buffer is new; of those in the same memory, the earlier ones hold it."""
        self._dead = set(self._under.values())
        self._integer = next(self._integers)
        for kept in self._kept.values():
            kept.fill_(_RED_BYTE)
        for name in self._dead:
            poison_tensor(self._buffers[name], self._integer)
        self._fill(name for name in self._buffers if name not in self._dead)

    def take(self, name: str) -> None:
        """`name` is in use from here on: what lay in its memory is dead."""
        if name not in self._dead:
            return
        later = self._under.get(name)
        ends, begins = ((later,), self._over[later]) if later else (self._over[name], (name,))
        self._dead = (self._dead | set(ends)) - set(begins)
        with replay.unrecorded():
            for other in ends:
                self._kept[other].copy_(self._gaps[other])
                poison_tensor(self._buffers[other], self._integer)
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
            poison_tensor(self._buffers[name], self._integer)
            self._gaps[name].fill_(_RED_BYTE)


def poison_tensor(tensor: torch.Tensor, integer: int = _POISON_INTS[0]) -> None:
    """Fill with NaN, or where the dtype has no NaN with `integer`, or the largest it can hold."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(min(integer, torch.iinfo(tensor.dtype).max))
