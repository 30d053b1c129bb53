"""AllGatherReduceScatterPrepareAndFinalize: all-gather tokens, reduce-scatter partial sums.

An exchange component ("part") for expert parallelism. Every rank receives the tokens of all ranks,
and computes the pairs of its own experts. A pair is one token with one of its K experts.

There are two kinds of calls (`CollectivePart`). By default, ranks first exchange their token counts
through the host, which this file implements. In a fixed-capacity exchange
(`common.fixed_capacity`), they send blocks of a fixed number of rows instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from modular_kernel.contracts import CallState, Receiver, TopKWeightAndReduce
from modular_kernel.replay import stages
from modular_kernel.spec.placement import pairs_to_slots
from modular_kernel.spec.problem import RowContents
from modular_kernel.tensors import (
    Dispatched,
    ExpertWeights,
    Handle,
    Routing,
    StandardTokens,
)
from modular_kernel.workspace import BufferSpec
from prepare_finalize.collectives.collective_part import STANDARD_REQUIREMENTS, CollectivePart
from prepare_finalize.common.fixed_capacity import FixedCapacityCall
from prepare_finalize.common.group_part import PartHandle
from prepare_finalize.common.handshake import exchange_metadata
from prepare_finalize.common.tokens import token_specs, weight_and_reduce


@dataclass(frozen=True)
class AllGatherHandle(PartHandle):
    """Handle of an all-gather: what `finalize` needs from the dispatch of the same call.

    - step: number of the call among the calls of the manager.
    - rows_W: number of rows from each rank; empty in a fixed-capacity exchange.
    - topk_weights_RK: router weights that `finalize` must apply to the rows, or None.
    - sum_RH: buffer for the weighted sums of the received rows.
    - fixed_call: the call of a fixed-capacity exchange, or None.
    """

    step: int
    rows_W: tuple[int, ...]
    topk_weights_RK: torch.Tensor | None
    sum_RH: torch.Tensor
    fixed_call: FixedCapacityCall | None


class AllGatherReduceScatterPrepareAndFinalize(CollectivePart):
    """All-gather all tokens; each rank computes the partial sums of its experts.

    Every rank sends its partial sums to the ranks of the tokens, in the problem's dtype. A
    token's rank adds the partial sums of all W ranks in float32 in rank order, so equal inputs give
    equal bits. T may differ between ranks and may be 0.

    Every rank receives every token. This is efficient for few ranks, or if top-k is so large that
    most tokens have an expert on most ranks.

    Ranks exchange T first and read it on the host, and rows are padded to the largest T. With
    Problem(graph=True) or TorchGroup(checked=False), the host reads nothing after the first call,
    and each rank sends problem.tokens rows, of which the rows beyond T are unused.
    """

    replayable = True  # plans can replay the recorded launches of fixed-capacity exchanges
    uses_all_gather = True
    prefer_local_copies = False  # all ranks select copies for all tokens, and must select the same

    requires = replace(
        STANDARD_REQUIREMENTS,
        padding=RowContents.UNDEFINED,
        batch_invariant=True,
        asynchronous=True,
    )

    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        if self.fixed_capacity is not None:
            return self.fixed_capacity_specs(self.fixed_capacity)
        problem, world = self.problem, self.problem.parallel.world_size
        max_tokens, nbytes = problem.tokens, self.rows.max_row_bytes()
        return {
            **token_specs(problem, max_tokens),
            **self.rows.specs(world * max_tokens),
            "packed_local": BufferSpec((max_tokens, nbytes), torch.uint8),
            "packed_all": BufferSpec((world * max_tokens, nbytes), torch.uint8),
            "returned": BufferSpec((world * max_tokens, problem.hidden), problem.dtype),
        }

    def send_with_counts(
        self, x_TH: torch.Tensor, routing: Routing, weights: ExpertWeights, call: CallState
    ) -> Receiver:
        """All-gather T, then all-gather rows, padded to the largest T of a rank."""
        manager, tokens = self.manager, x_TH.shape[0]
        rank_TK, _, invalid = self._locate(routing.topk_ids_TK)
        metadata = exchange_metadata(
            self.layer,
            call,
            tokens=tokens,
            rows_W=[tokens] * manager.world_size,
            device=x_TH.device,
            amax=self.local_amax(x_TH, call),
        )
        call.invalid_ids.add_(invalid)
        max_tokens = max(metadata.tokens_W)
        row_bytes = self.layout_of(call).nbytes
        packed_local = call.workspace.take("packed_local", (max_tokens, row_bytes))
        amax = metadata.amax
        scale = self._pack(x_TH, routing, rank_TK, weights, call, amax=amax, out_RB=packed_local)
        packed = call.workspace.take("packed_all", (manager.world_size * max_tokens, row_bytes))
        exchange = None
        if max_tokens:
            exchange = manager.all_gather(
                packed, packed_local, step=metadata.step, phase="dispatch"
            )

        def receive() -> tuple[Dispatched, Handle]:
            if exchange is not None:
                exchange.wait()
            blocks = [
                packed[rank * max_tokens : rank * max_tokens + count]
                for rank, count in enumerate(metadata.tokens_W)
            ]
            return self._unpack(call, blocks, scale, metadata.step)

        return receive

    def make_fixed_capacity_handle(
        self,
        received: StandardTokens,
        sent: FixedCapacityCall,
        weights_RK: torch.Tensor | None,
        call: CallState,
    ) -> tuple[Dispatched, Handle]:
        return received, AllGatherHandle(self, call, sent.step, (), weights_RK, sent.sum_RH, sent)

    def _locate(self, ids_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rank and slot of each pair, (T, K), and the number of invalid ids.

        A slot is the index of an expert in the weights of its rank.
        """
        return pairs_to_slots(ids_TK, self.tables(ids_TK.device), together=True)

    def _pack(
        self,
        x_TH: torch.Tensor,
        routing: Routing,
        rank_TK: torch.Tensor,
        weights: ExpertWeights,
        call: CallState,
        *,
        amax: float | torch.Tensor | None,
        out_RB: torch.Tensor,
    ) -> torch.Tensor | None:
        scale = self.pack(x_TH, routing, weights, call, amax=amax, out_RB=out_RB)
        layout, rows_TB = self.layout_of(call), out_RB[: len(x_TH)]
        ids_TK = torch.where(rank_TK >= 0, routing.topk_ids_TK, -1).to(torch.int32)
        layout.write(rows_TB, "ids", ids_TK)
        layout.write(rows_TB, "weights", routing.topk_weights_TK)
        return scale

    def _unpack(
        self, call: CallState, blocks: list[torch.Tensor], scale: torch.Tensor | None, step: int
    ) -> tuple[Dispatched, Handle]:
        """Return the received rows, with slots of -1 for experts of other ranks.

        blocks: packed rows of each rank.
        scale: the scale if all rows share one.
        """
        rows = self.rows.unpack(call, blocks)
        rank_RK, slot_RK, _ = self._locate(rows.ids_RK)
        is_local = rank_RK == self.manager.rank
        rows.ids_RK.copy_(torch.where(is_local, slot_RK, -1))
        rows.weights_RK.copy_(torch.where(is_local, rows.weights_RK, 0))
        weights_RK = None if self.problem.apply_router_weight_on_input else rows.weights_RK
        received_tokens = self.local_tokens(
            call,
            rows.x_RH,
            scale if rows.scale is None else rows.scale,
            rows.ids_RK,
            rows.weights_RK,
            rows.adapters_R,
        )
        rows_W = tuple(map(len, blocks))
        sum_RH = call.workspace.take("rows_sum", (sum(rows_W), self.problem.hidden))
        return received_tokens, AllGatherHandle(self, call, step, rows_W, weights_RK, sum_RH, None)

    def expert_output(self, handle: Handle) -> torch.Tensor:
        return self.check_handle(handle, AllGatherHandle).sum_RH

    def finalize(
        self,
        expert_output: torch.Tensor,
        *,
        handle: Handle,
        reduce: TopKWeightAndReduce,
        out: torch.Tensor,
    ) -> None:
        part_handle = self.check_handle(handle, AllGatherHandle)
        sum_RH, sent = part_handle.sum_RH, part_handle.fixed_call
        weights_RK = part_handle.topk_weights_RK
        weight_and_reduce(expert_output, weights_RK, self.problem, reduce=reduce, out=sum_RH)
        if self.fixed_capacity is not None and sent is not None:
            with stages.stage(stages.COMBINE):
                self.fixed_capacity.combine(sent, out)
            return
        take, rows_W, step = part_handle.call.workspace.take, part_handle.rows_W, part_handle.step
        (tokens, hidden), world = out.shape, self.manager.world_size
        if not sum(rows_W):
            return
        with stages.stage(stages.COMBINE):
            partial_sums = take("returned", (world * rows_W[self.manager.rank], hidden))
            self.manager.all_to_all(
                partial_sums.view(torch.uint8),
                sum_RH.view(torch.uint8),
                output_splits=[tokens] * world,
                input_splits=rows_W,
                step=step,
                phase="combine",
            ).wait()
            sum_TH = take("tokens_sum", (tokens, hidden)).zero_()
            for partial_RH in partial_sums.view(world, -1, hidden):
                sum_TH += partial_RH[:tokens]
            out.copy_(sum_TH)
