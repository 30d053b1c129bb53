"""Headers of calls, their comparison on the device, and the first failure that it found."""

import time
from dataclasses import dataclass

import torch

from modular_kernel.replay import modes

# Fields of a header, int64. order: digest of the dispatches and combines before the call. rows:
# largest number of rows that the rank sends to one rank. refusal: the error with which the rank
# refused its call (`agreement.refusal_index`), NOT_REFUSED for none.
FIELDS = ("layer", "call", "order", "tokens", "rows", "refusal")
LAYER, CALL, ORDER, TOKENS, ROWS, REFUSAL = range(len(FIELDS))
NOT_REFUSED = -1
_ORDER_FACTOR = 1_000_003
_POISON_PATIENCE_S = 0.5


@dataclass(frozen=True)
class Capacity:
    """Limits that the headers of a layer must respect.

    - tokens: maximum T of a rank.
    - rows: maximum number of rows that a rank sends to one rank.
    - equal_tokens: whether every rank must pass the same T.
    """

    tokens: int
    rows: int
    equal_tokens: bool = False


@dataclass(frozen=True)
class Failure:
    """The first failed call: the headers by rank, and the capacity that they had to respect."""

    headers: tuple[tuple[int, ...], ...]
    capacity: Capacity


class DeviceStatus:
    """Progress and failures of the calls of one manager, which the host can read without waiting.

    failed: (1,) bool on the device, set by the first call that fails, and never reset.
    """

    @modes.outside_inference_mode()
    def __init__(self, world_size: int, device: torch.device) -> None:
        self.failed = torch.zeros(1, dtype=torch.bool, device=device)
        # The headers of a failed call, its capacity, and, last, whether there is one.
        num_words = world_size * len(FIELDS) + 4
        self._words = torch.zeros(num_words, dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._host_words = torch.zeros(
            num_words, dtype=torch.int64, device="cpu", pin_memory=pinned
        )
        # Numbers of calls that began and ended.
        self._progress = torch.zeros(2, dtype=torch.int64, device=device)
        self._host_progress = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._order = torch.zeros(1, dtype=torch.int64, device=device)
        self._side_stream: torch.cuda.Stream | None = None
        if pinned:
            self._side_stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @modes.outside_inference_mode()
    def limits(self, capacity: Capacity) -> torch.Tensor:
        """Return a capacity as the (4,) int64 tensor that `verify` takes."""
        words = [capacity.tokens, capacity.rows, int(capacity.equal_tokens), 1]
        return torch.tensor(words, dtype=torch.int64, device=self._words.device)

    def count_exchange(self, layer: int, *, is_combine: bool) -> torch.Tensor:
        """Add a dispatch or combine to the digest of their order; return the digest, (1,) int64."""
        self._order.mul_(_ORDER_FACTOR).add_(2 * layer + is_combine)
        return self._order

    def verify(self, headers_WF: torch.Tensor, own_F: torch.Tensor, limits: torch.Tensor) -> None:
        """Compare the headers of one call on the device, and keep the first wrong ones.

        headers_WF: (W, F) int64, as received. own_F: the header that this rank has sent, so that
        headers of an earlier call are wrong. limits: of the layer.
        """
        tokens_W, rows_W = headers_WF[:, TOKENS], headers_WF[:, ROWS]
        is_wrong_W = (headers_WF[:, : ORDER + 1] != own_F[: ORDER + 1]).any(1)
        is_wrong_W |= (tokens_W < 0) | (tokens_W > limits[0])
        is_wrong_W |= (rows_W < 0) | (rows_W > limits[1])
        is_wrong_W |= (tokens_W != own_F[TOKENS]) & (limits[2] > 0)
        is_wrong_W |= headers_WF[:, REFUSAL] != NOT_REFUSED
        is_wrong = is_wrong_W.any().reshape(1)
        words = torch.cat((headers_WF.flatten(), limits))
        torch.where(is_wrong & ~self.failed, words, self._words, out=self._words)
        self.failed |= is_wrong
        self._host_words.copy_(self._words, non_blocking=True)

    def begin_call(self) -> None:
        """Count a call that begins on the device."""
        self._count(0)

    def end_call(self, out: torch.Tensor) -> None:
        """Count a call that ends on the device; fill its output with NaN if a call has failed."""
        out.masked_fill_(self.failed, float("nan"))
        self._count(1)

    def _count(self, index: int) -> None:
        self._progress[index].add_(1)
        self._host_progress.copy_(self._progress, non_blocking=True)

    def progress(self) -> tuple[int, int]:
        """Return the numbers of calls that began and ended, as far as the host has seen them."""
        begun, ended = self._host_progress.tolist()
        return begun, ended

    def poison(self) -> None:
        """Set `failed` from the host, beside work on other streams that may never end.

        Gives up after half a second, for example if the device runs one stream at a time.
        """
        if self._side_stream is None:
            self.failed.fill_(True)
            return
        with torch.cuda.stream(self._side_stream):
            self.failed.fill_(True)
        end = time.monotonic() + _POISON_PATIENCE_S
        while not self._side_stream.query() and time.monotonic() < end:
            time.sleep(0.001)

    def failure(self) -> Failure | None:
        """Return the first failed call that the host has seen so far."""
        *values, tokens, rows, equal_tokens, is_failed = self._host_words.tolist()
        if not is_failed:
            return None
        headers = tuple(zip(*[iter(values)] * len(FIELDS), strict=True))
        return Failure(headers, Capacity(tokens, rows, bool(equal_tokens)))
