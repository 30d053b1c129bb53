"""Checks for the "misunderstood" fault scenario of managers and of the limits that calls agree on.

A manager owns the communicator through which the parts of a rank exchange rows. All ranks make the
same managers and calls, unless a check says otherwise.
"""

import gc
import inspect
import threading
import time
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from modular_kernel.catalog import check
from modular_kernel.contracts import CallState
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.tensors import Routing
from modular_kernel.testing.cases.scenario_names import exchanges_call_numbers, find_manager_class
from modular_kernel.testing.verify.problem_scenarios import Outcomes
from modular_kernel.testing.verify.scenario_context import (
    CORRECT,
    ScenarioContext,
    capture_outcome,
)
from modular_kernel.workspace import Workspace

_INVALID_DEADLINES: tuple[Any, ...] = (True, 0, -1.0, float("inf"), float("nan"), "1")
_THREADS_END_S = 2.0  # threads of a failed exchange must end within this time


def check_manager_arguments(context: ScenarioContext) -> Outcomes:
    """Make managers with invalid deadlines, which must be refused before ranks connect."""
    manager_class = find_manager_class(context.part)
    for timeout_s in _INVALID_DEADLINES:
        outcome = capture_outcome(partial(_describe_manager, manager_class, timeout_s))
        yield f"{timeout_s!r}: {outcome}", f"{timeout_s!r}: ConfigurationError"


def _describe_manager(manager_class: Any, timeout_s: Any) -> str:
    return str(manager_class(None, timeout_s=timeout_s))


def check_calls_without_agreement(context: ScenarioContext) -> Outcomes:
    """Make calls on a manager whose ranks do not agree on the host before each call."""
    manager_class = find_manager_class(context.part)
    if "checked" not in inspect.signature(manager_class).parameters:
        return
    manager = manager_class(None, checked=False)
    kernel = context.make_kernel_on(manager)
    for _ in range(2):  # the ranks agree on the host in the first call only
        yield context.make_correct_call(kernel)
    manager.destroy()


def check_max_received(context: ScenarioContext, manager: object) -> Outcomes:
    """Send a rank more rows than `Problem.max_received`.

    Every rank must raise an error before a row is sent, so that the next call is correct.
    """
    limited = context.for_changed_problem(max_received=1)
    if limited is None or not exchanges_call_numbers(context.part):
        return
    kernel = limited.make_kernel_on(manager)
    outcome = capture_outcome(lambda: limited.compare(limited.call(kernel)))
    yield _must_mention(outcome, "rows for rank", "<= 1 (Problem.max_received)"), CORRECT
    yield context.make_correct_call(context.make_kernel_on(manager))


def check_too_many_tokens(context: ScenarioContext, kernel: FusedMoEModularKernel) -> Outcomes:
    """On rank 1, pass the part itself more tokens than its buffers hold.

    A kernel refuses such a call. A part must report it on every rank before a row is sent.
    """
    if not exchanges_call_numbers(context.part) or context.part.requires.replicated_input:
        return
    inputs, max_tokens = context.sample.inputs, context.case.problem.tokens
    if context.is_faulty_rank:
        x_TH = inputs.x_TH[:1].expand(max_tokens + 1, -1).contiguous()
        routing = Routing(
            inputs.routing.topk_weights_TK[:1].expand(max_tokens + 1, -1).contiguous(),
            inputs.routing.topk_ids_TK[:1].expand(max_tokens + 1, -1).contiguous(),
        )
        specs = kernel.workspace_specs(max_tokens)
        counter = torch.zeros(1, dtype=torch.int32)
        call = CallState(Workspace(specs, x_TH.device), counter, pairing=kernel.pairing)
        outcome = capture_outcome(
            lambda: str(
                kernel.prepare_finalize.prepare(x_TH, routing, weights=inputs.weights, call=call)
            )
        )
    else:
        outcome = capture_outcome(lambda: context.compare(context.call(kernel)))
    yield _must_mention(outcome, f"need 0 to problem.tokens = {max_tokens}"), CORRECT
    yield context.make_correct_call(kernel)


def check_dropped_manager(context: ScenarioContext) -> Outcomes:
    """Drop the last reference to a manager that was not destroyed; it must disconnect."""
    manager = find_manager_class(context.part)(None)
    communicator = getattr(manager, "_communicator", None)
    if communicator is None:  # ranks that share memory have no connections
        manager.destroy()
        return
    kernel = context.make_kernel_on(manager)
    yield context.make_correct_call(kernel)
    del kernel, manager
    gc.collect()
    yield ("open" if communicator.group is not None else "closed"), "closed"


def check_threads_ended(before: Collection[threading.Thread]) -> tuple[str, str]:
    """Check that all threads that were started after `before` was listed end soon."""
    until = time.monotonic() + _THREADS_END_S
    while (left := set(threading.enumerate()) - set(before)) and time.monotonic() < until:
        time.sleep(0.02)
    return f"{len(left)} threads left", "0 threads left"


def check_undeclared_hosts(context: ScenarioContext) -> Outcomes:
    """Make a call of a problem that does not declare its number of ranks per host."""
    problem = context.case.problem
    if problem.parallel.ranks_per_host is None:
        return
    parallel = replace(problem.parallel, ranks_per_host=None)
    changed = replace(
        context, case=replace(context.case, problem=replace(problem, parallel=parallel))
    )
    verdict = check(changed.case.prepare_finalize, changed.case.experts, changed.case.problem)
    if verdict.ok:
        yield changed.make_correct_call(changed.make_kernel())


def _must_mention(outcome: str, *texts: str) -> str:
    """Return "right" if the outcome is an error that contains all texts, else the outcome."""
    return CORRECT if all(text in outcome for text in texts) else outcome
