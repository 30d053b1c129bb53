"""Compares our router with another project's, and both with float64 scores."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from modular_kernel.ops.route import Routed, RouterTensors, route, route_ref
from modular_kernel.spec.problem import MAX_TOP_K
from modular_kernel.spec.router import RouterSpec
from modular_kernel.tensors import Routing
from peer_suites_lib.outcomes import (
    AGREE,
    OURS,
    THEIRS,
    CaseOutcome,
    MissingError,
    call_reference,
    find_worst_outcome,
)

# Maximum numbers of tokens for the interpreted kernel and for the torch reference.
KERNEL_TOKENS, REFERENCE_TOKENS = 4, 256
Selection = tuple[torch.Tensor, torch.Tensor]  # weights and ids, (T, K)


@dataclass(frozen=True)
class Router:
    """A case of another project's router.

    spec: our RouterSpec.
    scaling: factor that their router applies to the weights. In our project, the factor belongs to
        the layer.
    atol, rtol: tolerance of the weights in their test.
    hot_expert: an expert whose logits are increased by 8.
    """

    spec: RouterSpec
    experts: int
    tokens: int
    dtype: torch.dtype = torch.float32
    bias_dtype: torch.dtype = torch.float32
    scaling: float = 1.0
    atol: float = 1e-2
    rtol: float = 1e-2
    hot_expert: int | None = None


Reference = Callable[[torch.Tensor, torch.Tensor | None], Selection]


def make_spec(top_k: int, **fields: object) -> RouterSpec:
    """Return a RouterSpec. Raises MissingError if top_k exceeds its maximum."""
    if top_k > MAX_TOP_K:
        raise MissingError(f"router: top_k above {MAX_TOP_K}")
    return RouterSpec(top_k, **fields)  # type: ignore[arg-type]


def check_router(case: Router, reference: Reference) -> CaseOutcome:
    """Compare the torch reference on many tokens, and the kernel on a few, with `reference`."""
    tokens = min(case.tokens, REFERENCE_TOKENS)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, case.experts, generator=generator).to(case.dtype)
    if case.hot_expert is not None:
        logits[:, case.hot_expert] += 8
    bias = None
    if case.spec.selection_bias:
        bias = torch.randn(case.experts, generator=generator).to(case.bias_dtype)
    their_choice = call_reference(reference, logits.clone(), bias)
    assert isinstance(their_choice, tuple)
    shrunk = f"tokens to {REFERENCE_TOKENS}" if tokens < case.tokens else ""
    exact = Exact(logits, bias, case.spec)
    tensors = RouterTensors(bias)
    weights = torch.empty(tokens, case.spec.top_k)
    ids = torch.empty(tokens, case.spec.top_k, dtype=torch.int32)
    reference_result = Routed(Routing(weights, ids))
    case.spec.columns(case.experts)
    route_ref(logits, case.spec, tensors, None, reference_result)
    kernel_rows = slice(0, KERNEL_TOKENS)
    kernel_result = route(logits[kernel_rows], case.spec, tensors)
    outcomes = {
        "router's reference": _compare_choices(
            reference_result.routing, their_choice, case, exact, slice(None)
        )
    }
    outcomes["router's kernel"] = _compare_choices(
        kernel_result.routing, their_choice, case, exact, kernel_rows
    )
    return find_worst_outcome(outcomes, shrunk, replace(case, tokens=tokens))


def _compare_choices(
    routing: Routing, their_raw: Selection, case: Router, exact: "Exact", rows: slice
) -> CaseOutcome:
    our_choice = _sort_by_id(routing.topk_weights_TK * case.scaling, routing.topk_ids_TK)
    their_choice = _sort_by_id(their_raw[0][rows].float(), their_raw[1][rows])
    our_error = exact.find_error(*our_choice, rows, case.scaling)
    if our_error:
        return CaseOutcome(OURS, f"against float64: {our_error}")
    same_ids = torch.equal(our_choice[1], their_choice[1])
    is_close = (our_choice[0] - their_choice[0]).abs() <= case.atol + case.rtol * their_choice[
        0
    ].abs()
    if same_ids and bool(is_close.all()):
        return CaseOutcome(AGREE)
    their_error = exact.find_error(*their_choice, rows, case.scaling, case.atol + case.rtol)
    if not same_ids and not their_error:  # a tie between experts
        return CaseOutcome(AGREE, "ids differ where two scores are equal")
    return CaseOutcome(
        THEIRS, f"theirs against float64: {their_error or 'weights outside their tolerance'}"
    )


def _sort_by_id(weights: torch.Tensor, ids: torch.Tensor) -> Selection:
    ordered, order = ids.long().sort(dim=1)
    return weights.gather(1, order), ordered


class Exact:
    """Float64 scores computed from the definition, to decide which ids and weights are correct."""

    def __init__(self, logits: torch.Tensor, bias: torch.Tensor | None, spec: RouterSpec) -> None:
        self.spec, self.logits = spec, logits.double()
        self.scores = self._score(self.logits)
        choice = self.logits if spec.order == "topk_first" else self.scores
        self.choice = choice if bias is None else choice + bias.double()
        self._spread = 1e-6 + 1e-6 * self.choice.abs().amax()

    def _score(self, logits: torch.Tensor) -> torch.Tensor:
        if self.spec.score == "sigmoid":
            return 1 / (1 + torch.exp(-logits))
        if self.spec.score == "sqrtsoftplus":
            return torch.log1p(torch.exp(logits)).sqrt()
        exponentials = torch.exp(logits - logits.amax(-1, keepdim=True))
        return exponentials / exponentials.sum(-1, keepdim=True)

    def find_error(
        self,
        weights: torch.Tensor,
        ids: torch.Tensor,
        rows: slice,
        scaling: float,
        limit: float = 1e-6,
    ) -> str:
        """Describe what is wrong with the chosen ids and weights. Returns "" if they are correct.

        limit: allowed absolute error of a weight, in addition to a relative error of 1e-5. Callers
            pass a larger limit for their weights, which may be in the dtype of the logits.
        """
        if ids.min() < 0 or ids.max() >= self.logits.shape[1]:
            return "an id is out of range"
        if bool((ids.sort(dim=1).values.diff(dim=1) == 0).any()):
            return "an expert is chosen twice"
        if not self._has_highest_scores(ids, rows):
            return "the experts are not those with the highest scores"
        score = self.scores[rows].gather(1, ids)
        if self.spec.order == "topk_first":
            score = self._score(self.logits[rows].gather(1, ids))
        if self.spec.renormalize:
            score = score / score.sum(1, keepdim=True)
        score = score * scaling
        error = (weights.double() - score).abs()
        is_wrong = ~(error <= limit * max(1.0, scaling) + 1e-5 * score)  # a NaN is wrong
        return f"weights are off by {float(error.max()):.1g}" if bool(is_wrong.any()) else ""

    def _has_highest_scores(self, ids: torch.Tensor, rows: slice) -> bool:
        """Return whether no eligible expert has a higher score than a chosen one."""
        choice, spec = self.choice[rows], self.spec
        is_chosen = torch.zeros_like(choice, dtype=torch.bool).scatter(1, ids, True)
        is_eligible = torch.ones_like(is_chosen)
        if spec.topk_groups < spec.groups:
            by_group = choice.view(len(choice), spec.groups, -1)
            group_scores = (
                by_group.amax(2) if spec.group_score == "max" else by_group.topk(2, 2)[0].sum(2)
            )
            threshold = group_scores.topk(spec.topk_groups, 1)[0][:, -1:]
            is_certain = group_scores > threshold + self._spread  # selected with any rounding
            is_possible = group_scores >= threshold - self._spread  # selected with some rounding
            size = by_group.shape[2]
            if bool((is_chosen & ~is_possible.repeat_interleave(size, 1)).any()):
                return False
            is_eligible = is_certain.repeat_interleave(size, 1)
        lowest_chosen = choice.masked_fill(~is_chosen, torch.inf).amin(1)
        highest_other = choice.masked_fill(is_chosen | ~is_eligible, -torch.inf).amax(1)
        return bool((lowest_chosen >= highest_other - self._spread).all())
