"""Correctness check before timing: some rows of an output against the float64 oracle.

The oracle has unquantized weights, even for quantized layers. A layer's error may be twice that of
a plain torch implementation of the same scheme (`reference.recipe`). Both errors are root mean
squares over at least 512 values, of several calls if one has fewer: over 32 values the error of
plain torch itself varies from half to twice its usual value.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from modular_kernel.measure.cases import Input, LayerCase, quantize
from modular_kernel.measure.timing import Call
from modular_kernel.reference import oracle, recipe
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights, Routing

FACTOR = 2.0
EPS = 1e-6  # for float32 sums in another order
_ROWS = 8
_LEAST_VALUES = 512  # with this number, the error of one layer varies by 10 %


@dataclass(frozen=True)
class ExpectedOutput:
    """Expected output. rows: rows that are compared. exact: their values, float64.

    fair: the norm of the error of plain torch.
    """

    rows: torch.Tensor
    exact: torch.Tensor
    fair: float


@dataclass(frozen=True)
class CheckResult:
    """Result of a check.

    error: relative root mean square, or None. bound: the allowed error. wrong: the reason of a
    failure, or "".
    """

    error: float | None
    bound: float
    wrong: str = ""


@dataclass(frozen=True)
class Checked:
    """Result of a layer's calls together. last: the compared rows of the last call, float64."""

    finding: CheckResult
    last: torch.Tensor


def inputs_to_check(problem: Problem) -> int:
    """Return the number of calls needed for a sufficient number of values."""
    return math.ceil(_LEAST_VALUES / (min(problem.tokens, _ROWS) * problem.hidden))


def expected_output(
    cell: LayerCase, given: Input, weights: ExpertWeights, scheme: QuantScheme
) -> ExpectedOutput:
    """Compute the expected output of a layer with `scheme` on some rows, from first to last."""
    tokens, device = cell.problem.tokens, given.x_TH.device
    rows = torch.linspace(0, tokens - 1, min(tokens, _ROWS), device=device).long()
    x_TH = given.x_TH[rows]
    routing = given.routing.of(rows)
    touched_weights, problem = _select_touched(
        weights, routing, cell.problem.with_tokens(len(rows))
    )
    exact = oracle(x_TH, touched_weights, routing, problem)
    problem = replace(problem, quant=str(scheme))
    fair = recipe(x_TH, quantize(touched_weights, problem), routing, problem)
    return ExpectedOutput(rows, exact, float((fair - exact).norm()))


def check_calls(checks: Sequence[tuple[Call, ExpectedOutput]], problem: Problem) -> Checked:
    """Check shape, dtype and finite values of every call, and the common error of all answers.

    Each output is filled with NaN before the next call, so that values that are not written do not
    pass.
    """
    answers = [answer for _, answer in checks]
    norm = math.hypot(*(float(answer.exact.norm()) for answer in answers)) or 1.0
    bound = FACTOR * math.hypot(*(answer.fair for answer in answers)) / norm + EPS
    errors, last = [], answers[-1].exact
    out = checks[0][0]()
    for call, answer in checks:
        out.fill_(math.nan)
        out = call()
        wrong = _wrong_form(out, problem)
        if wrong:
            return Checked(CheckResult(None, bound, wrong), last)
        last = out[answer.rows].double()
        errors.append(float((last - answer.exact).norm()))
    error = math.hypot(*errors) / norm
    wrong = "" if error <= bound else f"relative error {error:.2e} > {bound:.2e}"
    return Checked(CheckResult(error, bound, wrong), last)


def check_unchanged(
    out: torch.Tensor, answer: ExpectedOutput, before: Checked, problem: Problem
) -> CheckResult:
    """Compare the current values of the last call's output with those it had in `before`."""
    bound = before.finding.bound
    wrong = _wrong_form(out, problem)
    if wrong:
        return CheckResult(None, bound, wrong)
    norm = float(before.last.norm()) or 1.0
    change = float((out[answer.rows].double() - before.last).norm()) / norm
    if not change <= bound:
        return CheckResult(
            change, bound, f"differs from the earlier output by {change:.2e}, more than {bound:.2e}"
        )
    return before.finding


def _wrong_form(out: torch.Tensor, problem: Problem) -> str:
    """Return the error in shape, dtype or non-finite values, or ""."""
    if tuple(out.shape) != problem.output_shape or out.dtype != problem.dtype:
        got = f"{tuple(out.shape)} {out.dtype}"
        return f"output is {got}, should be {problem.output_shape} {problem.dtype}"
    bad = ~out.isfinite().flatten(1).all(1)
    if bool(bad.any()):
        return f"{int(bad.sum())} of {len(bad)} rows hold values that are not finite"
    return ""


_ADAPTERS = ("lora_a13", "lora_b13", "lora_a2", "lora_b2")


def _select_touched(
    weights: ExpertWeights, routing: Routing, problem: Problem
) -> tuple[ExpertWeights, Problem]:
    """Return the weights of the experts that the routing uses, and the problem of only those."""
    ids: torch.Tensor = torch.unique(routing.topk_ids_TK.long())
    ids = ids[(ids >= 0) & (ids < problem.experts)]
    local = ids if weights.expert_map is None else weights.expert_map.long()[ids]
    ids, local = ids[local >= 0], local[local >= 0]
    expert_map = torch.full((problem.experts,), -1, dtype=torch.int32, device=ids.device)
    expert_map[ids] = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
    selected = ExpertWeights(
        w1=weights.w1[local],
        w2=weights.w2[local],
        b1=None if weights.b1 is None else weights.b1[local],
        b2=None if weights.b2 is None else weights.b2[local],
        expert_map=expert_map,
        **{name: _of_experts(getattr(weights, name), local) for name in _ADAPTERS},
    )
    return selected, replace(problem, expert_map=True, local_experts=max(1, len(ids)))


def _of_experts(matrices: torch.Tensor | None, local: torch.Tensor) -> torch.Tensor | None:
    """Select experts of an adapter's matrices (L, e or 1, ...); shared ones are unchanged."""
    if matrices is None or matrices.shape[1] == 1:
        return matrices
    return matrices[:, local]
