"""The cases that a mutant meets, step by step, wherever they run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from modular_kernel.spec.problem import Machine
from modular_kernel.testing.cases.lists import Case
from modular_kernel.testing.mutation.case_runs import Level, Pair
from modular_kernel.testing.mutation.coverage import Covered
from modular_kernel.testing.mutation.forked_worker import Tell
from modular_kernel.text import counted

# Of the cases in whose two calls no bit differs, so many are proven by every check.
_WHOLE = 12


class Runs(Protocol):
    """How cases are run: the functions of `runs`, in one process or over ranks."""

    def this_machine(self) -> Machine: ...

    def case_list(
        self, pairs: tuple[Pair, ...], level: Level
    ) -> tuple[Sequence[Case], Machine]: ...

    def refused(self, cases: Sequence[Case]) -> list[str]: ...

    def first_failure(self, case: Case, machine: Machine) -> tuple[str | None, float]: ...

    def digest(self, case: Case, machine: Machine) -> str: ...


@dataclass(frozen=True)
class Listing:
    """The case list without the mutant, where it may change the list. first: looked at first."""

    pairs: tuple[Pair, ...]
    level: Level
    known: tuple[Case, ...]
    first: bool


def run_cases(cases: Sequence[Covered], listing: Listing | None, runs: Runs, tell: Tell) -> None:
    """Every case is called, and proven where a bit differs; then some in which none does.

    Ends with the first failure, which is told.
    """
    machine = runs.this_machine()

    def proven(number: int, case: Case) -> bool:
        tell({"case": number})
        failure = runs.first_failure(case, machine)[0]
        if failure is not None:
            tell({"failure": failure})
        return failure is None

    alike: list[int] = []

    def called() -> bool:
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
    runs: Runs,
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
        tell({"refused": f"{counted(len(lost), 'valid case')}, first {lost[0]}"})
        return False
    before = {str(case) for case in listing.known}
    new = [case for case in listed if str(case) not in before]
    return all(proven(beyond, case) for case in new[:_WHOLE])
