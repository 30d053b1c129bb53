"""Defects in the problem and in the arguments of a call, one function each.

The lists of defects in `operators`, `memory`, `quantized`, `adapters` and `roundings` use these
functions as hooks of a `CallMutant`. Each function returns the wrong arguments of a kernel with the
defect. A defect can keep values between calls in `args.defect_state`.

A pair is a (token, top-k slot). w1 holds the gate and up matrices, and w2 the down matrix.
"""

import math
from dataclasses import replace

import torch

from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights
from modular_kernel.testing.input_mutations.inject import CallArguments


def change_activation(problem: Problem, **changes: object) -> Problem:
    """Return the problem with some fields of its activation changed."""
    # Interleaved rows are in the order gate, up, so up_first=True would be refused.
    up_first = problem.act.up_first and not changes.get("interleaved")
    spec = replace(problem.act, up_first=up_first, **changes)  # type: ignore[arg-type]
    return replace(problem, activation=spec)


def replace_activation(problem: Problem) -> Problem:
    """Use silu instead of any other activation, and gelu instead of silu."""
    kind = "silu" if problem.act.kind != "silu" else "gelu"
    return change_activation(problem, kind=kind, limit=None)


def replace_gelu(problem: Problem) -> Problem:
    """Use the tanh approximation of gelu instead of exact gelu, or vice versa."""
    kind = "gelu" if problem.act.kind == "gelu_tanh" else "gelu_tanh"
    return change_activation(problem, kind=kind)


def swap_clamp_rule(problem: Problem) -> Problem:
    """Apply the limit before silu instead of after it, or vice versa."""
    is_after = problem.act.kind == "swiglu_clamp_after"
    return change_activation(
        problem, kind="swiglu_clamp_before" if is_after else "swiglu_clamp_after"
    )


def _replace_ids(args: CallArguments, ids_TK: torch.Tensor) -> CallArguments:
    ids_TK = ids_TK.to(args.routing.topk_ids_TK.dtype)
    return replace(args, routing=replace(args.routing, topk_ids_TK=ids_TK))


def _replace_router_weights(args: CallArguments, weights_TK: torch.Tensor) -> CallArguments:
    weights_TK = weights_TK.contiguous()
    return replace(args, routing=replace(args.routing, topk_weights_TK=weights_TK))


def find_valid_pairs(args: CallArguments) -> torch.Tensor:
    """Return a (T, K) bool mask of the pairs with an id in [0, E)."""
    ids = args.routing.topk_ids_TK
    return (ids >= 0) & (ids < args.problem.experts)


def find_local_ids(args: CallArguments) -> torch.Tensor:
    """Return the local expert of each pair, (T, K) int64; -1 if the expert is not local."""
    ids = torch.where(find_valid_pairs(args), args.routing.topk_ids_TK.long(), -1)
    expert_map = args.weights.expert_map
    return ids if expert_map is None else torch.where(ids < 0, ids, expert_map.long()[ids])


def drop_busiest_expert(args: CallArguments) -> CallArguments:
    """Remove all pairs from the local expert with the most pairs."""
    local_ids_TK = find_local_ids(args)
    if not bool((local_ids_TK >= 0).any()):
        return args
    busiest_expert = local_ids_TK[local_ids_TK >= 0].mode().values
    return _replace_ids(
        args, args.routing.topk_ids_TK.masked_fill(local_ids_TK == busiest_expert, -1)
    )


def use_next_expert(args: CallArguments) -> CallArguments:
    """Route every pair to the expert with the next id."""
    ids = args.routing.topk_ids_TK.long()
    return _replace_ids(
        args, torch.where(find_valid_pairs(args), (ids + 1) % args.problem.experts, ids)
    )


def drop_last_slot(args: CallArguments) -> CallArguments:
    """Skip the last expert of each token."""
    ids = args.routing.topk_ids_TK.clone()
    ids[:, -1] = -1
    return _replace_ids(args, ids)


def wrap_minus_one(args: CallArguments) -> CallArguments:
    """Replace the id -1 with the last expert, as in negative indexing."""
    ids = args.routing.topk_ids_TK
    return _replace_ids(args, torch.where(ids == -1, args.problem.experts - 1, ids))


def wrap_out_of_range(args: CallArguments) -> CallArguments:
    """Replace invalid ids with their remainder modulo the number of experts."""
    ids = args.routing.topk_ids_TK.long()
    wrapped = torch.where(find_valid_pairs(args) | (ids == -1), ids, ids % args.problem.experts)
    return _replace_ids(args, wrapped)


def skip_uncounted(args: CallArguments) -> CallArguments:
    """Replace invalid ids with -1, so that they are skipped and not counted."""
    ids = args.routing.topk_ids_TK
    return _replace_ids(args, torch.where(find_valid_pairs(args), ids, -1))


