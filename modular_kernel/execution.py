"""Steps of one call, shared by kernels and plans: check, start, finish.

    execution.check(x_TH, weights, routing, out)
    pending = execution.start_checked(x_TH, weights, routing, out, workspace)   # prepare
    y_TH = pending.finish()                                                     # experts, finalize

Without a plan, a kernel allocates a workspace for each call. A plan allocates its workspace once.
"""

import logging
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from modular_kernel import validate
from modular_kernel.contracts import (
    CallState,
    PermuteExpertsUnpermute,
    PrepareAndFinalize,
    Receiver,
    TopKWeightAndReduce,
)
from modular_kernel.errors import ConfigurationError, StateError
from modular_kernel.quant import prepared
from modular_kernel.quant.auto_prepare import WeightPreparer
from modular_kernel.replay import modes, recording, stages
from modular_kernel.spec.problem import ActivationFormat, Combine, Machine, Problem, Reduce
from modular_kernel.tensors import (
    BatchedShape,
    Dispatched,
    DispatchShape,
    ExpertWeights,
    Handle,
    Routing,
    StandardShape,
    StandardTokens,
)
from modular_kernel.utils import forks
from modular_kernel.utils.argument_checks import format_value, resolve_device
from modular_kernel.utils.call_counters import CallCounters, DelayedValue
from modular_kernel.utils.tensor_checks import TensorMemorySnapshot
from modular_kernel.workspace import (
    EXPERT_OUTPUT,
    BufferSpec,
    Fill,
    Fills,
    Workspace,
    poison_tensor,
)

_LOG = logging.getLogger("modular_kernel.routing")


