"""aligned_rows: rows in the order of experts, each expert from a multiple of 128 on."""

import torch

from modular_kernel.ops.count import next_power_of_2
from modular_kernel.ops.launch.launch import launch
from modular_kernel.ops.launch.runtime import use_triton
from modular_kernel.ops.sort import Sorted

_PAIRS_AND_EXPERTS = 8192  # comparisons of a program


def most_aligned(pairs: int, experts: int, tile: int) -> int:
    """Return the most rows that so many pairs take, whole tiles."""
    tiles = min(pairs, experts + pairs // tile)
    return tiles * tile


def aligned_rows(order: Sorted, tile: int, *, rows_TK: torch.Tensor, ends: torch.Tensor) -> None:
    """Write the rows of pairs, -1 where one is skipped, and each expert's end.

    rows_TK: (T, K) int32. ends: (e,) int32; expert i begins at ends[i - 1] rounded up to `tile`.
    """
    if not use_triton(rows_TK):
        aligned_rows_ref(order, tile, rows_TK=rows_TK, ends=ends)
        return
    from experts.deepgemm.kernels.aligned_rows import aligned_rows_kernel

    numel, experts = rows_TK.numel(), ends.numel()
    block_e = next_power_of_2(experts)
    block_p = max(1, min(next_power_of_2(numel), _PAIRS_AND_EXPERTS // block_e))
    launch(
        aligned_rows_kernel,
        (-(-numel // block_p),),
        rows_ptr=order.row_of_pair_TK,
        starts_ptr=order.starts,
        out_ptr=rows_TK,
        ends_ptr=ends,
        numel=numel,
        num_local=experts,
        TILE=tile,
        BLOCK_P=block_p,
        BLOCK_E=block_e,
    )


def aligned_rows_ref(
    order: Sorted, tile: int, *, rows_TK: torch.Tensor, ends: torch.Tensor
) -> None:
    """Torch twin of `aligned_rows`."""
    starts = order.starts.long()
    counts = starts.diff()
    room = -(-counts // tile) * tile
    first = room.cumsum(0) - room
    ends.copy_(first + counts)
    rows = order.row_of_pair_TK.long()
    expert = torch.searchsorted(starts, rows.clamp(min=0), right=True).sub(1)
    shift = (first - starts[:-1])[expert.clamp(0, len(counts) - 1)]
    rows_TK.copy_(torch.where(rows < 0, -1, rows + shift))
