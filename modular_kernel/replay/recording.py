"""What the host does for a planned call, done once: launches are recorded, then replayed.

A plan's first call of a signature runs the parts' host code inside `recording`. Every launch made
through `modular_kernel.replay.launch` is noted, with what came from which input. A later call of
the same signature puts its own pointers there and launches the same kernels; no host code of the
parts runs. What cannot be replayed shows while recording: a torch operation that is no view refuses
it.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import reduce
from itertools import count, groupby, pairwise
from operator import attrgetter, itemgetter, or_
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from modular_kernel.tensors import ExpertWeights
from modular_kernel.utils.tensor_checks import span

Replay = Callable[[int, Sequence[int]], None]  # (stream, pointers of the inputs)
Replayer = Callable[
    [Sequence[Any], int], Replay
]  # launches as noted, and how many inputs there are
Watched = Callable[[], bool]  # whether somebody watches launches, so that none may be hidden

_MOST_LAYOUTS = 1024  # of weights that were checked: one for each layer of a model, and more
_MOST_RECORDED = 64  # signatures of call a plan remembers; each may hold a small CUDA graph
_ALIGNMENT = 16  # bytes: kernels are compiled apart for pointers that are multiples of it
# Mapped over tensors: every call asks, and it takes a third less time than one by one.
_pointer, _size, _stride = torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride
_dtype, _dtype_and_device = attrgetter("dtype"), attrgetter("dtype", "device")
_version = attrgetter("_version")
_expired: Any = torch.UntypedStorage._expired
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_recorder: ContextVar["Recorder | None"] = ContextVar("recorder of launches", default=None)


@dataclass(frozen=True)
class RecordedCall:
    """The launches of calls of one signature. kept: memory they use that is not the caller's."""

    replays: tuple[Replay, ...]
    watches: tuple[Watched, ...]
    kept: tuple[torch.Tensor, ...]

    def watched(self) -> bool:
        """Tell whether a profiler would miss these launches: they go past triton's hooks."""
        for watched in self.watches:  # noqa: SIM110  in every call, so without a generator
            if watched():
                return True
        return False

    def replay(self, stream: int, pointers: Sequence[int]) -> None:
        """Launch everything on `stream`, for inputs at `pointers`."""
        for replay in self.replays:
            replay(stream, pointers)


class Recorder(TorchDispatchMode):
    """Notes the launches of one call, whose tensors are `inputs`, in the order of the pointers."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refused = ""
        self.paused = False
        self._spans = [span(tensor) for tensor in inputs]
        self._launches: list[tuple[Replayer, Any]] = []
        self._watches: list[Watched] = []
        self._kept: list[torch.Tensor] = []
        ordered = sorted(self._spans)
        if any(stop > start for (_, stop), (start, _) in pairwise(ordered)):
            self.refuse("inputs share memory, so a pointer does not tell whose it is")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not (func.is_view or self.paused):
            self.refuse(f"{func} is no launch of ours")
        return func(*args, **(kwargs or {}))

    def refuse(self, reason: str) -> None:
        """Say why this call cannot be replayed; the first reason stays."""
        self.refused = self.refused or reason

    def place(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """(input, bytes into it) where `tensor` starts; None, and it is kept, if in no input."""
        pointer = tensor.data_ptr()
        for index, (start, stop) in enumerate(self._spans):
            if start <= pointer < stop:
                return index, pointer - start
        self._kept.append(tensor)
        return None

    def note(self, launch: Any, replayer: Replayer, watched: Watched) -> None:
        """Add a launch; `replayer` makes one Replay of it and of its neighbors with the same."""
        self._launches.append((replayer, launch))
        if watched not in self._watches:
            self._watches.append(watched)

    def recorded(self) -> RecordedCall | None:
        """Return the recording; None if it was refused."""
        if self.refused:
            return None
        replays = tuple(
            replayer([launch for _, launch in launches], len(self._spans))
            for replayer, launches in groupby(self._launches, key=itemgetter(0))
        )
        return RecordedCall(replays, tuple(self._watches), tuple(self._kept))


# recorder(): what records this thread's launches at the moment, or None. Every launch asks.
recorder = _recorder.get


@contextmanager
def recording(inputs: Sequence[torch.Tensor]) -> Iterator[Recorder]:
    """Record the launches made inside, by this thread."""
    made = Recorder(inputs)
    token = _recorder.set(made)
    try:
        with made:
            yield made
    finally:
        _recorder.reset(token)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Leave what is done inside out of a replay: it watches the call and is no part of it."""
    made = _recorder.get()
    if made is None:
        yield
        return
    made.paused = True
    try:
        yield
    finally:
        made.paused = False


