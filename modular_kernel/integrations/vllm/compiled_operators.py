"""Computes vLLM's compiled operators in torch, on a machine without vLLM's compiled extension.

vLLM's Python and Triton code of a MoE layer can then run on a CPU, with Triton's interpreter. The
module implements only the operators that vLLM's Triton experts and the quantization of activations
call.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

Activation = Callable[[torch.Tensor], torch.Tensor]

_FP8_MAX, _INT8_MAX = 448.0, 127.0
_MIN_FP8_SCALE = 1 / (_FP8_MAX * 512)  # as in vLLM's kernels for scales per token


def install_operators() -> list[str]:
    """Install the operators in `torch.ops` and return their names."""
    operators = {
        torch.ops._C: {
            "silu_and_mul": _make_gated_activation(F.silu),
            "gelu_and_mul": _make_gated_activation(F.gelu),
            "gelu_tanh_and_mul": _make_gated_activation(
                lambda gate: F.gelu(gate, approximate="tanh")
            ),
            "swigluoai_and_mul": _swigluoai_and_mul,
            "silu_and_mul_with_clamp": _silu_and_mul_with_clamp,
            "situ_and_mul": _situ_and_mul,
            "masked_moe_activation": _masked_moe_activation,
            "static_scaled_fp8_quant": _static_scaled_fp8_quant,
            "dynamic_scaled_fp8_quant": _dynamic_scaled_fp8_quant,
            "dynamic_per_token_scaled_fp8_quant": _dynamic_per_token_scaled_fp8_quant,
            "silu_and_mul_per_block_quant": _silu_and_mul_per_block_quant,
            "static_scaled_int8_quant": _static_scaled_int8_quant,
        },
        torch.ops._moe_C: {"moe_align_block_size": _moe_align_block_size, "moe_sum": _moe_sum},
    }
    for namespace, functions in operators.items():
        for name, function in functions.items():
            setattr(namespace, name, function)
    return [name for functions in operators.values() for name in functions]


# ------------------------------------------------------------------------------- activations


def _make_gated_activation(activation: Activation) -> Callable[[torch.Tensor, torch.Tensor], None]:
    def write(output: torch.Tensor, input: torch.Tensor) -> None:
        gate, up = input.float().chunk(2, dim=-1)
        output.copy_(activation(gate) * up)

    return write


def _clamped_swiglu(
    gate: torch.Tensor, up: torch.Tensor, limit: float, alpha: float, beta: float
) -> torch.Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def _swigluoai_and_mul(
    output: torch.Tensor, input: torch.Tensor, alpha: float = 1.702, limit: float = 7.0
) -> None:
    gate, up = input.float()[..., 0::2], input.float()[..., 1::2]
    output.copy_(_clamped_swiglu(gate, up, limit, alpha, 1.0))


def _silu_and_mul_with_clamp(
    output: torch.Tensor, input: torch.Tensor, limit: float, alpha: float, beta: float
) -> None:
    gate, up = input.float().chunk(2, dim=-1)
    output.copy_(_clamped_swiglu(gate, up, limit, alpha, beta))


def _situ_and_mul(
    output: torch.Tensor, input: torch.Tensor, beta: float, linear_beta: float
) -> None:
    gate, up = input.float().chunk(2, dim=-1)
    if linear_beta > 0:
        up = linear_beta * torch.tanh(up / linear_beta)
    output.copy_(beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up)


def _masked_moe_activation(  # noqa: PLR0913 (vLLM's)
    output: torch.Tensor,
    input: torch.Tensor,
    valid_token_counts: torch.Tensor,
    name: str,
    limit: float,
    alpha: float,
    beta: float,
    situ_beta: float,
    situ_linear_beta: float,
) -> None:
    """Apply the activation to the first rows of each expert. Other rows are not written."""
    functions: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
        "silu": _make_gated_activation(F.silu),
        "silu_with_clamp": lambda o, x: _silu_and_mul_with_clamp(o, x, limit, 1.0, 0.0),
        "gelu": _make_gated_activation(F.gelu),
        "gelu_tanh": _make_gated_activation(lambda gate: F.gelu(gate, approximate="tanh")),
        "situ": lambda o, x: _situ_and_mul(o, x, situ_beta, situ_linear_beta),
        "swigluoai": lambda o, x: _swigluoai_and_mul(o, x, alpha, limit),
        "swigluoai_uninterleave": lambda o, x: _silu_and_mul_with_clamp(o, x, limit, alpha, beta),
        "swiglustep": _make_swiglustep(limit),
        "silu_no_mul": lambda o, x: o.copy_(F.silu(x.float())),
        "gelu_no_mul": lambda o, x: o.copy_(F.gelu(x.float())),
        "gelu_tanh_no_mul": lambda o, x: o.copy_(F.gelu(x.float(), approximate="tanh")),
        "relu2_no_mul": lambda o, x: o.copy_(x.float().relu().square()),
    }
    rows_out, rows_in = (t if t.dim() == 3 else t[None] for t in (output, input))
    for expert, count in enumerate(valid_token_counts.tolist()):
        functions[name](rows_out[expert, :count], rows_in[expert, :count])


def _make_swiglustep(limit: float) -> Callable[[torch.Tensor, torch.Tensor], None]:
    def write(output: torch.Tensor, input: torch.Tensor) -> None:
        gate, up = input.float().chunk(2, dim=-1)
        output.copy_(F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit))

    return write


# ------------------------------------------------------------------------------ quantization


def _write_fp8(output: torch.Tensor, input: torch.Tensor, scale: torch.Tensor) -> None:
    output.copy_((input.float() / scale).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn))


def _static_scaled_fp8_quant(
    output: torch.Tensor, input: torch.Tensor, scale: torch.Tensor, group_shape: object = None
) -> None:
    _write_fp8(output, input, scale)


def _dynamic_scaled_fp8_quant(
    output: torch.Tensor, input: torch.Tensor, scale: torch.Tensor
) -> None:
    if input.numel():  # amax is not defined without values
        scale.copy_(input.float().abs().amax() / _FP8_MAX)
        _write_fp8(output, input, scale)


def _dynamic_per_token_scaled_fp8_quant(
    output: torch.Tensor,
    input: torch.Tensor,
    scale: torch.Tensor,
    scale_ub: torch.Tensor | None = None,
) -> None:
    amax = input.float().abs().amax(dim=-1, keepdim=True)
    if scale_ub is not None:
        amax = amax.minimum(scale_ub)
    scale.copy_((amax / _FP8_MAX).clamp(min=_MIN_FP8_SCALE))
    _write_fp8(output, input, scale)


def _silu_and_mul_per_block_quant(
    output: torch.Tensor,
    input: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    scale_ub: torch.Tensor | None = None,
    is_scale_transposed: bool = False,
) -> None:
    """Write silu(gate) * up in fp8, with a scale for each group of a row.

    Groups must divide a row evenly, because vLLM allocates scales for whole groups only.
    """
    gate, up = input.float().chunk(2, dim=-1)
    groups = (F.silu(gate) * up).view(len(input), -1, group_size)
    scale = (groups.abs().amax(dim=-1) / _FP8_MAX).clamp(min=_MIN_FP8_SCALE)
    scales.copy_(scale)
    _write_fp8(output, groups.flatten(-2), scale.repeat_interleave(group_size, dim=-1))


def _static_scaled_int8_quant(
    output: torch.Tensor, input: torch.Tensor, scale: torch.Tensor, azp: torch.Tensor | None = None
) -> None:
    output.copy_((input.float() / scale).round().clamp(-_INT8_MAX - 1, _INT8_MAX).to(torch.int8))


# ----------------------------------------------------------------------------------- routing


def _moe_align_block_size(  # noqa: PLR0913 (vLLM's)
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    scatter_idx: torch.Tensor | None = None,
) -> None:
    """Sort pairs by expert, and pad the pairs of each expert to whole blocks. Skip invalid ids.

    expert_map: if given, maps ids to local experts. Pairs of remote experts are skipped.
    """
    ids = topk_ids.flatten().long()
    is_valid = (ids >= 0) & (ids < num_experts)
    if expert_map is not None:
        ids = torch.where(is_valid, expert_map.long()[ids.clamp(0, num_experts - 1)], -1)
    sorted_ids.fill_(ids.numel())
    expert_ids.zero_()
    start = 0
    for expert in range(num_experts):
        pairs = ((ids == expert) & is_valid).nonzero().flatten()
        end = start + -(-len(pairs) // block_size) * block_size
        sorted_ids[start : start + len(pairs)] = pairs.to(sorted_ids.dtype)
        expert_ids[start // block_size : end // block_size] = expert
        start = end
    num_tokens_post_pad.fill_(start)
    if scatter_idx is not None:
        pairs = torch.arange(ids.numel(), dtype=scatter_idx.dtype, device=ids.device)
        scatter_idx.copy_(torch.where((ids >= 0) & is_valid, pairs, -1)[:, None])


def _moe_sum(
    input: torch.Tensor,
    output: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> None:
    rows = input.float()
    if topk_ids is not None and expert_map is not None:
        is_local = expert_map.long()[topk_ids.long().clamp(min=0)] >= 0
        rows = torch.where((is_local & (topk_ids >= 0))[..., None], rows, 0.0)
    output.copy_(rows.sum(1))
