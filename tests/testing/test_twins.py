"""One rounding more or less than a part declares is found, where the tolerance finds nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from experts.grouped_gemm import GroupedGemmExperts
from experts.naive_batched import NaiveBatchedExperts
from experts.torch_experts import TorchExperts
from experts.triton.batched import BatchedTritonExperts
from experts.triton.contiguous import TritonExperts
from modular_kernel import Problem, reference
from modular_kernel.catalog import this_machine
from modular_kernel.contracts import PermuteExpertsUnpermute
from modular_kernel.ops import mlp
from modular_kernel.quant.quantized_weights import QUANT_SCHEMES
from modular_kernel.spec.problem import Machine
from modular_kernel.spec.rounding import Roundings
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases.inputs import make_inputs
from modular_kernel.testing.cases.lists import BASE
from modular_kernel.testing.input_mutations.roundings import ROUNDING_MUTANTS
from modular_kernel.testing.verify import bitwise_reference
from modular_kernel.testing.verify.bitwise_reference import check_shares
from modular_kernel.testing.verify.trial import Trial

_NO_EP, _BATCHED = "MoEPrepareAndFinalizeNoEP", "BatchedPrepareAndFinalize"
_HALF = replace(BASE, dtype=torch.bfloat16)
_INT4 = replace(_HALF, hidden=160, intermediate=96, quant="int4_w4a16_group:group=32")
_FP8 = replace(_HALF, hidden=160, intermediate=96, quant="fp8_w8a8_channel")


def _failures(
    prepare: str, experts: type[PermuteExpertsUnpermute], problem: Problem, machine: Machine
) -> tuple[str, ...]:
    return prove(Case(prepare, experts.__name__, problem), machine).failures


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("prepare", "experts", "problem", "change"),
    [
        (_NO_EP, TorchExperts, _HALF, {"gate_up": False}),
        (_NO_EP, TorchExperts, _HALF, {"rows": False}),
        (_NO_EP, TorchExperts, _INT4, {"weights": False}),
        (_NO_EP, TorchExperts, _FP8, {"gate_up": True}),
        (_BATCHED, NaiveBatchedExperts, _HALF, {"rows": False}),
        (_NO_EP, TritonExperts, _HALF, {"gate_up": True}),
        (_NO_EP, TritonExperts, _HALF, {"rows": False}),
        (_NO_EP, TritonExperts, _INT4, {"weights": True}),
        (_NO_EP, TritonExperts, replace(_HALF, tokens=1), {"rows": True}),
        (_BATCHED, BatchedTritonExperts, _INT4, {"weights": True}),
        (_NO_EP, GroupedGemmExperts, _HALF, {"gate_up": True}),
    ],
    ids=str,
)
def test_what_is_declared_is_what_happens(
    prepare: str,
    experts: type[PermuteExpertsUnpermute],
    problem: Problem,
    change: dict[str, Any],
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one word changed nothing but this check fails; as they are, all cases pass it."""
    true = experts.roundings

    def wrong(self: PermuteExpertsUnpermute, x_TH: torch.Tensor, weights: Any) -> Roundings:
        found = true(self, x_TH, weights)
        assert found is not None
        return replace(found, **change)

    if problem is _FP8 and machine.device == "cuda":
        pytest.skip("not judged: tensor cores add products of fp8 with fewer bits")
    monkeypatch.setattr(experts, "roundings", wrong)
    failures = _failures(prepare, experts, problem, machine)
    assert failures
    assert [line for line in failures if not line.startswith("one_rounding: ")] == []


