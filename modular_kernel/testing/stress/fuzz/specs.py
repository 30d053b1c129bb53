"""Fuzz targets: problems and other specs with junk fields, and checks of pairings.

Specs are the dataclasses of `modular_kernel.spec`. Junk is a value that probably has a wrong type
(`junk`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from hypothesis import strategies as st

from modular_kernel.catalog import check, check_all, make_kernel
from modular_kernel.spec.lora import AdapterSpec
from modular_kernel.spec.problem import (
    GATED,
    UNGATED,
    ActivationSpec,
    Combine,
    Machine,
    Parallel,
    Problem,
)
from modular_kernel.spec.quantization import QUANT_SCHEMES, list_external_schemes
from modular_kernel.testing.stress.fuzz.junk import JUNK, junk, shorten
from modular_kernel.testing.stress.fuzz.outcome import (
    CORRECT,
    INVALID_ACCEPTED,
    FuzzOutcome,
    run_or_classify,
)
from modular_kernel.testing.stress.fuzz.random_problems import (
    format_problem,
    pairings,
    problem_fields,
)
from modular_kernel.testing.stress.fuzz.target import Target, biased_bool


def _is_count(low: int) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and low <= v < 2**31


def _is_one_of(*kinds: Any) -> Callable[[Any], bool]:
    return lambda v: any(v is kind for kind in kinds)


def _is_finite_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return isfinite(float(value))
    except OverflowError:
        return False


def _starts_with(value: Any, names: tuple[str, ...]) -> bool:
    return isinstance(value, str) and value.partition(":")[0] in names


def _is_dtype(value: Any) -> bool:
    names = ("float32", "fp32", "float16", "fp16", "half", "bfloat16", "bf16")
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    return value in (names if isinstance(value, str) else dtypes)


def _is_lora(value: Any) -> bool:
    """Return whether the sizes in `value` are in range. Other errors are not detected."""
    if isinstance(value, AdapterSpec) or value == "none":
        return True
    options = value.split(",") if isinstance(value, str) else []
    sizes = {key: text for key, _, text in (option.partition("=") for option in options)}
    limits = {"adapters": 65536, "rank": 256}
    return all(
        key in sizes and sizes[key].isdigit() and 0 < int(sizes[key]) <= limit
        for key, limit in limits.items()
    )


# For each field of Problem, a predicate that returns whether the docstring of Problem allows a
# value. An allowed value may still be invalid together with the values of other fields.
FIELDS: dict[str, Callable[[Any], bool]] = {
    "tokens": _is_count(0),
    **{name: _is_count(1) for name in ("hidden", "intermediate", "experts", "top_k")},
    "dtype": _is_dtype,
    "quant": lambda v: _starts_with(v, (*QUANT_SCHEMES, *list_external_schemes())),
    "activation": lambda v: isinstance(v, ActivationSpec) or _starts_with(v, GATED + UNGATED),
    "local_experts": lambda v: v is None or _is_count(1)(v),
    "ids_dtype": _is_one_of(None, torch.int32, torch.int64),
    **{name: _is_one_of(True, False) for name in (
        "bias", "expert_map", "apply_router_weight_on_input", "inplace", "graph", "deterministic",
        "batch_invariant", "asynchronous",
    )},
    "lora": _is_lora,
    "routed_scaling_factor": _is_finite_number,
    "combine": lambda v: isinstance(v, Combine),
    "fp32_precision": lambda v: isinstance(v, str) and v in ("ieee", "tf32"),
    "chunk_tokens": lambda v: v is None or _is_count(1)(v),
    "max_received": lambda v: v is None or _is_count(1)(v),
    "parallel": lambda v: isinstance(v, Parallel),
}  # fmt: skip


@dataclass(frozen=True)
class ProblemCase:
    """A problem with some fields replaced, and the pairing with which it is checked.

    fields: fields of a valid problem.
    replaced: maps names of fields to junk or allowed values.
    parts: names of an exchange class and an experts class.
    all_pairings: whether to check every pairing instead of making a kernel.
    """

    fields: dict[str, Any]
    replaced: dict[str, Any]
    parts: tuple[str, str]
    all_pairings: bool


@st.composite
def _replaced_fields(draw: st.DrawFn) -> dict[str, Any]:
    """Draw junk or allowed values for one to three fields."""
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=3, unique=True))
    return {
        name: draw(_ALLOWED_VALUES[name] if draw(biased_bool(percent_true=40)) else junk)
        for name in names
    }


# For each field of Problem, a strategy for its allowed values.
_ALLOWED_VALUES = {
    name: st.sampled_from(list(filter(predicate, JUNK))) for name, predicate in FIELDS.items()
}
_PROBLEMS = st.builds(
    ProblemCase,
    fields=problem_fields(),
    replaced=_replaced_fields(),
    parts=pairings(),
    all_pairings=biased_bool(percent_true=10),
)


def check_problem(case: ProblemCase) -> FuzzOutcome:
    """Replace one to three fields of a valid problem, and check the result."""
    base_problem = run_or_classify("a problem", lambda: Problem(**case.fields))
    if isinstance(base_problem, FuzzOutcome):
        return base_problem
    changes = ", ".join(f"{name}={shorten(value)}" for name, value in case.replaced.items())
    description = f"{format_problem(base_problem)} with {changes}"
    problem = run_or_classify(description, lambda: replace(base_problem, **case.replaced))
    if isinstance(problem, FuzzOutcome):
        return problem
    if not all(FIELDS[name](value) for name, value in case.replaced.items()):
        return FuzzOutcome(INVALID_ACCEPTED, description)
    return _use_problem(problem, description, case)


def _use_problem(problem: Problem, description: str, case: ProblemCase) -> FuzzOutcome:
    """Hash, format and check an accepted problem, and make a kernel for it."""
    prepare, experts = case.parts

    def use_all() -> object:
        hash(problem)
        str(problem)
        verdict = check(prepare, experts, problem)
        str(verdict)
        if case.all_pairings:
            return check_all(problem)
        # Make only small kernels, because a valid problem may need all memory.
        is_small = (
            problem.tokens * problem.top_k * max(problem.hidden, problem.intermediate) < 2**20
        )
        return make_kernel(prepare, experts, problem) if is_small else verdict

    result = run_or_classify(f"{description}, {prepare} x {experts}", use_all)
    return result if isinstance(result, FuzzOutcome) else FuzzOutcome(CORRECT, description)


# Functions that make specs, and the maximum numbers of their arguments.
_SPEC_CALLS: dict[str, tuple[Callable[..., Any], int]] = {
    "ActivationSpec": (ActivationSpec, 4),
    "ActivationSpec.parse": (ActivationSpec.parse, 1),
    "Parallel": (Parallel, 3),
    "Machine": (Machine, 2),
}


@st.composite
def _spec_calls(draw: st.DrawFn) -> tuple[str, list[Any]]:
    name = draw(st.sampled_from(sorted(_SPEC_CALLS)))
    arguments = draw(st.lists(junk, min_size=1, max_size=_SPEC_CALLS[name][1]))
    if name == "ActivationSpec" and draw(biased_bool(percent_true=70)):
        arguments[0] = draw(st.sampled_from(GATED + UNGATED))
    return name, arguments


def check_spec_arguments(case: tuple[str, list[Any]]) -> FuzzOutcome:
    """Make ActivationSpec, Parallel and Machine from junk."""
    name, arguments = case
    call, _ = _SPEC_CALLS[name]
    description = f"{name}({', '.join(map(shorten, arguments))})"
    result = run_or_classify(description, lambda: call(*arguments))
    if isinstance(result, FuzzOutcome):
        return result
    if call is ActivationSpec:
        number = (int, float, type(None))
        argument_types: tuple[Any, ...] = (str, number, number, bool)
        has_valid_types = all(
            isinstance(v, kind) for v, kind in zip(arguments, argument_types, strict=False)
        )
        if not has_valid_types or any(isinstance(v, bool) for v in arguments[1:3]):
            return FuzzOutcome(INVALID_ACCEPTED, description)
    if call is Parallel and not _is_count(1)(arguments[0]):
        return FuzzOutcome(INVALID_ACCEPTED, description)
    return run_or_classify(description, lambda: FuzzOutcome(CORRECT, description + str(result)[:0]))


def check_compatibility_call(case: tuple[Any, ...]) -> FuzzOutcome:
    """Call `check` or `make_kernel` with junk as one of the arguments."""
    fields, parts, argument, value, call = case
    problem = run_or_classify("a problem", lambda: Problem(**fields))
    if isinstance(problem, FuzzOutcome):
        return problem
    arguments: list[Any] = [*parts, problem]
    options: dict[str, Any] = {}
    if argument < len(arguments):
        arguments[argument] = value
    else:
        options["machine"] = value
    description = f"{call.__name__} with {shorten(value)} as argument {argument}"
    result = run_or_classify(description, lambda: call(*arguments, **options))
    if isinstance(result, FuzzOutcome):
        return result
    is_valid = value is None and argument == 3  # argument 3 is `machine`, which may be None
    return FuzzOutcome(CORRECT if is_valid else INVALID_ACCEPTED, description)


_CHECKS = st.tuples(
    problem_fields(),
    pairings(),
    st.integers(0, 3),
    junk,
    st.sampled_from((check, make_kernel)),
)
TARGETS: tuple[Target[Any], ...] = (
    Target("problem_fields", frequency=13, cases=_PROBLEMS, check=check_problem),
    Target("spec_arguments", frequency=5, cases=_spec_calls(), check=check_spec_arguments),
    Target("compatibility_checks", frequency=7, cases=_CHECKS, check=check_compatibility_call),
)
