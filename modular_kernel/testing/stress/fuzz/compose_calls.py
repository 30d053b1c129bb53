"""Calls of `compose`: the layer must compute correct output with any measurement options."""

import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from modular_kernel.testing.stress.fuzz.entry_functions import import_name
from modular_kernel.testing.stress.fuzz.oracle import Oracle
from modular_kernel.testing.stress.fuzz.outcome import (
    ACCEPTED,
    RIGHT,
    TYPED,
    WRONG,
    FuzzOutcome,
    run_or_outcome,
)
from modular_kernel.testing.stress.fuzz.random_problems import describe, draw_inputs, draw_problem
from modular_kernel.testing.stress.fuzz.specs import JUNK, shorten

# Fields of Terms. By its docstring none of them accepts a value of the types _NEVER.
_TERMS = ("tokens", "budget", "routing", "replicated", "fresh", "tell")
_NEVER = (bytes, list, dict, set, complex)


def composed_call(rng: Random) -> FuzzOutcome:
    """Compose a random problem and call the layer or its plan, or pass a junk argument."""
    problem = run_or_outcome("a problem", lambda: draw_problem(rng))
    if isinstance(problem, FuzzOutcome):
        return problem
    # Measure nothing, or one or two pairings until the time is over.
    terms: dict[str, Any] = {"budget": rng.choice((0.0, 0.0, 0.0, 0.0, 0.02))}
    if problem.tokens and rng.random() < 0.5:
        terms["tokens"] = tuple(rng.randint(1, problem.tokens) for _ in range(rng.randint(1, 3)))
    what = f"compose of {describe(problem)}, {terms}"
    arguments: dict[str, Any] = {"problem": problem}
    has_junk = rng.random() < 0.4
    if has_junk:
        name = rng.choice((*_TERMS, "problem", "machine", "terms"))
        value = rng.choice([v for v in JUNK if isinstance(v, _NEVER)])
        (terms if name in _TERMS else arguments)[name] = value
        what += f" with {name}={shorten(value)}"
    plans = rng.random() < 0.5

    def call() -> torch.Tensor:
        drawn = draw_inputs(problem, rng)
        inputs = drawn.x_TH, drawn.weights, drawn.routing
        with tempfile.TemporaryDirectory() as folder:
            home = "modular_kernel.select.autotune"
            options = import_name(f"{home}:Terms")(folder=Path(folder), **terms)
            kernel = import_name(f"{home}:compose")(**({"terms": options} | arguments))
            layer = kernel.plan() if plans else kernel
            original = replace(drawn, x_TH=drawn.x_TH.clone())
            oracles.append(Oracle(problem, original.x_TH, original.weights, original.routing))
            result: torch.Tensor = layer(*inputs)
            return result

    oracles: list[Oracle] = []
    result = run_or_outcome(what, call)
    if isinstance(result, FuzzOutcome):
        was_started = result.kind == TYPED and bool(oracles)
        return FuzzOutcome(WRONG, f"{what}: a valid call was refused") if was_started else result
    if has_junk:
        return FuzzOutcome(ACCEPTED, what)
    fault = oracles[0].fault(result)
    return FuzzOutcome(WRONG, f"{what}: {fault}") if fault else FuzzOutcome(RIGHT, what)
