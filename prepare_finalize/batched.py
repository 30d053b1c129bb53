"""Regroup tokens expert by expert on one rank, as low-latency all2all libraries do across ranks."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from modular_kernel.contracts import Call, PrepareAndFinalize, TopKWeightAndReduce
from modular_kernel.errors import UnsupportedError
from modular_kernel.ops.batch import assign_rows, assign_rows_scratch
from modular_kernel.ops.permute import permute_tokens
from modular_kernel.support import PrepareFinalizeRequirements
from modular_kernel.tensors import (
    BatchedShape,
    BatchedTokens,
    Dispatched,
    DispatchedRouting,
    ExpertRows,
    ExpertWeights,
    Handle,
    Routing,
)
from modular_kernel.types import ActivationFormat, IdSpace, Reduce, Rows
from modular_kernel.workspace import BufferSpec
from topk_reduce import TopKWeightAndReduceNaiveBatched


@dataclass(frozen=True)
class BatchedHandle(Handle):
    """Where each of the caller's pairs went, and the weights still to be applied."""

    row_of_pair_TK: torch.Tensor
    topk_weights_TK: torch.Tensor | None


class BatchedPrepareAndFinalize(PrepareAndFinalize):
    """(T, H) tokens -> (e, T, H) rows, one per token and expert: an expert that appears twice in
    a token's top-k gets one row that both pairs share, so T rows per expert always suffice.

    Rows keep the order of the tokens. Rows past an expert's count are left undefined.
    """

    requires = PrepareFinalizeRequirements(
        activation_format=ActivationFormat.BATCHED_EXPERTS,
        reduces=frozenset({Reduce.NAIVE_BATCHED, Reduce.DELEGATE}),
        keep_topk=True,
        localises_ids=True,
        multiplies_input=True,
        padding=Rows.UNDEFINED,
        can_defer_quant=False,
        graph_capturable=True,
    )

    def dispatch_shape(self, tokens: int) -> BatchedShape:
        return BatchedShape(self.problem.e, tokens)

    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        problem = self.problem
        rows = (problem.e, tokens, problem.hidden)
        return {
            "batched_x": BufferSpec(rows, problem.dtype),
            "row_of_pair": BufferSpec((tokens, problem.top_k), torch.int32),
            "expert_counts": BufferSpec((problem.e,), torch.int32),
            "assign_scratch": assign_rows_scratch(tokens, problem.top_k, problem.e),
        }

    def prepare(
        self, x_TH: torch.Tensor, routing: Routing, *, weights: ExpertWeights, call: Call
    ) -> tuple[Dispatched, Handle]:
        problem, tokens = self.problem, x_TH.shape[0]
        specs = self.workspace_shapes(tokens)
        buffers = {name: call.workspace.take(name, spec.shape) for name, spec in specs.items()}
        row_of_pair_TK, counts_e = buffers["row_of_pair"], buffers["expert_counts"]
        assign_rows(
            self._routing(routing, weights, call),
            capacity=tokens,
            row_of_pair_TK=row_of_pair_TK,
            counts_e=counts_e,
            scratch=buffers["assign_scratch"],
        )
        on_input = problem.apply_router_weight_on_input
        permute_tokens(
            x_TH,
            row_of_pair_TK,
            routing.topk_weights_TK if on_input else None,
            rows_RH=buffers["batched_x"].flatten(0, 1),
        )
        handle = BatchedHandle(row_of_pair_TK, None if on_input else routing.topk_weights_TK)
        return BatchedTokens(buffers["batched_x"], counts_e), handle

    def _routing(self, routing: Routing, weights: ExpertWeights, call: Call) -> DispatchedRouting:
        return DispatchedRouting(
            topk_weights_TK=None,
            topk_ids_TK=routing.topk_ids_TK,
            space=IdSpace.GLOBAL,
            num_experts=self.problem.experts,
            expert_map=weights.expert_map,
            invalid_ids=call.invalid_ids,
        )

    def finalize(
        self,
        expert_output: torch.Tensor,
        *,
        handle: Handle,
        reduce: TopKWeightAndReduce,
        out: torch.Tensor,
    ) -> None:
        if not isinstance(handle, BatchedHandle):
            raise UnsupportedError("handle", got=type(handle).__name__, need="BatchedHandle")
        if reduce.kind is Reduce.DELEGATE:
            reduce = TopKWeightAndReduceNaiveBatched()
        rows = ExpertRows(
            expert_output,
            handle.row_of_pair_TK,
            handle.topk_weights_TK,
            self.problem.routed_scaling_factor,
        )
        reduce.apply(rows, out)
