"""HostThenRankPrepareAndFinalize: rows are sent once to each host, then to the ranks of that host.

An exchange component ("part") with two levels, for hosts that are connected by a slower network
than their GPUs. In the combine, each host returns one sum per row. The exchange within a host uses
the kernels of `symm_mem`. A slot is the index of an expert in the weights of its rank, and a pair
is one token with one of its K experts.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise

import torch

from modular_kernel.compatibility.support import PrepareFinalizeRequirements
from modular_kernel.contracts import CallState, Receiver, TopKWeightAndReduce
from modular_kernel.errors import CommunicationError
from modular_kernel.ops.quantize import QuantizedRows
from modular_kernel.quant.quantized_weights import ACTIVATION_SCHEMES
from modular_kernel.replay import stages
from modular_kernel.spec.placement import Placement, PlacementTables, pairs_to_slots
from modular_kernel.spec.problem import ActivationFormat, Parallel, Problem, Reduce, RowContents
from modular_kernel.tensors import Dispatched, ExpertWeights, Handle, Routing, StandardTokens
from modular_kernel.workspace import BufferSpec
from prepare_finalize.collectives.collective_part import CollectivePart
from prepare_finalize.common.blocks import BlockLayout
from prepare_finalize.common.fixed_capacity import FixedCapacityCall, make_block_layouts
from prepare_finalize.common.group_part import PartHandle
from prepare_finalize.common.handshake import CallMetadata, check_max_received, exchange_metadata
from prepare_finalize.common.tokens import (
    dispatches_quantized,
    token_specs,
    weight_and_reduce,
)
from prepare_finalize.common.torch_group import Exchange
from prepare_finalize.host_then_rank.buffers import HostBufferPool, PooledBuffers
from prepare_finalize.host_then_rank.counts import Geometry, RowCounts, check_counts
from prepare_finalize.host_then_rank.fixed_capacity import TwoLevelCall, TwoLevelExchange
from prepare_finalize.host_then_rank.group import HostThenRankGroup
from prepare_finalize.symm_mem.launch import CallBuffers, SymmetricExchange

_MAX_RANKS_PER_HOST = 8  # limit of the symmetric-memory kernels
_MAX_CHUNKS = 4
# Tokens per chunk of large calls. On a CPU, even tests with few tokens have several chunks.
_CHUNK_TOKENS = {"cuda": 1024, "cpu": 4}


@dataclass(frozen=True)
class HostThenRankHandle(PartHandle):
    """Handle of a two-level exchange.

    topk_weights_RK: router weights that `finalize` must apply, or None.
    receive_buffers: receive buffers of the call.
    """

    topk_weights_RK: torch.Tensor | None
    receive_buffers: PooledBuffers


@dataclass(frozen=True)
class CountedHandle(HostThenRankHandle):
    """Handle of a call with counted rows.

    token_N: token of each sent row, ordered by chunk, host, then token.
    counts: numbers of rows by source, destination and chunk.
    host_exchanges: exchange of each chunk within the host; None for a chunk without rows on this
        host.
    """

    metadata: CallMetadata
    token_N: torch.Tensor
    counts: RowCounts
    host_exchanges: tuple[SymmetricExchange | None, ...]


@dataclass(frozen=True)
class FixedCapacityHandle(HostThenRankHandle):
    """Handle of a call with a fixed capacity.

    sent: exchange between hosts.
    host_exchange: exchange within the host.
    """

    sent: TwoLevelCall
    host_exchange: SymmetricExchange


class HostThenRankPrepareAndFinalize(CollectivePart):
    """Send each token's row once to each host with one of its experts, then to ranks of that host.

    A row is sent over torch.distributed to the rank with the same local rank on that host. This
    rank writes it over NVLink (on a CPU: shared files) to the ranks of its host that hold the
    experts. In the combine, each host adds the sums of its ranks in float32 in rank order, and
    returns one row in the problem's dtype. The token's rank adds the rows of all hosts in float32
    in the order of hosts.

    Row counts are exchanged first and read on the host CPU. Large calls are split into chunks:
    while one chunk is forwarded within hosts, the next chunk is sent between hosts. With
    Problem(graph=True) or HostThenRankGroup(checked=False), the host CPU reads nothing after the
    first call. Each rank then sends a fixed number of rows to each host (problem.tokens, or
    Problem.max_received / world_size if that is set), in one chunk. If the routing needs more rows,
    the call fails on all ranks.

    T may differ between ranks and may be 0. All hosts must have the same number of ranks, at most
    8, numbered consecutively. Two calls may be in flight.
    """

    replayable = True  # plans can replay the recorded launches of fixed-capacity exchanges
    requires = PrepareFinalizeRequirements(
        activation_format=ActivationFormat.STANDARD,
        triton=True,
        packages=("triton",),
        reduces=frozenset({Reduce.NOOP, Reduce.CONTIGUOUS, Reduce.DELEGATE}),
        localizes_ids=True,
        padding=RowContents.UNDEFINED,
        dispatch_schemes=ACTIVATION_SCHEMES,
        can_defer_quant=False,
        world_sizes=(2, None),
        linear_placement=False,
        ranks_per_host=_MAX_RANKS_PER_HOST,
        graph_capturable=True,
        graph_on_request=True,
        batch_invariant=True,
        asynchronous=True,
        bounds_received=True,
        lora=True,
    )
    manager_class = HostThenRankGroup
    manager: HostThenRankGroup
    fixed_capacity: TwoLevelExchange | None = None
    max_chunks = _MAX_CHUNKS

    @classmethod
    def operation_cases(cls) -> Mapping[str, Callable[[], Mapping[str, torch.Tensor]]]:
        from prepare_finalize.host_then_rank.operation_cases import list_cases
        from prepare_finalize.symm_mem.operation_cases import list_cases as list_symm_mem_cases

        return {**super().operation_cases(), **list_symm_mem_cases(), **list_cases()}

    def __init__(self, problem: Problem, group: object | None = None) -> None:
        super().__init__(problem, group)
        if self.fixed_capacity is not None:
            self._buffer_pool = self.fixed_capacity.pool
            return
        manager = self.manager
        per_host, tokens = manager.ranks_per_host, problem.tokens
        target_chunks = -(-tokens // _CHUNK_TOKENS[manager.device])
        chunks = max(1, min(per_host, self.max_chunks, target_chunks))
        geometry = Geometry(
            manager.rank, manager.world_size, per_host, chunks, -(-tokens // chunks)
        )
        self._geometry = geometry
        host_slots = problem.placement.slots[
            geometry.host * per_host : (geometry.host + 1) * per_host
        ]
        self._host_problem = _make_host_problem(problem, geometry, tuple(map(len, host_slots)))
        self._first_slot_W = _list_first_slots(problem.placement, per_host)
        try:
            self._buffer_pool = HostBufferPool(
                self._host_problem, problem, manager, self.max_rows, shares_flags=True
            )
        except CommunicationError:
            self.destroy()
            raise
        # This changes the size of the handshakes of all layers, so every rank must do it.
        # HostBufferPool raises on all ranks if a rank does not construct this part.
        manager.max_counts = max(manager.max_counts, geometry.counts)

    @classmethod
    def meta_calls(cls) -> Mapping[str, Callable[[], object]]:
        from prepare_finalize.host_then_rank.compile_cases import launch_all, problems

        return {str(problem): partial(launch_all, problem) for problem in problems()}

    def make_fixed_capacity(self, rows: int) -> TwoLevelExchange:
        (layout,) = self._layouts.values()
        try:
            return TwoLevelExchange(self.layer, self.manager, layout)
        except CommunicationError:
            self.destroy()
            raise

    @cached_property
    def _layouts(self) -> dict[bool, BlockLayout]:
        # Quantization is never left to the experts.
        quantized = self.problem.scheme.dispatched_quantized
        return {quantized: make_block_layouts(self.problem, self.block_capacity)[quantized]}

    @property
    def max_input_rows(self) -> int:
        return self.max_rows if self.fixed_capacity is None else self.fixed_capacity.received_rows

    def may_record(self) -> bool:
        return self.fixed_capacity is not None and self.fixed_capacity.may_record()

    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        if self.fixed_capacity is not None:
            return self.fixed_capacity_specs(self.fixed_capacity)
        problem, geometry = self.problem, self._geometry
        max_tokens, nbytes = problem.tokens, self.rows.max_row_bytes()
        sent, forwarded = (
            min(geometry.hosts, problem.top_k) * max_tokens,
            min(geometry.hosts * max_tokens, self.max_rows),
        )
        return {
            **token_specs(problem, max_tokens),
            **self.rows.specs(forwarded),
            "packed_local": BufferSpec((max_tokens, nbytes), torch.uint8),
            "packed_sent": BufferSpec((sent, nbytes), torch.uint8),
            "packed_forwarded": BufferSpec((forwarded, nbytes), torch.uint8),
            "ranks_of_rows": BufferSpec((forwarded,), torch.int32),
            "row_positions": BufferSpec((geometry.ranks_per_host * forwarded,), torch.int32),
            "returned": BufferSpec((sent, problem.hidden), problem.dtype),
        }

    def send(
        self, x_TH: torch.Tensor, routing: Routing, weights: ExpertWeights, call: CallState
    ) -> Receiver:
        self.manager.check_failure()  # the errors of failed calls may still hold their buffers
        self._buffer_pool.check_free()
        return super().send(x_TH, routing, weights, call)

    def send_with_counts(
        self, x_TH: torch.Tensor, routing: Routing, weights: ExpertWeights, call: CallState
    ) -> Receiver:
        """Exchange row counts, then send each host exactly the rows that it needs."""
        manager, geometry = self.manager, self._geometry
        rank_TK, slot_TK, invalid = pairs_to_slots(
            routing.topk_ids_TK, self.tables(x_TH.device), first_token=manager.rank, together=True
        )
        host_TK = rank_TK.div(geometry.ranks_per_host, rounding_mode="floor")
        to_hosts = geometry.split_chunks(_make_token_mask(host_TK, geometry.hosts))
        to_ranks = geometry.split_chunks(_make_token_mask(rank_TK, geometry.world_size))
        metadata = exchange_metadata(
            self.layer,
            call,
            tokens=x_TH.shape[0],
            rows_W=torch.cat((to_hosts.sum(2).flatten(), to_ranks.sum(2).flatten())).tolist(),
            device=x_TH.device,
            amax=self.local_amax(x_TH, call),
            buffer_index=self._buffer_pool.next_index,
        )
        counts = check_counts(manager, metadata, geometry)
        check_max_received(self.layer, metadata, counts.max_rows_W)
        call.invalid_ids.add_(invalid)
        layout = self.layout_of(call)
        packed_local = call.workspace.take("packed_local", (len(x_TH), layout.nbytes))
        scale = self.pack(x_TH, routing, weights, call, amax=metadata.amax, out_RB=packed_local)
        chunk_N, host_N, index_N = to_hosts.nonzero(as_tuple=True)
        token_N = index_N + chunk_N * geometry.tokens
        sent = call.workspace.take("packed_sent", (len(token_N), layout.nbytes))
        torch.index_select(packed_local, 0, token_N, out=sent)
        is_on_host = host_TK[token_N] == host_N[:, None]
        first_W = torch.tensor(self._first_slot_W, dtype=torch.int64, device=x_TH.device)
        number_TK = first_W[rank_TK.clamp(min=0)] + slot_TK
        layout.write(sent, "ids", torch.where(is_on_host, number_TK[token_N], -1).to(torch.int32))
        layout.write(sent, "weights", torch.where(is_on_host, routing.topk_weights_TK[token_N], 0))
        forwarded = call.workspace.take("packed_forwarded", (sum(counts.forwarded), layout.nbytes))
        exchanges = [
            self._exchange_between_hosts(counts, chunk, forwarded, sent, metadata.step, "dispatch")
            for chunk in range(geometry.chunks)
        ]
        receive_buffers = self._buffer_pool.take(counts.received)

        def receive() -> tuple[Dispatched, Handle]:
            host_exchanges = self._forward(
                counts, forwarded, exchanges, receive_buffers.full, call, metadata.step
            )
            buffers = receive_buffers.rows
            weights_RK = None if self.problem.apply_router_weight_on_input else buffers.weights_RK
            scales = scale if buffers.scale_RG is None else buffers.scale_RG
            received_tokens = self.local_tokens(
                call, buffers.x_RH, scales, buffers.ids_RK, buffers.weights_RK, buffers.adapters_R
            )
            buffers_of_call = weights_RK, receive_buffers
            return received_tokens, CountedHandle(
                self, call, *buffers_of_call, metadata, token_N, counts, host_exchanges
            )

        return receive

    def make_fixed_capacity_handle(
        self,
        received: StandardTokens,
        sent: FixedCapacityCall,
        weights_RK: torch.Tensor | None,
        call: CallState,
    ) -> tuple[Dispatched, Handle]:
        """Forward the rows from other hosts to the ranks of this host.

        received: rows of this rank's counterparts, with slots of this host.
        """
        assert self.fixed_capacity is not None
        assert isinstance(sent, TwoLevelCall)
        rows = received.routing
        assert rows.topk_weights_TK is not None
        routing = Routing(rows.topk_weights_TK, rows.topk_ids_TK, rows.adapters_T)
        exchange = self.fixed_capacity.forward(sent, received.x_TH, received.scale, routing, call)
        buffers = sent.receive_buffers.rows
        tokens = self.local_tokens(
            call,
            buffers.x_RH,
            received.scale if buffers.scale_RG is None else buffers.scale_RG,
            buffers.ids_RK,
            buffers.weights_RK,
            buffers.adapters_R,
        )
        unapplied_RK = None if weights_RK is None else buffers.weights_RK
        return tokens, FixedCapacityHandle(
            self, call, unapplied_RK, sent.receive_buffers, sent, exchange
        )

    def _exchange_between_hosts(
        self,
        counts: RowCounts,
        chunk: int,
        forwarded: torch.Tensor,
        sent: torch.Tensor,
        step: int,
        phase: str,
    ) -> Exchange | None:
        """Start the exchange of a chunk between hosts.

        In the dispatch, rows go from `sent` to `forwarded`. In the combine, rows go from
        `forwarded` to `sent`. If no row leaves its host, copy the rows and return None.
        """
        to_W, from_W = counts.splits(chunk)
        target = forwarded[_slice_chunk(counts.forwarded, chunk)]
        source = sent[_slice_chunk(counts.sent, chunk)]
        if phase == "combine":
            target, source, to_W, from_W = source, target, from_W, to_W
        if not counts.crosses_hosts[chunk]:
            target.copy_(source)
            return None
        return self.manager.all_to_all(
            target, source, output_splits=from_W, input_splits=to_W, step=step, phase=phase
        )

    def _forward(
        self,
        counts: RowCounts,
        forwarded: torch.Tensor,
        exchanges: list[Exchange | None],
        buffers: CallBuffers,
        call: CallState,
        step: int,
    ) -> tuple[SymmetricExchange | None, ...]:
        """Forward the rows of each chunk once they have arrived; wait for the ranks of the host.

        Returns the exchange of each chunk within the host.

        forwarded: packed rows from all hosts.
        exchanges: exchange of each chunk between hosts.
        """
        unpacked_rows = self.rows.allocate(call, len(forwarded))
        host_exchanges: list[SymmetricExchange | None] = []
        per_host, started = self._geometry.ranks_per_host, time.monotonic()
        rank_bits = call.workspace.take("ranks_of_rows", (len(forwarded),))
        positions = call.workspace.take("row_positions", (per_host * len(forwarded),))
        tables = self._host_problem.placement.tables(forwarded.device)
        last_chunk = max(
            (chunk for chunk, has_rows in enumerate(counts.has_rows) if has_rows), default=-1
        )
        if counts.any_rows:
            self.manager.record_host_exchange(step, "dispatch")
        for chunk, exchange in enumerate(exchanges):
            if exchange is not None:
                exchange.wait()
            if not counts.has_rows[chunk]:
                host_exchanges.append(None)
                continue
            self.manager.check_host_memory(step, "dispatch", forwarded.nbytes, started)
            chunk_rows = _slice_chunk(counts.forwarded, chunk)
            chunk_tokens = unpacked_rows.rows(chunk_rows.start, chunk_rows.stop)
            self.rows.unpack_into(chunk_tokens, call, [forwarded[chunk_rows]])
            rows = chunk_rows.stop - chunk_rows.start
            positions_LN = positions[per_host * chunk_rows.start : per_host * chunk_rows.stop].view(
                per_host, rows
            )
            _assign_positions(
                chunk_tokens.ids_RK,
                tables,
                counts.write_bounds[:, chunk].to(forwarded.device),
                out=positions_LN,
            )
            host_exchange = SymmetricExchange(
                self.manager.memory,
                self._host_problem,
                buffers,
                self._buffer_pool.heap.deltas_W,
                rank_bits[chunk_rows],
                rows,
                positions_LN,
            )
            routing = Routing(chunk_tokens.weights_RK, chunk_tokens.ids_RK, chunk_tokens.adapters_R)
            quantized = None
            if dispatches_quantized(self.problem, call):
                scale = rank_bits if chunk_tokens.scale is None else chunk_tokens.scale
                quantized = QuantizedRows(chunk_tokens.x_RH, scale)
            host_exchange.send(
                chunk_tokens.x_RH,
                routing,
                tables,
                call,
                quantized=quantized,
                wait=chunk == last_chunk,
            )
            host_exchanges.append(host_exchange)
            self.manager.check_host_memory(step, "dispatch", forwarded.nbytes, started)
        return tuple(host_exchanges)

    def expert_output(self, handle: Handle) -> torch.Tensor:
        return self.check_handle(handle, HostThenRankHandle).receive_buffers.rows.y_RH

    def finalize(
        self,
        expert_output: torch.Tensor,
        *,
        handle: Handle,
        reduce: TopKWeightAndReduce,
        out: torch.Tensor,
    ) -> None:
        part_handle = self.check_handle(handle, HostThenRankHandle)
        y_RH = part_handle.receive_buffers.rows.y_RH
        part_handle.receive_buffers.release()
        if expert_output is not y_RH:
            weight_and_reduce(
                expert_output, part_handle.topk_weights_RK, self.problem, reduce=reduce, out=y_RH
            )
        with stages.stage(stages.COMBINE):
            if isinstance(part_handle, CountedHandle):
                self._combine_counted(part_handle, out)
                return
            exchange = self.fixed_capacity
            assert exchange is not None
            assert isinstance(part_handle, FixedCapacityHandle)
            exchange.combine_within_host(part_handle.sent, part_handle.host_exchange)
            exchange.combine(part_handle.sent, out)

    def _combine_counted(self, handle: CountedHandle, out: torch.Tensor) -> None:
        """Send back the sums of all received rows, and add the returned sums of each token."""
        counts, step, take = handle.counts, handle.metadata.step, handle.call.workspace.take
        manager, started = self.manager, time.monotonic()
        sums = take("rows_sum", (sum(counts.forwarded), self.problem.hidden))
        partial_sums = take("returned", (sum(counts.sent), self.problem.hidden))
        exchanges = []
        if counts.any_rows:
            manager.record_host_exchange(step, "combine")
        for chunk, host_exchange in enumerate(handle.host_exchanges):
            manager.check_host_memory(step, "combine", sums.nbytes, started)
            if host_exchange is not None:
                host_exchange.combine(sums[_slice_chunk(counts.forwarded, chunk)])
                manager.check_host_memory(step, "combine", sums.nbytes, started)
            sum_bytes, returned_bytes = sums.view(torch.uint8), partial_sums.view(torch.uint8)
            exchanges.append(
                self._exchange_between_hosts(
                    counts, chunk, sum_bytes, returned_bytes, step, "combine"
                )
            )
        for exchange in exchanges:
            if exchange is not None:
                exchange.wait()
        sum_TH = take("tokens_sum", tuple(out.shape)).zero_()
        start = 0
        for chunk in range(self._geometry.chunks):
            # A host returns a token at most once, so the rows of a token are added in the order
            # of hosts.
            for rows in counts.splits(chunk)[0]:
                chunk_rows = slice(start, start + rows)
                sum_TH.index_add_(0, handle.token_N[chunk_rows], partial_sums[chunk_rows].float())
                start += rows
        out.copy_(sum_TH)


def _make_host_problem(
    problem: Problem, geometry: Geometry, num_slots_W: tuple[int, ...]
) -> Problem:
    """Return the problem of the exchange within a host.

    Its experts are the expert slots of the host, numbered consecutively by rank.

    num_slots_W: number of slots of each rank of the host.
    """
    starts = accumulate(num_slots_W, initial=0)
    slots = tuple(tuple(range(start, stop)) for start, stop in pairwise(starts))
    parallel = Parallel(geometry.ranks_per_host, Placement(slots), geometry.local_rank)
    return replace(problem, experts=sum(num_slots_W), local_experts=None, parallel=parallel)


def _list_first_slots(placement: Placement, per_host: int) -> tuple[int, ...]:
    """Return, for each rank, the number of its first slot among the slots of its host."""
    slot_counts = tuple(map(len, placement.slots))
    blocks = (
        slot_counts[start : start + per_host] for start in range(0, len(slot_counts), per_host)
    )
    return tuple(first for block in blocks for first in (*accumulate(block[:-1], initial=0),))


def _make_token_mask(destination_TK: torch.Tensor, num_destinations: int) -> torch.Tensor:
    """Return a (destinations, T) mask: whether a destination gets any pair of a token.

    destination_TK: destination of each pair, -1 for none.
    """
    destinations_P = torch.arange(num_destinations, device=destination_TK.device)
    return (destination_TK == destinations_P[:, None, None]).any(2)


def _slice_chunk(rows: Sequence[int], chunk: int) -> slice:
    """Return the slice of the rows of one chunk.

    rows: number of rows of each chunk.
    """
    start = sum(rows[:chunk])
    return slice(start, start + rows[chunk])


def _assign_positions(
    ids_NK: torch.Tensor, tables: PlacementTables, bounds_2L: torch.Tensor, *, out: torch.Tensor
) -> None:
    """Write the position of each row in the buffers of each rank of the host to `out`.

    bounds_2L: int64, first and end position that this rank may write at each rank, from the row
        counts of the handshake. Rows beyond the end are not sent.
    out: (L, N) int32; -1 if a row is not sent to a rank.
    """
    rank_NK, _, _ = pairs_to_slots(ids_NK, tables, together=True)
    mask_LN = _make_token_mask(rank_NK, len(out))
    position_LN = bounds_2L[0][:, None] + mask_LN.cumsum(1) - 1
    is_valid = mask_LN & (position_LN < bounds_2L[1][:, None])
    out.copy_(torch.where(is_valid, position_LN, -1))
