"""Plans: a kernel bound to its buffers and to the launches recorded in its first calls.

`kernel.plan()` returns a `Plan`. Direct calls, `kernel(x, weights, routing)`, are as fast as calls
of a plan: `CallPlans` holds plans for them, one for each CUDA stream and each number of tokens
rounded up to a power of two. Launches on a stream run in order, so these plans share one workspace
per stream, also across kernels. Calls of more than 2,048 tokens allocate their workspace and free
it when they return; their recordings hold offsets into a workspace instead of addresses. Calls that
are captured in a CUDA graph are not planned.
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
from modular_kernel.execution import Execution, Pending, as_exception
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


class BoundCalls(ABC):
    """Calls of a kernel in one workspace, of at most `problem.tokens` tokens.

    Weights are checked once per ExpertWeights object, and again if the memory of a tensor was
    replaced. If both parts declare that their calls can be replayed (`replayable`), the launches of
    the first call of each signature (shapes, strides, dtypes and alignment of all tensors) are
    recorded, and later calls replay them. Subclasses set `_workspace`, or override
    `_workspace_for`, and define the output of a call.
    """

    _workspace: Workspace
    _reuses_outputs = False  # whether calls without `out` write to a buffer of earlier calls
    _keeps_workspace = True  # whether all calls have the workspace at the same address

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
    def _new_output(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Return the output of a call without `out` that is not in place, after x was checked."""

    def _output_of(self, recorded: recording.RecordedCall, x_TH: torch.Tensor) -> torch.Tensor:
        """Return the output of a replayed call without `out`."""
        return x_TH if self.problem.inplace else self._new_output(x_TH)

    def _workspace_for(self, tokens: int) -> Workspace:
        """Return the workspace of a call that runs the parts' host code."""
        return self._workspace

    def _holds_own_output(self, pointers: Sequence[int]) -> bool:
        """Return whether one of the addresses is inside an output buffer that calls reuse."""
        return False

    def _check_own_output(  # noqa: B027 (nothing to check if every call has a new output)
        self, x_TH: torch.Tensor, routing: Routing, output: torch.Tensor
    ) -> None:
        """Raise ConfigurationError if a call reads an output buffer that calls reuse."""

    def _forget_recorded(self) -> None:
        self._recorded = recording.RecordedCalls()

    def _check_and_run(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Check and run a call that `_replay` did not run; replay it if that is possible now."""
        bound, output = self._check_or_refuse(x_TH, weights, routing, out)
        inputs = _tensors(x_TH, routing)
        signature, _ = recording.get_signature_and_pointers(inputs, bound)
        key = signature, None if out is None else self._layout_of(out, x_TH)
        if self._recorded.find(key) is not None:  # only the weights were new
            replayed = self._replay(x_TH, weights, routing, out)
            if replayed is not None:
                return replayed
        return self._run(
            x_TH,
            bound.prepared or weights,
            routing,
            output,
            key,
            (*inputs, *bound.tensors),
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

        Returns None, and has launched nothing, if the call has to be checked or recorded.
        """
        if not self._recorded.replayable or type(routing) is not Routing:
            return None
        bound = self.kernel.known_weights.lookup(weights, self._device)
        if bound is None or (routing.adapters_T is not None) is not self._has_adapters:
            return None
        weights_TK, ids_TK = routing.topk_weights_TK, routing.topk_ids_TK
        inputs = _tensors(x_TH, routing) if self._has_adapters else (x_TH, weights_TK, ids_TK)
        for tensor in inputs:
            if type(tensor) not in _TENSOR_TYPES or tensor.is_neg():
                return None
        try:
            layout, pointers = recording.get_layout_and_pointers(
                inputs, bound.pointers, bound.pointer_bits
            )
            out_layout = None if out is None else self._layout_of(out, x_TH)
        except (RuntimeError, TypeError):  # a tensor without memory or strides, or no tensor
            return None
        # All other inputs of the checks are in the signature or covered by what follows.
        recorded = self._recorded.find(((bound.signature, layout), out_layout))
        if recorded is None or 0 in pointers:  # unknown, or the memory of a tensor was freed
            return None
        if _profiler._is_profiler_enabled:  # stages are measured
            return None
        for is_active in recorded.bypass_conditions:  # a profiler would miss the launches
            if is_active():
                return None
        if (out is not None or self._writes_old_memory) and self._overlaps(
            inputs, pointers, bound, out
        ):
            return None
        if _is_grad_enabled() or _forward_ad._current_level >= 0:
            tensors = (*inputs, *bound.tensors)
            if needs_gradient(tensors if out is None else (*tensors, out)):
                return None
        if out is None:
            try:
                output = self._output_of(recorded, x_TH)
            except RuntimeError:  # out of memory: the checks raise it, and notify other ranks
                return None
            if output is not x_TH:
                pointers.append(output.data_ptr())
        else:
            output = out
            pointers.append(output.data_ptr())
        self._launch(recorded, pointers, output, out is not None)
        return output

    def _launch(
        self,
        recorded: recording.RecordedCall,
        pointers: list[int],
        output: torch.Tensor,
        has_out: bool,
    ) -> None:
        """Launch everything recorded.

        has_out: whether the caller passed `out`. If not, and if calls write no old memory either,
        no graph can have saved the output, and its version is not incremented.
        """
        if self.kernel.poison:
            self.kernel.poison_output(output, self._workspace.poison())
        stream = _current_stream(self._index) if self._stream is None else self._stream
        try:
            for replay in recorded.replays:
                replay(stream, pointers)
        except BaseException as error:  # other ranks must not wait for an interrupted call
            self.kernel.prepare_finalize.abandon(as_exception(error))
            raise
        recorded.count[0] += 1
        if has_out or self._writes_old_memory:
            torch.autograd.graph.increment_version(output)
        if self.kernel.poison:
            self._workspace.check_red_zones(replayed=True)

    def _layout_of(self, out: torch.Tensor, x_TH: torch.Tensor) -> Hashable:
        """Return the layout of `out`, as far as a recording depends on it.

        None for the layout of an output that the plan allocates: they share a recording.
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
        bound: recording.CheckedWeights,
        out: torch.Tensor | None,
    ) -> bool:
        """Return whether the output of a call may overlap an input, or `out` is not allowed.

        inputs: x and the tensors of the routing.
        """
        inplace = self.problem.inplace
        if out is None and not inplace:
            return self._holds_own_output(pointers[: len(inputs)])
        if out is not None and (inplace or out.is_neg()):
            return True
        read, written = (inputs, out) if out is not None else (inputs[1:], inputs[0])
        start, stop = address_range(written)
        spans = (*map(address_range, read), *bound.spans)
        return any(start < other_stop and other_start < stop for other_start, other_stop in spans)

    def _check_or_refuse(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor | None,
    ) -> tuple[recording.CheckedWeights, torch.Tensor]:
        """Check a call, bind its weights, and return them with the output.

        Raises the InputError for the first tensor that does not match, after notifying the other
        ranks.
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
        bound = self.kernel.check_weights(weights, x_TH)
        self.kernel.check_call(x_TH, weights, routing, out)
        if self.problem.inplace:
            return bound, x_TH
        if out is not None:
            return bound, out
        output = self._new_output(x_TH)
        self._check_own_output(x_TH, routing, output)
        return bound, output

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
        """Run a checked call through the parts' host code. The first of each signature is recorded.

        weights: the weights that the call reads, possibly prepared.
        inputs: the tensors whose addresses a replay takes, besides the output's.
        has_out: whether the caller passed `out`.
        """
        kernel, tokens = self.kernel, x_TH.shape[0]
        workspace = self._workspace_for(tokens)
        if kernel.poison:
            kernel.poison_output(out, workspace.poison())
        if self._makes_output:  # a recording would be of calls with `out` only
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
        recorded = recorder.make_recorded_call()
        if recorded is not None:
            is_like_x = x_TH.shape == out.shape and x_TH.dtype is out.dtype
            recorded = replace(
                recorded,
                count=self._replay_counts.counter(tokens),
                workspace_bytes=workspace.nbytes,
                output_like_x=is_like_x and x_TH.is_contiguous(),
            )
        self._recorded.store(signature, recorded, recorder.refusal_reason)
        if kernel.poison:
            workspace.check_red_zones()
        return out

    def _why_not_recorded(self, signature: Hashable, out: torch.Tensor) -> str:
        """Return the reason not to record a call that is not replayed; "" if it can be recorded."""
        if not self.kernel.replayable:
            return call_counters.NOT_REPLAYABLE
        if not self._recorded.is_new(signature):
            return self._recorded.refusal_reason(signature) or call_counters.PROFILED_OR_OVERLAPPING
        if not self.kernel.prepare_finalize.may_record():
            return call_counters.FIRST_OF_LAYER
        return call_counters.NO_TOKENS if out.numel() == 0 else ""

    def _start(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor | None,
        workspace: Workspace,
    ) -> Pending:
        return self.kernel.start_checked(x_TH, weights, routing, out, workspace, at_once=True)


class Plan(BoundCalls):
    """A kernel with its buffers. Calls allocate nothing and can be captured in a CUDA graph.

    Calls of one plan share its buffers. A lock serializes the host code of several threads, but not
    their launches. Use one stream, or launches that do not overlap, or one plan per thread.

    A call returns `out` if given, x if the problem is inplace, and a new tensor if a part allocates
    its output. Otherwise it returns a buffer of the plan, one per thread, which is valid until that
    thread's next call.

    Weights are checked once per ExpertWeights object, and again if the memory of a tensor was
    replaced. If both parts declare that their calls can be replayed (`replayable`), their host code
    runs only in the first call of each signature (shapes, strides, dtypes and alignment of all
    tensors); later calls replay its launches.
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
        """Copy and pickle a plan as its kernel and problem; the copy has its own buffers."""
        return Plan, (self.kernel, self.problem)

    def after_fork(self) -> None:
        """In a forked child, reset the lock; calls raise if they use a GPU or a process group."""
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
        """Run a call as the kernel does, for T <= the plan's tokens (else CapacityError).

        Raises StateError if called from within a call of the same plan.
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

    def _new_output(self, x_TH: torch.Tensor) -> torch.Tensor:
        rows, tokens = self._outputs.rows, x_TH.shape[0]
        output = rows.get(tokens)
        if output is None:
            output = rows[tokens] = self._outputs.buffer[:tokens]
        return output

    def _holds_own_output(self, pointers: Sequence[int]) -> bool:
        return self._outputs.holds(pointers)

    def _check_own_output(self, x_TH: torch.Tensor, routing: Routing, output: torch.Tensor) -> None:
        """Raise ConfigurationError if a call reads memory of the plan's own output.

        Exception: the last output may be x of the next call, with the same rows, if both parts
        support inplace.
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
    """The output buffer of the calling thread.

    buffer: the whole buffer. rows: views of `buffer`, by the number of tokens.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        with modes.disable_inference_mode():
            self.buffer = torch.empty(shape, dtype=dtype, device=device)
        self.rows: dict[int, torch.Tensor] = {}
        self._start, self._stop = address_range(self.buffer)

    def holds(self, pointers: Sequence[int]) -> bool:
        """Return whether one of the addresses is inside this output."""
        start, stop = self._start, self._stop
        for pointer in pointers:  # noqa: SIM110  runs in every call; a generator is slower
            if start <= pointer < stop:
                return True
        return False


def _tensors(x_TH: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, ...]:
    """Return a call's tensors besides its weights and output."""
    tensors: tuple[torch.Tensor, ...] = (x_TH, routing.topk_weights_TK, routing.topk_ids_TK)
    if routing.adapters_T is not None and (slots_T := routing.slots_T) is not None:
        tensors = (*tensors, slots_T)
    return tensors


def _current_stream(index: int | None) -> int:
    """Return the raw handle of the device's current stream, as triton uses it; 0 on a CPU."""
    stream: int = 0 if index is None else torch._C._cuda_getCurrentRawStream(index)
    return stream


MIN_CAPACITY = 16
# Larger calls need workspaces too large to hold, and take so long that allocating one in each call
# does not matter: at 1024 tokens, Qwen3-30B's layer takes 0.35 ms on an H200.
MAX_SHARED_TOKENS = 2048  # of a call in the shared workspace of its stream
_MAX_PLANS = 128  # per kernel
_MAX_SEEN = 256  # remembered signatures of large calls that were not recorded yet
_MAX_STREAMS = 8  # streams whose memory is kept
_GRANULARITY = 1 << 21  # bytes, as torch's allocator rounds large blocks


def plan_capacity(tokens: int) -> int:
    """Return the plan capacity for a call of `tokens` tokens: a power of two, at least 16."""
    return max(MIN_CAPACITY, 1 << max(tokens - 1, 0).bit_length())


class StreamMemory:
    """Workspace memory shared by the calls on one CUDA stream, or on the CPU by all calls.

    lock: held while the host issues a call, so that launches of two calls do not interleave.
    busy: whether a call is being issued. The lock is reentrant: a thread that acquires it while
    busy is set is inside that call.
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
        """Return at least `nbytes` bytes (uint8), valid until `user.release` is called.

        If the memory has to grow, all other users are released first: their recordings hold
        addresses of the smaller memory.
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
        """In a forked child, reset the lock, and the state of a call whose thread is gone."""
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
        """In a forked child, release locks held by threads that no longer exist."""
        forks.reset_lock(self._lock)
        for memory in self._memories.values():
            memory.after_fork()

    def of(self, device: torch.device, stream: int) -> StreamMemory:
        """Return the memory shared by calls on a stream of `device`; the CPU has only stream 0."""
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
        """Free the memory of the streams first used earliest, if more than eight hold memory."""
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
    """Plans for one kernel's calls of up to `max_tokens` tokens; 0 disables planning.

    A copy starts without plans.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._plans: OrderedDict[tuple[int, int, int], _StreamPlan] = OrderedDict()
        self._lock = threading.RLock()
        forks.on_fork(self)

    def __reduce__(self) -> tuple[type["CallPlans"], tuple[int]]:
        return CallPlans, (self._max_tokens,)

    def after_fork(self) -> None:
        """In a forked child, renew the lock; drop GPU plans, whose context is the parent's."""
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
        """Run a call on its plan. Returns None if the call must allocate its own workspace."""
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
            # The default stream, 0, cannot be captured and is not that of graph trees.
            if stream and (_C._cuda_isCurrentStreamCapturing() or is_graph_trees_stream(index)):
                return None
        plan = self._plans.get((index, stream, (shape[0] - 1).bit_length()))
        if plan is None:
            plan = self._find_or_make(kernel, x_TH.device, stream, shape[0])
            if plan is None:
                return None
        return plan.run(x_TH, weights, routing, out)

    def reserve(self, kernel: Execution, device: torch.device, tokens: int) -> None:
        """Make the plan for calls of `tokens` tokens now, if they use the shared workspace."""
        if tokens <= min(self._max_tokens, MAX_SHARED_TOKENS) and can_keep_buffers(device):
            stream = 0
            if device.type == "cuda":
                device = torch.device("cuda", device_index(device))
                stream = torch.cuda.current_stream(device).cuda_stream
            plan = self._find_or_make(kernel, device, stream, tokens)
            if isinstance(plan, _CallPlan):
                plan.bind_unless_busy()

    def _find_or_make(
        self, kernel: Execution, device: torch.device, stream: int, tokens: int
    ) -> "_StreamPlan | None":
        if device.type != kernel.machine.device:  # the call's checks will refuse it
            return None
        index, is_large = device_index(device), tokens > MAX_SHARED_TOKENS
        # One plan is for all large calls: its recordings do not depend on a workspace.
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


class _StreamPlan(BoundCalls):
    """A plan for calls on one stream, each of which returns a new tensor."""

    def __init__(
        self, kernel: Execution, problem: Problem, device: torch.device, stream: int
    ) -> None:
        super().__init__(kernel, problem, device)
        self._stream = stream
        self._memory = _memories.of(device, stream)
        self._bound = True  # whether a call has a workspace
        self._waits = self._index is not None  # for the calls of other threads
        with modes.disable_inference_mode():
            self._no_output = torch.empty(0, dtype=problem.dtype, device=device)

    def run(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Run a call. Returns None if another call on the stream is being issued.

        On a GPU, that can only be a call that encloses this one, because this method waits for the
        calls of other threads. On a CPU, it is any other call: calls of several threads run in
        parallel there.
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
            if not self._bound and not self._bind():
                return None
            output = self._replay(x_TH, weights, routing, out)
            if output is None:
                output = self._check_and_run(x_TH, weights, routing, out)
            return output
        finally:
            # Do not call anything before the release: a KeyboardInterrupt can arrive whenever a
            # call returns, and must not leave the lock held.
            if acquired:
                memory.busy = False
            try:  # noqa: SIM105 (suppress is another call)
                lock.release()
            except RuntimeError:  # another thread holds it
                pass

    def _bind(self) -> bool:
        """Reserve the workspace, if it is kept between calls. Returns False if memory runs out."""
        return True

    def _output_of(self, recorded: recording.RecordedCall, x_TH: torch.Tensor) -> torch.Tensor:
        if self.problem.inplace:
            return x_TH
        if recorded.output_like_x:
            return torch.empty_like(x_TH)  # half the time of torch.empty
        return self._new_output(x_TH)

    def _new_output(self, x_TH: torch.Tensor) -> torch.Tensor:
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
        self._bound = False

    def bind_unless_busy(self) -> None:
        """Reserve the memory now, unless the calling thread is in a call that uses it."""
        with self._memory.lock:
            if not self._memory.busy and not self._bound:
                self._bind()

    def _bind(self) -> bool:
        """Place the workspace in the shared memory. Returns False if memory runs out."""
        try:
            memory = self._memory.reserve(self._nbytes, self)
        except torch.OutOfMemoryError:  # the call on its own may need less
            return False
        with modes.disable_inference_mode():
            self._workspace = Workspace(self._specs, self._device, memory=memory)
        self._bound = True
        return True

    def release(self) -> None:
        """Drop the shared memory and everything that holds addresses in it."""
        self._bound = False
        vars(self).pop("_workspace", None)
        self._forget_recorded()


class _LargeCallPlan(_StreamPlan):
    """A plan whose calls each allocate a workspace, which is freed when they return.

    Recorded launches take the address of the workspace as one more input. The first call of each
    signature is not recorded: a number of tokens that occurs once costs no more than without a
    plan.
    """

    _keeps_workspace = False

    def __init__(
        self, kernel: Execution, problem: Problem, device: torch.device, stream: int
    ) -> None:
        super().__init__(kernel, problem, device, stream)
        self._seen: dict[Hashable, None] = {}  # signatures of calls that were not recorded

    def _workspace_for(self, tokens: int) -> Workspace:
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
        recorded: recording.RecordedCall,
        pointers: list[int],
        output: torch.Tensor,
        has_out: bool,
    ) -> None:
        # Freed on return: the allocator gives the memory to later launches on this stream only.
        memory = torch.empty(recorded.workspace_bytes, dtype=torch.uint8, device=self._device)
        pointers.append(memory.data_ptr())
        super()._launch(recorded, pointers, output, has_out)
