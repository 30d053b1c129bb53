"""MoEPrepareAndFinalizeNoEP: no expert parallelism, tokens stay on their rank.

This PrepareAndFinalize component ("part") has no communication. `prepare` only quantizes the
tokens, and `finalize` only sums the expert outputs, unless the experts have summed them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from modular_kernel.compatibility.support import PrepareFinalizeRequirements, Rejection
from modular_kernel.contracts import CallState, PrepareAndFinalize, TopKWeightAndReduce
from modular_kernel.errors import UnsupportedError
from modular_kernel.ops.quantize import quantize_rejections
from modular_kernel.quant.quantized_weights import ACTIVATION_SCHEMES
from modular_kernel.spec.problem import ActivationFormat, IdSpace, Machine, Problem, Reduce
from modular_kernel.tensors import (
    Dispatched,
    DispatchedRouting,
    ExpertWeights,
    Handle,
    Routing,
    StandardShape,
    StandardTokens,
)
from modular_kernel.workspace import BufferSpec
from prepare_finalize.common.tokens import quantize_tokens, token_specs, weight_and_reduce


@dataclass(frozen=True)
class NoEPHandle(Handle):
    """The state of a call that `prepare` passes to `finalize`.

    topk_weights_TK: router weights that `finalize` must apply, or None.
    routing: routing that the experts get.
    """

    topk_weights_TK: torch.Tensor | None
    routing: DispatchedRouting


class MoEPrepareAndFinalizeNoEP(PrepareAndFinalize):
    """Pass tokens and routing to the experts.

    Tokens are quantized if the scheme quantizes activations. Otherwise nothing is copied.
    """

    replayable = True  # a plan can replay its recorded launches
    requires = PrepareFinalizeRequirements(
        activation_format=ActivationFormat.STANDARD,
        reduces=frozenset({Reduce.NOOP, Reduce.CONTIGUOUS, Reduce.DELEGATE}),
        keep_topk=True,
        dispatch_schemes=ACTIVATION_SCHEMES,
        graph_capturable=True,
        batch_invariant=True,
        lora=True,
    )

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        return quantize_rejections(cls.__name__, problem, machine)

    def dispatch_shape(self, tokens: int) -> StandardShape:
        return StandardShape(tokens, self.problem.top_k)

    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        return token_specs(self.problem, tokens)

    def prepare(
        self, x_TH: torch.Tensor, routing: Routing, *, weights: ExpertWeights, call: CallState
    ) -> tuple[Dispatched, Handle]:
        adapters_T = routing.slots_T
        dispatched_routing = DispatchedRouting(
            topk_weights_TK=routing.topk_weights_TK,
            topk_ids_TK=routing.topk_ids_TK,
            space=IdSpace.GLOBAL,
            num_experts=self.problem.experts,
            expert_map=weights.expert_map,
            invalid_ids=call.invalid_ids,
            adapters_T=adapters_T,
        )
        on_input = self.problem.apply_router_weight_on_input
        handle = NoEPHandle(None if on_input else routing.topk_weights_TK, dispatched_routing)
        rows, scale = quantize_tokens(x_TH, self.problem, weights=weights, call=call)
        unquantized_TH = None if adapters_T is None else x_TH
        return StandardTokens(rows, dispatched_routing, scale, unquantized_TH), handle

    def finalize(
        self,
        expert_output: torch.Tensor,
        *,
        handle: Handle,
        reduce: TopKWeightAndReduce,
        out: torch.Tensor,
    ) -> None:
        if not isinstance(handle, NoEPHandle):
            raise UnsupportedError("handle", got=type(handle).__name__, need="NoEPHandle")
        weight_and_reduce(
            expert_output,
            handle.topk_weights_TK,
            self.problem,
            reduce=reduce,
            out=out,
            routing=handle.routing,
        )
