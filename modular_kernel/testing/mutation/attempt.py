"""One mutant: put in, and met by the cases that execute it until one of them fails."""

import importlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from modular_kernel.testing.cases import Case
from modular_kernel.testing.mutation.child import Child, Tell
from modular_kernel.testing.mutation.coverage import Coverage, Covered
from modular_kernel.testing.mutation.runs import Level, Pair
from modular_kernel.testing.mutation.serve import reattach, serve
from modular_kernel.testing.mutation.source import Mutant

# A case may take so many times what it took, and so many seconds more, before it hangs.
_SLOWER, _GRACE_S = 10, 20.0


@dataclass(frozen=True)
class Fate:
    """What became of a mutant.

    how: "killed" by a check, "hang", "crash", "refused" (a case that is valid is turned away),
    "survived", or "not executed" by any case. by: the check and what it said. ran: cases run.
    """

    mutant: Mutant
    how: str
    by: str = ""
    case: Case | None = None
    ran: int = 0
    seconds: float = 0.0

    @property
    def killed(self) -> bool:
        return self.how in ("killed", "hang", "crash", "refused")


class Killers:
    """Which cases killed mutants of a module before: they are tried first."""

    def __init__(self) -> None:
        self._kills: Counter[tuple[str, Case]] = Counter()

    def ordered(self, mutant: Mutant, cases: Sequence[Covered]) -> list[Covered]:
        """Cheap ones and known killers first."""
        return sorted(cases, key=lambda c: c.seconds / (1 + self._kills[mutant.module, c.case]))

    def note(self, mutant: Mutant, case: Case) -> None:
        self._kills[mutant.module, case] += 1


def attempt(
    mutant: Mutant,
    coverage: Coverage,
    pairs: tuple[Pair, ...],
    level: Level,
    killers: Killers | None = None,
) -> Fate:
    """Run the mutant in a child of this process. Every case must pass without it."""
    start = time.perf_counter()
    place = str(mutant.path), mutant.first, mutant.last
    loads = coverage.loads(*place)
    met = coverage.executing(*place)
    if not met and loads:
        met = coverage.cases
    if not met:
        return Fate(mutant, "not executed")
    killers = killers or Killers()
    cases = killers.ordered(mutant, met)
    known = {c.case for c in coverage.cases} if loads else None
    child = Child(
        lambda tell: _work(mutant, [c.case for c in cases], known, (pairs, level), tell), _GRACE_S
    )
    fate = _follow(mutant, child, cases)
    if fate.case is not None and fate.killed:
        killers.note(mutant, fate.case)
    return Fate(mutant, fate.how, fate.by, fate.case, fate.ran, time.perf_counter() - start)


def _follow(mutant: Mutant, child: Child, cases: Sequence[Covered]) -> Fate:
    """Listen to the child until a case fails or it ends."""
    seconds = {c.case: c.seconds for c in cases}
    slowest = max(seconds.values())
    ran, case = 0, None
    for message in child:
        if "case" in message:
            number = message["case"]
            case = cases[number].case if number < len(cases) else None
            child.patience = _GRACE_S + _SLOWER * (seconds[case] if case else slowest)
            ran += 1
        elif "refused" in message:
            child.patience = _GRACE_S
            return Fate(mutant, "refused", message["refused"])
        elif "failure" in message:
            how = "refused" if message["failure"].startswith("refused:") else "killed"
            return Fate(mutant, how, message["failure"], case, ran)
    if child.ended.how == "done":
        return Fate(mutant, "survived", ran=ran)
    return Fate(mutant, child.ended.how, child.ended.detail, case, ran)


def _work(
    mutant: Mutant,
    cases: list[Case],
    known: set[Case] | None,
    listing: tuple[tuple[Pair, ...], Level],
    tell: Tell,
) -> None:
    """In the child. known: the list without the mutant, where it may change the list."""
    runs: ModuleType
    try:
        serve(mutant)
        runs = importlib.import_module("modular_kernel.testing.mutation.runs")
        reattach()
        listed = runs.case_list(*listing)[0] if known is not None else ()
        machine = runs.this_machine()
    # Whatever a mutant raises while it is imported or judged kills it.
    except Exception as error:  # noqa: BLE001
        tell({"failure": f"import: raised {type(error).__name__}: {error}"})
        return
    new: list[Case] = []
    if known is not None:
        before, after = {str(case) for case in known}, {str(case) for case in listed}
        if before - after:
            lost = sorted(before - after)
            tell({"refused": f"{len(lost)} valid case(s), first {lost[0]}"})
            return
        new = [case for case in listed if str(case) not in before]
    # Cases that only the mutant takes come first; their number is beyond those of the others.
    for number, case in [*((len(cases), case) for case in new), *enumerate(cases)]:
        tell({"case": number})
        failure = runs.first_failure(case, machine)[0]
        if failure is not None:
            tell({"failure": failure})
            return
