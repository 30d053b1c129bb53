"""Outcome of a mutant, and a tracker that derives the outcome from the messages of running cases.

A mutant is killed if a case fails, hangs, crashes or is refused with it, and survives otherwise.
`case_steps.run_cases` sends the messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from modular_kernel.testing.cases.lists import Case
from modular_kernel.testing.mutation.coverage import CaseCoverage, OnCase, ignore_case
from modular_kernel.testing.mutation.forked_worker import ChildExit, Message
from modular_kernel.testing.mutation.source import Mutant

# A case counts as hanging after GRACE_S seconds plus SLOWDOWN times the duration of its two calls.
SLOWDOWN, GRACE_S = 10, 15.0


@dataclass(frozen=True)
class MutantOutcome:
    """Outcome of a mutant.

    Attributes:
        mutant: the mutant.
        status: "killed" by a check, "hang", "crash", "refused" (a valid case is refused),
            "survived", "equivalent" (reviewed and not run, or proven by `forms`), or "not executed"
            by any case.
        finding: the check that failed, and its message.
        case: the case that killed the mutant.
        num_cases: number of cases that were run.
        differing: number of cases in which a bit differs.
        seconds: duration of the run.
        shared: if the mutant was already killed for another part, by a case that both parts have,
            the name of that part; "" if the mutant was run for this part.
        forms: if the mutant survived, but leaves the machine code of kernels with its line
            unchanged, the number of these kernels.
    """

    mutant: Mutant
    status: str
    finding: str = ""
    case: Case | None = None
    num_cases: int = 0
    differing: int = 0
    seconds: float = 0.0
    shared: str = ""
    forms: int = 0

    @classmethod
    def from_record(cls, mutant: Mutant, killer: str) -> "MutantOutcome":
        """Make the outcome of a mutant that an earlier record lists as killed by `killer`."""
        if killer in ("hang", "crash", "refused"):
            return cls(mutant, killer, "before")
        return cls(mutant, "killed", f"{killer}: before")

    @property
    def killed(self) -> bool:
        return self.status in ("killed", "hang", "crash", "refused")


class OutcomeTracker:
    """Derives the outcome of a mutant from the messages of its cases.

    on_case: called when a case starts, with the number of the cases before it.

    Attributes:
        outcome: the outcome; None until a case fails.
        timeout_s: seconds to wait for the next message.
    """

    def __init__(
        self, mutant: Mutant, cases: Sequence[CaseCoverage], on_case: OnCase = ignore_case
    ) -> None:
        self.outcome: MutantOutcome | None = None
        self.timeout_s = GRACE_S
        self._mutant, self._cases, self._on_case = mutant, cases, on_case
        self._cases_run, self._differing = set[int](), 0
        self._case: Case | None = None

    def receive(self, message: Message) -> None:
        """Update the outcome and the timeout from a message of `case_steps.run_cases`."""
        if "case" in message:
            index = message["case"]
            self._on_case(self._mutant.ident, len(self._cases_run), len(self._cases))
            self._cases_run.add(index)
            case_coverage = self._cases[index] if index < len(self._cases) else None
            self._case = case_coverage.case if case_coverage else None
            seconds = (
                case_coverage.seconds if case_coverage else max(c.seconds for c in self._cases)
            )
            self.timeout_s = GRACE_S + SLOWDOWN * seconds
        elif "differs" in message:
            self._differing += 1
        elif "listing" in message:
            self.timeout_s = 10 * GRACE_S
            self._case = None
        elif "refused" in message:
            self.outcome = MutantOutcome(self._mutant, "refused", message["refused"])
        elif "failure" in message:
            failure = message["failure"]
            self.outcome = self._make_outcome(
                "refused" if failure.startswith("refused:") else "killed", failure
            )

    def finish(self, exit_info: ChildExit) -> MutantOutcome:
        """Return the outcome after the last message."""
        if self.outcome is not None:
            return self.outcome
        if exit_info.status == "done":
            num_cases, differing = len(self._cases_run), self._differing
            return MutantOutcome(self._mutant, "survived", num_cases=num_cases, differing=differing)
        return self._make_outcome(exit_info.status, exit_info.detail)

    def _make_outcome(self, status: str, finding: str) -> MutantOutcome:
        return MutantOutcome(
            self._mutant, status, finding, self._case, len(self._cases_run), self._differing
        )