def capturing(device: torch.device) -> bool:
    """Tell whether the current stream of a device is being captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def storage_of(tensor: torch.Tensor) -> StorageWeakRef:
    """Return the memory that a tensor lies in, which lives no longer for that."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class CheckedWeights:
    """Weights that were checked: their tensors, each once, and what a recording sees of them.

    places: pointers, shapes, strides and dtypes of then. spans: the bytes they reach over.
    bits: of all pointers. signature: the number of what a recording sees. unwritten, versions:
    of tensors that must not be written, because they were prepared or something was prepared of
    them; inference tensors have no version. storages: of what something was prepared of. While a
    storage lives, no other has its memory.
    """

    weights: "weakref.ref[ExpertWeights]"
    device: torch.device
    tensors: tuple[torch.Tensor, ...]
    signature: int
    places: list[Hashable]
    spans: tuple[tuple[int, int], ...]
    pointers: tuple[int, ...]
    bits: int
    unwritten: tuple[torch.Tensor, ...]
    versions: list[int]
    storages: tuple[StorageWeakRef, ...]

    def holds(self) -> bool:
        """Whether all is where it was, and as it was where that is remembered."""
        if self.versions != [*map(_version, self.unwritten)]:
            return False
        for storage in self.storages:
            if _expired(storage.cdata):
                return False
        return self.places == _places(self.tensors)


class KnownWeights:
    """The weights that a kernel and its plans have checked, so that a call need not do it again.

    Weights are remembered while they live, and not kept alive. Another ExpertWeights of the same
    memory, such as one made anew for each call, is not checked again either. A copy knows none.
    """

    def __init__(self) -> None:
        self._bound: dict[int, CheckedWeights] = {}
        # Layouts that passed the checks: only addresses and sizes, so that nothing is kept alive.
        self._passed: dict[tuple[Hashable, ...], None] = {}
        # A number is hashed sooner than what it stands for.
        self._signatures: dict[Hashable, int] = {}
        self._next_number = count().__next__  # not the dict's length: two threads may read the same

    def __reduce__(self) -> tuple[type["KnownWeights"], tuple[()]]:
        return KnownWeights, ()

    def bind(
        self,
        weights: ExpertWeights,
        sources: Sequence[torch.Tensor] = (),
        made: Sequence[torch.Tensor] = (),
    ) -> CheckedWeights:
        """Remember weights that were checked.

        made: the tensors among them that were prepared, from those in `sources`. A write to either
        ends what is remembered.
        """
        versioned = tuple(tensor for tensor in (*sources, *made) if not tensor.is_inference())
        given = {name: t for name, t in vars(weights).items() if t is not None}
        unlike = {id(tensor): tensor for tensor in given.values()}
        order = list(unlike)
        fields = tuple((name, order.index(id(tensor))) for name, tensor in given.items())
        tensors = tuple(unlike.values())
        key, bound = id(weights), self._bound
        alive = weakref.ref(weights, lambda _: bound.pop(key, None))
        pointers = tuple(map(_pointer, tensors))
        signature = fields, tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)
        bound[key] = CheckedWeights(
            alive,
            weights.w1.device,
            tensors,
            signature=self._signatures.setdefault(signature, self._next_number()),
            places=_places(tensors),
            spans=tuple(map(span, tensors)),
            pointers=pointers,
            bits=reduce(or_, pointers, 0),
            unwritten=versioned,
            versions=[*map(_version, versioned)],
            storages=tuple(map(storage_of, sources)),
        )
        if not sources:  # what was prepared is known by the tensor, not by its memory
            self._remember(_layout(given))
        return bound[key]

    def _remember(self, layout: tuple[Hashable, ...] | None) -> None:
        if layout is not None:
            while len(self._passed) >= _MOST_LAYOUTS:
                self._passed.pop(next(iter(self._passed)), None)
            self._passed[layout] = None

    def _bind_alike(self, weights: ExpertWeights, device: torch.device) -> CheckedWeights | None:
        """Bind weights that lie exactly as others did that passed the checks; None if none did."""
        if type(weights) is not ExpertWeights:
            return None
        given = {name: t for name, t in vars(weights).items() if t is not None}
        layout = _layout(given)
        if layout is None or layout not in self._passed or weights.w1.device != device:
            return None
        return self.bind(weights)

    def bound(self, weights: ExpertWeights, device: torch.device) -> CheckedWeights | None:
        """Return what is remembered of these weights; None unless it still holds.

        It holds if they were checked beside tokens on `device` and are where they were: `.data`
        may be set anew, and memory be let go.
        """
        found = self._bound.get(id(weights))
        if found is None or found.weights() is not weights:
            return self._bind_alike(weights, device)
        return found if found.device == device and found.holds() else None


