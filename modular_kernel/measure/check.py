"""Checks the outputs of a layer before it is timed, by comparing rows with a float64 reference.

Benchmarks do not report the time of a layer that fails this check. The reference
(`reference.float64_reference`) uses unquantized weights, even for quantized layers. The error of a
layer may be at most twice that of plain torch with the roundings of the same quantization scheme
(`reference.rounded_reference`). Both errors are root mean squares over at least 512 values, if
necessary from several calls. Over only 32 values, the error of plain torch would vary by a factor
of two.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from modular_kernel.measure.cases import Input, LayerCase, quantize
from modular_kernel.measure.timing import Call
from modular_kernel.reference import float64_reference, rounded_reference
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights, Routing

MAX_ERROR_RATIO = 2.0  # allowed error of a layer, relative to the error of plain torch
EPS = 1e-6  # added to the allowed error, because float32 sums may have another order
_MAX_ROWS = 8  # number of rows of an output that are compared
_MIN_VALUES = 512  # with this many values, the error of a layer varies by 10 %


@dataclass(frozen=True)
class ExpectedOutput:
    """Expected values of some rows of an output.

    rows: indices of the R compared rows, (R,) int64.
    exact: float64 values of these rows, (R, H).
    torch_error: norm of the error of plain torch on these rows.
    """

    rows: torch.Tensor
    exact: torch.Tensor
    torch_error: float


@dataclass(frozen=True)
class CheckResult:
    """Result of a check.

    error: norm of the error divided by the norm of the expected values; None if the output has a
        wrong shape or dtype, or values that are not finite.
    bound: maximum allowed error.
    failure: description of the failure, or "".
    """

    error: float | None
    bound: float
    failure: str = ""


@dataclass(frozen=True)
class CheckedCalls:
    """Result of the check of several calls of a layer.

    last_rows: the compared rows of the last output, (R, H) float64.
    """

    result: CheckResult
    last_rows: torch.Tensor


def count_inputs_to_check(problem: Problem) -> int:
    """Return how many calls must be checked to compare at least _MIN_VALUES values."""
    return math.ceil(_MIN_VALUES / (min(problem.tokens, _MAX_ROWS) * problem.hidden))


def compute_expected_output(
    case: LayerCase, call_input: Input, weights: ExpertWeights, scheme: QuantScheme
) -> ExpectedOutput:
    """Compute the expected values of evenly spaced rows of the output of one call.

    weights: the unquantized weights.
    scheme: quantization scheme of the layer, which determines the tolerance.
    """
    tokens, device = case.problem.tokens, call_input.x_TH.device
    rows = torch.linspace(0, tokens - 1, min(tokens, _MAX_ROWS), device=device).long()
    x_TH = call_input.x_TH[rows]
    routing = call_input.routing.of(rows)
    selected_weights, problem = _select_touched_experts(
        weights, routing, case.problem.with_tokens(len(rows))
    )
    exact = float64_reference(x_TH, selected_weights, routing, problem)
    problem = replace(problem, quant=str(scheme))
    torch_rows = rounded_reference(x_TH, quantize(selected_weights, problem), routing, problem)
    return ExpectedOutput(rows, exact, float((torch_rows - exact).norm()))


def check_calls(calls: Sequence[tuple[Call, ExpectedOutput]], problem: Problem) -> CheckedCalls:
    """Run the calls, and check the shape, dtype, finiteness and error of their outputs.

    The error is computed over all outputs together. All calls return the same buffer, which is
    filled with NaN before each call, so that unwritten values fail the check.
    """
    expected_outputs = [expected for _, expected in calls]
    norm = math.hypot(*(float(expected.exact.norm()) for expected in expected_outputs)) or 1.0
    bound = (
        MAX_ERROR_RATIO
        * math.hypot(*(expected.torch_error for expected in expected_outputs))
        / norm
        + EPS
    )
    errors, last_rows = [], expected_outputs[-1].exact
    out = calls[0][0]()
    for call, expected in calls:
        out.fill_(math.nan)
        out = call()
        failure = _find_format_error(out, problem)
        if failure:
            return CheckedCalls(CheckResult(None, bound, failure), last_rows)
        last_rows = out[expected.rows].double()
        errors.append(float((last_rows - expected.exact).norm()))
    error = math.hypot(*errors) / norm
    failure = "" if error <= bound else f"relative error {error:.2e} > {bound:.2e}"
    return CheckedCalls(CheckResult(error, bound, failure), last_rows)


def check_unchanged(
    out: torch.Tensor, expected: ExpectedOutput, checked_calls: CheckedCalls, problem: Problem
) -> CheckResult:
    """Check that the output of the last checked call has not changed since `check_calls`.

    The change may be as large as the allowed error.

    out: output of a later run of the same call.
    checked_calls: result of `check_calls`.
    """
    bound = checked_calls.result.bound
    failure = _find_format_error(out, problem)
    if failure:
        return CheckResult(None, bound, failure)
    norm = float(checked_calls.last_rows.norm()) or 1.0
    change = float((out[expected.rows].double() - checked_calls.last_rows).norm()) / norm
    if not change <= bound:
        return CheckResult(
            change, bound, f"differs from the earlier output by {change:.2e}, more than {bound:.2e}"
        )
    return checked_calls.result


def _find_format_error(out: torch.Tensor, problem: Problem) -> str:
    """Return a description of a wrong shape, a wrong dtype or values that are not finite, or ""."""
    if tuple(out.shape) != problem.output_shape or out.dtype != problem.dtype:
        got = f"{tuple(out.shape)} {out.dtype}"
        return f"output is {got}, should be {problem.output_shape} {problem.dtype}"
    bad_rows = ~out.isfinite().flatten(1).all(1)
    if bool(bad_rows.any()):
        return f"{int(bad_rows.sum())} of {len(bad_rows)} rows have values that are not finite"
    return ""


_ADAPTER_FIELDS = ("lora_a13", "lora_b13", "lora_a2", "lora_b2")


def _select_touched_experts(
    weights: ExpertWeights, routing: Routing, problem: Problem
) -> tuple[ExpertWeights, Problem]:
    """Return the weights of the experts that the routing uses, and a problem with only these."""
    ids: torch.Tensor = torch.unique(routing.topk_ids_TK.long())
    ids = ids[(ids >= 0) & (ids < problem.experts)]
    local_ids = ids if weights.expert_map is None else weights.expert_map.long()[ids]
    ids, local_ids = ids[local_ids >= 0], local_ids[local_ids >= 0]
    expert_map = torch.full((problem.experts,), -1, dtype=torch.int32, device=ids.device)
    expert_map[ids] = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
    selected = ExpertWeights(
        w1=weights.w1[local_ids],
        w2=weights.w2[local_ids],
        b1=None if weights.b1 is None else weights.b1[local_ids],
        b2=None if weights.b2 is None else weights.b2[local_ids],
        expert_map=expert_map,
        **{name: _select_experts(getattr(weights, name), local_ids) for name in _ADAPTER_FIELDS},
    )
    return selected, replace(problem, expert_map=True, local_experts=max(1, len(ids)))


def _select_experts(matrices: torch.Tensor | None, local_ids: torch.Tensor) -> torch.Tensor | None:
    """Select experts of LoRA matrices, which are (L, e, ...).

    Matrices (L, 1, ...) that all experts share are returned unchanged.
    """
    if matrices is None or matrices.shape[1] == 1:
        return matrices
    return matrices[:, local_ids]
