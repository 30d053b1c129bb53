"""`MutantOutcome`: outcome of a mutant; `OutcomeTracker`: tracks it while the cases run."""

from collections.abc import Sequence
from dataclasses import dataclass

from modular_kernel.testing.cases.lists import Case
from modular_kernel.testing.mutation.coverage import CaseCoverage
from modular_kernel.testing.mutation.forked_worker import ChildExit, Message
from modular_kernel.testing.mutation.source import Mutant

# A case counts as hanging after GRACE_S seconds plus SLOWER times the duration of its two calls.
SLOWER, GRACE_S = 10, 15.0


@dataclass(frozen=True)
class MutantOutcome:
    """Outcome of a mutant.

    how: "killed" by a check, "hang", "crash", "refused" (a valid case is refused), "survived",
    "equivalent" (reviewed and not run), or "not executed" by any case. by: the check and its
    finding. ran: number of cases run. differing: the number of them in which a bit differs. shared:
    the part whose score it was killed in, by a case that also belongs to this part; it was not run
    again.
    """

    mutant: Mutant
    how: str
    by: str = ""
    case: Case | None = None
    ran: int = 0
    differing: int = 0
    seconds: float = 0.0
    shared: str = ""

    @classmethod
    def before(cls, mutant: Mutant, killer: str) -> "MutantOutcome":
        """Return the outcome of a mutant that a record lists as killed by `killer`."""
        if killer in ("hang", "crash", "refused"):
            return cls(mutant, killer, "before")
        return cls(mutant, "killed", f"{killer}: before")

    @property
    def killed(self) -> bool:
        return self.how in ("killed", "hang", "crash", "refused")


class OutcomeTracker:
    """Tracks messages of the cases of a mutant. fate: None until one of them fails.

    patience: timeout in seconds for the next message.
    """

    def __init__(self, mutant: Mutant, cases: Sequence[CaseCoverage]) -> None:
        self.fate: MutantOutcome | None = None
        self.patience = GRACE_S
        self._mutant, self._cases = mutant, cases
        self._ran, self._differing = set[int](), 0
        self._case: Case | None = None

    def hear(self, message: Message) -> None:
        if "case" in message:
            number = message["case"]
            self._ran.add(number)
            covered = self._cases[number] if number < len(self._cases) else None
            self._case = covered.case if covered else None
            seconds = covered.seconds if covered else max(c.seconds for c in self._cases)
            self.patience = GRACE_S + SLOWER * seconds
        elif "differs" in message:
            self._differing += 1
        elif "listing" in message:
            self.patience = 10 * GRACE_S
            self._case = None
        elif "refused" in message:
            self.fate = MutantOutcome(self._mutant, "refused", message["refused"])
        elif "failure" in message:
            failure = message["failure"]
            self.fate = self._make_outcome(
                "refused" if failure.startswith("refused:") else "killed", failure
            )

    def ended(self, ended: ChildExit) -> MutantOutcome:
        """Return the outcome after the last message."""
        if self.fate is not None:
            return self.fate
        if ended.how == "done":
            ran, differing = len(self._ran), self._differing
            return MutantOutcome(self._mutant, "survived", ran=ran, differing=differing)
        return self._make_outcome(ended.how, ended.detail)

    def _make_outcome(self, how: str, by: str) -> MutantOutcome:
        return MutantOutcome(self._mutant, how, by, self._case, len(self._ran), self._differing)
