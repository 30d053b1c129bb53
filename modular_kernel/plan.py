"""Plan: a kernel bound to its buffers, and to what its first calls launched."""

import threading
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from modular_kernel import forks, modes, replay, stages, validate
from modular_kernel.errors import ConfigurationError, DeviceError, StateError
from modular_kernel.execution import Execution, Pending
from modular_kernel.tensor_checks import span, wants_gradient
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.types import Problem
from modular_kernel.workspace import Workspace


class BoundCalls:
    """Calls of a kernel in one workspace, of at most `problem.tokens` tokens.

    Weights are checked once per ExpertWeights object, and again where a tensor's memory was
    exchanged. Where both parts are replayable, the launches of the first call of a signature (the
    shapes, strides, dtypes and alignment of all tensors) are recorded, and later calls replay them.
    Subclasses set `_workspace` and say where a call writes.
    """

    _workspace: Workspace

    def __init__(self, kernel: Execution, problem: Problem, device: torch.device) -> None:
        self.kernel, self.problem = kernel, problem
        self._device = device
        self._index: int | None = device.index if device.type == "cuda" else None
        self._makes_output = kernel.prepare_finalize.makes_output and not problem.inplace
        self._recorded = replay.RecordedCalls()
        kernel.count_invalid_ids_on(device)

    def _output_of(self, x_TH: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor | None:
        """Return where a call writes; None if no call had x's shape, which is then checked."""
        raise NotImplementedError

    def _checked_output(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Return where a call writes that names no output, and whose x was checked."""
        raise NotImplementedError

    def _holds_own_output(self, pointers: Sequence[int]) -> bool:
        """Whether one of the addresses lies in an output that these calls reuse."""
        return False

    def _check_own_output(self, x_TH: torch.Tensor, routing: Routing, output: torch.Tensor) -> None:
        """Raise ConfigurationError if a call reads an output that these calls reuse."""

    def _forget_recorded(self) -> None:
        self._recorded = replay.RecordedCalls()

    def _call(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Make a call in its turn."""
        try:
            validate.check_dense(x_TH, routing, out)
            validate.check_adapters_given(routing, self.problem)
        except Exception as error:
            self.kernel.prepare_finalize.refuse(error)
            raise
        bound = self.kernel.known_weights.bound(weights, self._device)
        output = self._output_of(x_TH, out)
        new = bound is None or output is None
        if bound is None or output is None:
            bound, output = self._checked(x_TH, weights, routing, out, output)
        tensors = _tensors(x_TH, routing, output)
        try:
            signature, pointers = replay.signature_and_pointers(tensors, bound)
        except RuntimeError:  # a tensor without memory
            self._checked(x_TH, weights, routing, out, output)
            raise
        recorded = self._recorded.find(signature)
        if recorded is None or not self._may_replay(recorded, tensors, pointers, bound, out):
            if not new:
                self._checked(x_TH, weights, routing, out, output)
            return self._run(x_TH, weights, routing, output, signature, named=out is not None)
        # All that the checks read is in the signature, but for this and what `_may_replay` asks.
        if wants_gradient((*tensors, *bound.tensors)):
            validate.check_no_grad(x_TH, weights, routing, out)
        self._poison(output)
        recorded.replay(_current_stream(self._index), pointers)
        torch.autograd.graph.increment_version(output)
        self._check_red_zones(replayed=True)
        return output

    def _may_replay(
        self,
        recorded: replay.RecordedCall,
        tensors: tuple[torch.Tensor, ...],
        pointers: Sequence[int],
        bound: replay.CheckedWeights,
        out: torch.Tensor | None,
    ) -> bool:
        """Tell whether nothing forbids it that the call's signature does not tell.

        That is memory that was freed, or that is written and read, or somebody who watches the
        stages or launches.

        tensors: x, those of the routing, and the output if that is not x.
        """
        if 0 in pointers:
            return False
        inplace = self.problem.inplace
        if out is not None and inplace:
            return False
        if out is not None or inplace:
            *read, written = (*tensors[1:], tensors[0]) if inplace else tensors
            start, stop = span(written)
            spans = (*map(span, read), *bound.spans)
            if any(start < its_stop and its_start < stop for its_start, its_stop in spans):
                return False
        elif self._holds_own_output(pointers[: len(tensors) - 1]):
            return False
        return not (stages.profiling() or recorded.watched())

    def _checked(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor | None,
        output: torch.Tensor | None,
    ) -> tuple[replay.CheckedWeights, torch.Tensor]:
        """Raise the InputError of the first tensor that does not fit, and tell other ranks; else
        the weights are bound, and where to write is known."""
        try:
            return self._fitting(x_TH, weights, routing, out, output)
        except Exception as error:
            self.kernel.prepare_finalize.refuse(error)
            raise

    def _fitting(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor | None,
        output: torch.Tensor | None,
    ) -> tuple[replay.CheckedWeights, torch.Tensor]:
        validate.check_input(x_TH, self.problem, self.kernel.machine.device)
        if x_TH.device != self._device:
            need = f"{self._device}, where the plan's buffers are"
            raise DeviceError("x", got=x_TH.device, need=need)
        bound = self.kernel.check_weights(weights, x_TH)
        self.kernel.check_call(x_TH, weights, routing, out)
        if output is None:
            output = self._output_of(x_TH, out)
        if output is None:
            output = self._checked_output(x_TH)
        if out is None and not self.problem.inplace:
            self._check_own_output(x_TH, routing, output)
        return bound, output

    def _run(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor,
        signature: Hashable,
        *,
        named: bool,
    ) -> torch.Tensor:
        """Run a checked call by the parts' host code; record the first of its signature.

        named: the caller asked for the output in `out`.
        """
        kernel = self.kernel
        bound = kernel.known_weights.bound(weights, self._device)
        assert bound is not None
        self._poison(out)
        if self._makes_output and not named:
            return self._start(x_TH, weights, routing, None).finish()
        if not kernel.replayable or not self._recorded.wants(signature) or out.numel() == 0:
            return self._start(x_TH, weights, routing, out).finish()
        with replay.recording((*_tensors(x_TH, routing, out), *bound.tensors)) as recorder:
            kernel.finish(self._start(x_TH, weights, routing, out))
        self._recorded.keep(signature, recorder.recorded())
        self._check_red_zones()
        return out

    def _start(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor | None,
    ) -> Pending:
        return self.kernel.start_checked(x_TH, weights, routing, out, self._workspace, at_once=True)

    def _poison(self, out: torch.Tensor) -> None:
        if self.kernel.poison:
            self.kernel.poison_output(out, self._workspace.poison())

    def _check_red_zones(self, *, replayed: bool = False) -> None:
        if self.kernel.poison:
            self._workspace.check_red_zones(replayed=replayed)


class Plan(BoundCalls):
    """A kernel with everything bound: a call allocates nothing and can be captured in a graph.

    Calls of one plan share its buffers: threads take turns on the host, and what they launch must
    be on one stream, or not be in flight together (make two plans). The tensor returned is the
    plan's own, one for each thread, until that thread's next call, or a new one of a part that
    makes its output, unless `out` is given or the problem is inplace. Weights are checked once per
    ExpertWeights object, and again where a tensor's memory was exchanged. Where both parts are
    replayable, whatever they decide on the host they decide in the first call of a signature (one
    with other shapes, say, has another); the next ones launch what that one launched.
    """

    def __init__(self, kernel: Execution, problem: Problem) -> None:
        device = torch.device(kernel.machine.device)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(kernel, problem, device)
        specs = kernel.workspace_specs(problem.tokens)
        with modes.kept():
            self._workspace = Workspace(specs, device, poison=kernel.poison)
        rows = 0 if self._makes_output else problem.tokens
        shape = (rows, *problem.output_shape[1:])
        self._own = _Outputs(shape, problem.dtype, device)
        self._turn: AbstractContextManager[Any] = threading.RLock()
        self._busy = False
        forks.on_fork(self)

    def __reduce__(self) -> tuple[type["Plan"], tuple[Execution, Problem]]:
        """Copy and pickle a plan as its kernel and problem: a copy has buffers of its own."""
        return Plan, (self.kernel, self.problem)

    def after_fork(self) -> None:
        """In a forked child, end the call of a thread that is not there, or bar every call."""
        on_gpu = self._device.type == "cuda"
        if on_gpu or self.problem.parallel.world_size > 1:
            whose = "a CUDA context" if on_gpu else "a process group"
            need = f"a spawned process, with a plan of its own: {whose} does not survive a fork"
            self._turn, self._index = forks.Barred("a plan", need), None
        elif not forks.renew(self._turn):
            self._busy = False

    def __repr__(self) -> str:
        return f"<plan of {self.kernel.pairing}, {self.problem}: {self.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        """Bytes of workspace held, the output apart."""
        return self._workspace.nbytes

    @modes.untraced
    def __call__(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run a call as the kernel does, for T <= the plan's tokens (CapacityError else).

        StateError if called from within a call of the same plan.
        """
        index = self._index
        if index is not None and torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self(x_TH, weights, routing, out=out)
        with self._turn:
            if self._busy:  # by this thread: others wait
                need = "another plan, or the end of that call"
                raise StateError("a plan", got="a call within its own call", need=need)
            self._busy = True
            try:
                return self._call(x_TH, weights, routing, out)
            finally:
                self._busy = False

    def _output_of(self, x_TH: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor | None:
        if self.problem.inplace:
            return x_TH
        return self._own.rows.get(x_TH.shape) if out is None else out

    def _checked_output(self, x_TH: torch.Tensor) -> torch.Tensor:
        output = self._own.rows[x_TH.shape] = self._own.whole[: x_TH.shape[0]]
        return output

    def _holds_own_output(self, pointers: Sequence[int]) -> bool:
        return self._own.holds(pointers)

    def _check_own_output(self, x_TH: torch.Tensor, routing: Routing, output: torch.Tensor) -> None:
        """Check that what is read lies apart from the plan's own output.

        That output of the last call may be x of the next one, row upon row.
        """
        parts = (self.kernel.prepare_finalize, self.kernel.experts)
        same = x_TH.shape == output.shape and x_TH.is_contiguous()
        same &= x_TH.data_ptr() == output.data_ptr() and all(p.requires.inplace for p in parts)
        read = {"topk_weights": routing.topk_weights_TK, "topk_ids": routing.topk_ids_TK}
        if routing.slots_T is not None:
            read["adapters"] = routing.slots_T
        for name, tensor in (read if same else {"x": x_TH, **read}).items():
            if tensor.numel() and self._own.holds([tensor.data_ptr()]):
                need = "memory of its own: a copy, or another plan's output"
                raise ConfigurationError(name, got="memory of the plan's own output", need=need)


class _Outputs(threading.local):
    """A thread's own output. whole: of the most tokens; rows: its first ones, by x's shape."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        with modes.kept():
            self.whole = torch.empty(shape, dtype=dtype, device=device)
        self.rows: dict[torch.Size, torch.Tensor] = {}
        self._start, self._stop = span(self.whole)

    def holds(self, pointers: Sequence[int]) -> bool:
        """Tell whether one of them leads into it."""
        start, stop = self._start, self._stop
        for pointer in pointers:  # noqa: SIM110  in every call, so without a generator
            if start <= pointer < stop:
                return True
        return False


def _tensors(x_TH: torch.Tensor, routing: Routing, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a call's tensors besides its weights, each once."""
    tensors: tuple[torch.Tensor, ...] = (x_TH, routing.topk_weights_TK, routing.topk_ids_TK)
    if (slots_T := routing.slots_T) is not None:
        tensors = (*tensors, slots_T)
    return tensors if out is x_TH else (*tensors, out)


def _current_stream(index: int | None) -> int:
    """Return what triton launches on: the device's current stream, as a number; 0 on a CPU."""
    stream: int = 0 if index is None else torch._C._cuda_getCurrentRawStream(index)
    return stream
