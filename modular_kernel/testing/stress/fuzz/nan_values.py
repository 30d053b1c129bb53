"""Fuzz target: NaN in any argument of a call. It must reach every value computed from it only."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from modular_kernel.spec.problem import Problem
from modular_kernel.testing.cases.nan import list_nan_arguments, reaches_other_pairs
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
    """A call with NaN. positions: (argument, index in it), modulo the numbers of these."""

    call: CallCase
    positions: list[tuple[int, int]]


def nan_values(case: NanCase) -> FuzzOutcome:
    """Put NaN into up to two arguments, and compare which output values are NaN."""
    built = build_call(case.call)
    if isinstance(built, FuzzOutcome):
        return built
    kernel, description, inputs = built
    names = list_nan_arguments(kernel.problem)
    if kernel.experts.requires.hides_nan or not inputs.x_TH.numel():
        return FuzzOutcome(RIGHT, description)
    nan_names = []
    for argument, position in case.positions:
        name = names[argument % len(names)]
        inputs = _with_nan(inputs, name, position)
        nan_names.append(name)
    description = (
        f"{case.call.mode} of {description}, NaN in {', '.join(nan_names)} at {case.positions}"
    )
    oracle = Oracle(kernel.problem, inputs.x_TH.clone(), inputs.weights, inputs.routing)
    plan = kernel.plan() if case.call.mode == "plan" else kernel
    result = run_or_outcome(description, lambda: plan(inputs.x_TH, inputs.weights, inputs.routing))
    if isinstance(result, FuzzOutcome):
        return result if result.kind != TYPED else FuzzOutcome(WRONG, f"{description}: refused")
    mismatch = _nan_mismatch(result, oracle, nan_names, kernel.problem)
    return (
        FuzzOutcome(WRONG, f"{description}: {mismatch}")
        if mismatch
        else FuzzOutcome(RIGHT, description)
    )


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
    index = torch.unravel_index(torch.tensor(position % copy.numel()), copy.shape)
    if copy.dtype is torch.uint8:
        copy[index] = 255
    elif copy.dtype.itemsize == 1:
        copy.view(torch.uint8)[index] = 0x7F
    else:
        copy[index] = torch.nan
    return copy


def _nan_mismatch(
    output: torch.Tensor, oracle: Oracle, nan_names: list[str], problem: Problem
) -> str:
    expected = oracle.expected.isnan()
    if output.shape != expected.shape:
        return f"shape {tuple(output.shape)}"
    lost = expected & ~output.isnan()
    if bool(lost.any()):
        return f"{int(lost.sum())} of {int(expected.sum())} values are numbers, not NaN"
    # A scale that all tokens share carries the NaN to other tokens.
    if any(reaches_other_pairs(name, problem) for name in nan_names):
        return ""
    spread = output.isnan() & ~expected
    if bool(spread.any()):
        return f"{int(spread.sum())} values are NaN, but read none"
    is_unaffected = ~(expected.any(-1) | oracle.norms.isnan())
    return oracle.mismatch(output, rows=is_unaffected) if bool(is_unaffected.any()) else ""


_CASES = st.builds(
    NanCase,
    call=call_cases(("call", "plan")),
    positions=st.lists(
        st.tuples(st.integers(0, 59), st.integers(0, 10**6)), min_size=1, max_size=2
    ),
)
TARGETS: tuple[Target[Any], ...] = (Target("nan_values", 4, _CASES, nan_values, launches=True),)
