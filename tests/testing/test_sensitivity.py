"""The cases detect defects: every mutant of `MUTANTS` is killed in every pairing in which it can
occur.

`test_matrix` proves the same cases without a mutant.
"""

import pytest
from test_matrix import CASES, PAIRINGS

from modular_kernel.catalog import this_machine
from modular_kernel.errors import IncompatibleError
from modular_kernel.spec.problem import Machine
from modular_kernel.testing import (
    MUTANTS,
    CallMutant,
    Case,
    Proof,
    command,
    prove,
    sensitivity,
)
from modular_kernel.testing.cases.lists import BASE, cases_by_axes

MACHINE = this_machine()
PAIR = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
DEVICE_MUTANTS = [mutant for mutant in MUTANTS if mutant.device in (None, MACHINE.device)]


@pytest.fixture(scope="module")
def known_failures() -> dict[Case, str | None]:
    """Map every case to its first failure without a mutant.

    All are None, because `test_matrix` proves that they pass.
    """
    return dict.fromkeys(CASES)


@pytest.mark.share(8)
@pytest.mark.parametrize("mutant", DEVICE_MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.parametrize("pairing", PAIRINGS, ids="+".join)
def test_mutant_is_killed(
    pairing: tuple[str, str],
    mutant: CallMutant,
    machine: Machine,
    known_failures: dict[Case, str | None],
) -> None:
    # One case per mutant saves time. `mk test --sensitivity` runs two.
    kills = sensitivity(
        *pairing, machine, mutants=[mutant], cases_each=1, known_failures=known_failures
    )
    assert [str(kill) for kill in kills if not kill.ok or kill.no_effect_reason] == []


def test_every_mutant_occurs_in_some_pairing(machine: Machine) -> None:
    cases = [case for pair in PAIRINGS for case in cases_by_axes(*pair, machine).cases]
    assert [
        mutant.name
        for mutant in DEVICE_MUTANTS
        if not any(mutant.occurs(case, machine) for case in cases)
    ] == []


def test_mutant_names_are_unique() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names)) >= 55
    assert all(mutant.description for mutant in MUTANTS)


def prove_with_mutant(name: str, machine: Machine) -> Proof:
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == name)
    return prove(Case(*PAIR, BASE), machine, build=mutant.build)


def test_a_failure_names_the_check_the_error_and_the_command(machine: Machine) -> None:
    proof = prove_with_mutant("zeros", machine)
    assert not proof.passed
    assert proof.error == pytest.approx(1)
    assert proof.failures[0].startswith("numeric: relative RMS error 1.00e+00")
    message = str(proof)
    assert "FAILED" in message
    assert all(failure in message for failure in proof.failures)
    assert message.endswith(command(proof.case))


def test_every_failed_check_is_reported(machine: Machine) -> None:
    checks = {
        failure.split(":")[0]
        for failure in prove_with_mutant("last_token_unwritten", machine).failures
    }
    assert {"numeric", "numeric_planned", "numeric_strided"} <= checks


def test_a_part_that_raises_fails(machine: Machine) -> None:
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == "empty_call_fails")
    proof = prove(Case(*PAIR, BASE.with_tokens(0)), machine, build=mutant.build)
    assert "numeric: raised RuntimeError: a launch with an empty grid" in proof.failures
    assert proof.error == float("inf")


def test_an_overrun_is_reported_once(machine: Machine) -> None:
    failures = prove_with_mutant("workspace_overrun", machine).failures
    assert failures[0].startswith("red_zones: written past the end of workspace buffers")
    assert len(failures) == 1


def test_proving_a_refused_pairing_raises(machine: Machine) -> None:
    with pytest.raises(IncompatibleError):
        prove(Case(PAIR[0], "NaiveBatchedExperts", BASE), machine)
