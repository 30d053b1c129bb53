"""Verdicts about vLLM's own experts classes on a CPU, and about classes with known faults.

The classes run in child processes, as in `mk test --engine vllm`.
"""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_programs import (
    MAX_STATEMENTS,
    check_faulty_classes,
    check_reproducers,
    count_statements,
    make_program,
)
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from modular_kernel.integrations.engine import EngineCase, Kind, Outcome, Promise
from modular_kernel.integrations.vllm.classes import (
    ACTIVATIONS,
    make_activation_spec,
    make_environment,
)
from modular_kernel.integrations.vllm.reproducer import Source, write_reproducer
from modular_kernel.integrations.vllm.v0_33_classes import CheckpointLayer, make_module
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights
from modular_kernel.testing.engines.processes import EngineProcess, EngineProgram, TimeLimits

BASE = Problem(tokens=17, hidden=64, intermediate=32, experts=8, top_k=2)
WIDE = replace(BASE, hidden=256, intermediate=128)
CPU_CLASSES = {
    "TritonExperts",
    "TritonWNA16Experts",
    "BatchedTritonExperts",
    "NaiveBatchedExperts",
    "Nvfp4QuantizationEmulationTritonExperts",
}
# Pairs (class, problem) whose verdict is RIGHT. Each scheme that runs on a CPU occurs.
RIGHT = (
    ("TritonExperts", BASE),
    ("TritonExperts", replace(BASE, bias=True)),
    ("TritonExperts", replace(BASE, dtype=torch.float32, fp32_precision="tf32")),
    ("TritonExperts", replace(WIDE, quant="fp8_w8a8_tensor")),
    ("TritonExperts", replace(WIDE, quant="fp8_w8a8_tensor:static=true")),
    ("TritonExperts", replace(WIDE, quant="fp8_w8a8_channel")),
    ("TritonExperts", replace(WIDE, quant="fp8_w8a8_block")),
    ("BatchedTritonExperts", BASE),
    ("BatchedTritonExperts", replace(WIDE, quant="fp8_w8a8_channel")),
    ("NaiveBatchedExperts", BASE),
    ("NaiveBatchedExperts", replace(WIDE, quant="fp8_w8a8_block")),
    ("TritonWNA16Experts", replace(WIDE, quant="int4_w4a16_group:group=32")),
    ("TritonWNA16Experts", replace(WIDE, quant="int8_w8a16_group")),
    ("Nvfp4QuantizationEmulationTritonExperts", replace(BASE, quant="nvfp4_w4a4")),
)


@pytest.fixture(scope="module")
def program() -> EngineProgram:
    """Return the engine program that runs vLLM and adds deliberately faulty classes."""
    return make_program("vllm_faulty_engine", make_environment(has_gpu=False))


@pytest.fixture(scope="module")
def process(program: EngineProgram) -> Iterator[EngineProcess]:
    with EngineProcess(program, TimeLimits()) as process:
        yield process


def test_description(process: EngineProcess) -> None:
    description = process.description
    assert description.engine == "vllm"
    assert len(description.notes) >= 1
    classes = {c.name: c for c in description.classes}
    assert {name for name in CPU_CLASSES if not classes[name].unavailable} == CPU_CLASSES
    assert "none" in classes["TritonExperts"].schemes
    assert classes["TritonExperts"].refused["mxfp4_w4a16"].startswith("kernel does not support")
    assert classes["CutlassExpertsFp8"].unavailable
    assert classes["TrtLlmBf16ExpertsMonolithic"].unavailable.startswith("routes tokens itself")
    for class_description in description.classes:
        assert set(class_description.schemes).isdisjoint(class_description.refused)


@pytest.mark.parametrize(("class_name", "problem"), RIGHT, ids=str)
def test_right_classes(class_name: str, problem: Problem, process: EngineProcess) -> None:
    outcome = process.judge(EngineCase(class_name, "silu", problem))
    assert outcome.kind is Kind.RIGHT, outcome
    assert outcome.error is not None
    assert outcome.error > 0


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, process: EngineProcess) -> None:
    if ACTIVATIONS[name][0] not in {activation.value for activation in MoEActivation}:
        pytest.skip("this vLLM does not have the activation")
    problem = replace(BASE, activation=make_activation_spec(name))
    outcome = process.judge(EngineCase("TritonExperts", name, problem))
    assert outcome.kind is Kind.RIGHT, outcome


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 1},
        {"experts": 64, "top_k": 8, "tokens": 1},  # vLLM's path without sorted pairs
        {"experts": 16, "local_experts": 8, "expert_map": True, "top_k": 8},
        {"top_k": 1, "apply_router_weight_on_input": True},
        {"hidden": 104, "intermediate": 40},
    ],
    ids=str,
)
@pytest.mark.parametrize("class_name", ["TritonExperts", "BatchedTritonExperts"])
def test_kinds_of_calls(class_name: str, changes: dict[str, Any], process: EngineProcess) -> None:
    outcome = process.judge(EngineCase(class_name, "silu", replace(BASE, **changes)))
    assert outcome.kind is Kind.RIGHT, outcome


def test_conversions_read_the_number_of_local_experts() -> None:
    """vLLM's weight conversions read `num_experts`, which the quantization method of a real layer
    sets to the number of local experts.
    """
    problem = replace(BASE, experts=16, local_experts=8, expert_map=True)
    weights = ExpertWeights(torch.zeros(8, 64, 64), torch.zeros(8, 64, 32))
    config: Any = SimpleNamespace(activation=MoEActivation.SILU)
    module = make_module(CheckpointLayer(problem, None, config, weights))
    assert (module.num_experts, module.local_num_experts, module.global_num_experts) == (8, 8, 16)


