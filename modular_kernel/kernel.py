"""FusedMoEModularKernel: a PrepareAndFinalize composed with a PermuteExpertsUnpermute.

kernel = FusedMoEModularKernel(prepare_finalize, experts)   # raises if the parts are incompatible
y_TH = kernel(x_TH, weights, routing)                       # returns a new tensor
plan = kernel.plan()                                        # allocates workspace and output
y_TH = plan(x_TH, weights, routing)                         # allocates nothing
"""

from dataclasses import replace
from functools import partial

import torch

from modular_kernel import validate
from modular_kernel.compatibility.rules import judge
from modular_kernel.contracts import PermuteExpertsUnpermute, PrepareAndFinalize
from modular_kernel.errors import (
    CapacityError,
    ConfigurationError,
    DeviceError,
    IncompatibleError,
    UnsupportedError,
)
from modular_kernel.execution import Execution, Pending
from modular_kernel.machine import current_machine
from modular_kernel.plan import MAX_SHARED_TOKENS, CallPlans, Plan, held_bytes
from modular_kernel.quant import prepared
from modular_kernel.replay import modes
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.tensors import ExpertWeights, Routing, check_weight_tensors
from modular_kernel.text import render_notebook_html
from modular_kernel.utils.argument_checks import Count, expect, resolve_device
from modular_kernel.utils.call_counters import OWN_WORKSPACE
from modular_kernel.workspace import Workspace

__all__ = ["FusedMoEModularKernel", "Pending", "Plan"]


