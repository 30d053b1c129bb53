"""Judge pairings for all ranks of a problem, optionally with the limit of the machine's memory."""

from collections.abc import Iterator
from dataclasses import replace

from modular_kernel.catalog import Catalog
from modular_kernel.compatibility.rules import judge
from modular_kernel.compatibility.support import Verdict
from modular_kernel.perf_model.memory import check_memory
from modular_kernel.spec.problem import Machine, Problem


def judge_pairs(
    catalog: Catalog,
    pf_type: str | None,
    experts_type: str | None,
    problem: Problem,
    machine: Machine,
) -> list[Verdict]:
    """Judge every pairing of these parts, for all ranks of the problem.

    Returns the verdict of the first rank that refuses a pairing, or the verdict of rank 0 if no
    rank refuses it.

    pf_type, experts_type: names of parts; None stands for all parts of the catalog.
    """
    problems = list(_iter_rank_problems(problem))
    pf_names = [pf_type] if pf_type is not None else catalog.names("prepare_finalize")
    experts_names = [experts_type] if experts_type is not None else catalog.names("experts")
    pf_parts = [catalog.prepare_finalize(name) for name in pf_names]
    experts_parts = [catalog.experts(name) for name in experts_names]
    pairing_verdicts = []
    for pf_part in pf_parts:
        for experts_part in experts_parts:
            verdicts = [
                judge(pf_part, experts_part, rank_problem, machine) for rank_problem in problems
            ]
            pairing_verdicts.append(
                next((verdict for verdict in verdicts if not verdict.ok), verdicts[0])
            )
    return pairing_verdicts


def judge_pairs_with_memory(
    catalog: Catalog,
    pf_type: str | None,
    experts_type: str | None,
    problem: Problem,
    machine: Machine,
) -> list[Verdict]:
    """Judge like `judge_pairs`, and also refuse pairings that exceed the machine's memory."""
    verdicts = judge_pairs(catalog, pf_type, experts_type, problem, machine)
    return [check_memory(verdict) for verdict in verdicts]


def _iter_rank_problems(problem: Problem) -> Iterator[Problem]:
    """Yield the problems of the ranks, without ranks that have the same verdict as an earlier one.

    With a linear placement, the verdict depends only on the rank's number of experts.
    """
    slots, is_linear = problem.placement.slots, problem.placement.is_linear
    seen_counts = set[int]()
    for rank in range(problem.parallel.world_size):
        if is_linear and len(slots[rank]) in seen_counts:
            continue
        seen_counts.add(len(slots[rank]))
        yield replace(problem, parallel=replace(problem.parallel, rank=rank))
