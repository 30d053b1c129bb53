"""Outcomes of cases, and their summary."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """Outcome of a case."""

    AGREE = "agree"
    REFUSED = "refused with a typed error"
    THEIRS = "mismatch: other side's"
    OURS = "mismatch: ours"
    RAW = "raw exception"
    NOT_REACHED = "ours did not run"
    NOT_USABLE = "skipped, or fails without ours"


FAILURES = frozenset({Outcome.OURS, Outcome.RAW})
# Outcomes whose reasons the summary lists.
LISTED_OUTCOMES = frozenset({Outcome.REFUSED, Outcome.THEIRS, Outcome.NOT_USABLE})


@dataclass(frozen=True)
class Case:
    """A case and its outcome.

    why: details for outcomes other than agreement.
    """

    suite: str
    name: str
    outcome: Outcome
    why: str = ""

    def __str__(self) -> str:
        return f"{self.suite}: {self.name}: {self.outcome}{self.why and ': '}{self.why}"


def judge_errors(ours: float, theirs: float, bound: float) -> tuple[Outcome, str]:
    """Return the outcome of a case, and a description if a side exceeds the bound.

    ours, theirs: errors against float64; NaN exceeds every bound.
    """
    detail = f"error {ours:.2e}, theirs {theirs:.2e}, bound {bound:.0e}"
    if not ours <= bound:
        return Outcome.OURS, detail
    if not theirs <= bound:
        return Outcome.THEIRS, detail
    return Outcome.AGREE, ""


def format_reason(error: BaseException) -> str:
    """Format an exception as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:240]


def summarize(cases: Iterable[Case]) -> dict[str, Any]:
    """Count the cases by suite and outcome, and list bad cases and the reasons of others.

    A suite without any usable case is bad, because the usual reason is a missing package. Raises
    AssertionError if the outcomes of a suite do not add up to its number of cases.
    """
    all_cases = list(cases)
    suites: dict[str, dict[str, int]] = {}
    for suite in dict.fromkeys(case.suite for case in all_cases):
        counts_by_outcome = Counter(case.outcome for case in all_cases if case.suite == suite)
        suites[suite] = {str(outcome): counts_by_outcome[outcome] for outcome in Outcome}
        suites[suite]["total"] = sum(case.suite == suite for case in all_cases)
        if sum(counts_by_outcome[outcome] for outcome in Outcome) != suites[suite]["total"]:
            raise AssertionError(f"{suite}: cases were lost")
    reasons = Counter(
        (case.suite, str(case.outcome), case.why)
        for case in all_cases
        if case.outcome in LISTED_OUTCOMES
    )
    listed = [
        {"suite": suite, "outcome": outcome, "why": detail, "cases": count}
        for (suite, outcome, detail), count in sorted(reasons.items())
    ]
    failures = [str(case) for case in all_cases if case.outcome in FAILURES]
    for suite, counts in suites.items():
        if counts[Outcome.NOT_USABLE] == counts["total"]:
            detail = next(case.why for case in all_cases if case.suite == suite)
            failures.append(f"{suite}: no case could be used: {detail}")
    return {"suites": suites, "reasons": listed, "bad": failures}
