"""One mutant: put in, and met by the cases that execute it until one of them fails."""

import importlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

from modular_kernel.catalog import this_machine
from modular_kernel.errors import ConfigurationError
from modular_kernel.testing.cases import Case
from modular_kernel.testing.mutation.child import Child, Tell
from modular_kernel.testing.mutation.coverage import Coverage, Covered
from modular_kernel.testing.mutation.runs import Level, Pair, first_failure
from modular_kernel.testing.mutation.serve import dependents, reattach, serve
from modular_kernel.testing.mutation.source import Mutant

# A case may take so many times what its two calls took, and so many seconds more, before it hangs.
_SLOWER, _GRACE_S = 40, 60.0
# Of the cases in whose two calls no bit differs, so many are proven by every check.
_WHOLE = 12


@dataclass(frozen=True)
class Fate:
    """What became of a mutant.

    how: "killed" by a check, "hang", "crash", "refused" (a case that is valid is turned away),
    "survived", "equivalent" (reviewed, and not run), or "not executed" by any case. by: the check
    and what it said. ran: cases run. differing: those of them in which a bit differs.
    """

    mutant: Mutant
    how: str
    by: str = ""
    case: Case | None = None
    ran: int = 0
    differing: int = 0
    seconds: float = 0.0

    @property
    def killed(self) -> bool:
        return self.how in ("killed", "hang", "crash", "refused")


class Killers:
    """Which cases killed mutants of a module before: they are tried first."""

    def __init__(self) -> None:
        self._kills: Counter[tuple[str, Case]] = Counter()
        self._sound: set[Case] = set()

    def ordered(self, mutant: Mutant, cases: Sequence[Covered]) -> list[Covered]:
        """Cheap ones and known killers first."""
        return sorted(cases, key=lambda c: c.seconds / (1 + self._kills[mutant.module, c.case]))

    def note(self, mutant: Mutant, case: Case) -> None:
        self._kills[mutant.module, case] += 1

    def must_pass(self, case: Case) -> None:
        """Raise ConfigurationError if the case fails without any mutant."""
        if case in self._sound:
            return
        child = Child(lambda tell: tell({"failure": first_failure(case, this_machine())[0]}), 600.0)
        failure = next((m["failure"] for m in child), "ended")
        if failure is not None:
            need = "cases that pass before anything is changed"
            raise ConfigurationError("--mutate", got=f"{case}: {failure}", need=need)
        self._sound.add(case)


def attempt(
    mutant: Mutant,
    coverage: Coverage,
    pairs: tuple[Pair, ...],
    level: Level,
    killers: Killers | None = None,
    most: int | None = None,
) -> Fate:
    """Run the mutant in a child of this process.

    Every case that executes it is called twice; one in which a bit differs is proven by every
    check, and so are some in which none does. The mutant survives if all of them pass. most: how
    many cases are called, two thirds of them the fastest; None for all. Raises ConfigurationError
    if a case that fails does so without the mutant, too.
    """
    start = time.perf_counter()
    place = str(mutant.path), mutant.first, mutant.last
    loads = coverage.loads(*place)
    met = coverage.executing(*place)
    first = loads and not met  # what only selects cases is told by the list of cases
    if first:
        met = coverage.cases
    if not met:
        return Fate(mutant, "not executed")
    killers = killers or Killers()
    cases = _some(killers.ordered(mutant, met), most)
    every = tuple(c.case for c in coverage.cases)
    listing = Listing(pairs, level, every, first) if loads else None
    dependents({mutant.module})  # who imports whom is read here, once for all children
    fate = _follow(mutant, Child(lambda tell: _work(mutant, cases, listing, tell), _GRACE_S), cases)
    if fate.case is not None and fate.killed:
        killers.note(mutant, fate.case)
        killers.must_pass(fate.case)
    return replace(fate, seconds=time.perf_counter() - start)


@dataclass(frozen=True)
class Listing:
    """The case list without the mutant, where it may change the list. first: looked at first."""

    pairs: tuple[Pair, ...]
    level: Level
    known: tuple[Case, ...]
    first: bool


def _some(cases: list[Covered], most: int | None) -> list[Covered]:
    if most is None or len(cases) <= most:
        return cases
    head = 2 * most // 3
    return cases[:head] + cases[head :: -(-(len(cases) - head) // (most - head))]


def _follow(mutant: Mutant, child: Child, cases: Sequence[Covered]) -> Fate:
    """Listen to the child until a case fails or it ends."""
    ran, differing = set[int](), 0
    number, case = 0, None
    for message in child:
        if "case" in message:
            number = message["case"]
            ran.add(number)
            known = cases[number] if number < len(cases) else None
            case = known.case if known else None
            seconds = known.seconds if known else max(c.seconds for c in cases)
            child.patience = _GRACE_S + _SLOWER * seconds
        elif "differs" in message:
            differing += 1
        elif "listing" in message:
            child.patience = 10 * _GRACE_S
            case = None
        elif "refused" in message:
            return Fate(mutant, "refused", message["refused"])
        elif "failure" in message:
            how = "refused" if message["failure"].startswith("refused:") else "killed"
            return Fate(mutant, how, message["failure"], case, len(ran), differing)
    if child.ended.how == "done":
        return Fate(mutant, "survived", ran=len(ran), differing=differing)
    return Fate(mutant, child.ended.how, child.ended.detail, case, len(ran), differing)


def _work(mutant: Mutant, cases: list[Covered], listing: Listing | None, tell: Tell) -> None:
    """In the child."""
    try:
        serve(mutant)
        runs = importlib.import_module("modular_kernel.testing.mutation.runs")
        reattach()
        machine = runs.this_machine()
    # Whatever a mutant raises while it is imported or judged kills it.
    except Exception as error:  # noqa: BLE001
        tell({"failure": f"import: raised {type(error).__name__}: {error}"})
        return

    def proven(number: int, case: Case) -> bool:
        tell({"case": number})
        failure = runs.first_failure(case, machine)[0]
        if failure is not None:
            tell({"failure": failure})
        return failure is None

    alike: list[int] = []

    def called() -> bool:
        """Every case is called, and proven where a bit differs."""
        for number, known in enumerate(cases):
            tell({"case": number})
            if runs.digest(known.case, machine) == known.digest:
                alike.append(number)
                continue
            tell({"differs": number})
            if not proven(number, known.case):
                return False
        return True

    def listed() -> bool:
        return listing is None or _listed(listing, len(cases), runs, proven, tell)

    steps = (listed, called) if listing and listing.first else (called, listed)
    if all(step() for step in steps):
        spread = alike[:: max(1, len(alike) // _WHOLE)]
        all(proven(number, cases[number].case) for number in spread)


def _listed(
    listing: Listing,
    beyond: int,
    runs: ModuleType,
    proven: Callable[[int, Case], bool],
    tell: Tell,
) -> bool:
    """Whether no valid case is turned away, and some of those that only the mutant takes pass.

    beyond: their number, which no known case has.
    """
    tell({"listing": True})
    # A mutant can make the rules raise.
    try:
        lost = runs.refused(listing.known)
        listed = () if lost else runs.case_list(listing.pairs, listing.level)[0]
    except Exception as error:  # noqa: BLE001
        tell({"failure": f"list: raised {type(error).__name__}: {error}"})
        return False
    if lost:
        tell({"refused": f"{len(lost)} valid case(s), first {lost[0]}"})
        return False
    before = {str(case) for case in listing.known}
    new = [case for case in listed if str(case) not in before]
    return all(proven(beyond, case) for case in new[:_WHOLE])
