"""CutlassRowwiseExpertsFP8 (fp8 per channel or tensor), with a stand-in for _scaled_grouped_mm."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from vendor_stand_in import BatchedCutlass, CutlassRowwise, prove_part, scaled_grouped_mm

from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.testing.cases.inputs import InputVariation

BASE = Problem(tokens=17, hidden=48, intermediate=80, experts=5, top_k=2, quant="fp8_w8a8_channel")
TENSOR, STATIC = "fp8_w8a8_tensor", "fp8_w8a8_tensor:static=true"
COMMON: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "uniform"),
    ({"quant": TENSOR}, "skips"),
    ({"quant": STATIC}, "duplicates"),
    ({"quant": TENSOR, "tokens": 1, "top_k": 1}, "uniform"),
    ({"tokens": 0}, "uniform"),
    ({"activation": "relu2"}, "empty_experts"),
    ({"activation": "swiglu_oai:alpha=1.702,limit=1.0,interleaved=true"}, "zipf"),
    ({"combine": Combine.TOPK_WEIGHTED, "routed_scaling_factor": 2.5}, "skips"),
    ({"expert_map": True, "local_experts": 3}, "out_of_range"),
    ({"experts": 1, "top_k": 1, "tokens": 33}, "all_to_one"),
    ({"inplace": True, "top_k": 3}, "all_skipped"),
)
CONTIGUOUS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"chunk_tokens": 7}, "skips"),
    ({"quant": TENSOR, "chunk_tokens": 8, "ids_dtype": torch.int64}, "zipf"),
)


@pytest.mark.parametrize(("change", "routing"), [*COMMON, *CONTIGUOUS])
def test_contiguous_cases_are_proven(change: dict[str, Any], routing: str) -> None:
    proof = prove_part(CutlassRowwise, replace(BASE, **change), routing)
    assert proof.passed, str(proof)


@pytest.mark.parametrize(("change", "routing"), COMMON)
def test_batched_cases_are_proven(change: dict[str, Any], routing: str) -> None:
    proof = prove_part(BatchedCutlass, replace(BASE, **change), routing)
    assert proof.passed, str(proof)


@pytest.mark.parametrize("layout", ["transposed", "shifted"])
@pytest.mark.parametrize("part", [CutlassRowwise, BatchedCutlass])
def test_strided_weights_are_accepted(part: Any, layout: str) -> None:
    proof = prove_part(part, BASE, variation=InputVariation(layout=layout))
    assert proof.passed, str(proof)


def make_operands() -> dict[str, Any]:
    e4m3 = torch.float8_e4m3fn
    return {
        "mat_a": torch.randn(40, 32).to(e4m3),
        "mat_b": torch.randn(3, 48, 32).to(e4m3).transpose(1, 2),
        "scale_a": torch.rand(40) + 0.5,
        "scale_b": torch.rand(3, 48) + 0.5,
        "offs": torch.tensor([7, 7, 33], dtype=torch.int32),
        "out_dtype": torch.bfloat16,
    }


def test_stand_in_equals_float64() -> None:
    arguments = make_operands()
    out = scaled_grouped_mm(**arguments)
    a, w = arguments["mat_a"].float(), arguments["mat_b"].float()
    expected = (a[7:33] @ w[2]) * arguments["scale_a"][7:33, None] * arguments["scale_b"][2]
    assert torch.equal(out[7:33], expected.bfloat16())
    assert out[33:].isnan().all()


FP8 = torch.float8_e4m3fn
DEFECTS: dict[str, dict[str, Any]] = {
    "N off 16": {
        "mat_b": torch.zeros(3, 40, 32).to(FP8).transpose(1, 2),
        "scale_b": torch.ones(3, 40),
    },
    "K off 16": {
        "mat_a": torch.zeros(40, 24).to(FP8),
        "mat_b": torch.zeros(3, 48, 24).to(FP8).transpose(1, 2),
    },
    "one scale repeated over rows": {"scale_a": torch.ones(1).expand(40)},
    "one scale repeated over columns": {"scale_b": torch.ones(3, 1).expand(3, 48)},
    "scales of rows as a column": {"scale_a": torch.ones(40, 1)},
    "too few scales": {"scale_a": torch.ones(39)},
    "scales of 16 bits": {"scale_a": torch.ones(40, dtype=torch.bfloat16)},
    "rows of 16 bits": {"mat_a": torch.zeros(40, 32, dtype=torch.bfloat16)},
    "weights along N": {"mat_b": torch.zeros(3, 32, 48).to(FP8)},
    "rows along M": {"mat_a": torch.zeros(32, 48).to(FP8).T[:40]},
    "ends of int64": {"offs": torch.tensor([7, 7, 33])},
    "no ends": {"offs": None},
    "an end for each group and a first": {"offs": torch.tensor([0, 7, 7, 33], dtype=torch.int32)},
    "decreasing ends": {"offs": torch.tensor([7, 6, 33], dtype=torch.int32)},
    "an end beyond the rows": {"offs": torch.tensor([7, 7, 41], dtype=torch.int32)},
    "results of float32": {"out_dtype": torch.float32},
}


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_are_detected(name: str) -> None:
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        scaled_grouped_mm(**make_operands() | DEFECTS[name])
