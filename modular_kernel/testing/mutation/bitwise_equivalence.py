"""Bitwise equivalence: whether mutants change any bit of a result; the second proof of equivalence.

Valid problems are derived from the cases that execute a changed line, with random values and
numbers of tokens, and computed with and without the mutants. Several mutants at different places
may be applied together. Each problem then counts for the mutants that its case executes.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from modular_kernel.testing.cases.lists import Case
from modular_kernel.testing.cases.ranks import RankCase
from modular_kernel.testing.mutation.coverage import CaseCoverage, Coverage
from modular_kernel.testing.mutation.one_process import OneProcess
from modular_kernel.testing.mutation.run_mutant import MutationBackend
from modular_kernel.testing.mutation.source import Mutant

# After one problem per case, further problems are drawn from this number of the fastest cases.
_FASTEST = 8
_FEW_TOKENS = 5


@dataclass(frozen=True)
class BitComparison:
    """Result of a comparison.

    problems: number of problems compared, for the mutant with the fewest. differing: the case of
    the first problem whose bits differ, or None.
    """

    problems: int
    differing: Case | None


def compare_bits(
    mutants: Sequence[Mutant],
    coverage: Coverage,
    problems: int,
    known: dict[Case, str] | None = None,
    *,
    where: MutationBackend | None = None,
) -> BitComparison:
    """Compute `problems` random problems for each mutant, without and with all of the mutants.

    Stops at the first problem in which a bit differs; a problem that fails with the mutants
    differs. A mutant that no case executes has no problems. known: digests without mutants, by
    problem; missing ones are computed and added. where: None for one process.
    """
    where = where or OneProcess()
    cases_by_mutant = [executing(mutant, coverage) for mutant in mutants]
    drawn = drawn_problems(cases_by_mutant, problems)
    cases = [case for case, _ in drawn]
    known = {} if known is None else known
    # Two cases may lead to the same problem.
    missing = [case for case in dict.fromkeys(cases) if case not in known]
    unchanged_digests, changed_digests = (
        where.digests(missing, ()),
        where.digests(cases, tuple(mutants)),
    )
    counts = [0 for _ in mutants]
    for case, executed in drawn:
        changed_digest = next(changed_digests, None)
        if case not in known:
            known[case] = next(unchanged_digests)
        if changed_digest is None or changed_digest != known[case]:
            return BitComparison(min(counts), case)
        for number in executed:
            counts[number] += 1
    return BitComparison(min(counts), None)


def executing(mutant: Mutant, coverage: Coverage) -> tuple[CaseCoverage, ...]:
    """Return the cases that execute a mutant; all cases if only an import executes it."""
    return coverage.executing(mutant) or (coverage.cases if coverage.loads(mutant) else ())


def drawn_problems(
    met: Sequence[Sequence[CaseCoverage]], count: int
) -> list[tuple[Case, tuple[int, ...]]]:
    """Return `count` problems for each entry of `met`, with the indices of the entries each serves.

    Every case occurs once, then the fastest ones in turn, with other values and few tokens.
    """
    entries_of: dict[Case, tuple[int, ...]] = {}
    for number, cases in enumerate(met):
        for covered in cases:
            entries_of[covered.case] = (*entries_of.get(covered.case, ()), number)
    problems, counts, num_drawn = (
        list[tuple[Case, tuple[int, ...]]](),
        [0 for _ in met],
        dict[Case, int](),
    )

    def add(case: Case) -> None:
        turn = num_drawn[case] = num_drawn.get(case, 0) + 1
        problems.append((_problem(case, turn), entries_of[case]))
        for number in entries_of[case]:
            counts[number] += 1

    for case in entries_of:
        add(case)
    # Start with the entries of fewest cases: their problems also count for the other entries.
    for number, cases in sorted(enumerate(met), key=lambda one: len(one[1])):
        with_tokens = [c for c in sorted(cases, key=lambda c: c.seconds) if c.case.problem.tokens]
        fast = [covered.case for covered in with_tokens[:_FASTEST]]
        while fast and counts[number] < count:
            add(fast[counts[number] % len(fast)])
    return problems


def _problem(case: Case, turn: int) -> Case:
    """Return a similar problem with few tokens, and none on ranks without tokens in the case."""
    generator = random.Random(f"{case}|{turn}")

    def few(most: int) -> int:
        return generator.randint(min(1, most), min(_FEW_TOKENS, most))

    if not isinstance(case, RankCase):
        problem = case.problem.with_tokens(few(case.problem.tokens))
        return replace(case, problem=problem, seed=3 + turn)
    tokens = tuple(map(few, case.tokens))
    if case.replicated:
        tokens = (tokens[0],) * len(tokens)
    problem = case.problem.with_tokens(max(tokens))
    return replace(case, problem=problem, tokens=tokens, seed=3 + turn)
