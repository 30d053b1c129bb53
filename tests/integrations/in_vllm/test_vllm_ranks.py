"""Layers on two ranks of vLLM over gloo, with tensor or expert parallelism."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from vllm_layers import free_store
from vllm_ranks import CASES, WORLD_SIZE, tensors

from modular_kernel.reference import float64_reference, rounded_reference
from modular_kernel.settings import make_child_environment
from modular_kernel.testing.verify.compare import compare

PROGRAM = Path(__file__).parents[2] / "helpers" / "vllm_ranks.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all cases on both ranks, and return the folder with the summed outputs."""
    folder, store = tmp_path_factory.mktemp("ranks"), free_store()
    environment = make_child_environment(interpreted=True) | {"MK_VLLM": "TritonExperts"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), store, str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=280)
        assert process.returncode == 0, output[-3000:]
    return folder


@pytest.mark.parametrize("name", CASES)
def test_rank_outputs_sum_to_the_output_of_the_layer(name: str, folder: Path) -> None:
    problem, _ = CASES[name]
    got = torch.load(folder / f"{name}.pt").to(problem.dtype)
    inputs = *tensors(problem), problem
    # Each rank rounds its output, whereas the reference rounds the sum once.
    comparison = compare(got, float64_reference(*inputs), rounded_reference(*inputs), problem)
    assert comparison.ok, comparison.problems
