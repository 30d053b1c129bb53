"""all_to_all of torch.distributed with uneven splits: sends a row once to each rank it needs."""

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
from prepare_finalize.common.agreement import Agreement, agree, check_max_received
from prepare_finalize.common.group_part import GroupHandle, RowsPart
from prepare_finalize.common.tokens import (
    token_specs,
    weight_and_reduce,
)


@dataclass(frozen=True)
class All2AllHandle(GroupHandle):
    """Handle of an all-to-all.

    token_N: this rank's token of each sent row, ordered by receiving rank, then by token.
    """

    token_N: torch.Tensor


class TorchAll2AllPrepareAndFinalize(RowsPart):
    """Send each token's row once to each rank that holds one of its experts.

    The row contains K slots (-1 for experts of other ranks) and weights. The receiving rank sums
    the row's pairs and sends the sum back in the problem's dtype. The token's rank adds the sums in
    float32 in rank order.

    Row counts are exchanged first and read on the host. T may differ between ranks and may be 0.
    """

    requires = replace(CONTIGUOUS, batch_invariant=True, asynchronous=True, bounds_received=True)

    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        problem, world = self.problem, self.problem.parallel.world_size
        max_tokens, nbytes = problem.tokens, self.rows.max_row_bytes()
        max_sent = min(world, problem.top_k) * max_tokens
        return {
            **token_specs(problem, max_tokens),
            **self.rows.specs(self.max_rows),
            "packed_own": BufferSpec((max_tokens, nbytes), torch.uint8),
            "packed_sent": BufferSpec((max_sent, nbytes), torch.uint8),
            "packed_all": BufferSpec((self.max_rows, nbytes), torch.uint8),
            "returned": BufferSpec((max_sent, problem.hidden), problem.dtype),
        }

    def send(
        self, x_TH: torch.Tensor, routing: Routing, weights: ExpertWeights, call: Call
    ) -> Receiver:
        manager, device = self.manager, x_TH.device
        manager.check_device(device)
        # Equally near copies are used round-robin, from a different first copy on each rank.
        rank_TK, slot_TK, invalid = pairs_to_slots(
            routing.topk_ids_TK, self.tables(device), first_token=manager.rank, together=True
        )
        ranks_W = torch.arange(manager.world_size, device=device)
        needs_WT = (rank_TK == ranks_W[:, None, None]).any(2)
        agreement = agree(
            self.layer,
            call,
            tokens=x_TH.shape[0],
            rows_W=needs_WT.sum(1).tolist(),
            device=x_TH.device,
            amax=self.local_amax(x_TH, call),
        )
        received_W = [*map(sum, zip(*agreement.rows_WW, strict=True))]
        check_max_received(self.layer, agreement, received_W)
        call.invalid_ids.add_(invalid)
        rank_N, token_N = needs_WT.nonzero(as_tuple=True)
        layout, packed_own, scale = self.pack(
            x_TH, routing, weights, call, agreement, rows=len(x_TH)
        )
        sent = call.workspace.take("packed_sent", (len(token_N), layout.nbytes))
        torch.index_select(packed_own, 0, token_N, out=sent)
        is_on_rank = rank_TK[token_N] == rank_N[:, None]
        layout.put(sent, "ids", torch.where(is_on_rank, slot_TK[token_N], -1).to(torch.int32))
        layout.put(sent, "weights", torch.where(is_on_rank, routing.topk_weights_TK[token_N], 0))
        to_W, from_W = _split_sizes(agreement, manager.rank)
        packed = call.workspace.take("packed_all", (sum(from_W), layout.nbytes))
        exchange = None
        if _any_rows(agreement):
            exchange = manager.all_to_all(
                packed,
                sent,
                output_splits=from_W,
                input_splits=to_W,
                step=agreement.step,
                phase="dispatch",
            )

        def receive() -> tuple[Dispatched, Handle]:
            if exchange is not None:
                exchange.wait()
            rows = self.rows.unpack(call, [packed])
            weights_RK = None if self.problem.apply_router_weight_on_input else rows.weights_RK
            scales = scale if rows.scale is None else rows.scale
            received_tokens = self.local_tokens(
                call,
                rows.x_RH,
                scales,
                rows.ids_RK,
                rows.weights_RK,
                rows.adapters_R,
            )
            return self.arrange(
                received_tokens, All2AllHandle(self, call, agreement, weights_RK, token_N)
            )

        return receive

    def arrange(
        self, tokens: ContiguousTokens, handle: All2AllHandle
    ) -> tuple[Dispatched, All2AllHandle]:
        """Return the received rows in the experts' format, and the handle that `sum_rows` needs."""
        return tokens, handle

    def sum_rows(
        self,
        expert_output: torch.Tensor,
        handle: All2AllHandle,
        reduce: TopKWeightAndReduce,
        sum_RH: torch.Tensor,
    ) -> None:
        """sum_RH (R, H) = this rank's weighted sum of the pairs of each received row."""
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
        part_handle = self.check_handle(handle, All2AllHandle)
        take, hidden = part_handle.call.workspace.take, out.shape[1]
        to_W, from_W = _split_sizes(part_handle.agreement, self.manager.rank)
        sum_RH = take("rows_sum", (sum(from_W), hidden))
        self.sum_rows(expert_output, part_handle, reduce, sum_RH)
        partial_sums = take("returned", (sum(to_W), hidden))
        with stages.stage(stages.COMBINE):
            if _any_rows(part_handle.agreement):
                self.manager.all_to_all(
                    partial_sums.view(torch.uint8),
                    sum_RH.view(torch.uint8),
                    output_splits=to_W,
                    input_splits=from_W,
                    step=part_handle.agreement.step,
                    phase="combine",
                ).wait()
            sum_TH = take("tokens_sum", tuple(out.shape)).zero_()
            # Each rank returns a token at most once, so a token's sum is in rank order.
            for start, stop in pairwise(accumulate(to_W, initial=0)):
                sum_TH.index_add_(
                    0, part_handle.token_N[start:stop], partial_sums[start:stop].float()
                )
            out.copy_(sum_TH)


def _split_sizes(agreement: Agreement, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the number of rows sent to each rank, and of rows received from each rank."""
    return agreement.rows_WW[rank], tuple(zip(*agreement.rows_WW, strict=True))[rank]


def _any_rows(agreement: Agreement) -> bool:
    """Return whether any rank sends any row; the result is the same on every rank."""
    return any(map(any, agreement.rows_WW))
