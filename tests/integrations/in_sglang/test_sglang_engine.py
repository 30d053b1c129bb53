"""Verdicts about SGLang's own MoE runners on a CPU, and about functions with known faults.

The functions run in child processes, as in `mk test --engine sglang`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_programs import check_faulty_classes, check_reproducers, make_program

from modular_kernel.integrations.engine import EngineCase, Kind, Outcome, Promise
from modular_kernel.integrations.sglang.classes import ACTIVATIONS, make_environment
from modular_kernel.spec.problem import Problem
from modular_kernel.testing.engines.processes import (
    EngineProcess,
    EngineProgram,
    TimeLimits,
    run_reproducer,
)

BASE = Problem(tokens=17, hidden=64, intermediate=32, experts=8, top_k=2)
WIDE = replace(BASE, hidden=256, intermediate=128)
FUSED, CORE = "fused_experts_none_to_triton", "TritonRunnerCore"
NATIVE, GATHERED = "moe_forward_native", "fused_moe_forward_native"
SPLIT, LIMIT = "silu with alpha and limit, not interleaved", "silu with limit"
# Classes and problems of each scheme whose verdict is RIGHT.
RIGHT = (
    (FUSED, BASE),
    (FUSED, replace(BASE, bias=True)),
    (FUSED, replace(BASE, dtype=torch.float32, fp32_precision="tf32")),
    (FUSED, replace(WIDE, quant="fp8_w8a8_tensor")),
    (FUSED, replace(WIDE, quant="fp8_w8a8_tensor:static=true")),
    (FUSED, replace(WIDE, quant="fp8_w8a8_channel")),
    (CORE, BASE),
    (CORE, replace(WIDE, quant="fp8_w8a8_block")),
    (CORE, replace(WIDE, quant="int8_w8a8_channel")),
    (FUSED, replace(WIDE, quant="int8_w8a16_group")),
    (FUSED, replace(WIDE, quant="int4_w4a16_group:group=32")),
    (NATIVE, BASE),
    (NATIVE, replace(BASE, bias=True)),
    (GATHERED, replace(BASE, tokens=1)),
)
# Classes, and activations and biases that the class ignores although SGLang's layer accepts them.
WRONG = (
    (CORE, SPLIT, False),
    (NATIVE, SPLIT, False),
    (NATIVE, LIMIT, False),
    (GATHERED, "silu with alpha and limit", False),
    (GATHERED, LIMIT, False),
    (GATHERED, "situ with limit", False),
    (GATHERED, "silu", True),
)


def make_case(experts: str, activation: str = "silu", problem: Problem = BASE) -> EngineCase:
    spec = ACTIVATIONS[activation][1]
    return EngineCase(experts, activation, replace(problem, activation=spec))


@pytest.fixture(scope="module")
def program() -> EngineProgram:
    """Return the program of SGLang with faulty functions."""
    return make_program("sglang_faulty_engine", make_environment(has_gpu=False))


@pytest.fixture(scope="module")
def process(program: EngineProgram) -> Iterator[EngineProcess]:
    with EngineProcess(program, TimeLimits()) as process:
        yield process


def test_description(process: EngineProcess) -> None:
    from sglang.srt.layers.moe.utils import MoeRunnerBackend

    description = process.description
    assert (description.engine, description.version) == ("sglang", "0.5.23")
    assert len(description.notes) == 1
    classes = {c.name: c for c in description.classes}
    assert {FUSED, CORE, NATIVE, GATHERED} <= {n for n, c in classes.items() if not c.unavailable}
    assert classes[NATIVE].schemes == ("none",)
    assert classes[NATIVE].refused["fp8_w8a8_channel"] == "W8A8FP8MoEMethod never calls it"
    assert len(classes[FUSED].schemes) == 10
    assert classes["DeepGemmRunnerCore"].unavailable == "it needs a GPU"
    assert classes["lora_triton"].unavailable == "the check does not know it"
    assert len(classes) >= len(MoeRunnerBackend)


def test_classes_are_sglang_s() -> None:
    from modular_kernel.integrations.sglang.v0_5_23_classes import _PACKAGE_DIRECTORY, RUNNERS

    for name, runner in RUNNERS.items():
        path = _PACKAGE_DIRECTORY.joinpath("srt/layers/moe", *runner.module.split("."))
        source = path.with_suffix(".py").read_text()
        is_module = name == path.name
        assert is_module or f"def {name}(" in source or f"class {name}(" in source, name


@pytest.mark.parametrize(("experts", "problem"), RIGHT, ids=str)
def test_right_classes(experts: str, problem: Problem, process: EngineProcess) -> None:
    outcome = process.judge(EngineCase(experts, "silu", problem))
    assert outcome.kind is Kind.RIGHT, outcome
    assert outcome.error is not None
    assert outcome.error > 0


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, process: EngineProcess) -> None:
    outcome = process.judge(make_case(FUSED, name))
    assert outcome.kind is Kind.RIGHT, outcome


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 1},
        {"experts": 64, "top_k": 8, "tokens": 1},
        {"experts": 16, "local_experts": 8, "expert_map": True, "top_k": 8},
        {"top_k": 1, "apply_router_weight_on_input": True},
        {"hidden": 104, "intermediate": 40},
    ],
    ids=str,
)
@pytest.mark.parametrize("experts", [FUSED, CORE])
def test_kinds_of_calls(experts: str, changes: dict[str, Any], process: EngineProcess) -> None:
    outcome = process.judge(EngineCase(experts, "silu", replace(BASE, **changes)))
    assert outcome.kind is Kind.RIGHT, outcome


@pytest.mark.parametrize(("experts", "activation", "bias"), WRONG)
def test_options_that_a_class_ignores(
    experts: str, activation: str, bias: bool, process: EngineProcess
) -> None:
    outcome = process.judge(make_case(experts, activation, replace(BASE, bias=bias)))
    assert outcome.kind is Kind.WRONG, outcome
    assert outcome.error is not None
    assert outcome.error > 0.2
    assert outcome.reproducer.startswith(f"# {experts}, none, {activation}, T17")


def test_int8_is_truncated_in_blocks(process: EngineProcess) -> None:
    """SGLang's kernels that quantize activations in groups round int8 toward zero."""
    problem = replace(WIDE, quant="int8_w8a8_block")
    outcome = process.judge(EngineCase(FUSED, "silu", problem))
    assert outcome.kind is Kind.WRONG, outcome
    assert outcome.error is not None
    assert outcome.bound is not None
    assert outcome.error > 1.3 * outcome.bound


