"""Fuzz target: put NaN into arguments of a call.

Exactly the output values that depend on a NaN must be NaN.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from modular_kernel.spec.problem import Problem
from modular_kernel.testing.cases.nan import list_nan_arguments, reaches_other_pairs
from modular_kernel.testing.stress.fuzz.calls import CallCase, build_call, call_cases
from modular_kernel.testing.stress.fuzz.independent_reference import IndependentReference
from modular_kernel.testing.stress.fuzz.outcome import (
    CORRECT,
    TYPED_ERROR,
    WRONG_RESULT,
    FuzzOutcome,
    run_or_classify,
)
from modular_kernel.testing.stress.fuzz.random_problems import CallInputs
from modular_kernel.testing.stress.fuzz.target import Target


@dataclass(frozen=True)
class NanCase:
    """A call with NaN in some arguments.

    nan_positions: (argument index, element index) pairs, each taken modulo the number of arguments
        or elements.
    """

    call: CallCase
    nan_positions: list[tuple[int, int]]


def check_nan_values(case: NanCase) -> FuzzOutcome:
    """Put NaN into up to two arguments, and check which output values are NaN."""
    call_or_outcome = build_call(case.call)
    if isinstance(call_or_outcome, FuzzOutcome):
        return call_or_outcome
    kernel, description, inputs = call_or_outcome
    names = list_nan_arguments(kernel.problem)
    if kernel.experts.requires.nan_clamping_activations or not inputs.x_TH.numel():
        return FuzzOutcome(CORRECT, description)
    nan_names = []
    for argument, element_index in case.nan_positions:
        name = names[argument % len(names)]
        inputs = _insert_nan(inputs, name, element_index)
        nan_names.append(name)
    description = (
        f"{case.call.mode} of {description}, NaN in {', '.join(nan_names)} at {case.nan_positions}"
    )
    reference = IndependentReference(
        kernel.problem, inputs.x_TH.clone(), inputs.weights, inputs.routing
    )
    run = kernel.plan() if case.call.mode == "plan" else kernel
    result = run_or_classify(description, lambda: run(inputs.x_TH, inputs.weights, inputs.routing))
    if isinstance(result, FuzzOutcome):
        return (
            result
            if result.kind != TYPED_ERROR
            else FuzzOutcome(WRONG_RESULT, f"{description}: refused")
        )
    mismatch = _find_nan_mismatch(result, reference, nan_names, kernel.problem)
    return (
        FuzzOutcome(WRONG_RESULT, f"{description}: {mismatch}")
        if mismatch
        else FuzzOutcome(CORRECT, description)
    )


def _insert_nan(inputs: CallInputs, name: str, element_index: int) -> CallInputs:
    if name == "x":
        return replace(inputs, x_TH=_set_nan(inputs.x_TH, element_index))
    if name == "topk_weights":
        weights_TK = _set_nan(inputs.routing.topk_weights_TK, element_index)
        return replace(inputs, routing=replace(inputs.routing, topk_weights_TK=weights_TK))
    changed: dict[str, torch.Tensor] = {
        name: _set_nan(getattr(inputs.weights, name), element_index)
    }
    return replace(inputs, weights=replace(inputs.weights, **changed))


def _set_nan(tensor: torch.Tensor, element_index: int) -> torch.Tensor:
    """Return a copy with one NaN. uint8 tensors are E8M0 scales, in which 255 means NaN."""
    copy = tensor.clone()
    if not copy.numel():
        return copy
    index = torch.unravel_index(torch.tensor(element_index % copy.numel()), copy.shape)
    if copy.dtype is torch.uint8:
        copy[index] = 255
    elif copy.dtype.itemsize == 1:
        copy.view(torch.uint8)[index] = 0x7F
    else:
        copy[index] = torch.nan
    return copy


def _find_nan_mismatch(
    output: torch.Tensor, reference: IndependentReference, nan_names: list[str], problem: Problem
) -> str:
    expected = reference.expected.isnan()
    if output.shape != expected.shape:
        return f"shape {tuple(output.shape)}"
    lost_nan = expected & ~output.isnan()
    if bool(lost_nan.any()):
        return f"{int(lost_nan.sum())} of {int(expected.sum())} values should be NaN, but are not"
    # A scale that all tokens share spreads the NaN to other tokens.
    if any(reaches_other_pairs(name, problem) for name in nan_names):
        return ""
    unexpected_nan = output.isnan() & ~expected
    if bool(unexpected_nan.any()):
        return (
            f"{int(unexpected_nan.sum())} output values are NaN although no NaN was among their "
            "inputs"
        )
    is_unaffected = ~(expected.any(-1) | reference.norms.isnan())
    return reference.find_mismatch(output, rows=is_unaffected) if bool(is_unaffected.any()) else ""


_CASES = st.builds(
    NanCase,
    call=call_cases(("call", "plan")),
    nan_positions=st.lists(
        st.tuples(st.integers(0, 59), st.integers(0, 10**6)), min_size=1, max_size=2
    ),
)
TARGETS: tuple[Target[Any], ...] = (
    Target("nan_values", 4, _CASES, check_nan_values, launches=True),
)
