"""permute_and_quantize: quantize each token, and write it to the row of each of its pairs.

A pair is a token together with one of its K experts. The result is that of `quantize_rows` followed
by `permute_tokens`.
"""

import torch

from modular_kernel.errors import ConfigurationError, ShapeError
from modular_kernel.ops.count import next_power_of_2
from modular_kernel.ops.permute import permute_tokens_ref
from modular_kernel.ops.quantize import QuantizedRows, check_quantized, quantize_values
from modular_kernel.quant.quantized_weights import MIN_SCALE, QMAX
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.pdl import pdl_arguments
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.spec.quantization import QuantScheme

# A group is a set of columns of a row that share a quantization scale.
_COLUMNS_PER_PROGRAM = 2048  # unless a group has more columns
# Maximum number of columns that a program holds at once. A longer group is read again for each
# pair.
_MAX_BLOCK_C = 8192


def permute_and_quantize(
    x_TH: torch.Tensor,
    row_of_pair_TK: torch.Tensor,
    weights_TK: torch.Tensor | None,
    scheme: QuantScheme,
    *,
    out: QuantizedRows,
) -> None:
    """Quantize x_TH like `quantize_rows`, and permute the result to rows of `out`, in one launch.

    x_TH: (T, H), with contiguous rows.
    row_of_pair_TK: (T, K) int32; -1 skips the pair.
    weights_TK: (T, K) float32, factors of x that are applied in float32 before quantization; or
        None. Pairs that share a row must have equal weights.
    scheme: quantization scheme, with scales that are static, per token or per group.
    out: output, R rows with scales in either layout of `QuantizedRows`. Rows without a pair are not
        changed.

    Raises ConfigurationError for a dynamic per-tensor scale, because it depends on all values.
    """
    if scheme.activation_granularity == "none" or (
        scheme.activation_granularity == "tensor" and not scheme.static
    ):
        need = "quantized activations with a static scale, or a scale per token or group"
        raise ConfigurationError("permute_and_quantize", got=str(scheme), need=need)
    tokens, hidden = x_TH.shape
    check_quantized(out.q_RK.shape[0], hidden, scheme, out)
    if out.along_rows and len(out.scale) != 1:
        raise ShapeError("segments of scales", got=len(out.scale), need=1)
    if tokens == 0:
        return
    if not use_triton(x_TH):
        permute_and_quantize_ref(x_TH, row_of_pair_TK, weights_TK, scheme, out=out)
        return
    from modular_kernel.ops.kernels.permute_quantize import permute_and_quantize_kernel

    is_dynamic = not scheme.static
    group = min(hidden, scheme.group[-1] if scheme.group else hidden)
    block = min(next_power_of_2(group), _MAX_BLOCK_C)
    groups = -(-hidden // group)
    groups_per_program = min(next_power_of_2(groups), max(1, _COLUMNS_PER_PROGRAM // block))
    launch(
        permute_and_quantize_kernel,
        (tokens * -(-groups // groups_per_program),),
        x_ptr=x_TH,
        row_of_pair_ptr=row_of_pair_TK,
        router_weights_ptr=row_of_pair_TK if weights_TK is None else weights_TK,
        q_ptr=out.q_RK,
        scale_ptr=out.scale,
        num_columns=hidden,
        group_size=group,
        num_groups=groups,
        stride_x=x_TH.stride(0),
        stride_scale=out.scale.shape[-1],
        TOP_K=row_of_pair_TK.shape[1],
        HAS_ROUTER_WEIGHTS=weights_TK is not None,
        DYNAMIC_SCALE=is_dynamic,
        QMAX=QMAX[scheme.activation],
        ROUND_TO_INT=scheme.activation == "int8",
        MIN_SCALE=MIN_SCALE,
        GROUP_FITS_BLOCK=group <= block,
        SCALES_GROUP_MAJOR=out.along_rows,
        BLOCK_GROUPS=groups_per_program,
        BLOCK_COLUMNS=block,
        BLOCK_TOP_K=next_power_of_2(row_of_pair_TK.shape[1]),
        num_warps=8 if block > _COLUMNS_PER_PROGRAM else 4,
        **pdl_arguments(),
    )


def permute_and_quantize_ref(
    x_TH: torch.Tensor,
    row_of_pair_TK: torch.Tensor,
    weights_TK: torch.Tensor | None,
    scheme: QuantScheme,
    *,
    out: QuantizedRows,
) -> None:
    """Torch reference of `permute_and_quantize`."""
    token, k = (row_of_pair_TK >= 0).nonzero(as_tuple=True)
    values = x_TH[token].float()
    if weights_TK is not None:
        values = values * weights_TK[token, k, None]
    q, scale = quantize_values(values, scheme, out.scale if scheme.static else None)
    row_of_pair = row_of_pair_TK[token, k][:, None]
    # Copy bytes, because torch cannot assign float8 values by index.
    bytes_RH = out.q_RK.view(torch.uint8)
    permute_tokens_ref(q.view(torch.uint8), row_of_pair, None, rows_RH=bytes_RH)
    if not scheme.static:
        permute_tokens_ref(scale, row_of_pair, None, rows_RH=out.scale_of_rows)
