"""Choose the order of the gate and up rows of w1, because some parts support only one order."""

from dataclasses import replace

from modular_kernel.catalog import load_catalog
from modular_kernel.contracts import PermuteExpertsUnpermute
from modular_kernel.spec.problem import Problem


def apply_part_row_order(problem: Problem, experts: type[PermuteExpertsUnpermute] | str) -> Problem:
    """Return the problem with the gate and up rows of w1 in the order that `experts` supports.

    Problems with interleaved rows or with adapters have a fixed order and are returned unchanged.
    """
    act, requires = problem.act, load_catalog().experts(experts).requires
    has_fixed_order = act.interleaved or problem.adapters is not None
    if not requires.up_first or not act.gated or has_fixed_order:
        return problem
    return replace(problem, activation=replace(act, up_first=True))
