"""The steps in which cases run against a mutant, in one process or over ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from modular_kernel.spec.problem import Machine
from modular_kernel.testing.cases.lists import Case
from modular_kernel.testing.mutation.case_runs import Level, Pair
from modular_kernel.testing.mutation.coverage import CaseCoverage
from modular_kernel.testing.mutation.forked_worker import Tell
from modular_kernel.text import counted

# Of the cases without a differing bit, about this number are run with every check.
_WHOLE = 12


class CaseRunner(Protocol):
    """Runs cases, in one process (module `case_runs`) or over ranks."""

    def this_machine(self) -> Machine: ...

    def case_list(
        self, pairs: tuple[Pair, ...], level: Level
    ) -> tuple[Sequence[Case], Machine]: ...

    def refused(self, cases: Sequence[Case]) -> list[str]: ...

    def first_failure(self, case: Case, machine: Machine) -> tuple[str | None, float]: ...

    def digest(self, case: Case, machine: Machine) -> str: ...


@dataclass(frozen=True)
class CaseListing:
    """The case list without the mutant, for mutants that may change the list.

    first: whether the list is compared before the cases run.
    """

    pairs: tuple[Pair, ...]
    level: Level
    known: tuple[Case, ...]
    first: bool


def run_cases(
    cases: Sequence[CaseCoverage], listing: CaseListing | None, runs: CaseRunner, tell: Tell
) -> None:
    """Call every case, run all checks where a bit differs, then on some cases where none differs.

    Stops at the first failure, which is sent through `tell`.
    """
    machine = runs.this_machine()

    def proven(number: int, case: Case) -> bool:
        tell({"case": number})
        failure = runs.first_failure(case, machine)[0]
        if failure is not None:
            tell({"failure": failure})
        return failure is None

    unchanged: list[int] = []

    def called() -> bool:
        for number, covered in enumerate(cases):
            tell({"case": number})
            if runs.digest(covered.case, machine) == covered.digest:
                unchanged.append(number)
                continue
            tell({"differs": number})
            if not proven(number, covered.case):
                return False
        return True

    def listed() -> bool:
        return listing is None or _listed(listing, len(cases), runs, proven, tell)

    steps = (listed, called) if listing and listing.first else (called, listed)
    if all(step() for step in steps):
        sample = unchanged[:: max(1, len(unchanged) // _WHOLE)]
        all(proven(number, cases[number].case) for number in sample)


def _listed(
    listing: CaseListing,
    beyond: int,
    runs: CaseRunner,
    proven: Callable[[int, Case], bool],
    tell: Tell,
) -> bool:
    """Return whether all valid cases remain valid, and some newly valid ones pass.

    beyond: the number of known cases, which serves as the number of a new case.
    """
    tell({"listing": True})
    # A mutant can make the rules raise.
    try:
        now_refused = runs.refused(listing.known)
        now_valid = () if now_refused else runs.case_list(listing.pairs, listing.level)[0]
    except Exception as error:  # noqa: BLE001
        tell({"failure": f"list: raised {type(error).__name__}: {error}"})
        return False
    if now_refused:
        tell({"refused": f"{counted(len(now_refused), 'valid case')}, first {now_refused[0]}"})
        return False
    before = {str(case) for case in listing.known}
    new = [case for case in now_valid if str(case) not in before]
    return all(proven(beyond, case) for case in new[:_WHOLE])
