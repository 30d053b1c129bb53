"""Shared by the parts that hand over contiguous tokens: quantize before, weight and sum after."""

from dataclasses import replace

import torch

from modular_kernel.contracts import Call, TopKWeightAndReduce
from modular_kernel.ops.expert_slots import Pairs, number_pairs
from modular_kernel.ops.quantize import Quantized, quantize_rows, quantize_specs, take_quantized
from modular_kernel.ops.slots_and_quantize import number_and_quantize
from modular_kernel.quant.quantized_weights import LARGEST, MIN_SCALE
from modular_kernel.replay import stages
from modular_kernel.spec.problem import Problem, Reduce
from modular_kernel.tensors import DispatchedRouting, ExpertRows, ExpertWeights
from modular_kernel.workspace import BufferSpec
from topk_reduce import TopKWeightAndReduceContiguous


def quantizes(problem: Problem, call: Call) -> bool:
    """Whether tokens are dispatched quantized in this call."""
    return problem.scheme.travels_quantized and not call.defer_quant


def one_scale_for_all(problem: Problem) -> bool:
    """Whether a call's tokens share one scale that is computed from all of them."""
    scheme = problem.scheme
    computed = scheme.travels_quantized and not scheme.static
    return computed and scheme.activation_granularity == "tensor"


def token_specs(problem: Problem, tokens: int) -> dict[str, BufferSpec]:
    """Return the buffers of `quantize_tokens`.

    There are none where the scheme leaves activations as they are.
    """
    if not problem.scheme.travels_quantized:
        return {}
    return quantize_specs("x", problem.scheme, tokens, problem.hidden)


def quantize_tokens(
    x_TH: torch.Tensor,
    problem: Problem,
    *,
    weights: ExpertWeights,
    call: Call,
    largest: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the tokens as they are dispatched, and their scales.

    Unquantized tokens are returned as they are, with None for scales.

    Takes the buffers of `token_specs`. largest: the greatest magnitude among the
    tokens of all ranks, where one scale serves them all.
    """
    if not quantizes(problem, call):
        return x_TH, None
    with stages.stage(stages.QUANTIZE_INPUT):
        return _quantized(x_TH, problem, weights, call, largest)


def number_and_quantize_tokens(
    x_TH: torch.Tensor, problem: Problem, pairs: Pairs, *, weights: ExpertWeights, call: Call
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`quantize_tokens`, and `number_pairs` of their pairs, in one launch.

    Not where one scale is computed for all tokens.
    """
    if not quantizes(problem, call):
        number_pairs(pairs)
        return x_TH, None
    out = _room(x_TH, problem, weights, call)
    with stages.stage(stages.QUANTIZE_INPUT):
        number_and_quantize(x_TH, problem.scheme, pairs, out=out)
    return out.q_RK, out.scale


def _room(x_TH: torch.Tensor, problem: Problem, weights: ExpertWeights, call: Call) -> Quantized:
    """Where the tokens of a call are quantized to, and the static scale if there is one."""
    scheme, shape = problem.scheme, (x_TH.shape[0], problem.hidden)
    static = weights.a1_scale if scheme.static else None
    return take_quantized(call.workspace, "x", scheme, shape, static_scale=static)


def _quantized(
    x_TH: torch.Tensor,
    problem: Problem,
    weights: ExpertWeights,
    call: Call,
    largest: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scheme, out = problem.scheme, _room(x_TH, problem, weights, call)
    if largest is not None:
        amax = out.scale.new_full((1,), largest)
        # By a tensor, as `quantize_rows` does: one rounding, the same everywhere.
        amax /= amax.new_tensor(LARGEST[scheme.activation])
        out.scale.copy_(amax.clamp_(min=MIN_SCALE))
        scheme = replace(scheme, static=True)
    quantize_rows(x_TH, scheme, out=out)
    return out.q_RK, out.scale


def weight_and_reduce(
    expert_output: torch.Tensor,
    topk_weights_TK: torch.Tensor | None,
    problem: Problem,
    *,
    reduce: TopKWeightAndReduce,
    out: torch.Tensor,
    routing: DispatchedRouting | None = None,
) -> None:
    """Apply what the experts left to do, or the contiguous reducer if they leave the choice.

    routing: what was dispatched, unless the weights of pairs that it skips are 0.
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


def reduced_rows(
    expert_output: torch.Tensor,
    topk_weights_RK: torch.Tensor,
    problem: Problem,
    call: Call,
    reduce: TopKWeightAndReduce,
) -> torch.Tensor:
    """Return what a rank sends back for the rows that came to it: (R, H), summed here.

    The rows are weighted before they are summed.

    Takes the buffer "rows_sum" unless the experts left nothing to do.
    """
    rows, hidden = len(topk_weights_RK), problem.hidden
    if reduce.kind is Reduce.NOOP:
        return expert_output
    sum_RH = call.workspace.take("rows_sum", (rows, hidden))
    left = None if problem.apply_router_weight_on_input else topk_weights_RK
    weight_and_reduce(expert_output, left, problem, reduce=reduce, out=sum_RH)
    return sum_RH
