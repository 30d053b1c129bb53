"""Fuzz targets: kernel calls with valid arguments, with one argument changed, and with NaN.

The kernel consists of a random exchange class and a random experts class. Other targets also use
`build_call` and `check_call`.
"""

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from modular_kernel.catalog import make_kernel
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.spec.problem import Problem
from modular_kernel.testing.stress.fuzz.call_changes import ALL, CHANGES
from modular_kernel.testing.stress.fuzz.independent_reference import IndependentReference
from modular_kernel.testing.stress.fuzz.outcome import (
    CORRECT,
    INVALID_ACCEPTED,
    LATE_ERROR,
    TYPED_ERROR,
    WRONG_RESULT,
    FuzzOutcome,
    run_or_classify,
)
from modular_kernel.testing.stress.fuzz.random_problems import (
    CallInputs,
    InputChoices,
    format_problem,
    input_choices,
    make_inputs,
    pairings,
    problem_fields,
)
from modular_kernel.testing.stress.fuzz.target import Target, biased_bool

_MODES = ("call", "call", "plan", "twice", "start", "inference", "default64")


@dataclass(frozen=True)
class CallCase:
    """A kernel and the inputs of one call.

    Attributes:
        parts: names of the exchange class and the experts class.
        fields: fields of the problem.
        inputs: parameters from which the inputs are made.
        mode: how the call is made; one of _MODES.
        change: name of a change in `call_changes.ALL`; "" for none.
        tensor_index: selects the changed tensor if several can be changed.
    """

    parts: tuple[str, str]
    fields: dict[str, Any]
    inputs: InputChoices
    mode: str = "call"
    change: str = ""
    tensor_index: int = 0


def call_cases(
    modes: tuple[str, ...] = _MODES, changes: tuple[str, ...] = ("",)
) -> st.SearchStrategy[CallCase]:
    """Return a strategy for kernels and the inputs of a call."""
    return st.builds(
        CallCase,
        parts=pairings(),
        fields=problem_fields(),
        inputs=input_choices(),
        mode=st.sampled_from(modes),
        change=st.sampled_from(changes),
        tensor_index=st.integers(0, 59),
    )


def build_call(case: CallCase) -> tuple[FusedMoEModularKernel, str, CallInputs] | FuzzOutcome:
    """Return (kernel, description, inputs), or an outcome if the problem or kernel is refused."""
    problem = run_or_classify("a problem", lambda: Problem(**case.fields))
    if isinstance(problem, FuzzOutcome):
        return problem
    description = f"{' x '.join(case.parts)}, {format_problem(problem)}"
    kernel = run_or_classify(description, lambda: make_kernel(*case.parts, problem))
    if isinstance(kernel, FuzzOutcome):
        return kernel
    return kernel, description, make_inputs(kernel.problem, case.inputs)


def check_valid_call(case: CallCase) -> FuzzOutcome:
    """Call a kernel with valid inputs. The output must be correct."""
    call_or_outcome = build_call(case)
    if isinstance(call_or_outcome, FuzzOutcome):
        return call_or_outcome
    kernel, description, inputs = call_or_outcome
    description = f"{case.mode} of {description} with T={len(inputs.x_TH)}"
    return check_call(kernel, inputs, case.mode, description, refusable=False)


def check_changed_call(case: CallCase) -> FuzzOutcome:
    """Call a kernel with one change of the arguments.

    Depending on the change, the call must be refused, or may be refused or computed correctly.
    """
    call_or_outcome = build_call(case)
    if isinstance(call_or_outcome, FuzzOutcome):
        return call_or_outcome
    kernel, description, inputs = call_or_outcome
    change, must_refuse = CHANGES[case.change]
    description = f"{case.mode} of {description} with T={len(inputs.x_TH)}, {case.change}"
    try:
        changed = change(inputs, kernel.problem, case.tensor_index)
    except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError):
        return FuzzOutcome(CORRECT, f"{description}: no such tensor can be made")
    if changed is None:
        return check_call(kernel, inputs, case.mode, description, refusable=False)
    grad_mode = torch.enable_grad() if case.change == "requires grad" else torch.no_grad()
    with grad_mode:
        if not must_refuse:
            return check_call(kernel, changed, case.mode, description, refusable=True)
        started = _record_starts(kernel)
        result = run_or_classify(
            description, lambda: _run_call(kernel, changed, case.mode, started)
        )
    if not isinstance(result, FuzzOutcome):
        return FuzzOutcome(INVALID_ACCEPTED, description)
    return (
        FuzzOutcome(LATE_ERROR, description) if result.kind == TYPED_ERROR and started else result
    )


