"""Adapters of ranks 3, 16 and 64 in one batch beside merged weights in float64, in every scheme."""

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
NAMES = ("lora_a13", "lora_b13", "lora_a2", "lora_b2")
RANKS = (3, 16, 64)
PARTS = ("TorchExperts", "TritonExperts")
# Columns out of their order are no adapter's; activations of 4 bits are not TritonExperts'.
WITHOUT = {name for name in QUANT_SCHEMES if "act_order" in name}
REFUSED = [(part, name) for part in PARTS for name in sorted(WITHOUT)]
REFUSED.append((PARTS[1], "nvfp4_w4a4"))
SCHEMES = tuple(sorted(set(QUANT_SCHEMES) - WITHOUT))
Matrices = tuple[torch.Tensor, ...]


def problem_of(quant: str, top_k: int, dtype: torch.dtype = torch.bfloat16) -> mk.Problem:
    return mk.Problem(
        13, 128, 128, 8, top_k, dtype, quant=quant, bias=True, lora="adapters=3,rank=64"
    )


def adapter(problem: mk.Problem, rank: int) -> Adapter:
    """Its product with a matrix's input is about as large as the matrix's own."""
    g = torch.Generator().manual_seed(rank)
    e, h, i = problem.e, problem.hidden, problem.intermediate
    shapes = (e, 2 * rank, h), (e, 2 * i, rank), (e, rank, i), (e, h, rank)
    made = (torch.randn(shape, generator=g) / shape[2] ** 0.5 for shape in shapes)
    return Adapter(*(each.to(problem.dtype) for each in made))


def merged(problem: mk.Problem, base: ExpertWeights, adapter: Adapter | None) -> ExpertWeights:
    """The values that weights stand for, with B A added: written without `reference_adapters`."""
    matrices = [
        torch.stack([
            dequantize_matrix(base, name, e, problem, torch.float64) for e in range(problem.e)
        ])
        for name in ("w1", "w2")
    ]  # fmt: skip
    if adapter is not None:
        a13, b13, a2, b2 = (getattr(adapter, name).double().to(DEVICE) for name in NAMES)
        rank, rows = a2.shape[1], b13.shape[1] // 2
        matrices[0][:, :rows] += b13[:, :rows] @ a13[:, :rank]
        matrices[0][:, rows:] += b13[:, rows:] @ a13[:, rank:]
        matrices[1] += b2 @ a2
    return ExpertWeights(*matrices, b1=base.b1, b2=base.b2)


def judged(experts: str, problem: mk.Problem) -> tuple[float, tuple[str, ...]]:
    """Relative error, and what the rule says of it."""
    i = make_inputs(problem, "skips", DEVICE)
    base = replace(i.weights, **dict.fromkeys(NAMES))
    pool, adapters = AdapterPool(problem, DEVICE), [adapter(problem, rank) for rank in RANKS]
    for rank, each in zip(RANKS, adapters, strict=True):
        pool.load(f"of rank {rank}", each)
    slots_T = (torch.arange(13, device=DEVICE) % 4 - 1).int()
    routing, weights = replace(i.routing, adapters_T=slots_T), pool.weights(base)
    kernel = mk.make_kernel("MoEPrepareAndFinalizeNoEP", experts, problem, machine=MACHINE)
    got = kernel(i.x_TH.clone(), weights, routing)
    plain = replace(problem, lora="none", quant="none")
    without = replace(routing, adapters_T=None)
    want = torch.zeros(13, 128, dtype=torch.float64, device=DEVICE)
    for slot, each in enumerate((None, *adapters), start=-1):
        mine = slots_T == slot
        its = merged(problem, base, each)
        want[mine] = reference.float64_reference(i.x_TH, its, without, plain)[mine]
    rounded_reference = reference.rounded_reference(i.x_TH, weights, routing, problem)
    found = compare(got, want, rounded_reference, problem)
    if found.problems:  # as the rule has it: these may be few tokens
        found = compare(
            got, want, rounded_reference, problem, rounding_error=fair_of_more(problem, weights)
        )
    return found.error, found.problems


def fair_of_more(problem: mk.Problem, weights: ExpertWeights) -> float:
    """The rounded reference's relative error over 64 tokens of the same layer."""
    more = problem.with_tokens(64)
    i = make_inputs(more, "uniform", DEVICE)
    slots_T = (torch.arange(64, device=DEVICE) % 4 - 1).int()
    given = i.x_TH, weights, replace(i.routing, adapters_T=slots_T), more
    exact = reference.float64_reference(*given)
    return float((reference.rounded_reference(*given) - exact).norm() / exact.norm())


@pytest.mark.parametrize("experts", PARTS)
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_in_float32_within_a_millionth(experts: str, top_k: int) -> None:
    error, problems = judged(experts, problem_of("none", top_k, torch.float32))
    assert problems == ()
    assert error <= 1e-6


CASES = [(PARTS[0], quant, top_k) for quant in SCHEMES for top_k in (1, 2, 8)]
# Interpreted, each scheme with one K in turn.
CASES += [
    (PARTS[1], quant, (1, 2, 8)[n % 3])
    for n, quant in enumerate(SCHEMES)
    if (PARTS[1], quant) not in REFUSED
]


@pytest.mark.share(3)
@pytest.mark.parametrize(("experts", "quant", "top_k"), CASES)
def test_in_bf16_and_quantized_within_the_rule(experts: str, quant: str, top_k: int) -> None:
    _, problems = judged(experts, problem_of(quant, top_k))
    assert problems == ()


@pytest.mark.parametrize(("experts", "quant"), REFUSED)
def test_other_schemes_are_refused(experts: str, quant: str) -> None:
    assert not check("MoEPrepareAndFinalizeNoEP", experts, problem_of(quant, 2), MACHINE).ok
