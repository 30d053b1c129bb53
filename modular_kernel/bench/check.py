"""Right before fast: some rows of an output against the float64 oracle.

The bound is a rule. A layer may be twice as inexact as plain torch is in the same number format,
with the weights and x rounded to what the format holds; a defect is much larger than that.
"""

import math
from dataclasses import dataclass, replace

import torch

from modular_kernel.bench.cases import Cell, Input
from modular_kernel.reference import oracle, recipe
from modular_kernel.schemes import QuantScheme
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.types import Problem

FACTOR = 2.0
EPS = 1e-6  # float32 sums in another order
_ROWS = 8
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0, "uint8": 127.0, "uint4": 7.0, "float4_e2m1": 6.0}


@dataclass(frozen=True)
class Answer:
    """rows: which of an output's rows are compared. exact: what they are, float64.

    bound: the relative error that they may have.
    """

    rows: torch.Tensor
    exact: torch.Tensor
    bound: float


@dataclass(frozen=True)
class Finding:
    """error: relative root mean square, None if it is not a number. wrong: why, or nothing."""

    error: float | None
    wrong: str = ""


def answer_to(cell: Cell, given: Input, weights: ExpertWeights, scheme: QuantScheme) -> Answer:
    """What a layer of `scheme` must return for `given`, on a few rows from first to last."""
    tokens, device = cell.problem.tokens, given.x_TH.device
    rows = torch.linspace(0, tokens - 1, min(tokens, _ROWS), device=device).long()
    x_TH = given.x_TH[rows]
    routing = Routing(given.routing.topk_weights_TK[rows], given.routing.topk_ids_TK[rows])
    few, problem = _touched(weights, routing, cell.problem.with_tokens(len(rows)))
    exact = oracle(x_TH, few, routing, problem)
    if scheme.quantised:
        few = replace(few, w1=_weights(few.w1, scheme), w2=_weights(few.w2, scheme))
        x_TH = _activations(x_TH, scheme)
    fair = recipe(x_TH, few, routing, problem)
    return Answer(rows, exact, FACTOR * _distance(fair, exact) + EPS)


def judge_output(out: torch.Tensor, answer: Answer, problem: Problem) -> Finding:
    """Shape, dtype, finite values everywhere, and the error of the answer's rows."""
    if tuple(out.shape) != problem.output_shape or out.dtype != problem.dtype:
        got = f"{tuple(out.shape)} {out.dtype}"
        return Finding(None, f"output is {got}, should be {problem.output_shape} {problem.dtype}")
    bad = ~out.isfinite().flatten(1).all(1)
    if bool(bad.any()):
        return Finding(None, f"{int(bad.sum())} of {len(bad)} rows hold values that are not finite")
    error = _distance(out[answer.rows].double(), answer.exact)
    if not error <= answer.bound:
        got = error if math.isfinite(error) else None
        return Finding(got, f"relative error {error:.2e} > {answer.bound:.2e}")
    return Finding(error)


def _distance(out: torch.Tensor, exact: torch.Tensor) -> float:
    size = exact.norm()
    return float((out - exact).norm() / size) if bool(size > 0) else float(out.norm())


def _touched(
    weights: ExpertWeights, routing: Routing, problem: Problem
) -> tuple[ExpertWeights, Problem]:
    """The weights of the experts that the routing names, and the problem that has only those."""
    ids = routing.topk_ids_TK.long().unique()
    ids = ids[(ids >= 0) & (ids < problem.experts)]
    local = ids if weights.expert_map is None else weights.expert_map.long()[ids]
    ids, local = ids[local >= 0], local[local >= 0]
    expert_map = torch.full((problem.experts,), -1, dtype=torch.int32, device=ids.device)
    expert_map[ids] = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
    few = ExpertWeights(
        w1=weights.w1[local],
        w2=weights.w2[local],
        b1=None if weights.b1 is None else weights.b1[local],
        b2=None if weights.b2 is None else weights.b2[local],
        expert_map=expert_map,
    )
    return few, replace(problem, expert_map=True, local_experts=max(1, len(ids)))


def _weights(w_eNK: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """Weights rounded to what the scheme can hold, in their own dtype."""
    whole = scheme.granularity == "tensor"
    span = scheme.group[-1] if scheme.group else None
    out = torch.empty_like(w_eNK)
    for expert, w_NK in enumerate(w_eNK):
        rows = w_NK.reshape(1, -1) if whole else w_NK
        out[expert] = through(rows, scheme.weight, span).view(w_NK.shape)
    return out


def _activations(x_TH: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """x rounded to what the scheme's activations can hold, in its own dtype."""
    if not scheme.quantises_activations:
        return x_TH
    rows = x_TH.reshape(1, -1) if scheme.granularity == "tensor" else x_TH
    span = scheme.group[-1] if scheme.group else None
    return through(rows, scheme.activation, span).view(x_TH.shape).to(x_TH.dtype)


def through(values_RK: torch.Tensor, element: str, span: int | None) -> torch.Tensor:
    """Values after a way through `element` and back, float32.

    span: how many values along a row share a scale; None for the whole row.
    """
    rows, columns = values_RK.shape
    span = span or columns
    padded = torch.nn.functional.pad(values_RK.float(), (0, -columns % span))
    groups = padded.view(rows, -1, span)
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / _LARGEST[element]
    return (_rounded(groups / scale, element) * scale).view(rows, -1)[:, :columns]


def _rounded(values: torch.Tensor, element: str) -> torch.Tensor:
    if element == "float8_e4m3fn":
        return values.to(torch.float8_e4m3fn).float()
    if element == "float4_e2m1":
        grid = torch.tensor(_FP4, device=values.device)
        nearest = torch.bucketize(values.abs(), (grid[1:] + grid[:-1]) / 2)
        return grid[nearest] * values.sign()
    return values.round()
