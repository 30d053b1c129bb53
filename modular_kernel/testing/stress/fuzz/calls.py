"""Kernel calls with valid arguments, and with one argument changed."""

import contextlib
from dataclasses import replace
from random import Random
from typing import Any

import torch

from modular_kernel.catalog import make_kernel
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.testing.stress.fuzz.call_changes import ALL
from modular_kernel.testing.stress.fuzz.oracle import Oracle
from modular_kernel.testing.stress.fuzz.outcome import (
    ACCEPTED,
    LATE,
    RIGHT,
    TYPED,
    WRONG,
    FuzzOutcome,
    run_or_outcome,
)
from modular_kernel.testing.stress.fuzz.random_problems import (
    CallInputs,
    describe,
    draw_inputs,
    draw_parts,
    draw_problem,
)

_MODES = ("call", "call", "plan", "twice", "start", "inference", "default64")


def right_call(rng: Random) -> FuzzOutcome:
    """Call a compatible pairing with valid inputs: the output must be correct."""
    drawn = _draw_call(rng)
    if isinstance(drawn, FuzzOutcome):
        return drawn
    kernel, what, inputs = drawn
    mode = rng.choice(_MODES)
    what = f"{mode} of {what} with T={len(inputs.x_TH)}"
    return _judged(kernel, inputs, mode, what, refusable=False)


def changed_call(rng: Random) -> FuzzOutcome:
    """Make such a call with one thing changed."""
    drawn = _draw_call(rng)
    if isinstance(drawn, FuzzOutcome):
        return drawn
    kernel, what, inputs = drawn
    name, change, must_refuse = rng.choice(ALL)
    mode = rng.choice(("call", "plan", "twice", "start"))
    what = f"{mode} of {what} with T={len(inputs.x_TH)}, {name}"
    try:
        changed = change(inputs, kernel.problem, rng)
    except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError):
        return FuzzOutcome(RIGHT, f"{what}: no such tensor can be made")
    if changed is None:
        return _judged(kernel, inputs, mode, what, refusable=False)
    grad = torch.enable_grad() if name == "requires grad" else torch.no_grad()
    with grad:
        if not must_refuse:
            return _judged(kernel, changed, mode, what, refusable=True)
        started = _record_starts(kernel)
        result = run_or_outcome(what, lambda: _run_call(kernel, changed, mode, started))
    if not isinstance(result, FuzzOutcome):
        return FuzzOutcome(ACCEPTED, what)
    return FuzzOutcome(LATE, what) if result.kind == TYPED and started else result


def nan_call(rng: Random) -> FuzzOutcome:
    """Put NaN into one token's x, or into the weights of skipped pairs: other rows stay correct."""
    drawn = _draw_call(rng)
    if isinstance(drawn, FuzzOutcome):
        return drawn
    kernel, what, inputs = drawn
    if len(inputs.x_TH) == 0:
        return FuzzOutcome(RIGHT, what)
    oracle = Oracle(kernel.problem, inputs.x_TH.clone(), inputs.weights, inputs.routing)
    rows = slice(None)
    if rng.random() < 0.5 and kernel.problem.scheme.activation_granularity != "tensor":
        inputs.x_TH[0] = torch.nan
        rows, what = slice(1, None), f"{what}, the first token is NaN"
    else:
        ids = inputs.routing.topk_ids_TK
        skipped = (ids < 0) | (ids >= kernel.problem.experts)
        if inputs.weights.expert_map is not None:
            skipped |= (
                inputs.weights.expert_map[ids.clamp(0, kernel.problem.experts - 1).long()] < 0
            )
        router = inputs.routing.topk_weights_TK.masked_fill(skipped, torch.nan)
        inputs = replace(inputs, routing=replace(inputs.routing, topk_weights_TK=router))
        what = f"{what}, router weights of skipped pairs are NaN"
    result = run_or_outcome(what, lambda: kernel(inputs.x_TH, inputs.weights, inputs.routing))
    if isinstance(result, FuzzOutcome):
        return result if result.kind != TYPED else FuzzOutcome(WRONG, f"{what}: refused")
    fault = oracle.fault(result, rows=rows)
    return FuzzOutcome(WRONG, f"{what}: {fault}") if fault else FuzzOutcome(RIGHT, what)


def _draw_call(rng: Random) -> tuple[FusedMoEModularKernel, str, CallInputs] | FuzzOutcome:
    """Return a kernel, its description and inputs for it; or the outcome if it is refused."""
    prepare, experts = draw_parts(rng)
    problem = run_or_outcome("a problem", lambda: draw_problem(rng))
    if isinstance(problem, FuzzOutcome):
        return problem
    what = f"{prepare} x {experts}, {describe(problem)}"
    kernel = run_or_outcome(what, lambda: make_kernel(prepare, experts, problem))
    if isinstance(kernel, FuzzOutcome):
        return kernel
    return kernel, what, draw_inputs(kernel.problem, rng)


def _judged(
    kernel: FusedMoEModularKernel, given: CallInputs, mode: str, what: str, *, refusable: bool
) -> FuzzOutcome:
    """Return the outcome of a call on valid numbers.

    refusable: whether a typed error is acceptable.
    """
    # Copy x, because an inplace call overwrites it.
    original = replace(given, x_TH=given.x_TH.clone())
    oracle = Oracle(kernel.problem, original.x_TH, original.weights, original.routing)
    started = _record_starts(kernel)
    result = run_or_outcome(what, lambda: _run_call(kernel, given, mode, started))
    if isinstance(result, FuzzOutcome):
        if result.kind != TYPED:
            return result
        if started:
            return FuzzOutcome(LATE, what)
        return result if refusable else FuzzOutcome(WRONG, f"{what}: a valid call was refused")
    fault = oracle.fault(result)
    return FuzzOutcome(WRONG, f"{what}: {fault}") if fault else FuzzOutcome(RIGHT, what)


def _record_starts(kernel: FusedMoEModularKernel) -> list[str]:
    """Return a list that is filled when a call has passed validation.

    Errors after that point must not be the caller's.
    """
    started: list[str] = []
    original = kernel.start_checked

    def noted(*arguments: Any, **options: Any) -> Any:
        started.append("started")
        return original(*arguments, **options)

    kernel.start_checked = noted  # type: ignore[method-assign]
    return started


def _run_call(
    kernel: FusedMoEModularKernel, given: CallInputs, mode: str, started: list[str]
) -> torch.Tensor:
    """Return the output of one call; with mode "twice" that of a plan's second call."""
    arguments = (given.x_TH, given.weights, given.routing)
    if mode == "plan":
        return kernel.plan()(*arguments, out=given.out)
    if mode == "twice":
        plan, problem = kernel.plan(), kernel.problem
        if problem.tokens:  # a different call first
            other = draw_inputs(problem, Random(0))
            plan(other.x_TH, other.weights, other.routing)
            started.clear()
        return plan(*arguments, out=given.out)
    if mode == "start":
        return kernel.start(*arguments, out=given.out).finish()
    with contextlib.ExitStack() as modes:
        if mode == "inference":
            modes.enter_context(torch.inference_mode())
        if mode == "default64":
            modes.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        return kernel(*arguments, out=given.out)