def test_rounded_partial_sums_are_found(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A last product of sixteen of the depth, rounded before it is added."""

    def apart(a: torch.Tensor, matrix: torch.Tensor, *, alone: bool) -> torch.Tensor:
        first, last = slice(None, -16), slice(-16, None)
        sums = [a[:, part].float() @ matrix[:, part].float().T for part in (first, last)]
        value = sums[0] + sums[1].to(_HALF.dtype).float()
        return value.to(_HALF.dtype) if alone else value

    monkeypatch.setattr(mlp, "_product", apart)
    failures = _failures(_NO_EP, TorchExperts, _HALF, machine)
    assert any(failure.startswith("one_rounding: ") for failure in failures)


@pytest.mark.parametrize(
    ("prepare", "experts"),
    [
        (_NO_EP, "TorchExperts"),
        (_NO_EP, "TritonExperts"),
        (_NO_EP, "GroupedGemmExperts"),
        (_BATCHED, "NaiveBatchedExperts"),
        (_BATCHED, "BatchedTritonExperts"),
    ],
)
def test_rounded_router_weights_are_found_in_every_pairing(
    prepare: str, experts: str, machine: Machine
) -> None:
    (mutant,) = ROUNDING_MUTANTS
    case = Case(prepare, experts, _HALF)
    assert mutant.occurs(case, machine)
    failures = prove(case, machine, mutant.build).failures
    assert any(line.startswith("one_rounding: ") for line in failures)
    # On a GPU allocations are counted, and the mutant makes a tensor.
    more = ("no_allocation: ",) if machine.device == "cuda" else ()
    found_by = ("one_rounding: ", *more)
    assert [line for line in failures if not line.startswith(found_by)] == []


def test_a_twin_that_rounds_as_the_recipe_does_is_the_recipe() -> None:
    i = make_inputs(_INT4, "skips", torch.device("cpu"))
    tensors = (i.x_TH, i.weights, i.routing, _INT4)
    rounded = Roundings(weights=True, gate_up=True)
    twin = reference.bitwise_reference(*tensors, rounded, input_weighted=False)
    same = (twin.double() == reference.recipe(*tensors)).double().mean()
    assert twin.dtype is torch.bfloat16
    assert same > 0.97


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_tensor"])
def test_copies_of_a_call_are_calls_of_their_own(quant: str) -> None:
    """One scale for all rows is one for each copy; random numbers are each copy's own."""
    problem = replace(BASE, quant=quant, lora="adapters=3,rank=7")
    i = make_inputs(problem, "skips", torch.device("cpu"))
    given = i.x_TH, i.weights, i.routing, problem, Roundings()

    def perturbed_references(*seeds: int) -> list[torch.Tensor]:
        jitters = [torch.Generator().manual_seed(seed) if seed else None for seed in seeds]
        return list(reference.bitwise_references(*given, input_weighted=False, jitters=jitters))

    apart = [each for seed in (0, 1, 2) for each in perturbed_references(seed)]
    assert torch.equal(torch.stack(perturbed_references(0, 1, 2)), torch.stack(apart))
    assert not torch.equal(apart[1], apart[2])


def test_few_rows_may_differ_and_typical_ones_may_not() -> None:
    own, where = torch.zeros(30), [Roundings()]
    few, many = torch.zeros(20), torch.zeros(20)
    few[:3], many[:4] = 0.9, 0.2
    assert list(check_shares(few, own, where)) == []
    (line,) = check_shares(many, own, where)
    assert "4 of 20 rows differ from the bitwise reference" in line
    assert "at most 3 may" in line
    (line,) = check_shares(torch.full((20,), 0.04), own, where)
    assert "typical row" in line
    assert list(check_shares(torch.full((20,), 0.04), torch.full((30,), 0.02), where)) == []
    assert list(check_shares(torch.zeros(0), torch.zeros(0), where)) == []


def _told_of_weights(trial: Trial, change: float) -> bool:
    """Whether router weights raised by this part of themselves would be told from the twin's."""
    shares, own = [], []
    for sample in (trial.first, trial.second):
        (way,) = bitwise_reference.declared_roundings(trial, sample) or []
        weights = sample.pristine.routing.topk_weights_TK
        right, kept = bitwise_reference.bitwise_reference(sample, way), weights.clone()
        weights.mul_(1 + change)
        raised = bitwise_reference.bitwise_reference(sample, way)
        weights.copy_(kept)
        live = bitwise_reference.comparable_rows(sample, right)
        shares.append(bitwise_reference.share_of_differing_values(raised, right)[live])
        moved = bitwise_reference.perturbed_references(sample, way, 3)[1:]
        own += [bitwise_reference.share_of_differing_values(each, right)[live] for each in moved]
    return bool(list(bitwise_reference.check_shares(torch.cat(shares), torch.cat(own), [])))


@pytest.mark.cpu
@pytest.mark.parametrize("quant", QUANT_SCHEMES)
def test_how_small_a_change_of_router_weights_is_seen(quant: str) -> None:
    """What docs/numerics.md says, scheme by scheme."""
    for dtype, seen, unseen in ((torch.bfloat16, 12, 14), (torch.float16, 15, 17)):
        problem = Problem(19, 160, 96, 5, 2, dtype=dtype, quant=quant)
        trial = Trial(Case(_NO_EP, "TorchExperts", problem), this_machine(device="cpu"))
        assert _told_of_weights(trial, 2.0**-seen)
        assert not _told_of_weights(trial, 2.0**-unseen)
