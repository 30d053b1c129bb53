"""Describe in one line why a case with several ranks fails.

A wrong output does not show which step is wrong. Therefore, each rank keeps a copy of what its
experts received in the first call, and compares it with the reference dispatch: the (token, expert)
pairs whose expert is on this rank. If they agree, the output itself is examined.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from modular_kernel import reference
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.spec.placement import Placement, pairs_to_slots
from modular_kernel.spec.problem import IdSpace, Problem
from modular_kernel.tensors import BatchedTokens, Dispatched, StandardTokens
from modular_kernel.testing.cases.inputs import Inputs

# Maximum relative difference between a received row and the token that it is identified with.
_ROW_TOLERANCE, _QUANTIZED_ROW_TOLERANCE = 1e-6, 0.25
_OUTPUT_TOLERANCE = 0.05  # maximum relative difference of outputs that are equal up to rounding
DISPATCH_AGREES = (
    "the received rows equal the reference dispatch, so the experts or the combine differ"
)


@dataclass(frozen=True)
class ReceivedPairs:
    """The P (token, expert) pairs that a rank computes.

    Attributes:
        x_PH: the row of each pair, float64.
        expert_P: the local expert of each pair.
        weight_P: the router weight of each pair; None if the experts do not receive the weights.
        token_P: in the reference, the index of each token among the tokens of all ranks; otherwise,
            the index of each row in the received tensor.
    """

    x_PH: torch.Tensor
    expert_P: torch.Tensor
    weight_P: torch.Tensor | None
    token_P: torch.Tensor


def find_wide_ids(received: Sequence[Dispatched]) -> Iterator[str]:
    """Yield a message if the experts have received ids of more than 32 bits."""
    for tokens in received:
        if isinstance(tokens, StandardTokens):
            dtype = tokens.routing.topk_ids_TK.dtype
            if dtype is not torch.int32:
                yield f"the experts received ids of {dtype}, need torch.int32"
                return


def record_first_dispatch(kernel: FusedMoEModularKernel) -> list[Dispatched]:
    """Return a list that the kernel's first call fills with copies of what its experts receive.

    The list has one element per chunk of the call. It remains empty if the experts receive nothing.
    """
    received: list[Dispatched] = []
    experts: Any = kernel.experts
    finish, apply = kernel.finish, experts.apply

    def apply_and_record(tokens: Dispatched, **arguments: Any) -> None:
        received.append(copy.deepcopy(tokens))
        apply(tokens, **arguments)

    def finish_and_record(pending: Any) -> torch.Tensor:
        del kernel.finish  # it is replaced for one call only
        experts.apply = apply_and_record
        try:
            return finish(pending)
        finally:
            del experts.apply

    kernel.finish = finish_and_record  # type: ignore[method-assign]
    return received


def describe_dispatch_difference(
    received: Sequence[Dispatched],
    inputs: Inputs,
    problem: Problem,
    *,
    input_weighted: bool = False,
) -> str:
    """Compare what this rank's experts received with the reference.

    Returns a description of the first difference, or "". Nothing is compared if experts have copies
    (any copy may receive a pair), or if the values are packed or not finite.

    received: one element per chunk of the call.
    inputs: the inputs of all ranks.
    problem: the problem of this rank.
    input_weighted: whether the part multiplies x by the router weight.
    """
    if problem.placement.has_copies:
        return ""
    is_packed = any(_get_row_length(tokens) != problem.hidden for tokens in received)
    if is_packed or not bool(inputs.x_TH.isfinite().all()):
        return ""
    expected = _compute_reference_pairs(
        inputs, problem, problem.placement, input_weighted=input_weighted
    )
    actual = [_extract_received_pairs(tokens, problem) for tokens in received]
    expert_P = torch.cat([pairs.expert_P for pairs in actual]) if actual else torch.empty(0).long()
    counts, reference_counts = (_count_pairs(e, problem) for e in (expert_P, expected.expert_P))
    if counts != reference_counts:
        return _describe_count_difference(counts, reference_counts, inputs, problem)
    if not counts or not actual or not len(expert_P):
        return ""
    weights = [pairs.weight_P for pairs in actual if pairs.weight_P is not None]
    return _describe_row_difference(
        torch.cat([pairs.x_PH for pairs in actual]),
        expert_P,
        torch.cat(weights) if len(weights) == len(actual) else None,
        expected,
        quantized=any(tokens.scale is not None for tokens in received),
    )


def describe_output_difference(
    out: torch.Tensor, exact: torch.Tensor, local_only: torch.Tensor
) -> str:
    """Describe a wrong output of a rank in one line.

    Returns "" if the output is correct, or if there is no simple description.

    local_only: the output for this rank's tokens, computed from this rank's experts alone.
    """
    if out.shape != exact.shape or not out.numel():
        return ""
    rows, expected = (t.detach().double().cpu().flatten(0, -2) for t in (out, exact))
    if _is_close(rows, local_only.double().cpu().flatten(0, -2)):
        return "combine: the output has the pairs of this rank's experts only"
    ratio = float((rows * expected).sum() / expected.square().sum().clamp(min=1e-300))
    if abs(ratio - 1) > _OUTPUT_TOLERANCE and _is_close(rows, ratio * expected):
        return f"combine: the output is {ratio:.3g} times the reference"
    wrong_rows = [r for r in range(len(rows)) if not _is_close(rows[r], expected[r])]
    for row in wrong_rows:
        matching_rows = [
            r
            for r in range(len(expected))
            if expected[r].any() and _is_close(rows[row], expected[r])
        ]
        if matching_rows:
            return f"order of rows: output row {row} is row {matching_rows[0]} of the reference"
    if wrong_rows and not rows[wrong_rows].any():
        return f"combine: {len(wrong_rows)} output rows are zero, first row {wrong_rows[0]}"
    return ""


def compute_local_output(
    inputs: Inputs, problem: Problem, tokens: slice, global_problem: Problem
) -> Any:
    """Return the reference output of `tokens`, computed from this rank's experts alone."""
    ids_TK = inputs.routing.topk_ids_TK
    rank_TK, _, _ = pairs_to_slots(ids_TK, problem.placement.tables())
    local_ids_TK = ids_TK.masked_fill(rank_TK != problem.parallel.rank, -1)
    routing = replace(inputs.routing, topk_ids_TK=local_ids_TK)
    return reference.float64_reference(inputs.x_TH, inputs.weights, routing, global_problem)[tokens]


