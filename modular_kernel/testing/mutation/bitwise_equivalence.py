"""Do mutants change any bit of any result? The second proof that one is equivalent.

Valid problems are drawn from the cases that execute a changed line: their axes as they are, the
number of tokens and the values at random. Each is computed with and without the changes. Several
mutants of unlike places may be put in together: one run then speaks for each of them, by the
problems drawn from cases that execute it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from modular_kernel.testing.cases.lists import Case
from modular_kernel.testing.cases.ranks import RankCase
from modular_kernel.testing.mutation.coverage import Coverage, Covered
from modular_kernel.testing.mutation.one_process import OneProcess
from modular_kernel.testing.mutation.run_mutant import Where
from modular_kernel.testing.mutation.source import Mutant

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
    *,
    where: Where | None = None,
) -> Bits:
    """Compute `problems` random problems for each mutant, without and with all of them.

    The first problem in which a bit differs is the last one; one that fails with the mutants
    differs. A mutant that no case executes has none. known: digests without mutants, by problem;
    those that are not there are computed and put there. where: None for one process.
    """
    where = where or OneProcess()
    met = [executing(mutant, coverage) for mutant in mutants]
    drawn = drawn_problems(met, problems)
    cases = [case for case, _ in drawn]
    known = {} if known is None else known
    # Two cases may lead to the same problem.
    missing = [case for case in dict.fromkeys(cases) if case not in known]
    unknown, changed = where.digests(missing, ()), where.digests(cases, tuple(mutants))
    done = [0 for _ in mutants]
    for case, executed in drawn:
        other = next(changed, None)
        if case not in known:
            known[case] = next(unknown)
        if other is None or other != known[case]:
            return Bits(min(done), case)
        for number in executed:
            done[number] += 1
    return Bits(min(done), None)


def executing(mutant: Mutant, coverage: Coverage) -> tuple[Covered, ...]:
    """Return the cases that execute a mutant; all, where only the import of its module does."""
    return coverage.executing(mutant) or (coverage.cases if coverage.loads(mutant) else ())


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
    # Problems of a line that few cases execute serve who is executed by most.
    for number, cases in sorted(enumerate(met), key=lambda one: len(one[1])):
        busy = [c for c in sorted(cases, key=lambda c: c.seconds) if c.case.problem.tokens]
        fast = [covered.case for covered in busy[:_FASTEST]]
        while fast and done[number] < count:
            add(fast[done[number] % len(fast)])
    return found


def _problem(case: Case, turn: int) -> Case:
    """Another problem like the case, of few tokens; of none on ranks that have none in the case."""
    source = random.Random(f"{case}|{turn}")

    def few(most: int) -> int:
        return source.randint(min(1, most), min(_FEW_TOKENS, most))

    if not isinstance(case, RankCase):
        problem = case.problem.with_tokens(few(case.problem.tokens))
        return replace(case, problem=problem, seed=3 + turn)
    tokens = tuple(map(few, case.tokens))
    if case.replicated:
        tokens = (tokens[0],) * len(tokens)
    problem = case.problem.with_tokens(max(tokens))
    return replace(case, problem=problem, tokens=tokens, seed=3 + turn)
