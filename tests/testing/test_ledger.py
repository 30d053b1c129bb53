"""The ledger `tests/must_run.txt` states how many cases each pairing must pass on each kind of
machine.
"""

from collections import Counter
from pathlib import Path

import pytest

from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Machine
from modular_kernel.testing import Case, Proof, cases_for, check_proofs, machine_kind, pairings
from modular_kernel.testing.cases.lists import BASE
from modular_kernel.testing.cases.ranks import rank_cases_for, rank_pairings
from modular_kernel.testing.verify.ledger import (
    MACHINE_KINDS,
    list_unmet_entries,
    parse_ledger,
    read_ledger,
)

LEDGER = read_ledger(Path(__file__).parents[1] / "must_run.txt")
PACKAGES = frozenset({"triton", "ml_dtypes"})
MACHINES = {
    "cpu": Machine("cpu"),
    "cpu-interpreter": Machine("cpu", packages=PACKAGES, interpreter=True),
    "cuda": Machine("cuda", (9, 0), PACKAGES | {"pplx_kernels"}),
}
PAIR = ("SomePrepare", "SomeExperts")


def count_cases(machine: Machine) -> Counter[tuple[str, str]]:
    """Return the number of cases for `machine` by pairing."""
    pairs = pairings(machine)
    return Counter({pair: len(cases_for(*pair, machine).cases) for pair in pairs})


def count_rank_cases(machine: Machine, world_size: int) -> Counter[tuple[str, str]]:
    """Return the number of cases over `world_size` ranks by pairing."""
    pairs = rank_pairings(machine, world_size)
    return Counter({p: len(rank_cases_for(*p, machine, world_size).cases) for p in pairs})


def make_proof(machine: Machine, *, passed: bool = True) -> Proof:
    failures = () if passed else ("numeric: wrong",)
    return Proof(Case(*PAIR, BASE), machine, 0.0, 0.0, failures, 0.0)


@pytest.mark.parametrize("kind", MACHINE_KINDS)
def test_cases_cover_the_ledger(kind: str) -> None:
    """There are at least as many cases as the ledger requires. This test does not run them."""
    assert list_unmet_entries(LEDGER, count_cases(MACHINES[kind]), kind) == ()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", MACHINE_KINDS)
def test_rank_cases_cover_the_ledger(kind: str, world_size: int) -> None:
    machine = MACHINES[kind]
    kind_over_ranks = machine_kind(machine, world_size)
    assert any(entry.machine == kind_over_ranks for entry in LEDGER)
    counts = count_rank_cases(machine, world_size)
    assert list_unmet_entries(LEDGER, counts, kind_over_ranks) == ()


def test_cases_of_this_machine_cover_the_ledger(machine: Machine) -> None:
    assert list_unmet_entries(LEDGER, count_cases(machine), machine_kind(machine)) == ()


@pytest.mark.parametrize("kind", MACHINE_KINDS)
def test_each_kind_of_machine_has_ledger_entries(kind: str) -> None:
    assert machine_kind(MACHINES[kind]) == kind
    assert any(entry.machine == kind for entry in LEDGER)


def test_a_pairing_with_fewer_cases_is_reported() -> None:
    ledger = parse_ledger("cpu SomePrepare SomeExperts 3")
    assert list_unmet_entries(ledger, Counter({PAIR: 3}), "cpu") == ()
    (message,) = list_unmet_entries(ledger, Counter({PAIR: 2}), "cpu")
    assert message == "cpu: SomePrepare x SomeExperts: 2 cases, need 3"
    assert list_unmet_entries(ledger, Counter(), "cpu") != ()
    assert list_unmet_entries(ledger, Counter(), "cuda") == ()


def test_a_pairing_without_an_entry_is_reported() -> None:
    (message,) = list_unmet_entries((), Counter({PAIR: 1}), "cpu")
    assert "no line in the ledger" in message


def test_only_passed_proofs_are_counted() -> None:
    ledger = parse_ledger("cpu SomePrepare SomeExperts 2")
    machine = MACHINES["cpu"]
    assert check_proofs(ledger, [make_proof(machine), make_proof(machine)]) == ()
    assert check_proofs(ledger, [make_proof(machine), make_proof(machine, passed=False)]) != ()
    # Proofs of another kind of machine are not counted.
    assert check_proofs(ledger, [make_proof(machine), make_proof(MACHINES["cuda"])]) != ()


def test_comments_and_blank_lines_are_ignored() -> None:
    text = "# a comment\n\n  cuda A B 7  # and another\n"
    (entry,) = parse_ledger(text)
    assert (entry.machine, entry.pairing, entry.cases) == ("cuda", ("A", "B"), 7)


@pytest.mark.parametrize(
    "line", ["cpu A B", "cpu A B many", "tpu A B 3", "cpu A B 3 4", "cpu A B -1", "cpu:1 A B 3"]
)
def test_an_invalid_line_is_an_error(line: str) -> None:
    with pytest.raises(ConfigurationError, match="ledger line 2"):
        parse_ledger(f"# first\n{line}\n")
