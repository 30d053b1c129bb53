"""Kernel calls with valid arguments, with one argument changed, and with NaN."""

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from modular_kernel.catalog import make_kernel
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.spec.problem import Problem
from modular_kernel.testing.stress.fuzz.call_changes import ALL, CHANGES
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
    InputChoices,
    describe,
    input_choices,
    make_inputs,
    pairings,
    problem_fields,
)
from modular_kernel.testing.stress.fuzz.target import Target, chance

_MODES = ("call", "call", "plan", "twice", "start", "inference", "default64")


@dataclass(frozen=True)
class CallCase:
    """A kernel and the inputs of one call.

    mode: how it is called. change: name of a change of ALL, "" for none. place: which of several
    tensors is changed.
    """

    parts: tuple[str, str]
    fields: dict[str, Any]
    inputs: InputChoices
    mode: str = "call"
    change: str = ""
    place: int = 0


def call_cases(
    modes: tuple[str, ...] = _MODES, changes: tuple[str, ...] = ("",)
) -> st.SearchStrategy[CallCase]:
    """Return a strategy for kernels and inputs."""
    return st.builds(
        CallCase,
        parts=pairings(),
        fields=problem_fields(),
        inputs=input_choices(),
        mode=st.sampled_from(modes),
        change=st.sampled_from(changes),
        place=st.integers(0, 59),
    )


def build_call(case: CallCase) -> tuple[FusedMoEModularKernel, str, CallInputs] | FuzzOutcome:
    """Return the kernel, its description and inputs for it; or the outcome if it is refused."""
    problem = run_or_outcome("a problem", lambda: Problem(**case.fields))
    if isinstance(problem, FuzzOutcome):
        return problem
    what = f"{' x '.join(case.parts)}, {describe(problem)}"
    kernel = run_or_outcome(what, lambda: make_kernel(*case.parts, problem))
    if isinstance(kernel, FuzzOutcome):
        return kernel
    return kernel, what, make_inputs(kernel.problem, case.inputs)


def right_call(case: CallCase) -> FuzzOutcome:
    """Call a compatible pairing with valid inputs: the output must be correct."""
    built = build_call(case)
    if isinstance(built, FuzzOutcome):
        return built
    kernel, what, inputs = built
    what = f"{case.mode} of {what} with T={len(inputs.x_TH)}"
    return check_call(kernel, inputs, case.mode, what, refusable=False)


def changed_call(case: CallCase) -> FuzzOutcome:
    """Make such a call with one thing changed."""
    built = build_call(case)
    if isinstance(built, FuzzOutcome):
        return built
    kernel, what, inputs = built
    change, must_refuse = CHANGES[case.change]
    what = f"{case.mode} of {what} with T={len(inputs.x_TH)}, {case.change}"
    try:
        changed = change(inputs, kernel.problem, case.place)
    except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError):
        return FuzzOutcome(RIGHT, f"{what}: no such tensor can be made")
    if changed is None:
        return check_call(kernel, inputs, case.mode, what, refusable=False)
    grad = torch.enable_grad() if case.change == "requires grad" else torch.no_grad()
    with grad:
        if not must_refuse:
            return check_call(kernel, changed, case.mode, what, refusable=True)
        started = _record_starts(kernel)
        result = run_or_outcome(what, lambda: _run_call(kernel, changed, case.mode, started))
    if not isinstance(result, FuzzOutcome):
        return FuzzOutcome(ACCEPTED, what)
    return FuzzOutcome(LATE, what) if result.kind == TYPED and started else result


def nan_call(case: tuple[CallCase, bool]) -> FuzzOutcome:
    """Put NaN into one token's x, or into the weights of skipped pairs: other rows stay correct."""
    call, first_token = case
    built = build_call(call)
    if isinstance(built, FuzzOutcome):
        return built
    kernel, what, inputs = built
    if len(inputs.x_TH) == 0:
        return FuzzOutcome(RIGHT, what)
    oracle = Oracle(kernel.problem, inputs.x_TH.clone(), inputs.weights, inputs.routing)
    rows = slice(None)
    if first_token and kernel.problem.scheme.activation_granularity != "tensor":
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


def check_call(
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
            other = make_inputs(problem, InputChoices())
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


_CHANGED = call_cases(("call", "plan", "twice", "start"), changes=tuple(name for name, *_ in ALL))
# A map lazily negated names rows that the weights do not have.
_NEGATED_MAP = CallCase(
    ("MoEPrepareAndFinalizeNoEP", "TorchExperts"),
    {"tokens": 2, "hidden": 8, "intermediate": 8, "experts": 3, "top_k": 1, "local_experts": 2,
     "expert_map": True, "dtype": torch.float32},
    InputChoices(),
    change="a weight negated",
    place=2,
)  # fmt: skip
TARGETS: tuple[Target[Any], ...] = (
    Target("right_call", 18, call_cases(), right_call, launches=True),
    Target("changed_call", 23, _CHANGED, changed_call, launches=True, examples=(_NEGATED_MAP,)),
    Target("nan_call", 5, st.tuples(call_cases(("call",)), chance(50)), nan_call, launches=True),
)
