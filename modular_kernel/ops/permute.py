"""permute_tokens: copy each token to the output row of each of its pairs.

A pair is a token together with one of its K experts. The table row_of_pair, which `assign_rows` or
`sort_pairs` computes, assigns an output row to each pair.
"""

import torch

from modular_kernel.ops.count import next_power_of_2
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.runtime import use_triton

_MAX_BLOCK_H = 1024


def choose_hidden_block_size(hidden: int) -> int:
    """Return the number of columns that one program of the row-copy kernels handles."""
    return min(_MAX_BLOCK_H, next_power_of_2(hidden))


def permute_tokens(
    x_TH: torch.Tensor,
    row_of_pair_TK: torch.Tensor,
    weights_TK: torch.Tensor | None,
    *,
    rows_RH: torch.Tensor,
    scale_TG: torch.Tensor | None = None,
    scale_rows_RG: torch.Tensor | None = None,
) -> None:
    """Set rows_RH[row_of_pair_TK[t, k]] = x_TH[t].

    If weights are given, multiply by weights_TK[t, k] in float32, and round once to the dtype of
    x_TH. If scales are given, copy them in the same launch.

    x_TH: (T, H), with contiguous rows.
    row_of_pair_TK: (T, K) int32; -1 skips the pair.
    weights_TK: (T, K) float32, or None.
    rows_RH: output, (R, H), contiguous. Rows without a pair are not changed.
    scale_TG: (T, G) float32, contiguous, the scales of x_TH; or None.
    scale_rows_RG: output, (R, G) float32 with any strides, the scales of rows_RH; or None.
    """
    tokens, hidden = x_TH.shape
    if tokens == 0:
        return
    if not use_triton(x_TH):
        permute_tokens_ref(x_TH, row_of_pair_TK, weights_TK, rows_RH=rows_RH)
        if scale_TG is not None and scale_rows_RG is not None:
            permute_tokens_ref(scale_TG, row_of_pair_TK, None, rows_RH=scale_rows_RG)
        return
    from modular_kernel.ops.kernels.rows import permute_tokens_kernel

    block = choose_hidden_block_size(hidden)
    scale_rows = rows_RH if scale_rows_RG is None else scale_rows_RG
    groups = 0 if scale_TG is None else scale_TG.shape[1]
    launch(
        permute_tokens_kernel,
        (tokens * -(-hidden // block),),
        x_ptr=x_TH,
        scale_ptr=x_TH if scale_TG is None else scale_TG,
        row_of_pair_ptr=row_of_pair_TK,
        router_weights_ptr=row_of_pair_TK if weights_TK is None else weights_TK,
        rows_ptr=rows_RH,
        scale_rows_ptr=scale_rows,
        hidden_size=hidden,
        num_groups=groups,
        stride_x=x_TH.stride(0),
        stride_scale_row=scale_rows.stride(0),
        stride_scale_group=scale_rows.stride(1),
        TOP_K=row_of_pair_TK.shape[1],
        HAS_ROUTER_WEIGHTS=weights_TK is not None,
        HAS_SCALE=scale_TG is not None,
        BLOCK_HIDDEN=block,
        BLOCK_GROUPS=next_power_of_2(groups),
    )


def permute_tokens_ref(
    x_TH: torch.Tensor,
    row_of_pair_TK: torch.Tensor,
    weights_TK: torch.Tensor | None,
    *,
    rows_RH: torch.Tensor,
) -> None:
    """Torch reference of `permute_tokens`, without scales."""
    token, k = (row_of_pair_TK >= 0).nonzero(as_tuple=True)
    values = x_TH[token]
    if weights_TK is not None:
        values = (values.float() * weights_TK[token, k, None]).to(x_TH.dtype)
    rows_RH[row_of_pair_TK[token, k].long()] = values
