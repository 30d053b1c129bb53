"""The handshake on the device: metadata travels with the rows and is compared by kernels.

In a handshake, ranks check that they make the same call, so that no rank waits for rows that never
arrive. `handshake.exchange_metadata` does this on the host, which takes milliseconds and cannot be
captured in a CUDA graph. With a device handshake, only the first call of a layer has a handshake on
the host. Later calls use buffers of a fixed capacity, and each rank sends a header with its rows
(`device_status.FIELDS`). A kernel compares the headers of all ranks.

If ranks make different calls, exceed a capacity, or refuse a call because of invalid arguments,
every rank writes NaN to its output. Each rank then raises the error in its next call or in `check`,
and the manager of the process group cannot be used any more.
"""

from collections.abc import Sequence

import torch

from modular_kernel.contracts import CallState
from modular_kernel.errors import CommunicationError, StateError
from modular_kernel.replay.recording import hide_from_recorder, run_in_replays
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
from prepare_finalize.common.handshake import (
    FIELD_MESSAGES,
    Layer,
    check_equal_sizes,
    exchange_metadata,
    refusal_name,
)
from prepare_finalize.common.torch_group import TorchGroup


class DeviceHandshake:
    """The handshakes of all calls of one layer.

    rows: maximum number of rows that a rank sends to one rank.
    equal_tokens: whether every rank must pass the same T.
    """

    def __init__(self, layer: Layer, *, rows: int, equal_tokens: bool = False) -> None:
        self.layer = layer
        self._capacity = Capacity(layer.problem.tokens, rows, equal_tokens)
        self._limits: torch.Tensor | None = None
        self._counter: CallCounter | None = None

    @property
    def is_established(self) -> bool:
        """Whether the handshake of the first call, on the host, has succeeded."""
        return self._limits is not None

    @property
    def limits(self) -> torch.Tensor:
        """The layer's capacity as a tensor; see `DeviceStatus.limits`."""
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
        """Begin a call of T = `tokens` and return its step, its number among the manager's calls.

        The first call of the layer runs `exchange_metadata`. On a CPU, later calls run
        `check_equal_sizes` with `sizes`. Raises the errors of these functions, the error of an
        earlier call that failed on the device, and StateError if the first call is captured in a
        CUDA graph.
        """
        layer, manager = self.layer, self.layer.manager
        if self.is_established:

            def begin_call() -> None:
                self.raise_failure()
                self.next_step(sizes)

            run_in_replays(begin_call)
            self.raise_failure()
            # On a CPU, check_equal_sizes (in next_step) has sent this rank's values to its peers.
            call.peers_notified = manager.device == "cpu"
            return self.next_step(sizes)
        self.raise_failure()
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise StateError(
                "first call of a layer over ranks",
                got="a call that is captured in a CUDA graph",
                need="a call before the capture, in which ranks agree on the layer",
            )
        no_rows = [0] * manager.world_size
        exchange_metadata(layer, call, tokens=tokens, rows_W=no_rows, device=device)
        status = _get_or_create_status(manager, device)
        self._counter = CallCounter(status, layer.number)
        self._limits = status.limits(self._capacity)
        return manager.step

    def next_step(self, sizes: tuple[int, ...] = ()) -> int:
        """Count a call after the first and return its step. sizes: as in `check_equal_sizes`."""
        layer = self.layer
        step = layer.manager.next_step(layer.number, layer.calls + 1)
        if layer.manager.device == "cpu":
            with hide_from_recorder():
                check_equal_sizes(layer, sizes, step)
        layer.calls += 1
        return step

    def check(self) -> None:
        """Wait for the device. Raise CommunicationError if a call failed."""
        if self.layer.manager.device == "cuda":
            torch.cuda.synchronize()
        self.raise_failure()
        self.layer.manager.check_failure()

    def raise_failure(self) -> None:
        """Close the manager and raise CommunicationError if a failure has reached the host.

        Does not wait for the device.
        """
        manager = self.layer.manager
        failure = None if manager.device_status is None else manager.device_status.failure()
        if failure is None or manager.failed:
            return
        error = _make_error(manager, failure)
        manager.fail(error)
        raise error


def _get_or_create_status(manager: TorchGroup, device: torch.device) -> DeviceStatus:
    if manager.device_status is None:
        manager.set_device_status(DeviceStatus(manager.world_size, device))
    assert manager.device_status is not None
    return manager.device_status


def _make_error(manager: TorchGroup, failure: Failure) -> CommunicationError:
    headers, capacity = failure.headers, failure.capacity
    local_header = headers[manager.rank]

    def make_error(got: str, need: str, peers: Sequence[int]) -> CommunicationError:
        return manager.make_header_error(
            got, need, layer=local_header[LAYER], call=local_header[CALL], peers=tuple(peers)
        )

    ranks = range(manager.world_size)
    refusing = [rank for rank in ranks if headers[rank][REFUSAL] != NOT_REFUSED]
    if refusing:
        got = "; ".join(
            f"rank {rank} refused its call {headers[rank][CALL]} of layer {headers[rank][LAYER]} "
            f"with {refusal_name(headers[rank][REFUSAL])}"
            for rank in refusing
        )
        return make_error(got, "calls that every rank accepts", refusing)
    for field in (LAYER, CALL, ORDER):
        values = [header[field] for header in headers]
        if len(set(values)) > 1:
            by_rank = f"{FIELDS[field]} {', '.join(map(str, values))} by rank"
            got = FIELD_MESSAGES["order"] if field == ORDER else by_rank
            peers = [rank for rank in ranks if values[rank] != local_header[field]]
            return make_error(got, "one layer, call and order", peers)
    tokens_W = [header[TOKENS] for header in headers]
    if capacity.equal_tokens and len(set(tokens_W)) > 1:
        got = f"T = {', '.join(map(str, tokens_W))} by rank"
        peers = [rank for rank in ranks if tokens_W[rank] != local_header[TOKENS]]
        return make_error(got, "the same tokens on all", peers)
    for field, limit, unit in (
        (TOKENS, capacity.tokens, "tokens"),
        (ROWS, capacity.rows, "rows for one rank"),
    ):
        peers = [rank for rank in ranks if not 0 <= headers[rank][field] <= limit]
        if peers:
            got = "; ".join(f"{headers[rank][field]} {unit} from rank {rank}" for rank in peers)
            return make_error(got, f"0 to {limit}", peers)
    return make_error(f"headers {headers}", "headers without a contradiction", ())
