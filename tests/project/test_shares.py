"""A share of a list of cases depends only on the source tree, has the requested size, and over many
trees includes every case.
"""

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


def test_share_depends_only_on_the_tree() -> None:
    assert tree_hash() == tree_hash.__wrapped__()
    assert share(CASES, THIRTY_SIXTH, "one") == share(CASES, THIRTY_SIXTH, "one")
    assert share(CASES, THIRTY_SIXTH, "one") != share(CASES, THIRTY_SIXTH, "other")


def test_share_has_about_the_requested_size() -> None:
    selected = share(CASES, THIRTY_SIXTH, "one")
    assert len(CASES) / 72 < len(selected) < len(CASES) / 18
    assert list(selected) == sorted(selected, key=CASES.index)


def test_every_case_is_in_the_share_of_some_tree() -> None:
    shares_by_tree = [share(CASES, THIRTY_SIXTH, str(tree)) for tree in range(600)]
    assert set().union(*shares_by_tree) == set(CASES)


def test_experts_part_has_its_full_list_with_one_pairing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("cpu")
    full = cases_for(*PAIR, machine).cases
    smoke = cases_for(*PAIR, machine, "smoke").cases

    def cases_of_pair(pf: str, experts: str, machine: Machine, level: str = "full") -> object:
        assert pf in (PAIR[0], "Elsewhere")
        assert level in ("full", "smoke")
        return cases_for(*PAIR, machine, "smoke" if level == "smoke" else "full")

    monkeypatch.setattr("shares.cases_for", cases_of_pair)
    other_pair = ("Elsewhere", PAIR[1])
    selected = selected_cases([PAIR, other_pair], machine, "one")
    assert selected[PAIR] == tuple(dict.fromkeys((*smoke, *full)))
    assert selected[other_pair] == tuple(dict.fromkeys((*smoke, *share(full, THIRTY_SIXTH, "one"))))
    assert len(smoke) < len(selected[other_pair]) < len(full) / 2


def test_share_marker_is_ignored_with_whole_or_named_tests() -> None:
    file = "tests/quant/test_four_bit.py"

    command_lines = (
        ["--whole", file],
        [file],
        [f"{file}::test_cases_are_proven"],
        ["-k", "test_cases_are_proven", file],
    )
    # A single process collects for all command lines, because it imports torch and the file only
    # once.
    program = f"""if True:
        import pytest
        for arguments in {command_lines}:
            print("collected")
            assert pytest.main(["--collect-only", "-q", *arguments]) == 0
    """
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    all_names, in_default_run, selected_by_id, selected_by_keyword = (
        {line for line in output.splitlines() if "::test_cases_are_proven[" in line}
        for output in result.stdout.split("collected\n")[1:]
    )
    assert in_default_run == {name for name in all_names if in_share(name, 6, tree_hash())}
    assert len(in_default_run) < len(all_names)
    assert selected_by_id == all_names
    assert selected_by_keyword == all_names