def _compute_reference_pairs(
    inputs: Inputs, problem: Problem, placement: Placement, *, input_weighted: bool = False
) -> ReceivedPairs:
    routing = inputs.routing
    rank_TK, slot_TK, _ = pairs_to_slots(routing.topk_ids_TK, placement.tables())
    token_P, k_P = (rank_TK == problem.parallel.rank).nonzero(as_tuple=True)
    weight_P = routing.topk_weights_TK[token_P, k_P].double()
    x_PH = inputs.x_TH[token_P].double()
    if input_weighted and problem.apply_router_weight_on_input:
        x_PH = x_PH * weight_P[:, None]
    return ReceivedPairs(x_PH, slot_TK[token_P, k_P], weight_P, token_P)


def _get_row_length(tokens: Dispatched) -> int:
    return (tokens.x_TH if isinstance(tokens, StandardTokens) else tokens.x_eCH).shape[-1]


def _extract_received_pairs(tokens: Dispatched, problem: Problem) -> ReceivedPairs:
    if isinstance(tokens, BatchedTokens):
        x_eCH = _dequantize(tokens.x_eCH, tokens.scale, problem)
        capacity = torch.arange(x_eCH.shape[1])
        expert_P, row_P = (capacity < tokens.counts_e.cpu()[:, None]).nonzero(as_tuple=True)
        return ReceivedPairs(x_eCH[expert_P, row_P], expert_P, None, row_P)
    routing = tokens.routing
    ids_RK = routing.topk_ids_TK.long().cpu()
    ids_RK = ids_RK.masked_fill((ids_RK < 0) | (ids_RK >= routing.num_experts), -1)
    if routing.space is IdSpace.GLOBAL and routing.expert_map is not None:
        local_ids_RK = routing.expert_map.long().cpu()[ids_RK.clamp(min=0)]
        ids_RK = torch.where(ids_RK < 0, -1, local_ids_RK)
    row_P, k_P = ((ids_RK >= 0) & (ids_RK < problem.e)).nonzero(as_tuple=True)
    weights_RK = routing.topk_weights_TK
    weight_P = None if weights_RK is None else weights_RK.double().cpu()[row_P, k_P]
    x_RH = _dequantize(tokens.x_TH, tokens.scale, problem)
    return ReceivedPairs(x_RH[row_P], ids_RK[row_P, k_P], weight_P, row_P)


