"""Tensor-free API: problems, activations, ranks and machines, and the compatibility checks."""

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from math import inf, isfinite, nan
from random import Random
from typing import Any

import torch

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
from modular_kernel.spec.quantization import QUANT_SCHEMES
from modular_kernel.testing.stress.fuzz.outcome import ACCEPTED, RIGHT, FuzzOutcome, run_or_outcome
from modular_kernel.testing.stress.fuzz.random_problems import describe, draw_parts, draw_problem


class Other(Enum):
    """Values that look like those of Combine."""

    SUM = "sum"


JUNK: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, -1, 3, 7, 2**31 - 1, 2**31, 2**63, 10**400, -(2**40), 0.0, -0.0,
    1.0, 2.5, nan, inf, -inf, 1e308, 1j, "", " ", "silu", "none", "sum", "false", "true", "linear",
    "ieee", "bf16", "fp8_w8a8_block:block=1x1", "fp8_w8a8_block:block=0x0",
    "int4_w4a16_group:group=3",
    "\x1b[31m", "x" * 5000, "é\u0000", b"none", [], [1], (), (1, 2), {}, {"a": 1}, set(), object(),
    int, Combine.SUM, Other.SUM, torch.float32, torch.int64, torch.bfloat16, torch.float64,
    torch.complex64, torch.strided, torch.tensor(3), torch.tensor([1, 2]), torch.device("cpu"),
    torch.ones(2, 2), torch.zeros(0, 8, dtype=torch.int32), lambda: 1, Parallel(),
    ActivationSpec(), range(3),
)  # fmt: skip


def _count(low: int) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and low <= v < 2**31


def _is(*kinds: Any) -> Callable[[Any], bool]:
    return lambda v: any(v is kind for kind in kinds)


def _number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return isfinite(float(value))
    except OverflowError:
        return False


def _text(value: Any, names: tuple[str, ...]) -> bool:
    return isinstance(value, str) and value.partition(":")[0] in names


def _a_dtype(value: Any) -> bool:
    names = ("float32", "fp32", "float16", "fp16", "half", "bfloat16", "bf16")
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    return value in (names if isinstance(value, str) else dtypes)


def _is_lora(value: Any) -> bool:
    """Return whether the sizes in the text are in range; it may still repeat an option."""
    if isinstance(value, AdapterSpec) or value == "none":
        return True
    words = value.split(",") if isinstance(value, str) else []
    sizes = {key: text for key, _, text in (word.partition("=") for word in words)}
    limits = {"adapters": 65536, "rank": 256}
    return all(
        key in sizes and sizes[key].isdigit() and 0 < int(sizes[key]) <= top
        for key, top in limits.items()
    )


# Allowed values of each field by the docstring of Problem. An allowed value may still contradict
# another field.
FIELDS: dict[str, Callable[[Any], bool]] = {
    "tokens": _count(0),
    **{name: _count(1) for name in ("hidden", "intermediate", "experts", "top_k")},
    "dtype": _a_dtype,
    "quant": lambda v: _text(v, tuple(QUANT_SCHEMES)),
    "activation": lambda v: isinstance(v, ActivationSpec) or _text(v, GATED + UNGATED),
    "local_experts": lambda v: v is None or _count(1)(v),
    "ids_dtype": _is(None, torch.int32, torch.int64),
    **{name: _is(True, False) for name in (
        "bias", "expert_map", "apply_router_weight_on_input", "inplace", "graph", "deterministic",
        "batch_invariant", "asynchronous",
    )},
    "lora": _is_lora,
    "routed_scaling_factor": _number,
    "combine": lambda v: isinstance(v, Combine),
    "fp32_precision": lambda v: isinstance(v, str) and v in ("ieee", "tf32"),
    "chunk_tokens": lambda v: v is None or _count(1)(v),
    "max_received": lambda v: v is None or _count(1)(v),
    "parallel": lambda v: isinstance(v, Parallel),
}  # fmt: skip


