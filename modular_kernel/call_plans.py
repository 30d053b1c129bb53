"""Plans behind a kernel's own calls, so that `kernel(x, weights, routing)` is as fast as a plan.

A kernel keeps one plan for each CUDA stream and power of two of tokens. All of them, of every
kernel, use the same workspace memory on one stream: its launches run one after the other. Calls
that may not keep buffers (large ones, and calls captured in a CUDA graph) allocate their own.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from sys import modules
from typing import Any

import torch

from modular_kernel import forks, modes
from modular_kernel.execution import Execution
from modular_kernel.plan import BoundCalls
from modular_kernel.replay import capturing
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.types import Problem
from modular_kernel.workspace import BufferSpec, Workspace, workspace_bytes

SMALLEST_CAPACITY = 16
# At 1024 tokens Qwen3-30B's layer takes an H200 0.35 ms; a call without a plan its host 0.3 to 1.1.
LARGEST_PLANNED = 2048
_MOST_PLANS = 128  # of one kernel
_MOST_STREAMS = 8  # whose memory is kept
_GRANULARITY = 1 << 21  # bytes: as torch's allocator rounds large blocks

_C: Any = torch._C


def capacity_of(tokens: int) -> int:
    """Return the power of two that serves a call of so many tokens."""
    return max(SMALLEST_CAPACITY, 1 << max(tokens - 1, 0).bit_length())


class StreamMemory:
    """Workspace memory that the calls on one CUDA stream share; on a CPU, the calls of a process.

    lock: held while the host issues a call, so that launches of two calls do not mix. busy: a call
    is being issued: a thread that holds the lock and finds it set is inside that call.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()
        self.busy = False
        self._device = device
        self._memory: torch.Tensor | None = None
        self._users: weakref.WeakSet[_CallPlan] = weakref.WeakSet()

    @property
    def nbytes(self) -> int:
        """Bytes held at the moment."""
        return 0 if self._memory is None else self._memory.nbytes

    def reserve(self, nbytes: int, user: "_CallPlan") -> torch.Tensor:
        """Return at least `nbytes` bytes (uint8), for `user` until its `release` is called.

        Where that is more than before, every other user is released first: what it recorded holds
        addresses of the smaller memory.
        """
        memory = self._memory
        if memory is None or memory.nbytes < nbytes:
            self.release()
            size = -(-nbytes // _GRANULARITY) * _GRANULARITY
            with modes.kept():
                memory = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._memory = memory
            _memories.keep_few(self)
        self._users.add(user)
        return memory

    def after_fork(self) -> None:
        """In a forked child, end the call of a thread that is not there, half done as it is."""
        if not forks.renew(self.lock):
            self.busy = False
            self.release()

    def release(self) -> None:
        """Free the memory. The lock must be held, or no other thread be in a call."""
        for user in tuple(self._users):
            user.release()
        self._users.clear()
        self._memory = None


_PLAIN = (torch.Tensor, torch.nn.Parameter)  # no subclass that is not made of memory alone

_Stream = tuple[int, int]  # the device's index, -1 for the CPU; the stream's handle


class StreamMemories:
    """The memory of every stream that calls were made on, in the order of the first ones."""

    def __init__(self) -> None:
        self._memories: OrderedDict[_Stream, StreamMemory] = OrderedDict()
        self._lock = threading.RLock()
        forks.on_fork(self)

    def after_fork(self) -> None:
        """In a forked child, unlock what a thread that is not there had locked."""
        forks.renew(self._lock)
        for memory in self._memories.values():
            memory.after_fork()

    def of(self, device: torch.device, stream: int) -> StreamMemory:
        """Return the memory shared by calls on a stream of `device`; 0 is the CPU's only one."""
        key = (_index_of(device), stream)
        with self._lock:
            found = self._memories.get(key)
            if found is None:
                found = self._memories[key] = StreamMemory(device)
            return found

    def held_bytes(self) -> dict[_Stream, int]:
        """Return how many bytes are held, by (device index, stream)."""
        with self._lock:
            return {key: memory.nbytes for key, memory in self._memories.items() if memory.nbytes}

    def keep_few(self, newest: StreamMemory) -> None:
        """Free the memory of streams that came first, where too many hold some."""
        with self._lock:
            holders = [memory for memory in self._memories.values() if memory.nbytes]
        for memory in holders[: max(len(holders) - _MOST_STREAMS, 0)]:
            if memory is newest or not memory.lock.acquire(blocking=False):
                continue
            try:
                if not memory.busy:
                    memory.release()
            finally:
                memory.lock.release()


_memories = StreamMemories()


def held_bytes() -> dict[_Stream, int]:
    """Return how many bytes of workspace are held between calls, by (device index, stream).

    The index of the CPU is -1, and its only stream is 0.
    """
    return _memories.held_bytes()


class CallPlans:
    """The plans of one kernel's calls of up to `most_tokens` tokens; 0 where it keeps none.

    A copy has no plans yet.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = min(most_tokens, LARGEST_PLANNED)
        self._plans: OrderedDict[tuple[int, int, int], _CallPlan] = OrderedDict()
        self._lock = threading.RLock()
        forks.on_fork(self)

    def __reduce__(self) -> tuple[type["CallPlans"], tuple[int]]:
        return CallPlans, (self._most_tokens,)

    def after_fork(self) -> None:
        """In a forked child, unlock, and forget plans on a GPU: its context is the parent's."""
        forks.renew(self._lock)
        if any(index >= 0 for index, *_ in self._plans):
            self._plans.clear()
            self._most_tokens = 0

    @property
    def capacities(self) -> tuple[int, ...]:
        """The most tokens of each plan, ascending."""
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
        """Run a call on its plan; None if it has to allocate its own workspace."""
        if not self._most_tokens or type(x_TH) not in _PLAIN or not x_TH.dim():
            return None
        tokens, index, stream = x_TH.shape[0], -1, 0
        if tokens > self._most_tokens or kernel.experts.is_overridden():
            return None
        if x_TH.is_cuda:
            index = x_TH.get_device()
            if index != _C._cuda_getDevice() or _C._cuda_isCurrentStreamCapturing():
                return None
            trees = modules.get("torch._inductor.cudagraph_trees")
            if trees is not None and _in_graph_trees(trees, index):
                return None
            stream = _C._cuda_getCurrentRawStream(index)
        plan = self._plans.get((index, stream, (tokens - 1).bit_length()))
        if plan is None:
            plan = self._made(kernel, x_TH.device, stream, tokens)
            if plan is None:
                return None
        return plan.run(x_TH, weights, routing, out)

    def reserve(self, kernel: Execution, device: torch.device, tokens: int) -> None:
        """Make the plan of calls of `tokens` tokens now, if they would have one."""
        if tokens <= self._most_tokens and may_keep_buffers(device):
            stream = 0
            if device.type == "cuda":
                device = torch.device("cuda", _index_of(device))
                stream = torch.cuda.current_stream(device).cuda_stream
            plan = self._made(kernel, device, stream, tokens)
            if plan is not None:
                plan.bind_unless_busy()

    def _made(
        self, kernel: Execution, device: torch.device, stream: int, tokens: int
    ) -> "_CallPlan | None":
        if device.type != kernel.machine.device:  # refused by the call's checks
            return None
        index = _index_of(device)
        capacity = min(capacity_of(tokens), kernel.problem.tokens)
        with self._lock:
            of_stream = (p for key, p in self._plans.items() if key[:2] == (index, stream))
            plan = next((p for p in of_stream if p.problem.tokens == capacity), None)
            if plan is None:
                problem = kernel.problem.with_tokens(capacity)
                plan = _CallPlan(kernel, problem, device, _memories.of(device, stream))
            self._plans[index, stream, (tokens - 1).bit_length()] = plan
            while len(self._plans) > _MOST_PLANS:
                self._plans.popitem(last=False)
        return plan


class _CallPlan(BoundCalls):
    """A plan in shared memory, whose calls return a new tensor each."""

    def __init__(
        self, kernel: Execution, problem: Problem, device: torch.device, memory: StreamMemory
    ) -> None:
        super().__init__(kernel, problem, device)
        self._memory = memory
        self._specs: dict[str, BufferSpec] = kernel.workspace_specs(problem.tokens)
        self._nbytes = workspace_bytes(self._specs)
        self._bound = False
        self._shapes: dict[torch.Size, tuple[int, ...]] = {}
        with modes.kept():
            self._nothing = torch.empty(0, dtype=problem.dtype, device=device)

    def run(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Run a call; None if another one is being issued whose memory this one must not touch.

        That is a call which this one is made in or, on a CPU, any: calls of threads run side by
        side there, while those of a stream take turns anyway.
        """
        memory = self._memory
        if not memory.lock.acquire(blocking=self._index is not None):
            return None
        try:
            if memory.busy:
                return None
            memory.busy = True
            try:
                if not self._bound and not self._bind():
                    return None
                return self._call(x_TH, weights, routing, out)
            finally:
                memory.busy = False
        finally:
            memory.lock.release()

    def bind_unless_busy(self) -> None:
        """Reserve the memory now, unless this thread is in a call that uses it."""
        with self._memory.lock:
            if not self._memory.busy and not self._bound:
                self._bind()

    def _bind(self) -> bool:
        """Lay the workspace out in the shared memory; False if there is none to be had."""
        try:
            memory = self._memory.reserve(self._nbytes, self)
        except torch.OutOfMemoryError:  # the call itself may need less
            return False
        with modes.kept():
            self._workspace = Workspace(self._specs, self._device, memory=memory)
        self._bound = True
        return True

    def release(self) -> None:
        """Forget the shared memory, and everything that holds its addresses."""
        self._bound = False
        vars(self).pop("_workspace", None)
        self._forget_recorded()

    def _output_of(self, x_TH: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor | None:
        if self.problem.inplace:
            return x_TH
        if out is not None:
            return out
        shape = self._shapes.get(x_TH.shape)
        return None if shape is None else self._new(shape)

    def _checked_output(self, x_TH: torch.Tensor) -> torch.Tensor:
        tokens = 0 if self._makes_output else x_TH.shape[0]
        shape = self._shapes[x_TH.shape] = (tokens, *self.problem.output_shape[1:])
        return self._new(shape)

    def _new(self, shape: tuple[int, ...]) -> torch.Tensor:
        if self._makes_output:
            return self._nothing
        return torch.empty(shape, dtype=self.problem.dtype, device=self._device)


def may_keep_buffers(device: torch.device) -> bool:
    """Whether memory taken now is this process's own, and not the pool of a CUDA graph.

    A capture, and torch.compile's CUDA graphs while they warm up, take it from the graph's pool,
    which every replay writes to.
    """
    if device.type != "cuda":
        return True
    trees = modules.get("torch._inductor.cudagraph_trees")
    in_trees = trees is not None and _in_graph_trees(trees, _index_of(device))
    return not (in_trees or capturing(device))


def _index_of(device: torch.device) -> int:
    """Return the index of a GPU, which is the current one where none is named; -1 for the CPU."""
    index: int | None = device.index
    if device.type != "cuda":
        return -1
    return torch.cuda.current_device() if index is None else index


def _in_graph_trees(trees: Any, index: int) -> bool:
    manager: Callable[..., object] = trees.get_manager
    return manager(index, create_if_none_exists=False) is not None