def _dequantize(x: torch.Tensor, scale: torch.Tensor | None, problem: Problem) -> torch.Tensor:
    """Dequantize received rows to float64 on the CPU.

    scale: one per row, one per group of columns, or None.
    """
    values = x.float().double().cpu()
    if scale is None:
        return values
    factor = scale.double().cpu()
    if factor.dim() > 1 and factor.shape[-1] > 1:  # one scale per group of columns
        factor = factor.repeat_interleave(problem.scheme.group[-1], -1)[..., : values.shape[-1]]
    return values * factor


def _count_pairs(expert_P: torch.Tensor, problem: Problem) -> list[int]:
    counts: list[int] = torch.bincount(expert_P, minlength=problem.e).tolist()
    return counts


def _describe_count_difference(
    counts: list[int], reference_counts: list[int], inputs: Inputs, problem: Problem
) -> str:
    counts_text = f"{counts} pairs for the local experts, the reference has {reference_counts}"
    parallel = problem.parallel
    if not problem.placement.is_linear:
        linear = Placement.linear(problem.experts, parallel.world_size)
        expert_P = _compute_reference_pairs(inputs, problem, linear).expert_P
        if counts == _count_pairs(expert_P, problem):
            return (
                f"placement: received {counts_text}; these are the counts of the linear placement"
            )
    if sorted(counts) == sorted(reference_counts):
        return f"placement: received {counts_text}; local experts are in another order"
    return f"received counts: {counts_text}"


def _describe_row_difference(
    x_PH: torch.Tensor,
    expert_P: torch.Tensor,
    weight_P: torch.Tensor | None,
    expected: ReceivedPairs,
    *,
    quantized: bool,
) -> str:
    """Match rows with the most similar reference rows, and compare experts and weights."""
    is_finite = x_PH.isfinite().all(1)
    if not bool(is_finite.all()):
        return f"activations: received row {int((~is_finite).nonzero()[0])} is not finite"
    directions = [x / x.norm(dim=1, keepdim=True).clamp(min=1e-300) for x in (x_PH, expected.x_PH)]
    similarity, nearest_P = (directions[0] @ directions[1].T).max(1)
    closest = expected.x_PH[nearest_P]
    closest_norm = closest.norm(dim=1).clamp(min=1e-300)
    error = (x_PH - closest).norm(dim=1) / closest_norm
    limit = _QUANTIZED_ROW_TOLERANCE if quantized else _ROW_TOLERANCE
    token_P = expected.token_P[nearest_P]
    if bool((error > limit).any()):
        pair = int(error.argmax())
        ratio, token = float(x_PH[pair].norm() / closest_norm[pair]), int(token_P[pair])
        if float(similarity[pair]) > 1 - limit:
            property_name = "scales" if quantized else "activations"
            return f"{property_name}: a received row is token {token} times {ratio:.3g}"
        return f"activations: a row received for local expert {int(expert_P[pair])} is no token"
    pairs = Counter(zip(token_P.tolist(), expert_P.tolist(), strict=True))
    expected_pairs = Counter(
        zip(expected.token_P.tolist(), expected.expert_P.tolist(), strict=True)
    )
    if pairs != expected_pairs:
        token, expert = next(iter(pairs - expected_pairs))
        return f"placement: local expert {expert} received token {token}, which is not routed to it"
    if weight_P is None or expected.weight_P is None:
        return ""
    weights = _sort_weights(token_P, expert_P, weight_P)
    expected_weights = _sort_weights(expected.token_P, expected.expert_P, expected.weight_P)
    for (token, expert, got), (_, _, need) in zip(weights, expected_weights, strict=True):
        if not abs(got - need) <= _ROW_TOLERANCE * max(1.0, abs(need)):
            pair_text = f"token {token} at local expert {expert}"
            return f"router weights: {pair_text} has {got:.6g}, the reference {need:.6g}"
    return ""


def _sort_weights(
    token_P: torch.Tensor, expert_P: torch.Tensor, weight_P: torch.Tensor
) -> list[tuple[int, int, float]]:
    return sorted(zip(token_P.tolist(), expert_P.tolist(), weight_P.tolist(), strict=True))


def _is_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two outputs are equal up to rounding, and nonzero."""
    size = expected.norm()
    return bool((actual - expected).norm() <= _OUTPUT_TOLERANCE * size) and bool(size > 0)
