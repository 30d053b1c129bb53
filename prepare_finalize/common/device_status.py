"""Headers of calls, their comparison on the device, and the first failure that it found."""

from dataclasses import dataclass

import torch

# Fields of a header, int64. rows: largest number of rows that the rank sends to one rank. refusal:
# the error with which the rank refused its call (`agreement.refusal_index`), NOT_REFUSED for none.
FIELDS = ("layer", "call", "tokens", "rows", "refusal")
LAYER, CALL, TOKENS, ROWS, REFUSAL = range(len(FIELDS))
NOT_REFUSED = -1


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

    def __init__(self, world_size: int, device: torch.device) -> None:
        self._world_size = world_size
        self.failed = torch.zeros(1, dtype=torch.bool, device=device)
        # Whether a call failed, its capacity, and its headers.
        num_words = 4 + world_size * len(FIELDS)
        self._words = torch.zeros(num_words, dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._host_words = torch.zeros(
            num_words, dtype=torch.int64, device="cpu", pin_memory=pinned
        )
        # Numbers of calls that began and ended.
        self._progress = torch.zeros(2, dtype=torch.int64, device=device)
        self._host_progress = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=pinned)

    def limits(self, capacity: Capacity) -> torch.Tensor:
        """Return a capacity as the (4,) int64 tensor that `verify` takes."""
        words = [1, capacity.tokens, capacity.rows, int(capacity.equal_tokens)]
        return torch.tensor(words, dtype=torch.int64, device=self._words.device)

    def verify(self, headers_WF: torch.Tensor, limits: torch.Tensor, rank: int) -> None:
        """Compare the headers of one call on the device, and keep the first wrong ones.

        headers_WF: (W, F) int64. limits: of the layer. rank: this rank.
        """
        own_F, tokens_W, rows_W = headers_WF[rank], headers_WF[:, TOKENS], headers_WF[:, ROWS]
        is_wrong_W = (headers_WF[:, : CALL + 1] != own_F[: CALL + 1]).any(1)
        is_wrong_W |= (tokens_W < 0) | (tokens_W > limits[1])
        is_wrong_W |= (rows_W < 0) | (rows_W > limits[2])
        is_wrong_W |= (tokens_W != own_F[TOKENS]) & (limits[3] > 0)
        is_wrong_W |= headers_WF[:, REFUSAL] != NOT_REFUSED
        is_wrong = is_wrong_W.any().reshape(1)
        words = torch.cat((limits, headers_WF.flatten()))
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

    def fail(self) -> None:
        """Set `failed` from the host, beside the work that may never end on other streams."""
        if self.failed.device.type != "cuda":
            self.failed.fill_(True)
            return
        stream = torch.cuda.Stream(self.failed.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            self.failed.fill_(True)
        stream.synchronize()

    def failure(self) -> Failure | None:
        """Return the first failed call that the host has seen so far."""
        is_failed, tokens, rows, equal_tokens, *values = self._host_words.tolist()
        if not is_failed:
            return None
        headers = tuple(zip(*[iter(values)] * len(FIELDS), strict=True))
        return Failure(headers, Capacity(tokens, rows, bool(equal_tokens)))
