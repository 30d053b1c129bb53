"""mark_nan_rows: a NaN of x stays one where a library's activation turns it into a number."""

import torch

from modular_kernel.ops.count import next_power_of_2
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.runtime import use_triton

_MOST_COLUMNS = 1024  # read at a time


def mark_nan_rows(x_TH: torch.Tensor, *, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> None:
    """Make a token's router weights NaN where its row of x has a NaN.

    x_TH: any strides. ids_TK: int32, -1 for a skipped pair, whose weight stays as it is.
    weights_TK: float32, changed in place. Both contiguous.
    """
    if not use_triton(ids_TK):
        mark_nan_rows_ref(x_TH, ids_TK=ids_TK, weights_TK=weights_TK)
        return
    from experts.flashinfer.kernels.nan_rows import nan_rows_kernel

    tokens, hidden = x_TH.shape
    top_k = ids_TK.shape[1]
    launch(
        nan_rows_kernel,
        (tokens,),
        x_ptr=x_TH,
        ids_ptr=ids_TK,
        weights_ptr=weights_TK,
        hidden=hidden,
        stride_row=x_TH.stride(0),
        stride_column=x_TH.stride(1),
        TOP_K=top_k,
        BLOCK_K=next_power_of_2(top_k),
        BLOCK_H=min(_MOST_COLUMNS, next_power_of_2(hidden)),
    )


def mark_nan_rows_ref(
    x_TH: torch.Tensor, *, ids_TK: torch.Tensor, weights_TK: torch.Tensor
) -> None:
    """Torch twin of `mark_nan_rows`."""
    marked = x_TH.isnan().any(1, keepdim=True) & (ids_TK >= 0)
    weights_TK.masked_fill_(marked, torch.nan)