@pytest.mark.timeout(600)
def test_reproducers(program: EngineProgram) -> None:
    right_cases = [EngineCase(experts, "silu", problem) for experts, problem in RIGHT]
    right_cases.append(
        EngineCase(FUSED, "silu", replace(BASE, experts=16, local_experts=8, expert_map=True))
    )
    right_cases.append(
        EngineCase(FUSED, "silu", replace(BASE, top_k=1, apply_router_weight_on_input=True))
    )
    right_cases += [make_case(FUSED, activation) for activation in ACTIVATIONS]
    wrong_cases = [make_case(e, activation, replace(BASE, bias=b)) for e, activation, b in WRONG]
    check_reproducers(program, right_cases, wrong_cases)


def test_a_reproducer_as_users_run_it(process: EngineProcess) -> None:
    """A reproducer needs only SGLang, torch, and the plugin's replacements for a CPU."""
    reproducer = process.judge(make_case(CORE, SPLIT)).reproducer
    program = EngineProgram(
        "modular_kernel.integrations.sglang.classes", make_environment(has_gpu=False)
    )
    status, output = run_reproducer(program, reproducer, 280)
    assert (status, output.partition(" error ")[0]) == (1, "relative RMS"), output


@pytest.mark.parametrize("promise", Promise)
@pytest.mark.parametrize("experts", [FUSED, CORE])
def test_promises_that_the_triton_runner_keeps(
    experts: str, promise: Promise, process: EngineProcess
) -> None:
    outcome = process.judge(EngineCase(experts, "silu", BASE, promise=promise))
    assert outcome.kind is Kind.RIGHT, outcome


@pytest.mark.parametrize("promise", [Promise.SKIPPED_IDS, Promise.NO_TOKENS])
def test_promises_that_torch_code_breaks(promise: Promise, process: EngineProcess) -> None:
    outcome = process.judge(EngineCase(NATIVE, "silu", BASE, promise=promise))
    assert outcome.kind in (Kind.CRASHED, Kind.WRONG), outcome


def test_memory_that_is_read_before_it_is_written(process: EngineProcess) -> None:
    case = EngineCase("ReadingMemory", "silu", BASE, promise=Promise.WORKSPACE)
    outcome = process.judge(case)
    assert outcome.kind is Kind.WRONG
    assert "values are not finite" in outcome.detail


def test_refusals_quote_sglang(process: EngineProcess) -> None:
    outcome = process.judge(make_case(NATIVE, "gelu_tanh"))
    assert outcome.kind is Kind.REFUSED
    assert outcome.detail.startswith("Unsupported activation: ")
    outcome = process.judge(EngineCase("OtherBackend", "silu", BASE))
    assert outcome == Outcome(Kind.REFUSED, "SGLang selects the runner triton for this layer")
    problem = replace(WIDE, quant="fp8_w8a8_channel", bias=True)
    outcome = process.judge(EngineCase(FUSED, "silu", problem))
    reason = "the layer of W8A8FP8MoEMethod has no parameter w13_weight_bias"
    assert outcome == Outcome(Kind.REFUSED, reason)


@pytest.mark.timeout(600)  # Several processes load SGLang.
def test_faulty_classes(program: EngineProgram) -> None:
    names = "WrongActivation", "Raising", "Aborting", "Hanging", "MissingOperator", GATHERED
    cases = [EngineCase(name, "silu", replace(BASE, tokens=1)) for name in names]
    outcomes = check_faulty_classes(program, cases, {GATHERED: Kind.RIGHT})
    assert outcomes["Raising"].detail.startswith("RuntimeError: invalid tile (sglang_faulty_engine")
