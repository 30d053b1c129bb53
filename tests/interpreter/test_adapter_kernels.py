"""Triton GEMMs with LoRA adapters: rows without an adapter, large ranks, slots out of range."""

from dataclasses import replace

import pytest
import torch

import modular_kernel as mk
from experts.triton.aligned.aligned_path import AlignedPath
from experts.triton.configs.select import choose_config, explain, override_config
from experts.triton.standard import supported_paths
from modular_kernel import reference
from modular_kernel.catalog import this_machine
from modular_kernel.spec.problem import Problem
from modular_kernel.testing.cases.inputs import Inputs, make_inputs

CPU = torch.device("cpu")
MACHINE = this_machine(device="cpu")
PROBLEM = Problem(
    tokens=9, hidden=32, intermediate=32, experts=3, top_k=2, dtype=torch.bfloat16,
    lora="adapters=3,rank=20",
)  # fmt: skip
CONTIGUOUS = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")
SEGMENTS = ("MoEPrepareAndFinalizeNoEP", "GroupedGemmExperts")
BATCHED = ("BatchedPrepareAndFinalize", "BatchedTritonExperts")
FACTORS = ("lora_a13", "lora_b13", "lora_a2", "lora_b2")


def run(pair: tuple[str, str], problem: Problem, inputs: Inputs) -> torch.Tensor:
    kernel = mk.make_kernel(*pair, problem, machine=MACHINE, poison=True)
    return kernel(inputs.x_TH, inputs.weights, inputs.routing).clone()


@pytest.mark.parametrize("pair", [CONTIGUOUS, SEGMENTS, BATCHED])
@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_channel"])
def test_rows_without_adapter_equal_a_call_without_adapters(
    pair: tuple[str, str], quant: str
) -> None:
    """Both layers use one configuration, because some paths do not support adapters."""
    problem = replace(PROBLEM, quant=quant)
    inputs = make_inputs(problem, "uniform", CPU)
    slots_T = inputs.routing.slots_T
    assert slots_T is not None
    problem_without_adapters = replace(problem, lora="none")
    inputs_without_adapters = Inputs(
        inputs.x_TH,
        replace(inputs.weights, **dict.fromkeys(FACTORS)),
        replace(inputs.routing, adapters_T=None),
    )
    with override_config(choose_config(problem_without_adapters, 9, (AlignedPath.name,))):
        actual = run(pair, problem, inputs)
        expected = run(pair, problem_without_adapters, inputs_without_adapters)
    without_adapter = slots_T < 0
    assert 0 < int(without_adapter.sum()) < 9
    assert torch.equal(actual[without_adapter], expected[without_adapter])
    assert bool((actual[~without_adapter] != expected[~without_adapter]).any(1).all())


@pytest.mark.parametrize("pair", [CONTIGUOUS, SEGMENTS, BATCHED])
@pytest.mark.parametrize("rank", [1, 130])
def test_small_and_large_ranks_equal_the_reference(pair: tuple[str, str], rank: int) -> None:
    """All tokens have the same expert, so that a tile contains rows of two adapters."""
    problem = replace(PROBLEM, dtype=torch.float32, lora=f"adapters=2,rank={rank}")
    inputs = make_inputs(problem, "all_to_one", CPU)
    assert inputs.routing.slots_T is not None
    assert set(inputs.routing.slots_T.tolist()) >= {0, 1}
    exact = reference.float64_reference(inputs.x_TH, inputs.weights, inputs.routing, problem)
    error = (run(pair, problem, inputs).double() - exact).norm() / exact.norm()
    assert float(error) <= 1e-6


@pytest.mark.parametrize("pair", [CONTIGUOUS, SEGMENTS, BATCHED])
def test_shared_factors_equal_the_reference(pair: tuple[str, str]) -> None:
    """With outer=shared, all experts have one A in GEMM 1 and one B in GEMM 2."""
    problem = replace(PROBLEM, dtype=torch.float32, lora="adapters=3,rank=20,outer=shared")
    inputs = make_inputs(problem, "uniform", CPU)
    assert (inputs.weights.lora_a13.shape[1], inputs.weights.lora_b13.shape[1]) == (1, 3)
    exact = reference.float64_reference(inputs.x_TH, inputs.weights, inputs.routing, problem)
    error = (run(pair, problem, inputs).double() - exact).norm() / exact.norm()
    assert float(error) <= 1e-6


