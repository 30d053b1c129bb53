"""Fault scenarios in which ranks wait for one that comes late or not at all."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from modular_kernel.testing.cases.scenario_names import counts_calls, manager_class, shares_memory
from modular_kernel.testing.verify.problem_scenarios import Lines, text_before
from modular_kernel.testing.verify.scenario_context import (
    RIGHT,
    VICTIM,
    ScenarioContext,
    manager_of,
    outcome_of,
)

DEADLINE_S = 1.5  # where a rank is absent after the ranks have connected
_SHORT_S = 0.5  # where the ranks never connect
_IN_TIME_S = 0.6  # a delay within the deadline
_GRACE_S = 2.0  # time after the deadline until no rank waits any more
_POLLED = "the exchange did not end in time"  # reported where the library is polled, on a GPU


def late_rank(on: ScenarioContext) -> Lines:
    """Make rank 1 late, first within the deadline and then beyond it.

    In the first case the others wait. In the second they report rank 1, which reports them.
    """
    kernel, counts = on.waiting(DEADLINE_S), counts_calls(on.part)
    yield on.goes(kernel)
    dist.barrier()
    if on.at_fault:
        time.sleep(_IN_TIME_S)
    yield on.goes(kernel)
    dist.barrier()
    wait_for_nobody = _start_alone(on) if counts else None
    if on.at_fault:
        time.sleep(DEADLINE_S + _GRACE_S)
    start = time.monotonic()
    outcome = outcome_of(lambda: on.judged(on.call(kernel)))
    seconds = time.monotonic() - start
    if counts:
        why = (
            "gave up on this rank, which was at least N s late"
            if on.at_fault
            else "no sign of life"
        )
        layer, phase = (1, 3, 3), "counts"
    else:
        why = f"no flag of call 3 from rank {VICTIM}"
        layer, phase = (0, 0, 3), "dispatch"
    peers = on.others if on.at_fault else (VICTIM,)
    if counts or not on.at_fault:
        expected = on.error("exchange between ranks", why, "", layer, peers, phase)
        yield text_before(outcome, "; after", ", need"), text_before(expected, ", need")
        if counts:
            yield _check_reason(outcome), RIGHT
        min_seconds = 0.0 if on.at_fault else DEADLINE_S - 0.1
        is_in_time = min_seconds <= seconds < 2 * _GRACE_S
        yield ("in time" if is_in_time else f"{seconds:.1f} s"), "in time"
        again = outcome_of(lambda: on.judged(on.call(kernel)))
        earlier = "a manager that failed before: " if counts else ""
        expected = on.error("exchange between ranks", earlier + why, "", layer, peers, phase)
        yield text_before(again, "; after", ", need"), text_before(expected, ", need")
        if not counts:  # a later check reports it too
            outcome = outcome_of(lambda: str(manager_of(kernel.prepare_finalize).check()))
            yield text_before(outcome, ", need"), text_before(expected, ", need")
    if wait_for_nobody is not None:
        yield wait_for_nobody()
    dist.barrier()
    if not counts:
        yield from absent_rank_0(on, DEADLINE_S)
    yield on.goes(on.kernel())


def _start_alone(on: ScenarioContext) -> Callable[[], tuple[str, str]]:
    """Start an exchange on rank 0 alone; return the function that waits for it.

    Call it well after the deadline and the grace period for reports of other ranks: the wait must
    still query these reports.
    """
    manager = manager_class(on.part)(None, deadline_s=DEADLINE_S)
    if on.rank:
        return lambda: (RIGHT, RIGHT)
    exchange = manager.all_reduce(torch.ones(1), step=manager.next_step(), phase="combine")

    def wait() -> tuple[str, str]:
        outcome, at = outcome_of(lambda: str(exchange.wait())), (0, 0, 1)
        why = "no sign of life"
        expected = on.error("exchange between ranks", why, "", at, on.others, "combine")
        return text_before(outcome, "; after", ", need"), text_before(expected, ", need")

    return wait


def _check_reason(told: str) -> str:
    """Return "right" if the error quotes a readable reason of the library, else a message."""
    reason = told.partition("; after N s: ")[2].partition(", need")[0]
    if reason == _POLLED:
        return "not the reason of the library, which knows the deadline itself"
    is_readable = len(reason.split()) > 2 and not reason.startswith("[")
    return RIGHT if is_readable else f"no reason in words: {reason!r}"


def absent_rank(on: ScenarioContext) -> Lines:
    """Make no kernel on rank 1 where the others make one; then all make one together.

    With shared memory rank 1 first makes a manager with the others, which then wait for it a second
    time.
    """
    if shares_memory(on.part):
        manager = manager_class(on.part)(None, deadline_s=_SHORT_S)
        if not on.at_fault:
            outcome = outcome_of(lambda: str(on.over(manager)))
            expected = on.error(
                "ranks that share buffers", "no sign of life", "", (0, 0, 0), (VICTIM,), "construct"
            )
            yield text_before(outcome, ", need"), text_before(expected, ", need")
        dist.barrier()
        manager.destroy()
    if not on.at_fault:
        outcome, counts = outcome_of(lambda: str(on.waiting(_SHORT_S))), counts_calls(on.part)
        what = "exchange between ranks" if counts else "ranks that share buffers"
        expected = on.error(what, "no sign of life", "", (0, 0, 0), (VICTIM,), "construct")
        yield text_before(outcome, "; after", ", need"), text_before(expected, ", need")
    dist.barrier()
    if counts_calls(on.part):
        yield _send_no_host(on)
    yield on.goes(on.kernel())


def _send_no_host(on: ScenarioContext) -> tuple[str, str]:
    """Have rank 1 connect with the others and fail before it sends its host."""
    manager_type = manager_class(on.part)
    if on.at_fault:
        manager_type = type(manager_type.__name__, (manager_type,), {"_find_hosts": _raise_away})
    outcome = outcome_of(lambda: str(manager_type(None, deadline_s=DEADLINE_S)))
    dist.barrier()
    what, why, need = "ranks that share buffers", "no sign of life", "every rank within 1.5 s"
    expected = on.error(what, why, need, (0, 0, 0), (VICTIM,), "construct")
    return outcome, "RuntimeError" if on.at_fault else expected


def _raise_away(*_: object) -> None:
    raise RuntimeError("this rank goes away")


def absent_rank_0(on: ScenarioContext, deadline_s: float) -> Lines:
    """Make no call on rank 0 where all others make one: they report it like any other rank."""
    kernel = on.waiting(deadline_s)
    yield on.goes(kernel)
    dist.barrier()
    if on.rank:
        expected = on.error(
            "exchange between ranks", "no flag of call 2 from rank 0", "", (0, 0, 2), (0,),
            "dispatch",
        )  # fmt: skip
        outcome = outcome_of(lambda: on.judged(on.call(kernel)))
        yield text_before(outcome, ", need"), text_before(expected, ", need")
    dist.barrier()
