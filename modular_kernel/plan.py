"""Plans: a kernel bound to its buffers and to the launches recorded in its first calls.

`kernel.plan()` returns a `Plan`. Direct calls, `kernel(x, weights, routing)`, also use plans, which
`CallPlans` creates: one for each CUDA stream and each number of tokens rounded up to a power of
two. Launches on a stream run in order, so all kernels share one workspace per stream. Calls of more
than 2,048 tokens allocate a workspace and free it on return. Their recordings hold offsets into the
workspace instead of addresses. Calls that are captured in a CUDA graph do not use a plan.
"""

import threading
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from modular_kernel import validate
from modular_kernel.errors import ConfigurationError, DeviceError, StateError
from modular_kernel.execution import Execution, Pending, to_exception
from modular_kernel.replay import modes, recording
from modular_kernel.replay.recording import can_keep_buffers, device_index, is_graph_trees_stream
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.utils import call_counters, forks
from modular_kernel.utils.tensor_checks import address_range, needs_gradient
from modular_kernel.workspace import BufferSpec, Workspace, workspace_bytes

_C: Any = torch._C
_is_grad_enabled = torch.is_grad_enabled
_forward_ad: Any = torch.autograd.forward_ad
_profiler: Any = torch.autograd.profiler


class BasePlan(ABC):
    """Base class of plans: runs calls of at most `problem.tokens` tokens, or replays them.

    Weights are checked once per ExpertWeights object, and again if the memory of a tensor was
    replaced. If the kernel is `replayable`, the launches of the first call of each signature
    (shapes, strides, dtypes and alignment of all tensors) are recorded, and later calls replay
    them. Subclasses set `_workspace` or override `_get_workspace`, and define `_get_output`.
    """

    _workspace: Workspace
    _reuses_outputs = False  # whether calls without `out` write to a buffer of the plan
    _keeps_workspace = True  # whether the workspace has the same address in all calls

    def __init__(self, kernel: Execution, problem: Problem, device: torch.device) -> None:
        self.kernel, self.problem = kernel, problem
        self._device = device
        self._index: int | None = device.index if device.type == "cuda" else None
        self._makes_output = kernel.prepare_finalize.allocates_output and not problem.inplace
        self._has_adapters = problem.adapters is not None
        # Whether a call without `out` writes to x, or to a buffer that earlier calls returned.
        self._writes_old_memory = problem.inplace or self._reuses_outputs
        self._stream: int | None = None  # None: the stream that is current in each call
        self._recorded = recording.RecordedCalls()
        self._replay_counts = kernel.call_counters.add_plan()
        kernel.count_invalid_ids_on(device)

    @abstractmethod
    def _get_output(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Return the output of a call without `out`, if the problem is not inplace."""

    def _get_replay_output(
        self, recorded_call: recording.RecordedCall, x_TH: torch.Tensor
    ) -> torch.Tensor:
        """Return the output of a replayed call without `out`."""
        return x_TH if self.problem.inplace else self._get_output(x_TH)

    def _get_workspace(self, tokens: int) -> Workspace:
        """Return the workspace of a call that runs the parts' host code."""
        return self._workspace

    def _points_into_output(self, pointers: Sequence[int]) -> bool:
        """Return whether any of the addresses is inside an output buffer of the plan."""
        return False

    def _check_reads_no_output(  # noqa: B027 (nothing to check if every call has a new output)
        self, x_TH: torch.Tensor, routing: Routing, output: torch.Tensor
    ) -> None:
        """Raise ConfigurationError if a call reads an output buffer of the plan."""

    def _forget_recorded(self) -> None:
        self._recorded = recording.RecordedCalls()

    def _check_and_run(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Check a call that `_replay` did not run, then replay the call if possible, or run it."""
        checked_weights, output = self._check_or_refuse(x_TH, weights, routing, out)
        inputs = _collect_inputs(x_TH, routing)
        signature, _ = recording.get_signature_and_pointers(inputs, checked_weights)
        key = signature, None if out is None else self._get_out_layout(out, x_TH)
        if self._recorded.find(key) is not None:  # `_replay` only lacked checked weights
            replayed = self._replay(x_TH, weights, routing, out)
            if replayed is not None:
                return replayed
        return self._run(
            x_TH,
            checked_weights.prepared or weights,
            routing,
            output,
            key,
            (*inputs, *checked_weights.tensors),
            has_out=out is not None,
        )

    def _replay(  # noqa: C901 (runs in every call; a function for each check would take longer)
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Replay the recording of a call and return its output.

        Returns None, without launching anything, if the call must be checked or recorded.
        """
        if not self._recorded.replayable or type(routing) is not Routing:
            return None
        checked_weights = self.kernel.known_weights.lookup(weights, self._device)
        if checked_weights is None or (routing.adapters_T is not None) is not self._has_adapters:
            return None
        weights_TK, ids_TK = routing.topk_weights_TK, routing.topk_ids_TK
        inputs = (
            _collect_inputs(x_TH, routing) if self._has_adapters else (x_TH, weights_TK, ids_TK)
        )
        for tensor in inputs:
            if type(tensor) not in _TENSOR_TYPES or tensor.is_neg():
                return None
        try:
            layout, pointers = recording.get_layout_and_pointers(
                inputs, checked_weights.pointers, checked_weights.pointer_bits
            )
            out_layout = None if out is None else self._get_out_layout(out, x_TH)
        except (RuntimeError, TypeError):  # a tensor without memory or strides, or no tensor
            return None
        # The checks of a call depend only on its signature, and on the conditions below.
        recorded_call = self._recorded.find(((checked_weights.signature, layout), out_layout))
        # A pointer is 0 if the memory of a tensor was freed, or if the call has no tokens.
        if recorded_call is None or (0 in pointers and x_TH.shape[0]):
            return None
        if _profiler._is_profiler_enabled:  # a replay does not mark stages for the profiler
            return None
        for is_active in recorded_call.bypass_conditions:  # a profiler would miss the launches
            if is_active():
                return None
        if (out is not None or self._writes_old_memory) and self._overlaps(
            inputs, pointers, checked_weights, out
        ):
            return None
        if _is_grad_enabled() or _forward_ad._current_level >= 0:
            tensors = (*inputs, *checked_weights.tensors)
            if needs_gradient(tensors if out is None else (*tensors, out)):
                return None
        if out is None:
            try:
                output = self._get_replay_output(recorded_call, x_TH)
            except RuntimeError:  # out of memory; `_check_or_refuse` notifies the other ranks
                return None
            if output is not x_TH:
                pointers.append(output.data_ptr())
        else:
            output = out
            pointers.append(output.data_ptr())
        self._launch(recorded_call, pointers, output, out is not None)
        return output

    def _launch(
        self,
        recorded_call: recording.RecordedCall,
        pointers: list[int],
        output: torch.Tensor,
        has_out: bool,
    ) -> None:
        """Replay the recorded launches.

        has_out: whether the caller passed `out`. The version of a new tensor is not incremented,
            because no autograd graph can have saved the tensor.
        """
        if self.kernel.poison:
            self.kernel.poison_output(output, self._workspace.poison())
        stream = _get_current_stream(self._index) if self._stream is None else self._stream
        try:
            for replay in recorded_call.replays:
                replay(stream, pointers)
        except BaseException as error:  # an interrupted call must not leave other ranks waiting
            self.kernel.prepare_finalize.abandon(to_exception(error))
            raise
        recorded_call.count[0] += 1
        if has_out or self._writes_old_memory:
            torch.autograd.graph.increment_version(output)
        if self.kernel.poison:
            self._workspace.check_red_zones(replayed=True)

    def _get_out_layout(self, out: torch.Tensor, x_TH: torch.Tensor) -> Hashable:
        """Return the layout of `out`, or None if it is the layout of outputs that a plan allocates.

        Calls with layout None and calls without `out` share a recording.
        """
        if (
            type(out) in _TENSOR_TYPES
            and out.shape == (x_TH.shape[0], *self.problem.output_shape[1:])
            and out.dtype is self.problem.dtype
            and out.device == self._device
            and out.is_contiguous()
            and out.data_ptr() % recording.ALIGNMENT == 0
        ):
            return None
        layout, _ = recording.get_layout_and_pointers((out,))
        return type(out), layout

    def _overlaps(
        self,
        inputs: tuple[torch.Tensor, ...],
        pointers: Sequence[int],
        checked_weights: recording.CheckedWeights,
        out: torch.Tensor | None,
    ) -> bool:
        """Return whether the output of a call may overlap an input, or `out` is not allowed."""
        inplace = self.problem.inplace
        if out is None and not inplace:
            return self._points_into_output(pointers[: len(inputs)])
        if out is not None and (inplace or out.is_neg()):
            return True
        read, written = (inputs, out) if out is not None else (inputs[1:], inputs[0])
        start, stop = address_range(written)
        spans = (*map(address_range, read), *checked_weights.spans)
        return any(start < other_stop and other_start < stop for other_start, other_stop in spans)

    def _check_or_refuse(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor | None,
    ) -> tuple[recording.CheckedWeights, torch.Tensor]:
        """Check a call, and return its checked weights and its output.

        If a tensor does not match, the other ranks are notified before the InputError is raised.
        """
        try:
            validate.check_dense(x_TH, routing, out)
            validate.check_adapters_present(routing, self.problem)
            return self._check_and_bind(x_TH, weights, routing, out)
        except Exception as error:
            self.kernel.prepare_finalize.refuse(error)
            raise

    def _check_and_bind(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor | None,
    ) -> tuple[recording.CheckedWeights, torch.Tensor]:
        validate.check_input(x_TH, self.problem, self.kernel.machine.device)
        if x_TH.device != self._device:
            need = f"{self._device}, where the plan's buffers are"
            raise DeviceError("x", got=x_TH.device, need=need)
        checked_weights = self.kernel.check_weights(weights, x_TH)
        self.kernel.check_call(x_TH, weights, routing, out)
        if self.problem.inplace:
            return checked_weights, x_TH
        if out is not None:
            return checked_weights, out
        output = self._get_output(x_TH)
        self._check_reads_no_output(x_TH, routing, output)
        return checked_weights, output

    def _run(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor,
        signature: Hashable,
        inputs: tuple[torch.Tensor, ...],
        *,
        has_out: bool,
    ) -> torch.Tensor:
        """Run the parts' host code for a checked call, and record it if its signature is new.

        weights: the caller's weights, or a prepared copy.
        inputs: the tensors whose addresses are inputs of a replay, except the output.
        has_out: whether the caller passed `out`.
        """
        kernel, tokens = self.kernel, x_TH.shape[0]
        workspace = self._get_workspace(tokens)
        if kernel.poison:
            kernel.poison_output(out, workspace.poison())
        if self._makes_output:  # such calls are not recorded
            kernel.call_counters.add(call_counters.ALLOCATES_OUTPUT, tokens)
            output = out if has_out else None
            return self._start(x_TH, weights, routing, output, workspace).finish()
        reason = self._why_not_recorded(signature, out)
        if reason:
            kernel.call_counters.add(reason, tokens)
            return self._start(x_TH, weights, routing, out, workspace).finish()
        kernel.call_counters.add(call_counters.RECORDED, tokens)
        if out is not x_TH:
            inputs = (*inputs, out)
        if not self._keeps_workspace:
            inputs = (*inputs, workspace.memory)
        with recording.record_launches(inputs) as recorder:
            kernel.finish(self._start(x_TH, weights, routing, out, workspace))
        recorded_call = recorder.make_recorded_call()
        if recorded_call is not None:
            is_like_x = x_TH.shape == out.shape and x_TH.dtype is out.dtype
            recorded_call = replace(
                recorded_call,
                count=self._replay_counts.counter(tokens),
                workspace_bytes=workspace.nbytes,
                output_like_x=is_like_x and x_TH.is_contiguous(),
            )
        self._recorded.store(signature, recorded_call, recorder.refusal_reason)
        if kernel.poison:
            workspace.check_red_zones()
        return out

    def _why_not_recorded(self, signature: Hashable, out: torch.Tensor) -> str:
        """Return why a call that is not replayed must not be recorded; "" if it may be recorded."""
        if not self.kernel.replayable:
            return call_counters.NOT_REPLAYABLE
        if not self._recorded.is_new(signature):
            return self._recorded.refusal_reason(signature) or call_counters.PROFILED_OR_OVERLAPPING
        if not self.kernel.prepare_finalize.may_record():
            return call_counters.FIRST_OF_LAYER
        # Without tokens, a single rank has no work, but several ranks still exchange rows.
        has_no_work = out.numel() == 0 and self.problem.parallel.world_size == 1
        return call_counters.NO_TOKENS if has_no_work else ""

    def _start(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor | None,
        workspace: Workspace,
    ) -> Pending:
        return self.kernel.start_checked(x_TH, weights, routing, out, workspace, at_once=True)


class Plan(BasePlan):
    """A kernel with its buffers. Calls allocate nothing and can be captured in a CUDA graph.

    All calls of a plan use the same buffers. A lock serializes the host code of several threads,
    but not their launches. To call a plan from several threads, use one stream, or make sure that
    launches do not overlap.

    A call returns `out` if given, x if the problem is inplace, and a new tensor if a part allocates
    its output. Otherwise, it returns an output buffer of the plan. Each thread has an output
    buffer, whose content is valid until the next call of the thread.

    Weights are checked once per ExpertWeights object, and again if the memory of a tensor was
    replaced. If the kernel is `replayable`, the parts' host code runs only in the first call of
    each signature (shapes, strides, dtypes and alignment of all tensors). Later calls replay the
    launches of the first call.
    """

    _reuses_outputs = True

    def __init__(self, kernel: Execution, problem: Problem) -> None:
        device = torch.device(kernel.machine.device)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(kernel, problem, device)
        specs = kernel.workspace_specs(problem.tokens)
        with modes.disable_inference_mode():
            self._workspace = Workspace(specs, device, poison=kernel.poison)
        rows = 0 if self._makes_output else problem.tokens
        shape = (rows, *problem.output_shape[1:])
        self._outputs = _Outputs(shape, problem.dtype, device)
        self._lock: AbstractContextManager[Any] = threading.RLock()
        self._busy = False
        forks.on_fork(self)

    def __reduce__(self) -> tuple[type["Plan"], tuple[Execution, Problem]]:
        """Copy and pickle a plan as its kernel and problem. A copy has its own buffers."""
        return Plan, (self.kernel, self.problem)

    def after_fork(self) -> None:
        """Reset the lock in a forked child. If the plan uses a GPU or ranks, make calls raise."""
        on_gpu = self._device.type == "cuda"
        if on_gpu or self.problem.parallel.world_size > 1:
            resource = "a CUDA context" if on_gpu else "a process group"
            need = f"a spawned process with its own plan: {resource} does not survive a fork"
            self._lock, self._index = forks.UnusableLock("a plan", need), None
        elif not forks.reset_lock(self._lock):
            self._busy = False

    def __repr__(self) -> str:
        return f"<plan of {self.kernel.pairing}, {self.problem}: {self.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        """Bytes of workspace held, excluding the output."""
        return self._workspace.nbytes

    @modes.disable_tracing_of_layer_call
    def __call__(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layer and return its output, as FusedMoEModularKernel.__call__ does.

        Raises CapacityError for more tokens than the plan has, and StateError if it is called from
        within a call of the same plan.
        """
        index = self._index
        if index is not None and torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self(x_TH, weights, routing, out=out)
        with self._lock:
            if self._busy:  # set by this thread, because other threads wait for the lock
                need = "a call of another plan, or a call after that one has ended"
                raise StateError("a plan", got="a call within its own call", need=need)
            self._busy = True
            try:
                output = self._replay(x_TH, weights, routing, out)
                if output is None:
                    output = self._check_and_run(x_TH, weights, routing, out)
                return output
            finally:
                self._busy = False

    def _get_output(self, x_TH: torch.Tensor) -> torch.Tensor:
        rows, tokens = self._outputs.rows, x_TH.shape[0]
        output = rows.get(tokens)
        if output is None:
            output = rows[tokens] = self._outputs.buffer[:tokens]
        return output

    def _points_into_output(self, pointers: Sequence[int]) -> bool:
        return self._outputs.holds(pointers)

    def _check_reads_no_output(
        self, x_TH: torch.Tensor, routing: Routing, output: torch.Tensor
    ) -> None:
        """Raise ConfigurationError if a call reads an output buffer of the plan.

        If both parts support inplace, x may be the output of the previous call.
        """
        parts = (self.kernel.prepare_finalize, self.kernel.experts)
        is_last_output = x_TH.shape == output.shape and x_TH.is_contiguous()
        is_last_output &= x_TH.data_ptr() == output.data_ptr() and all(
            p.requires.inplace for p in parts
        )
        read = {"topk_weights": routing.topk_weights_TK, "topk_ids": routing.topk_ids_TK}
        if routing.slots_T is not None:
            read["adapters"] = routing.slots_T
        for name, tensor in (read if is_last_output else {"x": x_TH, **read}).items():
            if tensor.numel() and self._outputs.holds([tensor.data_ptr()]):
                need = "separate memory: a copy, or another plan's output"
                raise ConfigurationError(name, got="memory of the plan's own output", need=need)


class _Outputs(threading.local):
    """The output buffer of the calling thread, and views of its first rows by number of tokens."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        with modes.disable_inference_mode():
            self.buffer = torch.empty(shape, dtype=dtype, device=device)
        self.rows: dict[int, torch.Tensor] = {}
        self._start, self._stop = address_range(self.buffer)

    def holds(self, pointers: Sequence[int]) -> bool:
        """Return whether any of the addresses is inside the buffer."""
        start, stop = self._start, self._stop
        for pointer in pointers:  # noqa: SIM110  runs in every call; a generator is slower
            if start <= pointer < stop:
                return True
        return False


def _collect_inputs(x_TH: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, ...]:
    tensors: tuple[torch.Tensor, ...] = (x_TH, routing.topk_weights_TK, routing.topk_ids_TK)
    if routing.adapters_T is not None and (slots_T := routing.slots_T) is not None:
        tensors = (*tensors, slots_T)
    return tensors


def _get_current_stream(index: int | None) -> int:
    """Return the raw handle of the device's current stream, as triton uses it; 0 on a CPU."""
    stream: int = 0 if index is None else torch._C._cuda_getCurrentRawStream(index)
    return stream


MIN_CAPACITY = 16  # tokens
# Maximum number of tokens of a call that uses the shared workspace of its stream. A workspace for
# larger calls is too large to keep, and allocating it is fast compared with the call: a layer of
# Qwen3-30B with 1024 tokens takes 0.35 ms on an H200.
MAX_SHARED_TOKENS = 2048
_MAX_PLANS = 128  # per kernel
_MAX_SEEN = 256  # signatures of large calls that were seen, but not recorded yet
_MAX_STREAMS = 8  # streams whose memory is kept
_GRANULARITY = 1 << 21  # bytes; torch's allocator rounds large blocks to it


def plan_capacity(tokens: int) -> int:
    """Return the number of tokens of the plan for a call: a power of two, at least 16."""
    return max(MIN_CAPACITY, 1 << max(tokens - 1, 0).bit_length())


class StreamMemory:
    """Workspace memory shared by all calls on one CUDA stream, or by all calls on the CPU.

    lock: held while the host code of a call runs, so that launches of two calls do not interleave.
    busy: whether the host code of a call is running. The lock is reentrant, so a thread that
        acquires it and finds `busy` set is inside the call.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock: Any = threading.RLock()
        self.busy = False
        self._device = device
        self._memory: torch.Tensor | None = None
        self._users: weakref.WeakSet[_CallPlan] = weakref.WeakSet()

    @property
    def nbytes(self) -> int:
        """Bytes currently held."""
        return 0 if self._memory is None else self._memory.nbytes

    def reserve(self, nbytes: int, user: "_CallPlan") -> torch.Tensor:
        """Return at least `nbytes` bytes (uint8), which are valid until `user.release` is called.

        If the memory has to grow, all users are released, because their recordings hold addresses
        of the old memory.
        """
        memory = self._memory
        if memory is None or memory.nbytes < nbytes:
            self.release()
            size = -(-nbytes // _GRANULARITY) * _GRANULARITY
            with modes.disable_inference_mode():
                memory = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._memory = memory
            _memories.trim(self)
        self._users.add(user)
        return memory

    def after_fork(self) -> None:
        """Reset the lock in a forked child, and the state of a call whose thread is gone."""
        if not forks.reset_lock(self.lock):
            self.busy = False
            self.release()

    def release(self) -> None:
        """Free the memory. The caller must hold the lock, or no other thread may be in a call."""
        for user in tuple(self._users):
            user.release()
        self._users.clear()
        self._memory = None


_TENSOR_TYPES = (
    torch.Tensor,
    torch.nn.Parameter,
)  # exact types: a subclass may hold more than memory

_Stream = tuple[int, int]  # device index (-1 for the CPU), stream handle


class StreamMemories:
    """Workspace memory of every stream with calls, ordered by first use."""

    def __init__(self) -> None:
        self._memories: OrderedDict[_Stream, StreamMemory] = OrderedDict()
        self._lock = threading.RLock()
        forks.on_fork(self)

    def after_fork(self) -> None:
        """In a forked child, reset the locks that threads of the parent hold."""
        forks.reset_lock(self._lock)
        for memory in self._memories.values():
            memory.after_fork()

    def of(self, device: torch.device, stream: int) -> StreamMemory:
        """Return the memory of a stream of `device`. The CPU has only stream 0."""
        key = (device_index(device), stream)
        with self._lock:
            memory = self._memories.get(key)
            if memory is None:
                memory = self._memories[key] = StreamMemory(device)
            return memory

    def held_bytes(self) -> dict[_Stream, int]:
        """Return the bytes held, by (device index, stream)."""
        with self._lock:
            return {key: memory.nbytes for key, memory in self._memories.items() if memory.nbytes}

    def trim(self, newest: StreamMemory) -> None:
        """Free the memory of the streams that were used first, if more than 8 hold memory."""
        with self._lock:
            holders = [memory for memory in self._memories.values() if memory.nbytes]
        for memory in holders[: max(len(holders) - _MAX_STREAMS, 0)]:
            if memory is newest or not memory.lock.acquire(blocking=False):
                continue
            try:
                if not memory.busy:
                    memory.release()
            finally:
                memory.lock.release()


_memories = StreamMemories()


def held_bytes() -> dict[_Stream, int]:
    """Return the bytes of workspace held between calls, by (device index, stream).

    The CPU has index -1 and a single stream, 0.
    """
    return _memories.held_bytes()


class CallPlans:
    """Plans for direct calls of one kernel. A copy starts without plans.

    max_tokens: maximum number of tokens of a call that uses a plan; 0 disables plans.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._plans: OrderedDict[tuple[int, int, int], _StreamPlan] = OrderedDict()
        self._lock = threading.RLock()
        forks.on_fork(self)

    def __reduce__(self) -> tuple[type["CallPlans"], tuple[int]]:
        return CallPlans, (self._max_tokens,)

    def after_fork(self) -> None:
        """Reset the lock in a forked child, and drop GPU plans: a CUDA context cannot be forked."""
        forks.reset_lock(self._lock)
        if any(index >= 0 for index, *_ in self._plans):
            self._plans.clear()
            self._max_tokens = 0

    @property
    def capacities(self) -> tuple[int, ...]:
        """Token capacities of the plans, ascending."""
        plans = {id(plan): plan for plan in self._plans.values()}
        return tuple(sorted(plan.problem.tokens for plan in plans.values()))

    def run(
        self,
        kernel: Execution,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Run a call with a plan. Returns None if the call cannot use a plan."""
        if not self._max_tokens or type(x_TH) not in _TENSOR_TYPES:
            return None
        shape, index, stream = x_TH.shape, -1, 0
        if not shape or shape[0] > self._max_tokens or kernel.experts.is_overridden():
            return None
        if x_TH.is_cuda:
            index = x_TH.get_device()
            if index != _C._cuda_getDevice():
                return None
            stream = _C._cuda_getCurrentRawStream(index)
            # The default stream, 0, is never captured, and graph trees do not use it.
            if stream and (_C._cuda_isCurrentStreamCapturing() or is_graph_trees_stream(index)):
                return None
        plan = self._plans.get((index, stream, (shape[0] - 1).bit_length()))
        if plan is None:
            plan = self._find_or_make_plan(kernel, x_TH.device, stream, shape[0])
            if plan is None:
                return None
        return plan.run(x_TH, weights, routing, out)

    def reserve(self, kernel: Execution, device: torch.device, tokens: int) -> None:
        """Make the plan for calls of `tokens` tokens, if they use the shared workspace."""
        if tokens <= min(self._max_tokens, MAX_SHARED_TOKENS) and can_keep_buffers(device):
            stream = 0
            if device.type == "cuda":
                device = torch.device("cuda", device_index(device))
                stream = torch.cuda.current_stream(device).cuda_stream
            plan = self._find_or_make_plan(kernel, device, stream, tokens)
            if isinstance(plan, _CallPlan):
                plan.reserve_unless_busy()

    def _find_or_make_plan(
        self, kernel: Execution, device: torch.device, stream: int, tokens: int
    ) -> "_StreamPlan | None":
        if device.type != kernel.machine.device:  # the checks of the call raise DeviceError
            return None
        index, is_large = device_index(device), tokens > MAX_SHARED_TOKENS
        # All large calls share one plan, whose recordings do not depend on a workspace.
        capacity = self._max_tokens if is_large else min(plan_capacity(tokens), self._max_tokens)
        with self._lock:
            candidates = (p for key, p in self._plans.items() if key[:2] == (index, stream))
            plan = next((p for p in candidates if p.problem.tokens == capacity), None)
            if plan is None:
                problem = kernel.problem.with_tokens(capacity)
                cls = _LargeCallPlan if is_large else _CallPlan
                plan = cls(kernel, problem, device, stream)
            self._plans[index, stream, (tokens - 1).bit_length()] = plan
            while len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        return plan


class _StreamPlan(BasePlan):
    """A plan for direct calls on one stream, which returns outputs in new tensors."""

    def __init__(
        self, kernel: Execution, problem: Problem, device: torch.device, stream: int
    ) -> None:
        super().__init__(kernel, problem, device)
        self._stream = stream
        self._memory = _memories.of(device, stream)
        self._has_workspace = True
        # Whether a call waits while another thread is in a call on the same stream.
        self._waits = self._index is not None
        with modes.disable_inference_mode():
            self._no_output = torch.empty(0, dtype=problem.dtype, device=device)

    def run(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Run a call. Returns None if the call cannot use the memory of its stream.

        On a GPU, this happens if the call is made from within another call, or if memory runs out.
        On a CPU, it also happens during a call of another thread. Both calls then run in parallel.
        """
        memory, lock = self._memory, self._memory.lock
        if lock._is_owned():  # called from within another call
            return None
        acquired = False
        try:
            acquired = lock.acquire(self._waits)
            if not acquired:
                return None
            memory.busy = True
            if not self._has_workspace and not self._reserve_workspace():
                return None
            output = self._replay(x_TH, weights, routing, out)
            if output is None:
                output = self._check_and_run(x_TH, weights, routing, out)
            return output
        finally:
            # Call nothing before the release. A KeyboardInterrupt can be raised when a call
            # returns, and would leave the lock held.
            if acquired:
                memory.busy = False
            try:  # noqa: SIM105 (suppress is another call)
                lock.release()
            except RuntimeError:  # another thread holds it
                pass

    def _reserve_workspace(self) -> bool:
        """Reserve the workspace. Returns False if memory runs out."""
        return True

    def _get_replay_output(
        self, recorded_call: recording.RecordedCall, x_TH: torch.Tensor
    ) -> torch.Tensor:
        if self.problem.inplace:
            return x_TH
        if recorded_call.output_like_x:
            return torch.empty_like(x_TH)  # half the time of torch.empty
        return self._get_output(x_TH)

    def _get_output(self, x_TH: torch.Tensor) -> torch.Tensor:
        if self._makes_output:
            return self._no_output
        shape = (x_TH.shape[0], *self.problem.output_shape[1:])
        return torch.empty(shape, dtype=self.problem.dtype, device=self._device)


class _CallPlan(_StreamPlan):
    """A plan whose workspace is in the shared memory of its stream."""

    def __init__(
        self, kernel: Execution, problem: Problem, device: torch.device, stream: int
    ) -> None:
        super().__init__(kernel, problem, device, stream)
        self._specs: dict[str, BufferSpec] = kernel.workspace_specs(problem.tokens)
        self._nbytes = workspace_bytes(self._specs)
        self._has_workspace = False

    def reserve_unless_busy(self) -> None:
        """Reserve the memory, unless the calling thread is in a call that uses it."""
        with self._memory.lock:
            if not self._memory.busy and not self._has_workspace:
                self._reserve_workspace()

    def _reserve_workspace(self) -> bool:
        """Place the workspace in the shared memory. Returns False if memory runs out."""
        try:
            memory = self._memory.reserve(self._nbytes, self)
        except torch.OutOfMemoryError:  # a workspace for this call alone may be smaller
            return False
        with modes.disable_inference_mode():
            self._workspace = Workspace(self._specs, self._device, memory=memory)
        self._has_workspace = True
        return True

    def release(self) -> None:
        """Drop the shared memory and everything that holds addresses in it."""
        self._has_workspace = False
        vars(self).pop("_workspace", None)
        self._forget_recorded()


class _LargeCallPlan(_StreamPlan):
    """A plan whose calls allocate a workspace and free it on return.

    The address of the workspace is an additional input of recorded launches. The second call of
    each signature is recorded, not the first call, because many numbers of tokens occur only once.
    """

    _keeps_workspace = False

    def __init__(
        self, kernel: Execution, problem: Problem, device: torch.device, stream: int
    ) -> None:
        super().__init__(kernel, problem, device, stream)
        self._seen: dict[Hashable, None] = {}  # signatures of calls that were not recorded

    def _get_workspace(self, tokens: int) -> Workspace:
        return Workspace(self.kernel.workspace_specs(tokens), self._device)

    def _why_not_recorded(self, signature: Hashable, out: torch.Tensor) -> str:
        reason = super()._why_not_recorded(signature, out)
        if reason:
            return reason
        if signature in self._seen:
            del self._seen[signature]
            return ""
        while len(self._seen) >= _MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        self._seen[signature] = None
        return call_counters.OWN_WORKSPACE

    def _launch(
        self,
        recorded_call: recording.RecordedCall,
        pointers: list[int],
        output: torch.Tensor,
        has_out: bool,
    ) -> None:
        # Freeing this on return is safe: the allocator reuses the memory only on the same stream.
        memory = torch.empty(recorded_call.workspace_bytes, dtype=torch.uint8, device=self._device)
        pointers.append(memory.data_ptr())
        super()._launch(recorded_call, pointers, output, has_out)
