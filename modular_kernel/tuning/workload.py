"""Weights, inputs and expected outputs with which the tuner times and checks choices.

To save time, the weights of only a few experts are drawn at random, and the other experts are
copies of them. Every expert is multiplied by a different factor, so that a kernel that uses a wrong
expert computes a wrong result.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from modular_kernel.measure.cases import make_expert_map, make_weights, quantize
from modular_kernel.measure.roofline import compute_work
from modular_kernel.measure.routing_patterns import RoutingKind, count_load, draw_routing
from modular_kernel.measure.timing import choose_rotation, l2_bytes
from modular_kernel.quant.quantized_weights import SCALE_FIELDS
from modular_kernel.reference import float64_reference, rounded_reference
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.verify.compare import (
    FLOAT32_TOLERANCE,
    MAX_ERROR_RATIO,
    MAX_ROW_ERROR_RATIO,
    compare,
)

_FIRST_ROWS = 4  # the first 4 rows and the last row of an output are compared
_FEW_TOKENS = 256  # with up to 256 tokens, calls are short, and _MAX_CALLS calls are timed
_MAX_CALLS, _MIN_CALLS = 4, 2
_INPUT_SEED = 1000
_WEIGHT_SEED = 11
_NUM_DRAWN_EXPERTS = 4

Input = tuple[torch.Tensor, Routing]  # x_TH and the routing of one call


@dataclass(frozen=True)
class ExpectedRows:
    """Expected output of some tokens.

    rows: indices of the R tokens, (R,) int64, ascending.
    exact: outputs for the tokens, (R, H) float64.
    torch_rows: outputs for the tokens by a plain torch implementation of the scheme, (R, H). Their
        error determines the tolerance.
    """

    rows: torch.Tensor
    exact: torch.Tensor
    torch_rows: torch.Tensor

    def select_below(self, tokens: int) -> "ExpectedRows":
        """Return the expected output of tokens whose index is below `tokens`."""
        is_selected = self.rows < tokens
        return ExpectedRows(
            self.rows[is_selected], self.exact[is_selected], self.torch_rows[is_selected]
        )


@dataclass
class TuneWorkload:
    """Inputs and expected output for one number of tokens, used for all choices.

    inputs: the inputs of the calls.
    expected: expected output for the first input.
    flush: whether to overwrite the L2 cache before each call.
    fastest: lowest time of each stage over all choices so far, in seconds.
    first_output: output of the first correct choice for the first input; None if there is none yet.
    """

    problem: Problem
    inputs: tuple[Input, ...]
    expected: ExpectedRows
    flush: bool
    fastest: dict[str, float] = field(default_factory=dict)
    first_output: torch.Tensor | None = None

    def find_error(self, out: torch.Tensor) -> str:
        """Return why an output for the first input is wrong; "" if it is correct."""
        if not bool(out.isfinite().all()):
            return "values that are not finite"
        expected = self.expected
        rows_problem = self.problem.with_tokens(len(expected.rows))
        comparison = compare(out[expected.rows], expected.exact, expected.torch_rows, rows_problem)
        if comparison.problems:
            return "; ".join(comparison.problems)
        if self.first_output is None:
            self.first_output = out.clone()
            return ""
        return self._compare_outputs(out, self.first_output)

    def _compare_outputs(self, out: torch.Tensor, first_output: torch.Tensor) -> str:
        """Compare the outputs of two choices, which may differ by twice the tolerance."""
        expected = self.expected
        reference_error = float(
            (expected.torch_rows - expected.exact).norm() / expected.exact.norm()
        )
        difference = (out.float() - first_output.float()).flatten(1)
        reference = first_output.float().flatten(1)
        error = float(difference.norm() / reference.norm())
        worst_row = float(
            (difference.norm(dim=1) / reference.norm(dim=1).clamp(min=FLOAT32_TOLERANCE)).max()
        )
        bound = 2 * (MAX_ERROR_RATIO * reference_error + FLOAT32_TOLERANCE)
        row_bound = 2 * MAX_ROW_ERROR_RATIO * (reference_error + FLOAT32_TOLERANCE)
        if not error <= bound:
            return f"differs from another correct choice by {error:.2e}, more than {bound:.2e}"
        if not worst_row <= row_bound:
            return (
                f"a row differs from that of another correct choice by {worst_row:.2e}, more than "
                f"{row_bound:.2e}"
            )
        return ""


class WorkloadFactory:
    """Creates the workloads of several token counts.

    The first input of every workload is a prefix of the same tensor, so that the float64 reference
    runs only once.

    tokens: the token counts, at most problem.tokens.
    routing: distribution of tokens over experts.
    """

    def __init__(
        self, problem: Problem, weights: ExpertWeights, tokens: Sequence[int], routing: RoutingKind
    ) -> None:
        self.problem, self.weights, self.routing = problem, weights, routing
        self._device = weights.w1.device
        self._largest_input = self._draw_input(max(tokens), 0)
        rows = {row for number in tokens for row in (*range(min(number, _FIRST_ROWS)), number - 1)}
        self._expected = self._compute_expected(torch.tensor(sorted(rows), device=self._device))

    def make_workload(self, tokens: int) -> TuneWorkload:
        problem = self.problem.with_tokens(tokens)
        x_TH, routing = self._largest_input
        first_input = (x_TH[:tokens], routing.of(slice(tokens)))
        num_calls = _MAX_CALLS if tokens <= _FEW_TOKENS else _MIN_CALLS
        inputs = (first_input, *(self._draw_input(tokens, index) for index in range(1, num_calls)))
        flush = self._needs_l2_flush(problem, first_input[1])
        return TuneWorkload(problem, inputs, self._expected.select_below(tokens), flush)

    def _draw_input(self, tokens: int, index: int) -> Input:
        generator = torch.Generator(self._device).manual_seed(_INPUT_SEED * tokens + index)
        shape = (tokens, self.problem.hidden)
        x_TH = torch.randn(shape, device=self._device, generator=generator).to(self.problem.dtype)
        return x_TH, draw_routing(self.problem.with_tokens(tokens), self.routing, generator)

    def _compute_expected(self, rows: torch.Tensor) -> ExpectedRows:
        x_TH, routing = self._largest_input
        rows_routing = routing.of(rows)
        problem = self.problem.with_tokens(len(rows))
        exact = float64_reference(x_TH[rows], self.weights, rows_routing, problem)
        return ExpectedRows(
            rows, exact, rounded_reference(x_TH[rows], self.weights, rows_routing, problem)
        )

    def _needs_l2_flush(self, problem: Problem, routing: Routing) -> bool:
        """Return whether the L2 cache could still hold data that the previous call loaded."""
        load = count_load(routing, problem, self.weights.expert_map)
        bytes_moved = compute_work(problem, problem.scheme, [load]).bytes
        l2_size = l2_bytes(self._device)
        # memory=0 allows a single set of weights. With several sets, every choice would have to be
        # checked with each set.
        return choose_rotation(bytes_moved, math.inf, problem.tokens, l2=l2_size, memory=0).flush


def make_tuning_weights(problem: Problem, device: torch.device) -> ExpertWeights:
    """Create random weights of `problem`, quantized by its scheme."""
    num_drawn = min(_NUM_DRAWN_EXPERTS, problem.e)
    drawn_problem = replace(problem, local_experts=num_drawn, expert_map=True)
    weights = quantize(make_weights(replace(drawn_problem, quant="none"), device), drawn_problem)
    source_experts = torch.arange(problem.e, device=device) % num_drawn
    tensors = {}
    for name in ("w1", "w2", "b1", "b2", *SCALE_FIELDS):
        tensor = getattr(weights, name)
        if tensor is not None:
            tensors[name] = _repeat_experts(tensor, source_experts)
    generator = torch.Generator(device).manual_seed(_WEIGHT_SEED)
    for name in ("w1", "w2"):
        # Quantized weights are multiplied by the factors through their scales.
        scaled_name = f"{name}_scale" if problem.scheme.quantized else name
        if problem.scheme.matrix_scales:
            scaled_name = f"{name}_global_scale"
        _scale_experts(tensors[scaled_name], generator)
    return replace(weights, **tensors, expert_map=make_expert_map(problem, device))


def _repeat_experts(tensor: torch.Tensor, source_experts: torch.Tensor) -> torch.Tensor:
    """Return tensor[source_experts]. This includes 8-bit dtypes, which torch cannot index."""
    indexable = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return indexable.index_select(0, source_experts).view(tensor.dtype)


def _scale_experts(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Multiply each expert by a random factor between 1/2 and 1, in place.

    If the tensor stores exponents (uint8), the factor is a power of two between 1/8 and 1.
    """
    shape = (tensor.shape[0], *[1] * (tensor.dim() - 1))
    random = torch.rand(shape, device=tensor.device, generator=generator)
    if tensor.dtype is torch.uint8:
        tensor -= (random * 4).to(torch.uint8)
    else:
        tensor *= (0.5 + 0.5 * random).to(tensor.dtype)
