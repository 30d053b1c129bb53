"""Check whether mutants (single changes of source code) change any bit of a result.

If no bit changes, this is evidence that a surviving mutant is equivalent to the original
(`code_equivalence` compares compiled code instead). Random valid problems are derived from the test
cases that execute a changed line, with other values and other numbers of tokens. They are computed
with and without the mutants, and hashes of their results ("digests") are compared. Several mutants
of different lines can be applied at the same time. Each problem then counts for the mutants that
its case executes.
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

# After one problem per case, further problems are derived from this number of the fastest cases.
_NUM_FASTEST = 8
_MAX_TOKENS = 5  # maximum number of tokens of a problem on each rank


@dataclass(frozen=True)
class BitComparison:
    """Result of a comparison.

    problems: number of compared problems, for the mutant with the fewest problems.
    differing: the case of the first problem with a differing bit, or None.
    """

    problems: int
    differing: Case | None


def compare_bits(
    mutants: Sequence[Mutant],
    coverage: Coverage,
    problems: int,
    known_digests: dict[Case, str] | None = None,
    *,
    backend: MutationBackend | None = None,
) -> BitComparison:
    """Compute `problems` random problems for each mutant, without and with all of the mutants.

    Stops at the first problem in which a bit differs. A problem that fails with the mutants counts
    as different. A mutant that no case executes has no problems.

    coverage: the lines that cases execute.
    known_digests: maps problems to digests without mutants. Missing ones are computed and added.
    backend: runs the problems; None means one process.
    """
    backend = backend or OneProcess()
    cases_by_mutant = [find_executing_cases(mutant, coverage) for mutant in mutants]
    problem_cases = draw_problems(cases_by_mutant, problems)
    cases = [case for case, _ in problem_cases]
    known_digests = {} if known_digests is None else known_digests
    # Two cases may lead to the same problem.
    missing_cases = [case for case in dict.fromkeys(cases) if case not in known_digests]
    unchanged_digests = backend.compute_digests(missing_cases, ())
    changed_digests = backend.compute_digests(cases, tuple(mutants))
    counts = [0 for _ in mutants]
    for case, mutant_indices in problem_cases:
        changed_digest = next(changed_digests, None)
        if case not in known_digests:
            known_digests[case] = next(unchanged_digests)
        if changed_digest is None or changed_digest != known_digests[case]:
            return BitComparison(min(counts), case)
        for index in mutant_indices:
            counts[index] += 1
    return BitComparison(min(counts), None)


def find_executing_cases(mutant: Mutant, coverage: Coverage) -> tuple[CaseCoverage, ...]:
    """Return the cases that execute a mutant, or all cases if only an import executes it."""
    return coverage.executing(mutant) or (coverage.cases if coverage.loads(mutant) else ())


def draw_problems(
    cases_by_mutant: Sequence[Sequence[CaseCoverage]], count: int
) -> list[tuple[Case, tuple[int, ...]]]:
    """Draw at least `count` problems for each mutant.

    Every case is used once. Then the fastest cases are used round-robin, with other values and few
    tokens. Returns (problem, indices of the mutants for which it counts) for each problem.

    cases_by_mutant: for each mutant, the cases that execute it.
    """
    mutants_by_case: dict[Case, tuple[int, ...]] = {}
    for index, cases in enumerate(cases_by_mutant):
        for case_coverage in cases:
            mutants_by_case[case_coverage.case] = (
                *mutants_by_case.get(case_coverage.case, ()),
                index,
            )
    problems = list[tuple[Case, tuple[int, ...]]]()
    counts = [0 for _ in cases_by_mutant]
    num_drawn = dict[Case, int]()

    def add_problem_of(case: Case) -> None:
        draw_number = num_drawn[case] = num_drawn.get(case, 0) + 1
        problems.append((_draw_problem(case, draw_number), mutants_by_case[case]))
        for index in mutants_by_case[case]:
            counts[index] += 1

    for case in mutants_by_case:
        add_problem_of(case)
    # Start with the mutants that have the fewest cases, because problems drawn for them also count
    # for other mutants.
    for index, cases in sorted(enumerate(cases_by_mutant), key=lambda indexed: len(indexed[1])):
        by_duration = sorted(cases, key=lambda case_coverage: case_coverage.seconds)
        cases_with_tokens = [
            case_coverage.case for case_coverage in by_duration if case_coverage.case.problem.tokens
        ]
        fast_cases = cases_with_tokens[:_NUM_FASTEST]
        while fast_cases and counts[index] < count:
            add_problem_of(fast_cases[counts[index] % len(fast_cases)])
    return problems


def _draw_problem(case: Case, draw_number: int) -> Case:
    """Draw a problem with few tokens. Ranks without tokens remain without tokens."""
    generator = random.Random(f"{case}|{draw_number}")

    def draw_few_tokens(max_tokens: int) -> int:
        return generator.randint(min(1, max_tokens), min(_MAX_TOKENS, max_tokens))

    if not isinstance(case, RankCase):
        problem = case.problem.with_tokens(draw_few_tokens(case.problem.tokens))
        return replace(case, problem=problem, seed=3 + draw_number)
    tokens = tuple(map(draw_few_tokens, case.tokens))
    if case.is_replicated:
        tokens = (tokens[0],) * len(tokens)
    problem = case.problem.with_tokens(max(tokens))
    return replace(case, problem=problem, tokens=tokens, seed=3 + draw_number)
