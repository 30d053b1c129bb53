"""No expert parallelism: tokens stay where they are."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from modular_kernel.contracts import Call, PrepareAndFinalize, TopKWeightAndReduce
from modular_kernel.errors import UnsupportedError
from modular_kernel.support import PrepareFinalizeRequirements
from modular_kernel.tensors import (
    ContiguousShape,
    ContiguousTokens,
    Dispatched,
    DispatchedRouting,
    ExpertRows,
    ExpertWeights,
    Handle,
    Routing,
)
from modular_kernel.types import ActivationFormat, IdSpace, Reduce
from modular_kernel.workspace import BufferSpec
from topk_reduce import TopKWeightAndReduceContiguous


@dataclass(frozen=True)
class NoEPHandle(Handle):
    """The caller's router weights, for reducers that still have to apply them."""

    topk_weights_TK: torch.Tensor | None


class MoEPrepareAndFinalizeNoEP(PrepareAndFinalize):
    """Hands the caller's tokens and routing to the experts as they are; copies nothing."""

    requires = PrepareFinalizeRequirements(
        activation_format=ActivationFormat.STANDARD,
        reduces=frozenset({Reduce.NOOP, Reduce.CONTIGUOUS, Reduce.DELEGATE}),
        keep_topk=True,
        graph_capturable=True,
    )

    def dispatch_shape(self, tokens: int) -> ContiguousShape:
        return ContiguousShape(tokens, self.problem.top_k)

    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        return {}

    def prepare(
        self, x_TH: torch.Tensor, routing: Routing, *, weights: ExpertWeights, call: Call
    ) -> tuple[Dispatched, Handle]:
        dispatched = DispatchedRouting(
            topk_weights_TK=routing.topk_weights_TK,
            topk_ids_TK=routing.topk_ids_TK,
            space=IdSpace.GLOBAL,
            num_experts=self.problem.experts,
            expert_map=weights.expert_map,
            invalid_ids=call.invalid_ids,
        )
        on_input = self.problem.apply_router_weight_on_input
        handle = NoEPHandle(None if on_input else routing.topk_weights_TK)
        return ContiguousTokens(x_TH, dispatched), handle

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
        if reduce.kind is Reduce.DELEGATE:
            reduce = TopKWeightAndReduceContiguous()
        scale = self.problem.routed_scaling_factor
        reduce.apply(ExpertRows(expert_output, None, handle.topk_weights_TK, scale), out)
