"""torch.distributed's all_to_all with uneven splits: each row goes where it is needed, once."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from modular_kernel.contracts import Call, Receiver, TopKWeightAndReduce
from modular_kernel.replay import stages
from modular_kernel.spec.placement import pairs_to_slots
from modular_kernel.tensors import (
    ContiguousTokens,
    Dispatched,
    ExpertWeights,
    Handle,
    Routing,
)
from modular_kernel.workspace import BufferSpec
from prepare_finalize.collectives.requirements import CONTIGUOUS
from prepare_finalize.common.agreement import Agreement, agree, refuse_more_rows
from prepare_finalize.common.group_part import GroupHandle, RowsPart
from prepare_finalize.common.tokens import (
    token_specs,
    weight_and_reduce,
)


@dataclass(frozen=True)
class All2AllHandle(GroupHandle):
    """token_N: this rank's token of each row it sent, by rank sent to, then by token."""

    token_N: torch.Tensor


class TorchAll2AllPrepareAndFinalize(RowsPart):
    """A token's row goes once to each rank that holds one of its experts, with the K slots there
    (-1: not there) and weights; a rank adds up its pairs of a row and sends the sum back, in the
    problem's dtype, and the owner adds the sums in float32 in the order of ranks.

    Counts are exchanged first and read on the host: T may differ from rank to rank and be 0.
    """

    requires = replace(CONTIGUOUS, batch_invariant=True, asynchronous=True, bounds_received=True)

    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        problem, world = self.problem, self.problem.parallel.world_size
        most, nbytes = problem.tokens, self.rows.most_bytes()
        sent = min(world, problem.top_k) * most
        return {
            **token_specs(problem, most),
            **self.rows.specs(self.most_rows),
            "packed_own": BufferSpec((most, nbytes), torch.uint8),
            "packed_sent": BufferSpec((sent, nbytes), torch.uint8),
            "packed_all": BufferSpec((self.most_rows, nbytes), torch.uint8),
            "returned": BufferSpec((sent, problem.hidden), problem.dtype),
        }

    def send(
        self, x_TH: torch.Tensor, routing: Routing, weights: ExpertWeights, call: Call
    ) -> Receiver:
        manager, device = self.manager, x_TH.device
        manager.check_device(device)
        # Ranks take turns with copies that are equally near.
        rank_TK, slot_TK, invalid = pairs_to_slots(
            routing.topk_ids_TK, self.tables(device), first_token=manager.rank, together=True
        )
        ranks_W = torch.arange(manager.world_size, device=device)
        wanted_WT = (rank_TK == ranks_W[:, None, None]).any(2)
        agreed = agree(
            self.layer,
            call,
            tokens=x_TH.shape[0],
            rows_W=wanted_WT.sum(1).tolist(),
            device=x_TH.device,
            largest=self.largest(x_TH, call),
        )
        received_W = [*map(sum, zip(*agreed.rows_WW, strict=True))]
        refuse_more_rows(self.layer, agreed, received_W)
        call.invalid_ids.add_(invalid)
        rank_N, token_N = wanted_WT.nonzero(as_tuple=True)
        layout, own, scale = self.pack(x_TH, routing, weights, call, agreed, rows=len(x_TH))
        sent = call.workspace.take("packed_sent", (len(token_N), layout.nbytes))
        torch.index_select(own, 0, token_N, out=sent)
        is_there = rank_TK[token_N] == rank_N[:, None]
        layout.put(sent, "ids", torch.where(is_there, slot_TK[token_N], -1).to(torch.int32))
        layout.put(sent, "weights", torch.where(is_there, routing.topk_weights_TK[token_N], 0))
        to_W, from_W = _rows_out_and_in(agreed, manager.rank)
        packed = call.workspace.take("packed_all", (sum(from_W), layout.nbytes))
        exchange = None
        if _any_rows(agreed):
            exchange = manager.all_to_all(
                packed,
                sent,
                out_rows=from_W,
                given_rows=to_W,
                step=agreed.step,
                phase="dispatch",
            )

        def receive() -> tuple[Dispatched, Handle]:
            if exchange is not None:
                exchange.wait()
            here = self.rows.unpack(call, [packed])
            left = None if self.problem.apply_router_weight_on_input else here.weights_RK
            scales = scale if here.scale is None else here.scale
            arrived = self.local_tokens(
                call, here.x_RH, scales, here.ids_RK, here.weights_RK, here.adapters_R
            )
            return self.arrange(arrived, All2AllHandle(self, call, agreed, left, token_N))

        return receive

    def arrange(
        self, tokens: ContiguousTokens, handle: All2AllHandle
    ) -> tuple[Dispatched, All2AllHandle]:
        """Return the rows that arrived, as experts take them, and what `sum_rows` needs of that."""
        return tokens, handle

    def sum_rows(
        self,
        expert_output: torch.Tensor,
        handle: All2AllHandle,
        reduce: TopKWeightAndReduce,
        sum_RH: torch.Tensor,
    ) -> None:
        """sum_RH (R, H) = this rank's weighted sum of each row that arrived."""
        weights_RK = handle.topk_weights_RK
        weight_and_reduce(expert_output, weights_RK, self.problem, reduce=reduce, out=sum_RH)

    def finalize(
        self,
        expert_output: torch.Tensor,
        *,
        handle: Handle,
        reduce: TopKWeightAndReduce,
        out: torch.Tensor,
    ) -> None:
        own = self.own_handle(handle, All2AllHandle)
        take, hidden = own.call.workspace.take, out.shape[1]
        to_W, from_W = _rows_out_and_in(own.agreed, self.manager.rank)
        sum_RH = take("rows_sum", (sum(from_W), hidden))
        self.sum_rows(expert_output, own, reduce, sum_RH)
        returned = take("returned", (sum(to_W), hidden))
        with stages.stage(stages.COMBINE):
            if _any_rows(own.agreed):
                self.manager.all_to_all(
                    returned.view(torch.uint8),
                    sum_RH.view(torch.uint8),
                    out_rows=to_W,
                    given_rows=from_W,
                    step=own.agreed.step,
                    phase="combine",
                ).wait()
            sum_TH = take("tokens_sum", tuple(out.shape)).zero_()
            # A rank returns a token once, so the order of a sum is that of the ranks.
            for start, stop in pairwise(accumulate(to_W, initial=0)):
                sum_TH.index_add_(0, own.token_N[start:stop], returned[start:stop].float())
            out.copy_(sum_TH)


def _rows_out_and_in(agreed: Agreement, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows to each rank, and rows from each rank."""
    return agreed.rows_WW[rank], tuple(zip(*agreed.rows_WW, strict=True))[rank]


def _any_rows(agreed: Agreement) -> bool:
    """Whether any rank sends any row; every rank finds the same."""
    return any(map(any, agreed.rows_WW))
