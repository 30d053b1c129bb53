"""The DeepEP parts on gloo ranks, with stand-ins that write poison where DeepEP leaves data
undefined.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import deepep_stand_in as stand_in
import pytest

from modular_kernel.catalog import this_machine
from modular_kernel.testing.cases.ranks import RankCase, rank_cases_for
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.testing.verify.over_ranks import prove_ranks

MACHINE = this_machine(device="cpu")
PAIRS = (
    (stand_in.HTOverGloo, "TorchExperts"),
    (stand_in.V2OverGloo, "TorchExperts"),
    (stand_in.LLOverGloo, "NaiveBatchedExperts"),
    (stand_in.HTOverGloo, "TritonExperts"),
    (stand_in.HTOverGloo, "GroupedGemmExperts"),
    # Buffer of DeepEP 2
    (stand_in.HTOverGlooV2, "TorchExperts"),
    (stand_in.LLOverGlooV2, "NaiveBatchedExperts"),
)
PAIRS_WITH_INT32_IDS = (
    (stand_in.HTOverGlooV2Int32, "TorchExperts"),
    (stand_in.LLOverGlooV2Int32, "NaiveBatchedExperts"),
)

Pool = Callable[[int], RankPool]


def collect_cases() -> list[RankCase]:
    cases_on_one_host = [
        case for part, experts in PAIRS for case in rank_cases_for(part, experts, MACHINE, 2).cases
    ]
    cases_with_int32_ids = [
        case
        for part, experts in PAIRS_WITH_INT32_IDS
        for case in rank_cases_for(part, experts, MACHINE, 2).cases
        if case.routing in ("duplicates", "skips")
    ]
    assert len({case.prepare_finalize for case in cases_with_int32_ids}) == 2
    return [
        *cases_on_one_host,
        *cases_with_int32_ids,
        *make_cases_between_hosts(stand_in.HTBetweenHosts),
        *make_cases_between_hosts(stand_in.HTBetweenHostsV2),
    ]


def make_cases_between_hosts(part: Any) -> list[RankCase]:
    """Return cases with one rank on each host. DeepEP then waits for the numbers of rows."""
    cases_between_hosts = []
    for case in rank_cases_for(stand_in.HTOverGloo, "TorchExperts", MACHINE, 2).cases:
        parallel = replace(case.problem.parallel, ranks_per_host=1)
        problem = replace(case.problem, parallel=parallel, graph=False)
        case_between_hosts = replace(case, prepare_finalize=part, problem=problem)
        if case_between_hosts.verdict(MACHINE).ok:
            cases_between_hosts.append(case_between_hosts)
    return cases_between_hosts


def format_case_id(case: RankCase) -> str:
    """Return the text of a case with the name of its part instead of the class."""
    return f"{case.prepare_finalize.__name__}+{str(case).partition('+')[2]}"


@pytest.mark.share(4)
@pytest.mark.parametrize("case", collect_cases(), ids=format_case_id)
def test_cases_are_proven(case: RankCase, rank_pool: Pool) -> None:
    proof = prove_ranks(case, rank_pool(2), MACHINE)
    assert proof.passed, str(proof)
