"""Fault scenarios in which one rank is late or absent."""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from modular_kernel.testing.cases.scenario_names import (
    exchanges_call_numbers,
    find_manager_class,
    is_builtin,
    shares_memory,
)
from modular_kernel.testing.verify.manager_scenarios import check_threads_ended
from modular_kernel.testing.verify.problem_scenarios import Outcomes, cut_before
from modular_kernel.testing.verify.scenario_context import (
    CORRECT,
    FAULTY_RANK,
    ScenarioContext,
    capture_outcome,
    get_manager,
)

TIMEOUT_S = 1.5  # timeout in scenarios in which all ranks have connected
_SHORT_TIMEOUT_S = 0.5  # timeout in scenarios in which one rank never connects
_SHORT_DELAY_S = 0.6  # a delay shorter than TIMEOUT_S
_GRACE_S = 2.0  # no rank may still wait this long after the timeout
# The reason in the error of a manager that polls the library, as managers do on a GPU.
_POLL_TIMEOUT = "the exchange did not end in time"


def run_late_rank(context: ScenarioContext) -> Outcomes:
    """Make rank 1 late, first within the timeout and then beyond it.

    Within the timeout, the other ranks must wait. Beyond it, they must report rank 1, and rank 1
    must report them.
    """
    kernel, exchanges_numbers = (
        context.make_kernel_with_timeout(TIMEOUT_S),
        exchanges_call_numbers(context.part),
    )
    yield context.make_correct_call(kernel)
    threads = threading.enumerate()
    dist.barrier()
    if context.is_faulty_rank:
        time.sleep(_SHORT_DELAY_S)
    yield context.make_correct_call(kernel)
    dist.barrier()
    wait_alone = _start_alone(context) if exchanges_numbers else None
    if context.is_faulty_rank:
        time.sleep(TIMEOUT_S + _GRACE_S)
    start = time.monotonic()
    outcome = capture_outcome(lambda: context.compare(context.call(kernel)))
    seconds = time.monotonic() - start
    if exchanges_numbers:
        reason = (
            "gave up on this rank, which was at least N s late"
            if context.is_faulty_rank
            else "no sign of life"
        )
        layer_call_step, phase = (1, 3, 3), "counts"
    else:
        reason = f"no flag of call 3 from rank {FAULTY_RANK}"
        layer_call_step, phase = (0, 0, 3), "dispatch"
    peers = context.peers if context.is_faulty_rank else (FAULTY_RANK,)
    if exchanges_numbers or not context.is_faulty_rank:
        expected = context.format_expected_error(
            "exchange between ranks", reason, "", layer_call_step, peers, phase
        )
        yield cut_before(outcome, "; after", ", need"), cut_before(expected, ", need")
        if exchanges_numbers:
            yield _check_reason(outcome), CORRECT
        min_seconds = 0.0 if context.is_faulty_rank else TIMEOUT_S - 0.1
        is_in_time = min_seconds <= seconds < 2 * _GRACE_S
        yield ("in time" if is_in_time else f"{seconds:.1f} s"), "in time"
        second_outcome = capture_outcome(lambda: context.compare(context.call(kernel)))
        prefix = "a manager that failed before: " if exchanges_numbers else ""
        expected = context.format_expected_error(
            "exchange between ranks", prefix + reason, "", layer_call_step, peers, phase
        )
        yield cut_before(second_outcome, "; after", ", need"), cut_before(expected, ", need")
        if not exchanges_numbers:  # `check` also reports the error
            outcome = capture_outcome(lambda: str(get_manager(kernel.prepare_finalize).check()))
            yield cut_before(outcome, ", need"), cut_before(expected, ", need")
    if wait_alone is not None:
        yield wait_alone()
    yield from check_threads_ended(context, threads)
    dist.barrier()
    if not exchanges_numbers:
        yield from check_absent_rank_0(context, TIMEOUT_S)
    yield context.make_correct_call(context.make_kernel())


