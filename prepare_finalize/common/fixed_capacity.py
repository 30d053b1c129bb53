"""FixedCapacityExchange: dispatch and combine in blocks whose size does not depend on the routing.

Ranks that send exactly the needed rows must first exchange row counts and read them on the host.
Here, a rank sends each rank a block (`common.blocks`) with a fixed capacity of rows, as in MoE
layers with an expert capacity. The number of valid rows travels in the header of the block. The
host therefore waits for nothing, and calls can be captured in a CUDA graph.

`collectives.collective_part` uses this class: `begin`, `send` and `receive` in the dispatch, and
`combine` at the end of a call.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from modular_kernel.contracts import CallState
from modular_kernel.errors import CommunicationError, UnsupportedError
from modular_kernel.ops.expert_slots import count_slots_per_rank
from modular_kernel.ops.quantize import scale_shape
from modular_kernel.quant.quantized_weights import STORAGE
from modular_kernel.replay.recording import hide_from_recorder
from modular_kernel.spec.problem import Problem
from modular_kernel.workspace import BufferSpec
from prepare_finalize.common.blocks import (
    BlockLayout,
    Blocks,
    BlockSums,
    OutgoingRows,
    Ranks,
    ReceivedColumns,
    fill_blocks,
    read_blocks,
    sum_blocks,
)
from prepare_finalize.common.device_handshake import DeviceHandshake
from prepare_finalize.common.device_status import FIELDS, NOT_REFUSED
from prepare_finalize.common.handshake import Layer, refusal_index
from prepare_finalize.common.replayable_exchange import ReplayableExchange
from prepare_finalize.common.torch_group import Exchange


@dataclass(frozen=True)
class FixedCapacityBuffers:
    """Buffers of one call.

    - layout: layout of the blocks.
    - blocks_SB: (S, bytes) uint8, the blocks to send and the received blocks; see
      `FixedCapacityExchange`. W is the number of blocks that this rank receives.
    - local_block: index of the block for this rank itself.
    - row_of_token_WT: row of each token in each block; see `blocks.fill_blocks`. None if there is a
      single block.
    - header_F: (F,) int64, header of this rank.
    - sums_SRH: (2 * W, block rows, H). The first W blocks are this rank's sums for each rank. The
      other W blocks are the sums that it receives from each rank.
    - sent_WB: (W, bytes) uint8, copies of the single block for each peer; None if there are none.
    """

    layout: BlockLayout
    blocks_SB: torch.Tensor
    local_block: int
    row_of_token_WT: torch.Tensor | None
    header_F: torch.Tensor
    sums_SRH: torch.Tensor
    sent_WB: torch.Tensor | None

    def local_section(self, name: str) -> torch.Tensor:
        """Return a section of the block for this rank itself."""
        return self.layout.section(self.blocks_SB, name)[self.local_block]


@dataclass(frozen=True)
class FixedCapacityCall(FixedCapacityBuffers):
    """A call between `send` and `combine`: its buffers, step and dispatch.

    The dispatch is None if the only peer is this rank itself.
    """

    step: int
    dispatch: ReplayableExchange | None

    @cached_property
    def sum_RH(self) -> torch.Tensor:
        """The buffer for this rank's weighted sums of the received rows, (R, H)."""
        return self.sums_SRH[: len(self.sums_SRH) // 2].flatten(0, 1)


class FixedCapacityExchange:
    """The fixed-capacity exchanges of one layer.

    - rows: capacity of a block.
    - uses_all_gather: whether to exchange blocks by an all-gather instead of an all-to-all.
    - peers: the ranks with which this rank exchanges blocks, in ascending order; None means all
      ranks. If P = len(peers) is less than the world size, peer p receives the rows for the p-th
      group of world_size / P consecutive ranks.
    - has_single_block: whether each rank sends one block, with all of its tokens, to all peers.

    In the following, W is the number of peers. If the capacity is the problem's number of tokens,
    each rank sends a single block to all peers. The buffer then has W blocks, one from each peer,
    and the rank fills its own block in place.

    Otherwise, the buffer has 2 * W blocks: W blocks to send, each with the rows that its rank
    needs, then W received blocks. Over NCCL, the block for this rank itself is not exchanged. It is
    filled directly among the received blocks, and in the combine, this rank reads its own sums
    where the experts wrote them. Over gloo, all blocks are exchanged.
    """

    def __init__(
        self,
        layer: Layer,
        *,
        rows: int,
        uses_all_gather: bool = False,
        peers: Sequence[int] | None = None,
    ) -> None:
        layer.uses_device_handshake = True
        self.layer, self.rows, self.uses_all_gather = layer, rows, uses_all_gather
        self.has_single_block = uses_all_gather or rows >= layer.problem.tokens
        self._handshake = DeviceHandshake(layer, rows=rows)
        manager, slots = layer.manager, count_slots_per_rank(layer.problem.placement)
        self._peers = None if peers is None else tuple(peers)
        self._ranks = Ranks(manager.rank, manager.world_size, slots)
        if self._peers is not None:
            ranks_per_peer = manager.world_size // len(self._peers)
            index = self._peers.index(manager.rank)
            self._ranks = Ranks(index, len(self._peers), ranks_per_peer * slots)
        self._skips_local_block = manager.device == "cuda" or self._ranks.world_size == 1
        # The layout and collectives of the last call, which `refuse` repeats without rows.
        self._layout: BlockLayout | None = None
        self._reduces_amax = False

    @property
    def num_local_experts(self) -> int:
        """Number of experts whose rows this rank receives."""
        return self.layer.problem.e if self._peers is None else self._ranks.slots

    def max_received_rows(self, layouts: tuple[BlockLayout, ...]) -> int:
        """Return the maximum number of received rows of activations, including unused ones."""
        return self._ranks.world_size * max(layout.block_rows for layout in layouts)

    def specs(self, layouts: tuple[BlockLayout, ...]) -> dict[str, BufferSpec]:
        """Return the buffers of a call with one of these layouts."""
        problem, world = self.layer.problem, self._ranks.world_size
        num_blocks = world if self.has_single_block else 2 * world
        nbytes = max(layout.nbytes for layout in layouts)
        rows = max(layout.block_rows for layout in layouts)
        specs = {
            "blocks": BufferSpec((num_blocks, nbytes), torch.uint8),
            "sums": BufferSpec((2 * world, rows, problem.hidden), problem.dtype),
            "header": BufferSpec((len(FIELDS),), torch.int64),
        }
        if not self.has_single_block:
            specs["row_of_token"] = BufferSpec((world, problem.tokens), torch.int32)
        if self._copies_single_block:
            specs["sent_blocks"] = BufferSpec((world, nbytes), torch.uint8)
        return specs

    @property
    def _copies_single_block(self) -> bool:
        """Whether the single block is copied for each peer, because gloo cannot gather it."""
        has_peer_list = self._peers is not None and self._ranks.world_size > 1
        return has_peer_list and self.has_single_block and self.layer.manager.device == "cpu"

    def begin(
        self, call: CallState, tokens: int, device: torch.device, layout: BlockLayout, *, amax: bool
    ) -> int:
        """Begin a call of T = `tokens` and return its step; see `DeviceHandshake.begin`.

        layout: layout of the blocks of the call.
        amax: whether the caller will call `reduce_amax` next.
        """
        self._layout, self._reduces_amax = layout, amax
        return self._handshake.begin(call, tokens, device, self._sizes(layout))

    def _sizes(self, layout: BlockLayout) -> tuple[int, ...]:
        """Return the values on which the sizes of a call's exchanges depend."""
        sum_bytes = layout.block_rows * layout.hidden * self.layer.problem.dtype.itemsize
        peers = self._ranks.world_size
        return self.has_single_block, self._reduces_amax, layout.nbytes, sum_bytes, peers

    def reduce_amax(self, amax: torch.Tensor, step: int) -> torch.Tensor:
        """Return the maximum over all ranks of `amax`, (1,) float32."""
        self._handshake.counter.begin()
        manager = self.layer.manager
        amax_W = amax.new_empty(manager.world_size)
        # Calls with this all-gather are never recorded for replay. It is hidden, or else the
        # recorder would record operations of gloo's threads.
        with hide_from_recorder():
            manager.all_gather(amax_W, amax, step=step, phase="counts").wait_on_stream()
        return amax_W.amax().reshape(1)  # propagates NaN, unlike an all-reduce with MAX

    def take_buffers(self, layout: BlockLayout, call: CallState) -> FixedCapacityBuffers:
        """Take the buffers of a call from its workspace."""
        take, world = call.workspace.take, self._ranks.world_size
        row_of_token_WT = None
        if not self.has_single_block:
            row_of_token_WT = take("row_of_token", (world, self.layer.problem.tokens))
        return FixedCapacityBuffers(
            layout,
            take("blocks", (world if self.has_single_block else 2 * world, layout.nbytes)),
            self._local_block,
            row_of_token_WT,
            take("header", (len(FIELDS),)),
            take("sums", (2 * world, layout.block_rows, layout.hidden)),
            take("sent_blocks", (world, layout.nbytes)) if self._copies_single_block else None,
        )

    @property
    def _local_block(self) -> int:
        ranks = self._ranks
        is_among_received = not self.has_single_block and self._skips_local_block
        return ranks.rank + (ranks.world_size if is_among_received else 0)

    def send(
        self,
        rows: OutgoingRows,
        buffers: FixedCapacityBuffers,
        call: CallState,
        step: int,
        *,
        x_in_place: bool = False,
    ) -> FixedCapacityCall:
        """Send the rows of a call that has begun.

        x_in_place: whether the activations are already in the single block.
        """
        call.peers_notified = True
        return self._send(rows, buffers, step, x_in_place=x_in_place)

    def _send(
        self,
        rows: OutgoingRows,
        buffers: FixedCapacityBuffers,
        step: int,
        *,
        refusal: int = NOT_REFUSED,
        x_in_place: bool = False,
    ) -> FixedCapacityCall:
        fill_blocks(
            rows,
            Blocks(buffers.blocks_SB, buffers.layout, self._ranks, buffers.local_block),
            row_of_token_WT=buffers.row_of_token_WT,
            counter=self._handshake.counter,
            header_F=buffers.header_F,
            refusal=refusal,
            x_in_place=x_in_place,
        )
        dispatch = None
        if self._ranks.world_size > 1:
            dispatch = ReplayableExchange(self.layer.manager, self._make_dispatch(buffers))
            dispatch.start(step)
        return FixedCapacityCall(**vars(buffers), step=step, dispatch=dispatch)

    def _make_dispatch(self, buffers: FixedCapacityBuffers) -> Callable[[int], Exchange]:
        """Return a function that starts the exchange of the blocks; its argument is the step."""
        manager, world, blocks_SB = self.layer.manager, self._ranks.world_size, buffers.blocks_SB
        received_WB, local_B = blocks_SB[-world:], blocks_SB[buffers.local_block]
        exchange = partial(manager.block_exchange, peers=self._peers, phase="dispatch")
        if not self.has_single_block:
            return exchange(received_WB, blocks_SB[:world])
        block_of_peers_WB = local_B.expand_as(received_WB)
        if (sent_WB := buffers.sent_WB) is not None:
            start = exchange(received_WB, sent_WB)

            def copy_and_start(step: int) -> Exchange:
                sent_WB.copy_(block_of_peers_WB)
                return start(step)

            return copy_and_start
        if self._skips_local_block and not self.uses_all_gather:
            return exchange(received_WB, block_of_peers_WB)
        received_B = received_WB.flatten()
        return lambda step: manager.all_gather(received_B, local_B, step=step, phase="dispatch")

    def receive(self, sent: FixedCapacityCall, out: ReceivedColumns) -> torch.Tensor:
        """Make the current stream wait for the blocks, verify their headers, and read the columns.

        Return the activations, (R, H), a view of the received blocks.
        """
        return self._receive(sent, out, verify=True)

    def _receive(
        self, sent: FixedCapacityCall, out: ReceivedColumns, *, verify: bool
    ) -> torch.Tensor:
        """Receive the blocks of a call. verify: whether to verify their headers."""
        if sent.dispatch is not None:
            sent.dispatch.wait()
        received_WB = sent.blocks_SB[-self._ranks.world_size :]
        read_blocks(
            Blocks(received_WB, sent.layout, self._ranks, self._ranks.rank),
            out,
            status=self._handshake.status,
            header_F=sent.header_F,
            limits=self._handshake.limits,
            verify=verify,
        )
        return sent.layout.activations(received_WB)

    def combine(self, sent: FixedCapacityCall, out_TH: torch.Tensor) -> None:
        """Send `sent.sum_RH` back to the ranks of the tokens, and add the sums of each token."""
        sums_SRH = sent.sums_SRH
        ranks = self._ranks
        manager = self.layer.manager
        if ranks.world_size > 1:
            start_exchange = manager.block_exchange(
                sums_SRH[ranks.world_size :].view(torch.uint8),
                sums_SRH[: ranks.world_size].view(torch.uint8),
                peers=self._peers,
                rows=sent.layout.capacity,
                phase="combine",
            )
            exchange = ReplayableExchange(manager, start_exchange)
            exchange.start(sent.step)
            exchange.wait()
        local_block = ranks.rank + (0 if self._skips_local_block else ranks.world_size)
        sum_blocks(
            BlockSums(sums_SRH, ranks, first_block=ranks.world_size, local_block=local_block),
            out_TH,
            sent.row_of_token_WT,
            self._handshake.counter,
        )

    @property
    def is_established(self) -> bool:
        """Whether the handshake of the layer's first call has succeeded."""
        return self._handshake.is_established

    def check(self) -> None:
        """Wait for the device. Raise CommunicationError if a call failed."""
        self._handshake.check()

    def refuse(self, error: Exception) -> bool:
        """Notify all ranks that this rank refuses its call, with blocks that have no rows.

        Return False, without an exchange, before the handshake of the layer's first call.
        """
        if self._layout is None or not self.is_established:
            return False
        manager, problem, layout = self.layer.manager, self.layer.problem, self._layout
        if manager.is_capturing():  # the other ranks time out
            return True
        device = torch.device(manager.device)
        with suppress(CommunicationError, UnsupportedError):  # the manager is closed
            step = self._handshake.next_step(self._sizes(layout))
            if self._reduces_amax:
                self.reduce_amax(torch.zeros(1, dtype=torch.float32, device=device), step)
            k = problem.top_k
            no_rows = OutgoingRows(
                torch.empty(0, problem.hidden, dtype=layout.dtype, device=device),
                torch.empty(0, layout.scales, dtype=torch.float32, device=device)
                if layout.scales
                else None,
                torch.empty(0, k, dtype=torch.int32, device=device),
                torch.empty(0, k, dtype=torch.float32, device=device),
                None,
                torch.empty(1, dtype=torch.int32, device=device),
            )
            specs = self.specs((layout,))
            blocks_SB, sums_SRH, header_F = (
                torch.zeros(specs[name].shape, dtype=specs[name].dtype, device=device)
                for name in ("blocks", "sums", "header")
            )
            row_of_token_WT, sent_WB = (
                torch.empty(specs[name].shape, dtype=specs[name].dtype, device=device)
                if name in specs
                else None
                for name in ("row_of_token", "sent_blocks")
            )
            buffers = FixedCapacityBuffers(
                layout, blocks_SB, self._local_block, row_of_token_WT, header_F, sums_SRH, sent_WB
            )
            sent = self._send(no_rows, buffers, step, refusal=refusal_index(error))
            self._finish_refused_call(sent)
        return True

    def _finish_refused_call(self, sent: FixedCapacityCall) -> None:
        """Take part in the remaining exchanges of a call that this rank has refused."""
        if sent.dispatch is not None:
            sent.dispatch.wait()
        received_WB = sent.blocks_SB[-self._ranks.world_size :]
        self._verify(sent.layout.section(received_WB, "header"), sent)
        self.combine(sent, sent.sums_SRH.new_empty(0, sent.layout.hidden))

    def _verify(self, headers_WF: torch.Tensor, sent: FixedCapacityCall) -> None:
        self._handshake.status.verify(headers_WF, sent.header_F, self._handshake.limits)


def make_block_layouts(problem: Problem, rows: int) -> dict[bool, BlockLayout]:
    """Return the layouts of blocks with a capacity of `rows` rows, by whether rows are quantized.

    The key True exists only if the scheme quantizes activations before the dispatch.
    """
    scheme, layouts = problem.scheme, {}
    for quantized in {False, scheme.dispatched_quantized}:
        scales = 0
        if quantized and scheme.activation_granularity != "tensor":
            scales = scale_shape(scheme, 1, problem.hidden)[1]
        layouts[quantized] = BlockLayout(
            rows,
            problem.hidden,
            STORAGE[scheme.activation] if quantized else problem.dtype,
            problem.top_k,
            scales,
            problem.adapters is not None,
        )
    return layouts
