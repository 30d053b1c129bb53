"""FixedExchange: dispatch and combine in blocks of a fixed size, without row counts on the host."""

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch

from modular_kernel.contracts import Call
from modular_kernel.errors import CommunicationError, UnsupportedError
from modular_kernel.ops.expert_slots import count_slots_per_rank
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
from prepare_finalize.common.torch_group import Exchange


@dataclass(frozen=True)
class FixedBuffers:
    """Buffers of a call of a FixedExchange.

    - layout: of its blocks. blocks_SB: the blocks to send and received; see `FixedExchange`.
    - row_of_token_WT: see `blocks.fill_blocks`. header_F: the header of this rank.
    - sums_SRH: (2 * W, block rows, H), this rank's sums for each rank, then those of each rank.
    """

    layout: BlockLayout
    blocks_SB: torch.Tensor
    row_of_token_WT: torch.Tensor | None
    header_F: torch.Tensor
    sums_SRH: torch.Tensor


@dataclass(frozen=True)
class FixedCall(FixedBuffers):
    """A call of a FixedExchange, from `send` to `combine`."""

    step: int
    exchange: Exchange

    @cached_property
    def sum_RH(self) -> torch.Tensor:
        """The buffer for this rank's sums of the received rows, (R, H)."""
        return self.sums_SRH[: len(self.sums_SRH) // 2].flatten(0, 1)


class FixedExchange:
    """Exchanges of one layer in blocks of a fixed size.

    - rows: capacity of a block.
    - gathers: whether each rank sends the same block to all ranks (an all-gather), instead of a
      block for each (an all-to-all).

    An all-gather is in place. An all-to-all has W blocks to send, followed by W received ones. The
    block for this rank itself is written to its place among the received ones, and the combine
    reads this rank's own sums where the experts' sums are: only rows of other ranks are exchanged.
    gloo exchanges all blocks.
    """

    def __init__(self, layer: Layer, *, rows: int, gathers: bool) -> None:
        layer.on_device = True
        self.layer, self.rows, self.gathers = layer, rows, gathers
        self._agreement = DeviceAgreement(layer, rows=rows)
        problem, manager = layer.problem, layer.manager
        self._ranks = Ranks(
            manager.rank, manager.world_size, count_slots_per_rank(problem.placement)
        )
        self._skips_own = manager.device == "cuda"
        # What the refusal of a call has to exchange; known from the layer's first call.
        self._layout: BlockLayout | None = None
        self._reduces_amax = False

    def received_rows(self, layouts: tuple[BlockLayout, ...]) -> int:
        """Return the maximum number of received rows, those that are no activations included."""
        return self._ranks.world_size * max(layout.block_rows for layout in layouts)

    def specs(self, layouts: tuple[BlockLayout, ...]) -> dict[str, BufferSpec]:
        """Return the buffers of a call with one of these layouts."""
        problem, world = self.layer.problem, self._ranks.world_size
        num_blocks = world if self.gathers else 2 * world
        nbytes = max(layout.nbytes for layout in layouts)
        rows = max(layout.block_rows for layout in layouts)
        specs = {
            "blocks": BufferSpec((num_blocks, nbytes), torch.uint8),
            "sums": BufferSpec((2 * world, rows, problem.hidden), problem.dtype),
            "header": BufferSpec((len(FIELDS),), torch.int64),
        }
        if not self.gathers:
            specs["row_of_token"] = BufferSpec((world, problem.tokens), torch.int32)
        return specs

    def begin(self, call: Call, tokens: int, device: torch.device) -> int:
        """Begin a call of T = `tokens` and return its step; see `DeviceAgreement.begin`."""
        return self._agreement.begin(call, tokens, device)

    def reduce_amax(self, amax: torch.Tensor, step: int) -> torch.Tensor:
        """Return the maximum over all ranks of `amax`, (1,) float32."""
        self._reduces_amax = True
        self._agreement.counter.begin()
        manager = self.layer.manager
        amax_W = amax.new_empty(manager.world_size)
        manager.all_gather(amax_W, amax, step=step, phase="counts").wait_on_stream()
        return amax_W.amax().reshape(1)  # NaN if any is, unlike the maximum of an all-reduce

    def send(self, rows: SentRows, layout: BlockLayout, call: Call, step: int) -> FixedCall:
        """Send the rows of a call that has begun."""
        self._layout, take, world = layout, call.workspace.take, self._ranks.world_size
        blocks_SB = take("blocks", (world if self.gathers else 2 * world, layout.nbytes))
        row_of_token_WT = None
        if not self.gathers:
            row_of_token_WT = take("row_of_token", (world, self.layer.problem.tokens))
        call.peers_notified = True
        header_F = take("header", (len(FIELDS),))
        sums_SRH = take("sums", (2 * world, layout.block_rows, layout.hidden))
        buffers = FixedBuffers(layout, blocks_SB, row_of_token_WT, header_F, sums_SRH)
        return self._send(rows, buffers, step)

    def _send(
        self, rows: SentRows, buffers: FixedBuffers, step: int, refusal: int = NOT_REFUSED
    ) -> FixedCall:
        layout, blocks_SB = buffers.layout, buffers.blocks_SB
        manager, ranks = self.layer.manager, self._ranks
        own_block = ranks.rank
        if not self.gathers and self._skips_own:
            own_block += ranks.world_size
        fill_blocks(
            rows,
            Blocks(blocks_SB, layout, ranks, own_block),
            row_of_token_WT=buffers.row_of_token_WT,
            counter=self._agreement.counter,
            header_F=buffers.header_F,
            refusal=refusal,
        )
        received_WB = blocks_SB[-ranks.world_size :]
        if self.gathers:
            exchange = manager.all_gather(
                received_WB.flatten(), received_WB[ranks.rank], step=step, phase="dispatch"
            )
        else:
            sent_WB = blocks_SB[: ranks.world_size]
            exchange = manager.exchange_blocks(received_WB, sent_WB, step=step, phase="dispatch")
        return FixedCall(**vars(buffers), step=step, exchange=exchange)

    def receive(self, sent: FixedCall, out: ReceivedColumns) -> torch.Tensor:
        """Make the stream wait for the rows and read them; verify their headers on the device.

        Returns the activations, (R, H), a view of the received blocks.
        """
        sent.exchange.wait_on_stream()
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
        self.layer.manager.exchange_blocks(
            sums_SRH[ranks.world_size :].view(torch.uint8),
            sums_SRH[: ranks.world_size].view(torch.uint8),
            rows=sent.layout.rows,
            step=sent.step,
            phase="combine",
        ).wait_on_stream()
        own_block = ranks.rank + (0 if self._skips_own else ranks.world_size)
        sum_blocks(
            BlockSums(sums_SRH, ranks, first_block=ranks.world_size, own_block=own_block),
            out_TH,
            sent.row_of_token_WT,
            self._agreement.counter,
        )

    def check(self) -> None:
        """Wait for the device; raise CommunicationError if a call failed."""
        self._agreement.check()

    def refuse(self, error: Exception) -> bool:
        """Tell all ranks that this rank refuses its call, by exchanging blocks without rows.

        Returns False, without an exchange, if ranks have not agreed on the layer yet.
        """
        if self._layout is None:
            return False
        manager, problem, layout = self.layer.manager, self.layer.problem, self._layout
        if manager.is_capturing():  # other ranks see that the call does not arrive
            return True
        world, device = manager.world_size, torch.device(manager.device)
        with suppress(CommunicationError, UnsupportedError):  # the manager is closed
            step = self._agreement.next_step()
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
            if not self.gathers:
                row_of_token_WT = torch.empty(
                    specs["row_of_token"].shape, dtype=torch.int32, device=device
                )
            buffers = FixedBuffers(layout, blocks_SB, row_of_token_WT, header_F, sums_SRH)
            sent = self._send(no_rows, buffers, step, refusal_index(error))
            sent.exchange.wait_on_stream()
            headers_WF = layout.section(sent.blocks_SB[-world:], "header")
            self._agreement.status.verify(headers_WF, sent.header_F, self._agreement.limits)
            self.combine(sent, sent.sums_SRH.new_empty(0, problem.hidden))
        return True
