"""Run the input mutations: the checks must detect each one in every pairing in which it can occur.

The checks are those of `prove`. If a mutant survives, the checks have a gap.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from modular_kernel.spec.problem import Machine
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.lists import cases_by_axes, cases_for
from modular_kernel.testing.input_mutations.adapters import ADAPTER_MUTANTS
from modular_kernel.testing.input_mutations.effect import Effect, find_no_effect_reason, pop_effect
from modular_kernel.testing.input_mutations.inject import CallMutant
from modular_kernel.testing.input_mutations.operators import MUTANTS as PLAIN_MUTANTS
from modular_kernel.testing.input_mutations.quantized import SCALE_MUTANTS
from modular_kernel.testing.input_mutations.roundings import ROUNDING_MUTANTS
from modular_kernel.testing.verify.one_process import prove, run_all_checks
from modular_kernel.testing.verify.trial import Trial

MUTANTS = PLAIN_MUTANTS + SCALE_MUTANTS + ROUNDING_MUTANTS + ADAPTER_MUTANTS
__all__ = ["MUTANTS", "CallMutant", "Kill", "sensitivity"]


@dataclass(frozen=True)
class Kill:
    """Result of one mutant in one case.

    Attributes:
        mutant: name of the mutant.
        case: the case.
        unsound: first failure of the kernel without the mutant; None if the kernel passes.
        killed_by: first failure with the mutant; None if all checks pass.
        nothing: why the mutant has no effect in this case, so that it is neither killed nor a
            survivor; None if it has an effect.
    """

    mutant: str
    case: Case
    unsound: str | None
    killed_by: str | None
    nothing: str | None = None

    @classmethod
    def from_effect(
        cls, mutant: str, case: Case, unsound: str | None, failure: str | None, effect: Effect
    ) -> "Kill":
        """Make the result from a mutant's first failure and its effect."""
        reason = find_no_effect_reason(effect)
        if reason is None:
            return cls(mutant, case, unsound, failure)
        # A failure without any effect is a failure without the mutant.
        return cls(mutant, case, unsound or failure, None, reason)

    @property
    def ok(self) -> bool:
        return self.unsound is None and (self.killed_by is not None or self.nothing is not None)

    def __str__(self) -> str:
        outcome = f"no effect: {self.nothing}" if self.nothing else self.killed_by or "SURVIVED"
        if self.unsound is not None:
            outcome = f"fails without the mutant: {self.unsound}"
        return f"{self.mutant} in {self.case}: {outcome}"


def sensitivity(
    prepare_finalize: str,
    experts: str,
    machine: Machine,
    *,
    mutants: Sequence[CallMutant] = MUTANTS,
    cases_each: int = 2,
    proven: dict[Case, str | None] | None = None,
) -> tuple[Kill, ...]:
    """Run each mutant that can occur in the pairing; return which check killed it.

    mutants: the mutants to run.
    cases_each: maximum number of cases per mutant.
    proven: maps cases to their first failure without a mutant, or to None if they pass. Cases that
        are not in it are run and added to it.
    """
    proven = {} if proven is None else proven
    smoke = cases_for(prepare_finalize, experts, machine, "smoke").cases
    full = cases_by_axes(prepare_finalize, experts, machine).cases
    kills = []
    for mutant in mutants:
        candidates = [case for case in smoke if mutant.occurs(case, machine)]
        if len(candidates) < cases_each:
            candidates = [case for case in full if mutant.occurs(case, machine)]
        for case in _select_evenly(candidates, cases_each):
            if case not in proven:
                proven[case] = first_or_none(prove(case, machine).failures)
            failure = first_or_none(run_all_checks(Trial(case, machine, mutant.build)))
            effect = pop_effect(mutant.name)
            kills.append(Kill.from_effect(mutant.name, case, proven[case], failure, effect))
    return tuple(kills)


def first_or_none(failures: Iterable[str]) -> str | None:
    """Return the first failure, or None."""
    return next(iter(failures), None)


def _select_evenly(cases: list[Case], count: int) -> list[Case]:
    """Select `count` cases, evenly spaced from the first to the last."""
    if len(cases) <= count:
        return cases
    last = len(cases) - 1
    return [cases[last * i // max(1, count - 1)] for i in range(count)]
