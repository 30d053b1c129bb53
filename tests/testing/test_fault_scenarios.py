"""Parts pass fault scenarios, in which ranks disagree about a call, and defective parts fail them.

The scenarios are listed in `modular_kernel.testing.cases.scenario_names`.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from ep_layers import ALL2ALL, REPLICATED
from rank_fixtures import make_ranks_fixture

from modular_kernel.catalog import load_catalog, this_machine
from modular_kernel.errors import ConfigurationError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.settings import use_timeout
from modular_kernel.spec.problem import Machine
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.ranks import RankCase, rank_cases_for
from modular_kernel.testing.cases.scenario_names import SCENARIOS, supported_scenarios
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.testing.verify.over_ranks import build_kernel, check_faults, prove_ranks
from modular_kernel.testing.verify.problem_scenarios import PROBLEM_CHANGES

CPU = this_machine(device="cpu")
pytestmark = pytest.mark.cpu
SYMMETRIC = "SymmMemPrepareAndFinalize"
BY_HOSTS = "HostThenRankPrepareAndFinalize"


pool = make_ranks_fixture(2)


def make_case(part: str, fault: str) -> RankCase:
    """Return the first case of a PrepareAndFinalize part, with the given fault."""
    return replace(rank_cases_for(part, "TorchExperts", CPU, 2).cases[0], fault=fault)


PASSED_SCENARIOS = [
    *((REPLICATED, name) for name in SCENARIOS if name not in ("late", "broken-off")),
    (ALL2ALL, "late"),
    (ALL2ALL, "broken-off"),
    (SYMMETRIC, "misunderstood"),
    (SYMMETRIC, "stays-out"),
]


@pytest.mark.parametrize(("part", "fault"), PASSED_SCENARIOS)
def test_every_rank_gets_the_expected_error(pool: RankPool, part: str, fault: str) -> None:
    assert prove_ranks(make_case(part, fault), pool, checks=(check_faults,)).failures == ()


# The parts below support only one combine, so changes of combine are left out.
CHANGES = tuple(changes for changes in PROBLEM_CHANGES if "combine" not in changes)


@pytest.mark.parametrize("part", [BY_HOSTS, SYMMETRIC, REPLICATED])
@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: next(iter(changes)))
def test_no_error_is_expected_if_rank_1_does_not_differ(
    pool: RankPool, part: str, changes: dict[str, Any]
) -> None:
    """The scenario changes the problem of rank 1. Here the problem has the changed value
    already.
    """
    case = make_case(part, "misunderstood")
    case = replace(case, problem=replace(case.problem, **changes))
    assert prove_ranks(case, pool, checks=(check_faults,)).failures == ()


def skip_layer_numbers(case: Case, machine: Machine, poison: bool, group: object) -> Any:
    kernel = build_kernel(case, machine, poison, group)
    manager: Any = kernel.prepare_finalize.manager
    next_layer = manager.next_layer
    manager.next_layer = lambda: next_layer() + 1
    return kernel


def report_no_abandoned_call(case: Case, machine: Machine, poison: bool, group: object) -> Any:
    """Build a kernel whose ranks do not report an abandoned call, so other ranks wait until the
    timeout.
    """
    with use_timeout(2.0):
        kernel = build_kernel(case, machine, poison, group)
    kernel.prepare_finalize.abandon = lambda error: None
    return kernel


def accept_any_order(case: Case, machine: Machine, poison: bool, group: object) -> Any:
    kernel = build_kernel(case, machine, poison, group)
    manager: Any = kernel.prepare_finalize.manager
    start = manager._start

    def start_and_reset_order(*args: Any) -> Any:
        result = start(*args)
        manager.order = 0
        return result

    manager._start = start_and_reset_order
    return kernel


def record_no_host_memory(case: Case, machine: Machine, poison: bool, group: object) -> Any:
    kernel = build_kernel(case, machine, poison, group)
    manager: Any = kernel.prepare_finalize.manager
    manager.host_memory.last_calls.json_lines = lambda: ""
    return kernel


def drop_record(
    case: Case, machine: Machine, poison: bool, group: object, *, step_and_phase: str
) -> Any:
    """Build a kernel whose records lack one phase of one step."""
    kernel = build_kernel(case, machine, poison, group)
    records: Any = kernel.prepare_finalize.manager.last_calls  # type: ignore[attr-defined]
    all_json_lines = records.json_lines
    records.json_lines = lambda: "".join(
        line
        for line in all_json_lines().splitlines(keepends=True)
        if step_and_phase not in format_step_and_phase(line)
    )
    return kernel


def format_step_and_phase(line: str) -> str:
    record = json.loads(line)
    return f"({record['step']}, '{record['phase']}')"


@pytest.mark.parametrize(
    ("part", "build", "fault", "message"),
    [
        (REPLICATED, skip_layer_numbers, "misunderstood", "layer 1, 3 by rank"),
        (REPLICATED, report_no_abandoned_call, "broken-off", "rank 0: faults: "),
        (
            REPLICATED,
            accept_any_order,
            "finished-by-turns",
            "right, expected (0, 'counts', 3, 1, 3, (1,))",
        ),
        (
            BY_HOSTS,
            record_no_host_memory,
            "misunderstood",
            "the allocation of shared memory was not recorded, expected right",
        ),
        (
            BY_HOSTS,
            partial(drop_record, step_and_phase="(8, 'counts')"),
            "misunderstood",
            "[(8, 'counts')",
        ),
        (
            REPLICATED,
            partial(drop_record, step_and_phase="(2, 'counts')"),
            "misunderstood",
            "[(2, 'counts')",
        ),
        (
            REPLICATED,
            partial(drop_record, step_and_phase="(1, 'combine')"),
            "misunderstood",
            "[(1, 'combine')",
        ),
        (
            SYMMETRIC,
            partial(drop_record, step_and_phase="(1, 'dispatch')"),
            "misunderstood",
            "[(1, 'dispatch')",
        ),
    ],
)
def test_a_part_with_a_wrong_report_fails(
    pool: RankPool,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    build: Callable[..., FusedMoEModularKernel],
    fault: str,
    message: str,
) -> None:
    case = make_case(part, fault)
    failures = prove_ranks(case, pool, build=build, checks=(check_faults,), timeout=40).failures
    assert any(message in failure for failure in failures), failures


def test_full_lists_have_every_supported_scenario() -> None:
    def list_faults(part: str, level: Any) -> list[str]:
        cases = rank_cases_for(part, "TorchExperts", CPU, 2, level).cases
        return [case.fault for case in cases if case.fault]

    assert list_faults(ALL2ALL, "full") == list(SCENARIOS)
    assert list_faults(SYMMETRIC, "full") == ["misunderstood", "late", "stays-out"]
    assert list_faults(ALL2ALL, "smoke") == []
    part = load_catalog().prepare_finalize(ALL2ALL)
    assert supported_scenarios(part, Machine("cuda", (9, 0))) == ()


def test_an_unknown_scenario_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="fault: got 'lost', need one of misunderstood"):
        make_case(ALL2ALL, "lost")
    assert str(make_case(ALL2ALL, "late")).endswith("-linear-late")
    assert make_case(ALL2ALL, "late").options()["fault"] == "late"
