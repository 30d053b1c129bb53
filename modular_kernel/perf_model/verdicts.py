"""Verdicts of pairs over all ranks of a problem, with the memory of the machine."""

from collections.abc import Iterator
from dataclasses import replace

from modular_kernel.catalog import Catalog
from modular_kernel.compatibility.rules import judge
from modular_kernel.compatibility.support import Verdict
from modular_kernel.perf_model.memory import with_memory
from modular_kernel.spec.problem import Machine, Problem


def judge_pairs(
    catalog: Catalog,
    pf_type: str | None,
    experts_type: str | None,
    problem: Problem,
    machine: Machine,
) -> list[Verdict]:
    """Judge every pair that matches the given names (None matches all).

    With several ranks each pair's verdict is that of the first rank that is refused, else rank 0's.
    """
    problems = list(_rank_problems(problem))
    pf_names = [pf_type] if pf_type is not None else catalog.names("prepare_finalize")
    experts_names = [experts_type] if experts_type is not None else catalog.names("experts")
    pfs = [catalog.prepare_finalize(name) for name in pf_names]
    experts = [catalog.experts(name) for name in experts_names]
    results = []
    for pf in pfs:
        for ex in experts:
            verdicts = [judge(pf, ex, rank_problem, machine) for rank_problem in problems]
            results.append(next((verdict for verdict in verdicts if not verdict.ok), verdicts[0]))
    return results


def judge_fitting(
    catalog: Catalog,
    pf_type: str | None,
    experts_type: str | None,
    problem: Problem,
    machine: Machine,
) -> list[Verdict]:
    """Judge as `judge_pairs`, and refuse a pair that exceeds the machine's memory, if known."""
    verdicts = judge_pairs(catalog, pf_type, experts_type, problem, machine)
    return [with_memory(verdict) for verdict in verdicts]


def _rank_problems(problem: Problem) -> Iterator[Problem]:
    """Yield the problem of each rank; for a linear placement, one for each number of experts.

    Rules give the same result for ranks with the same number of consecutive experts.
    """
    slots, is_linear = problem.placement.slots, problem.placement.is_linear
    counts = set[int]()
    for rank in range(problem.parallel.world_size):
        if is_linear and len(slots[rank]) in counts:
            continue
        counts.add(len(slots[rank]))
        yield replace(problem, parallel=replace(problem.parallel, rank=rank))
