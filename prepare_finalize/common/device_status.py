"""Device state of the device handshake: call counters, headers, and the first failed call.

In a device handshake (`device_handshake`), ranks check on the GPU that they make the same call.
Each rank sends a header, F int64 values, to all others in every call. A kernel compares the W
received headers (`DeviceStatus.verify`). The host reads the result from pinned memory, without
waiting for the device.
"""

import ctypes
import time
from dataclasses import dataclass

import torch

from modular_kernel.ops.count import next_power_of_2
from modular_kernel.replay import modes
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.pdl import pdl_arguments
from modular_kernel.replay.launch.runtime import use_triton

# Fields of a header:
# - layer, call: number of the layer, and of the call among the calls of the layer.
# - order: hash of the sequence of all dispatches and combines so far; see `count_exchange`. It
#   differs between ranks that have made their calls in different orders.
# - tokens: T of the rank.
# - rows: largest number of rows that the rank sends to one rank.
# - refusal: index of the error with which the rank refused its call (`handshake.refusal_index`), or
#   NOT_REFUSED.
# - sent: number of rows in the block of this copy of the header; it may exceed the capacity.
FIELDS = ("layer", "call", "order", "tokens", "rows", "refusal", "sent")
LAYER, CALL, ORDER, TOKENS, ROWS, REFUSAL, SENT = range(len(FIELDS))
NOT_REFUSED = -1
_ORDER_FACTOR = 1_000_003
_SIDE_STREAM_TIMEOUT_S = 0.5
# Elements of `DeviceStatus._counters`.
_ORDER, _BEGUN, _RECEIVED, _ENDED = range(4)


@dataclass(frozen=True)
class Capacity:
    """Limits for the values in the headers of a layer.

    - tokens: maximum T of a rank.
    - rows: maximum number of rows that a rank sends to one rank.
    - equal_tokens: whether every rank must pass the same T.
    """

    tokens: int
    rows: int
    equal_tokens: bool = False


@dataclass(frozen=True)
class Failure:
    """The first failed call: its headers by rank, and the capacity of its layer."""

    headers: tuple[tuple[int, ...], ...]
    capacity: Capacity


