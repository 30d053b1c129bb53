"""The check `one_rounding` detects missing and extra roundings, which tolerances miss.

It compares an output bitwise with a reference that rounds where the experts class declares that it
rounds.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from experts.grouped_gemm import GroupedGemmExperts
from experts.naive_batched import NaiveBatchedExperts
from experts.torch_experts import TorchExperts
from experts.triton.batched import BatchedTritonExperts
from experts.triton.standard import TritonExperts
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
from modular_kernel.testing.verify.bitwise_reference import check_mismatches
from modular_kernel.testing.verify.trial import Trial

_NO_EP, _BATCHED = "MoEPrepareAndFinalizeNoEP", "BatchedPrepareAndFinalize"
_BF16 = replace(BASE, dtype=torch.bfloat16)
_INT4 = replace(_BF16, hidden=160, intermediate=96, quant="int4_w4a16_group:group=32")
_FP8 = replace(_BF16, hidden=160, intermediate=96, quant="fp8_w8a8_channel")


def _find_failures(
    prepare: str, experts: type[PermuteExpertsUnpermute], problem: Problem, machine: Machine
) -> tuple[str, ...]:
    return prove(Case(prepare, experts.__name__, problem), machine).failures


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("prepare", "experts", "problem", "change"),
    [
        (_NO_EP, TorchExperts, _BF16, {"gate_up": False}),
        (_NO_EP, TorchExperts, _BF16, {"rows": False}),
        (_NO_EP, TorchExperts, _INT4, {"weights": False}),
        (_NO_EP, TorchExperts, _FP8, {"gate_up": True}),
        (_BATCHED, NaiveBatchedExperts, _BF16, {"rows": False}),
        (_NO_EP, TritonExperts, _BF16, {"gate_up": True}),
        (_NO_EP, TritonExperts, _BF16, {"rows": False}),
        (_NO_EP, TritonExperts, _INT4, {"weights": True}),
        (_NO_EP, TritonExperts, replace(_BF16, tokens=1), {"rows": True}),
        (_BATCHED, BatchedTritonExperts, _INT4, {"weights": True}),
        (_NO_EP, GroupedGemmExperts, _BF16, {"gate_up": True}),
    ],
    ids=str,
)
def test_wrong_declared_roundings_fail(
    prepare: str,
    experts: type[PermuteExpertsUnpermute],
    problem: Problem,
    change: dict[str, Any],
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If one field of the declared roundings is changed, only the check `one_rounding` fails."""
    original_roundings = experts.roundings

    def return_changed_roundings(
        self: PermuteExpertsUnpermute, x_TH: torch.Tensor, weights: Any
    ) -> Roundings:
        roundings = original_roundings(self, x_TH, weights)
        assert roundings is not None
        return replace(roundings, **change)

    if problem is _FP8 and machine.device == "cuda":
        pytest.skip("not checked: tensor cores add products of fp8 with fewer bits")
    monkeypatch.setattr(experts, "roundings", return_changed_roundings)
    failures = _find_failures(prepare, experts, problem, machine)
    assert failures
    assert [line for line in failures if not line.startswith("one_rounding: ")] == []


