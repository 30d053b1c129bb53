"""Scenes in which ranks do not mean the same call: played well, and told from parts that err."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from ep_layers import ALL2ALL, REPLICATED
from module_ranks import module_ranks

from modular_kernel.catalog import load_catalog, this_machine
from modular_kernel.errors import ConfigurationError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.settings import use_deadline
from modular_kernel.spec.problem import Machine
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.ranks import RankCase, rank_cases_for
from modular_kernel.testing.cases.scenario_names import SCENARIOS, supported_scenarios
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.testing.verify.over_ranks import build_kernel, faults, prove_ranks
from modular_kernel.testing.verify.problem_scenarios import PROBLEM_CHANGES

CPU = this_machine(device="cpu")
pytestmark = pytest.mark.cpu
SYMMETRIC = "SymmMemPrepareAndFinalize"
BY_HOSTS = "HostThenRankPrepareAndFinalize"


pool = module_ranks(2)


def case_of(part: str, fault: str) -> RankCase:
    """The first case of the part, with that fault."""
    return replace(rank_cases_for(part, "TorchExperts", CPU, 2).cases[0], fault=fault)


WELL = [
    *((REPLICATED, scene) for scene in SCENARIOS if scene not in ("late", "broken-off")),
    (ALL2ALL, "late"),
    (ALL2ALL, "broken-off"),
    (SYMMETRIC, "misunderstood"),
    (SYMMETRIC, "stays-out"),
]


@pytest.mark.parametrize(("part", "fault"), WELL)
def test_ranks_are_told_what_they_must_be(pool: RankPool, part: str, fault: str) -> None:
    assert prove_ranks(case_of(part, fault), pool, checks=(faults,)).failures == ()


# These parts refuse the other combine.
CHANGES = tuple(changes for changes in PROBLEM_CHANGES if "combine" not in changes)


@pytest.mark.parametrize("part", [BY_HOSTS, SYMMETRIC, REPLICATED])
@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: next(iter(changes)))
def test_a_change_that_changes_nothing_is_left_out(
    pool: RankPool, part: str, changes: dict[str, Any]
) -> None:
    """In calls, and where ranks share memory and compare problems at construction."""
    case = case_of(part, "misunderstood")
    case = replace(case, problem=replace(case.problem, **changes))  # so rank 1 cannot change it
    assert prove_ranks(case, pool, checks=(faults,)).failures == ()


def counts_layers_by_two(case: Case, machine: Machine, poison: bool, group: object) -> Any:
    kernel = build_kernel(case, machine, poison, group)
    manager: Any = kernel.prepare_finalize.manager
    count = manager.next_layer
    manager.next_layer = lambda: count() + 1
    return kernel


def tells_nobody(case: Case, machine: Machine, poison: bool, group: object) -> Any:
    """A rank that breaks off its call does not say so: the others wait until the deadline."""
    with use_deadline(2.0):
        kernel = build_kernel(case, machine, poison, group)
    kernel.prepare_finalize.abandon = lambda error: None
    return kernel


def in_any_order(case: Case, machine: Machine, poison: bool, group: object) -> Any:
    kernel = build_kernel(case, machine, poison, group)
    manager: Any = kernel.prepare_finalize.manager
    start = manager._start

    def begins(*args: Any) -> Any:
        begun = start(*args)
        manager.order = 0
        return begun

    manager._start = begins
    return kernel


def notes_no_memory(case: Case, machine: Machine, poison: bool, group: object) -> Any:
    kernel = build_kernel(case, machine, poison, group)
    manager: Any = kernel.prepare_finalize.manager
    manager.host_memory.last_calls.json_lines = lambda: ""
    return kernel


def forgets(case: Case, machine: Machine, poison: bool, group: object, *, lost: str) -> Any:
    """A manager keeps no record of one phase of one step."""
    kernel = build_kernel(case, machine, poison, group)
    notes: Any = kernel.prepare_finalize.manager.last_calls  # type: ignore[attr-defined]
    whole = notes.json_lines
    notes.json_lines = lambda: "".join(
        line for line in whole().splitlines(keepends=True) if lost not in told(line)
    )
    return kernel


def told(line: str) -> str:
    record = json.loads(line)
    return f"({record['step']}, '{record['phase']}')"


@pytest.mark.parametrize(
    ("part", "build", "fault", "found"),
    [
        (REPLICATED, counts_layers_by_two, "misunderstood", "layer 1, 3 by rank"),
        (REPLICATED, tells_nobody, "broken-off", "rank 0: faults: "),
        (
            REPLICATED,
            in_any_order,
            "finished-by-turns",
            "right, expected (0, 'counts', 3, 1, 3, (1,))",
        ),
        (BY_HOSTS, notes_no_memory, "misunderstood", "no record of memory, expected right"),
        (BY_HOSTS, partial(forgets, lost="(8, 'counts')"), "misunderstood", "[(8, 'counts')"),
        (REPLICATED, partial(forgets, lost="(2, 'counts')"), "misunderstood", "[(2, 'counts')"),
        (REPLICATED, partial(forgets, lost="(1, 'combine')"), "misunderstood", "[(1, 'combine')"),
        (SYMMETRIC, partial(forgets, lost="(1, 'dispatch')"), "misunderstood", "[(1, 'dispatch')"),
    ],
)
def test_a_part_that_tells_something_else_fails(
    pool: RankPool,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    build: Callable[..., FusedMoEModularKernel],
    fault: str,
    found: str,
) -> None:
    case = case_of(part, fault)
    failures = prove_ranks(case, pool, build=build, checks=(faults,), timeout=40).failures
    assert any(found in failure for failure in failures), failures


def test_full_lists_play_every_scene_that_a_part_has() -> None:
    def played(part: str, level: Any) -> list[str]:
        cases = rank_cases_for(part, "TorchExperts", CPU, 2, level).cases
        return [case.fault for case in cases if case.fault]

    assert played(ALL2ALL, "full") == list(SCENARIOS)
    assert played(SYMMETRIC, "full") == ["misunderstood", "late", "stays-out"]
    assert played(ALL2ALL, "smoke") == []
    part = load_catalog().prepare_finalize(ALL2ALL)
    assert supported_scenarios(part, Machine("cuda", (9, 0))) == ()


def test_a_scene_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="fault: got 'lost', need one of misunderstood"):
        case_of(ALL2ALL, "lost")
    assert str(case_of(ALL2ALL, "late")).endswith("-linear-late")
    assert case_of(ALL2ALL, "late").options()["fault"] == "late"
