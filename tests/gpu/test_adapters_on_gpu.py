"""LoRA adapters in compiled kernels: `grouped_tma`, which is never interpreted, and `gemv`."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from experts.triton.configs.select import choose_config
from experts.triton.standard import supported_paths
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases.inputs import InputVariation

pytestmark = pytest.mark.gpu

PAIR = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")


def swiglu_oai(*, interleaved: bool) -> str:
    return f"swiglu_oai:alpha=1.702,limit=1.0,interleaved={str(interleaved).lower()}"


BASE = Problem(300, 128, 192, 4, 2, lora="adapters=3,rank=16")
TMA_CASES: tuple[tuple[dict[str, Any], str, dict[str, str]], ...] = (
    ({}, "uniform", {}),
    ({"hidden": 48, "intermediate": 80}, "skips", {}),
    ({"lora": "adapters=1,rank=8"}, "zipf", {}),
    ({"lora": "adapters=8,rank=64"}, "uniform", {}),
    (
        {"lora": "adapters=5,rank=40", "bias": True, "activation": swiglu_oai(interleaved=False)},
        "uniform",
        {},
    ),
    (
        {"lora": "adapters=4,rank=24,a13=shared", "activation": swiglu_oai(interleaved=True)},
        "duplicates",
        {},
    ),
    ({"lora": "adapters=2,rank=128,outer=shared"}, "uniform", {}),
    ({"lora": "adapters=3,rank=32", "activation": "relu2"}, "empty_experts", {}),
    ({"combine": Combine.TOPK_WEIGHTED, "tokens": 513}, "all_to_one", {}),
    ({"expert_map": True, "local_experts": 3, "tokens": 700}, "out_of_range", {}),
    ({"dtype": torch.float16, "chunk_tokens": 200}, "uniform", {}),
    ({}, "uniform", {"slot_pattern": "sequences"}),
    ({}, "uniform", {"slot_pattern": "nobody"}),
    ({}, "uniform", {"slot_pattern": "without"}),
    ({}, "uniform", {"layout": "spaced"}),
    ({}, "uniform", {"layout": "shifted"}),
    ({}, "uniform", {"values": "nan_token"}),
)
GEMV_CHANGES: tuple[dict[str, Any], ...] = (
    {"tokens": 1},
    {"tokens": 4, "lora": "adapters=8,rank=64", "bias": True},
    {"tokens": 2, "lora": "adapters=1,rank=5", "activation": swiglu_oai(interleaved=True)},
    {"tokens": 2, "lora": "adapters=4,rank=256", "quant": "fp8_w8a8_channel"},
    {"tokens": 2, "quant": "fp8_w8a16_tensor", "activation": "silu:interleaved=true"},
    {"tokens": 1, "quant": "int8_w8a16_channel"},
)


def select_path(problem: Problem) -> str:
    paths = supported_paths(problem)
    return choose_config(problem.with_tokens(0), problem.tokens, paths).path


@pytest.mark.parametrize(("change", "routing", "variation"), TMA_CASES, ids=str)
def test_adapters_on_the_tma_path_are_correct(
    change: dict[str, Any], routing: str, variation: dict[str, str]
) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    problem = replace(BASE, **change)
    assert select_path(problem) == "grouped_tma"
    proof = prove(Case(*PAIR, problem, routing, variation=InputVariation(**variation)))
    assert proof.passed, str(proof)


@pytest.mark.parametrize("change", GEMV_CHANGES, ids=str)
def test_adapters_on_the_gemv_path_are_correct(change: dict[str, Any]) -> None:
    problem = replace(BASE, experts=16, **change)
    assert select_path(problem) == "gemv"
    proof = prove(Case(*PAIR, problem))
    assert proof.passed, str(proof)
