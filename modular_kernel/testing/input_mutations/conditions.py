"""Conditions under which an injected defect must be visible.

The lists of defects (`operators`, `memory`, `quantized`, `adapters`) import this module as `when`.
Most conditions take a problem (shapes, dtypes and options of a layer) and a kind of routing, one of
`testing.cases.inputs`. The other conditions (`*_pair`, `reads_every_row` and
`finalize_applies_weights`) take the requirements of the two components of a kernel, which are the
"pair" in the name of a `*_pair` condition. Otherwise, a pair is a (token, top-k slot).
"""

from collections.abc import Callable

import torch

from modular_kernel.compatibility.support import ExpertsRequirements, PrepareFinalizeRequirements
from modular_kernel.spec.problem import ActivationFormat, Combine, Problem, Reduce

Applies = Callable[[Problem, str], bool]
PF = PrepareFinalizeRequirements
EX = ExpertsRequirements

# Kinds of routing in which some pairs are skipped.
_PARTIAL_ROUTINGS = ("skips", "out_of_range", "beyond_int32", "all_skipped")


def has_tokens(problem: Problem, _routing: str) -> bool:
    return problem.tokens > 0


def has_routed_pair(problem: Problem, routing: str) -> bool:
    """Return whether at least one pair certainly has a local expert."""
    is_partial = problem.expert_map or routing in _PARTIAL_ROUTINGS
    return routing != "all_skipped" and problem.tokens >= (7 if is_partial else 1)


def routes_all_pairs(problem: Problem, routing: str) -> bool:
    """Return whether every pair certainly has a local expert."""
    return (
        has_tokens(problem, routing) and not problem.expert_map and routing not in _PARTIAL_ROUTINGS
    )


def uses_router_weights(problem: Problem, routing: str) -> bool:
    """Return whether router weights affect the output."""
    is_unweighted = problem.combine is Combine.TOPK_UNWEIGHTED
    on_input = problem.apply_router_weight_on_input
    return has_routed_pair(problem, routing) and (on_input or not is_unweighted)


def uses_scaling(problem: Problem, routing: str) -> bool:
    """Return whether the routed scaling factor is not 1 and affects the output."""
    is_unscaled = problem.routed_scaling_factor == 1 or problem.combine is Combine.TOPK_UNWEIGHTED
    return has_routed_pair(problem, routing) and not is_unscaled


def has_activation(*kinds: str, exact: bool = False) -> Applies:
    """Make a condition on the kind of activation.

    exact: whether to also require float32 in ieee precision, in which rounding hides no defect.
    """

    def applies(problem: Problem, routing: str) -> bool:
        is_exact = problem.dtype is torch.float32 and problem.fp32_precision == "ieee"
        return (
            has_routed_pair(problem, routing)
            and problem.act.kind in kinds
            and (is_exact or not exact)
        )

    return applies


def clamps_many_values(problem: Problem, routing: str) -> bool:
    """Return whether the activation limit clamps many values."""
    return has_routed_pair(problem, routing) and (problem.act.limit or 9) <= 2


def requires_batch_invariance(problem: Problem, routing: str) -> bool:
    """Return whether batch invariance is required for an even, nonzero number of tokens."""
    is_even = problem.tokens % 2 == 0
    return problem.batch_invariant and has_tokens(problem, routing) and is_even


def both(condition: Applies, problem_condition: Callable[[Problem], bool]) -> Applies:
    """Return the condition that both `condition` and `problem_condition` hold."""
    return lambda problem, routing: condition(problem, routing) and problem_condition(problem)


def has_routing(*routings: str) -> Applies:
    """Return the condition that there are tokens, and that the routing is of one of these kinds."""
    return lambda problem, routing: problem.tokens > 0 and routing in routings


def reads_remote_pairs(problem: Problem, routing: str) -> bool:
    """Return whether finalize certainly reads the row of a pair that has no local expert.

    On a single rank, finalize reads such rows only if it returns unweighted top-k rows.
    """
    is_one_rank = problem.parallel.world_size == 1
    if problem.tokens < 7 or (is_one_rank and problem.combine is not Combine.TOPK_UNWEIGHTED):
        return False
    return routing in _PARTIAL_ROUTINGS or (problem.expert_map and problem.e < problem.experts - 1)


def is_batched_pair(pf: PF, _ex: EX) -> bool:
    return pf.activation_format is ActivationFormat.BATCHED_EXPERTS


def reads_every_row(_pf: PF, ex: EX) -> bool:
    """Return whether finalize reads the rows of all pairs in the output of the experts."""
    is_standard = ex.activation_format is ActivationFormat.STANDARD
    return is_standard and ex.reduce in (Reduce.CONTIGUOUS, Reduce.DELEGATE)


def finalize_applies_weights(_pf: PF, ex: EX) -> bool:
    """Return whether finalize applies the router weights."""
    return ex.reduce is not Reduce.NOOP


def is_deterministic_pair(pf: PF, ex: EX) -> bool:
    return pf.deterministic and ex.deterministic


def is_capturable_pair(pf: PF, ex: EX) -> bool:
    """Return whether calls of any problem can be captured in a CUDA graph."""
    return pf.graph_capturable and not pf.graph_on_request and ex.graph_capturable


is_gated = both(has_routed_pair, lambda p: p.act.gated)
has_bias = both(has_routed_pair, lambda p: p.bias)
has_several_slots = both(has_routed_pair, lambda p: p.top_k > 1)
has_several_weights = both(uses_router_weights, lambda p: p.top_k > 1)
has_several_experts = both(has_routed_pair, lambda p: p.experts > 1)
has_several_tokens = both(has_routed_pair, lambda p: p.tokens > 1)
