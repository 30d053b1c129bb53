"""Batches with LoRA adapters of ranks 3, 16 and 64, compared with merged weights in float64."""

from dataclasses import replace

import pytest
import torch

import modular_kernel as mk
from modular_kernel import reference
from modular_kernel.catalog import check, this_machine
from modular_kernel.layers.adapter_pool import AdapterPool
from modular_kernel.reference.weights import dequantize_matrix
from modular_kernel.spec.lora import Adapter
from modular_kernel.spec.quantization import QUANT_SCHEMES
from modular_kernel.tensors import ExpertWeights
from modular_kernel.testing.cases.inputs import make_inputs
from modular_kernel.testing.verify.compare import compare

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MACHINE = this_machine(device=DEVICE.type)  # type: ignore[arg-type]
FACTOR_NAMES = ("lora_a13", "lora_b13", "lora_a2", "lora_b2")
RANKS = (3, 16, 64)
PARTS = ("TorchExperts", "TritonExperts")
# Act-order schemes do not support adapters, nor do 4-bit activations in TritonExperts.
ACT_ORDER_SCHEMES = {name for name in QUANT_SCHEMES if "act_order" in name}
REFUSED_SCHEMES = [(part, name) for part in PARTS for name in sorted(ACT_ORDER_SCHEMES)]
REFUSED_SCHEMES.append((PARTS[1], "nvfp4_w4a4"))
SCHEMES = tuple(sorted(set(QUANT_SCHEMES) - ACT_ORDER_SCHEMES))
Matrices = tuple[torch.Tensor, ...]


def make_problem(quant: str, top_k: int, dtype: torch.dtype = torch.bfloat16) -> mk.Problem:
    return mk.Problem(
        13, 128, 128, 8, top_k, dtype, quant=quant, bias=True, lora="adapters=3,rank=64"
    )


def make_random_adapter(problem: mk.Problem, rank: int) -> Adapter:
    """Return an adapter whose contribution is about as large as that of the base weights."""
    generator = torch.Generator().manual_seed(rank)
    e, h, i = problem.e, problem.hidden, problem.intermediate
    shapes = (e, 2 * rank, h), (e, 2 * i, rank), (e, rank, i), (e, h, rank)
    tensors = (torch.randn(shape, generator=generator) / shape[2] ** 0.5 for shape in shapes)
    return Adapter(*(tensor.to(problem.dtype) for tensor in tensors))


def merge_adapter(
    problem: mk.Problem, base_weights: ExpertWeights, adapter: Adapter | None
) -> ExpertWeights:
    """Return the dequantized float64 weights to which the adapter's product B A is added.

    The float64 reference does not share this code.
    """
    matrices = [
        torch.stack([
            dequantize_matrix(base_weights, name, expert, problem, torch.float64)
            for expert in range(problem.e)
        ])
        for name in ("w1", "w2")
    ]  # fmt: skip
    if adapter is not None:
        a13, b13, a2, b2 = (getattr(adapter, name).double().to(DEVICE) for name in FACTOR_NAMES)
        rank, rows = a2.shape[1], b13.shape[1] // 2
        matrices[0][:, :rows] += b13[:, :rows] @ a13[:, :rank]
        matrices[0][:, rows:] += b13[:, rows:] @ a13[:, rank:]
        matrices[1] += b2 @ a2
    return ExpertWeights(*matrices, b1=base_weights.b1, b2=base_weights.b2)


def compare_with_merged(experts: str, problem: mk.Problem) -> tuple[float, tuple[str, ...]]:
    """Return the relative error of a call and the failures that `compare` reports."""
    inputs = make_inputs(problem, "skips", DEVICE)
    base_weights = replace(inputs.weights, **dict.fromkeys(FACTOR_NAMES))
    pool = AdapterPool(problem, DEVICE)
    adapters = [make_random_adapter(problem, rank) for rank in RANKS]
    for rank, adapter in zip(RANKS, adapters, strict=True):
        pool.load(f"of rank {rank}", adapter)
    slots_T = (torch.arange(13, device=DEVICE) % 4 - 1).int()
    routing, weights = replace(inputs.routing, adapters_T=slots_T), pool.weights(base_weights)
    kernel = mk.make_kernel("MoEPrepareAndFinalizeNoEP", experts, problem, machine=MACHINE)
    got = kernel(inputs.x_TH.clone(), weights, routing)
    merged_problem = replace(problem, lora="none", quant="none")
    merged_routing = replace(routing, adapters_T=None)
    expected = torch.zeros(13, 128, dtype=torch.float64, device=DEVICE)
    for slot, adapter in enumerate((None, *adapters), start=-1):
        uses_slot = slots_T == slot
        merged = merge_adapter(problem, base_weights, adapter)
        expected[uses_slot] = reference.float64_reference(
            inputs.x_TH, merged, merged_routing, merged_problem
        )[uses_slot]
    rounded_reference = reference.rounded_reference(inputs.x_TH, weights, routing, problem)
    comparison = compare(got, expected, rounded_reference, problem)
    if comparison.problems:  # 13 tokens may be too few to estimate the rounding error
        error = measure_rounding_error_of_64_tokens(problem, weights)
        comparison = compare(got, expected, rounded_reference, problem, rounding_error=error)
    return comparison.error, comparison.problems


def measure_rounding_error_of_64_tokens(problem: mk.Problem, weights: ExpertWeights) -> float:
    """Return the rounded reference's relative error over 64 tokens of the same layer."""
    problem_64 = problem.with_tokens(64)
    inputs = make_inputs(problem_64, "uniform", DEVICE)
    slots_T = (torch.arange(64, device=DEVICE) % 4 - 1).int()
    arguments = inputs.x_TH, weights, replace(inputs.routing, adapters_T=slots_T), problem_64
    exact = reference.float64_reference(*arguments)
    return float((reference.rounded_reference(*arguments) - exact).norm() / exact.norm())


@pytest.mark.parametrize("experts", PARTS)
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_float32_error_is_below_one_millionth(experts: str, top_k: int) -> None:
    error, problems = compare_with_merged(experts, make_problem("none", top_k, torch.float32))
    assert problems == ()
    assert error <= 1e-6


CASES = [(PARTS[0], quant, top_k) for quant in SCHEMES for top_k in (1, 2, 8)]
# The interpreter is slow, so TritonExperts has one top-k per scheme.
CASES += [
    (PARTS[1], quant, (1, 2, 8)[n % 3])
    for n, quant in enumerate(SCHEMES)
    if (PARTS[1], quant) not in REFUSED_SCHEMES
]


@pytest.mark.share(3)
@pytest.mark.parametrize(("experts", "quant", "top_k"), CASES)
def test_quantized_layers_are_within_the_tolerance(experts: str, quant: str, top_k: int) -> None:
    _, problems = compare_with_merged(experts, make_problem(quant, top_k))
    assert problems == ()


@pytest.mark.parametrize(("experts", "quant"), REFUSED_SCHEMES)
def test_schemes_without_adapter_support_are_refused(experts: str, quant: str) -> None:
    assert not check("MoEPrepareAndFinalizeNoEP", experts, make_problem(quant, 2), MACHINE).ok
