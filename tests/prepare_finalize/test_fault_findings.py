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
    other = (("hidden", 64),)
    wanted = [Scenario(ALL2ALL, "killed", "before combine"), Scenario(ALL2ALL, "overflow"),
              Scenario(ALL2ALL, "disagrees", faulty_changes=other)]  # fmt: skip
    results = run_matrix(wanted, 2, "gloo", num_pools=2)
    assert [result.findings() for result in results] == [[], [], []]
    lines = format_markdown(results).splitlines()
    assert len(lines) == 2 + len(wanted)
    assert lines[-1].startswith("| TorchAll2All | another hidden | 0.")
    assert format_summary(results).startswith("3 scenarios, 0 with findings")
    assert json.loads(json.dumps(to_json(results)))[2]["scenario"] == "another hidden"


def test_every_part_over_gloo_has_its_scenarios() -> None:
    assert set(list_supported_parts(2, "gloo")) >= {REPLICATED, GATHERED, ALL2ALL}
    wanted = list_scenarios(ALL2ALL, "gloo")
    assert len(set(map(str, wanted))) == len(wanted) >= 12


def test_a_matrix_without_time_left_starts_nothing() -> None:
    (result,) = run_matrix([Scenario(ALL2ALL, "overflow")], 2, "gloo", start_limit_s=-1)
    assert result.findings() == [f"rank {rank}: not started: time limit reached" for rank in (0, 1)]


def test_a_wrong_output_is_an_error() -> None:
    layer = Layer(ALL2ALL, (4,))
    cpu = this_machine(device="cpu")
    pair = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
    kernel = make_kernel(*pair, layer.problem(0), machine=cpu)
    given = layer.inputs_of(0)
    good = kernel(given.x_TH, given.weights, given.routing)
    right = run_two_calls(kernel, given, good)
    assert (right.error, right.num_completed) == ("", 2)
    wrong = run_two_calls(kernel, given, good + 1)
    assert (wrong.error, wrong.message) == ("AssertionError", "a call returned a wrong result")
    assert run_two_calls(kernel, given, None).error == "AssertionError"


def test_findings_for_a_part_that_handles_a_fault_wrongly() -> None:
    """Each possible failure is found, one at a time."""
    killed = Scenario(ALL2ALL, "killed", "in dispatch")
    good = RankReport(
        "CommunicationError", "m", 2.0, 1, "dispatch", (FAULTY_RANK,), usable_again=True
    )
    dead = {FAULTY_RANK: "died: killed by signal SIGKILL"}

    def findings(scenario: Scenario, lost: dict[int, str], *reports: RankReport) -> list[str]:
        ranks = [rank for rank in range(3) if rank not in lost]
        return FaultResult(
            scenario, 3, dict(zip(ranks, reports, strict=True)), lost, 0.0
        ).findings()

    assert findings(killed, dead, good, good) == []
    late = replace(killed, kind="late")
    assert findings(late, {}, good, good, good) == []
    bad = {
        "rank 2: raised no error": replace(good, error=""),
        "rank 2: raised AssertionError": replace(good, error="AssertionError"),
        "rank 2: the error names the peers (0,)": replace(good, peers=(0,)),
        "rank 2: the error is in phase 'counts'": replace(good, phase="counts"),
        "rank 2: took 3.1 s": replace(good, seconds=3.1),
    }
    for text, report in bad.items():
        (found,) = findings(killed, dead, good, report)
        assert found.startswith(text)
    (found,) = findings(late, {}, good, replace(good, error=""), good)
    assert found == "rank 1: raised no error, although it caused the fault"
    (found,) = findings(late, {}, good, good, replace(good, usable_again=False))
    assert "is not usable afterwards" in found
    (found,) = findings(killed, {**dead, 2: "did not answer"}, good)
    assert found == "rank 2: did not answer"
    assert findings(late, dead, good, good) == ["rank 1: died: killed by signal SIGKILL"]


def failed(step: int, phase: str, waited_s: float) -> dict[str, object]:
    return {"step": step, "phase": phase, "waited_s": waited_s}


@pytest.mark.parametrize(
    ("rank", "records", "peers", "why"),
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
def test_the_faulty_rank_is_determined(
    rank: int, records: dict[int, tuple[int, str, float]], peers: tuple[int, ...], why: str
) -> None:
    told = {each: failed(*record) for each, record in records.items()}
    blamed, reason = find_culprits(rank, 3, told, timeout_s=1.0)
    assert blamed == peers
    assert why in reason


class SilentStore:
    """A store whose server accepts requests and never answers."""

    def set(self, key: str, value: str) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        time.sleep(60)
        return False


def test_a_store_that_does_not_answer_blocks_no_rank() -> None:
    start = time.monotonic()
    records = FailureRecords(SilentStore(), 0, 2)
    assert records.publish_and_collect(failed(1, "counts", 0.0), start + 0.8) is None
    assert time.monotonic() - start < 1.5


def test_last_calls_are_json_lines_of_the_latest(tmp_path: Path) -> None:
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
