"""All-gather of all tokens, and reduce-scatter of the partial sums to the tokens' ranks."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from modular_kernel.contracts import Call, Receiver, TopKWeightAndReduce
from modular_kernel.replay import stages
from modular_kernel.spec.placement import pairs_to_slots
from modular_kernel.tensors import Dispatched, ExpertWeights, Handle, Routing
from modular_kernel.workspace import BufferSpec
from prepare_finalize.collectives.requirements import CONTIGUOUS
from prepare_finalize.common.agreement import agree
from prepare_finalize.common.group_part import GroupHandle, RowsPart
from prepare_finalize.common.tokens import (
    token_specs,
    weight_and_reduce,
)


class AllGatherReduceScatterPrepareAndFinalize(RowsPart):
    """All-gather packed rows; each rank then sums W partial results of each of its tokens.

    Rows are padded to the largest T of all ranks. Partial sums are sent in the problem's dtype and
    added in float32 in rank order, so equal inputs give equal bits.

    Every rank receives every token. This is efficient for few ranks, or if top-k is so large that
    most tokens have an expert on most ranks. Row counts are exchanged first and read on the host. T
    may differ between ranks and may be 0.
    """

    prefer_local_copies = False  # all ranks have all tokens, and must select the same copies

    requires = replace(CONTIGUOUS, batch_invariant=True, asynchronous=True)

    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        problem, world = self.problem, self.problem.parallel.world_size
        max_tokens, nbytes = problem.tokens, self.rows.max_row_bytes()
        return {
            **token_specs(problem, max_tokens),
            **self.rows.specs(world * max_tokens),
            "packed_own": BufferSpec((max_tokens, nbytes), torch.uint8),
            "packed_all": BufferSpec((world * max_tokens, nbytes), torch.uint8),
            "returned": BufferSpec((world * max_tokens, problem.hidden), problem.dtype),
        }

    def send(
        self, x_TH: torch.Tensor, routing: Routing, weights: ExpertWeights, call: Call
    ) -> Receiver:
        manager, tokens = self.manager, x_TH.shape[0]
        manager.check_device(x_TH.device)
        tables = self.tables(x_TH.device)
        rank_TK, _, invalid = pairs_to_slots(routing.topk_ids_TK, tables, together=True)
        agreement = agree(
            self.layer,
            call,
            tokens=tokens,
            rows_W=[tokens] * manager.world_size,
            device=x_TH.device,
            amax=self.local_amax(x_TH, call),
        )
        call.invalid_ids.add_(invalid)
        max_tokens = max(agreement.tokens_W)
        layout, packed_own, scale = self.pack(
            x_TH, routing, weights, call, agreement, rows=max_tokens
        )
        ids_TK = torch.where(rank_TK >= 0, routing.topk_ids_TK, -1).to(torch.int32)
        layout.put(packed_own[:tokens], "ids", ids_TK)
        layout.put(packed_own[:tokens], "weights", routing.topk_weights_TK)
        packed = call.workspace.take("packed_all", (manager.world_size * max_tokens, layout.nbytes))
        exchange = None
        if max_tokens:
            exchange = manager.all_gather(packed, packed_own, step=agreement.step, phase="dispatch")

        def receive() -> tuple[Dispatched, Handle]:
            if exchange is not None:
                exchange.wait()
            starts = enumerate(agreement.tokens_W)
            blocks = [
                packed[rank * max_tokens : rank * max_tokens + count] for rank, count in starts
            ]
            rows = self.rows.unpack(call, blocks)
            # All ranks see the gathered rows in one order and thus select the same copies.
            rank_RK, slot_RK, _ = pairs_to_slots(rows.ids_RK, tables, together=True)
            is_local = rank_RK == manager.rank
            rows.ids_RK.copy_(torch.where(is_local, slot_RK, -1))
            rows.weights_RK.copy_(torch.where(is_local, rows.weights_RK, 0))
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
            return received_tokens, GroupHandle(self, call, agreement, weights_RK)

        return receive

    def finalize(
        self,
        expert_output: torch.Tensor,
        *,
        handle: Handle,
        reduce: TopKWeightAndReduce,
        out: torch.Tensor,
    ) -> None:
        group_handle, manager = self.check_handle(handle, GroupHandle), self.manager
        take, counts_W = group_handle.call.workspace.take, group_handle.agreement.tokens_W
        (tokens, hidden), world = out.shape, manager.world_size
        sum_RH = take("rows_sum", (sum(counts_W), hidden))
        weight_and_reduce(
            expert_output, group_handle.topk_weights_RK, self.problem, reduce=reduce, out=sum_RH
        )
        if not sum(counts_W):
            return
        partial_sums = take("returned", (world * tokens, hidden))
        with stages.stage(stages.COMBINE):
            manager.all_to_all(
                partial_sums.view(torch.uint8),
                sum_RH.view(torch.uint8),
                output_splits=[tokens] * world,
                input_splits=counts_W,
                step=group_handle.agreement.step,
                phase="combine",
            ).wait()
            sum_TH = take("tokens_sum", (tokens, hidden)).zero_()
            for rank in range(world):
                sum_TH += partial_sums[rank * tokens : (rank + 1) * tokens]
            out.copy_(sum_TH)
