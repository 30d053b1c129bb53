"""NaN in any argument of a call: it must reach every value that reads it, and no other."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from modular_kernel.spec.problem import Problem
from modular_kernel.testing.cases.nan import nan_arguments, reaches_other_pairs
from modular_kernel.testing.stress.fuzz.calls import CallCase, build_call, call_cases
from modular_kernel.testing.stress.fuzz.oracle import Oracle
from modular_kernel.testing.stress.fuzz.outcome import (
    RIGHT,
    TYPED,
    WRONG,
    FuzzOutcome,
    run_or_outcome,
)
from modular_kernel.testing.stress.fuzz.random_problems import CallInputs
from modular_kernel.testing.stress.fuzz.target import Target


@dataclass(frozen=True)
class NanCase:
    """A call, and the places of NaN: (argument, position in it), both modulo their number."""

    call: CallCase
    places: list[tuple[int, int]]


def nan_values(case: NanCase) -> FuzzOutcome:
    """Put NaN into up to two arguments; compare which values of the output are NaN."""
    built = build_call(case.call)
    if isinstance(built, FuzzOutcome):
        return built
    kernel, what, inputs = built
    names = nan_arguments(kernel.problem)
    if kernel.experts.requires.hides_nan or not inputs.x_TH.numel():
        return FuzzOutcome(RIGHT, what)
    used = []
    for argument, position in case.places:
        name = names[argument % len(names)]
        inputs = _with_nan(inputs, name, position)
        used.append(name)
    what = f"{case.call.mode} of {what}, NaN in {', '.join(used)} at {case.places}"
    oracle = Oracle(kernel.problem, inputs.x_TH.clone(), inputs.weights, inputs.routing)
    plan = kernel.plan() if case.call.mode == "plan" else kernel
    result = run_or_outcome(what, lambda: plan(inputs.x_TH, inputs.weights, inputs.routing))
    if isinstance(result, FuzzOutcome):
        return result if result.kind != TYPED else FuzzOutcome(WRONG, f"{what}: refused")
    fault = _fault(result, oracle, used, kernel.problem)
    return FuzzOutcome(WRONG, f"{what}: {fault}") if fault else FuzzOutcome(RIGHT, what)


def _with_nan(inputs: CallInputs, name: str, position: int) -> CallInputs:
    if name == "x":
        return replace(inputs, x_TH=_set_nan(inputs.x_TH, position))
    if name == "topk_weights":
        weights_TK = _set_nan(inputs.routing.topk_weights_TK, position)
        return replace(inputs, routing=replace(inputs.routing, topk_weights_TK=weights_TK))
    changed: dict[str, torch.Tensor] = {name: _set_nan(getattr(inputs.weights, name), position)}
    return replace(inputs, weights=replace(inputs.weights, **changed))


def _set_nan(tensor: torch.Tensor, position: int) -> torch.Tensor:
    """Return a copy with a NaN. uint8 is E8M0, whose NaN is 255."""
    copy = tensor.clone()
    if not copy.numel():
        return copy
    at = torch.unravel_index(torch.tensor(position % copy.numel()), copy.shape)
    if copy.dtype is torch.uint8:
        copy[at] = 255
    elif copy.dtype.itemsize == 1:
        copy.view(torch.uint8)[at] = 0x7F
    else:
        copy[at] = torch.nan
    return copy


def _fault(found: torch.Tensor, oracle: Oracle, used: list[str], problem: Problem) -> str:
    expected = oracle.expected.isnan()
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)}"
    missing = expected & ~found.isnan()
    if bool(missing.any()):
        return f"{int(missing.sum())} of {int(expected.sum())} values are numbers, not NaN"
    # A scale that a call shares carries the NaN to other tokens.
    if any(reaches_other_pairs(name, problem) for name in used):
        return ""
    extra = found.isnan() & ~expected
    if bool(extra.any()):
        return f"{int(extra.sum())} values are NaN, but read none"
    clean = ~(expected.any(-1) | oracle.norms.isnan())
    return oracle.fault(found, rows=clean) if bool(clean.any()) else ""


_CASES = st.builds(
    NanCase,
    call=call_cases(("call", "plan")),
    places=st.lists(st.tuples(st.integers(0, 59), st.integers(0, 10**6)), min_size=1, max_size=2),
)
TARGETS: tuple[Target[Any], ...] = (Target("nan_values", 4, _CASES, nan_values, launches=True),)
