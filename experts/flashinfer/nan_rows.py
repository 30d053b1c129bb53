"""mark_nan_rows: propagate NaN from x to the output if the activation clamps NaN to a number."""

import torch

from modular_kernel.ops.count import next_power_of_2
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.runtime import use_triton

_MAX_BLOCK_H = 1024  # maximum columns per load


def mark_nan_rows(x_TH: torch.Tensor, *, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> None:
    """Set the router weights of a token to NaN if its row of x contains a NaN.

    x_TH: (T, H), with any strides.
    ids_TK: (T, K) int32, contiguous. -1 marks a skipped pair, whose weight is not changed.
    weights_TK: (T, K) float32, contiguous. Modified in place.
    """
    if not use_triton(ids_TK):
        mark_nan_rows_ref(x_TH, ids_TK=ids_TK, weights_TK=weights_TK)
        return
    from experts.flashinfer.kernels.nan_rows import nan_rows_kernel

    num_tokens, hidden = x_TH.shape
    top_k = ids_TK.shape[1]
    launch(
        nan_rows_kernel,
        (num_tokens,),
        x_ptr=x_TH,
        ids_ptr=ids_TK,
        weights_ptr=weights_TK,
        hidden=hidden,
        stride_row=x_TH.stride(0),
        stride_column=x_TH.stride(1),
        TOP_K=top_k,
        BLOCK_K=next_power_of_2(top_k),
        BLOCK_H=min(_MAX_BLOCK_H, next_power_of_2(hidden)),
    )


def mark_nan_rows_ref(
    x_TH: torch.Tensor, *, ids_TK: torch.Tensor, weights_TK: torch.Tensor
) -> None:
    """PyTorch reference for `mark_nan_rows`."""
    mask = x_TH.isnan().any(1, keepdim=True) & (ids_TK >= 0)
    weights_TK.masked_fill_(mask, torch.nan)