def count_skips(args: CallArguments) -> CallArguments:
    """Replace -1 with an invalid id, so that skipped pairs are counted."""
    ids = args.routing.topk_ids_TK
    return _replace_ids(args, torch.where(ids == -1, -2, ids))


def drop_duplicates(args: CallArguments) -> CallArguments:
    """Skip pairs that repeat an expert of the same token."""
    ids = args.routing.topk_ids_TK
    is_repeated = (ids[:, :, None] == ids[:, None, :]).tril(-1).any(2)
    return _replace_ids(args, ids.masked_fill(is_repeated, -1))


def misread_int64(args: CallArguments) -> CallArguments:
    """Read the low and high words of int64 ids as int32 ids."""
    ids = args.routing.topk_ids_TK
    if ids.dtype != torch.int64:
        return args
    int32_words = ids.view(torch.int32).flatten()[: ids.numel()].view(ids.shape)
    return replace(args, routing=replace(args.routing, topk_ids_TK=int32_words.contiguous()))


def square_router_weights(args: CallArguments) -> CallArguments:
    return _replace_router_weights(args, args.routing.topk_weights_TK.square())


def round_router_weights(args: CallArguments) -> CallArguments:
    """Round the router weights to the dtype of the problem."""
    weights_TK = args.routing.topk_weights_TK
    return _replace_router_weights(args, weights_TK.to(args.problem.dtype).to(weights_TK.dtype))


def omit_router_weights(args: CallArguments) -> CallArguments:
    """Replace the router weights with 1."""
    return _replace_router_weights(args, torch.ones_like(args.routing.topk_weights_TK))


def average_router_weights(args: CallArguments) -> CallArguments:
    """Replace the router weights of each token with their mean."""
    weights_TK = args.routing.topk_weights_TK
    return _replace_router_weights(args, weights_TK.mean(1, keepdim=True).expand_as(weights_TK))


def shift_tokens(args: CallArguments) -> CallArguments:
    return replace(args, x_TH=args.x_TH.roll(1, 0))


def narrow_operands(args: CallArguments) -> CallArguments:
    """Round x and the weight matrices to the next narrower dtype: tf32, bfloat16, float8."""
    weights = replace(args.weights, w1=_narrow(args.weights.w1), w2=_narrow(args.weights.w2))
    return replace(args, x_TH=_narrow(args.x_TH), weights=weights)


