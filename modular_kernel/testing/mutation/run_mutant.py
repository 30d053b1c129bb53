"""One mutant: put in, and met by the cases that execute it until one of them fails."""

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
from modular_kernel.testing.mutation.case_steps import Listing
from modular_kernel.testing.mutation.coverage import Coverage, Covered
from modular_kernel.testing.mutation.mutant_outcome import Fate
from modular_kernel.testing.mutation.one_process import OneProcess
from modular_kernel.testing.mutation.source import Mutant

T = TypeVar("T")

# Of a case's fields, what is no axis of its own.
_NOT_AXES = frozenset({"problem", "seed"})


class Where(Protocol):
    """Where cases run: in one process, or over ranks.

    world_size: how many ranks. ranks_per_host: None where all are on one. has_cases: whether a
    pairing has a case there. cover: as the function of that name. put_in: the fate of a mutant
    before these cases. failure: of a case without any mutant. digests: of each case in turn, with
    all of these mutants; where a process is lost they end before their time.
    """

    @property
    def world_size(self) -> int: ...

    @property
    def ranks_per_host(self) -> int | None: ...

    def has_cases(self, pair: Pair, level: Level) -> bool: ...

    def cover(
        self, modules: Mapping[str, Path], pairs: tuple[Pair, ...], level: Level
    ) -> Coverage: ...

    def put_in(self, mutant: Mutant, cases: Sequence[Covered], listing: Listing | None) -> Fate: ...

    def failure(self, case: Case) -> str | None: ...

    def digests(self, cases: Sequence[Case], mutants: Sequence[Mutant]) -> Iterator[str]: ...


class Killers:
    """Which cases killed mutants of a module before: they are tried first."""

    def __init__(self) -> None:
        self._kills: Counter[tuple[str, Case]] = Counter()
        self._sound: set[Case] = set()

    def ordered(self, mutant: Mutant, cases: Sequence[Covered]) -> list[Covered]:
        """Cheap ones and known killers first, and before all others those that between them execute
        every line of the module, then those that between them have every value of every axis: what
        is said of a rare branch, or of a large problem, shows in the cases that take it."""
        cheap = sorted(cases, key=lambda c: c.seconds / (1 + self._kills[mutant.module, c.case]))
        file = str(mutant.path)
        first, others = _spanning(cheap, lambda covered: covered.lines.get(file, frozenset()))
        second, rest = _spanning(others, lambda covered: axes(covered.case), first)
        return first + second + rest

    def note(self, mutant: Mutant, case: Case) -> None:
        self._kills[mutant.module, case] += 1

    def must_pass(self, case: Case, where: Where) -> None:
        """Raise ConfigurationError if the case fails without any mutant."""
        if case in self._sound:
            return
        failure = where.failure(case)
        if failure is not None:
            need = "cases that pass before anything is changed"
            raise ConfigurationError("--mutate", got=f"{case}: {failure}", need=need)
        self._sound.add(case)


def _spanning(
    cases: Sequence[Covered],
    has: Callable[[Covered], frozenset[T]],
    before: Sequence[Covered] = (),
) -> tuple[list[Covered], list[Covered]]:
    """Cases that have something which none before them has; and the others."""
    seen = {each for covered in before for each in has(covered)}
    first, rest = list[Covered](), list[Covered]()
    for covered in cases:
        (rest if has(covered) <= seen else first).append(covered)
        seen |= has(covered)
    return first, rest


@lru_cache(maxsize=8192)
def axes(case: Case) -> frozenset[tuple[str, str]]:
    """Every axis with its value in the case; of sizes, how many bits they have."""
    told = {**vars(case.problem), **vars(case), "pairs": case.problem.tokens * case.problem.top_k}
    sizes = {name: value.bit_length() for name, value in told.items() if type(value) is int}
    return frozenset(
        (name, str(value)) for name, value in (told | sizes).items() if name not in _NOT_AXES
    )


def attempt(
    mutant: Mutant,
    coverage: Coverage,
    pairs: tuple[Pair, ...],
    level: Level,
    killers: Killers | None = None,
    *,
    most: int | None = None,
    where: Where | None = None,
) -> Fate:
    """Run the mutant in processes of its own.

    Every case that executes it is called twice; one in which a bit differs is proven by every
    check, and so are some in which none does. The mutant survives if all of them pass. most: how
    many cases are called, two thirds of them the fastest; None for all. where: None for one
    process. Raises ConfigurationError if a case that fails does so without the mutant, too.
    """
    start = time.perf_counter()
    where = where or OneProcess()
    loads = coverage.loads(mutant)
    met = coverage.executing(mutant)
    first = loads and not met  # what only selects cases is told by the list of cases
    if first:
        met = coverage.cases
    if not met:
        return Fate(mutant, "not executed")
    killers = killers or Killers()
    cases = _some(killers.ordered(mutant, met), most)
    every = tuple(c.case for c in coverage.cases)
    listing = Listing(pairs, level, every, first) if loads else None
    fate = where.put_in(mutant, cases, listing)
    if fate.killed:
        # One that nothing can be imported with says nothing if nothing can be without it, either.
        killers.must_pass(fate.case or cases[0].case, where)
    if fate.case is not None and fate.killed:
        killers.note(mutant, fate.case)
    return replace(fate, seconds=time.perf_counter() - start)


def _some(cases: list[Covered], most: int | None) -> list[Covered]:
    if most is None or len(cases) <= most:
        return cases
    head = 2 * most // 3
    return cases[:head] + cases[head :: -(-(len(cases) - head) // (most - head))]
