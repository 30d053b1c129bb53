"""Three gloo ranks of which one is faulty, and a check of the reports of the other ranks."""

import json
from dataclasses import dataclass, field
from typing import Any

from ep_layers import ALL2ALL, GATHERED, REPLICATED, Layer
from rank_fixtures import make_ranks_fixture

from modular_kernel.testing.stress.faults import FAULTY_RANK, SLACK_S, RankReport

WORLD = 3
LONG_S = 10.0  # a timeout that no rank reaches, because it is notified of the fault earlier
AT_ONCE_S = LONG_S / 2  # upper bound for the time to a notification, even on a busy machine
TOKENS = {REPLICATED: (4, 4, 4), GATHERED: (4, 3, 5), ALL2ALL: (4, 3, 5)}


@dataclass(frozen=True)
class Fault:
    """A layer with a faulty rank. other: fields in which the faulty rank's problem differs."""

    part: str
    other: dict[str, object] = field(default_factory=dict)

    @property
    def layer(self) -> Layer:
        return Layer(self.part, TOKENS[self.part], placement="linear")


def make_three_ranks_fixture() -> Any:
    """Return a fixture with WORLD ranks for the tests of a module."""
    return make_ranks_fixture(WORLD, grace=LONG_S + 2 * SLACK_S)


def assert_reports_faulty_rank(report: RankReport, phases: set[str]) -> None:
    assert report.error == "CommunicationError", report
    assert report.peers == (FAULTY_RANK,), report.message
    assert report.phase in phases, report.message
    assert report.seconds <= report.timeout_s + SLACK_S, report
    last_record = json.loads(report.last_record)
    assert last_record["phase"] == report.phase
    assert last_record["state"].startswith("failed: "), last_record
