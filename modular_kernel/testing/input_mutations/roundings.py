"""Input mutations that add a single rounding, which `check_one_rounding` must detect.

This check compares the output with a reference that rounds only where the experts component
declares it, so these mutations apply only to components that declare their roundings.
"""

from modular_kernel.catalog import load_catalog
from modular_kernel.contracts import PermuteExpertsUnpermute
from modular_kernel.spec.problem import Machine
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.input_mutations import conditions as when
from modular_kernel.testing.input_mutations import inputs
from modular_kernel.testing.input_mutations.inject import CallMutant


class RoundingMutant(CallMutant):
    """A defect that is visible only if the experts part declares its roundings."""

    def occurs(self, case: Case, machine: Machine) -> bool:
        experts = load_catalog().experts(case.experts)
        declares_roundings = experts.roundings is not PermuteExpertsUnpermute.roundings
        return declares_roundings and super().occurs(case, machine)


ROUNDING_MUTANTS: tuple[CallMutant, ...] = (
    RoundingMutant(
        "router_weights_rounded",
        "router weights are rounded to 16 bits",
        when.both(when.uses_router_weights, lambda p: p.dtype.itemsize == 2 and p.tokens >= 7),
        arguments=inputs.round_router_weights,
    ),
)
