"""Persistent grouped GEMMs on every axis of the harness: forced, whatever the heuristics say.

Groups and depths with tails, experts of no, few and many tiles, and what the harness always does:
poisoned workspaces, plans, graphs, strided weights, which the path must leave to another.
"""

from dataclasses import replace

import pytest
import torch
from forced_path_cases import cases_on

from experts.triton.configs.select import current_lookup, override_config
from experts.triton.grouped_tma import grouped_tma_config
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases.lists import BASE, list_axis_variants
from modular_kernel.testing.cases.quantized import list_quantized_variants

SMALL = replace(BASE, dtype=torch.bfloat16, hidden=144, intermediate=208)
# 150 rows an expert and more: whole tiles, and last ones of more and of less than 64 rows.
LARGE = replace(SMALL, tokens=391, hidden=320, intermediate=400)


def variants() -> list[tuple[Problem, str]]:
    """Every axis in bf16; each quantized case of the harness. Not every axis times every scheme:
    a rounding step of few values is too large for the harness's bounds, whoever computes."""
    blocks = replace(LARGE, intermediate=448)
    found = [*list_axis_variants(SMALL), *list_axis_variants(LARGE), *list_quantized_variants(BASE)]
    for routing in ("uniform", "zipf", "skips", "out_of_range", "empty_experts"):
        found += [
            (replace(blocks, quant="fp8_w8a8_block"), routing),
            (replace(LARGE, quant="fp8_w8a8_channel"), routing),
        ]
    return found


CASES = cases_on("grouped_tma", variants())


def test_there_are_cases_where_the_path_runs() -> None:
    assert (len(CASES) > 100) == current_lookup().device.tma


@pytest.mark.parametrize("case", CASES, ids=str)
def test_proven(case: Case, machine: Machine) -> None:
    with override_config(grouped_tma_config.default_config(case.problem)):
        proof = prove(case, machine)
    assert proof.passed, str(proof)
