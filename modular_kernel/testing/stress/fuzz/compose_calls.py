"""Fuzz target: layers made by `compose` with random options or a junk argument.

`compose` measures pairings of an exchange class and an experts class, and returns a kernel of the
fastest pairing. A junk argument is a value of a wrong type (`junk`).
"""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from modular_kernel.spec.problem import Problem
from modular_kernel.testing.stress.fuzz.independent_reference import IndependentReference
from modular_kernel.testing.stress.fuzz.junk import JUNK, shorten
from modular_kernel.testing.stress.fuzz.outcome import (
    CORRECT,
    INVALID_ACCEPTED,
    TYPED_ERROR,
    WRONG_RESULT,
    FuzzOutcome,
    run_or_classify,
)
from modular_kernel.testing.stress.fuzz.random_problems import (
    InputChoices,
    format_problem,
    input_choices,
    make_inputs,
    problem_fields,
)
from modular_kernel.testing.stress.fuzz.target import Target, import_object

# Fields of MeasurementOptions. None of them accepts a value of a type in _INVALID_TYPES.
_OPTIONS = ("tokens", "budget", "routing", "replicated", "ignore_saved", "on_bucket")
_INVALID_TYPES = (bytes, list, dict, set, complex)


@dataclass(frozen=True)
class ComposeCase:
    """A call of compose.

    Attributes:
        fields: fields of the problem.
        inputs: parameters from which the inputs are made.
        budget: seconds for measurements.
        tokens: random numbers, from which the numbers of tokens to measure are computed.
        junk: (name of an argument, value), or None.
        plans: whether to call a plan of the layer.
    """

    fields: dict[str, Any]
    inputs: InputChoices
    budget: float
    tokens: tuple[int, ...]
    junk: tuple[str, Any] | None
    plans: bool


def check_composed_call(case: ComposeCase) -> FuzzOutcome:
    """Compose a layer for a random problem and call it. A junk argument must be refused."""
    problem = run_or_classify("a problem", lambda: Problem(**case.fields))
    if isinstance(problem, FuzzOutcome):
        return problem
    options: dict[str, Any] = {"budget": case.budget}
    if problem.tokens and case.tokens:
        options["tokens"] = tuple(1 + n % problem.tokens for n in case.tokens)
    description = f"compose of {format_problem(problem)}, {options}"
    arguments: dict[str, Any] = {"problem": problem}
    if case.junk:
        name, value = case.junk
        (options if name in _OPTIONS else arguments)[name] = value
        description += f" with {name}={shorten(value)}"

    def call() -> torch.Tensor:
        inputs = make_inputs(problem, case.inputs)
        with tempfile.TemporaryDirectory() as folder:
            module = "modular_kernel.select.autotune"
            options_class = import_object(f"{module}:MeasurementOptions")
            measurement_options = options_class(folder=Path(folder), **options)
            compose = import_object(f"{module}:compose")
            kernel = compose(**({"options": measurement_options} | arguments))
            layer = kernel.plan() if case.plans else kernel
            original = replace(inputs, x_TH=inputs.x_TH.clone())
            references.append(
                IndependentReference(problem, original.x_TH, original.weights, original.routing)
            )
            result: torch.Tensor = layer(inputs.x_TH, inputs.weights, inputs.routing)
            return result

    references: list[IndependentReference] = []
    result = run_or_classify(description, call)
    if isinstance(result, FuzzOutcome):
        was_started = result.kind == TYPED_ERROR and bool(references)
        return (
            FuzzOutcome(WRONG_RESULT, f"{description}: a valid call was refused")
            if was_started
            else result
        )
    if case.junk:
        return FuzzOutcome(INVALID_ACCEPTED, description)
    mismatch = references[0].find_mismatch(result)
    return (
        FuzzOutcome(WRONG_RESULT, f"{description}: {mismatch}")
        if mismatch
        else FuzzOutcome(CORRECT, description)
    )


_junk_arguments = st.tuples(
    st.sampled_from((*_OPTIONS, "problem", "machine", "options")),
    st.sampled_from([v for v in JUNK if isinstance(v, _INVALID_TYPES)]),
)
_CASES = st.builds(
    ComposeCase,
    fields=problem_fields(),
    inputs=input_choices(),
    # These budgets suffice to measure no pairing, or one or two.
    budget=st.sampled_from((0.0, 0.0, 0.0, 0.0, 0.02)),
    tokens=st.one_of(st.just(()), st.lists(st.integers(0, 8), min_size=1, max_size=3).map(tuple)),
    junk=st.one_of(st.none(), _junk_arguments),
    plans=st.booleans(),
)
TARGETS: tuple[Target[Any], ...] = (Target("composed_call", 3, _CASES, check_composed_call),)
