"""Right before fast: some rows of an output against the float64 oracle.

The reference has unquantised weights, whatever the layer does with them. The bound is a rule: a
layer may be twice as far from it as plain torch that follows the same scheme (`reference.recipe`).
"""

from dataclasses import dataclass, replace

import torch

from modular_kernel.bench.cases import Cell, Input, quantised
from modular_kernel.reference import oracle, recipe
from modular_kernel.schemes import QuantScheme
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.types import Problem

FACTOR = 2.0
EPS = 1e-6  # float32 sums in another order
_ROWS = 8


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
    """error: relative root mean square, None if there is none. wrong: why, or nothing."""

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
    problem = replace(problem, quant=str(scheme))
    fair = recipe(x_TH, quantised(few, problem), routing, problem)
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
        return Finding(error, f"relative error {error:.2e} > {answer.bound:.2e}")
    return Finding(error)


def _distance(out: torch.Tensor, exact: torch.Tensor) -> float:
    size = exact.norm()
    return float((out - exact).norm() / size) if bool(size > 0) else float(out.norm())


def _touched(
    weights: ExpertWeights, routing: Routing, problem: Problem
) -> tuple[ExpertWeights, Problem]:
    """The weights of the experts that the routing names, and the problem that has only those."""
    ids: torch.Tensor = torch.unique(routing.topk_ids_TK.long())
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
