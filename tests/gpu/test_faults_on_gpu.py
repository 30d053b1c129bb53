"""Faults over NCCL ranks on two GPUs: no rank hangs, and survivors name the rank at fault."""

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

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
PARTS = list_supported_parts(2, "nccl") if GPUS > 1 else ()
LANES = 3  # ranks mostly wait; with more, they would wait for each other longer than the deadlines
SECONDS = 120.0


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("part", PARTS)
def test_survivors_name_the_rank_at_fault_in_time(part: str) -> None:
    results = run_matrix(
        list_scenarios(part, "nccl"), 2, "nccl", num_pools=LANES, start_limit_s=SECONDS
    )
    findings_by_scenario = {str(result.scenario): result.findings() for result in results}
    assert {name: findings for name, findings in findings_by_scenario.items() if findings} == {}
    assert len(findings_by_scenario) >= 12


def test_every_survivor_names_the_rank_at_fault() -> None:
    if GPUS < 3:
        pytest.skip("needs three GPUs")
    scenario = list_scenarios("TorchAll2AllPrepareAndFinalize", "nccl")[0]
    with RankPool(3, "nccl", grace=TIMEOUT_S + 2 * SLACK_S) as pool:
        assert run_scenario(scenario, pool).findings() == []