def shorten(value: Any) -> str:
    """Format a value in a few characters."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an int of {value.bit_length()} bits"
    short = isinstance(value, str | int | float | type(None))
    return repr(value)[:40] if short else str(type(value))


def _value(name: str, rng: Random) -> Any:
    """Return junk, or an allowed value of the field."""
    return rng.choice(list(filter(FIELDS[name], JUNK)) if rng.random() < 0.4 else JUNK)


def problem_fields(rng: Random) -> FuzzOutcome:
    """Check a valid problem with junk in one to three fields."""
    base = run_or_outcome("a problem", lambda: draw_problem(rng))
    if isinstance(base, FuzzOutcome):
        return base
    names = rng.sample(sorted(FIELDS), rng.choice((1, 1, 2, 3)))
    junk = {name: _value(name, rng) for name in names}
    words = ", ".join(f"{name}={shorten(value)}" for name, value in junk.items())
    what = f"{describe(base)} with {words}"
    problem = run_or_outcome(what, lambda: replace(base, **junk))
    if isinstance(problem, FuzzOutcome):
        return problem
    if not all(FIELDS[name](value) for name, value in junk.items()):
        return FuzzOutcome(ACCEPTED, what)
    return _use_problem(problem, what, rng)


def _use_problem(problem: Problem, what: str, rng: Random) -> FuzzOutcome:
    """Hash, print, check and compose an accepted problem."""
    prepare, experts = draw_parts(rng)

    def use() -> object:
        hash(problem)
        str(problem)
        judged = check(prepare, experts, problem)
        str(judged)
        if rng.random() < 0.1:
            return check_all(problem)
        # Only small ones: a valid problem may need all memory.
        small = problem.tokens * problem.top_k * max(problem.hidden, problem.intermediate) < 2**20
        return make_kernel(prepare, experts, problem) if small else judged

    result = run_or_outcome(f"{what}, {prepare} x {experts}", use)
    return result if isinstance(result, FuzzOutcome) else FuzzOutcome(RIGHT, what)


def small_facts(rng: Random) -> FuzzOutcome:
    """Make ActivationSpec, Parallel and Machine from junk."""
    calls: tuple[tuple[Callable[..., Any], int], ...] = (
        (ActivationSpec, 4),
        (ActivationSpec.parse, 1),
        (Parallel, 3),
        (Machine, 2),
    )
    call, max_arguments = rng.choice(calls)
    arguments = [rng.choice(JUNK) for _ in range(rng.randint(1, max_arguments))]
    if call is ActivationSpec and rng.random() < 0.7:
        arguments[0] = rng.choice(GATED + UNGATED)
    what = f"{call.__qualname__}({', '.join(map(shorten, arguments))})"
    result = run_or_outcome(what, lambda: call(*arguments))
    if isinstance(result, FuzzOutcome):
        return result
    if call is ActivationSpec:
        number = (int, float, type(None))
        fits: tuple[Any, ...] = (str, number, number, bool)
        has_valid_types = all(isinstance(v, kind) for v, kind in zip(arguments, fits, strict=False))
        if not has_valid_types or any(isinstance(v, bool) for v in arguments[1:3]):
            return FuzzOutcome(ACCEPTED, what)
    if call is Parallel and not _count(1)(arguments[0]):
        return FuzzOutcome(ACCEPTED, what)
    return run_or_outcome(what, lambda: FuzzOutcome(RIGHT, what + str(result)[:0]))


def compatibility_checks(rng: Random) -> FuzzOutcome:
    """Call check and make_kernel with junk in place of any argument."""
    problem = run_or_outcome("a problem", lambda: draw_problem(rng))
    if isinstance(problem, FuzzOutcome):
        return problem
    arguments: list[Any] = [*draw_parts(rng), problem]
    options: dict[str, Any] = {}
    place = rng.randrange(4)
    value = rng.choice(JUNK)
    if place < 3:
        arguments[place] = value
    else:
        options["machine"] = value
    call = rng.choice((check, make_kernel))
    what = f"{call.__name__} with {shorten(value)} as argument {place}"
    result = run_or_outcome(what, lambda: call(*arguments, **options))
    if isinstance(result, FuzzOutcome):
        return result
    fits = value is None and place == 3
    return FuzzOutcome(RIGHT if fits else ACCEPTED, what)
