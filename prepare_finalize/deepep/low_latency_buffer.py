"""LowLatency: one of DeepEP's low-latency buffers, and the order in which it may be used.

The library alternates between the two halves of a buffer, one exchange in each. A dispatch that was
sent but not received still occupies its half, and the second exchange after it would overwrite it.
This wrapper therefore receives a dispatch no later than the start of the next exchange, so any
number of calls can be in flight. If nothing runs in between, the library sends and receives in one
launch.
"""

from collections.abc import Callable
from typing import Any

import torch


class Arrival:
    """The result of one dispatch, valid after `receive`. C is world_size * tokens.

    x_eCH: bfloat16, or float8_e4m3fn with scale_eCG.
    scale_eCG: float32, one scale per 128 values, any strides; or None.
    counts_e: int32, the valid rows of each expert, which come first.
    handle: the library's handle.
    hook: receives the rows; None if they have been received.
    """

    def __init__(
        self,
        x_eCH: torch.Tensor,
        scale_eCG: torch.Tensor | None,
        counts_e: torch.Tensor,
        handle: tuple[Any, ...],
        hook: Callable[[], None] | None,
    ) -> None:
        self.x_eCH, self.scale_eCG, self.counts_e, self.handle = x_eCH, scale_eCG, counts_e, handle
        self._hook = hook

    def receive(self) -> None:
        """Make the current stream wait for the rows of all ranks. May be called repeatedly."""
        hook, self._hook = self._hook, None
        if hook is not None:
            hook()


class LowLatency:
    """A library buffer for at most `tokens` tokens per rank and `experts` experts in total."""

    def __init__(self, buffer: Any, tokens: int, experts: int) -> None:
        self._buffer, self._tokens, self._experts = buffer, tokens, experts
        self._pending: Arrival | None = None

    def dispatch(
        self, x_TH: torch.Tensor, ids_TK: torch.Tensor, *, quantize: bool, at_once: bool = False
    ) -> Arrival:
        """Send rows. Call `receive` of the result before reading it.

        x_TH: bfloat16, contiguous.
        ids_TK: int64, contiguous; no expert twice in a row, -1 to skip.
        quantize: convert to float8_e4m3fn on the way, with one scale per 128 values.
        at_once: receive in the same launch.
        """
        self._receive_pending()
        rows, counts, handle, _, hook = self._buffer.low_latency_dispatch(
            x_TH,
            ids_TK,
            self._tokens,
            self._experts,
            use_fp8=quantize,
            return_recv_hook=not at_once,
        )
        x, scale = rows if quantize else (rows, None)
        arrival = Arrival(x, scale, counts, handle, None if at_once else hook)
        self._pending = None if at_once else arrival
        return arrival

    def combine(
        self,
        rows_eCH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        handle: tuple[Any, ...],
        out: torch.Tensor,
    ) -> None:
        """Write the weighted sums of each token's rows, added in float32, to `out`.

        rows_eCH: the output of the experts.
        ids_TK, handle: those of the dispatch.
        weights_TK: float32.
        out: (T, H) bfloat16, contiguous.
        """
        self._receive_pending()
        self._buffer.low_latency_combine(rows_eCH, ids_TK, weights_TK, handle, out=out)

    def self_test(self, hidden: int) -> None:
        """Run one dispatch and combine without tokens. Raise RuntimeError if the library fails.

        Every rank must call it. The library checks some conditions only on the GPU, and a failed
        check makes the GPU unusable for this process, so it should happen before the first real
        call.
        """
        device = torch.device("cuda", torch.cuda.current_device())
        x_TH = torch.empty(0, hidden, dtype=torch.bfloat16, device=device)
        ids_TK = torch.empty(0, 1, dtype=torch.int64, device=device)
        weights_TK = torch.empty(0, 1, dtype=torch.float32, device=device)
        arrival = self.dispatch(x_TH, ids_TK, quantize=False)
        arrival.receive()
        self.combine(arrival.x_eCH, ids_TK, weights_TK, arrival.handle, torch.empty_like(x_TH))
        torch.cuda.synchronize(device)

    def destroy(self) -> None:
        self._receive_pending()
        self._buffer.destroy()

    def _receive_pending(self) -> None:
        if self._pending is not None:
            self._pending.receive()
        self._pending = None
