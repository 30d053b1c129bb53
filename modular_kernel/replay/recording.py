"""Recording of the kernel launches of a call, so that later calls skip its Python code.

The host code of a layer is Python code that decides which kernels to launch. A plan
(`modular_kernel.plan`) runs the host code only in the first call of each signature, that is, of the
shapes, strides, dtypes and alignment of all tensors. The first call runs inside `record_launches`,
which records every launch by `modular_kernel.replay.launch.launch`. Pointers are recorded as
offsets into the inputs of the call. Later calls with the same signature launch the same kernels
with the addresses of their own inputs. A call that runs a torch operation other than a view cannot
be replayed, because the replay would omit the operation. The recorder detects such operations.

This module also contains the cache of checked weights. A replay does not check weights, so it must
recognize weights that were checked before.
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
from modular_kernel.utils.tensor_checks import address_range, is_dense

Replay = Callable[[int, Sequence[int]], None]  # (stream, pointers of the inputs)
# (recorded launches, number of inputs) -> Replay
ReplayFactory = Callable[[Sequence[Any], int], Replay]
# Returns whether a recorded call must run the host code instead of a replay.
BypassCondition = Callable[[], bool]

_MAX_LAYOUTS = 1024  # cached layouts of checked weights, more than models have layers
_MAX_RECORDED = 64  # recordings per plan, which may hold a small CUDA graph each
ALIGNMENT = 16  # bytes; triton specializes kernels for pointers that are divisible by 16
_data_ptr, _get_version = torch.Tensor.data_ptr, attrgetter("_version")
_is_expired: Any = torch.UntypedStorage._expired
_active_recorder: ContextVar["Recorder | None"] = ContextVar("recorder of launches", default=None)


@dataclass(frozen=True)
class RecordedCall:
    """The recorded launches of one signature.

    replays: functions to run in order. A function replays a series of adjacent launches, or runs
        host code between two series.
    bypass_conditions: see `is_bypassed`.
    kept_tensors: tensors that the launches use in addition to the inputs. The references keep them
        alive.
    count: the number of replays, in a list of one element. A plan passes a list that it shares with
        its counters (modular_kernel.utils.call_counters).
    workspace_bytes: size of the workspace that the launches use.
    output_like_x: whether a new output has the shape, layout and dtype of x.
    """

    replays: tuple[Replay, ...]
    bypass_conditions: tuple[BypassCondition, ...]
    kept_tensors: tuple[torch.Tensor, ...]
    count: list[int] = field(default_factory=lambda: [0])
    workspace_bytes: int = 0
    output_like_x: bool = False

    def is_bypassed(self) -> bool:
        """Return whether the call must run the host code now.

        For example, a replay does not call Triton's launch hooks, which a profiler may have set.
        """
        for is_met in self.bypass_conditions:  # noqa: SIM110  per call; a generator is slower
            if is_met():
                return True
        return False

    def replay(self, stream: int, pointers: Sequence[int]) -> None:
        """Launch the recorded kernels on `stream`, with inputs at the addresses `pointers`."""
        for replay in self.replays:
            replay(stream, pointers)


class Recorder(TorchDispatchMode):
    """Records the launches of one call.

    inputs: the tensors of the call, in the order of the pointers of `RecordedCall.replay`.
    refusal_reason: why the call cannot be replayed; "" if it can be replayed.
    is_paused: whether torch operations are allowed now.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refusal_reason = ""
        self.is_paused = False
        self._spans = [address_range(tensor) for tensor in inputs]
        self._launches: list[tuple[ReplayFactory, Any]] = []
        self._bypass_conditions: list[BypassCondition] = []
        self._kept_tensors: list[torch.Tensor] = []
        sorted_spans = sorted(self._spans)
        if any(stop > start for (_, stop), (start, _) in pairwise(sorted_spans)):
            self.refuse("inputs share memory, so pointers are ambiguous")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not (func.is_view or self.is_paused):
            self.refuse(f"{func} is not a launch of modular_kernel")
        return func(*args, **(kwargs or {}))

    def refuse(self, reason: str) -> None:
        """Record that this call cannot be replayed. Only the first reason is stored."""
        self.refusal_reason = self.refusal_reason or reason

    def locate(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return the position of `tensor` in the inputs: (index of the input, byte offset).

        If its memory is outside all inputs, return None, and keep the tensor alive for replays.
        """
        pointer = tensor.data_ptr()
        for index, (start, stop) in enumerate(self._spans):
            if start <= pointer < stop:
                return index, pointer - start
        if tensor.numel():
            self._kept_tensors.append(tensor)
        return None

    def add_launch(
        self, launch: Any, make_replay: ReplayFactory, must_bypass: BypassCondition
    ) -> None:
        """Record a launch.

        launch: the launch, in the form that `make_replay` takes.
        make_replay: makes one Replay of adjacent launches that were added with this function.
        must_bypass: condition under which later calls run the host code.
        """
        self._launches.append((make_replay, launch))
        if must_bypass not in self._bypass_conditions:
            self._bypass_conditions.append(must_bypass)

    def add_host_step(self, step: Callable[[], object]) -> None:
        """Record host code that every replay runs after the launches that are recorded so far."""
        self._launches.append((_make_host_replay, step))

    def add_bypass_condition(self, must_bypass: BypassCondition) -> None:
        """Record a condition under which later calls run the host code instead of a replay."""
        self._bypass_conditions.append(must_bypass)

    def is_bypassed(self) -> bool:
        """Return whether later calls would run the host code now, instead of a replay."""
        return any(is_met() for is_met in self._bypass_conditions)

    def make_recorded_call(self) -> RecordedCall | None:
        """Return the recorded call; None if it cannot be replayed."""
        if self.refusal_reason:
            return None
        replays = tuple(
            make_replay([launch for _, launch in launches], len(self._spans))
            for make_replay, launches in groupby(self._launches, key=itemgetter(0))
        )
        return RecordedCall(replays, tuple(self._bypass_conditions), tuple(self._kept_tensors))


def _make_host_replay(steps: Sequence[Callable[[], object]], num_inputs: int) -> Replay:
    """Return a Replay that runs host code."""

    def replay(stream: int, pointers: Sequence[int]) -> None:
        for step in steps:
            step()

    return replay


# Returns the Recorder of this thread, or None. It is not a function, to save time in every launch.
get_active_recorder = _active_recorder.get


@contextmanager
def record_launches(inputs: Sequence[torch.Tensor]) -> Iterator[Recorder]:
    """Record the launches of this thread inside the block.

    inputs: the tensors whose addresses differ between replays.
    """
    recorder = Recorder(inputs)
    token = _active_recorder.set(recorder)
    try:
        with recorder:
            yield recorder
    finally:
        _active_recorder.reset(token)


def run_in_replays(step: Callable[[], object]) -> None:
    """Run `step` at this point of every replay, if this thread is recording a call.

    This is for host code that is not a launch, such as a collective. The caller must run `step` in
    the recorded call, inside `hide_from_recorder` if it runs torch operations.
    """
    recorder = _active_recorder.get()
    if recorder is not None:
        recorder.add_host_step(step)


def bypass_replay_while(must_bypass: BypassCondition) -> None:
    """Make later calls run the host code while `must_bypass()` is true.

    This has no effect unless this thread is recording a call.
    """
    recorder = _active_recorder.get()
    if recorder is not None:
        recorder.add_bypass_condition(must_bypass)


@contextmanager
def ignore_torch_operations() -> Iterator[None]:
    """Allow torch operations inside the block, although the call is recorded.

    Replays omit these operations.
    """
    recorder = _active_recorder.get()
    if recorder is None:
        yield
        return
    recorder.is_paused = True
    try:
        yield
    finally:
        recorder.is_paused = False


@contextmanager
def hide_from_recorder() -> Iterator[None]:
    """Disable the dispatch mode of the recorder inside the block.

    Unlike `ignore_torch_operations`, this includes operations that other threads run for the block,
    such as the threads of gloo.
    """
    if _active_recorder.get() is None:
        yield
        return
    with _disable_current_modes():
        yield


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of a device is being captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def can_keep_buffers(device: torch.device) -> bool:
    """Return whether memory that is allocated now can be kept for later calls.

    During a capture, and during the warm-up of torch.compile's CUDA graphs, allocations come from
    the memory pool of the graph, which replays of the graph overwrite.
    """
    return device.type != "cuda" or not (
        is_graph_trees_stream(device_index(device)) or is_capturing(device)
    )


def is_graph_trees_stream(index: int) -> bool:
    """Return whether torch.compile's CUDA graphs use the current stream of GPU `index`.

    With mode="reduce-overhead", Inductor warms up and captures a model on a stream of its own.
    Memory that is allocated on this stream belongs to the pool of the graphs.
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
    """Return the index of a GPU (of the current GPU if it has no index), or -1 for the CPU."""
    index: int | None = device.index
    if device.type != "cuda":
        return -1
    return torch.cuda.current_device() if index is None else index


def make_weak_storage_ref(tensor: torch.Tensor) -> StorageWeakRef:
    """Return a weak reference to the storage of a tensor."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


# A tensor, and its pointer, shape, stride and dtype.
_Snapshot = tuple[torch.Tensor, int, torch.Size, tuple[int, ...], torch.dtype]


def _take_snapshot(tensor: torch.Tensor) -> _Snapshot:
    return tensor, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


# The class is never modified, but not frozen, because the constructor of a frozen dataclass is
# slower. A call with new ExpertWeights constructs one.
@dataclass(eq=False, slots=True)
class CheckedWeights:
    """Weights that passed the checks, and everything about them that a recording depends on.

    tensors: the distinct tensors of the weights.
    signature: number that identifies the layouts and dtypes of the tensors.
    snapshots: each tensor, with its pointer, shape, stride and dtype at the time of the check.
        Empty for `FixedWeights`.
    spans: (start, stop) addresses of each tensor.
    pointers: address of each tensor.
    pointer_bits: bitwise OR of all addresses.
    versioned_tensors: prepared tensors and their sources, which must not be written to. Inference
        tensors are omitted, because they have no version counter.
    versions: version counters of `versioned_tensors`.
    sources: the tensors from which prepared tensors were derived.
    storage_refs: references to the storages of `sources`. Addresses alone are not sufficient,
        because they can be reused after a storage is resized to 0.
    prepared: the weights to use instead, if the kernel prepared `weights` automatically.
    is_postponed: whether a later call prepares the weights, because memory that is allocated now
        belongs to a CUDA graph.
    """

    weights: "weakref.ref[ExpertWeights]"
    device: torch.device
    tensors: tuple[torch.Tensor, ...]
    signature: int
    snapshots: tuple[_Snapshot, ...]
    spans: tuple[tuple[int, int], ...]
    pointers: tuple[int, ...]
    pointer_bits: int
    versioned_tensors: tuple[torch.Tensor, ...]
    versions: list[int]
    sources: tuple[torch.Tensor, ...]
    storage_refs: tuple[StorageWeakRef, ...]
    prepared: ExpertWeights | None = None
    is_postponed: bool = False

    def is_valid(self) -> bool:
        """Return whether no tensor has moved, and no tracked tensor has been written."""
        if self.versioned_tensors and self.versions != [*map(_get_version, self.versioned_tensors)]:
            return False
        if self.sources:
            for source, storage in zip(self.sources, self.storage_refs, strict=True):
                if _is_expired(storage.cdata) or source.untyped_storage()._cdata != storage.cdata:
                    return False
        for tensor, pointer, shape, stride, dtype in self.snapshots:
            if (
                tensor.data_ptr() != pointer
                or tensor.shape != shape
                or tensor.stride() != stride
                or tensor.dtype is not dtype
            ):
                return False
        return True


@dataclass(frozen=True)
class _LayoutInfo:
    """The fields of `CheckedWeights` that depend only on the layout of distinct tensors."""

    signature: int
    spans: tuple[tuple[int, int], ...]
    pointers: tuple[int, ...]
    pointer_bits: int


# The result of a Preparer: weights that include the prepared tensors, the sources of these tensors,
# and the prepared tensors.
PreparedWeights = tuple[ExpertWeights, Sequence[torch.Tensor], Sequence[torch.Tensor]]


class Preparer(Protocol):
    """Function that prepares a kernel's weights on their first use."""

    def __call__(self, weights: ExpertWeights) -> PreparedWeights | None:
        """Prepare checked weights. Returns None if they are not prepared."""

    def is_postponed(self, device: torch.device) -> bool:
        """Return whether a later call prepares weights that could not be prepared now."""


class CheckedWeightsCache:
    """Cache of the weights that a kernel and its plans have checked.

    The cache holds weak references, so it does not keep weights alive. A new ExpertWeights is not
    checked if its tensors have the same addresses and layouts as checked tensors. This supports
    callers that create an ExpertWeights for each call. A copied or unpickled cache starts empty.

    prepare: prepares weights on their first use; None disables this.
    """

    def __init__(self, prepare: Preparer | None = None) -> None:
        self._prepare = prepare
        self._entries: dict[int, CheckedWeights] = {}
        # Layouts that passed the checks. They hold addresses and keep no tensors alive. The value
        # is None if a tensor of the weights occurred twice, or if the weights were prepared.
        self._checked_layouts: dict[tuple[Hashable, ...], _LayoutInfo | None] = {}
        # Signatures are numbered because an int is faster to hash than a tuple of layouts.
        self._signature_numbers: dict[Hashable, int] = {}
        # `len(self._signature_numbers)` would not be atomic: two threads could get one number.
        self._next_number = count().__next__

    def __reduce__(self) -> tuple[type["CheckedWeightsCache"], tuple[Any]]:
        return CheckedWeightsCache, (self._prepare,)

    def add(
        self,
        weights: ExpertWeights,
        sources: Sequence[torch.Tensor] = (),
        prepared_tensors: Sequence[torch.Tensor] = (),
    ) -> CheckedWeights:
        """Add checked weights to the cache, and prepare them if `prepare` was given.

        sources: the tensors that the caller's preparation of the weights has read. A write to these
            tensors invalidates the entry.
        prepared_tensors: the tensors that the caller's preparation has written. A write to these
            tensors also invalidates the entry.
        """
        tensors_by_field = {name: t for name, t in vars(weights).items() if t is not None}
        # Weights that the caller prepared are identified by object, not by memory.
        return self._add(
            weights,
            tensors_by_field,
            sources,
            prepared_tensors,
            None if sources else _make_layout_key(tensors_by_field),
        )

    def _add(
        self,
        weights: ExpertWeights,
        tensors_by_field: dict[str, torch.Tensor],
        sources: Sequence[torch.Tensor],
        prepared_tensors: Sequence[torch.Tensor],
        layout: tuple[Hashable, ...] | None,
    ) -> CheckedWeights:
        """Add checked weights, and prepare them if `prepare` was given (see `add`).

        tensors_by_field: the tensors of `weights` by field.
        layout: result of `_make_layout_key`, to be stored as a layout that passed the checks; or
            None.
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
            tensors_by_field = {name: t for name, t in vars(run_weights).items() if t is not None}
        prepare, device = self._prepare, weights.w1.device
        is_postponed = not prepared_tensors and prepare is not None and prepare.is_postponed(device)
        versioned_tensors = tuple(
            tensor for tensor in (*sources, *prepared_tensors) if not tensor.is_inference()
        )
        tensor_by_id = {id(tensor): tensor for tensor in tensors_by_field.values()}
        tensors = tuple(tensor_by_id.values())
        has_distinct_tensors = run_weights is weights and len(tensor_by_id) == len(tensors_by_field)
        layout_info = (
            self._checked_layouts.get(layout)
            if layout is not None and has_distinct_tensors
            else None
        )
        if layout_info is None:
            layout_info = self._make_layout_info(tensors_by_field, tensors, list(tensor_by_id))
            if layout is not None and self._checked_layouts.get(layout) is None:
                self._store_layout(layout, layout_info if has_distinct_tensors else None)
        key, entries = id(weights), self._entries
        entries[key] = entry = CheckedWeights(
            weakref.ref(weights, lambda _: entries.pop(key, None)),
            device,
            tensors,
            signature=layout_info.signature,
            snapshots=() if type(weights) is FixedWeights else tuple(map(_take_snapshot, tensors)),
            spans=layout_info.spans,
            pointers=layout_info.pointers,
            pointer_bits=layout_info.pointer_bits,
            versioned_tensors=versioned_tensors,
            versions=[*map(_get_version, versioned_tensors)],
            sources=tuple(sources),
            storage_refs=tuple(map(make_weak_storage_ref, sources)),
            prepared=None if auto_prepared is None else run_weights,
            is_postponed=is_postponed,
        )
        return entry

    def _make_layout_info(
        self,
        tensors_by_field: dict[str, torch.Tensor],
        tensors: tuple[torch.Tensor, ...],
        ids: list[int],
    ) -> _LayoutInfo:
        """Return the layout information of weights.

        tensors_by_field: the tensors by field.
        tensors: the tensors without duplicates.
        ids: object ids of `tensors`.
        """
        pointers = tuple(map(_data_ptr, tensors))
        fields = tuple((name, ids.index(id(tensor))) for name, tensor in tensors_by_field.items())
        signature = fields, tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)
        return _LayoutInfo(
            self._signature_numbers.setdefault(signature, self._next_number()),
            tuple(map(address_range, tensors)),
            pointers,
            reduce(or_, pointers, 0),
        )

    def _store_layout(self, layout: tuple[Hashable, ...], layout_info: _LayoutInfo | None) -> None:
        while len(self._checked_layouts) >= _MAX_LAYOUTS:
            self._checked_layouts.pop(next(iter(self._checked_layouts)), None)
        self._checked_layouts[layout] = layout_info

    def _add_known_layout(
        self, weights: ExpertWeights, device: torch.device
    ) -> CheckedWeights | None:
        """Add weights whose layout has passed the checks. Returns None for other weights."""
        if type(weights) is not ExpertWeights and type(weights) is not FixedWeights:
            return None
        tensors_by_field = {name: t for name, t in vars(weights).items() if t is not None}
        layout = _make_layout_key(tensors_by_field)
        if layout is None or layout not in self._checked_layouts or weights.w1.device != device:
            return None
        return self._add(weights, tensors_by_field, (), (), layout)

    def lookup(self, weights: ExpertWeights, device: torch.device) -> CheckedWeights | None:
        """Return the entry of these weights, or None if there is no valid entry.

        An entry is valid if the weights were checked with tokens on `device`, and if the memory of
        their tensors is unchanged. An assignment to `.data` changes the memory.
        """
        checked = self._entries.get(id(weights))
        if checked is None or checked.weights() is not weights:
            return self._add_known_layout(weights, device)
        if checked.is_postponed and can_keep_buffers(device):
            return None
        return checked if checked.device == device and checked.is_valid() else None


class RecordedCalls:
    """The recorded calls of one plan, by signature.

    Calls have the same signature if the shape, strides, dtype, device and 16-byte alignment of each
    tensor are equal. At most 64 recordings are kept. The oldest recording is dropped first.

    replayable: whether any call was recorded.
    """

    def __init__(self) -> None:
        self.replayable = False
        self._recorded: dict[Hashable, RecordedCall | None] = {}
        self._refused: dict[Hashable, str] = {}
        # find(signature) returns a recording or None. This is not a method, to save time per call.
        self.find = self._recorded.get

    def is_new(self, signature: Hashable) -> bool:
        """Return whether no call with this signature has been recorded or refused."""
        return signature not in self._recorded

    def refusal_reason(self, signature: Hashable) -> str:
        """Return why calls of this signature cannot be replayed; "" if they can."""
        return self._refused.get(signature, "")

    def store(
        self, signature: Hashable, recorded: RecordedCall | None, refusal_reason: str = ""
    ) -> None:
        """Store a recording, or None and a reason if calls of the signature cannot be replayed."""
        if len(self._recorded) >= _MAX_RECORDED:
            oldest = next(iter(self._recorded))
            del self._recorded[oldest]
            self._refused.pop(oldest, None)
        self._recorded[signature] = recorded
        if recorded is None:
            self._refused[signature] = refusal_reason
        else:
            self.replayable = True


def get_signature_and_pointers(
    tensors: Sequence[torch.Tensor], weights: CheckedWeights
) -> tuple[Hashable, list[int]]:
    """Return the signature of a call and the addresses of its tensors.

    tensors: the tensors of the call, without the weights.
    """
    layout, pointers = get_layout_and_pointers(tensors, weights.pointers, weights.pointer_bits)
    return (weights.signature, layout), pointers


def get_layout_and_pointers(
    tensors: Sequence[torch.Tensor], others: Sequence[int] = (), pointer_bits: int = 0
) -> tuple[Hashable, list[int]]:
    """Return a hashable layout of tensors, and their addresses followed by `others`.

    The layout consists of shapes, strides, dtypes, devices and alignment. The alignment is True if
    all addresses are divisible by 16, and otherwise a tuple of remainders.

    others: addresses of further tensors.
    pointer_bits: bitwise OR of `others`, which shows whether all of them are aligned.
    """
    if len(tensors) == 3:  # a call without adapters; the unrolled code is a third faster
        a, b, c = tensors
        p, q, r = a.data_ptr(), b.data_ptr(), c.data_ptr()
        pointers, pointer_bits = [p, q, r, *others], pointer_bits | p | q | r
        aligned = True if pointer_bits % ALIGNMENT == 0 else tuple(p % ALIGNMENT for p in pointers)
        return (
            aligned, a.shape, b.shape, c.shape, a.stride(), b.stride(), c.stride(),
            a.dtype, b.dtype, c.dtype, a.device, b.device, c.device,
        ), pointers  # fmt: skip
    pointers = [*map(_data_ptr, tensors)]
    for pointer in pointers:
        pointer_bits |= pointer
    pointers += others
    aligned = True if pointer_bits % ALIGNMENT == 0 else tuple(p % ALIGNMENT for p in pointers)
    return (aligned, *[(t.shape, t.stride(), t.dtype, t.device) for t in tensors]), pointers


def _make_layout_key(tensors: Mapping[str, torch.Tensor]) -> tuple[Hashable, ...] | None:
    """Return everything that the checks of weights depend on, as a hashable tuple.

    Returns None for a tensor subclass, and for a tensor whose storage was freed, because their
    memory does not identify them.

    tensors: the tensors by field of ExpertWeights.
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
