"""The plainest parts over ranks, in a few lines: whatever they fail, the harness got wrong."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from modular_kernel.compatibility.support import PrepareFinalizeRequirements
from modular_kernel.contracts import PrepareAndFinalize
from modular_kernel.spec.placement import pairs_to_slots
from modular_kernel.spec.problem import ActivationFormat, IdSpace, Reduce
from modular_kernel.tensors import (
    ContiguousShape,
    ContiguousTokens,
    DispatchedRouting,
    ExpertRows,
    Handle,
)
from topk_reduce import TopKWeightAndReduceContiguous


@dataclass(frozen=True)
class SumHandle(Handle):
    topk_weights_TK: torch.Tensor | None


class SumOverRanks(PrepareAndFinalize):
    """Every rank has the same tokens and computes the pairs of its experts; the sums are added."""

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
        return ContiguousShape(tokens, self.problem.top_k)

    def workspace_shapes(self, tokens):
        return {}

    def prepare(self, x_TH, routing, *, weights, call):
        tables = self.problem.placement.tables(x_TH.device)
        rank_TK, slot_TK, invalid = pairs_to_slots(routing.topk_ids_TK, tables)
        call.invalid_ids.add_(invalid)
        here = rank_TK == self.problem.parallel.rank
        ids_TK = torch.where(here, slot_TK, -1).to(routing.topk_ids_TK.dtype)
        weights_TK = torch.where(ids_TK < 0, 0.0, routing.topk_weights_TK)
        local = DispatchedRouting(
            topk_weights_TK=weights_TK,
            topk_ids_TK=ids_TK,
            space=IdSpace.LOCAL,
            num_experts=self.problem.e,
            expert_map=None,
            invalid_ids=torch.zeros_like(call.invalid_ids),
        )
        on_input = self.problem.apply_router_weight_on_input
        handle = SumHandle(None if on_input else weights_TK)
        return ContiguousTokens(x_TH, local), handle

    def finalize(self, expert_output, *, handle, reduce, out):
        if reduce.kind is Reduce.DELEGATE:
            reduce = TopKWeightAndReduceContiguous()
        scale = self.problem.routed_scaling_factor
        reduce.apply(ExpertRows(expert_output, None, handle.topk_weights_TK, scale), out)
        total = out.float()
        dist.all_reduce(total, group=self.group)
        out.copy_(total)


class WrongOnRankOne(SumOverRanks):
    """Raises on rank 1 alone, before the ranks meet."""

    requires = SumOverRanks.requires

    def prepare(self, x_TH, routing, *, weights, call):
        if self.problem.parallel.rank == 1:
            raise ValueError("only here")
        return super().prepare(x_TH, routing, weights=weights, call=call)


class Unsummed(SumOverRanks):
    """Forgets to add the ranks' sums."""

    requires = SumOverRanks.requires

    def finalize(self, expert_output, *, handle, reduce, out):
        scale = self.problem.routed_scaling_factor
        reduce.apply(ExpertRows(expert_output, None, handle.topk_weights_TK, scale), out)


class CountsTwice(SumOverRanks):
    """Counts each invalid id once for itself, and once for its neighbor."""

    requires = SumOverRanks.requires

    def prepare(self, x_TH, routing, *, weights, call):
        before = call.invalid_ids.clone()
        arrived = super().prepare(x_TH, routing, weights=weights, call=call)
        call.invalid_ids.add_(call.invalid_ids - before)
        return arrived


class FewShapes(SumOverRanks):
    """16-bit types, two hidden sizes and blocks of equal size alone, as some vendors' kernels."""

    requires = replace(
        SumOverRanks.requires,
        dtypes=frozenset({torch.bfloat16}),
        hidden_sizes=frozenset({256, 512}),
        linear_placement=True,
    )


class AtMostTwo(SumOverRanks):
    """Two ranks, blocks of equal size."""

    requires = replace(SumOverRanks.requires, world_sizes=(2, 2), linear_placement=True)
