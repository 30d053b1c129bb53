"""How a case ends, and how many ended so."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """How a case ends."""

    AGREE = "agree"
    REFUSED = "refused with a typed error"
    THEIRS = "mismatch: other side's"
    OURS = "mismatch: ours"
    RAW = "raw exception"
    NOT_REACHED = "ours did not run"
    NOT_USABLE = "skipped, or fails without ours"


BAD = frozenset({Outcome.OURS, Outcome.RAW})
LISTED = frozenset({Outcome.REFUSED, Outcome.THEIRS, Outcome.NOT_USABLE})  # beside the bad ones


@dataclass(frozen=True)
class Case:
    """One case. why: what was seen, where it is not agreement."""

    suite: str
    name: str
    outcome: Outcome
    why: str = ""

    def __str__(self) -> str:
        return f"{self.suite}: {self.name}: {self.outcome}{self.why and ': '}{self.why}"


def judged(ours: float, theirs: float, bound: float) -> tuple[Outcome, str]:
    """Judge the errors of both sides against float64: who is outside the bound.

    A NaN is outside.
    """
    seen = f"error {ours:.2e}, theirs {theirs:.2e}, bound {bound:.0e}"
    if not ours <= bound:
        return Outcome.OURS, seen
    if not theirs <= bound:
        return Outcome.THEIRS, seen
    return Outcome.AGREE, ""


def reason(error: BaseException) -> str:
    """Return one line of an error."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:240]


def summary(cases: Iterable[Case]) -> dict[str, Any]:
    """Count the cases by suite and outcome, and list whatever is neither agreement nor ours unrun.

    `total` is the sum of a suite's outcomes, or this raises. A suite of which nothing could be used
    is bad: it says nothing, most often since a package is absent.
    """
    kept = list(cases)
    suites: dict[str, dict[str, int]] = {}
    for suite in dict.fromkeys(case.suite for case in kept):
        counted = Counter(case.outcome for case in kept if case.suite == suite)
        suites[suite] = {str(end): counted[end] for end in Outcome}
        suites[suite]["total"] = sum(case.suite == suite for case in kept)
        if sum(counted[end] for end in Outcome) != suites[suite]["total"]:
            raise AssertionError(f"{suite}: cases were lost")
    reasons = Counter(
        (case.suite, str(case.outcome), case.why) for case in kept if case.outcome in LISTED
    )
    listed = [
        {"suite": suite, "outcome": end, "why": why, "cases": count}
        for (suite, end, why), count in sorted(reasons.items())
    ]
    bad = [str(case) for case in kept if case.outcome in BAD]
    for suite, counts in suites.items():
        if counts[Outcome.NOT_USABLE] == counts["total"]:
            why = next(case.why for case in kept if case.suite == suite)
            bad.append(f"{suite}: no case could be used: {why}")
    return {"suites": suites, "reasons": listed, "bad": bad}