class FusedMoEModularKernel(Execution):
    """A fused MoE layer composed of two compatible parts.

    machine: the machine that the kernel runs on. None detects this machine.
    checked: whether to check the values of ids, adapter slots and maps in every call, which
        synchronizes with the device, and to raise an InputError for an invalid value. If False,
        (token, expert) pairs with an invalid id are skipped and counted in `invalid_ids`.
    poison: for tests; whether to fill the workspace and the output with NaN or other values before
        each call, and to check after each call that no kernel wrote past the end of a buffer, which
        synchronizes.
    auto_prepare: whether to call `prepare_weights` on the first use of weights, if memory allows.
        None means True on a GPU and False on a CPU.

    Raises IncompatibleError with every reason if the pairing is refused.
    """

    def __init__(
        self,
        prepare_finalize: PrepareAndFinalize,
        experts: PermuteExpertsUnpermute,
        *,
        machine: Machine | None = None,
        checked: bool = False,
        poison: bool = False,
        auto_prepare: bool | None = None,
    ) -> None:
        expect("prepare_finalize", prepare_finalize, PrepareAndFinalize)
        expect("experts", experts, PermuteExpertsUnpermute)
        expect("machine", machine, Machine | None)
        expect("checked", checked, bool)
        expect("poison", poison, bool)
        expect("auto_prepare", auto_prepare, bool | None)
        if prepare_finalize.problem != experts.problem:
            got, need = prepare_finalize.problem, experts.problem
            raise ConfigurationError("the two parts' problems", got=got, need=need)
        if machine is None:
            declared = prepare_finalize.requires, experts.requires
            packages = tuple(name for requires in declared for name in requires.inspected_packages)
            probes = tuple(probe for requires in declared for probe in requires.providers)
            machine = current_machine(packages, probes=probes)
        pair, problem = (type(prepare_finalize), type(experts)), experts.problem
        verdict = judge(*pair, problem, machine)
        if not verdict.ok:
            raise IncompatibleError(verdict.pairing, verdict.rejections)
        prepare_finalize.check_machine(machine)
        super().__init__(
            prepare_finalize,
            experts,
            machine=machine,
            checked=checked,
            poison=poison,
            auto_prepare=auto_prepare,
        )
        self._call_plans = CallPlans(self._get_max_planned_tokens())

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle a kernel as its two parts and options; `invalid_ids` of the copy starts at 0.

        Raises UnsupportedError if a part holds a process group.
        """
        constructor = partial(
            type(self),
            machine=self.machine,
            checked=self.checked,
            poison=self.poison,
            auto_prepare=self.auto_prepare,
        )
        return constructor, (self.prepare_finalize, self.experts)

    def __repr__(self) -> str:
        return f"<{self.pairing}, {self.problem} on {self.machine}>"

    def _repr_html_(self) -> str:
        return render_notebook_html(f"{self.pairing}, {self.problem} on {self.machine}")

    @property
    def replayable(self) -> bool:
        """Whether a plan may replay a call's launches instead of running the parts' host code.

        The classes of both parts must set `replayable` in their own bodies. A subclass does not
        inherit the attribute, because it may add work that a recording misses. A checked call reads
        values on the host, and is never replayed.
        """
        parts = (self.prepare_finalize, self.experts)
        declared = all(vars(type(part)).get("replayable", False) for part in parts)
        declared = declared and self.prepare_finalize.may_replay()
        return declared and type(self) is FusedMoEModularKernel and not self.checked

    def _get_max_planned_tokens(self) -> int:
        """Return the largest number of tokens of a direct call that uses a plan; 0 disables plans.

        A call that cannot be replayed uses a plan only to share a workspace with other calls.
        Multi-rank calls must not share a workspace, because an exchange may still use the workspace
        of a call that has returned. A multi-rank replay must not allocate a workspace either,
        because its exchanges use the tensors of the recorded call.
        """
        if self.checked or self.poison or type(self) is not FusedMoEModularKernel:
            return 0
        max_shared = min(self.problem.tokens, MAX_SHARED_TOKENS)
        if self.problem.parallel.world_size > 1:
            return max_shared if self.replayable and self.machine.device == "cuda" else 0
        return self.problem.tokens if self.replayable else max_shared

    def reserve_workspace(self, tokens: int, device: torch.device | None = None) -> None:
        """Reserve the workspace that calls of up to `tokens` tokens would reserve on first use.

        Nothing is reserved for more than 2,048 tokens, because these calls allocate their own
        workspace.

        device: the device of x; None means the current device of the kernel's type.
        """
        expect("tokens", tokens, Count)
        device = resolve_device(self.machine.device if device is None else device)
        self._call_plans.reserve(self, device, tokens)

    @modes.disable_tracing_of_layer_call
    def __call__(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layer and return its output: (T, H), or (T, K, H) if top-k is kept.

        The output is a new tensor, `out` if given, or x itself if the problem is inplace.

        Calls of up to 2,048 tokens on one CUDA stream share a workspace that is kept between calls
        (`modular_kernel.plan.held_bytes`). Larger calls allocate a workspace. If `replayable` is
        True, the launches of the first call of each signature (of the second call for more than
        2,048 tokens) are recorded, and later calls replay them. Calls in a CUDA graph capture, and
        calls of a kernel with `checked` or `poison`, always allocate a workspace and are never
        replayed.

        x_TH: (T, H) with T <= problem.tokens. x is not modified unless the problem is inplace.
        weights: weights of the experts on this rank.
        routing: top-k weights and ids of the tokens.
        out: (T, H) or (T, K, H), contiguous.

        Raises an InputError before anything is launched if a tensor does not match the problem.
        """
        output = self._call_plans.run(self, x_TH, weights, routing, out)
        if output is not None:
            return output
        return self._check_and_start(x_TH, weights, routing, out, at_once=True).finish()

    @modes.disable_tracing
    def start(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        *,
        out: torch.Tensor | None = None,
        same_on_ranks: str = "",
    ) -> "Pending":
        """Check the tensors and start the dispatch; experts and combine run in `.finish()`.

        With an asynchronous PrepareAndFinalize, work that the caller launches before `.finish()`
        overlaps the dispatch.
        Several calls may be in flight at once.

        same_on_ranks: text that must be the same on all ranks of the call, such as
            `LoRAManager.fingerprint`. If it differs, all ranks raise CommunicationError before they
            send rows.

        Raises UnsupportedError for a `same_on_ranks` that the PrepareAndFinalize does not compare
        (`PrepareAndFinalize.compares_calls`), and the errors of `__call__`.
        """
        return self._check_and_start(
            x_TH, weights, routing, out, at_once=False, same_on_ranks=same_on_ranks
        )

    def _check_and_start(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor | None,
        *,
        at_once: bool,
        same_on_ranks: str = "",
    ) -> "Pending":
        try:
            if same_on_ranks != "":
                self._check_same_on_ranks(same_on_ranks)
            weights = self.check(x_TH, weights, routing, out)
        except Exception as error:
            self.prepare_finalize.refuse(error)
            raise
        self.call_counters.add(OWN_WORKSPACE, x_TH.shape[0])
        specs = self.workspace_specs(x_TH.shape[0])
        workspace = Workspace(specs, x_TH.device, poison=self.poison, fills=self.fills)
        output = self.output(x_TH, out)
        if self.poison:
            self.poison_output(output, workspace.fill)
        return self.start_checked(
            x_TH,
            weights,
            routing,
            output,
            workspace,
            at_once=at_once,
            same_on_ranks=same_on_ranks,
        )

    def _check_same_on_ranks(self, same_on_ranks: str) -> None:
        expect("same_on_ranks", same_on_ranks, str)
        part = self.prepare_finalize
        if not part.compares_calls():
            got = f"{type(part).__name__}, which does not compare calls between ranks"
            raise UnsupportedError("same_on_ranks", got=got, need="a part that does")

    def counters(self) -> dict[str, object]:
        """Return numbers for monitoring, without synchronizing with the device.

        The keys are

        - calls, tokens: totals over all calls.
        - replayed_calls: calls that replayed recorded launches.
        - recorded_calls: calls whose launches were recorded.
        - fallback_calls: calls that were neither replayed nor recorded, as a dict by reason.
        - plans: number of plans, including the plans that direct calls use.
        - invalid_ids: the property `invalid_ids`. On a GPU, this is its value at an earlier call of
          `counters`.
        - workspace_bytes: bytes of workspace that all kernels of this process hold between calls.

        A call that is captured in a CUDA graph counts once; replays of the graph do not count.
        `modular_kernel.utils.prometheus` formats the numbers.
        """
        return {**super().counters(), "workspace_bytes": sum(held_bytes().values())}

    def prepare_weights(self, weights: ExpertWeights) -> ExpertWeights:
        """Return `weights` with the tensors that the experts would otherwise derive in each call.

        `TritonExperts` derives a copy of 4-bit weights in a second layout on sm_90. The copy has
        1.06 times the bytes of w1 and w2 for mxfp4, and 1.12 times for other formats, or 1.25 times
        if the group size is not a multiple of 64. Other experts return the weights unchanged.

        Prepare the weights again after writing to them. A call raises WeightsError if the weights
        or a derived tensor have been written since, if the prepared weights are a copy, or if they
        were prepared for an activation with another row order. Writes that torch does not track (to
        `.data`, to inference tensors, or by kernels launched outside torch) are not detected.

        Raises the InputErrors that a call with these weights would raise.
        """
        expect("weights", weights, ExpertWeights)
        check_weight_tensors(weights)
        problem, device = self.problem, weights.w1.device
        if device.type != self.machine.device:
            need = f"a {self.machine.device} tensor for this kernel"
            raise DeviceError("w1", got=device, need=need)
        weights, specs = prepared.remove_prepared(weights), self.experts.prepared_specs()
        no_tokens = torch.empty(0, problem.hidden, dtype=problem.dtype, device=device)
        validate.check_weights(weights, no_tokens, problem)
        if not specs:
            return weights
        prepared_tensors = prepared.allocate_prepared(weights, specs, self._layout_key)
        self.experts.prepare(weights, prepared_tensors)
        prepared.mark_complete(prepared_tensors)
        return replace(weights, **prepared_tensors)

    def plan(self, problem: Problem | None = None) -> Plan:
        """Return a plan, which allocates workspace and output for up to `problem.tokens` tokens.

        problem: this kernel's problem, possibly with fewer tokens. None means the kernel's problem.

        Raises ConfigurationError for another problem, and CapacityError for more tokens.
        """
        expect("the plan's problem", problem, Problem | None)
        problem = self.problem if problem is None else problem
        if problem.with_tokens(self.problem.tokens) != self.problem:
            raise ConfigurationError("the plan's problem", got=problem, need=self.problem)
        if problem.tokens > self.problem.tokens:
            need = f"<= {self.problem.tokens}, the kernel's"
            raise CapacityError("the plan's tokens", got=problem.tokens, need=need)
        return Plan(self, problem)