def _narrow(value: torch.Tensor) -> torch.Tensor:
    if value.dtype == torch.float32:
        return (value.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
    narrow_dtype = torch.bfloat16 if value.dtype == torch.float16 else torch.float8_e4m3fn
    return value.to(narrow_dtype).to(value.dtype)


def swap_gate_and_up(args: CallArguments) -> CallArguments:
    weights, interleaved = args.weights, args.problem.act.interleaved

    def swap_rows(rows: torch.Tensor) -> torch.Tensor:
        if interleaved:
            return torch.stack([rows[:, 1::2], rows[:, 0::2]], dim=2).flatten(1, 2)
        return torch.cat(rows.chunk(2, dim=1)[::-1], dim=1)

    b1 = None if weights.b1 is None else swap_rows(weights.b1)
    return replace(args, weights=replace(weights, w1=swap_rows(weights.w1), b1=b1))


def omit_last_h(args: CallArguments) -> CallArguments:
    """Omit the last of the H products in each sum of GEMM 1."""
    return _replace_weight(args, "w1", _zero_last_column(args.weights.w1))


def omit_last_i(args: CallArguments) -> CallArguments:
    """Omit the last of the I products in each sum of GEMM 2."""
    return _replace_weight(args, "w2", _zero_last_column(args.weights.w2))


def _zero_last_column(matrix: torch.Tensor) -> torch.Tensor:
    matrix = matrix.clone()
    matrix[..., -1] = 0
    return matrix


def omit_bias(args: CallArguments, name: str) -> CallArguments:
    return _replace_weight(args, name, torch.zeros_like(getattr(args.weights, name)))


def multiply_bias_by_router_weight(args: CallArguments) -> CallArguments:
    """Multiply b1 by the mean router weight, as if the router weight were applied after b1."""
    assert args.weights.b1 is not None
    mean = args.routing.topk_weights_TK.mean().to(args.weights.b1.dtype)
    return _replace_weight(args, "b1", args.weights.b1 * mean)


def ignore_strides(args: CallArguments) -> CallArguments:
    """Read the weight matrices as if they were contiguous."""
    weights = replace(
        args.weights, w1=_as_contiguous(args.weights.w1), w2=_as_contiguous(args.weights.w2)
    )
    return replace(args, weights=weights)


def ignore_row_stride(args: CallArguments) -> CallArguments:
    """Read x as if it were contiguous."""
    return replace(args, x_TH=_as_contiguous(args.x_TH))


def _as_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    strides = [math.prod(tensor.shape[axis + 1 :]) for axis in range(tensor.dim())]
    return tensor.as_strided(tensor.shape, strides)


def shift_expert_map(args: CallArguments) -> CallArguments:
    assert args.weights.expert_map is not None
    return _replace_weight(args, "expert_map", args.weights.expert_map.roll(1))


def _replace_weight(args: CallArguments, name: str, tensor: torch.Tensor) -> CallArguments:
    changed: dict[str, torch.Tensor] = {name: tensor}
    weights: ExpertWeights = replace(args.weights, **changed)
    return replace(args, weights=weights)


def reuse_tokens(args: CallArguments) -> CallArguments:
    """Replace the first rows of x with the rows of the previous call."""
    previous = args.defect_state.get("x")
    args.defect_state["x"] = args.x_TH.clone()
    if previous is None:
        return args
    x_TH = args.x_TH.clone()
    count = min(len(x_TH), len(previous))
    x_TH[:count] = previous[:count]
    return replace(args, x_TH=x_TH)


def reuse_routing(args: CallArguments) -> CallArguments:
    """Reuse the first routing for this number of tokens, as if routing were cached by shape."""
    tokens = len(args.x_TH)
    routing = args.defect_state.setdefault(f"routing of {tokens}", args.routing)
    return replace(args, routing=routing)


def fail_without_tokens(args: CallArguments) -> CallArguments:
    if len(args.x_TH) == 0:
        raise RuntimeError("a launch with an empty grid")
    return args


def allocate(args: CallArguments) -> CallArguments:
    torch.empty(1, device=args.x_TH.device)
    return args


def synchronize(args: CallArguments) -> CallArguments:
    bool(args.routing.topk_ids_TK.any())
    return args


def freeze_routing(args: CallArguments) -> CallArguments:
    """In a captured CUDA graph, use the ids of the last call before the capture."""
    if not torch.cuda.is_current_stream_capturing():
        args.defect_state["ids"] = args.routing.topk_ids_TK.clone()
    return _replace_ids(args, args.defect_state["ids"])


def shift_scales(args: CallArguments, dim: int) -> CallArguments:
    """Shift the scales of both matrices by one expert, row or group.

    dim: 0 for experts, 1 for rows, 2 for groups.
    """
    for name in ("w1_scale", "w2_scale"):
        args = _replace_weight(args, name, getattr(args.weights, name).roll(1, dim))
    return args


def shift_zero_points(args: CallArguments) -> CallArguments:
    for name in ("w1_zero_point", "w2_zero_point"):
        args = _replace_weight(args, name, getattr(args.weights, name).roll(1, 1))
    return args


def swap_gate_and_up_global_scales(args: CallArguments) -> CallArguments:
    """Swap the float32 scales of the gate and up matrices of each expert."""
    return _replace_weight(
        args, "w1_global_scale", _get_contiguous_field(args, "w1_global_scale").roll(1, 1)
    )


def shift_w2_global_scales(args: CallArguments) -> CallArguments:
    """Use the float32 scale of w2 of the previous expert for each expert."""
    return _replace_weight(
        args, "w2_global_scale", _get_contiguous_field(args, "w2_global_scale").roll(1, 0)
    )


def _get_contiguous_field(args: CallArguments, name: str) -> torch.Tensor:
    tensor: torch.Tensor = getattr(args.weights, name)
    return tensor.contiguous()


def ignore_order(args: CallArguments) -> CallArguments:
    """Ignore the column order of w1 (act order)."""
    order = _get_contiguous_field(args, "w1_order")
    identity = torch.arange(order.shape[1], dtype=order.dtype, device=order.device)
    return _replace_weight(args, "w1_order", identity.expand_as(order).contiguous())


def shift_order(args: CallArguments) -> CallArguments:
    return _replace_weight(args, "w1_order", _get_contiguous_field(args, "w1_order").roll(1, 0))


def swap_nibbles(args: CallArguments, names: tuple[str, str]) -> CallArguments:
    """Exchange the two 4-bit halves of every byte in the fields `names` of the weights."""
    for name in names:
        packed = getattr(args.weights, name)
        args = _replace_weight(args, name, (packed >> 4) | (packed << 4))
    return args


def shrink_static_scale(args: CallArguments) -> CallArguments:
    """Use a static activation scale that is too small for most values, which then saturate."""
    assert args.weights.a2_scale is not None
    return _replace_weight(args, "a2_scale", args.weights.a2_scale / 64)
