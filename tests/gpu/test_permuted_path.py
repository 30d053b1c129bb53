"""The permuted path on every axis of the harness: its tiles are forced, whatever the regimes say.

Groups and depths with tails, experts of no, few and many tiles, and what the harness always does:
poisoned workspaces, plans, graphs, strided weights, which the path must leave to another.
"""

from dataclasses import replace

import pytest

from experts import tile_permuted
from experts.tiles import override_config, this_store
from modular_kernel import check
from modular_kernel.catalog import this_machine
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases import BASE, axes
from modular_kernel.types import Machine, Problem

PAIR = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")
SMALL = replace(BASE, dtype="bfloat16", hidden=144, intermediate=208)
# 150 rows an expert and more: whole tiles, and last ones of more and of less than 64 rows.
LARGE = replace(SMALL, tokens=391, hidden=320, intermediate=400)
QUANTS = ("none", "fp8_w8a8_channel", "fp8_w8a8_block")


def cases() -> list[Case]:
    found: dict[Case, None] = {}
    for quant in QUANTS:
        for base in (SMALL, LARGE):
            if quant == "fp8_w8a8_block":  # up rows start on half a scale block
                base = replace(base, intermediate=base.intermediate // 64 * 64)
            for problem, routing in axes(replace(base, quant=quant)):
                kept = problem.scheme == replace(base, quant=quant).scheme
                if kept and check(*PAIR, problem, MACHINE).ok and served(problem):
                    found[Case(*PAIR, problem, routing)] = None
    return list(found)


def served(problem: Problem) -> bool:
    return tile_permuted.serves(problem, this_store().device)


MACHINE = this_machine()
CASES = cases()


def test_there_are_cases_where_the_path_runs() -> None:
    assert (len(CASES) > 150) == this_store().device.boxes


@pytest.mark.parametrize("case", CASES, ids=str)
def test_proven(case: Case, machine: Machine) -> None:
    with override_config(tile_permuted.default(case.problem)):
        proof = prove(case, machine)
    assert proof.passed, str(proof)
