"""Records the launches of a planned call, so that later calls skip the parts' host code.

The first call of each signature in a plan runs the parts' host code inside `recording`. Every
launch made through `modular_kernel.replay.launch` is recorded, together with the input that each of
its pointers points into. Later calls with the same signature launch the same kernels with their own
pointers. A call that runs a torch operation other than a view cannot be replayed; the recorder
detects this.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import reduce
from itertools import count, groupby, pairwise
from operator import attrgetter, itemgetter, or_
from sys import modules
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from modular_kernel.tensors import ExpertWeights, FixedWeights
from modular_kernel.utils.tensor_checks import is_dense, span

Replay = Callable[[int, Sequence[int]], None]  # (stream, pointers of the inputs)
Replayer = Callable[[Sequence[Any], int], Replay]  # (recorded launches, number of inputs) -> Replay
HookCheck = Callable[
    [], bool
]  # whether a profiler's launch hooks are active; replay bypasses hooks

_MAX_LAYOUTS = 1024  # remembered layouts of checked weights: more than the layers of any model
_MAX_RECORDED = 64  # recordings per plan; each may hold a small CUDA graph
ALIGNMENT = 16  # bytes; triton specializes kernels on pointers divisible by it
_pointer, _version = torch.Tensor.data_ptr, attrgetter("_version")
_expired: Any = torch.UntypedStorage._expired
_recorder: ContextVar["Recorder | None"] = ContextVar("recorder of launches", default=None)


@dataclass(frozen=True)
class RecordedCall:
    """The recorded launches of one signature.

    replays: each replays adjacent launches, or runs host code between them, in order.
    hook_checks: see `hooks_active`; also other conditions under which the call is not replayed.
    kept_tensors: tensors that the launches use besides the inputs; referenced to keep them alive.
    count: a list with one number, the count of replays. A plan replaces it
        (modular_kernel.utils.call_counters).
    workspace_bytes: size of the workspace that the launches use.
    output_like_x: whether a new output has the shape, layout and dtype of x.
    """

    replays: tuple[Replay, ...]
    hook_checks: tuple[HookCheck, ...]
    kept_tensors: tuple[torch.Tensor, ...]
    count: list[int] = field(default_factory=lambda: [0])
    workspace_bytes: int = 0
    output_like_x: bool = False

    def hooks_active(self) -> bool:
        """Return whether a profiler is active, which would miss launches that bypass its hooks."""
        for is_active in self.hook_checks:  # noqa: SIM110  runs in every call; a generator is slower
            if is_active():
                return True
        return False

    def replay(self, stream: int, pointers: Sequence[int]) -> None:
        """Launch everything on `stream`, for inputs at `pointers`."""
        for replay in self.replays:
            replay(stream, pointers)


class Recorder(TorchDispatchMode):
    """Records the launches of one call.

    A call that cannot be replayed is marked: `refusal_reason` is the reason, or "".

    inputs: the call's tensors, in the order in which `replay` takes their pointers.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refusal_reason = ""
        self.paused = False
        self._spans = [span(tensor) for tensor in inputs]
        self._launches: list[tuple[Replayer, Any]] = []
        self._hook_checks: list[HookCheck] = []
        self._kept_tensors: list[torch.Tensor] = []
        ordered = sorted(self._spans)
        if any(stop > start for (_, stop), (start, _) in pairwise(ordered)):
            self.refuse("inputs share memory, so pointers are ambiguous")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not (func.is_view or self.paused):
            self.refuse(f"{func} is not a launch of modular_kernel")
        return func(*args, **(kwargs or {}))

    def refuse(self, reason: str) -> None:
        """Mark this call as not replayable. Only the first reason is stored."""
        self.refusal_reason = self.refusal_reason or reason

    def locate(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return (index of the input, byte offset) of the memory of `tensor`.

        Return None for memory outside all inputs, and keep the tensor alive for replays. An empty
        tensor is not kept, because nothing reads it.
        """
        pointer = tensor.data_ptr()
        for index, (start, stop) in enumerate(self._spans):
            if start <= pointer < stop:
                return index, pointer - start
        if tensor.numel():
            self._kept_tensors.append(tensor)
        return None

    def note(self, launch: Any, replayer: Replayer, hooks_active: HookCheck) -> None:
        """Record a launch.

        launch: in the form that `replayer` takes.
        replayer: combines adjacent launches with the same replayer into one Replay.
        hooks_active: see `HookCheck`.
        """
        self._launches.append((replayer, launch))
        if hooks_active not in self._hook_checks:
            self._hook_checks.append(hooks_active)

    def note_step(self, step: Callable[[], object]) -> None:
        """Record host code that every replay runs, after the launches recorded so far."""
        self._launches.append((_replay_steps, step))

    def note_obstacle(self, is_present: HookCheck) -> None:
        """Record a condition under which later calls run the parts' host code, not a replay."""
        self._hook_checks.append(is_present)

    def recorded(self) -> RecordedCall | None:
        """Return the recorded call; None if it cannot be replayed."""
        if self.refusal_reason:
            return None
        replays = tuple(
            replayer([launch for _, launch in launches], len(self._spans))
            for replayer, launches in groupby(self._launches, key=itemgetter(0))
        )
        return RecordedCall(replays, tuple(self._hook_checks), tuple(self._kept_tensors))


def _replay_steps(steps: Sequence[Callable[[], object]], inputs: int) -> Replay:
    """Return a function that runs host code in order; a Replayer."""

    def replay(stream: int, pointers: Sequence[int]) -> None:
        for step in steps:
            step()

    return replay


# recorder(): the active Recorder of this thread, or None. Called for every launch.
recorder = _recorder.get


@contextmanager
def recording(inputs: Sequence[torch.Tensor]) -> Iterator[Recorder]:
    """Record the launches of this thread inside the block."""
    recorder = Recorder(inputs)
    token = _recorder.set(recorder)
    try:
        with recorder:
            yield recorder
    finally:
        _recorder.reset(token)


def repeat_in_replays(step: Callable[[], object]) -> None:
    """If this thread records a call, run `step` at this point in every replay of it.

    For host code that launches nothing by itself, such as a collective. The caller runs the code of
    the recorded call, with `unrecorded` around torch operations.
    """
    recorder = _recorder.get()
    if recorder is not None:
        recorder.note_step(step)


def replay_unless(is_present: HookCheck) -> None:
    """If this thread records a call, do not replay it while `is_present()` is true."""
    recorder = _recorder.get()
    if recorder is not None:
        recorder.note_obstacle(is_present)


@contextmanager
def pause_recording() -> Iterator[None]:
    """Ignore torch operations inside the block, which only observe the call."""
    recorder = _recorder.get()
    if recorder is None:
        yield
        return
    recorder.paused = True
    try:
        yield
    finally:
        recorder.paused = False


@contextmanager
def unrecorded() -> Iterator[None]:
    """Hide the torch operations of the block from the recorder of this thread, if there is one.

    Also those that threads of torch run for it, as gloo does.
    """
    if _recorder.get() is None:
        yield
        return
    with _disable_current_modes():
        yield


def capturing(device: torch.device) -> bool:
    """Return whether the current stream of a device is being captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def may_keep_buffers(device: torch.device) -> bool:
    """Return whether memory allocated now can be kept for later calls.

    During a capture, and during the warm-up of torch.compile's CUDA graphs, allocations come from
    the memory pool of the graph, and every replay of it overwrites them.
    """
    return device.type != "cuda" or not (in_graph_trees(device_index(device)) or capturing(device))


def in_graph_trees(index: int) -> bool:
    """Return whether the current stream of GPU `index` is that of torch.compile's CUDA graphs.

    With mode="reduce-overhead", Inductor warms up and captures a model on this stream. Memory
    allocated there belongs to the pool of the graphs. Other streams, such as those of eager calls
    beside a compiled model, are not affected.
    """
    trees = modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    manager: Any = trees.get_manager(index, create_if_none_exists=False)
    if manager is None:
        return False
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    return bool(manager.stream.cuda_stream == stream)


def device_index(device: torch.device) -> int:
    """Return a GPU's index (the current GPU if unspecified), or -1 for the CPU."""
    index: int | None = device.index
    if device.type != "cuda":
        return -1
    return torch.cuda.current_device() if index is None else index


def storage_of(tensor: torch.Tensor) -> StorageWeakRef:
    """Return a weak reference to the storage of a tensor."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


# A tensor and its pointer, shape, stride and dtype.
_Place = tuple[torch.Tensor, int, torch.Size, tuple[int, ...], torch.dtype]


def _place(tensor: torch.Tensor) -> _Place:
    return tensor, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


@dataclass(eq=False, slots=True)  # one is made for each call with new ExpertWeights: not frozen
class CheckedWeights:
    """Weights that passed the checks, and everything about them that a recording depends on.

    It is not modified.

    tensors: the distinct tensors of the weights.
    signature: number that identifies the layouts and dtypes of the tensors.
    places: each tensor, with its pointer, shape, stride and dtype at the time of the check. Empty
        for `FixedWeights`.
    spans: address range of each tensor.
    pointers, bits: address of each tensor, and the bitwise OR of all addresses.
    unwritten, versions: prepared tensors and their sources, which must not be written to, and their
        version counters. Inference tensors have no counter and are not tracked.
    sources, storages: tensors that the prepared ones were derived from, and their storages.
        Storages are compared, too, because after one is resized to 0, another can have its address.
    prepared: the weights to use instead, if the kernel prepared them on its own; else None.
    postponed: whether the kernel will prepare them in a later call, outside of the capture of a
        CUDA graph.
    """

    weights: "weakref.ref[ExpertWeights]"
    device: torch.device
    tensors: tuple[torch.Tensor, ...]
    signature: int
    places: tuple[_Place, ...]
    spans: tuple[tuple[int, int], ...]
    pointers: tuple[int, ...]
    bits: int
    unwritten: tuple[torch.Tensor, ...]
    versions: list[int]
    sources: tuple[torch.Tensor, ...]
    storages: tuple[StorageWeakRef, ...]
    prepared: ExpertWeights | None = None
    postponed: bool = False

    def is_valid(self) -> bool:
        """Return whether no tensor has moved, and no tracked tensor has been written."""
        if self.unwritten and self.versions != [*map(_version, self.unwritten)]:
            return False
        if self.sources:
            for source, storage in zip(self.sources, self.storages, strict=True):
                if _expired(storage.cdata) or source.untyped_storage()._cdata != storage.cdata:
                    return False
        for tensor, pointer, shape, stride, dtype in self.places:
            if (
                tensor.data_ptr() != pointer
                or tensor.shape != shape
                or tensor.stride() != stride
                or tensor.dtype is not dtype
            ):
                return False
        return True


@dataclass(frozen=True)
class _LayoutFacts:
    """Fields of `CheckedWeights` that depend only on the layout, if no tensor occurs twice."""

    signature: int
    spans: tuple[tuple[int, int], ...]
    pointers: tuple[int, ...]
    bits: int


# The result of a Preparer: weights that include the prepared tensors, the sources of these tensors,
# and the prepared tensors.
Prepared = tuple[ExpertWeights, Sequence[torch.Tensor], Sequence[torch.Tensor]]


class Preparer(Protocol):
    """Preparation of a kernel's weights on their first use."""

    def __call__(self, weights: ExpertWeights) -> Prepared | None:
        """Prepare checked weights; return None to use them as they are."""

    def is_postponed(self, device: torch.device) -> bool:
        """Return whether a later call shall prepare weights that were not prepared now."""


class CheckedWeightsCache:
    """Cache of the weights that a kernel and its plans have checked.

    The cache holds weak references, so it does not keep weights alive. An ExpertWeights whose
    tensors have the same addresses and layouts as checked ones, for example one that is created for
    each call, is not checked again. A copied or unpickled cache starts empty.

    prepare: called on the first use of weights; None uses them as they are.
    """

    def __init__(self, prepare: Preparer | None = None) -> None:
        self._prepare = prepare
        self._bound: dict[int, CheckedWeights] = {}
        # Layouts that passed the checks; they consist of numbers and keep nothing alive. The facts
        # are None if weights of the layout had duplicate or prepared tensors.
        self._passed: dict[tuple[Hashable, ...], _LayoutFacts | None] = {}
        # Number of each signature. An int is faster to hash.
        self._signatures: dict[Hashable, int] = {}
        self._next_number = count().__next__  # atomic; the dict's length could be read twice

    def __reduce__(self) -> tuple[type["CheckedWeightsCache"], tuple[Any]]:
        return CheckedWeightsCache, (self._prepare,)

    def bind(
        self,
        weights: ExpertWeights,
        sources: Sequence[torch.Tensor] = (),
        prepared_tensors: Sequence[torch.Tensor] = (),
    ) -> CheckedWeights:
        """Add checked weights to the cache, and prepare them if the kernel does so on its own.

        A write to `sources` or `prepared_tensors` invalidates the entry.

        sources, prepared_tensors: if `weights` have been prepared: the tensors that were read, and
            those that were written.
        """
        by_name = {name: t for name, t in vars(weights).items() if t is not None}
        # Explicitly prepared tensors are identified by object, not by memory.
        return self._bind(
            weights, by_name, sources, prepared_tensors, None if sources else _layout(by_name)
        )

    def _bind(
        self,
        weights: ExpertWeights,
        by_name: dict[str, torch.Tensor],
        sources: Sequence[torch.Tensor],
        prepared_tensors: Sequence[torch.Tensor],
        layout: tuple[Hashable, ...] | None,
    ) -> CheckedWeights:
        """Do what `bind` does.

        by_name: the tensors of `weights` by field.
        layout: see `_layout`. It is remembered as one that passed the checks, unless it is None.
        """
        auto_prepared = (
            None if prepared_tensors or self._prepare is None else self._prepare(weights)
        )
        run_weights, sources, prepared_tensors = auto_prepared or (
            weights,
            sources,
            prepared_tensors,
        )
        if run_weights is not weights:
            by_name = {name: t for name, t in vars(run_weights).items() if t is not None}
        prepare, device = self._prepare, weights.w1.device
        postponed = not prepared_tensors and prepare is not None and prepare.is_postponed(device)
        versioned = tuple(
            tensor for tensor in (*sources, *prepared_tensors) if not tensor.is_inference()
        )
        unique = {id(tensor): tensor for tensor in by_name.values()}
        tensors = tuple(unique.values())
        has_distinct_tensors = run_weights is weights and len(unique) == len(by_name)
        facts = self._passed.get(layout) if layout is not None and has_distinct_tensors else None
        if facts is None:
            facts = self._facts(by_name, tensors, list(unique))
            if layout is not None and self._passed.get(layout) is None:
                self._remember(layout, facts if has_distinct_tensors else None)
        key, bound = id(weights), self._bound
        bound[key] = entry = CheckedWeights(
            weakref.ref(weights, lambda _: bound.pop(key, None)),
            device,
            tensors,
            signature=facts.signature,
            places=() if type(weights) is FixedWeights else tuple(map(_place, tensors)),
            spans=facts.spans,
            pointers=facts.pointers,
            bits=facts.bits,
            unwritten=versioned,
            versions=[*map(_version, versioned)],
            sources=tuple(sources),
            storages=tuple(map(storage_of, sources)),
            prepared=None if auto_prepared is None else run_weights,
            postponed=postponed,
        )
        return entry

    def _facts(
        self, by_name: dict[str, torch.Tensor], tensors: tuple[torch.Tensor, ...], order: list[int]
    ) -> _LayoutFacts:
        """Return the facts of weights.

        by_name: their tensors by field.
        tensors, order: the same without duplicates, and their object ids.
        """
        pointers = tuple(map(_pointer, tensors))
        fields = tuple((name, order.index(id(tensor))) for name, tensor in by_name.items())
        signature = fields, tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)
        return _LayoutFacts(
            self._signatures.setdefault(signature, self._next_number()),
            tuple(map(span, tensors)),
            pointers,
            reduce(or_, pointers, 0),
        )

    def _remember(self, layout: tuple[Hashable, ...], facts: _LayoutFacts | None) -> None:
        while len(self._passed) >= _MAX_LAYOUTS:
            self._passed.pop(next(iter(self._passed)), None)
        self._passed[layout] = facts

    def _bind_known_layout(
        self, weights: ExpertWeights, device: torch.device
    ) -> CheckedWeights | None:
        """Add weights whose layout has passed the checks before; return None if it has not."""
        if type(weights) is not ExpertWeights and type(weights) is not FixedWeights:
            return None
        by_name = {name: t for name, t in vars(weights).items() if t is not None}
        layout = _layout(by_name)
        if layout is None or layout not in self._passed or weights.w1.device != device:
            return None
        return self._bind(weights, by_name, (), (), layout)

    def bound(self, weights: ExpertWeights, device: torch.device) -> CheckedWeights | None:
        """Return the entry of these weights, or None if it is missing or no longer valid.

        It is valid if the weights were checked with tokens on `device`, and if their tensors still
        have the same memory. An assignment to `.data` changes the memory.
        """
        checked = self._bound.get(id(weights))
        if checked is None or checked.weights() is not weights:
            return self._bind_known_layout(weights, device)
        if checked.postponed and may_keep_buffers(device):
            return None
        return checked if checked.device == device and checked.is_valid() else None


