"""Do mutants change any bit of any result? The second proof that one is equivalent.

Valid problems are drawn from the cases that execute a changed line: their axes as they are, the
number of tokens and the values at random. Each is computed with and without the changes. Several
mutants of unlike places may be put in together: one run then speaks for each of them, by the
problems drawn from cases that execute it.
"""

import importlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from modular_kernel.testing.cases import Case
from modular_kernel.testing.mutation.child import Child, Tell
from modular_kernel.testing.mutation.coverage import Coverage, Covered
from modular_kernel.testing.mutation.serve import dependents, reattach, serve
from modular_kernel.testing.mutation.source import Mutant

# For each problem, the first one's imports included.
_PATIENCE = 300.0
# Beyond one problem of each case, problems are drawn from so many of the fastest cases.
_FASTEST = 8
_FEW_TOKENS = 5


@dataclass(frozen=True)
class Bits:
    """How many problems were computed both ways, for the mutant that was met least; and the first
    one whose bits differ. They are drawn from cases that execute it."""

    problems: int
    differing: Case | None


def compare_bits(
    mutants: Sequence[Mutant],
    coverage: Coverage,
    problems: int,
    known: dict[Case, str] | None = None,
) -> Bits:
    """Compute `problems` random problems for each mutant, without and with all of them.

    The first problem in which a bit differs is the last one; one that fails with the mutants
    differs. A mutant that no case executes has none. known: digests without mutants, by problem;
    those that are not there are computed and put there.
    """
    met = [executing(mutant, coverage) for mutant in mutants]
    drawn = drawn_problems(met, problems)
    dependents({mutant.module for mutant in mutants})  # read once, for both children
    cases = [case for case, _ in drawn]
    known = {} if known is None else known
    # Two cases may lead to the same problem.
    missing = [case for case in dict.fromkeys(cases) if case not in known]
    unknown = iter(Child(partial(_work, missing, ()), _PATIENCE))
    changed = iter(Child(partial(_work, cases, mutants), _PATIENCE))
    done = [0 for _ in mutants]
    for case, executed in drawn:
        other = next(changed, None)
        if case not in known:
            known[case] = next(unknown)["digest"]
        if other is None or other["digest"] != known[case]:
            return Bits(min(done), case)
        for number in executed:
            done[number] += 1
    return Bits(min(done), None)


def executing(mutant: Mutant, coverage: Coverage) -> tuple[Covered, ...]:
    """The cases that execute a mutant; all, where only the import of its module does."""
    place = str(mutant.path), mutant.first, mutant.last
    return coverage.executing(*place) or (coverage.cases if coverage.loads(*place) else ())


def drawn_problems(
    met: Sequence[Sequence[Covered]], count: int
) -> list[tuple[Case, tuple[int, ...]]]:
    """Problems like the cases in `met`, `count` for each entry; and the entries each serves.

    Every case once, then the fastest ones by turns; with other values, and few tokens.
    """
    of: dict[Case, tuple[int, ...]] = {}
    for number, cases in enumerate(met):
        for covered in cases:
            of[covered.case] = (*of.get(covered.case, ()), number)
    found, done, turns = list[tuple[Case, tuple[int, ...]]](), [0 for _ in met], dict[Case, int]()

    def add(case: Case) -> None:
        turn = turns[case] = turns.get(case, 0) + 1
        found.append((_problem(case, turn), of[case]))
        for number in of[case]:
            done[number] += 1

    for case in of:
        add(case)
    for number, cases in enumerate(met):
        busy = [c for c in sorted(cases, key=lambda c: c.seconds) if c.case.problem.tokens]
        fast = [covered.case for covered in busy[:_FASTEST]]
        while fast and done[number] < count:
            add(fast[done[number] % len(fast)])
    return found


def _problem(case: Case, turn: int) -> Case:
    """Another problem like the case, of few tokens."""
    most = case.problem.tokens
    tokens = random.Random(f"{case}|{turn}").randint(min(1, most), min(_FEW_TOKENS, most))
    return replace(case, problem=case.problem.with_tokens(tokens), seed=3 + turn)


def _work(cases: Sequence[Case], mutants: Sequence[Mutant], tell: Tell) -> None:
    """In a child: one digest for each problem."""
    if mutants:
        serve(*mutants)
    runs = importlib.import_module("modular_kernel.testing.mutation.runs")
    reattach()
    machine = runs.this_machine()
    for case in cases:
        tell({"digest": runs.digest(case, machine)})
