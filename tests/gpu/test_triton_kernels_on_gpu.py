"""TritonKernelsExperts with biases on a GPU. The tests are skipped without triton_kernels.

pytest tests/gpu/test_triton_kernels_on_gpu.py -rs  # lists the reasons for skips
"""

from dataclasses import replace

import pytest
import torch

from modular_kernel.catalog import check, load_catalog, this_machine
from modular_kernel.compatibility.rules import judge_part
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases.inputs import InputVariation

pytestmark = pytest.mark.gpu

PAIR = ("MoEPrepareAndFinalizeNoEP", "TritonKernelsExperts")
SWIGLU_OAI = "swiglu_oai:alpha=1.702,limit=7.0,interleaved=true"
BASE = Problem(64, 256, 384, 16, 4, dtype=torch.bfloat16, bias=True)
GPT_OSS = replace(BASE, hidden=2880, intermediate=2880, experts=8, activation=SWIGLU_OAI)


@pytest.fixture(autouse=True)
def _skip_unless_available() -> None:
    reasons = judge_part(PAIR[1], load_catalog().experts(PAIR[1]).requires, this_machine())
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))


def check_case(problem: Problem, routing: str, variation: InputVariation | None = None) -> None:
    """Compare outputs with float64, with plans and graphs, with biases in both of their dtypes."""
    verdict = check(*PAIR, problem)
    if problem.quant != "none" and "archs" in {r.rule for r in verdict.rejections}:
        pytest.skip(str(verdict))
    assert verdict.ok, str(verdict)
    proof = prove(Case(*PAIR, problem, routing, variation=variation or InputVariation()))
    assert proof.passed, str(proof)


@pytest.mark.parametrize("activation", ["silu", SWIGLU_OAI])
@pytest.mark.parametrize("tokens", [1, 64, 1024])
@pytest.mark.parametrize("quant", ["none", "mxfp4_w4a16"])
def test_biases_are_added(quant: str, tokens: int, activation: str) -> None:
    check_case(replace(BASE, tokens=tokens, quant=quant, activation=activation), "uniform")


@pytest.mark.parametrize("quant", ["none", "mxfp4_w4a16"])
def test_biases_of_few_pairs_of_a_long_row_are_added_once(quant: str) -> None:
    """The library splits K among programs, of which only one may add the bias."""
    problem = replace(BASE, tokens=2, top_k=1, experts=2, hidden=4096, intermediate=2048)
    check_case(replace(problem, quant=quant), "uniform")


@pytest.mark.parametrize("quant", ["none", "mxfp4_w4a16"])
@pytest.mark.parametrize("routing", ["skips", "duplicates", "zipf"])
def test_biases_are_weighted_by_the_router(quant: str, routing: str) -> None:
    for combine in (Combine.SUM, Combine.TOPK_WEIGHTED):
        problem = replace(BASE, quant=quant, combine=combine, routed_scaling_factor=2.5)
        check_case(problem, routing)


def test_a_nan_in_a_bias_stays_in_its_rows() -> None:
    problem = replace(BASE, tokens=5, hidden=64, intermediate=64, experts=12, top_k=2)
    check_case(problem, "uniform", InputVariation(nan="b1+b2"))


@pytest.mark.parametrize("tokens", [1, 64, 1024])
@pytest.mark.parametrize("quant", ["none", "mxfp4_w4a16"])
def test_layers_with_the_sizes_of_gpt_oss_are_correct(quant: str, tokens: int) -> None:
    """K is not a multiple of the library's K step, 128."""
    check_case(replace(GPT_OSS, tokens=tokens, quant=quant), "uniform")


@pytest.mark.parametrize("tokens", [1, 64, 1024])
@pytest.mark.parametrize(("hidden", "intermediate"), [(160, 96), (200, 72), (4128, 32)])
def test_masked_scales_of_mxfp4_have_no_effect(hidden: int, intermediate: int, tokens: int) -> None:
    """In the last K step, the library masks loads of scales that have no value for the rest."""
    sizes = replace(BASE, tokens=tokens, hidden=hidden, intermediate=intermediate)
    check_case(replace(sizes, quant="mxfp4_w4a16"), "uniform")
