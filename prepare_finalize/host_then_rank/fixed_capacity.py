"""TwoLevelExchange: the two-level exchange in blocks whose size does not depend on the routing.

A rank exchanges blocks (`common.blocks`) with its counterparts, the ranks of other hosts that have
the same local rank (the index of a rank on its host). A block has room for all tokens of a rank, or
for fewer if `Problem.max_received` limits them. All rows of the received blocks, unused ones
included, then have fixed positions in the buffers of the ranks of the host. The host CPU therefore
reads no row counts, and calls can be captured in a CUDA graph.

Every rank verifies the headers of all ranks: the ranks of a host share the headers that they
receive from their counterparts (`HostAgreement`).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from modular_kernel.contracts import CallState
from modular_kernel.ops.count import next_power_of_2
from modular_kernel.ops.quantize import QuantizedRows
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.replay.recording import bypass_replay_while, run_in_replays
from modular_kernel.spec.placement import Placement, PlacementTables
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.tensors import Routing
from modular_kernel.workspace import BufferSpec
from prepare_finalize.common.blocks import BlockLayout, OutgoingRows, ReceivedColumns
from prepare_finalize.common.device_status import FIELDS, DeviceStatus
from prepare_finalize.common.fixed_capacity import (
    FixedCapacityBuffers,
    FixedCapacityCall,
    FixedCapacityExchange,
)
from prepare_finalize.common.handshake import Layer
from prepare_finalize.host_then_rank.buffers import HostBufferPool, PooledBuffers
from prepare_finalize.host_then_rank.group import HostThenRankGroup
from prepare_finalize.symm_mem.group import Heap, Section, SharedMemory, align_up
from prepare_finalize.symm_mem.launch import SymmetricExchange


@dataclass(frozen=True)
class HostAgreement:
    """Headers of all ranks in memory that the ranks of a host share, with flags.

    All layers of a manager use the same headers and flags, so that ranks detect calls of different
    layers.

    headers_CWF: (2, W, F) int64, headers of the last two calls.
    flags_L: (L,) int32, number of the last call of each rank of this host.
    deltas_L: address offsets of the memory of the ranks of this host; see `Heap`.
    number: (1,) int32 in local memory, number of the last call.
    owners: objects whose lifetime keeps the memory mapped.
    """

    headers_CWF: torch.Tensor
    flags_L: torch.Tensor
    deltas_L: torch.Tensor
    number: torch.Tensor
    owners: tuple[object, ...] = ()

    @classmethod
    def of(cls, manager: HostThenRankGroup) -> "HostAgreement":
        """Return the agreement of the layers of a manager. The first call is collective."""
        if manager.agreement is None:
            manager.agreement = cls._allocate(manager)
        agreement: HostAgreement = manager.agreement
        return agreement

    @classmethod
    def _allocate(cls, manager: HostThenRankGroup) -> "HostAgreement":
        sections = {
            "headers_CWF": Section((2, manager.world_size, len(FIELDS)), torch.int64),
            "flags_L": Section((manager.ranks_per_host,), torch.int32),
        }
        views: dict[str, torch.Tensor] = {}

        def initialize(heap: Heap) -> None:
            views.update(heap.view_sections(sections, 0))
            for view in views.values():
                view.zero_()

        nbytes = sum(align_up(section.nbytes) for section in sections.values())
        heap = manager.allocate_heap(nbytes, "headers and flags", initialize)
        number = torch.zeros(1, dtype=torch.int32, device=heap.deltas_W.device)
        return cls(**views, deltas_L=heap.deltas_W, number=number, owners=(heap,))

    def verify(
        self,
        headers_HF: torch.Tensor,
        header_F: torch.Tensor,
        *,
        limits: torch.Tensor,
        status: DeviceStatus,
        memory: SharedMemory,
    ) -> None:
        """Share headers with the ranks of this host and verify all headers, in one launch.

        headers_HF: (hosts, F) int64, the headers from this rank's counterparts.
        header_F: header of this rank.
        limits: limits for the values in headers, from `DeviceStatus.limits`.
        memory: memory of this host. If a header is wrong, all waits for ranks of this host end.
        """
        from prepare_finalize.host_then_rank.kernels.agreement import agree_kernel

        use_triton(headers_HF)  # the first call patches Triton's interpreter to compute like a GPU
        hosts, per_host, world = len(headers_HF), len(self.flags_L), self.headers_CWF.shape[1]
        launch(
            agree_kernel,
            (1,),
            header_blocks_ptr=headers_HF,
            headers_heap_ptr=self.headers_CWF,
            flags_ptr=self.flags_L,
            deltas_ptr=self.deltas_L,
            state_ptr=self.number,
            wait_failed_ptr=memory.failed,
            wait_status_ptr=memory.status,
            timeout_ns=memory.timeout_ns,
            header_ptr=header_F,
            limits_ptr=limits,
            **status.arguments(),
            header_block_stride=headers_HF.stride(0),
            local_rank=memory.rank,
            HOSTS=hosts,
            PADDED_HOSTS=next_power_of_2(hosts),
            RANKS_PER_HOST=per_host,
            PADDED_RANKS=next_power_of_2(per_host),
            WORLD=world,
            PADDED=next_power_of_2(world),
            NUM_FIELDS=len(FIELDS),
            INTERPRETED=headers_HF.device.type == "cpu",
            num_warps=1,
        )


@dataclass(frozen=True)
class TwoLevelCall(FixedCapacityCall):
    """A call between `send` and `combine`.

    receive_buffers: buffers of the rows that the ranks of this host forward to this rank.
    """

    receive_buffers: PooledBuffers


class TwoLevelExchange(FixedCapacityExchange):
    """The fixed-capacity exchanges of one layer between hosts and inside a host.

    The base class exchanges blocks between this rank and its counterparts. `forward` and
    `combine_within_host` exchange rows between the ranks of the host.

    layout: layout of the blocks.

    In shapes, L is the number of ranks per host, P the number of hosts, and F = P * block rows the
    number of rows that a rank forwards.
    """

    def __init__(self, layer: Layer, manager: HostThenRankGroup, layout: BlockLayout) -> None:
        per_host, world = manager.ranks_per_host, manager.world_size
        counterparts = range(manager.rank % per_host, world, per_host)
        super().__init__(layer, rows=layout.capacity, peers=counterparts)
        self._group, self._memory, self._block_layout = manager, manager.memory, layout
        self.forwarded_rows = self.max_received_rows((layout,))
        self.received_rows = per_host * self.forwarded_rows
        self._host_problem = self._make_host_problem(layer.problem)
        self._agreement = HostAgreement.of(manager)
        self.pool = HostBufferPool(
            self._host_problem, layer.problem, manager, self.received_rows, shares_flags=False
        )
        self._tables = self._make_host_tables(self.pool.heap.deltas_W.device)
        self._started_s = 0.0

    def _make_host_problem(self, problem: Problem) -> Problem:
        """Return the problem of the exchange within the host.

        Its experts are the expert slots of the host. Every rank has the same number of slots, which
        is the maximum over the ranks of all hosts.
        """
        per_host, num_slots = self._group.ranks_per_host, self.num_local_experts
        placement = Placement.linear(num_slots, per_host)
        parallel = Parallel(per_host, placement, self._memory.rank)
        return replace(
            problem,
            tokens=self.forwarded_rows,
            experts=num_slots,
            local_experts=None,
            max_received=None,
            parallel=parallel,
        )

    def _make_host_tables(self, device: torch.device) -> PlacementTables:
        """Return the ranks of the host's expert slots. Slots without an expert have no rank."""
        per_host, rank = self._group.ranks_per_host, self._group.rank
        slots_per_rank, first_rank = self.num_local_experts // per_host, rank // per_host * per_host
        slots_of_ranks = self.layer.problem.placement.slots[first_rank : first_rank + per_host]
        is_used = [slot < len(s) for s in slots_of_ranks for slot in range(slots_per_rank)]
        is_used_E = torch.tensor(is_used, dtype=torch.bool, device=device)
        tables = self._host_problem.placement.tables(device)
        homes_ER2 = torch.where(is_used_E[:, None, None], tables.homes_ER2, -1)
        return PlacementTables(homes_ER2, tables.copies_E)

    def specs(self, layouts: tuple[BlockLayout, ...]) -> dict[str, BufferSpec]:
        return {
            **super().specs(layouts),
            "ranks_of_rows": BufferSpec((self.forwarded_rows,), torch.int32),
        }

    def begin(
        self, call: CallState, tokens: int, device: torch.device, layout: BlockLayout, *, amax: bool
    ) -> int:
        step = super().begin(call, tokens, device, layout, amax=amax)
        self._run_now_and_in_replays(self._begin_on_host)
        return step

    def _begin_on_host(self) -> None:
        self._started_s = time.monotonic()
        self._check_waits("dispatch")

    def _check_waits(self, phase: str) -> None:
        """Raise CommunicationError if a wait for ranks of this host has failed.

        Does nothing if a header was wrong, because the next call raises that error on every rank.
        """
        manager = self._group
        if not (self._memory.has_failed or manager.failed):
            return
        status = manager.device_status
        if status is None or status.failure() is None:
            nbytes = self._block_layout.nbytes
            manager.check_host_memory(manager.step, phase, nbytes, self._started_s)

    def _run_now_and_in_replays(self, action: Callable[[], None]) -> None:
        run_in_replays(action)
        action()

    def send(
        self,
        rows: OutgoingRows,
        buffers: FixedCapacityBuffers,
        call: CallState,
        step: int,
        *,
        x_in_place: bool = False,
    ) -> TwoLevelCall:
        index = self.pool.next_index
        # All ranks must use the same buffers. A replay always uses those of the recorded call.
        bypass_replay_while(lambda: self.pool.next_index != index)
        sent = super().send(rows, buffers, call, step, x_in_place=x_in_place)
        return TwoLevelCall(**vars(sent), receive_buffers=self.pool.take(self.received_rows))

    def receive(self, sent: FixedCapacityCall, out: ReceivedColumns) -> torch.Tensor:
        """Receive the blocks, as in the base class, and verify the headers of all ranks."""
        x_FH = self._receive(sent, out, verify=False)
        self._agree(sent)
        return x_FH

    def _agree(self, sent: FixedCapacityCall) -> None:
        received_PB = sent.blocks_SB[-self._ranks.world_size :]
        headers_PF = sent.layout.section(received_PB, "header")
        self._agreement.verify(
            headers_PF,
            sent.header_F,
            limits=self._handshake.limits,
            status=self._handshake.status,
            memory=self._memory,
        )
        self._run_now_and_in_replays(partial(self._check_waits, "dispatch"))

    def forward(
        self,
        sent: TwoLevelCall,
        x_FH: torch.Tensor,
        scale: torch.Tensor | None,
        routing: Routing,
        call: CallState,
    ) -> SymmetricExchange:
        """Send the received rows to the ranks of this host, and wait for rows from these ranks.

        scale: scales of the rows, or the scale that all rows share; None if they have none.
        routing: router weights, int32 expert slots of the host, and adapters of the rows.
        """
        rank_bits_F = call.workspace.take("ranks_of_rows", (self.forwarded_rows,))
        exchange = SymmetricExchange(
            self._memory,
            self._host_problem,
            sent.receive_buffers.full,
            self.pool.heap.deltas_W,
            rank_bits_F,
            self.forwarded_rows,
        )
        quantized = None
        if self.layer.problem.scheme.dispatched_quantized:
            quantized = QuantizedRows(x_FH, rank_bits_F if scale is None else scale)
        exchange.send(x_FH, routing, self._tables, call, quantized=quantized, wait=True)
        self._run_now_and_in_replays(partial(self._check_waits, "dispatch"))
        return exchange

    def combine_within_host(self, sent: TwoLevelCall, exchange: SymmetricExchange) -> None:
        """Add the outputs of the ranks of this host for each forwarded row."""
        exchange.combine(sent.sum_RH)
        self._run_now_and_in_replays(partial(self._check_waits, "combine"))

    def may_record(self) -> bool:
        """Return whether the next call may be recorded for replay."""
        return self.is_established and self.pool.next_index == 0

    def check(self) -> None:
        super().check()
        self._check_waits("combine")

    def refuse(self, error: Exception) -> bool:
        # Other ranks do not wait for a call that this rank cannot start.
        return self.pool.next_index is None or super().refuse(error)

    def _finish_refused_call(self, sent: FixedCapacityCall) -> None:
        if sent.dispatch is not None:
            sent.dispatch.wait()
        # The headers end all waits within hosts, so rows of the host need not be exchanged.
        self._agree(sent)
        self.combine(sent, sent.sums_SRH.new_empty(0, sent.layout.hidden))
