"""The path `gemv_tma`, a GEMV pipelined with TMA, forced even where heuristics select another.

The cases cover every axis of the harness, partial groups and tiles, one token more than a tile
holds, and experts on other ranks. The harness adds poisoned workspaces, plans and graphs, and
strided weights, for which the part must select another path.
"""

from dataclasses import replace

import pytest
import torch
from forced_path_cases import PAIR, cases_on

from experts.triton.configs.select import current_lookup, override_config
from experts.triton.gemv_tma import gemv_tma_config
from experts.triton.launch_config import LaunchConfig, MoEConfig
from experts.triton.standard import supported_paths
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases.lists import BASE, list_axis_variants
from modular_kernel.testing.cases.quantized import list_quantized_variants

SMALL = replace(BASE, dtype=torch.bfloat16, hidden=144, intermediate=224)
# Vectors are longer than one step, stages do not divide the depth, and tiles do not divide the
# rows.
LARGE = replace(SMALL, tokens=11, hidden=1296, intermediate=1056)
QUANTS = ("fp8_w8a8_channel", "fp8_w8a8_block")
ROUTINGS = ("uniform", "zipf", "skips", "out_of_range", "empty_experts")


def list_variants() -> list[tuple[Problem, str]]:
    """List each axis variant and quantized case of the harness, and few tokens for many experts."""
    variants = [*list_quantized_variants(BASE)]
    for quant in QUANTS:
        variants += [(replace(p, quant=quant), routing) for p, routing in list_axis_variants(LARGE)]
        for base in (SMALL, LARGE):
            for tokens in (1, 2, 8):
                few_tokens = replace(
                    base, tokens=tokens, experts=16, local_experts=None, top_k=8, quant=quant
                )
                variants += [(few_tokens, routing) for routing in ROUTINGS]
    return variants


CASES = cases_on("gemv_tma", list_variants())


def test_there_are_cases_where_the_path_runs() -> None:
    assert (len(CASES) > 60) == current_lookup().device.tma


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases_are_correct(case: Case, machine: Machine) -> None:
    with override_config(gemv_tma_config.default_config(case.problem, current_lookup().device)):
        proof = prove(case, machine)
    assert proof.passed, str(proof)


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize(("block_k", "stages"), [(128, 2), (128, 16), (256, 5), (512, 3)])
def test_all_pipeline_depths_are_correct(
    quant: str, block_k: int, stages: int, machine: Machine
) -> None:
    """Any number of pipeline stages and any depth of a stage is correct."""
    problem = replace(LARGE, quant=quant, tokens=3)
    if "gemv_tma" not in supported_paths(problem):
        pytest.skip("needs sm_90")
    config = MoEConfig(*(LaunchConfig(16, n, block_k, 1, 4, stages) for n in (32, 64)), "gemv_tma")
    with override_config(config):
        proof = prove(Case(*PAIR, problem, "uniform"), machine)
    assert proof.passed, str(proof)
