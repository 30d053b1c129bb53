"""All ranks gather all tokens, and send the sums of each rank's tokens back to it."""

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
    """One all-gather of packed rows, padded to the longest rank; then each owner gets W partial
    sums of each of its tokens, in the problem's dtype, and adds them in float32 in the order of
    ranks, so equal input gives equal bits.

    Every rank sees every token, so this suits small W, or top-k that reaches most ranks anyway.
    Counts are exchanged first and read on the host: T may differ from rank to rank and be 0.
    """

    near_first = False  # ranks that have all tokens must agree on copies

    requires = replace(CONTIGUOUS, batch_invariant=True, asynchronous=True)

    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        problem, world = self.problem, self.problem.parallel.world_size
        most, nbytes = problem.tokens, self.rows.most_bytes()
        return {
            **token_specs(problem, most),
            **self.rows.specs(world * most),
            "packed_own": BufferSpec((most, nbytes), torch.uint8),
            "packed_all": BufferSpec((world * most, nbytes), torch.uint8),
            "returned": BufferSpec((world * most, problem.hidden), problem.dtype),
        }

    def send(
        self, x_TH: torch.Tensor, routing: Routing, weights: ExpertWeights, call: Call
    ) -> Receiver:
        manager, tokens = self.manager, x_TH.shape[0]
        manager.check_device(x_TH.device)
        tables = self.tables(x_TH.device)
        rank_TK, _, invalid = pairs_to_slots(routing.topk_ids_TK, tables, together=True)
        agreed = agree(
            self.layer,
            call,
            tokens=tokens,
            rows_W=[tokens] * manager.world_size,
            device=x_TH.device,
            largest=self.largest(x_TH, call),
        )
        call.invalid_ids.add_(invalid)
        most = max(agreed.tokens_W)
        layout, own, scale = self.pack(x_TH, routing, weights, call, agreed, rows=most)
        ids_TK = torch.where(rank_TK >= 0, routing.topk_ids_TK, -1).to(torch.int32)
        layout.put(own[:tokens], "ids", ids_TK)
        layout.put(own[:tokens], "weights", routing.topk_weights_TK)
        packed = call.workspace.take("packed_all", (manager.world_size * most, layout.nbytes))
        exchange = None
        if most:
            exchange = manager.all_gather(packed, own, step=agreed.step, phase="dispatch")

        def receive() -> tuple[Dispatched, Handle]:
            if exchange is not None:
                exchange.wait()
            starts = enumerate(agreed.tokens_W)
            blocks = [packed[rank * most : rank * most + count] for rank, count in starts]
            here = self.rows.unpack(call, blocks)
            # Every rank counts the gathered rows alike, so copies of an expert are shared out.
            rank_RK, slot_RK, _ = pairs_to_slots(here.ids_RK, tables, together=True)
            is_mine = rank_RK == manager.rank
            here.ids_RK.copy_(torch.where(is_mine, slot_RK, -1))
            here.weights_RK.copy_(torch.where(is_mine, here.weights_RK, 0))
            left = None if self.problem.apply_router_weight_on_input else here.weights_RK
            scales = scale if here.scale is None else here.scale
            arrived = self.local_tokens(
                call, here.x_RH, scales, here.ids_RK, here.weights_RK, here.adapters_R
            )
            return arrived, GroupHandle(self, call, agreed, left)

        return receive

    def finalize(
        self,
        expert_output: torch.Tensor,
        *,
        handle: Handle,
        reduce: TopKWeightAndReduce,
        out: torch.Tensor,
    ) -> None:
        own, manager = self.own_handle(handle, GroupHandle), self.manager
        take, counts_W = own.call.workspace.take, own.agreed.tokens_W
        (tokens, hidden), world = out.shape, manager.world_size
        sum_RH = take("rows_sum", (sum(counts_W), hidden))
        weight_and_reduce(
            expert_output, own.topk_weights_RK, self.problem, reduce=reduce, out=sum_RH
        )
        if not sum(counts_W):
            return
        returned = take("returned", (world * tokens, hidden))
        with stages.stage(stages.COMBINE):
            manager.all_to_all(
                returned.view(torch.uint8),
                sum_RH.view(torch.uint8),
                out_rows=[tokens] * world,
                given_rows=counts_W,
                step=own.agreed.step,
                phase="combine",
            ).wait()
            sum_TH = take("tokens_sum", (tokens, hidden)).zero_()
            for rank in range(world):
                sum_TH += returned[rank * tokens : (rank + 1) * tokens]
            out.copy_(sum_TH)
