"""Checks for the "misunderstood" fault scenario: managers, and limits on rows and tokens.

A manager owns the communicator through which the parts of a rank exchange rows. Checks of
attributes, threads or messages that only our own classes have are skipped for the parts and
managers of other packages.
"""

import gc
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
from modular_kernel.testing.cases.scenario_names import (
    exchanges_call_numbers,
    find_manager_class,
    is_builtin,
)
from modular_kernel.testing.verify.problem_scenarios import Outcomes
from modular_kernel.testing.verify.scenario_context import (
    CORRECT,
    ScenarioContext,
    capture_outcome,
)
from modular_kernel.workspace import Workspace

_INVALID_TIMEOUTS: tuple[Any, ...] = (True, 0, -1.0, float("inf"), float("nan"), "1")
_MAX_THREAD_EXIT_S = 2.0  # threads of a failed exchange must end within this many seconds


def has_builtin_classes(context: ScenarioContext) -> bool:
    return is_builtin(context.part) and is_builtin(find_manager_class(context.part))


def check_manager_arguments(context: ScenarioContext) -> Outcomes:
    """Check that a manager refuses invalid timeouts."""
    manager_class = find_manager_class(context.part)
    if not is_builtin(manager_class):
        return
    for timeout_s in _INVALID_TIMEOUTS:
        outcome = capture_outcome(partial(_describe_manager, manager_class, timeout_s))
        yield f"{timeout_s!r}: {outcome}", f"{timeout_s!r}: ConfigurationError"


def _describe_manager(manager_class: Any, timeout_s: Any) -> str:
    return str(manager_class(None, timeout_s=timeout_s))


def check_max_received(context: ScenarioContext, manager: object) -> Outcomes:
    """Send a rank more rows than `Problem.max_received`.

    Every rank must raise an error before a row is sent, so that the next call is correct.
    """
    if not has_builtin_classes(context) or not exchanges_call_numbers(context.part):
        return
    limited_context = context.with_changed_problem(max_received=1)
    if limited_context is None:
        return
    kernel = limited_context.make_kernel_on(manager)
    outcome = capture_outcome(lambda: limited_context.compare(limited_context.call(kernel)))
    yield _check_mentions(outcome, "rows for rank", "<= 1 (Problem.max_received)"), CORRECT
    yield context.make_correct_call(context.make_kernel_on(manager))


def check_too_many_tokens(context: ScenarioContext, kernel: FusedMoEModularKernel) -> Outcomes:
    """On rank 1, pass more tokens to the part itself than its buffers hold.

    A kernel would refuse such a call. A part must report it on every rank before a row is sent.
    """
    if not has_builtin_classes(context) or not exchanges_call_numbers(context.part):
        return
    if context.part.requires.replicated_input:
        return
    inputs, max_tokens = context.sample.inputs, context.case.problem.tokens

    def prepare_too_many() -> str:
        ids_TK, weights_TK = inputs.routing.topk_ids_TK, inputs.routing.topk_weights_TK
        tokens = max_tokens + 1
        routing = replace(
            inputs.routing,
            topk_weights_TK=weights_TK.new_zeros(tokens, weights_TK.shape[1]),
            topk_ids_TK=ids_TK.new_zeros(tokens, ids_TK.shape[1]),
        )
        x_TH = inputs.x_TH.new_zeros(tokens, inputs.x_TH.shape[1])
        workspace = Workspace(kernel.workspace_specs(max_tokens), x_TH.device)
        call = CallState(workspace, torch.zeros(1, dtype=torch.int32), pairing=kernel.pairing)
        prepare = kernel.prepare_finalize.prepare
        return str(prepare(x_TH, routing, weights=inputs.weights, call=call))

    outcome = capture_outcome(
        prepare_too_many
        if context.is_faulty_rank
        else lambda: context.compare(context.call(kernel))
    )
    need = f"need 0 to problem.tokens = {max_tokens}"
    yield _check_mentions(outcome, "'counts'", "(1,))", need), CORRECT
    yield context.make_correct_call(kernel)


def check_destroyed_manager(context: ScenarioContext, manager: object) -> Outcomes:
    """Check that no layer can be made on `manager`, which has been destroyed."""
    if has_builtin_classes(context):
        yield capture_outcome(lambda: str(context.make_kernel_on(manager))), "UnsupportedError"


def check_dropped_manager(context: ScenarioContext) -> Outcomes:
    """Check that a manager disconnects when it is garbage-collected without `destroy`."""
    if not has_builtin_classes(context):
        return
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


def check_threads_ended(
    context: ScenarioContext, threads: Collection[threading.Thread]
) -> Outcomes:
    """Check that all threads except `threads` end soon.

    threads: the threads that were alive before the exchange that failed.
    """
    if not has_builtin_classes(context):
        return
    deadline = time.monotonic() + _MAX_THREAD_EXIT_S
    while (
        remaining_threads := set(threading.enumerate()) - set(threads)
    ) and time.monotonic() < deadline:
        time.sleep(0.02)
    yield f"{len(remaining_threads)} threads left", "0 threads left"


def check_undeclared_hosts(context: ScenarioContext) -> Outcomes:
    """Make a call for a problem that does not declare its number of ranks per host."""
    problem = context.case.problem
    if problem.parallel.ranks_per_host is None:
        return
    parallel = replace(problem.parallel, ranks_per_host=None)
    changed_context = replace(
        context, case=replace(context.case, problem=replace(problem, parallel=parallel))
    )
    names = changed_context.case.prepare_finalize, changed_context.case.experts
    verdict = check(*names, changed_context.case.problem, context.machine)
    if verdict.ok:
        yield changed_context.make_correct_call(changed_context.make_kernel())


def _check_mentions(outcome: str, *expected_texts: str) -> str:
    """Return "right" if the outcome contains all texts; otherwise, return the outcome."""
    return CORRECT if all(text in outcome for text in expected_texts) else outcome
