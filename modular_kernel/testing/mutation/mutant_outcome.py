"""What became of a mutant, and how it is told while its cases run."""

from collections.abc import Sequence
from dataclasses import dataclass

from modular_kernel.testing.cases.lists import Case
from modular_kernel.testing.mutation.coverage import Covered
from modular_kernel.testing.mutation.forked_worker import Ended, Message
from modular_kernel.testing.mutation.source import Mutant

# A case may take so many times what its two calls took, and so many seconds more, before it hangs.
SLOWER, GRACE_S = 10, 15.0


@dataclass(frozen=True)
class Fate:
    """What became of a mutant.

    how: "killed" by a check, "hang", "crash", "refused" (a case that is valid is turned away),
    "survived", "equivalent" (reviewed, and not run), or "not executed" by any case. by: the check
    and what it said. ran: cases run. differing: those of them in which a bit differs. shared: the
    part in whose score it died before a case that is this part's, too; it was not run again.
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
    def before(cls, mutant: Mutant, killer: str) -> "Fate":
        """Of one that died before, by what a record says killed it."""
        if killer in ("hang", "crash", "refused"):
            return cls(mutant, killer, "before")
        return cls(mutant, "killed", f"{killer}: before")

    @property
    def killed(self) -> bool:
        return self.how in ("killed", "hang", "crash", "refused")


class Follower:
    """Hears what the cases do before a mutant. fate: None until one of them fails.

    patience: seconds that the next message may take.
    """

    def __init__(self, mutant: Mutant, cases: Sequence[Covered]) -> None:
        self.fate: Fate | None = None
        self.patience = GRACE_S
        self._mutant, self._cases = mutant, cases
        self._ran, self._differing = set[int](), 0
        self._case: Case | None = None

    def hear(self, message: Message) -> None:
        if "case" in message:
            number = message["case"]
            self._ran.add(number)
            known = self._cases[number] if number < len(self._cases) else None
            self._case = known.case if known else None
            seconds = known.seconds if known else max(c.seconds for c in self._cases)
            self.patience = GRACE_S + SLOWER * seconds
        elif "differs" in message:
            self._differing += 1
        elif "listing" in message:
            self.patience = 10 * GRACE_S
            self._case = None
        elif "refused" in message:
            self.fate = Fate(self._mutant, "refused", message["refused"])
        elif "failure" in message:
            failure = message["failure"]
            self.fate = self._fate(
                "refused" if failure.startswith("refused:") else "killed", failure
            )

    def ended(self, ended: Ended) -> Fate:
        """Return what became of it, now that nothing more is said."""
        if self.fate is not None:
            return self.fate
        if ended.how == "done":
            ran, differing = len(self._ran), self._differing
            return Fate(self._mutant, "survived", ran=ran, differing=differing)
        return self._fate(ended.how, ended.detail)

    def _fate(self, how: str, by: str) -> Fate:
        return Fate(self._mutant, how, by, self._case, len(self._ran), self._differing)
