"""Run the test cases of a mutant step by step, in one process or on several ranks.

The changed source is already loaded. First, two calls of each case are made, which is cheap, and
the hash of their result bits (the digest) shows whether the mutant has an effect. All checks, which
take longer, then run mainly on the cases whose digest changed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from modular_kernel.spec.problem import Machine
from modular_kernel.testing.cases.lists import Case
from modular_kernel.testing.mutation.case_runs import Level, Pair
from modular_kernel.testing.mutation.coverage import CaseCoverage
from modular_kernel.testing.mutation.forked_worker import Send
from modular_kernel.text import format_count

# Approximate number of cases with an unchanged digest on which all checks are run.
_NUM_SAMPLED = 12


class CaseRunner(Protocol):
    """Runs cases, in one process (module `case_runs`) or on several ranks (`over_ranks.Ranks`)."""

    def this_machine(self) -> Machine: ...

    def list_cases(
        self, pairs: tuple[Pair, ...], level: Level
    ) -> tuple[Sequence[Case], Machine]: ...

    def list_invalid_cases(self, cases: Sequence[Case]) -> list[str]: ...

    def run_until_failure(self, case: Case, machine: Machine) -> tuple[str | None, float]: ...

    def hash_case(self, case: Case, machine: Machine) -> str: ...


@dataclass(frozen=True)
class CaseListing:
    """The valid cases without the mutant, for mutants that may change which cases are valid.

    Attributes:
        pairs, level: determine the cases.
        known: the valid cases of `pairs` without the mutant.
        compare_first: whether the lists of cases are compared before the cases are run.
    """

    pairs: tuple[Pair, ...]
    level: Level
    known: tuple[Case, ...]
    compare_first: bool


def run_cases(
    cases: Sequence[CaseCoverage], listing: CaseListing | None, runner: CaseRunner, send: Send
) -> None:
    """Make two calls of every case, and run all checks on the cases in which a bit differs.

    All checks also run on the first case in which no bit differs, because some checks do not depend
    on the result bits, and finally on a sample of the other such cases. Stops at the first failure.
    Reports progress and the failure through `send`.
    """
    machine = runner.this_machine()

    def passes(index: int, case: Case) -> bool:
        send({"case": index})
        failure = runner.run_until_failure(case, machine)[0]
        if failure is not None:
            send({"failure": failure})
        return failure is None

    unchanged: list[int] = []

    def run_all_cases() -> bool:
        for index, case_coverage in enumerate(cases):
            send({"case": index})
            if runner.hash_case(case_coverage.case, machine) == case_coverage.digest:
                unchanged.append(index)
                if len(unchanged) == 1 and not passes(index, case_coverage.case):
                    return False
                continue
            send({"differs": index})
            if not passes(index, case_coverage.case):
                return False
        return True

    def listing_passes() -> bool:
        return listing is None or _listing_passes(listing, len(cases), runner, passes, send)

    steps = (
        (listing_passes, run_all_cases)
        if listing and listing.compare_first
        else (run_all_cases, listing_passes)
    )
    if all(step() for step in steps):
        sample = unchanged[:: max(1, len(unchanged) // _NUM_SAMPLED)][1:]
        all(passes(index, cases[index].case) for index in sample)


def _listing_passes(
    listing: CaseListing,
    new_index: int,
    runner: CaseRunner,
    passes: Callable[[int, Case], bool],
    send: Send,
) -> bool:
    """Return whether all valid cases remain valid, and some newly valid cases pass.

    new_index: the index that is reported for new cases, which is the number of known cases.
    """
    send({"listing": True})
    # A mutant can make the rules raise an error.
    try:
        now_refused = runner.list_invalid_cases(listing.known)
        now_valid = () if now_refused else runner.list_cases(listing.pairs, listing.level)[0]
    except Exception as error:  # noqa: BLE001
        send({"failure": f"list: raised {type(error).__name__}: {error}"})
        return False
    if now_refused:
        send({"refused": f"{format_count(len(now_refused), 'valid case')}, first {now_refused[0]}"})
        return False
    known_names = {str(case) for case in listing.known}
    new_cases = [case for case in now_valid if str(case) not in known_names]
    return all(passes(new_index, case) for case in new_cases[:_NUM_SAMPLED])