WITH_BIASES = (
    ("BatchedTritonExperts", replace(BASE, bias=True)),
    ("BatchedTritonExperts", replace(WIDE, bias=True, quant="fp8_w8a8_tensor")),
    ("TritonWNA16Experts", replace(WIDE, bias=True, quant="int4_w4a16_group:group=32")),
    (
        "NaiveBatchedExperts",
        replace(BASE, bias=True, experts=16, local_experts=8, expert_map=True),
    ),
)


@pytest.mark.parametrize(("class_name", "problem"), WITH_BIASES, ids=str)
def test_classes_that_ignore_biases_are_wrong(
    class_name: str, problem: Problem, process: EngineProcess
) -> None:
    """`is_supported_config` of these classes accepts biases, but `apply` ignores them."""
    outcome = process.judge(EngineCase(class_name, "silu", problem))
    assert outcome.kind is Kind.WRONG, outcome
    assert outcome.error is not None
    assert outcome.error > 0.3
    assert outcome.reproducer.startswith(f"# {class_name}, ")


@pytest.mark.timeout(600)
def test_reproducers(program: EngineProgram) -> None:
    right_cases = [EngineCase(class_name, "silu", problem) for class_name, problem in RIGHT]
    wrong_cases = [EngineCase(class_name, "silu", problem) for class_name, problem in WITH_BIASES]
    wrong_cases.append(EngineCase("WrongActivation", "silu", BASE))
    check_reproducers(program, right_cases, wrong_cases)


@pytest.mark.parametrize(
    "changes", [{}, {"bias": True, "experts": 16, "local_experts": 8, "expert_map": True}], ids=str
)
@pytest.mark.parametrize(
    ("quant", "backend"),
    [
        ("none", ""),
        ("fp8_w8a8_block", "Fp8MoeBackend.DEEPGEMM"),
        ("fp8_w8a8_tensor:static=true", "Fp8MoeBackend.MARLIN"),
        ("int8_w8a8_channel", "Int8MoeBackend.TRITON"),
        ("int4_w4a16_group", "WNA16MoEBackend.MARLIN"),
        ("int8_w8a16_group", "WNA16MoEBackend.BATCHED_MARLIN"),
        ("mxfp4_w4a16", "Mxfp4MoeBackend.MARLIN"),
        ("nvfp4_w4a4", "NvFp4MoeBackend.MARLIN"),
    ],
)
def test_reproducers_for_a_gpu_are_short(quant: str, backend: str, changes: dict[str, Any]) -> None:
    activation = make_activation_spec("swigluoai_uninterleave")
    problem = replace(WIDE, quant=quant, activation=activation, **changes)
    name, options = ACTIVATIONS["swigluoai_uninterleave"]
    source = Source("vllm.a", "Experts", name, options, "cuda", 256, backend, is_gptq=True)
    reproducer = write_reproducer(EngineCase("Experts", name, problem), source, 0.1)
    assert 8 <= count_statements(reproducer) <= MAX_STATEMENTS
    # For these schemes, vLLM converts the biases for the class (to p1 and p2), while the reference
    # adds the checkpoint's biases.
    assert ("p1, p2 = oracle" in reproducer) == (problem.bias and "a16" in quant)


@pytest.mark.parametrize("promise", Promise)
def test_promises_of_the_naive_class(promise: Promise, process: EngineProcess) -> None:
    outcome = process.judge(EngineCase("NaiveBatchedExperts", "silu", BASE, promise=promise))
    assert outcome.kind is Kind.RIGHT, outcome


def test_a_class_that_reads_its_workspace_breaks_a_promise(process: EngineProcess) -> None:
    case = EngineCase("ReadingWorkspace", "silu", BASE, promise=Promise.WORKSPACE)
    outcome = process.judge(case)
    assert outcome.kind is Kind.WRONG
    assert "values are not finite" in outcome.detail


@pytest.mark.timeout(600)  # Several processes load vLLM.
def test_faulty_classes(program: EngineProgram) -> None:
    names = "WrongActivation", "Raising", "Aborting", "Hanging", "Refusing", "MissingOperator"
    cases = [EngineCase(name, "silu", BASE) for name in names]
    cases.append(EngineCase("NaiveBatchedExperts", "silu", BASE))
    expected_kinds = {"Refusing": Kind.REFUSED, "NaiveBatchedExperts": Kind.RIGHT}
    outcomes = check_faulty_classes(program, cases, expected_kinds)
    assert outcomes["Raising"].detail.startswith("RuntimeError: invalid tile (vllm_faulty_classes")
    assert outcomes["Refusing"].detail.endswith("64 hidden dim is not supported")
    assert outcomes["WrongActivation"].reproducer.startswith("# WrongActivation, none, silu, T17")


def test_a_class_with_another_layout_is_not_judged(process: EngineProcess) -> None:
    """The class accepts the layer, but vLLM does not convert the layer's weights for it."""
    problem = replace(WIDE, quant="fp8_w8a8_tensor")
    outcome = process.judge(EngineCase("BatchedMarlinExperts", "silu", problem))
    assert outcome == Outcome(Kind.NOT_JUDGED, "vLLM's oracle for fp8 never returns it")


def test_configuration_fields_that_are_set() -> None:
    """vLLM ignores unknown attributes, so a renamed field would go unnoticed without this test."""
    parameters = inspect.signature(FusedMoEConfig).parameters
    assert {"swiglu_limit", "num_local_experts", "has_bias", "max_num_tokens"} <= set(parameters)
