"""Brings the rows of w1 into the order that a part takes, where it takes one alone."""

from dataclasses import replace

from modular_kernel.catalog import load_catalog
from modular_kernel.contracts import PermuteExpertsUnpermute
from modular_kernel.spec.problem import Problem


def in_row_order(problem: Problem, experts: type[PermuteExpertsUnpermute] | str) -> Problem:
    """Return the problem with gate and up rows as the part takes them.

    Those that alternate stay, and those of adapters: such problems have no other order.
    """
    act, requires = problem.act, load_catalog().experts(experts).requires
    stays = act.interleaved or problem.adapters is not None
    if not requires.up_first or not act.gated or stays:
        return problem
    return replace(problem, activation=replace(act, up_first=True))