class RecordedCalls:
    """The recordings of one plan.

    A recording serves every call of its signature: with the same shape, strides, dtype, device and
    alignment of each tensor. At most 64 are kept; the oldest goes first.
    """

    def __init__(self) -> None:
        self._recorded: dict[Hashable, RecordedCall | None] = {}

    def find(self, signature: Hashable) -> RecordedCall | None:
        """Return the recording for calls of this signature; None if there is none."""
        return self._recorded.get(signature)

    def wants(self, signature: Hashable) -> bool:
        """Tell whether a call of this signature was never recorded, nor refused."""
        return signature not in self._recorded

    def keep(self, signature: Hashable, recorded: RecordedCall | None) -> None:
        """Remember a recording, or with None that there can be none."""
        if len(self._recorded) >= _MOST_RECORDED:
            del self._recorded[next(iter(self._recorded))]
        self._recorded[signature] = recorded


def signature_and_pointers(
    tensors: Sequence[torch.Tensor], bound: CheckedWeights
) -> tuple[Hashable, list[int]]:
    """Return what a recording with these tensors and weights depends on, and its pointers."""
    pointers = [*map(_pointer, tensors)]
    bits = bound.bits
    for pointer in pointers:
        bits |= pointer
    pointers += bound.pointers
    aligned = True if bits % _ALIGNMENT == 0 else tuple(p % _ALIGNMENT for p in pointers)
    shapes, dtypes = map(_size, tensors), map(_dtype_and_device, tensors)
    return (bound.signature, aligned, *shapes, *map(_stride, tensors), *dtypes), pointers


def _layout(given: Mapping[str, torch.Tensor]) -> tuple[Hashable, ...] | None:
    """Return all that checks of weights read, by field; None if they would have to look closer."""
    found: list[Hashable] = []
    for name, tensor in given.items():
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_neg():
            return None
        try:
            pointer = tensor.data_ptr()
        except (RuntimeError, NotImplementedError):
            return None
        if not pointer:  # freed; memory that was made smaller lies elsewhere
            return None
        found += [name, pointer, tensor.shape, tensor.stride(), tensor.dtype, tensor.device]
    return tuple(found)


def _places(tensors: Sequence[torch.Tensor]) -> list[Hashable]:
    shapes = *map(_size, tensors), *map(_stride, tensors)
    return [*map(_pointer, tensors), *shapes, *map(_dtype, tensors)]
