"""Inputs for tuning, and the expected outputs."""

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

_FIRST_ROWS = 4  # rows of an output that are compared, in addition to the last one
_MOST_CALLS = 4
_FEW_TOKENS = 256  # up to this number calls are short, and more of them are timed
_SEED = 1000

Input = tuple[torch.Tensor, Routing]


@dataclass(frozen=True)
class ExpectedRows:
    """Expected output. rows: tokens that are compared, ascending.

    exact: the rows in float64. fair: the rows as plain torch computes them.
    """

    rows: torch.Tensor
    exact: torch.Tensor
    fair: torch.Tensor

    def up_to(self, tokens: int) -> "ExpectedRows":
        """Return the part for the first `tokens` tokens."""
        selected = self.rows < tokens
        return ExpectedRows(self.rows[selected], self.exact[selected], self.fair[selected])


@dataclass
class TuneWorkload:
    """The workload of one number of tokens, for all choices.

    inputs: one per call. flush: overwrite the L2 cache before each call. fastest: seconds of each
    stage in the choice with the fastest one. whole: the output of the first correct choice.
    """

    problem: Problem
    inputs: tuple[Input, ...]
    truth: ExpectedRows
    flush: bool
    fastest: dict[str, float] = field(default_factory=dict)
    whole: torch.Tensor | None = None

    def wrong(self, out: torch.Tensor) -> str:
        """Return the error of the output for the first input, or ""."""
        if not bool(out.isfinite().all()):
            return "values that are not finite"
        truth = self.truth
        rows_problem = self.problem.with_tokens(len(truth.rows))
        comparison = compare(out[truth.rows], truth.exact, truth.fair, rows_problem)
        if comparison.problems:
            return "; ".join(comparison.problems)
        if self.whole is None:
            self.whole = out.clone()
            return ""
        return self._unlike(out, self.whole)

    def _unlike(self, out: torch.Tensor, whole: torch.Tensor) -> str:
        """Compare two outputs: they may differ by the sum of their allowed errors."""
        truth = self.truth
        fair_error = float((truth.fair - truth.exact).norm() / truth.exact.norm())
        difference, reference = (out.float() - whole.float()).flatten(1), whole.float().flatten(1)
        error = float(difference.norm() / reference.norm())
        worst = float((difference.norm(dim=1) / reference.norm(dim=1).clamp(min=EPS)).max())
        bound, row_bound = 2 * (FACTOR * fair_error + EPS), 2 * ROW_FACTOR * (fair_error + EPS)
        if not error <= bound:
            return f"differs from another correct choice by {error:.2e}, more than {bound:.2e}"
        if not worst <= row_bound:
            return (
                f"a row differs from that of another correct choice by {worst:.2e}, more than "
                f"{row_bound:.2e}"
            )
        return ""


class Workloads:
    """Creates the situation for each of `tokens`, at most problem.tokens.

    The first input for fewer tokens is the beginning of that for more, so one oracle is sufficient.
    """

    def __init__(
        self, problem: Problem, weights: ExpertWeights, tokens: Sequence[int], routing: RoutingKind
    ) -> None:
        self.problem, self.weights, self.routing = problem, weights, routing
        self._device = weights.w1.device
        self._longest = self._drawn(max(tokens), 0)
        rows = {row for number in tokens for row in (*range(min(number, _FIRST_ROWS)), number - 1)}
        self._truth = self._true(torch.tensor(sorted(rows), device=self._device))

    def at(self, tokens: int) -> TuneWorkload:
        problem = self.problem.with_tokens(tokens)
        x_TH, routing = self._longest
        first_input = (x_TH[:tokens], routing.of(slice(tokens)))
        calls = _MOST_CALLS if tokens <= _FEW_TOKENS else 2
        inputs = (first_input, *(self._drawn(tokens, index) for index in range(1, calls)))
        flush = self._stays_in_cache(problem, first_input[1])
        return TuneWorkload(problem, inputs, self._truth.up_to(tokens), flush)

    def _drawn(self, tokens: int, index: int) -> Input:
        generator = torch.Generator(self._device).manual_seed(_SEED * tokens + index)
        shape = (tokens, self.problem.hidden)
        x_TH = torch.randn(shape, device=self._device, generator=generator).to(self.problem.dtype)
        return x_TH, draw(self.problem.with_tokens(tokens), self.routing, generator)

    def _true(self, rows: torch.Tensor) -> ExpectedRows:
        x_TH, routing = self._longest
        rows_routing = routing.of(rows)
        problem = self.problem.with_tokens(len(rows))
        exact = oracle(x_TH[rows], self.weights, rows_routing, problem)
        return ExpectedRows(rows, exact, recipe(x_TH[rows], self.weights, rows_routing, problem))

    def _stays_in_cache(self, problem: Problem, routing: Routing) -> bool:
        """Return whether a call could hit L2 lines that the previous call has loaded."""
        load = load_of(routing, problem, self.weights.expert_map)
        bytes_moved = work_of(problem, problem.scheme, [load]).bytes
        size = l2_bytes(self._device)
        # Use a single set of weights, since all choices would have to be checked on each set.
        return rotation(bytes_moved, math.inf, problem.tokens, l2=size, memory=0).flush
