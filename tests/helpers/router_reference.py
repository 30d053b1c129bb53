"""Checks routers against loops over tokens and experts in float64.

    assert disagreements(route(logits_TE, spec), logits_TE, spec) == []

Of two experts with equal biased scores, the one with the lower id comes first. If float32 cannot
distinguish two scores, either expert may come first. The weights must match the chosen experts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from modular_kernel.ops.route import INVALID_ID, Routed, RouterTensors
from modular_kernel.spec.router import RouterSpec

_LARGEST = torch.finfo(torch.float32).max
_ROUNDING = 2.0**-24
_STEPS = 32  # upper bound on the float32 roundings per weight
# Absolute tolerances: smaller scores are subnormal in float32 or round to zero.
_ABSOLUTE_TOLERANCE = {"softmax": 2.0**-120, "sigmoid": 2.0**-120, "sqrtsoftplus": 2.0**-60}


@dataclass(frozen=True)
class Row:
    """The logits of one token, and the values by which its experts are selected.

    logits: clamped to finite values, None for NaN. choices: values that rank the experts, -inf for
    an excluded expert. tolerance: relative tolerance of the router weights.
    """

    logits: tuple[float | None, ...]
    choices: tuple[float, ...]
    tolerance: float


def disagreements(
    routed: Routed,
    logits_TE: torch.Tensor,
    spec: RouterSpec,
    tensors: RouterTensors | None = None,
    token_ids_T: torch.Tensor | None = None,
) -> list[str]:
    """Return a message for each wrong pair and weight of `routed`."""
    tensors = RouterTensors() if tensors is None else tensors
    columns = logits_TE.shape[1]
    bias = [0.0] * columns if tensors.bias_E is None else tensors.bias_E.double().tolist()
    ids_TK = routed.routing.topk_ids_TK.tolist()
    weights_TK = routed.routing.topk_weights_TK.tolist()
    identity_T = [0.0] * len(ids_TK)
    if routed.identity_T is not None:
        identity_T = routed.identity_T.tolist()
    messages = []
    for token, values in enumerate(logits_TE.double().tolist()):
        row = _make_row(values, bias, spec)
        if token_ids_T is None:
            expected = select_largest(row.choices, spec.top_k)
        else:
            expected = _look_up_table(int(token_ids_T[token]), tensors, row)
        actual = ids_TK[token], weights_TK[token], identity_T[token]
        differences = _find_differences(row, spec, expected, *actual)
        messages += [f"token {token}: {text}" for text in differences]
    return messages


def select_largest(values: Sequence[float], count: int) -> list[int]:
    """Return the indices of the `count` largest values, in order; -1 for -inf."""
    order = sorted(range(len(values)), key=lambda index: (-values[index], index))
    return [index if values[index] > -math.inf else -1 for index in order[:count]]


def _make_row(values: Sequence[float], bias: Sequence[float], spec: RouterSpec) -> Row:
    logits = [None if math.isnan(v) else min(max(v, -_LARGEST), _LARGEST) for v in values]
    valid_logits = [logit for logit in logits if logit is not None]
    # Bound of the arguments of exponentials. Only softmax subtracts a logit.
    offset = min(valid_logits, default=0.0) if spec.score == "softmax" else 0.0
    max_argument = min(max((abs(logit - offset) for logit in valid_logits), default=0.0), 100.0)
    # Different logits may have scores that round to the same value, such as 1. Experts are
    # therefore sorted by their logits, unless a bias or another score is added to the scores.
    adds_to_scores = spec.selection_bias or (
        spec.topk_groups < spec.groups and spec.group_score == "top2"
    )
    sorts_by_score = spec.order == "score_first" and adds_to_scores
    keys = _compute_scores(logits, spec.score) if sorts_by_score else list(logits)
    choices = [-math.inf if v is None or math.isnan(v + b) else v + b
               for v, b in zip(keys, bias, strict=True)]  # fmt: skip
    choices = _exclude_other_groups(choices, spec)
    # The relative error of an exponential grows with its argument.
    return Row(tuple(logits), tuple(choices), (_STEPS + 2 * max_argument) * _ROUNDING)


def _compute_scores(logits: Sequence[float | None], score: str) -> list[float | None]:
    if score == "softmax":
        valid_logits = [logit for logit in logits if logit is not None]
        total = sum(math.exp(logit - max(valid_logits)) for logit in valid_logits)
        return [None if v is None else math.exp(v - max(valid_logits)) / total for v in logits]
    return [None if v is None else _compute_score(v, score) for v in logits]


def _compute_score(logit: float, score: str) -> float:
    exp = math.exp(-abs(logit))  # the negative argument avoids an overflow
    if score == "sigmoid":
        return 1 / (1 + exp) if logit >= 0 else exp / (1 + exp)
    return math.sqrt(max(logit, 0.0) + math.log1p(exp))


def _exclude_other_groups(choices: list[float], spec: RouterSpec) -> list[float]:
    if spec.topk_groups == spec.groups:
        return choices
    size = len(choices) // spec.groups
    group_scores = []
    for start in range(0, len(choices), size):
        best, *others = sorted(choices[start : start + size], reverse=True)
        second = max(others, default=-math.inf) if spec.group_score == "top2" else -math.inf
        group_scores.append(best + (second if second > -math.inf else 0.0))
    groups = select_largest(group_scores, spec.topk_groups)
    return [v if index // size in groups else -math.inf for index, v in enumerate(choices)]


def _look_up_table(token_id: int, tensors: RouterTensors, row: Row) -> list[int]:
    """Return the experts that the table has for a token id."""
    assert tensors.table_VK is not None
    rows, top_k = tensors.table_VK.shape
    if not 0 <= token_id < rows:
        return [INVALID_ID] * top_k
    ids = [int(i) for i in tensors.table_VK[token_id].tolist()]
    ids = [i if -1 <= i < len(row.logits) else INVALID_ID for i in ids]
    return [-1 if i >= 0 and row.logits[i] is None else i for i in ids]


def _compute_weights(row: Row, ids: Sequence[int], spec: RouterSpec) -> list[float]:
    chosen = [row.logits[i] if i >= 0 else None for i in ids]
    if spec.score == "softmax" and spec.order == "topk_first":
        scores = _compute_scores(chosen, "softmax")
    else:
        all_scores = _compute_scores(row.logits, spec.score)
        scores = [all_scores[i] if i >= 0 else None for i in ids]
    weights = [0.0 if score is None else score for score in scores]
    if spec.renormalize:
        divisor = max(sum(weights) + spec.eps, spec.floor)
        weights = [w / divisor if divisor > 0 else 0.0 for w in weights]
    return weights


def _find_differences(
    row: Row,
    spec: RouterSpec,
    expected: Sequence[int],
    ids: Sequence[int],
    weights: Sequence[float],
    identity: float,
) -> list[str]:
    experts = len(row.logits) - spec.zero_experts
    chosen = list[int]()
    for k, (expected_id, actual_id) in enumerate(zip(expected, ids, strict=True)):
        # The ids of zero experts are returned as -1.
        visible_id = expected_id if expected_id < experts else -1
        if actual_id != visible_id and not _is_tie(row, expected_id, actual_id, chosen):
            return [f"pair {k}: got expert {actual_id}, need {visible_id}"]
        chosen.append(expected_id if actual_id == visible_id else actual_id)
    if not spec.table and len({i for i in chosen if i >= 0}) < sum(i >= 0 for i in chosen):
        return [f"got {chosen}: an expert twice"]
    exact = _compute_weights(row, chosen, spec)
    zero_expert_weight = sum(w for w, i in zip(exact, chosen, strict=True) if i >= experts)
    pair_weights = [0.0 if i >= experts else w for w, i in zip(exact, chosen, strict=True)]
    compared = [*zip(weights, pair_weights, strict=True), (identity, zero_expert_weight)]
    return [
        f"weight {k}: got {actual!r}, need {need!r}"
        for k, (actual, need) in enumerate(compared)
        if not abs(actual - need) <= row.tolerance * need + _ABSOLUTE_TOLERANCE[spec.score]
    ]


def _is_tie(row: Row, expected: int, actual: int, chosen: Sequence[int]) -> bool:
    """Return whether float32 cannot distinguish the choices of two experts.

    Experts with lower ids and exactly the same value as `actual` must already be `chosen`.
    """
    if min(expected, actual) < 0 or max(expected, actual) >= len(row.choices):
        return False
    a, b = row.choices[expected], row.choices[actual]
    unchosen_equals = [e for e in range(actual) if row.choices[e] == b and e not in chosen]
    return not unchosen_equals and abs(a - b) <= row.tolerance * max(abs(a), abs(b), 1.0)