def _start_alone(context: ScenarioContext) -> Callable[[], tuple[str, str]]:
    """Start an exchange on rank 0 alone, and return a function that waits for it.

    The function must be called after the timeout and after the period in which other ranks may
    report errors. It checks that the exchange still reads their reports.
    """
    manager = find_manager_class(context.part)(None, timeout_s=TIMEOUT_S)
    if context.rank:
        return lambda: (CORRECT, CORRECT)
    exchange = manager.all_reduce(torch.ones(1), step=manager.next_step(), phase="combine")

    def wait() -> tuple[str, str]:
        outcome, layer_call_step = capture_outcome(lambda: str(exchange.wait())), (0, 0, 1)
        reason = "no sign of life"
        expected = context.format_expected_error(
            "exchange between ranks", reason, "", layer_call_step, context.peers, "combine"
        )
        return cut_before(outcome, "; after", ", need"), cut_before(expected, ", need")

    return wait


def _check_reason(message: str) -> str:
    """Return CORRECT if the error quotes a readable reason from the library, else the defect."""
    reason = message.partition("; after N s: ")[2].partition(", need")[0]
    if reason == _POLL_TIMEOUT:
        return "the error quotes no reason from the library, although the library has a timeout"
    is_readable = len(reason.split()) > 2 and not reason.startswith("[")
    return CORRECT if is_readable else f"the reason is not readable: {reason!r}"


def run_absent_rank(context: ScenarioContext) -> Outcomes:
    """Construct a kernel while rank 1 is absent, which must raise an error on the other ranks.

    Afterwards, all ranks construct a kernel together. A part with shared memory is also tested with
    a manager that all ranks have created together: the other ranks then construct a kernel with
    this manager while rank 1 is absent.
    """
    if shares_memory(context.part):
        manager = find_manager_class(context.part)(None, timeout_s=_SHORT_TIMEOUT_S)
        if not context.is_faulty_rank:
            outcome = capture_outcome(lambda: str(context.make_kernel_on(manager)))
            expected = context.format_expected_error(
                "ranks that share buffers",
                "no sign of life",
                "",
                (0, 0, 0),
                (FAULTY_RANK,),
                "construct",
            )
            yield cut_before(outcome, ", need"), cut_before(expected, ", need")
        dist.barrier()
        manager.destroy()
    if not context.is_faulty_rank:
        outcome = capture_outcome(lambda: str(context.make_kernel_with_timeout(_SHORT_TIMEOUT_S)))
        exchanges_numbers = exchanges_call_numbers(context.part)
        subject = "exchange between ranks" if exchanges_numbers else "ranks that share buffers"
        expected = context.format_expected_error(
            subject, "no sign of life", "", (0, 0, 0), (FAULTY_RANK,), "construct"
        )
        yield cut_before(outcome, "; after", ", need"), cut_before(expected, ", need")
    dist.barrier()
    if exchanges_call_numbers(context.part) and is_builtin(find_manager_class(context.part)):
        yield _fail_before_sending_host(context)
    yield context.make_correct_call(context.make_kernel())


def _fail_before_sending_host(context: ScenarioContext) -> tuple[str, str]:
    """Make rank 1 fail after it has connected to the others, but before it sends its host name."""
    manager_class = find_manager_class(context.part)

    def find_hosts(manager: Any, *args: Any) -> Any:
        dist.barrier()  # wait until all ranks have connected
        if context.is_faulty_rank:
            raise RuntimeError("this rank goes away")
        return manager_class._find_hosts(manager, *args)

    failing_manager_class = type(
        manager_class.__name__, (manager_class,), {"_find_hosts": find_hosts}
    )
    outcome = capture_outcome(lambda: str(failing_manager_class(None, timeout_s=TIMEOUT_S)))
    dist.barrier()
    subject, reason, need = "ranks that share buffers", "no sign of life", "every rank within 1.5 s"
    expected = context.format_expected_error(
        subject, reason, need, (0, 0, 0), (FAULTY_RANK,), "construct"
    )
    return outcome, "RuntimeError" if context.is_faulty_rank else expected


def check_absent_rank_0(context: ScenarioContext, timeout_s: float) -> Outcomes:
    """Make a call on all ranks except rank 0. They must report rank 0 like any absent rank."""
    kernel = context.make_kernel_with_timeout(timeout_s)
    yield context.make_correct_call(kernel)
    dist.barrier()
    if context.rank:
        expected = context.format_expected_error(
            "exchange between ranks", "no flag of call 2 from rank 0", "", (0, 0, 2), (0,),
            "dispatch",
        )  # fmt: skip
        outcome = capture_outcome(lambda: context.compare(context.call(kernel)))
        yield cut_before(outcome, ", need"), cut_before(expected, ", need")
    dist.barrier()