def test_batch_invariant_calls_equal_the_reference() -> None:
    problem = replace(PROBLEM, dtype=torch.float32, batch_invariant=True)
    inputs = make_inputs(problem, "uniform", CPU)
    exact = reference.float64_reference(inputs.x_TH, inputs.weights, inputs.routing, problem)
    error = (run(CONTIGUOUS, problem, inputs).double() - exact).norm() / exact.norm()
    assert float(error) <= 1e-6


@pytest.mark.share(2)
@pytest.mark.parametrize("tokens", [2, 9])
def test_rows_longer_than_a_block_equal_the_reference(tokens: int) -> None:
    """Up to 16 pairs read whole rows of A; more pairs read them in two steps."""
    sizes = {"hidden": 16, "intermediate": 4112, "dtype": torch.float32}
    problem = replace(PROBLEM, tokens=tokens, lora="adapters=2,rank=5", **sizes)
    inputs = make_inputs(problem, "uniform", CPU)
    exact = reference.float64_reference(inputs.x_TH, inputs.weights, inputs.routing, problem)
    error = (run(CONTIGUOUS, problem, inputs).double() - exact).norm() / exact.norm()
    assert float(error) <= 1e-6


@pytest.mark.parametrize("pair", [CONTIGUOUS, SEGMENTS, BATCHED])
def test_slots_out_of_range_mean_no_adapter(pair: tuple[str, str]) -> None:
    inputs = make_inputs(PROBLEM, "uniform", CPU)
    assert inputs.routing.slots_T is not None
    no_adapter_T = inputs.routing.slots_T.clone()
    no_adapter_T[::2] = -1
    out_of_range_T = no_adapter_T.clone()
    out_of_range_T[::2] = torch.tensor([3, -2, 2**31 - 1, -(2**31), 7], dtype=torch.int32)
    no_adapter_inputs = Inputs(
        inputs.x_TH, inputs.weights, replace(inputs.routing, adapters_T=no_adapter_T)
    )
    out_of_range_inputs = Inputs(
        inputs.x_TH, inputs.weights, replace(inputs.routing, adapters_T=out_of_range_T)
    )
    assert torch.equal(
        run(pair, PROBLEM, out_of_range_inputs), run(pair, PROBLEM, no_adapter_inputs)
    )


def test_call_without_adapters_uses_the_paths_of_a_layer_without() -> None:
    """A layer without adapters has more paths, and `explain` says which calls may use them."""
    problem = replace(PROBLEM, tokens=1, quant="int4_w4a16_group:group=32")
    problem_without_adapters = replace(problem, lora="none")
    assert supported_paths(replace(problem, quant="none")) == (AlignedPath.name, "gemv")
    assert supported_paths(problem) == (AlignedPath.name,)
    assert (
        choose_config(problem_without_adapters, 1, supported_paths(problem_without_adapters)).path
        == "gemv_w4"
    )
    explanation = explain(problem, 1, paths=supported_paths(problem))
    assert f"path: {AlignedPath.name}" in explanation
    assert "only calls without adapters take the paths" in explanation
    assert "gemv_w4" in explanation
    assert "adapters" not in explain(
        problem_without_adapters, 1, paths=supported_paths(problem_without_adapters)
    )
    inputs = make_inputs(problem, "uniform", CPU)
    call_without_adapters = Inputs(
        inputs.x_TH, inputs.weights, replace(inputs.routing, adapters_T="none")
    )
    inputs_without_adapters = Inputs(
        inputs.x_TH,
        replace(inputs.weights, **dict.fromkeys(FACTORS)),
        replace(inputs.routing, adapters_T=None),
    )
    assert torch.equal(
        run(CONTIGUOUS, problem, call_without_adapters),
        run(CONTIGUOUS, problem_without_adapters, inputs_without_adapters),
    )
