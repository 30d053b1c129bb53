"""The TMA-pipelined gemv on every axis of the harness: forced, whatever the heuristics say.

Groups and depths with tails, one token to more than are held at once, experts that are elsewhere,
and what the harness always does: poisoned workspaces, plans, graphs, strided weights, which the
path must leave to another.
"""

from dataclasses import replace

import pytest
import torch
from forced_path_cases import PAIR, cases_on

from experts.triton.configs.select import current_lookup, override_config
from experts.triton.contiguous import supported_paths
from experts.triton.gemv_tma import gemv_tma_config
from experts.triton.launch_config import LaunchConfig, MoEConfig
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases.lists import BASE, list_axis_variants
from modular_kernel.testing.cases.quantized import list_quantized_variants

SMALL = replace(BASE, dtype=torch.bfloat16, hidden=144, intermediate=224)
# Vectors of more than a piece, places that do not divide the depth, tiles that do not divide rows.
LARGE = replace(SMALL, tokens=11, hidden=1296, intermediate=1056)
QUANTS = ("fp8_w8a8_channel", "fp8_w8a8_block")
ROUTINGS = ("uniform", "zipf", "skips", "out_of_range", "empty_experts")


def variants() -> list[tuple[Problem, str]]:
    """Every axis and each quantized case of the harness, and few tokens of many experts."""
    found = [*list_quantized_variants(BASE)]
    for quant in QUANTS:
        found += [(replace(p, quant=quant), routing) for p, routing in list_axis_variants(LARGE)]
        for base in (SMALL, LARGE):
            for tokens in (1, 2, 8):
                few = replace(
                    base, tokens=tokens, experts=16, local_experts=None, top_k=8, quant=quant
                )
                found += [(few, routing) for routing in ROUTINGS]
    return found


CASES = cases_on("gemv_tma", variants())


def test_there_are_cases_where_the_path_runs() -> None:
    assert (len(CASES) > 60) == current_lookup().device.tma


@pytest.mark.parametrize("case", CASES, ids=str)
def test_proven(case: Case, machine: Machine) -> None:
    with override_config(gemv_tma_config.default_config(case.problem, current_lookup().device)):
        proof = prove(case, machine)
    assert proof.passed, str(proof)


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize(("block_k", "places"), [(128, 2), (128, 16), (256, 5), (512, 3)])
def test_every_ring(quant: str, block_k: int, places: int, machine: Machine) -> None:
    """Whatever a place holds of the depth, and however few places there are."""
    problem = replace(LARGE, quant=quant, tokens=3)
    if "gemv_tma" not in supported_paths(problem):
        pytest.skip("no sm_90")
    pair = MoEConfig(*(LaunchConfig(16, n, block_k, 1, 4, places) for n in (32, 64)), "gemv_tma")
    with override_config(pair):
        proof = prove(Case(*PAIR, problem, "uniform"), machine)
    assert proof.passed, str(proof)