def check_nan_call(case: tuple[CallCase, bool]) -> FuzzOutcome:
    """Put NaN into the first token, or into the router weights of skipped pairs.

    Rows that do not depend on the NaN must be correct. A skipped pair is a (token, expert) pair
    whose id is invalid, or whose expert is not on this rank.

    case: (call, whether the first token is NaN; otherwise, the router weights are).
    """
    call, is_first_token_nan = case
    call_or_outcome = build_call(call)
    if isinstance(call_or_outcome, FuzzOutcome):
        return call_or_outcome
    kernel, description, inputs = call_or_outcome
    if len(inputs.x_TH) == 0:
        return FuzzOutcome(CORRECT, description)
    reference = IndependentReference(
        kernel.problem, inputs.x_TH.clone(), inputs.weights, inputs.routing
    )
    rows = slice(None)
    if is_first_token_nan and kernel.problem.scheme.activation_granularity != "tensor":
        inputs.x_TH[0] = torch.nan
        rows, description = slice(1, None), f"{description}, the first token is NaN"
    else:
        ids_TK = inputs.routing.topk_ids_TK
        is_skipped_TK = (ids_TK < 0) | (ids_TK >= kernel.problem.experts)
        if inputs.weights.expert_map is not None:
            is_skipped_TK |= (
                inputs.weights.expert_map[ids_TK.clamp(0, kernel.problem.experts - 1).long()] < 0
            )
        router_weights_TK = inputs.routing.topk_weights_TK.masked_fill(is_skipped_TK, torch.nan)
        inputs = replace(inputs, routing=replace(inputs.routing, topk_weights_TK=router_weights_TK))
        description = f"{description}, router weights of skipped pairs are NaN"
    result = run_or_classify(
        description, lambda: kernel(inputs.x_TH, inputs.weights, inputs.routing)
    )
    if isinstance(result, FuzzOutcome):
        return (
            result
            if result.kind != TYPED_ERROR
            else FuzzOutcome(WRONG_RESULT, f"{description}: refused")
        )
    mismatch = reference.find_mismatch(result, rows=rows)
    return (
        FuzzOutcome(WRONG_RESULT, f"{description}: {mismatch}")
        if mismatch
        else FuzzOutcome(CORRECT, description)
    )


def check_call(
    kernel: FusedMoEModularKernel,
    inputs: CallInputs,
    mode: str,
    description: str,
    *,
    refusable: bool,
) -> FuzzOutcome:
    """Make a call and compare its output with the independent reference.

    refusable: whether a typed error is also acceptable.
    """
    # Copy x, because an inplace call overwrites it.
    original = replace(inputs, x_TH=inputs.x_TH.clone())
    reference = IndependentReference(
        kernel.problem, original.x_TH, original.weights, original.routing
    )
    started = _record_starts(kernel)
    result = run_or_classify(description, lambda: _run_call(kernel, inputs, mode, started))
    if isinstance(result, FuzzOutcome):
        if result.kind != TYPED_ERROR:
            return result
        if started:
            return FuzzOutcome(LATE_ERROR, description)
        return (
            result
            if refusable
            else FuzzOutcome(WRONG_RESULT, f"{description}: a valid call was refused")
        )
    mismatch = reference.find_mismatch(result)
    return (
        FuzzOutcome(WRONG_RESULT, f"{description}: {mismatch}")
        if mismatch
        else FuzzOutcome(CORRECT, description)
    )


def _record_starts(kernel: FusedMoEModularKernel) -> list[str]:
    """Return a list to which each call adds an entry when it has passed validation.

    A call that has passed validation must not raise a typed error.
    """
    started: list[str] = []
    original = kernel.start_checked

    def record_start(*arguments: Any, **options: Any) -> Any:
        started.append("started")
        return original(*arguments, **options)

    kernel.start_checked = record_start  # type: ignore[method-assign]
    return started


def _run_call(
    kernel: FusedMoEModularKernel, inputs: CallInputs, mode: str, started: list[str]
) -> torch.Tensor:
    """Make one call; return its output. Mode "twice" returns the output of a plan's second call."""
    arguments = (inputs.x_TH, inputs.weights, inputs.routing)
    if mode == "plan":
        return kernel.plan()(*arguments, out=inputs.out)
    if mode == "twice":
        plan, problem = kernel.plan(), kernel.problem
        if problem.tokens:  # make a different call first
            other_inputs = make_inputs(problem, InputChoices())
            plan(other_inputs.x_TH, other_inputs.weights, other_inputs.routing)
            started.clear()
        return plan(*arguments, out=inputs.out)
    if mode == "start":
        return kernel.start(*arguments, out=inputs.out).finish()
    with contextlib.ExitStack() as stack:
        if mode == "inference":
            stack.enter_context(torch.inference_mode())
        if mode == "default64":
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        return kernel(*arguments, out=inputs.out)


_CHANGED_CALLS = call_cases(
    ("call", "plan", "twice", "start"), changes=tuple(name for name, *_ in ALL)
)
# A lazily negated expert_map has values that are not row indices of the weights.
_NEGATED_MAP = CallCase(
    ("MoEPrepareAndFinalizeNoEP", "TorchExperts"),
    {"tokens": 2, "hidden": 8, "intermediate": 8, "experts": 3, "top_k": 1, "local_experts": 2,
     "expert_map": True, "dtype": torch.float32},
    InputChoices(),
    change="a weight negated",
    tensor_index=2,
)  # fmt: skip
TARGETS: tuple[Target[Any], ...] = (
    Target("right_call", 18, call_cases(), check_valid_call, launches=True),
    Target(
        "changed_call",
        23,
        _CHANGED_CALLS,
        check_changed_call,
        launches=True,
        examples=(_NEGATED_MAP,),
    ),
    Target(
        "nan_call",
        5,
        st.tuples(call_cases(("call",)), biased_bool(percent_true=50)),
        check_nan_call,
        launches=True,
    ),
)
