"""Conditions under which a defect must be visible: problem, kind of routing and pairing."""

from collections.abc import Callable

import torch

from modular_kernel.compatibility.support import ExpertsRequirements, PrepareFinalizeRequirements
from modular_kernel.spec.problem import ActivationFormat, Combine, Problem, Reduce

Applies = Callable[[Problem, str], bool]
PF = PrepareFinalizeRequirements
EX = ExpertsRequirements

# Kinds of routing in which some pairs have no expert.
_PARTIAL_ROUTINGS = ("skips", "out_of_range", "beyond_int32", "all_skipped")


def has_tokens(problem: Problem, _routing: str) -> bool:
    return problem.tokens > 0


def routed(problem: Problem, routing: str) -> bool:
    """Return whether some pair certainly has a local expert."""
    is_partial = problem.expert_map or routing in _PARTIAL_ROUTINGS
    return routing != "all_skipped" and problem.tokens >= (7 if is_partial else 1)


def all_routed(problem: Problem, routing: str) -> bool:
    """Return whether every pair certainly has a local expert."""
    return (
        has_tokens(problem, routing) and not problem.expert_map and routing not in _PARTIAL_ROUTINGS
    )


def weighted(problem: Problem, routing: str) -> bool:
    """Return whether router weights affect the output."""
    is_unweighted = problem.combine is Combine.TOPK_UNWEIGHTED
    on_input = problem.apply_router_weight_on_input
    return routed(problem, routing) and (on_input or not is_unweighted)


def scaled(problem: Problem, routing: str) -> bool:
    """Return whether the scaling factor affects the output and is not 1."""
    is_unscaled = problem.routed_scaling_factor == 1 or problem.combine is Combine.TOPK_UNWEIGHTED
    return routed(problem, routing) and not is_unscaled


def activation_kinds(*kinds: str, exact: bool = False) -> Applies:
    """Return a condition on the kind of activation.

    exact: also require float32 in ieee precision, where rounding hides nothing.
    """

    def applies(problem: Problem, routing: str) -> bool:
        ieee = problem.dtype is torch.float32 and problem.fp32_precision == "ieee"
        return routed(problem, routing) and problem.act.kind in kinds and (ieee or not exact)

    return applies


def clamped(problem: Problem, routing: str) -> bool:
    """Return whether the limit acts on many values of the inputs."""
    return routed(problem, routing) and (problem.act.limit or 9) <= 2


def batch_invariant(problem: Problem, routing: str) -> bool:
    """Return whether batch invariance is required and the number of tokens is even, but not 0."""
    is_even = problem.tokens % 2 == 0
    return problem.batch_invariant and has_tokens(problem, routing) and is_even


def both(condition: Applies, problem_condition: Callable[[Problem], bool]) -> Applies:
    """Return the condition that `condition` and `problem_condition` both hold."""
    return lambda problem, routing: condition(problem, routing) and problem_condition(problem)


def on_routing(*routings: str) -> Applies:
    """Return the condition that there are tokens, with one of these kinds of routing."""
    return lambda problem, routing: problem.tokens > 0 and routing in routings


def reads_remote_pairs(problem: Problem, routing: str) -> bool:
    """Return whether finalize certainly reads the row of a pair that has no local expert.

    On one rank, it does so only if it returns unweighted top-k rows.
    """
    is_one_rank = problem.parallel.world_size == 1
    if problem.tokens < 7 or (is_one_rank and problem.combine is not Combine.TOPK_UNWEIGHTED):
        return False
    return routing in _PARTIAL_ROUTINGS or (problem.expert_map and problem.e < problem.experts - 1)


def batched_pair(pf: PF, _ex: EX) -> bool:
    return pf.activation_format is ActivationFormat.BATCHED_EXPERTS


def reads_every_row(_pf: PF, ex: EX) -> bool:
    """Return whether finalize reads the rows of all pairs from the experts' output."""
    standard = ex.activation_format is ActivationFormat.STANDARD
    return standard and ex.reduce in (Reduce.CONTIGUOUS, Reduce.DELEGATE)


def finalize_weighs(_pf: PF, ex: EX) -> bool:
    """Return whether finalize applies the router weights."""
    return ex.reduce is not Reduce.NOOP


def deterministic_pair(pf: PF, ex: EX) -> bool:
    return pf.deterministic and ex.deterministic


def capturable_pair(pf: PF, ex: EX) -> bool:
    """Return whether calls of any problem can be captured in a CUDA graph."""
    return pf.graph_capturable and not pf.graph_on_request and ex.graph_capturable


gated = both(routed, lambda p: p.act.gated)
biased = both(routed, lambda p: p.bias)
several_slots = both(routed, lambda p: p.top_k > 1)
several_weights = both(weighted, lambda p: p.top_k > 1)
several_experts = both(routed, lambda p: p.experts > 1)
several_tokens = both(routed, lambda p: p.tokens > 1)
