"""Faults over NCCL ranks, two GPUs: nobody hangs, and whoever survives names the rank at fault."""

import pytest
import torch

from modular_kernel.testing.faults_matrix import (
    Result,
    parts_to_try,
    run_matrix,
    run_scenario,
    scenarios,
)
from modular_kernel.testing.faults_ranks import DEADLINE_S, SLACK_S, Scenario
from modular_kernel.testing.ranks import RankPool

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
FAULTS = [s for part in (parts_to_try(2, "nccl") if GPUS > 1 else ()) for s in
          scenarios(part, "nccl")]  # fmt: skip
LANES = 6  # each is mostly waiting
SECONDS = 240.0


def named(scenario: Scenario) -> str:
    return f"{scenario.part}-{scenario}".replace(" ", "-")


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    """Of every scenario, run side by side once."""
    done = run_matrix(FAULTS, 2, "nccl", lanes=LANES, seconds=SECONDS)
    return {named(result.scenario): result for result in done}


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("name", list(map(named, FAULTS)))
def test_survivors_name_the_rank_at_fault_in_time(name: str, results: dict[str, Result]) -> None:
    assert results[name].findings() == []


def test_a_third_rank_names_it_too() -> None:
    if GPUS < 3:
        pytest.skip("needs three GPUs")
    scenario = scenarios("TorchAll2AllPrepareAndFinalize", "nccl")[0]
    with RankPool(3, "nccl", grace=DEADLINE_S + 2 * SLACK_S) as pool:
        assert run_scenario(scenario, pool).findings() == []
