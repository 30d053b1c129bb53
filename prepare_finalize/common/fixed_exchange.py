"""FixedExchange: dispatch and combine in blocks of a fixed size, without row counts on the host."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch

from modular_kernel.contracts import CallState
from modular_kernel.errors import CommunicationError, UnsupportedError
from modular_kernel.ops.expert_slots import count_slots_per_rank
from modular_kernel.replay.recording import unrecorded
from modular_kernel.workspace import BufferSpec
from prepare_finalize.common.agreement import Layer, refusal_index
from prepare_finalize.common.blocks import (
    BlockLayout,
    Blocks,
    BlockSums,
    Ranks,
    ReceivedColumns,
    SentRows,
    fill_blocks,
    read_blocks,
    sum_blocks,
)
from prepare_finalize.common.device_agreement import DeviceAgreement
from prepare_finalize.common.device_status import FIELDS, NOT_REFUSED
from prepare_finalize.common.repeated_exchange import RepeatedExchange
from prepare_finalize.common.torch_group import Exchange


@dataclass(frozen=True)
class FixedBuffers:
    """Buffers of a call of a FixedExchange.

    - layout: the layout of the blocks.
    - blocks_SB: the blocks to send and the received blocks; see `FixedExchange`.
    - own_block: index of the block for this rank itself.
    - row_of_token_WT: see `blocks.fill_blocks`.
    - header_F: the header of this rank.
    - sums_SRH: (2 * W, block rows, H), this rank's sums for each rank, then those of each rank.
    """

    layout: BlockLayout
    blocks_SB: torch.Tensor
    own_block: int
    row_of_token_WT: torch.Tensor | None
    header_F: torch.Tensor
    sums_SRH: torch.Tensor

    def own_section(self, name: str) -> torch.Tensor:
        """Return a section of the block for this rank."""
        return self.layout.section(self.blocks_SB, name)[self.own_block]


@dataclass(frozen=True)
class FixedCall(FixedBuffers):
    """A call of a FixedExchange, from `send` to `combine`."""

    step: int
    dispatch: RepeatedExchange

    @cached_property
    def sum_RH(self) -> torch.Tensor:
        """The buffer for this rank's sums of the received rows, (R, H)."""
        return self.sums_SRH[: len(self.sums_SRH) // 2].flatten(0, 1)


class FixedExchange:
    """Exchanges of one layer in blocks of a fixed size.

    - rows: capacity of a block.
    - gathers: whether blocks are exchanged by an all-gather, instead of an all-to-all.
    - shares_block: whether each rank sends the same block, with all of its tokens, to all ranks.

    If blocks have room for all tokens (`rows` is the problem's number of tokens), a rank sends the
    same block to all ranks, from its place among the W received blocks. Otherwise there are W
    blocks to send, each with the rows that its rank needs, followed by W received ones; the block
    for this rank itself is written to its place among the received ones. The combine reads this
    rank's own sums where the experts write them: only rows of other ranks are exchanged. gloo
    exchanges all blocks.
    """

    def __init__(self, layer: Layer, *, rows: int, gathers: bool) -> None:
        layer.on_device = True
        self.layer, self.rows, self.gathers = layer, rows, gathers
        self.shares_block = gathers or rows >= layer.problem.tokens
        self._agreement = DeviceAgreement(layer, rows=rows)
        problem, manager = layer.problem, layer.manager
        self._ranks = Ranks(
            manager.rank, manager.world_size, count_slots_per_rank(problem.placement)
        )
        self._skips_own = manager.device == "cuda"
        # Of the last call: what the refusal of a call has to exchange.
        self._layout: BlockLayout | None = None
        self._reduces_amax = False

    def received_rows(self, layouts: tuple[BlockLayout, ...]) -> int:
        """Return the maximum number of received rows, those that are no activations included."""
        return self._ranks.world_size * max(layout.block_rows for layout in layouts)

    def specs(self, layouts: tuple[BlockLayout, ...]) -> dict[str, BufferSpec]:
        """Return the buffers of a call with one of these layouts."""
        problem, world = self.layer.problem, self._ranks.world_size
        num_blocks = world if self.shares_block else 2 * world
        nbytes = max(layout.nbytes for layout in layouts)
        rows = max(layout.block_rows for layout in layouts)
        specs = {
            "blocks": BufferSpec((num_blocks, nbytes), torch.uint8),
            "sums": BufferSpec((2 * world, rows, problem.hidden), problem.dtype),
            "header": BufferSpec((len(FIELDS),), torch.int64),
        }
        if not self.shares_block:
            specs["row_of_token"] = BufferSpec((world, problem.tokens), torch.int32)
        return specs

    def begin(
        self, call: CallState, tokens: int, device: torch.device, layout: BlockLayout, *, amax: bool
    ) -> int:
        """Begin a call of T = `tokens` and return its step; see `DeviceAgreement.begin`.

        layout: of its blocks. amax: whether `reduce_amax` follows.
        """
        self._layout, self._reduces_amax = layout, amax
        return self._agreement.begin(call, tokens, device, self._sizes(layout))

    def _sizes(self, layout: BlockLayout) -> tuple[int, ...]:
        """Return what determines the sizes of the exchanges of a call."""
        sum_bytes = layout.block_rows * layout.hidden * self.layer.problem.dtype.itemsize
        return self.shares_block, self._reduces_amax, layout.nbytes, sum_bytes

    def reduce_amax(self, amax: torch.Tensor, step: int) -> torch.Tensor:
        """Return the maximum over all ranks of `amax`, (1,) float32."""
        self._agreement.counter.begin()
        manager = self.layer.manager
        amax_W = amax.new_empty(manager.world_size)
        with unrecorded():  # the call is not replayed, but threads of gloo must not record
            manager.all_gather(amax_W, amax, step=step, phase="counts").wait_on_stream()
        return amax_W.amax().reshape(1)  # NaN if any is, unlike the maximum of an all-reduce

    def take_buffers(self, layout: BlockLayout, call: CallState) -> FixedBuffers:
        """Take the buffers of a call from its workspace."""
        take, world = call.workspace.take, self._ranks.world_size
        row_of_token_WT = None
        if not self.shares_block:
            row_of_token_WT = take("row_of_token", (world, self.layer.problem.tokens))
        return FixedBuffers(
            layout,
            take("blocks", (world if self.shares_block else 2 * world, layout.nbytes)),
            self._own_block,
            row_of_token_WT,
            take("header", (len(FIELDS),)),
            take("sums", (2 * world, layout.block_rows, layout.hidden)),
        )

    @property
    def _own_block(self) -> int:
        ranks, is_copied = self._ranks, not self.shares_block and self._skips_own
        return ranks.rank + (ranks.world_size if is_copied else 0)

    def send(
        self,
        rows: SentRows,
        buffers: FixedBuffers,
        call: CallState,
        step: int,
        *,
        x_in_place: bool = False,
    ) -> FixedCall:
        """Send the rows of a call that has begun.

        x_in_place: whether the activations are already in the block for this rank, which all ranks
            share.
        """
        call.peers_notified = True
        return self._send(rows, buffers, step, x_in_place=x_in_place)

    def _send(
        self,
        rows: SentRows,
        buffers: FixedBuffers,
        step: int,
        *,
        refusal: int = NOT_REFUSED,
        x_in_place: bool = False,
    ) -> FixedCall:
        fill_blocks(
            rows,
            Blocks(buffers.blocks_SB, buffers.layout, self._ranks, buffers.own_block),
            row_of_token_WT=buffers.row_of_token_WT,
            counter=self._agreement.counter,
            header_F=buffers.header_F,
            refusal=refusal,
            x_in_place=x_in_place,
        )
        dispatch = RepeatedExchange(self.layer.manager, self._dispatch_of(buffers))
        dispatch.start(step)
        return FixedCall(**vars(buffers), step=step, dispatch=dispatch)

    def _dispatch_of(self, buffers: FixedBuffers) -> Callable[[int], Exchange]:
        """Return a function that starts the exchange of these blocks in a step."""
        manager, world, blocks_SB = self.layer.manager, self._ranks.world_size, buffers.blocks_SB
        received_WB, own_B = blocks_SB[-world:], blocks_SB[buffers.own_block]
        if not self.shares_block:
            return manager.block_exchange(received_WB, blocks_SB[:world], phase="dispatch")
        if self._skips_own and not self.gathers:
            sent_WB = own_B.expand_as(received_WB)
            return manager.block_exchange(received_WB, sent_WB, phase="dispatch")
        received_B = received_WB.flatten()
        return lambda step: manager.all_gather(received_B, own_B, step=step, phase="dispatch")

    def receive(self, sent: FixedCall, out: ReceivedColumns) -> torch.Tensor:
        """Make the stream wait for the rows and read them; verify their headers on the device.

        Returns the activations, (R, H), a view of the received blocks.
        """
        sent.dispatch.wait()
        received_WB = sent.blocks_SB[-self._ranks.world_size :]
        read_blocks(
            Blocks(received_WB, sent.layout, self._ranks, self._ranks.rank),
            out,
            status=self._agreement.status,
            header_F=sent.header_F,
            limits=self._agreement.limits,
        )
        return sent.layout.activations(received_WB)

    def combine(self, sent: FixedCall, out_TH: torch.Tensor) -> None:
        """Send `sent.sum_RH` back to the ranks of the tokens, and sum those of each token."""
        sums_SRH = sent.sums_SRH
        ranks = self._ranks
        manager = self.layer.manager
        start_exchange = manager.block_exchange(
            sums_SRH[ranks.world_size :].view(torch.uint8),
            sums_SRH[: ranks.world_size].view(torch.uint8),
            rows=sent.layout.rows,
            phase="combine",
        )
        exchange = RepeatedExchange(manager, start_exchange)
        exchange.start(sent.step)
        exchange.wait()
        own_block = ranks.rank + (0 if self._skips_own else ranks.world_size)
        sum_blocks(
            BlockSums(sums_SRH, ranks, first_block=ranks.world_size, own_block=own_block),
            out_TH,
            sent.row_of_token_WT,
            self._agreement.counter,
        )

    @property
    def is_established(self) -> bool:
        """Whether all ranks have agreed on the layer."""
        return self._agreement.is_established

    def check(self) -> None:
        """Wait for the device; raise CommunicationError if a call failed."""
        self._agreement.check()

    def refuse(self, error: Exception) -> bool:
        """Tell all ranks that this rank refuses its call, by exchanging blocks without rows.

        Returns False, without an exchange, if ranks have not agreed on the layer yet.
        """
        if self._layout is None or not self.is_established:
            return False
        manager, problem, layout = self.layer.manager, self.layer.problem, self._layout
        if manager.is_capturing():  # other ranks see that the call does not arrive
            return True
        world, device = manager.world_size, torch.device(manager.device)
        with suppress(CommunicationError, UnsupportedError):  # the manager is closed
            step = self._agreement.next_step(self._sizes(layout))
            if self._reduces_amax:
                self.reduce_amax(torch.zeros(1, dtype=torch.float32, device=device), step)
            k = problem.top_k
            no_rows = SentRows(
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
            row_of_token_WT = None
            if not self.shares_block:
                row_of_token_WT = torch.empty(
                    specs["row_of_token"].shape, dtype=torch.int32, device=device
                )
            buffers = FixedBuffers(
                layout, blocks_SB, self._own_block, row_of_token_WT, header_F, sums_SRH
            )
            sent = self._send(no_rows, buffers, step, refusal=refusal_index(error))
            sent.dispatch.wait()
            headers_WF = layout.section(sent.blocks_SB[-world:], "header")
            self._agreement.status.verify(headers_WF, sent.header_F, self._agreement.limits)
            self.combine(sent, sent.sums_SRH.new_empty(0, problem.hidden))
        return True
