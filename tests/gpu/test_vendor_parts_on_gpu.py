"""Parts that use vendor libraries, on a GPU. A part is skipped if its library is not installed.

pytest tests/gpu/test_vendor_parts_on_gpu.py -rs  # lists the reasons for skips
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from modular_kernel.catalog import check, load_catalog, make_kernel, this_machine
from modular_kernel.compatibility.rules import judge_part
from modular_kernel.quant.row_order import up_rows_first
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases.inputs import make_inputs
from modular_kernel.testing.cases.row_order import apply_part_row_order

pytestmark = pytest.mark.gpu

NO_EP, BATCHED = "MoEPrepareAndFinalizeNoEP", "BatchedPrepareAndFinalize"
CHANNEL, TENSOR, BLOCK = "fp8_w8a8_channel", "fp8_w8a8_tensor", "fp8_w8a8_block"
PARTS = {
    "CutlassRowwiseExpertsFP8": (NO_EP, (CHANNEL, TENSOR, f"{TENSOR}:static=true")),
    "BatchedCutlassExpertsFP8": (BATCHED, (CHANNEL, TENSOR, f"{TENSOR}:static=true")),
    "DeepGemmExperts": (NO_EP, ("none", BLOCK)),
    "BatchedDeepGemmExperts": (BATCHED, ("none", BLOCK)),
    "TritonOrDeepGemmExperts": (NO_EP, ("none", BLOCK)),
    "BatchedTritonOrDeepGemmExperts": (BATCHED, ("none", BLOCK)),
    "TritonKernelsExperts": (NO_EP, ("none", "mxfp4_w4a16")),
    "FlashInferExperts": (NO_EP, ("none", f"{TENSOR}:static=true", BLOCK)),
}
BASE = Problem(tokens=33, hidden=256, intermediate=384, experts=5, top_k=2)
CASES: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "uniform"),
    ({"tokens": 0}, "uniform"),
    ({"tokens": 1, "top_k": 1}, "uniform"),
    ({"experts": 2, "tokens": 257}, "all_to_one"),
    ({"experts": 300, "top_k": 8, "tokens": 65}, "zipf"),
    ({"expert_map": True, "local_experts": 3}, "out_of_range"),
    ({"combine": Combine.TOPK_WEIGHTED, "routed_scaling_factor": 2.5}, "skips"),
    ({"activation": "relu2", "inplace": True}, "empty_experts"),
    ({"activation": "swiglu_oai:alpha=1.702,limit=1.0,interleaved=true"}, "duplicates"),
    ({"top_k": 3}, "all_skipped"),
)
PARTS_AND_SCHEMES = [(name, quant) for name, (_, quants) in PARTS.items() for quant in quants]


def skip_unless_available(name: str) -> None:
    """Skip the test, with the reasons, if the part cannot run on this machine."""
    reasons = judge_part(name, load_catalog().experts(name).requires, this_machine())
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))


@pytest.mark.parametrize(("change", "routing"), CASES, ids=str)
@pytest.mark.parametrize(("name", "quant"), PARTS_AND_SCHEMES)
def test_cases_are_correct(name: str, quant: str, change: dict[str, Any], routing: str) -> None:
    """The harness checks values, plans and graphs."""
    skip_unless_available(name)
    problem = apply_part_row_order(replace(BASE, quant=quant, **change), name)
    verdict = check(PARTS[name][0], name, problem)
    if not verdict.ok:
        pytest.skip(str(verdict))
    proof = prove(Case(PARTS[name][0], name, problem, routing))
    assert proof.passed, str(proof)


@pytest.mark.parametrize("tokens", [64, 2048])
@pytest.mark.parametrize(("name", "quant"), PARTS_AND_SCHEMES)
def test_large_layers_agree_with_triton_experts(name: str, quant: str, tokens: int) -> None:
    """The layer has the sizes of Qwen3-30B: 128 experts with I = 768, and top-8."""
    skip_unless_available(name)
    prepare, _ = PARTS[name]
    problem = Problem(tokens, 2048, 768, 128, 8, quant=quant)
    reference = "TritonExperts" if prepare == NO_EP else "BatchedTritonExperts"
    inputs = make_inputs(problem, "uniform", torch.device("cuda"))
    weights, part_problem = inputs.weights, problem
    if load_catalog().experts(name).requires.up_first:
        weights, part_problem = up_rows_first(weights, problem)
    got, expected = (
        make_kernel(prepare, part, layer)(inputs.x_TH, layer_weights, inputs.routing).float()
        for part, layer, layer_weights in (
            (name, part_problem, weights),
            (reference, problem, inputs.weights),
        )
    )
    assert got.isfinite().all()
    assert ((got - expected).norm() / expected.norm()).item() < 0.02
