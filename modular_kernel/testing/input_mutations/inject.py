"""Inject a defect into a kernel by wrapping its two components ("parts") and its calls.

A call has three steps. `prepare` of the exchange part dispatches tokens to the experts and returns
them with a handle. The experts part computes output rows. `finalize` of the exchange part combines
these rows with the help of the handle. A `CallMutant` has a hook for each step that it changes. The
other steps are not changed, so the kernel behaves as if a part had the defect.
"""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch

from modular_kernel.catalog import check, load_catalog
from modular_kernel.compatibility.support import ExpertsRequirements, PrepareFinalizeRequirements
from modular_kernel.contracts import (
    CallState,
    PermuteExpertsUnpermute,
    PrepareAndFinalize,
    TopKWeightAndReduce,
)
from modular_kernel.kernel import FusedMoEModularKernel, Pending
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import (
    Dispatched,
    DispatchShape,
    ExpertWeights,
    Handle,
    Routing,
)
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.input_mutations.effect import (
    Effect,
    record_effect,
    record_reads,
)
from modular_kernel.workspace import BufferSpec, Workspace, WorkspaceShapes

DefectState = dict[str, Any]  # state that a defect wrongly keeps between calls
PrepareResult = tuple[Dispatched, Handle]  # what `prepare` returns


@dataclass(frozen=True)
class CallArguments:
    """The arguments of one call, and the state that a defect keeps between calls."""

    x_TH: torch.Tensor
    weights: ExpertWeights
    routing: Routing
    problem: Problem
    defect_state: DefectState


@dataclass(frozen=True)
class StartedCall:
    """A call after its dispatch.

    Attributes:
        arguments: the arguments that the caller passed.
        out: the output tensor.
        initial_out: a copy of `out` from before the call.
        workspace: the workspace of the call.
        specs: the buffers of the workspace by name.
    """

    arguments: CallArguments
    out: torch.Tensor
    initial_out: torch.Tensor
    workspace: Workspace
    specs: Mapping[str, BufferSpec]


def _allow_any_pair(_pf: PrepareFinalizeRequirements, _experts: ExpertsRequirements) -> bool:
    return True


@dataclass(frozen=True)
class CallMutant:
    """One defect: its name, description, conditions, and at least one hook.

    Conditions:

    - applies: returns whether the defect must be visible with a problem and a kind of routing.
    - pairs: returns whether the defect can occur in a pairing with these requirements.
    - device: the only device type on which the defect can occur; None for any device type.
    - quantized: whether the defect occurs in quantized schemes; otherwise, in unquantized problems.

    Hooks:

    - problem: changes the parts' problem.
    - arguments: changes the arguments of the call.
    - dispatched: changes the tokens that the experts receive.
    - rows: changes the output of the experts in place, given also the tokens that they received.
    - handle: changes the handle that finalize receives.
    - receive: maps the result of `prepare` to the function that provides it to `finish`.
    - started: called after the dispatch.
    - finished: called last; may return a tensor that replaces the output.
    """

    name: str
    description: str
    applies: Callable[[Problem, str], bool]
    _: KW_ONLY
    pairs: Callable[[PrepareFinalizeRequirements, ExpertsRequirements], bool] = _allow_any_pair
    device: str | None = None
    problem: Callable[[Problem], Problem] | None = None
    arguments: Callable[[CallArguments], CallArguments] | None = None
    dispatched: Callable[[Dispatched], Dispatched] | None = None
    rows: Callable[[torch.Tensor, Dispatched], None] | None = None
    handle: Callable[[Handle], Handle] | None = None
    receive: Callable[[PrepareResult, DefectState], Callable[[], PrepareResult]] | None = None
    started: Callable[[StartedCall], None] | None = None
    finished: Callable[[StartedCall], torch.Tensor | None] | None = None
    quantized: bool = False

    def occurs(self, case: Case, machine: Machine) -> bool:
        """Return whether the defect can occur and must be visible in this case."""
        catalog = load_catalog()
        pf, experts = catalog.prepare_finalize(case.prepare_finalize), catalog.experts(case.experts)
        if case.problem.scheme.quantized is not self.quantized:
            return False  # quantization hides small defects, and defects of scales need scales
        if self.device not in (None, machine.device) or not self.applies(
            case.problem, case.routing
        ):
            return False
        problem = self.problem(case.problem) if self.problem else case.problem
        return self.pairs(pf.requires, experts.requires) and check(pf, experts, problem, machine).ok

    def build(
        self, case: Case, machine: Machine, poison: bool, group: object | None = None
    ) -> FusedMoEModularKernel:
        """Make the kernel of a case with this defect.

        group: the process group, with several ranks.
        """
        catalog = load_catalog()
        problem = self.problem(case.problem) if self.problem else case.problem
        hooks = (self.arguments, self.rows, self.receive, self.started, self.finished)
        has_effect = problem != case.problem or any(hook is not None for hook in hooks)
        record_effect(self.name, Effect.USED if has_effect else Effect.NONE)
        pf = catalog.prepare_finalize(case.prepare_finalize)(problem, group)
        experts = catalog.experts(case.experts)(problem)
        return MutatedKernel(
            self,
            wrap(pf, self, case.problem),
            wrap_experts(experts, self, case.problem),
            machine=machine,
            poison=poison,
        )


