"""RepeatedExchange: an exchange that the replays of a recorded call make again."""

from collections.abc import Callable

from modular_kernel.replay.recording import repeat_in_replays, unrecorded
from prepare_finalize.common.torch_group import Exchange, TorchGroup


class RepeatedExchange:
    """An exchange between the same tensors in a call and in each replay of it.

    make: starts the exchange in the step that it is called with.

    A recorded call is issued as a whole, so that an exchange of a replay belongs to the manager's
    last step.
    """

    def __init__(self, manager: TorchGroup, make: Callable[[int], Exchange]) -> None:
        self._manager, self._make = manager, make
        self._exchange: Exchange | None = None

    def start(self, step: int) -> None:
        """Start the exchange. It may be started again once it has been waited for."""
        with unrecorded():
            self._exchange = self._make(step)
        repeat_in_replays(self._start_again)

    def wait(self) -> None:
        """Make later work on the current CUDA stream wait for the exchange, but not the host."""
        self._wait()
        repeat_in_replays(self._wait)

    def _start_again(self) -> None:
        self._exchange = self._make(self._manager.step)

    def _wait(self) -> None:
        exchange, self._exchange = self._exchange, None
        assert exchange is not None, "no exchange has been started"
        exchange.wait_on_stream()
