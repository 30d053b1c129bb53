"""Faults of NCCL ranks on two or more GPUs: no rank hangs, and survivors name the faulty rank."""

import pytest
import torch

from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.testing.stress.fault_matrix import (
    list_scenarios,
    list_supported_parts,
    run_matrix,
    run_scenario,
)
from modular_kernel.testing.stress.faults import SLACK_S, TIMEOUT_S

NUM_GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")
PARTS = list_supported_parts(2, "nccl") if NUM_GPUS > 1 else ()
# Pools run concurrently, because ranks mostly wait. With more than three, ranks would wait for
# each other beyond the deadlines.
NUM_POOLS = 3
START_LIMIT_S = 120.0


@pytest.mark.timeout(START_LIMIT_S + 60)
@pytest.mark.parametrize("part", PARTS)
def test_survivors_name_the_rank_at_fault_in_time(part: str) -> None:
    results = run_matrix(
        list_scenarios(part, "nccl"), 2, "nccl", num_pools=NUM_POOLS, start_limit_s=START_LIMIT_S
    )
    findings_by_scenario = {str(result.scenario): result.findings() for result in results}
    assert {name: findings for name, findings in findings_by_scenario.items() if findings} == {}
    assert len(findings_by_scenario) >= 12


def test_every_survivor_names_the_rank_at_fault() -> None:
    if NUM_GPUS < 3:
        pytest.skip("needs three GPUs")
    scenario = list_scenarios("TorchAll2AllPrepareAndFinalize", "nccl")[0]
    with RankPool(3, "nccl", grace=TIMEOUT_S + 2 * SLACK_S) as pool:
        assert run_scenario(scenario, pool).findings() == []
