"""Proof that the checks find every defect of the battery, in every pairing it can occur in.

A harness is worth what it catches: each mutant must be killed by the same checks that `prove`
runs. One that survives is a failure, of the harness.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from modular_kernel.spec.problem import Machine
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.lists import cases_by_axes, cases_for
from modular_kernel.testing.input_mutations.adapters import ADAPTER_MUTANTS
from modular_kernel.testing.input_mutations.effect import Effect, take, why_nothing
from modular_kernel.testing.input_mutations.inject import CallMutant
from modular_kernel.testing.input_mutations.operators import MUTANTS as PLAIN_MUTANTS
from modular_kernel.testing.input_mutations.quantized import SCALE_MUTANTS
from modular_kernel.testing.input_mutations.roundings import ROUNDING_MUTANTS
from modular_kernel.testing.verify.one_process import findings, prove
from modular_kernel.testing.verify.trial import Trial

MUTANTS = PLAIN_MUTANTS + SCALE_MUTANTS + ROUNDING_MUTANTS + ADAPTER_MUTANTS
__all__ = ["MUTANTS", "CallMutant", "Kill", "sensitivity"]


@dataclass(frozen=True)
class Kill:
    """One mutant in one case.

    unsound: the first failure of the kernel without it, or None if that
    passes. killed_by: the first failure with it, or None if the mutant survived. nothing: why the
    mutant changes nothing in this case, where it is neither killed nor a survivor.
    """

    mutant: str
    case: Case
    unsound: str | None
    killed_by: str | None
    nothing: str | None = None

    @classmethod
    def judged(
        cls, mutant: str, case: Case, unsound: str | None, failure: str | None, found: Effect
    ) -> "Kill":
        """Judge a mutant by its first failure, and by the effect that it had."""
        why = why_nothing(found)
        if why is None:
            return cls(mutant, case, unsound, failure)
        # What fails though nothing is changed fails without the mutant.
        return cls(mutant, case, unsound or failure, None, why)

    @property
    def ok(self) -> bool:
        return self.unsound is None and (self.killed_by is not None or self.nothing is not None)

    def __str__(self) -> str:
        fate = f"changes nothing: {self.nothing}" if self.nothing else self.killed_by or "SURVIVED"
        if self.unsound is not None:
            fate = f"fails without the mutant: {self.unsound}"
        return f"{self.mutant} in {self.case}: {fate}"


def sensitivity(
    prepare_finalize: str,
    experts: str,
    machine: Machine,
    *,
    mutants: Sequence[CallMutant] = MUTANTS,
    cases_each: int = 2,
    proven: dict[Case, str | None] | None = None,
) -> tuple[Kill, ...]:
    """For each mutant that can occur in the pairing: is it killed, and by which check?

    Up to `cases_each` cases for each mutant in which it must show, few enough in all that proving
    them without a mutant costs little. proven: what each case fails by without a mutant, None where
    it passes, as far as known; filled in.
    """
    proven = {} if proven is None else proven
    smoke = cases_for(prepare_finalize, experts, machine, "smoke").cases
    full = cases_by_axes(prepare_finalize, experts, machine).cases
    kills = []
    for mutant in mutants:
        few = [case for case in smoke if mutant.occurs(case, machine)]
        if len(few) < cases_each:
            few = [case for case in full if mutant.occurs(case, machine)]
        for case in _spread(few, cases_each):
            if case not in proven:
                proven[case] = first_of(prove(case, machine).failures)
            killer = first_of(findings(Trial(case, machine, mutant.build)))
            found = take(mutant.name)
            kills.append(Kill.judged(mutant.name, case, proven[case], killer, found))
    return tuple(kills)


def first_of(failures: Iterable[str]) -> str | None:
    """Return the first failure, if there is one."""
    return next(iter(failures), None)


def _spread(cases: list[Case], count: int) -> list[Case]:
    """`count` of the cases, from the first to the last."""
    if len(cases) <= count:
        return cases
    last = len(cases) - 1
    return [cases[last * i // max(1, count - 1)] for i in range(count)]
