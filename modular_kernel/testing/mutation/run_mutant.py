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

T = TypeVar("T")

# Fields of a case that are not an axis.
_NOT_AXES = frozenset({"problem", "seed"})


class MutationBackend(Protocol):
    """Runs cases in one process or over ranks.

    world_size: number of ranks. ranks_per_host: None if all are on one host. has_cases: returns
    whether a pairing has a case there. cover: as the function of that name. put_in: returns the
    outcome of a mutant on these cases. failure: the first failure of a case without mutants.
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

    def put_in(
        self, mutant: Mutant, cases: Sequence[CaseCoverage], listing: CaseListing | None
    ) -> MutantOutcome: ...

    def failure(self, case: Case) -> str | None: ...

    def digests(self, cases: Sequence[Case], mutants: Sequence[Mutant]) -> Iterator[str]: ...


class KillHistory:
    """Records the cases that killed mutants of a module, which are tried first."""

    def __init__(self) -> None:
        self._kills: Counter[tuple[str, Case]] = Counter()
        self._sound: set[Case] = set()

    def ordered(self, mutant: Mutant, cases: Sequence[CaseCoverage]) -> list[CaseCoverage]:
        """Order cases, cheap ones and earlier killers first.

        They are preceded by cases that together execute every line of the module, and then by cases
        that together have every value of every axis. So a defect in a rare branch or for a large
        problem meets the cases that reveal it.
        """
        cheap = sorted(cases, key=lambda c: c.seconds / (1 + self._kills[mutant.module, c.case]))
        file = str(mutant.path)
        first, others = _split_covering(cheap, lambda covered: covered.lines.get(file, frozenset()))
        second, rest = _split_covering(others, lambda covered: axes(covered.case), first)
        return first + second + rest

    def note(self, mutant: Mutant, case: Case) -> None:
        self._kills[mutant.module, case] += 1

    def must_pass(self, case: Case, where: MutationBackend) -> None:
        """Raise ConfigurationError if the case fails without any mutant."""
        if case in self._sound:
            return
        failure = where.failure(case)
        if failure is not None:
            need = "cases that pass before anything is changed"
            raise ConfigurationError("--mutate", got=f"{case}: {failure}", need=need)
        self._sound.add(case)


def _split_covering(
    cases: Sequence[CaseCoverage],
    has: Callable[[CaseCoverage], frozenset[T]],
    before: Sequence[CaseCoverage] = (),
) -> tuple[list[CaseCoverage], list[CaseCoverage]]:
    """Split cases into those with something that none before them has, and the rest."""
    seen = {item for covered in before for item in has(covered)}
    first, rest = list[CaseCoverage](), list[CaseCoverage]()
    for covered in cases:
        (rest if has(covered) <= seen else first).append(covered)
        seen |= has(covered)
    return first, rest


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
    killers: KillHistory | None = None,
    *,
    most: int | None = None,
    where: MutationBackend | None = None,
) -> MutantOutcome:
    """Run a mutant in separate processes and return its outcome.

    Every case that executes it is called twice. All checks run on cases in which a bit differs, and
    on some in which none does. The mutant survives if all of them pass. most: maximum number of
    cases, two thirds of them the first in order; None for all. where: None for one process. Raises
    ConfigurationError if a failed case also fails without the mutant.
    """
    start = time.perf_counter()
    where = where or OneProcess()
    is_loaded = coverage.loads(mutant)
    candidates = coverage.executing(mutant)
    only_selects = is_loaded and not candidates  # visible only in the list of cases
    if only_selects:
        candidates = coverage.cases
    if not candidates:
        return MutantOutcome(mutant, "not executed")
    killers = killers or KillHistory()
    cases = _limit_cases(killers.ordered(mutant, candidates), most)
    all_cases = tuple(c.case for c in coverage.cases)
    listing = CaseListing(pairs, level, all_cases, only_selects) if is_loaded else None
    fate = where.put_in(mutant, cases, listing)
    if fate.killed:
        # A mutant that breaks imports counts only if imports work without it.
        killers.must_pass(fate.case or cases[0].case, where)
    if fate.case is not None and fate.killed:
        killers.note(mutant, fate.case)
    return replace(fate, seconds=time.perf_counter() - start)


def _limit_cases(cases: list[CaseCoverage], most: int | None) -> list[CaseCoverage]:
    if most is None or len(cases) <= most:
        return cases
    head = 2 * most // 3
    return cases[:head] + cases[head :: -(-(len(cases) - head) // (most - head))]
