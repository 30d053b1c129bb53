"""Quantization of tokens before the dispatch, and the weighted sum of expert outputs after it.

If the scheme quantizes activations, tokens are quantized before the dispatch. In calls with
`call.defer_quant`, the experts quantize the received rows instead.
"""

from dataclasses import replace

import torch

from modular_kernel.contracts import CallState, TopKWeightAndReduce
from modular_kernel.ops.expert_slots import Pairs, number_pairs
from modular_kernel.ops.quantize import QuantizedRows, quantize_rows, quantize_specs, take_quantized
from modular_kernel.ops.slots_and_quantize import number_and_quantize
from modular_kernel.quant.quantized_weights import MIN_SCALE, QMAX
from modular_kernel.replay import stages
from modular_kernel.spec.problem import Problem, Reduce
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import DispatchedRouting, ExpertRows, ExpertWeights
from modular_kernel.workspace import BufferSpec
from topk_reduce import TopKWeightAndReduceContiguous


def dispatches_quantized(problem: Problem, call: CallState) -> bool:
    """Return whether this call dispatches quantized tokens."""
    return problem.scheme.dispatched_quantized and not call.defer_quant


def has_shared_scale(problem: Problem) -> bool:
    """Return whether the tokens of all ranks share one dynamic scale, computed in each call."""
    scheme = problem.scheme
    has_dynamic_scale = scheme.dispatched_quantized and not scheme.static
    return has_dynamic_scale and scheme.activation_granularity == "tensor"


def token_specs(problem: Problem, tokens: int) -> dict[str, BufferSpec]:
    """Return the buffers that `quantize_tokens` takes; none if the scheme does not quantize x."""
    if not problem.scheme.dispatched_quantized:
        return {}
    return quantize_specs("x", problem.scheme, tokens, problem.hidden)


def quantize_tokens(
    x_TH: torch.Tensor,
    problem: Problem,
    *,
    weights: ExpertWeights,
    call: CallState,
    amax: float | torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the tokens to dispatch and their scales: x_TH and None if they are not quantized.

    Takes the buffers of `token_specs` from the workspace.

    amax: maximum absolute value over the tokens of all ranks, as a number or (1,) float32, if the
        tokens share one scale.
    out: output tensors for the quantized tokens and their scales, instead of workspace buffers. If
        the second is None, the scales are written to a workspace buffer.
    """
    if not dispatches_quantized(problem, call):
        return x_TH, None
    quantized = _take_buffers(x_TH, problem, weights, call)
    if out is not None:
        q_TH, scale = out
        quantized = replace(quantized, q_RK=q_TH, scale=quantized.scale if scale is None else scale)
    with stages.stage(stages.QUANTIZE_INPUT):
        _quantize(x_TH, problem.scheme, quantized, amax)
    return quantized.q_RK, quantized.scale


def number_and_quantize_tokens(
    x_TH: torch.Tensor, problem: Problem, pairs: Pairs, *, weights: ExpertWeights, call: CallState
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run `quantize_tokens` for the tokens and `number_pairs` for their pairs, in one launch.

    Schemes with one dynamic scale for all tokens are not supported.
    """
    if not dispatches_quantized(problem, call):
        number_pairs(pairs)
        return x_TH, None
    quantized = _take_buffers(x_TH, problem, weights, call)
    with stages.stage(stages.QUANTIZE_INPUT):
        number_and_quantize(x_TH, problem.scheme, pairs, out=quantized)
    return quantized.q_RK, quantized.scale


def _take_buffers(
    x_TH: torch.Tensor, problem: Problem, weights: ExpertWeights, call: CallState
) -> QuantizedRows:
    scheme, shape = problem.scheme, (x_TH.shape[0], problem.hidden)
    static_scale = weights.a1_scale if scheme.static else None
    return take_quantized(call.workspace, "x", scheme, shape, static_scale=static_scale)


def _quantize(
    x_TH: torch.Tensor,
    scheme: QuantScheme,
    out: QuantizedRows,
    amax: float | torch.Tensor | None,
) -> None:
    if amax is not None:
        if isinstance(amax, torch.Tensor):
            out.scale.copy_(amax)
        else:
            out.scale.fill_(amax)
        # Divide by a tensor, as `quantize_rows` does, so that the scale is rounded the same way.
        out.scale.div_(out.scale.new_full((), QMAX[scheme.activation])).clamp_(min=MIN_SCALE)
        scheme = replace(scheme, static=True)
    quantize_rows(x_TH, scheme, out=out)


def weight_and_reduce(
    expert_output: torch.Tensor,
    topk_weights_TK: torch.Tensor | None,
    problem: Problem,
    *,
    reduce: TopKWeightAndReduce,
    out: torch.Tensor,
    routing: DispatchedRouting | None = None,
) -> None:
    """Write the weighted sum of each row's pairs to `out`, with the reduction `reduce`.

    For Reduce.DELEGATE, rows (T, K, H) are reduced, as for Reduce.CONTIGUOUS.

    routing: the dispatched routing. It may be omitted if the weights of skipped pairs are 0.
    """
    if reduce.kind is Reduce.DELEGATE:
        reduce = TopKWeightAndReduceContiguous()
    if reduce.kind is Reduce.NOOP and expert_output is out:
        return
    scale = problem.routed_scaling_factor
    with stages.stage(stages.REDUCE):
        weights_TK, e = topk_weights_TK, problem.e
        rows = ExpertRows(expert_output, None, weights_TK, scale, routing, e, checked=True)
        reduce.apply(rows, out)


def reduce_rows(
    expert_output: torch.Tensor,
    topk_weights_RK: torch.Tensor,
    problem: Problem,
    call: CallState,
    reduce: TopKWeightAndReduce,
) -> torch.Tensor:
    """Return the weighted sum of the pairs of each received row, (R, H), to be sent back.

    The result is the buffer "rows_sum", or `expert_output` if the experts have summed the pairs.
    """
    rows, hidden = len(topk_weights_RK), problem.hidden
    if reduce.kind is Reduce.NOOP:
        return expert_output
    sum_RH = call.workspace.take("rows_sum", (rows, hidden))
    weights_RK = None if problem.apply_router_weight_on_input else topk_weights_RK
    weight_and_reduce(expert_output, weights_RK, problem, reduce=reduce, out=sum_RH)
    return sum_RH
