"""Run one mutant with the test cases that execute it, until one of them fails.

`score.mutation_score` calls `run_mutant` for each mutant. The cases that are most likely to fail
run first.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol, TypeVar

from modular_kernel.errors import ConfigurationError
from modular_kernel.testing.cases.lists import Case
from modular_kernel.testing.mutation.case_runs import Level, Pair
from modular_kernel.testing.mutation.case_steps import CaseListing
from modular_kernel.testing.mutation.coverage import CaseCoverage, Coverage
from modular_kernel.testing.mutation.mutant_outcome import MutantOutcome
from modular_kernel.testing.mutation.one_process import OneProcess
from modular_kernel.testing.mutation.source import Mutant

Item = TypeVar("Item")

# Fields of a case that are not axes. (The fields of the problem are.)
_NOT_AXES = frozenset({"problem", "seed"})


class MutationBackend(Protocol):
    """Runs cases in one process or on several ranks.

    - world_size: number of ranks.
    - ranks_per_host: number of ranks per host; None if all ranks are on one host.
    - has_cases: returns whether a pairing has a case.
    - cover: traces the lines of `modules` that the cases of `pairs` execute.
    - run_mutant: runs a mutant with the given cases, and returns its outcome.
    - find_failure: returns the first failure of a case without mutants, or None.
    - compute_digests: yields a hash of the result bits of each case, computed with all of the given
      mutants. Stops early if a process dies or times out.
    """

    @property
    def world_size(self) -> int: ...

    @property
    def ranks_per_host(self) -> int | None: ...

    def has_cases(self, pair: Pair, level: Level) -> bool: ...

    def cover(
        self, modules: Mapping[str, Path], pairs: tuple[Pair, ...], level: Level
    ) -> Coverage: ...

    def run_mutant(
        self, mutant: Mutant, cases: Sequence[CaseCoverage], listing: CaseListing | None
    ) -> MutantOutcome: ...

    def find_failure(self, case: Case) -> str | None: ...

    def compute_digests(
        self, cases: Sequence[Case], mutants: Sequence[Mutant]
    ) -> Iterator[str]: ...


class KillHistory:
    """Records which cases killed mutants of a module. These cases are tried first."""

    def __init__(self) -> None:
        self._kills: Counter[tuple[str, Case]] = Counter()
        self._passing: set[Case] = set()

    def order(self, mutant: Mutant, cases: Sequence[CaseCoverage]) -> list[CaseCoverage]:
        """Order cases such that a case that kills the mutant is likely to run early.

        Cases are sorted by duration, with a preference for cases that killed other mutants of the
        module. In this order, cases that together execute every line of the module come first, then
        cases that together have every value of every axis, then all others.
        """
        by_cost = sorted(cases, key=lambda c: c.seconds / (1 + self._kills[mutant.module, c.case]))
        file = str(mutant.path)
        line_covering, uncovered = _split_covering(
            by_cost, lambda case_coverage: case_coverage.lines.get(file, frozenset())
        )
        axis_covering, remaining = _split_covering(
            uncovered, lambda case_coverage: list_axes(case_coverage.case), line_covering
        )
        return line_covering + axis_covering + remaining

    def add(self, mutant: Mutant, case: Case) -> None:
        """Record that a case, which passes without mutants, killed the mutant."""
        self._kills[mutant.module, case] += 1
        self._passing.add(case)

    def check_passes(self, case: Case, backend: MutationBackend) -> None:
        """Raise ConfigurationError if the case fails without any mutant."""
        if case in self._passing:
            return
        failure = backend.find_failure(case)
        if failure is not None:
            need = "cases that pass before anything is changed"
            raise ConfigurationError("--mutate", got=f"{case}: {failure}", need=need)
        self._passing.add(case)


def _split_covering(
    cases: Sequence[CaseCoverage],
    list_items: Callable[[CaseCoverage], frozenset[Item]],
    preceding: Sequence[CaseCoverage] = (),
) -> tuple[list[CaseCoverage], list[CaseCoverage]]:
    """Split cases into those with an item that no earlier case has, and the remaining ones."""
    covered_items = {item for case_coverage in preceding for item in list_items(case_coverage)}
    covering, not_covering = list[CaseCoverage](), list[CaseCoverage]()
    for case_coverage in cases:
        (not_covering if list_items(case_coverage) <= covered_items else covering).append(
            case_coverage
        )
        covered_items |= list_items(case_coverage)
    return covering, not_covering


@lru_cache(maxsize=8192)
def list_axes(case: Case) -> frozenset[tuple[str, str]]:
    """Return (axis, value) for every axis of a case. Sizes are represented by their bit length."""
    values = {**vars(case.problem), **vars(case), "pairs": case.problem.tokens * case.problem.top_k}
    sizes = {name: value.bit_length() for name, value in values.items() if type(value) is int}
    return frozenset(
        (name, str(value)) for name, value in (values | sizes).items() if name not in _NOT_AXES
    )


def run_mutant(
    mutant: Mutant,
    coverage: Coverage,
    pairs: tuple[Pair, ...],
    level: Level,
    history: KillHistory | None = None,
    *,
    max_cases: int | None = None,
    backend: MutationBackend | None = None,
) -> MutantOutcome:
    """Run a mutant in separate processes and return its outcome.

    Every case that executes the mutant makes two calls. All checks run on the cases in which a bit
    differs, and on some cases in which no bit differs. The mutant survives if all checks pass.

    coverage, pairs, level: the cases, as in `Survey`.
    history: determines the order of the cases; it is updated.
    max_cases: maximum number of cases; None means all. Two thirds of them are the first cases in
        the order, and one third is spread over the other cases.
    backend: runs the cases; None means one process.

    Raises ConfigurationError if the case that failed also fails without the mutant.
    """
    start = time.perf_counter()
    backend = backend or OneProcess()
    is_loaded = coverage.loads(mutant)
    candidates = coverage.executing(mutant)
    # An import or the selection of cases executes this mutant, but no case does. It can therefore
    # only change which cases are valid.
    affects_selection_only = is_loaded and not candidates
    if affects_selection_only:
        candidates = coverage.cases
    if not candidates:
        return MutantOutcome(mutant, "not executed")
    history = history or KillHistory()
    cases = _limit_cases(history.order(mutant, candidates), max_cases)
    all_cases = tuple(c.case for c in coverage.cases)
    listing = CaseListing(pairs, level, all_cases, affects_selection_only) if is_loaded else None
    outcome = backend.run_mutant(mutant, cases, listing)
    if outcome.killed:
        # The mutant counts as killed only if the case passes without it.
        history.check_passes(outcome.case or cases[0].case, backend)
    if outcome.case is not None and outcome.killed:
        history.add(mutant, outcome.case)
    return replace(outcome, seconds=time.perf_counter() - start)


def _limit_cases(cases: list[CaseCoverage], max_cases: int | None) -> list[CaseCoverage]:
    """Return at most `max_cases` cases: the first ones, and some spread over the remaining ones."""
    if max_cases is None or len(cases) <= max_cases:
        return cases
    num_first = 2 * max_cases // 3
    step = -(-(len(cases) - num_first) // (max_cases - num_first))
    return cases[:num_first] + cases[num_first::step]
