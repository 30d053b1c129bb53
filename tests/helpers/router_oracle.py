"""The router's oracle: loops over tokens and experts in float64, and what a result may differ by.

    assert disagreements(route(logits_TE, spec), logits_TE, spec) == []

Equal biased scores go to the lower id. Where two are nearer than float32 tells apart, either expert
may come first, and weights are those of the experts that were chosen.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from modular_kernel.ops.route import INVALID, Routed, RouterTensors
from modular_kernel.spec.router import RouterSpec

_LARGEST = torch.finfo(torch.float32).max
_ROUNDING = 2.0**-24
_STEPS = 32  # roundings of float32 on the way to a weight
# Below it float32 loses bits, or everything; a root has half as many places.
_FAINT = {"softmax": 2.0**-120, "sigmoid": 2.0**-120, "sqrtsoftplus": 2.0**-60}


@dataclass(frozen=True)
class Row:
    """One token. logits: finite, None for NaN. choices: what is chosen by, -inf for never."""

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
    """Return what is wrong with `routed`, in words; nothing where it is right."""
    tensors = RouterTensors() if tensors is None else tensors
    columns = logits_TE.shape[1]
    bias = [0.0] * columns if tensors.bias_E is None else tensors.bias_E.double().tolist()
    ids_TK = routed.routing.topk_ids_TK.tolist()
    weights_TK = routed.routing.topk_weights_TK.tolist()
    identity_T = [0.0] * len(ids_TK)
    if routed.identity_T is not None:
        identity_T = routed.identity_T.tolist()
    found = []
    for token, values in enumerate(logits_TE.double().tolist()):
        row = _row(values, bias, spec)
        if token_ids_T is None:
            want = best(row.choices, spec.top_k)
        else:
            want = _named(int(token_ids_T[token]), tensors, row)
        got = ids_TK[token], weights_TK[token], identity_T[token]
        found += [f"token {token}: {wrong}" for wrong in _wrong(row, spec, want, *got)]
    return found


def best(values: Sequence[float], count: int) -> list[int]:
    """Return the places of the `count` largest, the first of equals first; -1 for -inf."""
    order = sorted(range(len(values)), key=lambda place: (-values[place], place))
    return [place if values[place] > -math.inf else -1 for place in order[:count]]


def _row(values: Sequence[float], bias: Sequence[float], spec: RouterSpec) -> Row:
    logits = [None if math.isnan(v) else min(max(v, -_LARGEST), _LARGEST) for v in values]
    known = [logit for logit in logits if logit is not None]
    # What is put into an exponential: differences for a softmax, else the logits themselves.
    lowest = min(known, default=0.0) if spec.score == "softmax" else 0.0
    reach = min(max((abs(logit - lowest) for logit in known), default=0.0), 100.0)
    # Scores grow with logits, which tell apart what rounds to one score: 0 or 1, say.
    added = spec.selection_bias or (spec.topk_groups < spec.groups and spec.group_score == "top2")
    scored = spec.order == "score_first" and added
    by = _scores(logits, spec.score) if scored else list(logits)
    choices = [-math.inf if v is None or math.isnan(v + b) else v + b
               for v, b in zip(by, bias, strict=True)]  # fmt: skip
    kept = _in_groups(choices, spec)
    # An exponential's error grows with its argument.
    return Row(tuple(logits), tuple(kept), (_STEPS + 2 * reach) * _ROUNDING)


def _scores(logits: Sequence[float | None], score: str) -> list[float | None]:
    if score == "softmax":
        known = [logit for logit in logits if logit is not None]
        total = sum(math.exp(logit - max(known)) for logit in known)
        return [None if v is None else math.exp(v - max(known)) / total for v in logits]
    return [None if v is None else _score(v, score) for v in logits]


def _score(logit: float, score: str) -> float:
    small = math.exp(-abs(logit))
    if score == "sigmoid":
        return 1 / (1 + small) if logit >= 0 else small / (1 + small)
    return math.sqrt(max(logit, 0.0) + math.log1p(small))


def _in_groups(choices: list[float], spec: RouterSpec) -> list[float]:
    if spec.topk_groups == spec.groups:
        return choices
    size = len(choices) // spec.groups
    worth = []
    for start in range(0, len(choices), size):
        first, *rest = sorted(choices[start : start + size], reverse=True)
        second = rest[0] if rest and spec.group_score == "top2" and rest[0] > -math.inf else 0.0
        worth.append(first + second)
    kept = best(worth, spec.topk_groups)
    return [v if place // size in kept else -math.inf for place, v in enumerate(choices)]


def _named(word: int, tensors: RouterTensors, row: Row) -> list[int]:
    assert tensors.table_VK is not None
    rows, top_k = tensors.table_VK.shape
    if not 0 <= word < rows:
        return [INVALID] * top_k
    named = [int(i) for i in tensors.table_VK[word].tolist()]
    named = [i if -1 <= i < len(row.logits) else INVALID for i in named]
    return [-1 if i >= 0 and row.logits[i] is None else i for i in named]


def _weights(row: Row, ids: Sequence[int], spec: RouterSpec) -> list[float]:
    chosen = [row.logits[i] if i >= 0 else None for i in ids]
    if spec.score == "softmax" and spec.order == "topk_first":
        scores = _scores(chosen, "softmax")
    else:
        every = _scores(row.logits, spec.score)
        scores = [every[i] if i >= 0 else None for i in ids]
    weights = [0.0 if score is None else score for score in scores]
    if spec.renormalize:
        divisor = max(sum(weights) + spec.eps, spec.floor)
        weights = [w / divisor if divisor > 0 else 0.0 for w in weights]
    return weights


def _wrong(
    row: Row,
    spec: RouterSpec,
    want: Sequence[int],
    ids: Sequence[int],
    weights: Sequence[float],
    identity: float,
) -> list[str]:
    experts = len(row.logits) - spec.zero_experts
    chosen = list[int]()
    for k, (w, g) in enumerate(zip(want, ids, strict=True)):
        shown = w if w < experts else -1
        if g != shown and not _as_good(row, w, g, chosen):
            return [f"pair {k}: got expert {g}, need {shown}"]
        chosen.append(w if g == shown else g)
    if not spec.table and len({i for i in chosen if i >= 0}) < sum(i >= 0 for i in chosen):
        return [f"got {chosen}: an expert twice"]
    exact = _weights(row, chosen, spec)
    spare = sum(w for w, i in zip(exact, chosen, strict=True) if i >= experts)
    pairs = [0.0 if i >= experts else w for w, i in zip(exact, chosen, strict=True)]
    compared = [*zip(weights, pairs, strict=True), (identity, spare)]
    return [
        f"weight {k}: got {g!r}, need {w!r}"
        for k, (g, w) in enumerate(compared)
        if not abs(g - w) <= row.tolerance * w + _FAINT[spec.score]
    ]


def _as_good(row: Row, want: int, got: int, before: Sequence[int]) -> bool:
    """Whether float32 cannot tell two experts apart that float64 does.

    Of those that float64 finds equal, the lower ones are among the pairs before.
    """
    if min(want, got) < 0 or max(want, got) >= len(row.choices):
        return False
    a, b = row.choices[want], row.choices[got]
    lower = [place for place in range(got) if row.choices[place] == b and place not in before]
    return not lower and abs(a - b) <= row.tolerance * max(abs(a), abs(b), 1.0)