def test_rounded_partial_sums_are_detected(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product over the last 16 columns is rounded before it is added to the rest."""

    def multiply_split(
        a: torch.Tensor, matrix: torch.Tensor, deltas: object, *, is_final: bool
    ) -> torch.Tensor:
        first, last = slice(None, -16), slice(-16, None)
        sums = [a[:, columns].float() @ matrix[:, columns].float().T for columns in (first, last)]
        value = sums[0] + sums[1].to(_BF16.dtype).float()
        return value.to(_BF16.dtype) if is_final else value

    monkeypatch.setattr(mlp, "_multiply", multiply_split)
    failures = _find_failures(_NO_EP, TorchExperts, _BF16, machine)
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
def test_rounded_router_weights_are_detected_in_every_pairing(
    prepare: str, experts: str, machine: Machine
) -> None:
    (mutant,) = ROUNDING_MUTANTS
    case = Case(prepare, experts, _BF16)
    assert mutant.occurs(case, machine)
    failures = prove(case, machine, mutant.build).failures
    assert any(line.startswith("one_rounding: ") for line in failures)
    # On a GPU the mutant also fails the allocation check, because it creates a tensor.
    allocation = ("no_allocation: ",) if machine.device == "cuda" else ()
    expected = ("one_rounding: ", *allocation)
    assert [line for line in failures if not line.startswith(expected)] == []


def test_bitwise_reference_with_all_roundings_nearly_equals_the_rounded_reference() -> None:
    inputs = make_inputs(_INT4, "skips", torch.device("cpu"))
    arguments = (inputs.x_TH, inputs.weights, inputs.routing, _INT4)
    roundings = Roundings(weights=True, gate_up=True)
    bitwise = reference.bitwise_reference(*arguments, roundings, input_weighted=False)
    equal_fraction = (bitwise.double() == reference.rounded_reference(*arguments)).double().mean()
    assert bitwise.dtype is torch.bfloat16
    assert equal_fraction > 0.97


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_tensor"])
def test_batched_references_equal_separate_references(quant: str) -> None:
    """Each element of a batch has its own per-tensor scale and its own random perturbation."""
    problem = replace(BASE, quant=quant, lora="adapters=3,rank=7")
    inputs = make_inputs(problem, "skips", torch.device("cpu"))
    arguments = inputs.x_TH, inputs.weights, inputs.routing, problem, Roundings()

    def perturbed_references(*seeds: int) -> list[torch.Tensor]:
        generators = [torch.Generator().manual_seed(seed) if seed else None for seed in seeds]
        return list(
            reference.bitwise_references(*arguments, input_weighted=False, generators=generators)
        )

    separate = [output for seed in (0, 1, 2) for output in perturbed_references(seed)]
    assert torch.equal(torch.stack(perturbed_references(0, 1, 2)), torch.stack(separate))
    assert not torch.equal(separate[1], separate[2])


def test_check_mismatches_allows_few_differing_rows() -> None:
    perturbed, roundings = torch.zeros(30), [Roundings()]
    few_mismatches, many_mismatches = torch.zeros(20), torch.zeros(20)
    few_mismatches[:3], many_mismatches[:4] = 0.9, 0.2
    assert list(check_mismatches(few_mismatches, perturbed, roundings)) == []
    (message,) = check_mismatches(many_mismatches, perturbed, roundings)
    assert "4 of 20 rows differ from the bitwise reference" in message
    assert "at most 3 may" in message
    (message,) = check_mismatches(torch.full((20,), 0.04), perturbed, roundings)
    assert "median row" in message
    assert list(check_mismatches(torch.full((20,), 0.04), torch.full((30,), 0.02), roundings)) == []
    assert list(check_mismatches(torch.zeros(0), torch.zeros(0), roundings)) == []


def _detects_weight_change(trial: Trial, change: float) -> bool:
    """Return whether the check fails if router weights are multiplied by `1 + change`."""
    mismatches, perturbed_mismatches = [], []
    for sample in (trial.first, trial.second):
        (roundings,) = bitwise_reference.list_declared_roundings(trial, sample) or []
        weights = sample.original_inputs.routing.topk_weights_TK
        expected = bitwise_reference.compute_bitwise_reference(sample, roundings)
        original_weights = weights.clone()
        weights.mul_(1 + change)
        changed_output = bitwise_reference.compute_bitwise_reference(sample, roundings)
        weights.copy_(original_weights)
        rows = bitwise_reference.find_comparable_rows(sample, expected)
        mismatches.append(
            bitwise_reference.compute_mismatch_fraction(changed_output, expected)[rows]
        )
        for perturbed in bitwise_reference.compute_perturbed_references(sample, roundings, 3)[1:]:
            fraction = bitwise_reference.compute_mismatch_fraction(perturbed, expected)
            perturbed_mismatches.append(fraction[rows])
    return bool(
        list(
            bitwise_reference.check_mismatches(
                torch.cat(mismatches), torch.cat(perturbed_mismatches), []
            )
        )
    )


@pytest.mark.cpu
@pytest.mark.parametrize("quant", QUANT_SCHEMES)
def test_smallest_detected_change_of_router_weights(quant: str) -> None:
    """Check the numbers in docs/numerics.md."""
    for dtype, detected_bits, missed_bits in ((torch.bfloat16, 12, 14), (torch.float16, 15, 17)):
        problem = Problem(19, 160, 96, 5, 2, dtype=dtype, quant=quant)
        trial = Trial(Case(_NO_EP, "TorchExperts", problem), this_machine(device="cpu"))
        assert _detects_weight_change(trial, 2.0**-detected_bits)
        assert not _detects_weight_change(trial, 2.0**-missed_bits)
