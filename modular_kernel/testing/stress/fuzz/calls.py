"""Calls of composed kernels with tensors: right ones, and ones with a thing changed."""

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
    attempt,
)
from modular_kernel.testing.stress.fuzz.random_problems import (
    Given,
    described,
    draw_inputs,
    draw_parts,
    draw_problem,
)

_MODES = ("call", "call", "plan", "twice", "start", "inference", "default64")


def right_call(rng: Random) -> FuzzOutcome:
    """Call a pairing that fits with valid inputs: the right number must come out."""
    made = _drawn(rng)
    if isinstance(made, FuzzOutcome):
        return made
    kernel, what, given = made
    mode = rng.choice(_MODES)
    what = f"{mode} of {what} with T={len(given.x_TH)}"
    return _judged(kernel, given, mode, what, refusable=False)


def changed_call(rng: Random) -> FuzzOutcome:
    """Make the same call with one thing changed."""
    made = _drawn(rng)
    if isinstance(made, FuzzOutcome):
        return made
    kernel, what, given = made
    name, change, must = rng.choice(ALL)
    mode = rng.choice(("call", "plan", "twice", "start"))
    what = f"{mode} of {what} with T={len(given.x_TH)}, {name}"
    try:
        changed = change(given, kernel.problem, rng)
    except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError):
        return FuzzOutcome(RIGHT, f"{what}: no such tensor can be made")
    if changed is None:
        return _judged(kernel, given, mode, what, refusable=False)
    grad = torch.enable_grad() if name == "requires grad" else torch.no_grad()
    with grad:
        if not must:
            return _judged(kernel, changed, mode, what, refusable=True)
        started = _watched(kernel)
        found = attempt(what, lambda: _called(kernel, changed, mode, started))
    if not isinstance(found, FuzzOutcome):
        return FuzzOutcome(ACCEPTED, what)
    return FuzzOutcome(LATE, what) if found.kind == TYPED and started else found


def nan_call(rng: Random) -> FuzzOutcome:
    """NaN where it must stay: in its token's row, or nowhere as the weight of a skipped pair."""
    made = _drawn(rng)
    if isinstance(made, FuzzOutcome):
        return made
    kernel, what, given = made
    if len(given.x_TH) == 0:
        return FuzzOutcome(RIGHT, what)
    oracle = Oracle(kernel.problem, given.x_TH.clone(), given.weights, given.routing)
    rows = slice(None)
    if rng.random() < 0.5 and kernel.problem.scheme.activation_granularity != "tensor":
        given.x_TH[0] = torch.nan
        rows, what = slice(1, None), f"{what}, the first token is NaN"
    else:
        ids = given.routing.topk_ids_TK
        gone = (ids < 0) | (ids >= kernel.problem.experts)
        if given.weights.expert_map is not None:
            gone |= given.weights.expert_map[ids.clamp(0, kernel.problem.experts - 1).long()] < 0
        router = given.routing.topk_weights_TK.masked_fill(gone, torch.nan)
        given = replace(given, routing=replace(given.routing, topk_weights_TK=router))
        what = f"{what}, skipped pairs weigh NaN"
    found = attempt(what, lambda: kernel(given.x_TH, given.weights, given.routing))
    if isinstance(found, FuzzOutcome):
        return found if found.kind != TYPED else FuzzOutcome(WRONG, f"{what}: refused")
    fault = oracle.fault(found, rows=rows)
    return FuzzOutcome(WRONG, f"{what}: {fault}") if fault else FuzzOutcome(RIGHT, what)


def _drawn(rng: Random) -> tuple[FusedMoEModularKernel, str, Given] | FuzzOutcome:
    """Return a kernel, what it is, and inputs of it; or how it was refused."""
    prepare, experts = draw_parts(rng)
    problem = attempt("a problem", lambda: draw_problem(rng))
    if isinstance(problem, FuzzOutcome):
        return problem
    what = f"{prepare} x {experts}, {described(problem)}"
    kernel = attempt(what, lambda: make_kernel(prepare, experts, problem))
    if isinstance(kernel, FuzzOutcome):
        return kernel
    return kernel, what, draw_inputs(kernel.problem, rng)


def _judged(
    kernel: FusedMoEModularKernel, given: Given, mode: str, what: str, *, refusable: bool
) -> FuzzOutcome:
    """Return the outcome of a call whose result is known. refusable: a typed error is as good."""
    # Of copies: an inplace call overwrites x.
    plain = replace(given, x_TH=given.x_TH.clone())
    oracle = Oracle(kernel.problem, plain.x_TH, plain.weights, plain.routing)
    started = _watched(kernel)
    found = attempt(what, lambda: _called(kernel, given, mode, started))
    if isinstance(found, FuzzOutcome):
        if found.kind != TYPED:
            return found
        if started:
            return FuzzOutcome(LATE, what)
        return found if refusable else FuzzOutcome(WRONG, f"{what}: a right call is refused")
    fault = oracle.fault(found)
    return FuzzOutcome(WRONG, f"{what}: {fault}") if fault else FuzzOutcome(RIGHT, what)


def _watched(kernel: FusedMoEModularKernel) -> list[str]:
    """Return a list that fills when a call passes its checks: no error of the caller from there."""
    started: list[str] = []
    plain = kernel.start_checked

    def noted(*arguments: Any, **options: Any) -> Any:
        started.append("started")
        return plain(*arguments, **options)

    kernel.start_checked = noted  # type: ignore[method-assign]
    return started


def _called(
    kernel: FusedMoEModularKernel, given: Given, mode: str, started: list[str]
) -> torch.Tensor:
    """Return the output of one call; of the second if a plan is called twice."""
    arguments = (given.x_TH, given.weights, given.routing)
    if mode == "plan":
        return kernel.plan()(*arguments, out=given.out)
    if mode == "twice":
        plan, problem = kernel.plan(), kernel.problem
        if problem.tokens:  # another kind of call before
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