class DeviceStatus:
    """Progress and first failure of the calls of one manager.

    Kernels write both to pinned memory, which the host reads without waiting.

    failed: (1,) int32 on the device, set to 1 by the first call that fails, and never reset.
    """

    @modes.disable_inference_mode()
    def __init__(self, world_size: int, device: torch.device) -> None:
        self.failed = torch.zeros(1, dtype=torch.int32, device=device)
        # The headers of the first failed call, the capacity, and, last, whether a call has failed.
        num_words = world_size * len(FIELDS) + 4
        self._words = torch.zeros(num_words, dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._host_words = torch.zeros(
            num_words, dtype=torch.int64, device="cpu", pin_memory=pinned
        )
        # Every call reads the last word. Reading it through ctypes is faster than through a tensor.
        last_address = self._host_words.data_ptr() + 8 * (num_words - 1)
        self._has_failed = ctypes.c_int64.from_address(last_address)
        # The hash of the sequence of exchanges, then the numbers of calls that have begun, of calls
        # that have received their rows, and of calls that have ended.
        self._counters = torch.zeros(4, dtype=torch.int64, device=device)
        self._host_progress = torch.zeros(3, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._side_stream: torch.cuda.Stream | None = None
        if pinned:
            self._side_stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @modes.disable_inference_mode()
    def limits(self, capacity: Capacity) -> torch.Tensor:
        """Return `capacity` as a tensor for `verify`: tokens, rows, equal_tokens, 1; (4,) int64."""
        words = [capacity.tokens, capacity.rows, int(capacity.equal_tokens), 1]
        return torch.tensor(words, dtype=torch.int64, device=self._words.device)

    def arguments(self) -> dict[str, object]:
        """Return the arguments of kernels that verify headers and count calls.

        Kernels write to the pinned memory of the host directly.
        """
        return {
            "words_ptr": self._words,
            "host_words_ptr": self._host_words,
            "failed_ptr": self.failed,
            "counters_ptr": self._counters,
            "progress_ptr": self._host_progress,
        }

    def verify(
        self, headers_WF: torch.Tensor, local_header_F: torch.Tensor, limits: torch.Tensor
    ) -> None:
        """Compare the headers of one call on the device, and count the call as received.

        If a header is wrong and no earlier call has failed, set `failed` and keep the headers.

        headers_WF: (W, F) int64, the received headers.
        local_header_F: the header that this rank has sent, with which all headers are compared.
        limits: capacity of the layer, from `limits`.
        """
        if not use_triton(local_header_F):
            self._verify_ref(headers_WF, local_header_F, limits)
            return
        from prepare_finalize.common.kernels.headers import verify_kernel

        world_size = len(headers_WF)
        launch(
            verify_kernel,
            (1,),
            headers_ptr=headers_WF,
            header_ptr=local_header_F,
            limits_ptr=limits,
            **self.arguments(),
            stride=headers_WF.stride(0),
            WORLD=world_size,
            PADDED=next_power_of_2(world_size),
            NUM_FIELDS=len(FIELDS),
            num_warps=1,
        )

    def _verify_ref(
        self, headers_WF: torch.Tensor, local_header_F: torch.Tensor, limits: torch.Tensor
    ) -> None:
        tokens_W, rows_W = headers_WF[:, TOKENS], headers_WF[:, ROWS]
        is_wrong_W = (headers_WF[:, : ORDER + 1] != local_header_F[: ORDER + 1]).any(1)
        is_wrong_W |= (tokens_W < 0) | (tokens_W > limits[0])
        is_wrong_W |= (rows_W < 0) | (rows_W > limits[1])
        is_wrong_W |= (tokens_W != local_header_F[TOKENS]) & (limits[2] > 0)
        is_wrong_W |= headers_WF[:, REFUSAL] != NOT_REFUSED
        is_wrong = is_wrong_W.any().reshape(1)
        words = torch.cat((headers_WF.flatten(), limits))
        torch.where(is_wrong & (self.failed == 0), words, self._words, out=self._words)
        self.failed |= is_wrong
        self._host_words.copy_(self._words, non_blocking=True)
        self._count(_RECEIVED)

    def count_exchange(self, layer: int, *, is_combine: bool) -> torch.Tensor:
        """Add a dispatch or combine to the hash of their sequence; return the hash, (1,) int64.

        The `count_*` methods are torch references of the functions in `kernels.headers`.
        """
        order = self._counters[_ORDER : _ORDER + 1]
        order.mul_(_ORDER_FACTOR).add_(2 * layer + is_combine)
        return order

    def count_begin(self) -> None:
        """Count a call that begins on the device."""
        self._count(_BEGUN)

    def count_end(self) -> None:
        """Count a call that ends on the device."""
        self._count(_ENDED)

    def _count(self, index: int) -> None:
        self._counters[index].add_(1)
        self._host_progress.copy_(self._counters[_BEGUN:], non_blocking=True)

    def progress(self) -> tuple[int, int]:
        """Return how many calls have begun and ended, according to the pinned memory."""
        begun, _, ended = self._host_progress.tolist()
        return begun, ended

    def phase(self) -> str:
        """Return the phase of the last call, according to the pinned memory."""
        begun, received, _ = self._host_progress.tolist()
        return "combine" if received == begun else "dispatch"

    def mark_failed(self) -> None:
        """Set `failed` from the host, on a separate stream.

        Kernels on other streams may wait for a missing rank forever. If the device does not run
        this stream concurrently with them, return after half a second.
        """
        if self._side_stream is None:
            self.failed.fill_(1)
            return
        with torch.cuda.stream(self._side_stream):
            self.failed.fill_(1)
        deadline = time.monotonic() + _SIDE_STREAM_TIMEOUT_S
        while not self._side_stream.query() and time.monotonic() < deadline:
            time.sleep(0.001)

    def failure(self) -> Failure | None:
        """Return the first failed call, or None, according to the pinned memory."""
        if not self._has_failed.value:
            return None
        *values, tokens, rows, equal_tokens, _ = self._host_words.tolist()
        headers = tuple(zip(*[iter(values)] * len(FIELDS), strict=True))
        return Failure(headers, Capacity(tokens, rows, bool(equal_tokens)))


class CallCounter:
    """Counter of the calls of one layer on the device, which also writes their headers.

    - status: status of the layer's manager.
    - layer: number of the layer.
    - calls: (1,) int64, number of calls so far.
    """

    @modes.disable_inference_mode()
    def __init__(self, status: DeviceStatus, layer: int) -> None:
        self.status, self.layer = status, layer
        self.calls = torch.zeros(1, dtype=torch.int64, device=status.failed.device)
        self._is_begin_counted = False  # whether `begin` has counted the current call

    def arguments(self) -> dict[str, object]:
        """Return the arguments of kernels that count calls."""
        arguments = self.status.arguments()
        names = ("counters_ptr", "progress_ptr", "failed_ptr")
        return {"calls_ptr": self.calls, **{name: arguments[name] for name in names}}

    def begin(self) -> None:
        """Count the beginning of a call before its header is written.

        Calls with an exchange before the dispatch use this, so that the watchdog also times that
        exchange.
        """
        self._is_begin_counted = True
        if not use_triton(self.calls):
            self.status.count_begin()
            return
        from prepare_finalize.common.kernels.headers import begin_kernel

        names = ("counters_ptr", "progress_ptr")
        arguments = self.status.arguments()
        launch(begin_kernel, (1,), num_warps=1, **{name: arguments[name] for name in names})

    def must_count_begin(self) -> bool:
        """Return whether the caller must count the beginning of the call that it starts.

        Returns False if `begin` has already counted it. Call this method once per call.
        """
        is_counted, self._is_begin_counted = self._is_begin_counted, False
        return not is_counted

    def write_header(self, out_F: torch.Tensor, tokens: int, *, refusal: int) -> None:
        """Write the header of a call that sends no rows to out_F, (F,) int64.

        One launch on a GPU.
        """
        if not use_triton(out_F):
            if self.must_count_begin():
                self.status.count_begin()
            out_F.copy_(self.header(tokens, None, refusal=refusal))
            return
        from prepare_finalize.common.kernels.headers import header_kernel

        arguments = self.arguments()
        del arguments["failed_ptr"]
        launch(
            header_kernel,
            (1,),
            header_ptr=out_F,
            **arguments,
            layer=self.layer,
            tokens=tokens,
            refusal=refusal,
            COUNT_BEGIN=self.must_count_begin(),
            NUM_FIELDS=len(FIELDS),
            num_warps=1,
            **pdl_arguments(),
        )

    def header(self, tokens: int, rows: torch.Tensor | None, *, refusal: int) -> torch.Tensor:
        """Count a call and its dispatch, and return its header, (F,) int64.

        Torch reference of `new_header` in `kernels.headers`.

        rows: int64 scalar; see FIELDS. None for a call that sends no rows.
        """
        self.calls.add_(1)
        header = self.calls.repeat(len(FIELDS))
        fields = ((LAYER, self.layer), (TOKENS, tokens), (ROWS, 0), (REFUSAL, refusal), (SENT, 0))
        for field, value in fields:
            header[field].fill_(value)
        if rows is not None:
            header[ROWS].copy_(rows)
        header[ORDER : ORDER + 1].copy_(self.status.count_exchange(self.layer, is_combine=False))
        return header

    def end_ref(self, out: torch.Tensor) -> None:
        """Count the combine and the end of a call, and fill `out` with NaN if a call has failed.

        Torch reference of the end of `sum_blocks_kernel`.
        """
        self.status.count_exchange(self.layer, is_combine=True)
        out.masked_fill_(self.status.failed != 0, float("nan"))
        self.status.count_end()
