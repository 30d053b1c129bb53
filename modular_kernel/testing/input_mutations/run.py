"""Run the input mutations: the checks must detect each one in every pairing in which it can occur.

A pairing is an exchange class with an experts class. A mutant (a kernel with an injected defect) is
killed if one of the checks of `prove` fails, and survives otherwise. If a mutant survives, the
checks have a gap.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from modular_kernel.spec.problem import Machine
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.lists import cases_by_axes, cases_for
from modular_kernel.testing.input_mutations.adapters import ADAPTER_MUTANTS
from modular_kernel.testing.input_mutations.effect import Effect, find_no_effect_reason, pop_effect
from modular_kernel.testing.input_mutations.inject import CallMutant
from modular_kernel.testing.input_mutations.operators import MUTANTS as UNQUANTIZED_MUTANTS
from modular_kernel.testing.input_mutations.quantized import SCALE_MUTANTS
from modular_kernel.testing.input_mutations.roundings import ROUNDING_MUTANTS
from modular_kernel.testing.verify.one_process import prove, run_all_checks
from modular_kernel.testing.verify.trial import Trial

MUTANTS = UNQUANTIZED_MUTANTS + SCALE_MUTANTS + ROUNDING_MUTANTS + ADAPTER_MUTANTS
__all__ = ["MUTANTS", "CallMutant", "CallMutantResult", "sensitivity"]


@dataclass(frozen=True)
class CallMutantResult:
    """Result of one mutant in one case.

    Attributes:
        mutant: name of the mutant.
        case: the case.
        failure_without_mutant: first failure of the kernel without the defect; None if it passes.
        killed_by: first failure with the mutant; None if all checks pass.
        no_effect_reason: why the mutant has no effect in this case, so that it is neither killed
            nor a survivor; None if it has an effect.
    """

    mutant: str
    case: Case
    failure_without_mutant: str | None
    killed_by: str | None
    no_effect_reason: str | None = None

    @classmethod
    def from_effect(
        cls,
        mutant: str,
        case: Case,
        failure_without_mutant: str | None,
        failure: str | None,
        effect: Effect,
    ) -> "CallMutantResult":
        """Make the result from a mutant's first failure and its effect."""
        reason = find_no_effect_reason(effect)
        if reason is None:
            return cls(mutant, case, failure_without_mutant, failure)
        # If a mutant without any effect fails, the kernel without the mutant also fails.
        return cls(mutant, case, failure_without_mutant or failure, None, reason)

    @property
    def ok(self) -> bool:
        is_explained = self.killed_by is not None or self.no_effect_reason is not None
        return self.failure_without_mutant is None and is_explained

    def __str__(self) -> str:
        outcome = self.killed_by or "SURVIVED"
        if self.no_effect_reason:
            outcome = f"no effect: {self.no_effect_reason}"
        if self.failure_without_mutant is not None:
            outcome = f"fails without the mutant: {self.failure_without_mutant}"
        return f"{self.mutant} in {self.case}: {outcome}"


def sensitivity(
    prepare_finalize: str,
    experts: str,
    machine: Machine,
    *,
    mutants: Sequence[CallMutant] = MUTANTS,
    cases_each: int = 2,
    known_failures: dict[Case, str | None] | None = None,
    on_mutant: Callable[[int, int], None] = lambda *_: None,
) -> tuple[CallMutantResult, ...]:
    """Run each mutant that can occur in the pairing; return which check killed it.

    mutants: the mutants to run.
    cases_each: maximum number of cases per mutant.
    known_failures: maps cases to their first failure without a mutant, or to None if they pass.
        Cases that are missing are run and added.
    on_mutant: called after each mutant, with the number of completed mutants and of all mutants.
    """
    known_failures = {} if known_failures is None else known_failures
    smoke = cases_for(prepare_finalize, experts, machine, "smoke").cases
    full = cases_by_axes(prepare_finalize, experts, machine).cases
    results = []
    for number, mutant in enumerate(mutants, 1):
        candidates = [case for case in smoke if mutant.occurs(case, machine)]
        if len(candidates) < cases_each:
            candidates = [case for case in full if mutant.occurs(case, machine)]
        for case in _select_evenly(candidates, cases_each):
            if case not in known_failures:
                known_failures[case] = first_or_none(prove(case, machine).failures)
            failure = first_or_none(run_all_checks(Trial(case, machine, mutant.build)))
            effect = pop_effect(mutant.name)
            results.append(
                CallMutantResult.from_effect(
                    mutant.name, case, known_failures[case], failure, effect
                )
            )
        on_mutant(number, len(mutants))
    return tuple(results)


def first_or_none(failures: Iterable[str]) -> str | None:
    return next(iter(failures), None)


def _select_evenly(cases: list[Case], count: int) -> list[Case]:
    """Select `count` cases, evenly spaced from the first to the last."""
    if len(cases) <= count:
        return cases
    last = len(cases) - 1
    return [cases[last * i // max(1, count - 1)] for i in range(count)]