class RecordedCalls:
    """The recorded calls of one plan, by signature.

    Calls have the same signature if the shape, strides, dtype, device and 16-byte alignment of each
    tensor are equal. At most 64 recordings are kept; the oldest is dropped first.

    replayable: whether a call was recorded.
    """

    def __init__(self) -> None:
        self.replayable = False
        self._recorded: dict[Hashable, RecordedCall | None] = {}
        self._refused: dict[Hashable, str] = {}
        # find(signature): its recording, or None. Called in every call.
        self.find = self._recorded.get

    def is_new(self, signature: Hashable) -> bool:
        """Return whether no call with this signature has been recorded or refused."""
        return signature not in self._recorded

    def why_refused(self, signature: Hashable) -> str:
        """Return why calls of this signature cannot be replayed; "" if they can."""
        return self._refused.get(signature, "")

    def keep(
        self, signature: Hashable, recorded: RecordedCall | None, refusal_reason: str = ""
    ) -> None:
        """Store a recording, or None and the reason if the signature cannot be replayed."""
        if len(self._recorded) >= _MAX_RECORDED:
            oldest = next(iter(self._recorded))
            del self._recorded[oldest]
            self._refused.pop(oldest, None)
        self._recorded[signature] = recorded
        if recorded is None:
            self._refused[signature] = refusal_reason
        else:
            self.replayable = True


