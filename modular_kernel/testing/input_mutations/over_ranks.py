"""Run the input mutations with several ranks: the checks must detect each one in every pairing.

A pairing is an exchange class with an experts class.
"""

from collections.abc import Callable, Sequence
from functools import partial

from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.ranks import RankCase, rank_cases_for
from modular_kernel.testing.input_mutations.effect import pop_effect_on_ranks
from modular_kernel.testing.input_mutations.rank_operators import (
    RANK_MUTANTS,
    RankMutant,
    build_mutant,
)
from modular_kernel.testing.input_mutations.run import CallMutantResult, first_or_none
from modular_kernel.testing.ranks.external_launcher import AnyRanks
from modular_kernel.testing.verify.checks import CHECKS, check_plan_reused
from modular_kernel.testing.verify.over_ranks import machine_of, prove_ranks

# The first checks make half of the calls, and are sufficient to kill the mutants.
EARLY_CHECKS = CHECKS[: CHECKS.index(check_plan_reused) + 1]

__all__ = ["RANK_MUTANTS", "RankMutant", "sensitivity_ranks"]


def sensitivity_ranks(
    prepare_finalize: str,
    experts: str,
    pool: AnyRanks,
    *,
    mutants: Sequence[RankMutant] = RANK_MUTANTS,
    cases_each: int = 1,
    known_failures: dict[Case, str | None] | None = None,
    on_mutant: Callable[[int, int], None] = lambda *_: None,
) -> tuple[CallMutantResult, ...]:
    """Run each mutant that can occur in the pairing on the ranks of a pool.

    The cases are the smoke cases. The other arguments and the result are as in `sensitivity`.
    """
    known_failures = {} if known_failures is None else known_failures
    machine = machine_of(pool)
    cases = rank_cases_for(prepare_finalize, experts, machine, pool.world_size).cases
    results = []
    for number, mutant in enumerate(mutants, 1):
        candidates: list[RankCase] = [case for case in cases if mutant.applies(case)]
        for case in candidates[:cases_each]:
            if case not in known_failures:
                known_failures[case] = first_or_none(prove_ranks(case, pool, machine).failures)
            build = partial(build_mutant, mutant.name)
            proof = prove_ranks(case, pool, machine, build, checks=EARLY_CHECKS)
            failure, effect = (
                first_or_none(proof.failures),
                pop_effect_on_ranks(mutant.name, pool),
            )
            results.append(
                CallMutantResult.from_effect(
                    mutant.name, case, known_failures[case], failure, effect
                )
            )
        on_mutant(number, len(mutants))
    return tuple(results)
