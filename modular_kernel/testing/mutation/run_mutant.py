"""Run of one mutant against the cases that execute it, until one of them fails."""

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

# Fields of a case that are not an axis.
_NOT_AXES = frozenset({"problem", "seed"})


class MutationBackend(Protocol):
    """Runs cases in one process or over ranks.

    world_size: number of ranks. ranks_per_host: None if all are on one host. has_cases: returns
    whether a pairing has a case there. cover: as the function of that name. run_mutant: returns
    the outcome of a mutant on these cases. failure: the first failure of a case without mutants.
    digests: yields a digest per case, with all of these mutants; stops early if a process is lost.
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

    def failure(self, case: Case) -> str | None: ...

    def digests(self, cases: Sequence[Case], mutants: Sequence[Mutant]) -> Iterator[str]: ...


class KillHistory:
    """Records the cases that killed mutants of a module, which are tried first."""

    def __init__(self) -> None:
        self._kills: Counter[tuple[str, Case]] = Counter()
        self._passing: set[Case] = set()

    def order(self, mutant: Mutant, cases: Sequence[CaseCoverage]) -> list[CaseCoverage]:
        """Order cases, cheap ones and earlier killers first.

        First come cases that together execute every line of the module, then cases that together
        have every value of every axis, so that defects in rare branches or with large problems are
        found early.
        """
        by_cost = sorted(cases, key=lambda c: c.seconds / (1 + self._kills[mutant.module, c.case]))
        file = str(mutant.path)
        line_covering, uncovered = _split_covering(
            by_cost, lambda covered: covered.lines.get(file, frozenset())
        )
        axis_covering, others = _split_covering(
            uncovered, lambda covered: axes(covered.case), line_covering
        )
        return line_covering + axis_covering + others

    def add(self, mutant: Mutant, case: Case) -> None:
        self._kills[mutant.module, case] += 1

    def check_passes(self, case: Case, backend: MutationBackend) -> None:
        """Raise ConfigurationError if the case fails without any mutant."""
        if case in self._passing:
            return
        failure = backend.failure(case)
        if failure is not None:
            need = "cases that pass before anything is changed"
            raise ConfigurationError("--mutate", got=f"{case}: {failure}", need=need)
        self._passing.add(case)


def _split_covering(
    cases: Sequence[CaseCoverage],
    items_of: Callable[[CaseCoverage], frozenset[Item]],
    preceding: Sequence[CaseCoverage] = (),
) -> tuple[list[CaseCoverage], list[CaseCoverage]]:
    """Split cases into those with an item that no earlier case has, and the rest."""
    covered_items = {item for covered in preceding for item in items_of(covered)}
    covering, rest = list[CaseCoverage](), list[CaseCoverage]()
    for covered in cases:
        (rest if items_of(covered) <= covered_items else covering).append(covered)
        covered_items |= items_of(covered)
    return covering, rest


@lru_cache(maxsize=8192)
def axes(case: Case) -> frozenset[tuple[str, str]]:
    """Return (axis, value) of every axis of the case; for sizes, the number of bits."""
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

    Every case that executes it is called twice. All checks run on cases in which a bit differs, and
    on some in which none does. The mutant survives if all of them pass. max_cases: maximum
    number of cases, two thirds of them the first in order; None for all. backend: None for one
    process. Raises
    ConfigurationError if a failed case also fails without the mutant.
    """
    start = time.perf_counter()
    backend = backend or OneProcess()
    is_loaded = coverage.loads(mutant)
    candidates = coverage.executing(mutant)
    only_selects = is_loaded and not candidates  # visible only in the list of cases
    if only_selects:
        candidates = coverage.cases
    if not candidates:
        return MutantOutcome(mutant, "not executed")
    history = history or KillHistory()
    cases = _limit_cases(history.order(mutant, candidates), max_cases)
    all_cases = tuple(c.case for c in coverage.cases)
    listing = CaseListing(pairs, level, all_cases, only_selects) if is_loaded else None
    outcome = backend.run_mutant(mutant, cases, listing)
    if outcome.killed:
        # A mutant that breaks imports counts only if imports work without it.
        history.check_passes(outcome.case or cases[0].case, backend)
    if outcome.case is not None and outcome.killed:
        history.add(mutant, outcome.case)
    return replace(outcome, seconds=time.perf_counter() - start)


def _limit_cases(cases: list[CaseCoverage], max_cases: int | None) -> list[CaseCoverage]:
    if max_cases is None or len(cases) <= max_cases:
        return cases
    num_first = 2 * max_cases // 3
    return (
        cases[:num_first]
        + cases[num_first :: -(-(len(cases) - num_first) // (max_cases - num_first))]
    )
