"""Every pairing in the catalog, on every case: the combinatorial test. Skips are rejections."""

import pytest

from modular_kernel.catalog import check_all, this_machine
from modular_kernel.testing import Case, cases_for, pairings, prove
from modular_kernel.testing.cases import BASE
from modular_kernel.types import Machine

MACHINE = this_machine()
PAIRINGS = pairings(MACHINE)
SELECTIONS = [cases_for(pf, experts, MACHINE) for pf, experts in PAIRINGS]
CASES = [case for selection in SELECTIONS for case in selection.cases]
REFUSED = [pair for selection in SELECTIONS for pair in selection.refused]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_proven(case: Case, machine: Machine) -> None:
    proof = prove(case, machine)
    assert proof.passed, str(proof)


@pytest.mark.parametrize(("case", "verdict"), REFUSED, ids=[str(case) for case, _ in REFUSED])
def test_refused(case: Case, verdict: object) -> None:
    pytest.skip(str(verdict))


def test_every_other_pairing_is_refused_with_a_reason(machine: Machine) -> None:
    others = [
        verdict
        for verdict in check_all(BASE, machine)
        if (verdict.prepare_finalize, verdict.experts) not in PAIRINGS
    ]
    assert [verdict.pairing for verdict in others if not verdict.rejections] == []
