"""What choices are measured on: inputs, and what their outputs must be."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from modular_kernel.measure.roofline import work_of
from modular_kernel.measure.routing_patterns import RoutingKind, draw, load_of
from modular_kernel.measure.timing import l2_bytes, rotation
from modular_kernel.reference import oracle, recipe
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.verify.compare import EPS, FACTOR, ROW_FACTOR, compare

_FIRST_ROWS = 4  # of an output that are compared, and the last one of every number of tokens
_MOST_CALLS = 4
_FEW_TOKENS = 256  # up to here a call is short: more of them are timed
_SEED = 1000

Input = tuple[torch.Tensor, Routing]


@dataclass(frozen=True)
class TuneTruth:
    """rows: tokens that are compared, ascending. exact: what they are in float64; fair: what plain
    torch makes of them."""

    rows: torch.Tensor
    exact: torch.Tensor
    fair: torch.Tensor

    def up_to(self, tokens: int) -> "TuneTruth":
        """Of the first `tokens` tokens."""
        here = self.rows < tokens
        return TuneTruth(self.rows[here], self.exact[here], self.fair[here])


@dataclass
class TuneSituation:
    """One number of tokens: everything about it but the choice.

    inputs: one for each call. flush: overwrite the cache before each. fastest: seconds of each
    stage in the choice that is quickest there. whole: the output of the first right choice.
    """

    problem: Problem
    inputs: tuple[Input, ...]
    truth: TuneTruth
    flush: bool
    fastest: dict[str, float] = field(default_factory=dict)
    whole: torch.Tensor | None = None

    def wrong(self, out: torch.Tensor) -> str:
        """Say what is wrong with the output for the first input; "" if nothing is."""
        if not bool(out.isfinite().all()):
            return "values that are not finite"
        truth = self.truth
        few = self.problem.with_tokens(len(truth.rows))
        found = compare(out[truth.rows], truth.exact, truth.fair, few)
        if found.problems:
            return "; ".join(found.problems)
        if self.whole is None:
            self.whole = out.clone()
            return ""
        return self._unlike(out, self.whole)

    def _unlike(self, out: torch.Tensor, whole: torch.Tensor) -> str:
        """Two right outputs are no further apart than the errors that both may have."""
        truth = self.truth
        fair = float((truth.fair - truth.exact).norm() / truth.exact.norm())
        apart, size = (out.float() - whole.float()).flatten(1), whole.float().flatten(1)
        error = float(apart.norm() / size.norm())
        worst = float((apart.norm(dim=1) / size.norm(dim=1).clamp(min=EPS)).max())
        bound, row_bound = 2 * (FACTOR * fair + EPS), 2 * ROW_FACTOR * (fair + EPS)
        if not error <= bound:
            return f"{error:.2e} away from another right choice, more than {bound:.2e}"
        if not worst <= row_bound:
            return f"a row {worst:.2e} away from another right choice's, more than {row_bound:.2e}"
        return ""


class Situations:
    """Makes the situation of any of `tokens`, the largest of which is problem.tokens or less.

    The first input of fewer tokens is the beginning of that of more: one oracle serves all.
    """

    def __init__(
        self, problem: Problem, weights: ExpertWeights, tokens: Sequence[int], routing: RoutingKind
    ) -> None:
        self.problem, self.weights, self.routing = problem, weights, routing
        self._device = weights.w1.device
        self._longest = self._drawn(max(tokens), 0)
        rows = {row for number in tokens for row in (*range(min(number, _FIRST_ROWS)), number - 1)}
        self._truth = self._true(torch.tensor(sorted(rows), device=self._device))

    def at(self, tokens: int) -> TuneSituation:
        problem = self.problem.with_tokens(tokens)
        x_TH, routing = self._longest
        first = (x_TH[:tokens], routing.of(slice(tokens)))
        calls = _MOST_CALLS if tokens <= _FEW_TOKENS else 2
        inputs = (first, *(self._drawn(tokens, index) for index in range(1, calls)))
        flush = self._stays_in_cache(problem, first[1])
        return TuneSituation(problem, inputs, self._truth.up_to(tokens), flush)

    def _drawn(self, tokens: int, index: int) -> Input:
        generator = torch.Generator(self._device).manual_seed(_SEED * tokens + index)
        shape = (tokens, self.problem.hidden)
        x_TH = torch.randn(shape, device=self._device, generator=generator).to(self.problem.dtype)
        return x_TH, draw(self.problem.with_tokens(tokens), self.routing, generator)

    def _true(self, rows: torch.Tensor) -> TuneTruth:
        x_TH, routing = self._longest
        few = routing.of(rows)
        problem = self.problem.with_tokens(len(rows))
        exact = oracle(x_TH[rows], self.weights, few, problem)
        return TuneTruth(rows, exact, recipe(x_TH[rows], self.weights, few, problem))

    def _stays_in_cache(self, problem: Problem, routing: Routing) -> bool:
        """Whether a call could find there what the one before it has read."""
        load = load_of(routing, problem, self.weights.expert_map)
        moved = work_of(problem, problem.scheme, [load]).bytes
        size = l2_bytes(self._device)
        # Never sets of weights: too many choices would have to be checked on each.
        return rotation(moved, math.inf, problem.tokens, l2=size, memory=0).flush
