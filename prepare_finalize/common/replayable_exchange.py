"""ReplayableExchange: an exchange that is repeated whenever a recorded call is replayed.

`modular_kernel.replay` records the kernel launches of a call and repeats them in later calls,
without running the Python code of the layer. Collectives cannot be recorded. This class therefore
registers functions that start the exchange and wait for it in every replay.
"""

from collections.abc import Callable

from modular_kernel.replay.recording import hide_from_recorder, run_in_replays
from prepare_finalize.common.torch_group import Exchange, TorchGroup


class ReplayableExchange:
    """An exchange between the same tensors in a call and in each of its replays.

    start_exchange: starts the exchange; its argument is the step, the number of the call.

    Replays use `manager.step`, the step of the last call, because the host issues all launches of a
    replay before the next call begins.
    """

    def __init__(self, manager: TorchGroup, start_exchange: Callable[[int], Exchange]) -> None:
        self._manager, self._start_exchange = manager, start_exchange
        self._exchange: Exchange | None = None

    def start(self, step: int) -> None:
        """Start the exchange in this call and in every replay."""
        with hide_from_recorder():
            self._exchange = self._start_exchange(step)
        run_in_replays(self._start_again)

    def wait(self) -> None:
        """Make later work on the current CUDA stream wait for the exchange, but not the host."""
        self._wait()
        run_in_replays(self._wait)

    def _start_again(self) -> None:
        self._exchange = self._start_exchange(self._manager.step)

    def _wait(self) -> None:
        exchange, self._exchange = self._exchange, None
        assert exchange is not None, "no exchange has been started"
        exchange.wait_on_stream()