class MutatedKernel(FusedMoEModularKernel):
    """A kernel of wrapped parts whose calls pass through a mutant."""

    def __init__(
        self,
        mutant: CallMutant,
        prepare_finalize: PrepareAndFinalize,
        experts: PermuteExpertsUnpermute,
        *,
        machine: Machine,
        poison: bool,
    ) -> None:
        super().__init__(prepare_finalize, experts, machine=machine, poison=poison)
        self.mutant = mutant
        self.defect_state: DefectState = {}

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
    ) -> Pending:
        assert out is not None  # wrapped parts do not allocate the output
        original = CallArguments(x_TH, weights, routing, self.problem, self.defect_state)
        args = self.mutant.arguments(original) if self.mutant.arguments else original
        pending = super().start_checked(
            args.x_TH,
            args.weights,
            args.routing,
            out,
            workspace,
            at_once=at_once,
            same_on_ranks=same_on_ranks,
        )
        specs = self.workspace_specs(x_TH.shape[0])
        started = StartedCall(original, out, out.clone(), workspace, specs)
        if self.mutant.started:
            self.mutant.started(started)
        receive = pending.receive
        if self.mutant.receive:
            receive = self.mutant.receive(receive(), self.defect_state)
        return MutatedPending(
            self,
            receive,
            args.weights,
            workspace,
            out,
            pending.tokens,
            mutant=self.mutant,
            started=started,
        )


@dataclass(frozen=True)
class MutatedPending(Pending):
    """A call in flight whose end calls the mutant's `finished` hook."""

    mutant: CallMutant = field(kw_only=True)
    started: StartedCall = field(kw_only=True)

    def finish(self) -> torch.Tensor:
        out = super().finish()
        if self.mutant.finished is None:
            return out
        replacement = self.mutant.finished(self.started)
        return out if replacement is None else replacement


def wrap(part: PrepareAndFinalize, mutant: CallMutant, problem: Problem) -> PrepareAndFinalize:
    """Wrap `part` so that `mutant.handle` is called. The wrapper has the same requirements."""
    declared = {"requires": part.requires, "prepares_at_once": part.prepares_at_once}
    wrapper = type(type(part).__name__, (_WrappedPrepareAndFinalize,), declared)
    wrapped: PrepareAndFinalize = wrapper(part, mutant, problem)
    return wrapped


def wrap_experts(
    part: PermuteExpertsUnpermute, mutant: CallMutant, problem: Problem
) -> PermuteExpertsUnpermute:
    """Wrap `part` so that `mutant.dispatched` and `mutant.rows` are called; see `wrap`."""
    wrapper = type(type(part).__name__, (_WrappedExperts,), {"requires": part.requires})
    wrapped: PermuteExpertsUnpermute = wrapper(part, mutant, problem)
    return wrapped


class _WrappedPrepareAndFinalize(PrepareAndFinalize):
    def __init__(self, part: PrepareAndFinalize, mutant: CallMutant, problem: Problem) -> None:
        super().__init__(problem)
        self.part, self.mutant = part, mutant

    def destroy(self) -> None:
        self.part.destroy()

    def dispatch_shape(self, tokens: int) -> DispatchShape:
        return self.part.dispatch_shape(tokens)

    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        return self.part.workspace_shapes(tokens)

    def prepare(
        self, x_TH: torch.Tensor, routing: Routing, *, weights: ExpertWeights, call: CallState
    ) -> PrepareResult:
        return self.part.prepare(x_TH, routing, weights=weights, call=call)

    def prepare_no_receive(
        self, x_TH: torch.Tensor, routing: Routing, *, weights: ExpertWeights, call: CallState
    ) -> Callable[[], PrepareResult]:
        return self.part.prepare_no_receive(x_TH, routing, weights=weights, call=call)

    def finalize(
        self,
        expert_output: torch.Tensor,
        *,
        handle: Handle,
        reduce: TopKWeightAndReduce,
        out: torch.Tensor,
    ) -> None:
        if self.mutant.handle:
            changed = self.mutant.handle(handle)
            handle = record_reads(self.mutant.name, handle, changed)
        self.part.finalize(expert_output, handle=handle, reduce=reduce, out=out)


class _WrappedExperts(PermuteExpertsUnpermute):
    def __init__(self, part: PermuteExpertsUnpermute, mutant: CallMutant, problem: Problem) -> None:
        super().__init__(problem)
        self.part, self.mutant = part, mutant

    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        return self.part.workspace_shapes(shape)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return self.part.finalize_weight_and_reduce_impl()

    def roundings(self, x_TH: torch.Tensor, weights: ExpertWeights) -> Roundings | None:
        return self.part.roundings(x_TH, weights)

    def apply(
        self,
        tokens: Dispatched,
        *,
        weights: ExpertWeights,
        workspace: Workspace,
        output: torch.Tensor,
    ) -> None:
        if self.mutant.dispatched:
            changed = self.mutant.dispatched(tokens)
            if changed is not tokens:
                record_effect(self.mutant.name, Effect.USED)
            tokens = changed
        self.part.apply(tokens, weights=weights, workspace=workspace, output=output)
        if self.mutant.rows:
            self.mutant.rows(output, tokens)
