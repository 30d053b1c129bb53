"""Minimal parts over ranks, one correct and others defective, for tests of the rank harness."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from modular_kernel.compatibility.support import PrepareFinalizeRequirements
from modular_kernel.contracts import PrepareAndFinalize
from modular_kernel.spec.placement import pairs_to_slots
from modular_kernel.spec.problem import ActivationFormat, IdSpace, Reduce
from modular_kernel.tensors import (
    DispatchedRouting,
    ExpertRows,
    Handle,
    StandardShape,
    StandardTokens,
)
from topk_reduce import TopKWeightAndReduceContiguous


@dataclass(frozen=True)
class SumHandle(Handle):
    topk_weights_TK: torch.Tensor | None


class SumOverRanks(PrepareAndFinalize):
    """Expects equal tokens on all ranks. Each rank runs its experts, and the outputs are summed."""

    requires = PrepareFinalizeRequirements(
        activation_format=ActivationFormat.STANDARD,
        reduces=frozenset({Reduce.NOOP, Reduce.CONTIGUOUS, Reduce.DELEGATE}),
        localizes_ids=True,
        world_sizes=(2, None),
        linear_placement=False,
        replicated_input=True,
        inplace=False,
    )

    def dispatch_shape(self, tokens):
        return StandardShape(tokens, self.problem.top_k)

    def workspace_shapes(self, tokens):
        return {}

    def prepare(self, x_TH, routing, *, weights, call):
        tables = self.problem.placement.tables(x_TH.device)
        rank_TK, slot_TK, invalid = pairs_to_slots(routing.topk_ids_TK, tables)
        call.invalid_ids.add_(invalid)
        is_local = rank_TK == self.problem.parallel.rank
        ids_TK = torch.where(is_local, slot_TK, -1).to(routing.topk_ids_TK.dtype)
        weights_TK = torch.where(ids_TK < 0, 0.0, routing.topk_weights_TK)
        local_routing = DispatchedRouting(
            topk_weights_TK=weights_TK,
            topk_ids_TK=ids_TK,
            space=IdSpace.LOCAL,
            num_experts=self.problem.e,
            expert_map=None,
            invalid_ids=torch.zeros_like(call.invalid_ids),
        )
        on_input = self.problem.apply_router_weight_on_input
        handle = SumHandle(None if on_input else weights_TK)
        return StandardTokens(x_TH, local_routing), handle

    def finalize(self, expert_output, *, handle, reduce, out):
        if reduce.kind is Reduce.DELEGATE:
            reduce = TopKWeightAndReduceContiguous()
        scale = self.problem.routed_scaling_factor
        reduce.apply(ExpertRows(expert_output, None, handle.topk_weights_TK, scale), out)
        total = out.float()
        dist.all_reduce(total, group=self.group)
        out.copy_(total)


class RaisesOnRankOne(SumOverRanks):
    """Raises on rank 1, before the first collective."""

    requires = SumOverRanks.requires

    def prepare(self, x_TH, routing, *, weights, call):
        if self.problem.parallel.rank == 1:
            raise ValueError("only here")
        return super().prepare(x_TH, routing, weights=weights, call=call)


class OmitsReduction(SumOverRanks):
    """Does not add the outputs of the ranks."""

    requires = SumOverRanks.requires

    def finalize(self, expert_output, *, handle, reduce, out):
        scale = self.problem.routed_scaling_factor
        reduce.apply(ExpertRows(expert_output, None, handle.topk_weights_TK, scale), out)


class CountsInvalidIdsTwice(SumOverRanks):
    """Counts each invalid id twice."""

    requires = SumOverRanks.requires

    def prepare(self, x_TH, routing, *, weights, call):
        before = call.invalid_ids.clone()
        result = super().prepare(x_TH, routing, weights=weights, call=call)
        call.invalid_ids.add_(call.invalid_ids - before)
        return result


class SupportsFewShapes(SumOverRanks):
    """Only supports bfloat16, two hidden sizes and a linear placement, as vendor libraries do."""

    requires = replace(
        SumOverRanks.requires,
        dtypes=frozenset({torch.bfloat16}),
        hidden_sizes=frozenset({256, 512}),
        linear_placement=True,
    )


class SupportsTwoRanks(SumOverRanks):
    """Supports two ranks and a linear placement."""

    requires = replace(SumOverRanks.requires, world_sizes=(2, 2), linear_placement=True)
