"""Fuzz target: `route` with random specs and logits, compared with a router in float64.

`modular_kernel.ops.route.route` selects the top-k experts of each token and computes their weights.
`_Row` does the same for one token in pure Python, following the docstring of `RouterSpec`.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st

from modular_kernel.spec.problem import MAX_TOP_K
from modular_kernel.testing.stress.fuzz.outcome import (
    CORRECT,
    WRONG_RESULT,
    FuzzOutcome,
    run_or_classify,
)
from modular_kernel.testing.stress.fuzz.target import (
    Target,
    biased_bool,
    import_object,
    seeds,
)

_MAX = float(torch.finfo(torch.float32).max)
_SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-40, 1e38, -1e38, 3.0, 88.8, -104.0)
# A float32 score has 24 bits of precision, of which exponentials lose a few. The absolute tolerance
# is for exponentials that underflow.
_TOLERANCE, _ABS_TOLERANCE = 2e-5, 1e-18


@dataclass(frozen=True)
class RouterCase:
    """Arguments of a RouterSpec, and a description of the logits.

    Attributes:
        fields: arguments of RouterSpec.
        experts, tokens, dtype: number of experts, number of tokens, and dtype of the logits.
        kind: distribution of the logits.
        special: (position, value) pairs that are written into the logits.
        seed: seed of the logits.
        wide_ids: whether ids are int64.
        wide_rows: whether NaN follows each row of logits in memory.
    """

    fields: dict[str, Any]
    experts: int
    tokens: int
    dtype: torch.dtype
    kind: str
    special: list[tuple[int, float]]
    seed: int
    wide_ids: bool
    wide_rows: bool


@st.composite
def _router_cases(draw: st.DrawFn) -> RouterCase:
    groups = draw(st.sampled_from((1, 1, 1, 2, 3, 4, 8)))
    renormalize, table = draw(st.booleans()), draw(biased_bool(percent_true=10))
    fields = {
        "top_k": draw(st.one_of(st.integers(1, 9), st.integers(1, MAX_TOP_K))),
        "score": draw(st.sampled_from(("softmax", "sigmoid", "sqrtsoftplus"))),
        "order": draw(st.sampled_from(("score_first", "score_first", "topk_first"))),
        "groups": groups,
        "topk_groups": draw(st.integers(1, groups)),
        "group_score": draw(st.sampled_from(("max", "top2"))),
        "selection_bias": draw(st.booleans()) and not table,
        "renormalize": renormalize,
        "eps": draw(st.sampled_from((0.0, 1e-20, 1e-6, 1.0))) if renormalize else 0.0,
        "floor": draw(st.sampled_from((0.0, 1e-9, 0.5))) if renormalize else 0.0,
        "table": table and groups == 1,
        "zero_experts": draw(st.sampled_from((0, 0, 0, 1, 5))) if groups == 1 else 0,
    }
    return RouterCase(
        fields=fields,
        experts=groups * draw(st.sampled_from((1, 2, 3, 5, 8, 16, 40))),
        tokens=draw(st.sampled_from((0, 1, 2, 5, 33))),
        dtype=draw(st.sampled_from((torch.float32, torch.float32, torch.bfloat16, torch.float16))),
        kind=draw(st.sampled_from(("normal", "normal", "large", "tiny", "ties", "equal", "huge"))),
        special=draw(
            st.lists(st.tuples(st.integers(0, 10**4), st.sampled_from(_SPECIAL)), max_size=6)
        ),
        seed=draw(seeds),
        wide_ids=draw(st.booleans()),
        wide_rows=draw(biased_bool(percent_true=20)),
    )


def check_router(case: RouterCase) -> FuzzOutcome:
    """Route random logits; compare ids and weights with float64 results."""
    description = f"route of {case}"
    spec_class = import_object("modular_kernel.spec.router:RouterSpec")
    spec = run_or_classify(description, lambda: spec_class(**case.fields))
    if isinstance(spec, FuzzOutcome):
        return spec
    logits, bias, table, token_ids = _make_tensors(case)
    tensors = import_object("modular_kernel.ops.route:RouterTensors")(bias, table)
    ids_dtype = torch.int64 if case.wide_ids else torch.int32
    result = run_or_classify(
        description,
        lambda: import_object("modular_kernel.ops.route:route")(
            logits, spec, tensors, token_ids_T=token_ids, ids_dtype=ids_dtype
        ),
    )
    if isinstance(result, FuzzOutcome):
        return result
    ids, weights = result.routing.topk_ids_TK, result.routing.topk_weights_TK
    if ids.dtype is not ids_dtype or ids.shape != (case.tokens, spec.top_k):
        return FuzzOutcome(WRONG_RESULT, f"{description}: ids {ids.dtype} {tuple(ids.shape)}")
    identity_weight = result.identity_T
    for t in range(case.tokens):
        table_ids = None
        if table is not None and token_ids is not None:
            token_id = int(token_ids[t])
            table_ids = (
                table[token_id].tolist() if 0 <= token_id < len(table) else [-2] * spec.top_k
            )
        row = _Row(logits[t].double().tolist(), bias, spec, table_ids)
        identity = 0.0 if identity_weight is None else float(identity_weight[t])
        mismatch = row.find_mismatch(ids[t].tolist(), weights[t].tolist(), identity)
        if mismatch:
            return FuzzOutcome(WRONG_RESULT, f"{description}: token {t}: {mismatch}")
    return FuzzOutcome(CORRECT, description)


def _make_tensors(case: RouterCase) -> tuple[torch.Tensor, Any, Any, Any]:
    """Make the logits, selection bias, table and token ids. All but the logits may be None."""
    generator = torch.Generator().manual_seed(case.seed)
    columns = case.experts + case.fields["zero_experts"]
    logits = torch.randn(case.tokens, columns, generator=generator)
    scale = {"large": 30.0, "tiny": 1e-30, "huge": 1e37}.get(case.kind, 1.0)
    logits = logits.round() if case.kind == "ties" else logits * scale
    if case.kind == "equal":
        logits = torch.ones_like(logits)
    for position, value in case.special:
        if logits.numel():
            logits.view(-1)[position % logits.numel()] = value
    logits = logits.to(case.dtype)
    if case.wide_rows:
        logits = torch.cat([logits, torch.full_like(logits, torch.nan)], 1)[:, :columns]
    bias = table = token_ids = None
    if case.fields["selection_bias"]:
        bias = torch.randn(columns, generator=generator)
        if case.special and case.special[0][0] % 3 == 0:
            bias[case.special[0][0] % columns] = case.special[0][1]
    if case.fields["table"]:
        top_k = case.fields["top_k"]
        table = torch.randint(-2, columns + 1, (7, top_k), generator=generator)
        token_ids = torch.randint(-1, 8, (case.tokens,), generator=generator)
    return logits, bias, table, token_ids


class _Row:
    """The scores of one token in float64, and the expected routing."""

    def __init__(
        self, logits: list[float], bias: torch.Tensor | None, spec: Any, table_ids: list[int] | None
    ) -> None:
        self.spec, self.table_ids = spec, table_ids
        self.is_number = [not math.isnan(v) for v in logits]
        self.logits = [0.0 if math.isnan(v) else min(max(v, -_MAX), _MAX) for v in logits]
        self.scores = self._compute_scores(self.logits, self.is_number)
        # Scores increase with logits. Compare the logits, unless biases or sums of two scores are
        # compared.
        grouped = spec.topk_groups < spec.groups and spec.group_score == "top2"
        by_score = spec.order == "score_first" and (bias is not None or grouped)
        compared_values = self.scores if by_score else self.logits
        biases = [0.0] * len(compared_values) if bias is None else bias.double().tolist()
        # A biased score that is NaN or -inf is never selected.
        self.choice = [
            b + a if k and not math.isnan(b + a) else -math.inf
            for b, a, k in zip(compared_values, biases, self.is_number, strict=True)
        ]
        self.scale = max([abs(c) for c in self.choice if math.isfinite(c)], default=0.0)

    def _compute_scores(self, logits: list[float], is_number: list[bool]) -> list[float]:
        if self.spec.score == "softmax":
            peak = max((v for v, k in zip(logits, is_number, strict=True) if k), default=0.0)
            exps = [
                math.exp(v - peak) if k else 0.0 for v, k in zip(logits, is_number, strict=True)
            ]
            total = sum(exps)
            return [value / total if total else 0.0 for value in exps]
        if self.spec.score == "sigmoid":
            return [1 / (1 + math.exp(-v)) if v > -700 else 0.0 for v in logits]
        return [math.sqrt(max(v, 0.0) + math.log1p(math.exp(-abs(v)))) for v in logits]

    def find_mismatch(self, ids: list[int], weights: list[float], identity: float) -> str:
        """Describe how the routing of a token differs from the expected routing, or return ""."""
        experts = len(self.logits) - self.spec.zero_experts
        expected = self._select_experts() if self.table_ids is None else self._get_valid_table_ids()
        selected: list[int] = []
        for k, (expected_id, actual_id) in enumerate(zip(expected, ids, strict=True)):
            shown_id = expected_id if expected_id < experts else -1
            if actual_id != shown_id:
                if self.table_ids is not None or not self._is_tie(expected_id, actual_id, selected):
                    return f"pair {k}: expert {actual_id}, not {shown_id}; scores {self.choice}"
                expected_id = actual_id if actual_id >= 0 else expected_id
            selected.append(expected_id)
        total = sum(self.scores[i] for i in selected if i >= 0)
        if self.spec.renormalize and self.spec.order == "score_first" and total < _ABS_TOLERANCE:
            return ""  # the scores underflow in float32, in which `route` computes
        expected_weights = self._compute_weights(selected)
        identity_weight = sum(
            w for w, i in zip(expected_weights, selected, strict=True) if i >= experts
        )
        pair_weights = [
            0.0 if i >= experts else w for w, i in zip(expected_weights, selected, strict=True)
        ]
        for actual_weight, expected_weight in [
            *zip(weights, pair_weights, strict=True),
            (identity, identity_weight),
        ]:
            if (
                not abs(actual_weight - expected_weight)
                <= _TOLERANCE * abs(expected_weight) * self._compute_error_growth() + _ABS_TOLERANCE
            ):
                return (
                    f"weights {weights}, identity {identity}; not {pair_weights}, {identity_weight}"
                )
        return ""

    def _compute_error_growth(self) -> float:
        """Return the factor by which an exponential amplifies the rounding of its argument."""
        return 1.0 + min(max((abs(v) for v in self.logits), default=0.0), 100.0) / 4

    def _get_valid_table_ids(self) -> list[int]:
        assert self.table_ids is not None
        valid = [i if -1 <= i < len(self.logits) else -2 for i in self.table_ids]
        return [-1 if i >= 0 and not self.is_number[i] else i for i in valid]

    def _select_experts(self) -> list[int]:
        choice, spec = list(self.choice), self.spec
        if spec.topk_groups < spec.groups:
            size = len(choice) // spec.groups
            group_scores = []
            for g in range(spec.groups):
                sorted_scores = sorted(choice[g * size : (g + 1) * size], reverse=True)
                adds_second = spec.group_score == "top2" and sorted_scores[1] > -math.inf
                group_scores.append(sorted_scores[0] + (sorted_scores[1] if adds_second else 0.0))
            selected_groups = _find_largest(group_scores, spec.topk_groups)
            choice = [
                c if n // size in selected_groups else -math.inf for n, c in enumerate(choice)
            ]
        return _find_largest(choice, spec.top_k)

    def _is_tie(self, expected_id: int, actual_id: int, selected: list[int]) -> bool:
        """Return whether experts `actual_id` and `expected_id` tie within the accuracy of float32.

        With groups, any near-tie of two scores or of two group sums is accepted.
        """
        spec = self.spec
        if spec.topk_groups < spec.groups:
            return self.scale == 0 or self._has_near_groups()
        if not 0 <= actual_id < len(self.choice):
            return (
                actual_id == -1
                and expected_id >= 0
                and spec.zero_experts > 0
                and self._is_near_any_other(expected_id)
            )
        if actual_id in selected or expected_id < 0:
            return False
        return self._is_near(self.choice[expected_id], self.choice[actual_id])

    def _is_near(self, a: float, b: float) -> bool:
        size = max(abs(a), abs(b), 1e-30)
        return abs(a - b) <= _TOLERANCE * size * self._compute_error_growth() + 1e-37

    def _is_near_any_other(self, expected_id: int) -> bool:
        return any(
            self._is_near(self.choice[expected_id], value)
            for n, value in enumerate(self.choice)
            if n != expected_id and math.isfinite(value)
        )

    def _has_near_groups(self) -> bool:
        finite = sorted(c for c in self.choice if math.isfinite(c))
        size = len(self.choice) // self.spec.groups
        sums = sorted(
            sum(sorted(self.choice[g * size : (g + 1) * size])[-2:])
            for g in range(self.spec.groups)
        )
        return any(self._is_near(a, b) for a, b in pairwise(finite)) or any(
            self._is_near(a, b) for a, b in pairwise(sums) if math.isfinite(a)
        )

    def _compute_weights(self, selected: list[int]) -> list[float]:
        spec = self.spec
        valid = [i >= 0 and self.is_number[i] for i in selected]
        if spec.order == "topk_first":
            selected_logits = [
                self.logits[i] if v else 0.0 for i, v in zip(selected, valid, strict=True)
            ]
            weights = self._compute_scores(selected_logits, valid)
        else:
            weights = [self.scores[i] if v else 0.0 for i, v in zip(selected, valid, strict=True)]
        weights = [w if v else 0.0 for w, v in zip(weights, valid, strict=True)]
        if spec.renormalize:
            divisor = max(sum(weights) + spec.eps, spec.floor)
            weights = [w / divisor if divisor > 0 else w for w in weights]
        return weights


def _find_largest(values: list[float], count: int) -> list[int]:
    order = sorted(range(len(values)), key=lambda n: (-values[n], n))
    largest = [n if values[n] > -math.inf else -1 for n in order[:count]]
    return largest + [-1] * (count - len(largest))


TARGETS: tuple[Target[Any], ...] = (
    Target("routers", 4, _router_cases(), check_router, launches=True),
)
