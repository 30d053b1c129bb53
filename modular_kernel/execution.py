"""The steps of a call, which a kernel and its plans share: check, start, finish.

    execution.check(x_TH, weights, routing, out)
    pending = execution.start_checked(x_TH, weights, routing, out, workspace)   # prepare
    y_TH = pending.finish()                                                     # experts, finalize

A kernel makes a workspace for each call, a plan one for all of its own.
"""

import logging
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from modular_kernel import validate
from modular_kernel.contracts import (
    Call,
    PermuteExpertsUnpermute,
    PrepareAndFinalize,
    Receiver,
    TopKWeightAndReduce,
)
from modular_kernel.errors import ConfigurationError, StateError
from modular_kernel.quant import prepared
from modular_kernel.replay import modes, recording, stages
from modular_kernel.spec.problem import ActivationFormat, Combine, Machine, Problem, Reduce
from modular_kernel.tensors import (
    BatchedShape,
    ContiguousShape,
    ContiguousTokens,
    Dispatched,
    DispatchShape,
    ExpertWeights,
    Handle,
    Routing,
)
from modular_kernel.utils import forks
from modular_kernel.utils.argument_checks import shown
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
    """Two parts that were judged to fit, and the steps of a call through them.

    machine: where it runs. checked, poison: as FusedMoEModularKernel has them. Raises
    ConfigurationError if the experts' reducer is not the one that they declare.
    """

    def __init__(
        self,
        prepare_finalize: PrepareAndFinalize,
        experts: PermuteExpertsUnpermute,
        *,
        machine: Machine,
        checked: bool,
        poison: bool,
    ) -> None:
        self.prepare_finalize, self.experts = prepare_finalize, experts
        self._pairing = f"{type(prepare_finalize).__name__} x {type(experts).__name__}"
        self.machine = machine
        self.problem: Problem = experts.problem
        if prepare_finalize.requires.rounds_capacity:
            prepare_finalize.round_capacity(experts.requires.capacity_multiple)
        self.reduce = _reduce_of(experts)
        # The experts' output is the layer's own where finalize has nothing left to move.
        standard = experts.requires.activation_format is ActivationFormat.STANDARD
        self._moves_rows = (
            self.problem.parallel.world_size > 1 and not prepare_finalize.requires.replicated_input
        )
        nothing_left = self.reduce.kind is Reduce.NOOP or (self.reduce.kind is None and standard)
        self._experts_write_out = (
            nothing_left and not self._moves_rows and not prepare_finalize.makes_output
        )
        self._part_keeps_output = (
            prepare_finalize.keeps_expert_output and self.reduce.kind is Reduce.NOOP
        )
        self.checked, self.poison = checked, poison
        self.fills = Fills()  # of poisoned calls without a plan
        self._ids_dtype = prepare_finalize.topk_indices_dtype()
        self._invalid_ids: torch.Tensor | None = None
        self._counter: dict[str, torch.Tensor] = {}
        self._told_invalid_ids = False
        self.known_weights = recording.KnownWeights()
        self._reader = prepared.reader(type(experts), self.problem)
        forks.on_fork(self)

    def after_fork(self) -> None:
        """In a forked child, have torch compute without the threads of the parent."""
        if self.machine.device == "cpu":
            forks.use_one_thread()

    @property
    def pairing(self) -> str:
        """The two parts' names."""
        return self._pairing

    @property
    def replayable(self) -> bool:
        """Whether a plan may replay a call's launches instead of running the parts' host code."""
        return False

    @property
    def invalid_ids(self) -> int:
        """How many ids outside [-1, E) were skipped so far. Synchronizes with the device.

        The first read that finds some logs a warning (logger `modular_kernel.routing`).
        """
        count = self.count_invalid_ids()
        if count and not self._told_invalid_ids:
            self._told_invalid_ids = True
            _LOG.warning(
                "%s skipped %d ids outside [-1, %d): their pairs add nothing to the output; "
                "checked=True raises instead",
                self._pairing, count, self.problem.experts,
            )  # fmt: skip
        return count

    def count_invalid_ids(self) -> int:
        """Return `invalid_ids` without a warning. Synchronizes with the device."""
        return 0 if self._invalid_ids is None else int(self._invalid_ids.item())

    def check(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor | None,
    ) -> None:
        """Raise the InputError that names the first tensor which does not fit the problem."""
        validate.check_dense(x_TH, routing, out)
        validate.check_input(x_TH, self.problem, self.machine.device)
        self.check_weights(weights, x_TH)
        self.check_call(x_TH, weights, routing, out)

    def check_weights(self, weights: ExpertWeights, x_TH: torch.Tensor) -> recording.CheckedWeights:
        """Check weights at their first call, and again where a tensor's memory was exchanged."""
        known = self.known_weights.bound(weights, x_TH.device)
        if known is None:
            validate.check_weights(weights, x_TH, self.problem)
            specs = self.experts.prepared_specs()
            prepared.check_prepared(weights, specs, x_TH.device, self._reader)
            known = self.known_weights.bind(
                weights, prepared.sources(weights), prepared.made(weights)
            )
        return known

    def check_call(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor | None,
    ) -> None:
        """Run the part of `check` that can differ from call to call."""
        validate.check_memory(x_TH, routing, out)
        validate.check_no_grad(x_TH, weights, routing, out)
        validate.check_routing(routing, x_TH, self.problem, self._ids_dtype)
        if out is not None:
            validate.check_out(out, x_TH, self.problem)
        written = x_TH if self.problem.inplace else out
        if written is not None:
            inplace = self.problem.inplace
            validate.check_apart(written, x_TH, weights, routing, inplace=inplace)
        if self.checked:
            validate.check_ids(routing, self.problem)
            validate.check_adapter_slots(routing, self.problem)
            validate.check_expert_map(weights, self.problem)
            validate.check_order(weights, self.problem)
            validate.check_given_scales(weights)

    def workspace_specs(self, tokens: int) -> dict[str, BufferSpec]:
        """Return every buffer that a call of `tokens` tokens takes, from both parts.

        ConfigurationError for what is no number of tokens.
        """
        if type(tokens) is not int or tokens < 0:  # cheaper than `expect`, for every call asks
            raise ConfigurationError("tokens", got=shown(tokens), need="an int >= 0")
        own = self.prepare_finalize.workspace_shapes(tokens)
        shape = self.prepare_finalize.dispatch_shape(tokens)
        chunk = self.problem.chunk_tokens
        piece = shape
        if chunk is not None and isinstance(shape, ContiguousShape) and shape.tokens > chunk:
            piece = replace(shape, tokens=chunk)
        shapes = self.experts.workspace_shapes(piece)
        specs = {**own, **shapes.buffers()}
        if not self._experts_write_out and not self._part_keeps_output:
            whole = shapes if piece is shape else self.experts.workspace_shapes(shape)
            specs[EXPERT_OUTPUT] = whole.output
        return specs

    def output(self, x_TH: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor | None:
        """Return where a call writes; None if the part makes its output."""
        if self.problem.inplace:
            return x_TH
        if out is not None or self.prepare_finalize.makes_output:
            return out
        shape = (x_TH.shape[0], *self.problem.output_shape[1:])
        return torch.empty(shape, dtype=x_TH.dtype, device=x_TH.device)

    def count_invalid_ids_on(self, device: torch.device) -> torch.Tensor:
        """Return the counter behind `invalid_ids`, made at the first need."""
        if self._invalid_ids is None:
            with modes.kept():
                made = torch.zeros(1, dtype=torch.int32, device=device)
            # In one step, so that the first calls of two threads count in the same tensor.
            self._invalid_ids = self._counter.setdefault("invalid_ids", made)
        return self._invalid_ids

    def _defers_quant(self, tokens: int) -> bool:
        """Tell whether activations travel unquantized.

        They do if the experts need it, or do it better in a call that is not split.
        """
        if self.experts.requires.quantizes_input or self.problem.scheme.scales_by_expert:
            return True
        part, chunk = self.prepare_finalize, self.problem.chunk_tokens
        if not part.requires.can_defer_quant or (chunk is not None and tokens > chunk):
            return False
        if self._moves_rows:  # fewer bytes travel quantized
            return False
        return self.experts.takes_unquantized(part.dispatch_shape(tokens))

    def poison_output(self, out: torch.Tensor | None, fill: Fill) -> None:
        """In poison mode, fill what a call must write; x is not for inplace problems."""
        if out is not None and not self.problem.inplace:
            poison_tensor(out, fill)

    @modes.without_autocast
    def start_checked(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor | None,
        workspace: Workspace,
        *,
        at_once: bool = False,
    ) -> "Pending":
        """Start a call as `start` does, with tensors that were checked and the buffers to use.

        out: None if the part makes its output. at_once: the call is finished before anything else
        is launched.
        """
        counter = self._invalid_ids
        if counter is None:
            counter = self.count_invalid_ids_on(x_TH.device)
        call = Call(
            workspace,
            counter,
            defer_quant=self._defers_quant(x_TH.shape[0]),
            pairing=self._pairing,
        )
        part = self.prepare_finalize
        try:
            with stages.stage(stages.PREPARE):
                if part.has_prepare_no_receive() and not (at_once and part.prepares_at_once):
                    arriving = part.prepare_no_receive(x_TH, routing, weights=weights, call=call)

                    def receive() -> tuple[Dispatched, Handle]:
                        with stages.stage(stages.RECEIVE):
                            return arriving()

                else:
                    arrived = part.prepare(x_TH, routing, weights=weights, call=call)

                    def receive() -> tuple[Dispatched, Handle]:
                        return arrived
        except Exception as error:
            (part.abandon if call.told else part.refuse)(error)
            raise
        return Pending(self, receive, weights, workspace, out, x_TH.shape[0])

    @modes.without_autocast
    def finish(self, pending: "Pending") -> torch.Tensor:
        """Run the experts and the combine of `pending`; return where its output is."""
        part, reduce = self.prepare_finalize, self.reduce
        try:
            tokens, handle = pending.receive()
            output = self._expert_output(tokens, handle, pending)
            with stages.stage(stages.EXPERTS):
                self._apply_experts(tokens, pending, output)
            with stages.stage(stages.FINALIZE):
                if pending.out is None:
                    return part.combined(output, handle=handle, reduce=reduce)
                part.finalize(output, handle=handle, reduce=reduce, out=pending.out)
            # As torch's own operations do that write to a tensor.
            torch.autograd.graph.increment_version(pending.out)
            return pending.out
        except Exception as error:
            part.abandon(error)
            raise

    def _expert_output(
        self, tokens: Dispatched, handle: Handle, pending: "Pending"
    ) -> torch.Tensor:
        if self._experts_write_out:
            assert pending.out is not None  # or the part would make it
            return pending.out
        if self._part_keeps_output:
            return self.prepare_finalize.expert_output(handle)
        shape = self.experts.workspace_shapes(_shape_of(tokens)).output.shape
        return pending.workspace.take(EXPERT_OUTPUT, shape)

    def _apply_experts(self, tokens: Dispatched, pending: "Pending", output: torch.Tensor) -> None:
        """Run the experts, in pieces where the problem says so; not at all on zero rows."""
        apply = partial(self.experts.apply, weights=pending.weights, workspace=pending.workspace)
        chunk = self.problem.chunk_tokens
        if isinstance(tokens, ContiguousTokens) and chunk and len(tokens.x_TH) > chunk:
            for start in range(0, len(tokens.x_TH), chunk):
                stop = start + chunk
                apply(tokens.rows(start, stop), output=output[start:stop])
        elif output.numel():
            apply(tokens, output=output)


@dataclass(frozen=True)
class Pending:
    """A call of `tokens` tokens between its dispatch and its experts; `finish` must be called
    exactly once. out: None if the part makes the output."""

    execution: Execution
    receive: Receiver
    weights: ExpertWeights
    workspace: Workspace
    out: torch.Tensor | None
    tokens: int
    # Empty once it is finished: of two threads that pop, one fails.
    _unfinished: list[None] = field(default_factory=lambda: [None], init=False, repr=False)

    @modes.untraced
    def finish(self) -> torch.Tensor:
        """Wait for the dispatch, run the experts, combine; returns the layer's output.

        Raises StateError if it was called before.
        """
        try:
            self._unfinished.pop()
        except IndexError:
            need = "one: its buffers may be another call's by now"
            raise StateError("Pending.finish()", got="a second call", need=need) from None
        output = self.execution.finish(self)
        if self.execution.checked:
            self.execution.prepare_finalize.check()
        if self.execution.poison:
            self.workspace.check_red_zones()
        return output


def _reduce_of(experts: PermuteExpertsUnpermute) -> TopKWeightAndReduce:
    """Return the experts' reducer; its kind must be the one they declare."""
    reduce = experts.finalize_weight_and_reduce_impl()
    declared = experts.requires.reduce if experts.problem.combine is Combine.SUM else None
    if reduce.kind is not declared:
        name = f"{type(experts).__name__}.finalize_weight_and_reduce_impl()"
        raise ConfigurationError(name, got=reduce.kind, need=f"{declared}, as it declares")
    return reduce


def _shape_of(tokens: Dispatched) -> DispatchShape:
    """Return the shape of what arrived, which may be less than what can arrive."""
    if isinstance(tokens, ContiguousTokens):
        return ContiguousShape(*tokens.routing.topk_ids_TK.shape)
    return BatchedShape(*tokens.x_eCH.shape[:2])
