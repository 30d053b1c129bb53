"""The dequantised path on a GPU: its launches are forced, whatever the heuristics say.

Every way in which weights alone are quantised, tails of groups and depths, experts of no, few and
many tiles, all experts at once and a few at a time.
"""

from dataclasses import replace

import pytest
import torch

from experts.triton.configs.select import override_config, this_store
from experts.triton.contiguous import paths_of
from experts.triton.dequantised import config as dequantised_config
from modular_kernel import check
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases.lists import BASE
from modular_kernel.types import Combine, Machine, Problem

PAIR = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")
SMALL = replace(
    BASE, dtype=torch.bfloat16, hidden=160, intermediate=224, quant="int4_w4a16_group:group=32"
)
# 150 rows an expert and more: whole tiles, and last ones of more and of less than 64 rows.
LARGE = replace(SMALL, tokens=391, hidden=320, intermediate=448)
OAI = "swiglu_oai:alpha=1.702,limit=1.2,interleaved=true"
QUANTS = (
    "int4_w4a16_group:group=32",
    "int4_w4a16_group",
    "int4_w4a16_group:group=64,zero_points=true",
    "mxfp4_w4a16",
    "mxfp4_w4a16:repacked=true",
    "int8_w8a16_channel",
    "int8_w8a16_group:group=64",
    "int8_w8a16_group:group=32,zero_points=true",
)
ROUTINGS = ("uniform", "zipf", "skips", "out_of_range", "empty_experts", "all_to_one")
CHANGES: tuple[dict[str, object], ...] = (
    {"bias": True, "activation": OAI},
    {"activation": "relu2", "bias": True},
    {"activation": "gelu", "combine": Combine.TOPK_UNWEIGHTED},
    {"expert_map": True, "local_experts": 3},
    {"inplace": True, "routed_scaling_factor": 2.5},
    {"hidden": 200, "intermediate": 136},
    {"chunk_tokens": 100},
)


def cases() -> list[Case]:
    variants: list[tuple[Problem, str]] = []
    for quant in QUANTS:
        small, large = (replace(base, quant=quant) for base in (SMALL, LARGE))
        variants += [(base, routing) for routing in ROUTINGS for base in (small, large)]
        # Of few rows one may happen to lie on the far side of every rounding.
        variants += [(replace(large, **change), "zipf") for change in CHANGES]  # type: ignore[arg-type]
    found = (Case(*PAIR, problem, routing) for problem, routing in variants)
    return [c for c in dict.fromkeys(found) if served(c.problem) and check(*PAIR, c.problem).ok]


def served(problem: Problem) -> bool:
    """Whether the part may take the path, so that its tiles can be forced."""
    return "dequantised" in paths_of(problem)


CASES = cases()


def test_there_are_cases_where_the_path_runs() -> None:
    assert (len(CASES) > 100) == this_store().device.tma


@pytest.mark.parametrize("at_once", [64, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_proven(
    case: Case, at_once: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dequantised_config, "experts_at_once", lambda p: min(at_once, p.e))
    with override_config(dequantised_config.default(case.problem)):
        proof = prove(case, machine)
    assert proof.passed, str(proof)
