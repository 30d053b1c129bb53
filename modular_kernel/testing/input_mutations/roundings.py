"""Defects that only one rounding too many tells: the check `one_rounding` must find them."""

from modular_kernel.catalog import load_catalog
from modular_kernel.contracts import PermuteExpertsUnpermute
from modular_kernel.spec.problem import Machine
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.input_mutations import conditions as when
from modular_kernel.testing.input_mutations import inputs as given
from modular_kernel.testing.input_mutations.inject import CallMutant


class RoundingMutant(CallMutant):
    """One that shows where experts say where they round."""

    def occurs(self, case: Case, machine: Machine) -> bool:
        experts = load_catalog().experts(case.experts)
        declares = experts.roundings is not PermuteExpertsUnpermute.roundings
        return declares and super().occurs(case, machine)


ROUNDING_MUTANTS: tuple[CallMutant, ...] = (
    RoundingMutant(
        "router_weights_rounded",
        "router weights are rounded to 16 bits",
        when.both(when.weighted, lambda p: p.dtype.itemsize == 2 and p.tokens >= 7),
        arguments=given.round_weights,
    ),
)
