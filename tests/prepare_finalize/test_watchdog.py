"""The watchdog of calls that the host does not wait for."""

import time

import torch

from prepare_finalize.common.blocks import BlockSums, Ranks, sum_blocks
from prepare_finalize.common.device_status import CallCounter, DeviceStatus
from prepare_finalize.common.watchdog import Watchdog

TIMEOUT_S = 0.2


class Manager:
    timeout_s = TIMEOUT_S

    def __init__(self) -> None:
        self.waited_s: list[float] = []

    def close_after_timeout(self, waited_s: float) -> None:
        self.waited_s.append(waited_s)


class Status:
    def __init__(self) -> None:
        self.begun = self.ended = 0

    def progress(self) -> tuple[int, int]:
        return self.begun, self.ended


def test_a_call_that_does_not_end_expires_once() -> None:
    manager, status = Manager(), Status()
    watchdog = Watchdog(manager, status)
    status.begun += 1
    time.sleep(5 * TIMEOUT_S)
    watchdog.stop()
    (waited_s,) = manager.waited_s
    assert TIMEOUT_S < waited_s < 4 * TIMEOUT_S


def test_idle_managers_and_calls_that_end_do_not_expire() -> None:
    manager, status = Manager(), Status()
    watchdog = Watchdog(manager, status)
    time.sleep(3 * TIMEOUT_S)
    for _ in range(12):  # Together, the calls take longer than the timeout.
        status.begun += 1
        time.sleep(TIMEOUT_S / 4)
        status.ended += 1
    time.sleep(2 * TIMEOUT_S)
    watchdog.stop()
    assert manager.waited_s == []


def test_stop_ends_the_thread() -> None:
    watchdog = Watchdog(Manager(), Status())
    watchdog.stop()
    assert not watchdog._thread.is_alive()


def end_call(counter: CallCounter) -> torch.Tensor:
    """End a call whose sums are 1, and return its output."""
    out_TH = torch.zeros(3, 4)
    sums = BlockSums(torch.ones(1, 3, 4), Ranks(0, 1, 1), first_block=0, local_block=0)
    sum_blocks(sums, out_TH, None, counter)
    return out_TH


def test_progress_counts_calls_and_a_failed_status_poisons() -> None:
    status = DeviceStatus(2, torch.device("cpu"))
    counter = CallCounter(status, 1)
    counter.begin()
    assert status.progress() == (1, 0)
    assert end_call(counter).eq(1).all()
    assert status.progress() == (1, 1)
    status.mark_failed()
    assert end_call(counter).isnan().all()
    assert status.progress() == (1, 2)
