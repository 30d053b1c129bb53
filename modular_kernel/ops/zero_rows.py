"""zero_rows: zero received rows that no expert computes, such as the rows of a sink.

A sink is an expert number without an expert. Libraries that cannot skip a pair send its token to a
sink (`modular_kernel.ops.expert_slots`). The sender adds the rows that a sink returns to its
output, so these rows must be zero.
"""

import torch

from modular_kernel.errors import ShapeError
from modular_kernel.ops.count import next_power_of_2
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.pdl import pdl_arguments
from modular_kernel.replay.launch.runtime import use_triton

_MAX_PROGRAMS_PER_SEGMENT = 32  # few, because most segments have few rows to zero
_MAX_BLOCK_H = 4096  # maximum number of columns per write


def zero_rows(x_SCH: torch.Tensor, counts_S: torch.Tensor) -> None:
    """Zero the first counts_S[s] rows of each segment s of x_SCH, in one launch on a GPU.

    x_SCH: (S, C, H), contiguous.
    counts_S: (S,) int32, at most C, contiguous.

    Raises ShapeError for other shapes or strides.
    """
    segments, capacity, hidden = x_SCH.shape
    if tuple(counts_S.shape) != (segments,):
        raise ShapeError("counts of rows", got=tuple(counts_S.shape), need=(segments,))
    if not (x_SCH.is_contiguous() and counts_S.is_contiguous()):
        got = f"strides {x_SCH.stride()} and {counts_S.stride()}"
        raise ShapeError("rows to zero", got=got, need="contiguous rows and contiguous counts")
    if x_SCH.numel() == 0:
        return
    if not use_triton(x_SCH):
        zero_rows_ref(x_SCH, counts_S)
        return
    from modular_kernel.ops.kernels.zero_rows import zero_rows_kernel

    programs_per_segment = min(capacity, _MAX_PROGRAMS_PER_SEGMENT)
    launch(
        zero_rows_kernel,
        (segments, programs_per_segment),
        x_ptr=x_SCH,
        counts_ptr=counts_S,
        capacity=capacity,
        hidden_size=hidden,
        programs_per_segment=programs_per_segment,
        BLOCK_HIDDEN=min(next_power_of_2(hidden), _MAX_BLOCK_H),
        **pdl_arguments(),
    )


def zero_rows_ref(x_SCH: torch.Tensor, counts_S: torch.Tensor) -> None:
    """Torch reference of `zero_rows`."""
    row_C = torch.arange(x_SCH.shape[1], device=x_SCH.device)
    x_SCH.masked_fill_((row_C < counts_S[:, None])[..., None], 0)
