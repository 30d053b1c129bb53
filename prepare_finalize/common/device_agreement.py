"""The agreement of ranks on a call without the host: headers that travel with the rows.

`agreement.agree` exchanges row counts on the host before every call. That takes milliseconds and
cannot be captured in a CUDA graph. Here, ranks agree on the host in the first call of a layer only.
Afterwards, buffers have a fixed capacity, and each rank adds a header to what it sends anyway. The
device compares the headers of all ranks. If ranks make different calls, exceed a capacity, or
refuse a call, every rank writes NaN to its output. Each rank then raises the error in its next call
or `check`, and needs a new manager.
"""

from collections.abc import Sequence

import torch

from modular_kernel.contracts import CallState
from modular_kernel.errors import CommunicationError, StateError
from modular_kernel.replay.recording import repeat_in_replays, unrecorded
from prepare_finalize.common.agreement import (
    FIELD_MESSAGES,
    Layer,
    agree,
    agree_on_sizes,
    refusal_name,
)
from prepare_finalize.common.device_status import (
    CALL,
    FIELDS,
    LAYER,
    NOT_REFUSED,
    ORDER,
    REFUSAL,
    ROWS,
    TOKENS,
    CallCounter,
    Capacity,
    DeviceStatus,
    Failure,
)
from prepare_finalize.common.torch_group import TorchGroup


class DeviceAgreement:
    """Agreement of the ranks on the calls of one layer.

    rows: maximum number of rows that a rank sends to one rank. equal_tokens: whether every rank
    must pass the same T.
    """

    def __init__(self, layer: Layer, *, rows: int, equal_tokens: bool = False) -> None:
        self.layer = layer
        self._capacity = Capacity(layer.problem.tokens, rows, equal_tokens)
        self._limits: torch.Tensor | None = None
        self._counter: CallCounter | None = None

    @property
    def is_established(self) -> bool:
        """Whether all ranks have agreed on the layer."""
        return self._limits is not None

    @property
    def limits(self) -> torch.Tensor:
        """The layer's capacity on the device; see `DeviceStatus.limits`."""
        assert self._limits is not None, "no call has begun"
        return self._limits

    @property
    def counter(self) -> CallCounter:
        """The counter of the layer's calls on the device."""
        assert self._counter is not None, "no call has begun"
        return self._counter

    @property
    def status(self) -> DeviceStatus:
        """The status of the calls of the layer's manager."""
        return self.counter.status

    def begin(
        self, call: CallState, tokens: int, device: torch.device, sizes: tuple[int, ...] = ()
    ) -> int:
        """Begin a call of T = `tokens` and return its step.

        The first call of the layer agrees on the host. Raises what `agree` raises there, the error
        of an earlier call that failed on the device, and StateError if the first call is captured
        in a CUDA graph. On a CPU, later calls raise what `agree_on_sizes` does.

        sizes: see `agree_on_sizes`.
        """
        layer, manager = self.layer, self.layer.manager
        if self.is_established:

            def begin_call() -> None:
                self.raise_failure()
                self.next_step(sizes)

            repeat_in_replays(begin_call)
            self.raise_failure()
            call.peers_notified = manager.device == "cpu"  # by the exchange of sizes
            return self.next_step(sizes)
        self.raise_failure()
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise StateError(
                "first call of a layer over ranks",
                got="a call that is captured in a CUDA graph",
                need="a call before the capture, in which ranks agree on the layer",
            )
        no_rows = [0] * manager.world_size
        agree(layer, call, tokens=tokens, rows_W=no_rows, device=device)
        status = _status(manager, device)
        self._counter = CallCounter(status, layer.number)
        self._limits = status.limits(self._capacity)
        return manager.step

    def next_step(self, sizes: tuple[int, ...] = ()) -> int:
        """Return the step of a further call, of exchanges of these sizes; see `agree_on_sizes`."""
        layer = self.layer
        step = layer.manager.next_step(layer.number, layer.calls + 1)
        if layer.manager.device == "cpu":
            with unrecorded():
                agree_on_sizes(layer, sizes, step)
        layer.calls += 1
        return step

    def check(self) -> None:
        """Wait for the device; raise CommunicationError if a call failed."""
        if self.layer.manager.device == "cuda":
            torch.cuda.synchronize()
        self.raise_failure()
        self.layer.manager.check_failure()

    def raise_failure(self) -> None:
        """Close the manager and raise CommunicationError if the host has seen a failed call."""
        manager = self.layer.manager
        failure = None if manager.device_status is None else manager.device_status.failure()
        if failure is None or manager.failed:
            return
        error = _error_of(manager, failure)
        manager.fail(error)
        raise error


def _status(manager: TorchGroup, device: torch.device) -> DeviceStatus:
    if manager.device_status is None:
        manager.watch(DeviceStatus(manager.world_size, device))
    assert manager.device_status is not None
    return manager.device_status


def _error_of(manager: TorchGroup, failure: Failure) -> CommunicationError:
    """Return the error for the first wrong thing in the headers of a failed call."""
    headers, capacity = failure.headers, failure.capacity
    own = headers[manager.rank]

    def error(got: str, need: str, peers: Sequence[int]) -> CommunicationError:
        return manager.device_disagreement(
            got, need, layer=own[LAYER], call=own[CALL], peers=tuple(peers)
        )

    ranks = range(manager.world_size)
    refusing = [rank for rank in ranks if headers[rank][REFUSAL] != NOT_REFUSED]
    if refusing:
        got = "; ".join(
            f"rank {rank} refused its call {headers[rank][CALL]} of layer {headers[rank][LAYER]} "
            f"with {refusal_name(headers[rank][REFUSAL])}"
            for rank in refusing
        )
        return error(got, "calls that every rank accepts", refusing)
    for field in (LAYER, CALL, ORDER):
        values = [header[field] for header in headers]
        if len(set(values)) > 1:
            by_rank = f"{FIELDS[field]} {', '.join(map(str, values))} by rank"
            got = FIELD_MESSAGES["order"] if field == ORDER else by_rank
            peers = [rank for rank in ranks if values[rank] != own[field]]
            return error(got, "one layer, call and order", peers)
    tokens_W = [header[TOKENS] for header in headers]
    if capacity.equal_tokens and len(set(tokens_W)) > 1:
        got = f"T = {', '.join(map(str, tokens_W))} by rank"
        peers = [rank for rank in ranks if tokens_W[rank] != own[TOKENS]]
        return error(got, "the same tokens on all", peers)
    for field, limit, unit in (
        (TOKENS, capacity.tokens, "tokens"),
        (ROWS, capacity.rows, "rows for one rank"),
    ):
        peers = [rank for rank in ranks if not 0 <= headers[rank][field] <= limit]
        if peers:
            got = "; ".join(f"{headers[rank][field]} {unit} from rank {rank}" for rank in peers)
            return error(got, f"0 to {limit}", peers)
    return error(f"headers {headers}", "headers without a contradiction", ())
