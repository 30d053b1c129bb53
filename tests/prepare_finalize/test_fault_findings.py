"""Reports of faults: the fault matrix and its findings, the faulty rank, and the last calls."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from ep_layers import ALL2ALL, GATHERED, REPLICATED, Layer

from modular_kernel.catalog import make_kernel, this_machine
from modular_kernel.errors import ConfigurationError
from modular_kernel.testing.stress.fault_matrix import (
    FaultResult,
    format_markdown,
    format_summary,
    list_scenarios,
    list_supported_parts,
    run_matrix,
    to_json,
)
from modular_kernel.testing.stress.faults import FAULTY_RANK, RankReport, Scenario, run_two_calls
from prepare_finalize.rendezvous.failure_log import ExchangeLog, FailureRecords, find_culprits


def test_the_matrix_runs_in_parallel_and_reports_findings() -> None:
    hidden_change = (("hidden", 64),)
    scenarios = [Scenario(ALL2ALL, "killed", "before combine"), Scenario(ALL2ALL, "overflow"),
              Scenario(ALL2ALL, "disagrees", faulty_changes=hidden_change)]  # fmt: skip
    results = run_matrix(scenarios, 2, "gloo", num_pools=2)
    assert [result.findings() for result in results] == [[], [], []]
    lines = format_markdown(results).splitlines()
    assert len(lines) == 2 + len(scenarios)
    assert lines[-1].startswith("| TorchAll2All | another hidden | 0.")
    assert format_summary(results).startswith("3 scenarios, 0 with findings")
    assert json.loads(json.dumps(to_json(results)))[2]["scenario"] == "another hidden"


def test_list_scenarios_has_no_duplicates() -> None:
    assert set(list_supported_parts(2, "gloo")) >= {REPLICATED, GATHERED, ALL2ALL}
    scenarios = list_scenarios(ALL2ALL, "gloo")
    assert len(set(map(str, scenarios))) == len(scenarios) >= 12


def test_scenarios_after_the_time_limit_are_not_started() -> None:
    (result,) = run_matrix([Scenario(ALL2ALL, "overflow")], 2, "gloo", start_limit_s=-1)
    assert result.findings() == [f"rank {rank}: not started: time limit reached" for rank in (0, 1)]


def test_run_two_calls_reports_a_wrong_output() -> None:
    layer = Layer(ALL2ALL, (4,))
    cpu = this_machine(device="cpu")
    pair = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
    kernel = make_kernel(*pair, layer.problem(0), machine=cpu)
    inputs = layer.inputs_of(0)
    expected = kernel(inputs.x_TH, inputs.weights, inputs.routing)
    first_report = run_two_calls(kernel, inputs, expected)
    assert (first_report.error, first_report.num_completed) == ("", 2)
    second_report = run_two_calls(kernel, inputs, expected + 1)
    assert (second_report.error, second_report.message) == (
        "AssertionError",
        "a call returned a wrong result",
    )
    assert run_two_calls(kernel, inputs, None).error == "AssertionError"


def test_findings_report_every_wrong_reaction_to_a_fault() -> None:
    killed = Scenario(ALL2ALL, "killed", "in dispatch")
    expected = RankReport(
        "CommunicationError", "m", 2.0, 1, "dispatch", (FAULTY_RANK,), usable_again=True
    )
    lost_rank = {FAULTY_RANK: "died: killed by signal SIGKILL"}

    def list_findings(scenario: Scenario, lost: dict[int, str], *reports: RankReport) -> list[str]:
        ranks = [rank for rank in range(3) if rank not in lost]
        return FaultResult(
            scenario, 3, dict(zip(ranks, reports, strict=True)), lost, 0.0
        ).findings()

    assert list_findings(killed, lost_rank, expected, expected) == []
    late = replace(killed, kind="late")
    assert list_findings(late, {}, expected, expected, expected) == []
    wrong_reports = {
        "rank 2: raised no error": replace(expected, error=""),
        "rank 2: raised AssertionError": replace(expected, error="AssertionError"),
        "rank 2: the error names the peers (0,)": replace(expected, peers=(0,)),
        "rank 2: the error is in phase 'counts'": replace(expected, phase="counts"),
        "rank 2: took 3.1 s": replace(expected, seconds=3.1),
    }
    for expected_finding, report in wrong_reports.items():
        (finding,) = list_findings(killed, lost_rank, expected, report)
        assert finding.startswith(expected_finding)
    (finding,) = list_findings(late, {}, expected, replace(expected, error=""), expected)
    assert finding == "rank 1: raised no error, although it caused the fault"
    (finding,) = list_findings(late, {}, expected, expected, replace(expected, usable_again=False))
    assert "is not usable afterwards" in finding
    (finding,) = list_findings(killed, {**lost_rank, 2: "did not answer"}, expected)
    assert finding == "rank 2: did not answer"
    assert list_findings(late, lost_rank, expected, expected) == [
        "rank 1: died: killed by signal SIGKILL"
    ]


def make_record(step: int, phase: str, waited_s: float) -> dict[str, object]:
    return {"step": step, "phase": phase, "waited_s": waited_s}


@pytest.mark.parametrize(
    ("rank", "records", "peers", "expected_reason"),
    [
        (0, {0: (2, "counts", 0.0), 1: (2, "counts", 0.0)}, (2,), "no sign of life"),
        (0, {0: (2, "counts", 0), 1: (2, "counts", 0), 2: (1, "combine", 0)}, (2,), "earlier"),
        (0, {0: (2, "combine", 0), 1: (2, "dispatch", 0), 2: (2, "combine", 0)}, (1,), "earlier"),
        (
            0,
            {0: (1, "counts", 1.4), 1: (1, "counts", 1.3), 2: (1, "counts", 0)},
            (2,),
            "1.4 s late",
        ),
        (2, {0: (1, "counts", 1.4), 1: (1, "counts", 1.3), 2: (1, "counts", 0)}, (0, 1), "gave up"),
        (0, {0: (1, "counts", 0), 1: (1, "counts", 0), 2: (1, "counts", 0)}, (1, 2), "failed too"),
    ],
)
def test_find_culprits_names_the_faulty_rank(
    rank: int,
    records: dict[int, tuple[int, str, float]],
    peers: tuple[int, ...],
    expected_reason: str,
) -> None:
    reports_by_rank = {record_rank: make_record(*record) for record_rank, record in records.items()}
    culprits, reason = find_culprits(rank, 3, reports_by_rank, timeout_s=1.0)
    assert culprits == peers
    assert expected_reason in reason


class SilentStore:
    """A store that does not answer."""

    def set(self, key: str, value: str) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        time.sleep(60)
        return False


def test_a_store_that_does_not_answer_is_waited_for_until_the_deadline() -> None:
    start = time.monotonic()
    records = FailureRecords(SilentStore(), 0, 2)
    assert records.publish_and_collect(make_record(1, "counts", 0.0), start + 0.8) is None
    assert time.monotonic() - start < 1.5


def test_exchange_log_writes_the_last_records_as_json_lines(tmp_path: Path) -> None:
    calls = ExchangeLog(rank=3, max_records=2)
    for step in (1, 2, 3):
        calls.end(calls.begin(step, "dispatch", 100 * step))
    calls.begin(4, "combine", 7)
    calls.write(tmp_path / "calls.jsonl")
    records = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert [(r["rank"], r["step"], r["phase"], r["bytes"], r["state"]) for r in records] == [
        (3, 3, "dispatch", 300, "done"),
        (3, 4, "combine", 7, "under way"),
    ]
    assert records[0]["ended_s"] >= records[0]["started_s"] > 0
    assert records[1]["ended_s"] is None


def test_a_scenario_of_an_unknown_kind_or_point_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="kind: got exploded, need one of killed, stopped"):
        Scenario(ALL2ALL, "exploded")
    with pytest.raises(ConfigurationError, match="point: got at lunch, need one of before"):
        Scenario(ALL2ALL, "killed", "at lunch")
