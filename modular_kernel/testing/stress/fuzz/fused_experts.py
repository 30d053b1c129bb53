"""Fuzz target: calls of `fused_experts`, with or without a junk argument.

`modular_kernel.integrations.fused_moe.fused_experts` has the signature of SGLang's function.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from modular_kernel.spec.problem import ActivationSpec, Combine, Problem
from modular_kernel.testing.stress.fuzz.independent_reference import IndependentReference
from modular_kernel.testing.stress.fuzz.junk import JUNK, shorten
from modular_kernel.testing.stress.fuzz.outcome import (
    CORRECT,
    INVALID_ACCEPTED,
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

_MODULE = "modular_kernel.integrations.fused_moe"
_UNKNOWN_OPTIONS = ("use_fp8", "w2_bias", "b3", "global_num_experts", "use_int4_w4a8", "W1_scale")
_CONFIG_FIELDS = (
    "activation",
    "apply_router_weight_on_input",
    "inplace",
    "no_combine",
    "routed_scaling_factor",
)
_OPTIONS = ("b1", "w1_scale", "expert_map", "a1_scale", "block_shape")
# Schemes without a `use_*` flag.
_SCHEMES_WITHOUT_FLAG = (
    *("mxfp4_w4a16", "nvfp4_w4a16"),
    *("fp8_w8a16_tensor", "fp8_w8a16_channel", "fp8_w8a16_block"),
)


@dataclass(frozen=True)
class FusedCase:
    """A call of fused_experts.

    Attributes:
        fields: fields of the problem.
        inputs: parameters from which the inputs are made.
        activation_as_text: whether the activation is passed as text.
        junk: (kind of argument, its name or position, value), or None.
    """

    fields: dict[str, Any]
    inputs: InputChoices
    activation_as_text: bool
    junk: tuple[str, Any, Any] | None


@st.composite
def _junk_arguments(draw: st.DrawFn) -> tuple[str, Any, Any]:
    values = [v for v in JUNK if v is not None and not isinstance(v, bool)]
    kind = draw(st.sampled_from(("unknown", "config", "argument", "option")))
    if kind == "unknown":
        return kind, draw(st.sampled_from(_UNKNOWN_OPTIONS)), True
    if kind == "config":
        name = draw(st.sampled_from(_CONFIG_FIELDS))
        # Flags accept only bools, the activation also accepts text, and the factor accepts any
        # finite number.
        valid_types = (int, float, *((ActivationSpec,) if name == "activation" else ()))
        invalid = [v for v in values if not isinstance(v, valid_types) and v != "silu"]
        return kind, name, draw(st.sampled_from(invalid))
    if kind == "argument":
        position = draw(st.integers(0, 3))
        # A tensor in JUNK may be a valid x, which is at position 0.
        valid_types_of_x = (torch.Tensor,) if position == 0 else ()
        return (
            kind,
            position,
            draw(st.sampled_from([v for v in values if not isinstance(v, valid_types_of_x)])),
        )
    # (1, 2) may be a valid block shape for a matrix with one row.
    invalid = [v for v in values if not isinstance(v, torch.Tensor) and v != (1, 2)]
    return kind, draw(st.sampled_from(_OPTIONS)), draw(st.sampled_from(invalid))


def check_fused_experts(case: FusedCase) -> FuzzOutcome:
    """Call `fused_experts` on a random problem, with or without a junk argument."""
    problem = run_or_classify("a problem", lambda: _make_problem(case.fields))
    if isinstance(problem, FuzzOutcome):
        return problem
    inputs = make_inputs(problem, case.inputs)
    config: dict[str, Any] = {
        "activation": str(problem.activation) if case.activation_as_text else problem.act,
        "apply_router_weight_on_input": problem.apply_router_weight_on_input,
        "inplace": problem.inplace,
        "no_combine": problem.combine is not Combine.SUM,
        "no_combine_keep_router_weight": problem.combine is Combine.TOPK_WEIGHTED,
        "routed_scaling_factor": problem.routed_scaling_factor,
    }
    options: dict[str, Any] = _make_quant_options(problem)
    option_names = {"w1_zero_point": "w1_zp", "w2_zero_point": "w2_zp"}
    options |= {
        option_names.get(name, name): tensor
        for name, tensor in vars(inputs.weights).items()
        if name not in ("w1", "w2") and tensor is not None
    }
    routing = (inputs.routing.topk_weights_TK, inputs.routing.topk_ids_TK, None)
    arguments: list[Any] = [inputs.x_TH, inputs.weights.w1, inputs.weights.w2, routing]
    description = f"fused_experts of {format_problem(problem)}"
    if case.junk:
        kind, position, value = case.junk
        changed_arguments: Any = {"config": config, "argument": arguments}.get(kind, options)
        changed_arguments[position] = value
        description += f" with {shorten(value)} as {kind} {position}"
    reference = IndependentReference(problem, inputs.x_TH.clone(), inputs.weights, inputs.routing)

    def call() -> torch.Tensor:
        runner_config = import_object(f"{_MODULE}:MoeRunnerConfig")(**config)
        result: torch.Tensor = import_object(f"{_MODULE}:fused_experts")(
            *arguments, runner_config, **options
        )
        return result

    result = run_or_classify(description, call)
    if isinstance(result, FuzzOutcome):
        return result
    if case.junk:
        return FuzzOutcome(INVALID_ACCEPTED, description)
    mismatch = reference.find_mismatch(result)
    return (
        FuzzOutcome(WRONG_RESULT, f"{description}: {mismatch}")
        if mismatch
        else FuzzOutcome(CORRECT, description)
    )


def _make_problem(fields: dict[str, Any]) -> Problem:
    """Make a problem that the arguments of fused_experts can express."""
    problem = Problem(**fields)
    if problem.scheme.name in _SCHEMES_WITHOUT_FLAG:
        problem = replace(problem, quant="none")
    if problem.combine is not Combine.SUM:  # only summed rows can be scaled
        problem = replace(problem, routed_scaling_factor=1.0)
    return replace(problem, chunk_tokens=None, local_experts=None, expert_map=False)


def _make_quant_options(problem: Problem) -> dict[str, Any]:
    scheme = problem.scheme
    if not scheme.quantized:
        return {}
    options: dict[str, Any] = {f"use_{scheme.name.rsplit('_', 1)[0]}": True}
    if scheme.granularity == "channel":
        options["per_channel_quant"] = True
    elif scheme.granularity in ("block", "group"):
        options["block_shape"] = [0, *scheme.group][-2:]
    return options


_CASES = st.builds(
    FusedCase,
    fields=problem_fields(),
    inputs=input_choices(),
    activation_as_text=st.booleans(),
    junk=st.one_of(st.none(), _junk_arguments()),
)
TARGETS: tuple[Target[Any], ...] = (
    Target("fused_experts", 8, _CASES, check_fused_experts, launches=True),
)
