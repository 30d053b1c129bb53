"""LowLatencyBuffer: a wrapper of DeepEP's low-latency Buffer that allows several calls in flight.

The library alternates between the two halves of a buffer. A dispatch that was sent but not received
still occupies its half, which the second exchange after it would overwrite. The wrapper therefore
receives a dispatch no later than at the start of the next exchange.
"""

from collections.abc import Callable
from typing import Any

import torch

from prepare_finalize.common.library_calls import unpack


class LowLatencyDispatch:
    """A dispatch that was sent. Its tensors are valid after `receive`.

    x_eCH: received rows, bfloat16, or float8_e4m3fn with scale_eCG. C is world_size * tokens.
    scale_eCG: float32, one scale per 128 values, any strides; or None.
    counts_e: int32, number of valid rows of each expert, which precede its unused rows.
    handle: the library's handle.
    hook: function that receives the rows; None if they have been received.
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
        """Receive the rows on the current stream, unless they have been received."""
        hook, self._hook = self._hook, None
        if hook is not None:
            hook()


class LowLatencyBuffer:
    """A low-latency buffer.

    buffer: the library's Buffer.
    tokens: maximum number of tokens per rank.
    experts: number of experts of all ranks together.
    """

    def __init__(self, buffer: Any, tokens: int, experts: int) -> None:
        self._buffer, self._tokens, self._experts = buffer, tokens, experts
        self._pending: LowLatencyDispatch | None = None

    def dispatch(
        self, x_TH: torch.Tensor, ids_TK: torch.Tensor, *, quantize: bool, at_once: bool = False
    ) -> LowLatencyDispatch:
        """Send rows to the experts of the tokens.

        x_TH: bfloat16, contiguous.
        ids_TK: in the library's dtype of ids, contiguous; -1 skips a pair. A token must not have an
            expert twice.
        quantize: whether to quantize to float8_e4m3fn, with one scale per 128 values.
        at_once: whether to receive in the same launch.
        """
        self._receive_pending()
        results = self._buffer.low_latency_dispatch(
            x_TH,
            ids_TK,
            self._tokens,
            self._experts,
            use_fp8=quantize,
            return_recv_hook=not at_once,
        )
        rows, counts, handle, _, hook = unpack(results, 5, "DeepEP's low_latency_dispatch")
        x, scale = rows if quantize else (rows, None)
        dispatch = LowLatencyDispatch(x, scale, counts, handle, None if at_once else hook)
        self._pending = None if at_once else dispatch
        return dispatch

    def combine(
        self,
        rows_eCH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        handle: tuple[Any, ...],
        out: torch.Tensor,
    ) -> None:
        """Write the weighted sum of the rows of each token, added in float32, to `out`.

        rows_eCH: output of the experts.
        ids_TK, handle: the values of the dispatch.
        weights_TK: float32, router weights.
        out: (T, H) bfloat16, contiguous.
        """
        self._receive_pending()
        self._buffer.low_latency_combine(rows_eCH, ids_TK, weights_TK, handle, out=out)

    def self_test(self, hidden: int, ids_dtype: torch.dtype) -> None:
        """Run a dispatch and a combine without tokens. Raise RuntimeError if the library fails.

        Collective. The library checks some conditions only in kernels. A failed check makes the GPU
        unusable for this process, so it should fail before the first call of a layer.
        """
        device = torch.device("cuda", torch.cuda.current_device())
        x_TH = torch.empty(0, hidden, dtype=torch.bfloat16, device=device)
        ids_TK = torch.empty(0, 1, dtype=ids_dtype, device=device)
        weights_TK = torch.empty(0, 1, dtype=torch.float32, device=device)
        dispatch = self.dispatch(x_TH, ids_TK, quantize=False)
        dispatch.receive()
        self.combine(dispatch.x_eCH, ids_TK, weights_TK, dispatch.handle, torch.empty_like(x_TH))
        torch.cuda.synchronize(device)

    def destroy(self) -> None:
        """Free the buffer. Collective."""
        self._receive_pending()
        self._buffer.destroy()

    def _receive_pending(self) -> None:
        """Receive the last dispatch, unless it has been received."""
        if self._pending is not None:
            self._pending.receive()
        self._pending = None
