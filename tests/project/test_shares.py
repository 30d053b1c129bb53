"""Shares of cases: determined by the tree, of the requested size, complete over many trees."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from shares import THIRTY_SIXTH, in_share, selected_cases, share, tree_hash

from modular_kernel.spec.problem import Machine
from modular_kernel.testing import Case, cases_for
from modular_kernel.testing.cases.lists import BASE

CASES = tuple(
    Case("SomePrepare", "SomeExperts", replace(BASE, tokens=tokens), seed=seed)
    for tokens in range(40)
    for seed in range(10)
)
PAIR = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")


def test_share_depends_on_the_tree_only() -> None:
    assert tree_hash() == tree_hash.__wrapped__()
    assert share(CASES, THIRTY_SIXTH, "one") == share(CASES, THIRTY_SIXTH, "one")
    assert share(CASES, THIRTY_SIXTH, "one") != share(CASES, THIRTY_SIXTH, "other")


def test_share_has_about_the_requested_size() -> None:
    found = share(CASES, THIRTY_SIXTH, "one")
    assert len(CASES) / 72 < len(found) < len(CASES) / 18
    assert list(found) == sorted(found, key=CASES.index)


def test_every_case_is_in_the_share_of_some_tree() -> None:
    trees = [share(CASES, THIRTY_SIXTH, str(tree)) for tree in range(600)]
    assert set().union(*trees) == set(CASES)


def test_experts_part_has_its_full_list_with_one_pairing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("cpu")
    full = cases_for(*PAIR, machine).cases
    smoke = cases_for(*PAIR, machine, "smoke").cases

    def alike(pf: str, experts: str, machine: Machine, level: str = "full") -> object:
        assert pf in (PAIR[0], "Elsewhere")
        assert level in ("full", "smoke")
        return cases_for(*PAIR, machine, "smoke" if level == "smoke" else "full")

    monkeypatch.setattr("shares.cases_for", alike)
    elsewhere = ("Elsewhere", PAIR[1])
    found = selected_cases([PAIR, elsewhere], machine, "one")
    assert found[PAIR] == tuple(dict.fromkeys((*smoke, *full)))
    assert found[elsewhere] == tuple(dict.fromkeys((*smoke, *share(full, THIRTY_SIXTH, "one"))))
    assert len(smoke) < len(found[elsewhere]) < len(full) / 2


def test_share_marker_is_ignored_with_whole_or_named_tests() -> None:
    file = "tests/quant/test_four_bit.py"

    ways = (
        ["--whole", file],
        [file],
        [f"{file}::test_cases_are_proven"],
        ["-k", "test_cases_are_proven", file],
    )
    # One process, which imports torch and the file once, collects anew for each.
    program = f"""if True:
        import pytest
        for words in {ways}:
            print("collected")
            assert pytest.main(["--collect-only", "-q", *words]) == 0
    """
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    every, drawn, named, chosen = (
        {line for line in part.splitlines() if "::test_cases_are_proven[" in line}
        for part in done.stdout.split("collected\n")[1:]
    )
    assert drawn == {name for name in every if in_share(name, 6, tree_hash())}
    assert len(drawn) < len(every)
    assert named == every
    assert chosen == every
