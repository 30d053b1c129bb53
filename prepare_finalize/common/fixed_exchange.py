"""FixedExchange: dispatch and combine in blocks of a fixed size, without row counts on the host."""

from contextlib import suppress

import torch

from modular_kernel.contracts import Call
from modular_kernel.errors import CommunicationError, UnsupportedError
from modular_kernel.workspace import BufferSpec
from prepare_finalize.common.agreement import Layer, refusal_index
from prepare_finalize.common.device_agreement import DeviceAgreement
from prepare_finalize.common.device_status import FIELDS, NOT_REFUSED
from prepare_finalize.common.packed_rows import RowLayout
from prepare_finalize.common.torch_group import Exchange

_HEADER_BYTES = 8 * len(FIELDS)


class FixedExchange:
    """Exchanges of one layer in blocks of packed rows, each followed by a row with the header.

    - rows: capacity of a block. Rows beyond those in use have no experts.
    - gathers: whether each rank sends the same block to all ranks (an all-gather), instead of a
      block for each (an all-to-all).
    """

    def __init__(self, layer: Layer, *, rows: int, gathers: bool) -> None:
        layer.on_device = True
        self.layer, self.rows, self.gathers = layer, rows, gathers
        self._agreement = DeviceAgreement(layer, rows=rows)
        # What the refusal of a call has to exchange; known from the layer's first call.
        self._layout: RowLayout | None = None
        self._reduces_amax = False

    def specs(self, row_bytes: int) -> dict[str, BufferSpec]:
        """Return the buffers of `blocks` and `return_sums`, for packed rows of up to row_bytes."""
        problem, world = self.layer.problem, self.layer.manager.world_size
        sent_blocks = 1 if self.gathers else world
        return {
            "packed_sent": BufferSpec((sent_blocks, self.rows + 1, row_bytes), torch.uint8),
            "packed_all": BufferSpec((world, self.rows + 1, row_bytes), torch.uint8),
            "returned": BufferSpec((world * self.rows, problem.hidden), problem.dtype),
        }

    def begin(self, call: Call, tokens: int, device: torch.device) -> int:
        """Begin a call of T = `tokens` and return its step; see `DeviceAgreement.begin`."""
        return self._agreement.begin(call, tokens, device)

    def reduce_amax(self, amax: torch.Tensor, step: int) -> torch.Tensor:
        """Return the maximum over all ranks of `amax`, (1,) float32."""
        self._reduces_amax = True
        self._agreement.begin_on_device()
        manager = self.layer.manager
        amax_W = amax.new_empty(manager.world_size)
        manager.all_gather(amax_W, amax, step=step, phase="counts").wait_on_stream()
        return amax_W.amax().reshape(1)  # NaN if any is, unlike the maximum of an all-reduce

    def blocks(self, call: Call, layout: RowLayout) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the blocks to send, (1 or W, rows + 1, bytes), and those to receive, (W, ...)."""
        self._layout = layout
        shape, world = (self.rows + 1, layout.nbytes), self.layer.manager.world_size
        sent = call.workspace.take("packed_sent", (1 if self.gathers else world, *shape))
        return sent, call.workspace.take("packed_all", (world, *shape))

    def dispatch(
        self,
        received_WRB: torch.Tensor,
        sent_SRB: torch.Tensor,
        *,
        tokens: int,
        rows_W: torch.Tensor | None = None,
        refusal: int = NOT_REFUSED,
        step: int,
    ) -> tuple[Exchange, torch.Tensor]:
        """Add this rank's header to the blocks and send them; return the exchange and the header.

        tokens, rows_W, refusal: of the header; see `DeviceAgreement.header`.
        """
        manager = self.layer.manager
        header = self._agreement.header(tokens, rows_W, refusal=refusal)
        _headers(sent_SRB).copy_(header.expand(len(sent_SRB), -1))
        received, sent = received_WRB.flatten(0, 1), sent_SRB.flatten(0, 1)
        if self.gathers:
            exchange = manager.all_gather(received, sent, step=step, phase="dispatch")
            return exchange, header
        splits = [self.rows + 1] * manager.world_size
        exchange = manager.all_to_all(
            received, sent, output_splits=splits, input_splits=splits, step=step, phase="dispatch"
        )
        return exchange, header

    def receive(self, exchange: Exchange, received_WRB: torch.Tensor, header: torch.Tensor) -> None:
        """Make the stream wait for the blocks, and verify their headers on the device.

        exchange, header: results of `dispatch`.
        """
        exchange.wait_on_stream()
        self._agreement.verify(_headers(received_WRB), header)

    def return_sums(self, partial_sums: torch.Tensor, sum_RH: torch.Tensor, step: int) -> None:
        """Send the sums of the received rows, (W * rows, H), back to the ranks of their tokens."""
        manager = self.layer.manager
        splits = [self.rows] * manager.world_size
        self._agreement.count_combine()
        manager.all_to_all(
            partial_sums.view(torch.uint8),
            sum_RH.view(torch.uint8),
            output_splits=splits,
            input_splits=splits,
            step=step,
            phase="combine",
        ).wait_on_stream()

    def end_call(self, out: torch.Tensor) -> None:
        """End a call; fill its output with NaN if it, or an earlier call of the manager, failed."""
        self._agreement.end_call(out)

    def check(self) -> None:
        """Wait for the device; raise CommunicationError if a call failed."""
        self._agreement.check()

    def refuse(self, error: Exception) -> bool:
        """Tell all ranks that this rank refuses its call, by exchanging blocks without rows.

        Returns False, without an exchange, if ranks have not agreed on the layer yet.
        """
        if self._layout is None:
            return False
        if self.layer.manager.is_capturing():  # other ranks see that the call does not arrive
            return True
        manager, problem, layout = self.layer.manager, self.layer.problem, self._layout
        world, device, shape = manager.world_size, manager.device, (self.rows + 1, layout.nbytes)
        with suppress(CommunicationError, UnsupportedError):  # the manager is closed
            step = self._agreement.next_step()
            if self._reduces_amax:
                self.reduce_amax(torch.zeros(1, dtype=torch.float32, device=device), step)
            sent = torch.empty(
                1 if self.gathers else world, *shape, dtype=torch.uint8, device=device
            )
            layout.clear(sent.flatten(0, 1))
            received = sent.new_empty(world, *shape)
            exchange, header = self.dispatch(
                received, sent, tokens=0, refusal=refusal_index(error), step=step
            )
            self.receive(exchange, received, header)
            sum_RH = torch.zeros(
                world * self.rows, problem.hidden, dtype=problem.dtype, device=device
            )
            self.return_sums(torch.empty_like(sum_RH), sum_RH, step)
            self.end_call(sum_RH)
        return True


def _headers(blocks_SRB: torch.Tensor) -> torch.Tensor:
    """Return the headers in the last rows of blocks, (S, F) int64, a view."""
    return blocks_SRB[:, -1, :_HEADER_BYTES].view(torch.int64)