def signature_and_pointers(
    tensors: Sequence[torch.Tensor], bound: CheckedWeights
) -> tuple[Hashable, list[int]]:
    """Return the signature of a call with these tensors and weights, and its pointers."""
    layout, pointers = layout_and_pointers(tensors, bound.pointers, bound.bits)
    return (bound.signature, layout), pointers


def layout_and_pointers(
    tensors: Sequence[torch.Tensor], others: Sequence[int] = (), bits: int = 0
) -> tuple[Hashable, list[int]]:
    """Return (layouts of the tensors, as far as a recording depends on them; their addresses).

    others: further addresses, appended to those of `tensors`.
    bits: bitwise OR of `others`.
    """
    if len(tensors) == 3:  # a call without adapters; a third faster than the loop below
        a, b, c = tensors
        p, q, r = a.data_ptr(), b.data_ptr(), c.data_ptr()
        pointers, bits = [p, q, r, *others], bits | p | q | r
        aligned = True if bits % ALIGNMENT == 0 else tuple(p % ALIGNMENT for p in pointers)
        return (
            aligned, a.shape, b.shape, c.shape, a.stride(), b.stride(), c.stride(),
            a.dtype, b.dtype, c.dtype, a.device, b.device, c.device,
        ), pointers  # fmt: skip
    pointers = [*map(_pointer, tensors)]
    for pointer in pointers:
        bits |= pointer
    pointers += others
    aligned = True if bits % ALIGNMENT == 0 else tuple(p % ALIGNMENT for p in pointers)
    return (aligned, *[(t.shape, t.stride(), t.dtype, t.device) for t in tensors]), pointers


def _layout(tensors: Mapping[str, torch.Tensor]) -> tuple[Hashable, ...] | None:
    """Return everything that the checks of weights depend on, by field.

    Return None if a tensor has no memory of its own that identifies it: a tensor subclass, or one
    whose storage was freed.
    """
    entries: list[Hashable] = []
    for name, tensor in tensors.items():
        if not is_dense(tensor):
            return None
        try:
            pointer, available = tensor.data_ptr(), tensor.untyped_storage().nbytes()
        except (RuntimeError, NotImplementedError):
            return None
        if not pointer:  # freed
            return None
        location = name, pointer, available, tensor.storage_offset()
        entries += [*location, tensor.shape, tensor.stride(), tensor.dtype, tensor.device]
    return tuple(entries)