class Execution:
    """Runs the steps of a call through two compatible parts.

    FusedMoEModularKernel describes the arguments. Raises ConfigurationError if the experts' reducer
    is of another kind than the experts declare.
    """

    def __init__(
        self,
        prepare_finalize: PrepareAndFinalize,
        experts: PermuteExpertsUnpermute,
        *,
        machine: Machine,
        checked: bool,
        poison: bool,
        auto_prepare: bool | None,
    ) -> None:
        self.prepare_finalize, self.experts = prepare_finalize, experts
        self._pairing = f"{type(prepare_finalize).__name__} x {type(experts).__name__}"
        self.machine = machine
        self.problem: Problem = experts.problem
        if prepare_finalize.requires.rounds_capacity:
            prepare_finalize.round_capacity(experts.requires.capacity_multiple)
        self.reduce = _make_reducer(experts)
        # The experts can write the layer's output directly if finalize moves no data.
        is_standard = experts.requires.activation_format is ActivationFormat.STANDARD
        self._moves_rows = (
            self.problem.parallel.world_size > 1 and not prepare_finalize.requires.replicated_input
        )
        fully_reduced = self.reduce.kind is Reduce.NOOP or (
            self.reduce.kind is None and is_standard
        )
        self._experts_write_out = (
            fully_reduced and not self._moves_rows and not prepare_finalize.allocates_output
        )
        self._part_keeps_output = (
            prepare_finalize.keeps_expert_output and self.reduce.kind is Reduce.NOOP
        )
        self.checked, self.poison = checked, poison
        self.fills = Fills()  # for poisoned calls without a plan
        self._ids_dtype = prepare_finalize.topk_indices_dtype()
        self._invalid_ids: torch.Tensor | None = None
        self._invalid_ids_once: dict[str, torch.Tensor] = {}  # see count_invalid_ids_on
        self._logged_invalid_ids = False
        self.call_counters = CallCounters()
        self._delayed_invalid_ids = DelayedValue()
        self.label = ""  # name of the layer that uses this kernel, for warnings
        self.auto_prepare = auto_prepare
        self._layout_key = prepared.make_layout_key(type(experts), self.problem)
        self.known_weights = recording.CheckedWeightsCache(
            WeightPreparer(
                experts.prepared_specs, experts.prepare, self._layout_key, enabled=auto_prepare
            )
        )
        forks.on_fork(self)

    def after_fork(self) -> None:
        """Run torch on one thread in a forked child, which has no thread pool."""
        self.call_counters.after_fork()
        if self.machine.device == "cpu":
            forks.use_one_thread()

    @property
    def pairing(self) -> str:
        """Names of the two parts."""
        return self._pairing

    @property
    def replayable(self) -> bool:
        """Whether a plan may replay a call's launches instead of running the parts' host code."""
        return False

    @property
    def invalid_ids(self) -> int:
        """Number of ids outside [-1, E) that were skipped so far. Synchronizes with the device.

        The first nonzero read logs a warning (logger `modular_kernel.routing`).
        """
        count = self.count_invalid_ids()
        if count and not self._logged_invalid_ids:
            self._logged_invalid_ids = True
            _LOG.warning(
                "%s%s skipped %d ids outside [-1, %d): their pairs add nothing to the output; "
                "checked=True raises instead",
                f"{self.label}: " if self.label else "",
                self._pairing, count, self.problem.experts,
            )  # fmt: skip
        return count

    def counters(self) -> dict[str, object]:
        """Return counts of calls and invalid ids; see FusedMoEModularKernel.counters."""
        invalid = self._invalid_ids
        return {
            **self.call_counters.totals(),
            "invalid_ids": 0 if invalid is None else self._delayed_invalid_ids.read(invalid),
        }

    def count_invalid_ids(self) -> int:
        """Return `invalid_ids` without logging a warning. Synchronizes with the device."""
        return 0 if self._invalid_ids is None else int(self._invalid_ids.item())

    def check(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor | None,
    ) -> ExpertWeights:
        """Check the tensors of a call. Return the weights to use: `weights`, or a prepared copy.

        Raises an InputError for the first tensor that does not match the problem.
        """
        validate.check_dense(x_TH, routing, out)
        validate.check_input(x_TH, self.problem, self.machine.device)
        checked = self.check_weights(weights, x_TH)
        self.check_call(x_TH, weights, routing, out)
        return checked.prepared or weights

    def check_weights(self, weights: ExpertWeights, x_TH: torch.Tensor) -> recording.CheckedWeights:
        """Check weights on first use, and again if the memory of a tensor was replaced."""
        checked = self.known_weights.lookup(weights, x_TH.device)
        if checked is None:
            validate.check_weights(weights, x_TH, self.problem)
            specs = self.experts.prepared_specs()
            prepared.check_prepared(weights, specs, x_TH.device, self._layout_key)
            checked = self.known_weights.add(
                weights,
                prepared.list_source_tensors(weights),
                prepared.list_prepared_tensors(weights),
            )
        return checked

    def check_call(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor | None,
    ) -> None:
        """Run the checks whose result can change from call to call."""
        validate.check_memory(x_TH, routing, out)
        validate.check_no_grad(x_TH, weights, routing, out)
        validate.check_routing(routing, x_TH, self.problem, self._ids_dtype)
        if out is not None:
            validate.check_out(out, x_TH, self.problem)
        output_tensor = x_TH if self.problem.inplace else out
        if output_tensor is not None:
            inplace = self.problem.inplace
            validate.check_no_overlap(output_tensor, x_TH, weights, routing, inplace=inplace)
        if self.checked:
            validate.check_ids(routing, self.problem)
            validate.check_adapter_slots(routing, self.problem)
            validate.check_expert_map(weights, self.problem)
            validate.check_w1_order(weights, self.problem)
            validate.check_static_scales(weights)

    def workspace_specs(self, tokens: int) -> dict[str, BufferSpec]:
        """Return the buffers of both parts for a call of `tokens` tokens, by name."""
        if type(tokens) is not int or tokens < 0:  # cheaper than `expect`; runs in every call
            raise ConfigurationError("tokens", got=format_value(tokens), need="an int >= 0")
        pf_specs = self.prepare_finalize.workspace_shapes(tokens)
        shape = self.prepare_finalize.dispatch_shape(tokens)
        chunk = self.problem.chunk_tokens
        chunk_shape = shape
        if chunk is not None and isinstance(shape, StandardShape) and shape.tokens > chunk:
            chunk_shape = replace(shape, tokens=chunk)
        chunk_shapes = self.experts.workspace_shapes(chunk_shape)
        specs = {**pf_specs, **chunk_shapes.buffers()}
        if not self._experts_write_out and not self._part_keeps_output:
            full_shapes = (
                chunk_shapes if chunk_shape is shape else self.experts.workspace_shapes(shape)
            )
            specs[EXPERT_OUTPUT] = full_shapes.output
        return specs

    def output(self, x_TH: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor | None:
        """Return the tensor that a call writes: x, `out` or a new tensor.

        Returns None if the PrepareAndFinalize allocates the output.
        """
        if self.problem.inplace:
            return x_TH
        if out is not None or self.prepare_finalize.allocates_output:
            return out
        shape = (x_TH.shape[0], *self.problem.output_shape[1:])
        return torch.empty(shape, dtype=x_TH.dtype, device=x_TH.device)

    def count_invalid_ids_on(self, device: torch.device) -> torch.Tensor:
        """Return the counter tensor behind `invalid_ids`, allocating it on first use.

        Raises ConfigurationError or DeviceError for a device that is unknown or not available.
        """
        if self._invalid_ids is None:
            device = resolve_device(device, meta=True)
            with modes.disable_inference_mode():
                counter = torch.zeros(1, dtype=torch.int32, device=device)
            # setdefault is atomic: first calls of two threads share one tensor.
            self._invalid_ids = self._invalid_ids_once.setdefault("invalid_ids", counter)
        return self._invalid_ids

    def _defers_quant(self, tokens: int) -> bool:
        """Return whether to dispatch unquantized activations, which the experts then quantize."""
        if self.experts.requires.quantizes_input or self.problem.scheme.scales_by_expert:
            return True
        part, chunk = self.prepare_finalize, self.problem.chunk_tokens
        if not part.requires.can_defer_quant or (chunk is not None and tokens > chunk):
            return False
        if self._moves_rows:  # quantized rows are smaller to send
            return False
        return self.experts.takes_unquantized(part.dispatch_shape(tokens))

    def poison_output(self, out: torch.Tensor | None, fill: Fill) -> None:
        """Fill the output of a call with `fill`, unless the output is x."""
        if out is not None and not self.problem.inplace:
            poison_tensor(out, fill)

    @modes.disable_autocast
    def start_checked(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor | None,
        workspace: Workspace,
        *,
        at_once: bool = False,
        same_on_ranks: str = "",
    ) -> "Pending":
        """Start a call whose tensors have been checked.

        out: the tensor to write; None if the PrepareAndFinalize allocates the output.
        at_once: whether the caller finishes the call before launching anything else.
        same_on_ranks: text that must be the same on all ranks, as in `FusedMoEModularKernel.start`.
        """
        counter = self._invalid_ids
        if counter is None:
            counter = self.count_invalid_ids_on(x_TH.device)
        call = CallState(
            workspace,
            counter,
            defer_quant=self._defers_quant(x_TH.shape[0]),
            pairing=self._pairing,
            same_on_ranks=same_on_ranks,
        )
        part = self.prepare_finalize
        try:
            with stages.stage(stages.PREPARE):
                if part.has_prepare_no_receive() and not (at_once and part.prepares_at_once):
                    receiver = part.prepare_no_receive(x_TH, routing, weights=weights, call=call)

                    def receive() -> tuple[Dispatched, Handle]:
                        with stages.stage(stages.RECEIVE):
                            return receiver()

                else:
                    received = part.prepare(x_TH, routing, weights=weights, call=call)

                    def receive() -> tuple[Dispatched, Handle]:
                        return received
        except BaseException as error:  # an interrupted call must not leave other ranks waiting
            (part.abandon if call.peers_notified else part.refuse)(to_exception(error))
            raise
        memory = None
        if not at_once:
            # If rows move to other ranks, x is not read after the dispatch.
            tensors = {"x": None if self._moves_rows else x_TH, "out": out} | vars(weights)
            tensors |= {"topk_weights": routing.topk_weights_TK, "topk_ids": routing.topk_ids_TK}
            memory = TensorMemorySnapshot(tensors | {"adapters": routing.slots_T})
        return Pending(self, receive, weights, workspace, out, x_TH.shape[0], memory)

    @modes.disable_autocast
    def finish(self, pending: "Pending") -> torch.Tensor:
        """Run the experts and the combine of `pending`, and return its output."""
        part, reduce = self.prepare_finalize, self.reduce
        try:
            tokens, handle = pending.receive()
            output = self._get_expert_output(tokens, handle, pending)
            with stages.stage(stages.EXPERTS):
                self._apply_experts(tokens, pending, output)
            with stages.stage(stages.FINALIZE):
                if pending.out is None:
                    return part.finalize_to_new_tensor(output, handle=handle, reduce=reduce)
                part.finalize(output, handle=handle, reduce=reduce, out=pending.out)
            # Kernels write to the output without torch. Autograd and caches compare its version.
            torch.autograd.graph.increment_version(pending.out)
            return pending.out
        except BaseException as error:  # an interrupted call must not leave other ranks waiting
            part.abandon(to_exception(error))
            raise

    def _get_expert_output(
        self, tokens: Dispatched, handle: Handle, pending: "Pending"
    ) -> torch.Tensor:
        """Return the tensor that the experts of `pending` write."""
        if self._experts_write_out:
            assert pending.out is not None
            return pending.out
        if self._part_keeps_output:
            return self.prepare_finalize.expert_output(handle)
        shape = self.experts.workspace_shapes(_dispatch_shape(tokens)).output.shape
        return pending.workspace.take(EXPERT_OUTPUT, shape)

    def _apply_experts(self, tokens: Dispatched, pending: "Pending", output: torch.Tensor) -> None:
        """Run the experts, in chunks of problem.chunk_tokens if it is set."""
        apply = partial(self.experts.apply, weights=pending.weights, workspace=pending.workspace)
        chunk = self.problem.chunk_tokens
        if isinstance(tokens, StandardTokens) and chunk and len(tokens.x_TH) > chunk:
            for start in range(0, len(tokens.x_TH), chunk):
                stop = start + chunk
                apply(tokens.rows(start, stop), output=output[start:stop])
        elif output.numel():
            apply(tokens, output=output)


@dataclass(frozen=True)
class Pending:
    """A call that has been dispatched, but whose experts have not run.

    `finish` must be called exactly once.

    execution: the kernel.
    receive: waits for the dispatch and returns its result.
    out: the tensor to write; None if the PrepareAndFinalize allocates the output.
    tokens: number of tokens of the call.
    memory: snapshot of the memory of the caller's tensors that `finish` uses. None if `finish` is
        called at once.
    """

    execution: Execution
    receive: Receiver
    weights: ExpertWeights
    workspace: Workspace
    out: torch.Tensor | None
    tokens: int
    memory: TensorMemorySnapshot | None = None
    # `finish` pops the only item. pop is atomic, so a second call raises, even in another thread.
    _unfinished: list[None] = field(default_factory=lambda: [None], init=False, repr=False)

    @modes.disable_tracing
    def finish(self) -> torch.Tensor:
        """Wait for the dispatch, run the experts, combine, and return the layer's output.

        Raises StateError if it is called twice, or if the memory of a tensor of the call was freed,
        resized or replaced after `start`.
        """
        try:
            self._unfinished.pop()
        except IndexError:
            need = "a single call; its buffers may already belong to another call"
            raise StateError("Pending.finish()", got="a second call", need=need) from None
        if self.memory is not None:
            try:
                self.memory.check_unchanged("start")
            except StateError as error:
                self.execution.prepare_finalize.abandon(error)
                raise
        output = self.execution.finish(self)
        if self.execution.checked:
            self.execution.prepare_finalize.check()
        if self.execution.poison:
            self.workspace.check_red_zones()
        return output


def _make_reducer(experts: PermuteExpertsUnpermute) -> TopKWeightAndReduce:
    """Return the experts' reducer. Raises ConfigurationError if its kind was not declared."""
    reduce = experts.finalize_weight_and_reduce_impl()
    declared = experts.requires.reduce if experts.problem.combine is Combine.SUM else None
    if reduce.kind is not declared:
        name = f"{type(experts).__name__}.finalize_weight_and_reduce_impl()"
        raise ConfigurationError(name, got=reduce.kind, need=f"{declared}, as declared")
    return reduce


def _dispatch_shape(tokens: Dispatched) -> DispatchShape:
    """Return the shape of a received dispatch, which may be smaller than the worst case."""
    if isinstance(tokens, StandardTokens):
        return StandardShape(*tokens.routing.topk_ids_TK.shape)
    return BatchedShape(*tokens.x_eCH.shape[:2])


def to_exception(error: BaseException) -> Exception:
    """Return the error, or wrap an interrupt such as KeyboardInterrupt in an InterruptedError."""
    return error if isinstance(error, Exception) else InterruptedError(type(error).__name__)
