"""vLLM's own experts classes, judged on a CPU, and classes with faults that must be found."""

import inspect
import os
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm_faulty_engine import load_engine

from modular_kernel.integrations.engine import EngineCase, Kind, Promise
from modular_kernel.integrations.vllm.classes import ACTIVATIONS, make_activation_spec
from modular_kernel.settings import make_child_environment
from modular_kernel.spec.problem import Problem
from modular_kernel.testing.engines.judge import Judge
from modular_kernel.testing.engines.processes import (
    EngineProgram,
    TimeLimits,
    run_cases,
    run_reproducer,
)

BASE = Problem(tokens=17, hidden=64, intermediate=32, experts=8, top_k=2)
WIDE = replace(BASE, hidden=256, intermediate=128)
NAMES = {
    "TritonExperts",
    "TritonWNA16Experts",
    "BatchedTritonExperts",
    "NaiveBatchedExperts",
    "Nvfp4QuantizationEmulationTritonExperts",
}
# Class, problem: one of each scheme that runs on a CPU.
RIGHT = (
    ("TritonExperts", BASE),
    ("TritonExperts", replace(BASE, bias=True)),
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
def engine() -> Any:
    return load_engine()


@pytest.fixture(scope="module")
def judge(engine: Any) -> Judge:
    return Judge(engine, torch.device("cpu"), lambda phase: None)


@pytest.fixture(scope="module")
def program() -> EngineProgram:
    """Return a program that runs in this environment, and finds the helpers."""
    path = os.pathsep.join(filter(None, sys.path))
    environment = make_child_environment(interpreted=True) | {
        "PYTHONPATH": path,
        "VLLM_TARGET_DEVICE": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",
    }
    return EngineProgram("vllm_faulty_engine", environment)


def test_description(engine: Any) -> None:
    description = engine.describe()
    assert description.engine == "vllm"
    assert len(description.notes) >= 1
    classes = {c.name: c for c in description.classes}
    assert {name for name in NAMES if not classes[name].unavailable} == NAMES
    assert "none" in classes["TritonExperts"].schemes
    assert classes["TritonExperts"].refused["mxfp4_w4a16"].startswith("kernel does not support")
    assert classes["CutlassExpertsFp8"].unavailable
    assert classes["TrtLlmBf16ExpertsMonolithic"].unavailable.startswith("routes tokens itself")
    for experts in description.classes:
        assert set(experts.schemes).isdisjoint(experts.refused)


@pytest.mark.parametrize(("experts", "problem"), RIGHT, ids=str)
def test_right_classes_and_their_reproducers(
    experts: str, problem: Problem, judge: Judge, engine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reproducer of a right class finds a small error, so its own reference is right."""
    case = EngineCase(experts, "silu", problem)
    outcome = judge.judge(case)
    assert outcome.kind is Kind.RIGHT, outcome
    assert outcome.error is not None
    assert outcome.error > 0
    allowed = 0.01 if not problem.scheme.quantizes_activations else 0.2
    text = engine.make_reproducer(case, allowed)
    with pytest.raises(SystemExit) as status:
        exec(text, {"__name__": "__main__"})
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("relative RMS error "), text
    assert status.value.code == 0, line
    assert "modular_kernel" not in text.replace("fused_moe import config as c, modular_kernel", "")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, judge: Judge) -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    if ACTIVATIONS[name][0] not in {activation.value for activation in MoEActivation}:
        pytest.skip("this vLLM does not have it")
    problem = replace(BASE, activation=make_activation_spec(name))
    outcome = judge.judge(EngineCase("TritonExperts", name, problem))
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
@pytest.mark.parametrize("experts", ["TritonExperts", "BatchedTritonExperts"])
def test_kinds_of_calls(experts: str, changes: dict[str, Any], judge: Judge) -> None:
    outcome = judge.judge(EngineCase(experts, "silu", replace(BASE, **changes)))
    assert outcome.kind is Kind.RIGHT, outcome


@pytest.mark.parametrize(
    ("experts", "quant", "changes"),
    [
        ("BatchedTritonExperts", "none", {}),
        ("BatchedTritonExperts", "fp8_w8a8_tensor", {}),
        ("TritonWNA16Experts", "int4_w4a16_group:group=32", {}),
        ("NaiveBatchedExperts", "none", {"experts": 16, "local_experts": 8, "expert_map": True}),
    ],
    ids=str,
)
def test_classes_that_ignore_biases_are_wrong(
    experts: str, quant: str, changes: dict[str, Any], judge: Judge
) -> None:
    """Their predicates accept a layer with biases. The reproducer shows the same error."""
    problem = replace(WIDE if quant != "none" else BASE, quant=quant, bias=True, **changes)
    outcome = judge.judge(EngineCase(experts, "silu", problem))
    assert outcome.kind is Kind.WRONG, outcome
    assert outcome.error is not None
    assert outcome.error > 0.3
    with pytest.raises(SystemExit) as status:
        exec(outcome.reproducer, {"__name__": "__main__"})
    assert status.value.code == 1


@pytest.mark.parametrize("promise", Promise)
def test_promises_of_the_naive_class(promise: Promise, judge: Judge) -> None:
    outcome = judge.judge(EngineCase("NaiveBatchedExperts", "silu", BASE, promise=promise))
    assert outcome.kind is Kind.RIGHT, outcome


def test_a_poisoned_workspace_reaches_the_class(judge: Judge, engine: Any) -> None:
    """Otherwise the promise would always be kept."""
    case = EngineCase("NaiveBatchedExperts", "silu", BASE, promise=Promise.WORKSPACE)
    seen = []
    cls = engine._classes["NaiveBatchedExperts"]
    apply = cls.apply
    try:
        cls.apply = lambda self, *args, **kwargs: (
            seen.append(bool(kwargs["workspace2"].isnan().all())) or apply(self, *args, **kwargs)
        )
        judge._layers.clear()
        assert judge.judge(case).kind is Kind.RIGHT
    finally:
        cls.apply = apply
        judge._layers.clear()
    assert seen == [True]


def test_faulty_classes(program: EngineProgram) -> None:
    names = "WrongActivation", "Raising", "Aborting", "Hanging", "Refusing", "MissingOperator"
    cases = [EngineCase(name, "silu", BASE) for name in names]
    cases.append(EngineCase("NaiveBatchedExperts", "silu", BASE))
    limits = TimeLimits(first_call=10, call=10)
    results = {case.experts: outcome for case, outcome in run_cases(cases, program, limits, 1)}
    kinds = {name: outcome.kind for name, outcome in results.items()}
    assert kinds == {
        "WrongActivation": Kind.WRONG,
        "Raising": Kind.CRASHED,
        "Aborting": Kind.CRASHED,
        "Hanging": Kind.TIMEOUT,
        "Refusing": Kind.REFUSED,
        "MissingOperator": Kind.UNAVAILABLE,
        "NaiveBatchedExperts": Kind.RIGHT,
    }
    assert results["Raising"].detail.startswith("RuntimeError: invalid tile (vllm_faulty_classes")
    assert results["Aborting"].detail.startswith("SIGABRT in its first call")
    assert results["Hanging"].detail == "first call took more than 10 s"
    assert results["Refusing"].detail.endswith("64 hidden dim is not supported")
    assert results["MissingOperator"].detail == "no compiled operator 'no_such_operator'"
    status, line = run_reproducer(program, results["WrongActivation"].reproducer, 120)
    assert status == 1, line
    assert line.startswith("relative RMS error ")


def test_configuration_fields_that_are_set() -> None:
    """vLLM ignores an unknown attribute, so that a renamed field would go unnoticed."""
    known = inspect.signature(FusedMoEConfig).parameters
    assert {"swiglu_limit", "num_local_experts", "has_bias", "max_num_tokens"} <= set(known)
