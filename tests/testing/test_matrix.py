"""A subset of the cases of every pairing in the catalog is proven on this machine.

With the first PrepareAndFinalize that it supports, each experts part is tested on the smoke cases
and half of the other cases. With every other PrepareAndFinalize, it is tested on the smoke cases
and one in 36 of the other cases. `make verify` proves all cases.
"""

from collections.abc import Callable

import pytest
from shares import computed_once, selected_cases, tree_hash

from modular_kernel.catalog import check_all, this_machine
from modular_kernel.spec.problem import Machine
from modular_kernel.testing import Case, pairings, prove
from modular_kernel.testing.cases.lists import BASE
from modular_kernel.testing.cases.pairwise import draw_pairwise_cases

MACHINE = this_machine()
PAIRINGS = computed_once("pairings", lambda: pairings(MACHINE))
SELECTED_CASES = computed_once("proven", lambda: selected_cases(PAIRINGS, MACHINE, tree_hash()))
CASES = [case for cases in SELECTED_CASES.values() for case in cases]


@pytest.mark.budget(quick=40.0, rest=120.0)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_is_proven(case: Case, machine: Machine) -> None:
    proof = prove(case, machine)
    assert proof.passed, str(proof)


def test_every_experts_part_is_proven_on_about_half_of_its_cases() -> None:
    largest_fraction = {
        experts: max(
            len(cases) / len(draw_pairwise_cases(*pair, MACHINE)[1])
            for pair, cases in SELECTED_CASES.items()
            if pair[1] == experts
        )
        for _, experts in PAIRINGS
    }
    assert largest_fraction
    assert min(largest_fraction.values()) > 0.4  # cases are selected by hash


@pytest.mark.parametrize("pairing", PAIRINGS, ids="+".join)
def test_every_two_axis_values_are_covered(
    pairing: tuple[str, str], record_property: Callable[[str, object], None]
) -> None:
    """Each pair of values of two axes occurs in a case or is impossible for a stated reason."""
    array, cases = draw_pairwise_cases(*pairing, MACHINE)
    assert array.missing_pairs() == ()
    assert array.idle_pairs == frozenset()
    assert len(array.covered_pairs) + len(array.impossible) == len(list(array.space.pairs()))
    assert len(set(cases)) == len(cases)
    assert len(cases) <= 440  # takes about three minutes on two processors
    record_property("cases", len(cases))
    record_property("pairs met", len(array.covered_pairs))
    describe = array.space.describe
    for (first, second), reason in array.impossible.items():
        record_property(f"impossible: {describe(first)}, {describe(second)}", reason)


PREVIOUSLY_MISSED_PAIRS = (
    ("quant=fp8_w8a8_block", "chunks=ragged"),
    ("quant=int4_w4a16_group:group=32,zero_points=true", "interleaved=True"),
    ("quant=int8_w8a16_group:group=32,zero_points=true", "interleaved=True"),
    ("quant=fp8_w8a8_block:block=48x64", "intermediate=47"),
    ("quant=int8_w8a8_channel", "intermediate=19"),
    ("numbers=(torch.bfloat16, 'ieee')", "top_k=16"),
    ("numbers=(torch.bfloat16, 'ieee')", "top_k=8"),
    ("quant=int4_w4a16_group:group=64", "bias=True"),
)


@pytest.mark.parametrize("pair", PREVIOUSLY_MISSED_PAIRS, ids=" ".join)
def test_previously_missed_pairs_are_covered(pair: tuple[str, str]) -> None:
    """Defects that need one of these pairs were not detected by earlier case lists."""
    array, _ = draw_pairwise_cases("MoEPrepareAndFinalizeNoEP", "TorchExperts", MACHINE)
    assert pair in {
        (array.space.describe(first), array.space.describe(second))
        for first, second in array.covered_pairs
    }


def test_every_other_pairing_is_refused_with_a_reason(machine: Machine) -> None:
    other_verdicts = [
        verdict
        for verdict in check_all(BASE, machine)
        if (verdict.prepare_finalize, verdict.experts) not in PAIRINGS
    ]
    assert [verdict.pairing for verdict in other_verdicts if not verdict.rejections] == []
