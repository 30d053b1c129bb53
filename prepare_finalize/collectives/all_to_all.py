"""TorchAll2AllPrepareAndFinalize: an all-to-all sends a row once to each rank that needs it.

An exchange component ("part") for expert parallelism. A rank computes all pairs of a received row
that belong to its experts, and returns their sum. A pair is one token with one of its K experts.

There are two kinds of calls (`CollectivePart`). By default, ranks first exchange row counts through
the host, which this file implements. In a fixed-capacity exchange (`common.fixed_capacity`), they
send blocks of a fixed number of rows instead.
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
from prepare_finalize.common.handshake import CallMetadata, check_max_received, exchange_metadata
from prepare_finalize.common.tokens import token_specs, weight_and_reduce


@dataclass(frozen=True)
class All2AllHandle(PartHandle):
    """Handle of an all-to-all: what `finalize` needs from the dispatch of the same call.

    - step: number of the call among the calls of the manager.
    - to_W, from_W: number of rows sent to each rank, and received from each rank; empty in a
      fixed-capacity exchange.
    - any_rows: whether any rank sends a row. Otherwise, no collective is started.
    - token_N: token of each sent row, ordered by receiving rank, then by token; None in a
      fixed-capacity exchange.
    - topk_weights_RK: router weights that `finalize` must apply to the received rows, or None.
    - sum_RH: buffer for the weighted sums of the received rows.
    - fixed_call: the call of a fixed-capacity exchange, or None.
    """

    step: int
    to_W: tuple[int, ...]
    from_W: tuple[int, ...]
    any_rows: bool
    token_N: torch.Tensor | None
    topk_weights_RK: torch.Tensor | None
    sum_RH: torch.Tensor
    fixed_call: FixedCapacityCall | None


class TorchAll2AllPrepareAndFinalize(CollectivePart):
    """Send each token's row once to each rank that holds one of its experts.

    A row contains the activations, K slots (-1 for experts of other ranks) and K weights. A slot is
    the index of an expert in the weights of its rank. The receiving rank computes the weighted sum
    of the row's pairs and sends it back in the problem's dtype. The token's rank adds the sums in
    float32 in rank order. T may differ between ranks and may be 0.

    Ranks exchange row counts first and read them on the host. With Problem(graph=True) or
    TorchGroup(checked=False), the host reads nothing after the first call. Each rank then sends a
    fixed number of rows to every rank: problem.tokens, or Problem.max_received / world_size if that
    is set. If the routing needs more rows, the call fails on all ranks.
    """

    replayable = True  # plans can replay the recorded launches of fixed-capacity exchanges
    requires = replace(
        STANDARD_REQUIREMENTS,
        padding=RowContents.UNDEFINED,
        batch_invariant=True,
        asynchronous=True,
        bounds_received=True,
    )

    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        if self.fixed_capacity is not None:
            return self.fixed_capacity_specs(self.fixed_capacity)
        problem, world = self.problem, self.problem.parallel.world_size
        max_tokens, nbytes = problem.tokens, self.rows.max_row_bytes()
        max_sent = min(world, problem.top_k) * max_tokens
        return {
            **token_specs(problem, max_tokens),
            **self.rows.specs(self.max_rows),
            "packed_local": BufferSpec((max_tokens, nbytes), torch.uint8),
            "packed_sent": BufferSpec((max_sent, nbytes), torch.uint8),
            "packed_all": BufferSpec((self.max_rows, nbytes), torch.uint8),
            "returned": BufferSpec((max_sent, problem.hidden), problem.dtype),
        }

    def send_with_counts(
        self, x_TH: torch.Tensor, routing: Routing, weights: ExpertWeights, call: CallState
    ) -> Receiver:
        """Exchange row counts, then send each rank exactly the rows that it needs."""
        manager = self.manager
        rank_TK, slot_TK, needs_WT, invalid = self._locate(routing.topk_ids_TK)
        metadata = exchange_metadata(
            self.layer,
            call,
            tokens=x_TH.shape[0],
            rows_W=needs_WT.sum(1).tolist(),
            device=x_TH.device,
            amax=self.local_amax(x_TH, call),
        )
        received_W = [*map(sum, zip(*metadata.rows_WW, strict=True))]
        check_max_received(self.layer, metadata, received_W)
        call.invalid_ids.add_(invalid)
        rank_N, token_N = needs_WT.nonzero(as_tuple=True)
        layout = self.layout_of(call)
        packed_local = call.workspace.take("packed_local", (len(x_TH), layout.nbytes))
        scale = self.pack(x_TH, routing, weights, call, amax=metadata.amax, out_RB=packed_local)
        sent = call.workspace.take("packed_sent", (len(token_N), layout.nbytes))
        torch.index_select(packed_local, 0, token_N, out=sent)
        is_on_rank = rank_TK[token_N] == rank_N[:, None]
        layout.write(sent, "ids", torch.where(is_on_rank, slot_TK[token_N], -1).to(torch.int32))
        layout.write(sent, "weights", torch.where(is_on_rank, routing.topk_weights_TK[token_N], 0))
        to_W, from_W = _compute_split_sizes(metadata, manager.rank)
        packed = call.workspace.take("packed_all", (sum(from_W), layout.nbytes))
        any_rows, exchange = any(map(any, metadata.rows_WW)), None
        if any_rows:
            exchange = manager.all_to_all(
                packed,
                sent,
                output_splits=from_W,
                input_splits=to_W,
                step=metadata.step,
                phase="dispatch",
            )

        def receive() -> tuple[Dispatched, Handle]:
            if exchange is not None:
                exchange.wait()
            tokens, weights_RK = self._unpack(call, [packed], scale)
            sum_RH = call.workspace.take("rows_sum", (sum(from_W), self.problem.hidden))
            exchange_fields = metadata.step, to_W, from_W, any_rows, token_N
            handle = All2AllHandle(self, call, *exchange_fields, weights_RK, sum_RH, None)
            return self.arrange(tokens, handle)

        return receive

    def make_fixed_capacity_handle(
        self,
        received: StandardTokens,
        sent: FixedCapacityCall,
        weights_RK: torch.Tensor | None,
        call: CallState,
    ) -> tuple[Dispatched, Handle]:
        handle = All2AllHandle(
            self, call, sent.step, (), (), True, None, weights_RK, sent.sum_RH, sent
        )
        return self.arrange(received, handle)

    def _locate(
        self, ids_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rank and slot of each pair, which ranks need each token, and the invalid ids.

        The shapes are (T, K), (T, K) and (W, T). The last result is the number of invalid ids.
        """
        # Copies at equal distance are used round-robin. Each rank starts with a different copy.
        rank_TK, slot_TK, invalid = pairs_to_slots(
            ids_TK, self.tables(ids_TK.device), first_token=self.manager.rank, together=True
        )
        ranks_W = torch.arange(self.manager.world_size, device=ids_TK.device)
        return rank_TK, slot_TK, (rank_TK == ranks_W[:, None, None]).any(2), invalid

    def _unpack(
        self, call: CallState, blocks: list[torch.Tensor], scale: torch.Tensor | None
    ) -> tuple[StandardTokens, torch.Tensor | None]:
        """Return the received rows, and the router weights that `finalize` must apply, or None.

        scale: the scale if all rows share one.
        """
        rows = self.rows.unpack(call, blocks)
        weights_RK = None if self.problem.apply_router_weight_on_input else rows.weights_RK
        received = self.local_tokens(
            call,
            rows.x_RH,
            scale if rows.scale is None else rows.scale,
            rows.ids_RK,
            rows.weights_RK,
            rows.adapters_R,
        )
        return received, weights_RK

    def arrange(
        self, tokens: StandardTokens, handle: All2AllHandle
    ) -> tuple[Dispatched, All2AllHandle]:
        """Return the received rows in the experts' format, and the handle of the call.

        The rows already have the standard format. Subclasses may group them by expert.
        """
        return tokens, handle

    def sum_rows(
        self, expert_output: torch.Tensor, handle: All2AllHandle, reduce: TopKWeightAndReduce
    ) -> None:
        """Write the weighted sum of the pairs of each received row to handle.sum_RH."""
        weights_RK, out = handle.topk_weights_RK, handle.sum_RH
        weight_and_reduce(expert_output, weights_RK, self.problem, reduce=reduce, out=out)

    def expert_output(self, handle: Handle) -> torch.Tensor:
        return self.check_handle(handle, All2AllHandle).sum_RH

    def finalize(
        self,
        expert_output: torch.Tensor,
        *,
        handle: Handle,
        reduce: TopKWeightAndReduce,
        out: torch.Tensor,
    ) -> None:
        part_handle = self.check_handle(handle, All2AllHandle)
        sent = part_handle.fixed_call
        self.sum_rows(expert_output, part_handle, reduce)
        if self.fixed_capacity is not None and sent is not None:
            with stages.stage(stages.COMBINE):
                self.fixed_capacity.combine(sent, out)
            return
        take, (tokens, hidden) = part_handle.call.workspace.take, out.shape
        to_W, from_W, token_N = part_handle.to_W, part_handle.from_W, part_handle.token_N
        assert token_N is not None
        partial_sums = take("returned", (sum(to_W), hidden))
        with stages.stage(stages.COMBINE):
            if part_handle.any_rows:
                self.manager.all_to_all(
                    partial_sums.view(torch.uint8),
                    part_handle.sum_RH.view(torch.uint8),
                    output_splits=to_W,
                    input_splits=from_W,
                    step=part_handle.step,
                    phase="combine",
                ).wait()
            sum_TH = take("tokens_sum", (tokens, hidden)).zero_()
            # A rank gets a token at most once, so the sum of a token is in rank order.
            for token_R, partial_RH in zip(
                torch.split_with_sizes(token_N, to_W),
                torch.split_with_sizes(partial_sums, to_W),
                strict=True,
            ):
                sum_TH.index_add_(0, token_R, partial_RH.float())
            out.copy_(sum_TH)


def _compute_split_sizes(
    metadata: CallMetadata, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return metadata.rows_WW[rank], tuple(zip(*metadata.rows_WW, strict=True))[rank]
