"""Tile schedules for the ragged matmul of triton_kernels, one for each of its tile sizes.

A schedule assigns a tile of rows of one expert to each program of the matmul.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from modular_kernel.ops.count import next_power_of_2
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.workspace import BufferSpec, Workspace

TILE_ROWS = (16, 32, 64, 128)  # tile sizes in rows, of which the library chooses one
_MAX_COMPARISONS = 8192  # maximum number of (tile, expert) comparisons per program


@dataclass(frozen=True)
class TileMaps:
    """Tile schedules for all tile sizes in TILE_ROWS.

    counts: (e,) int32, the number of rows of each expert.
    ends: (sizes, e + 1) int32, the number of tiles before each expert, then the total.
    maps: (sizes, tiles) int32, tile << 16 | expert for each program, where `tile` is the index of
        the tile within its expert. Unused entries are -1.
    """

    counts: torch.Tensor
    ends: torch.Tensor
    maps: torch.Tensor


def max_num_tiles(num_rows: int, num_experts: int) -> int:
    """Return the library's upper bound on the number of tiles of the smallest size."""
    if num_rows <= num_experts:
        return num_rows
    return -(-(num_rows - num_experts + 1) // TILE_ROWS[0]) + num_experts - 1


def tile_specs(num_rows: int, num_experts: int) -> Mapping[str, BufferSpec]:
    """Return the workspace buffers of `schedule_tiles`."""
    sizes, max_tiles = len(TILE_ROWS), max_num_tiles(num_rows, num_experts)
    return {
        "tile_counts": BufferSpec((num_experts,), torch.int32),
        "tile_ends": BufferSpec((sizes, num_experts + 1), torch.int32),
        "tile_maps": BufferSpec((sizes, max_tiles), torch.int32),
    }


def schedule_tiles(starts: torch.Tensor, num_rows: int, workspace: Workspace) -> TileMaps:
    """Return the tile schedules of expert-sorted rows.

    starts: (e + 1,) int32, the first row of each expert, then the number of rows in use.
    num_rows: the maximum number of rows.
    workspace: has the buffers of `tile_specs`.
    """
    num_experts = starts.numel() - 1
    specs = tile_specs(num_rows, num_experts)
    maps = TileMaps(*(workspace.take(name, spec.shape) for name, spec in specs.items()))
    write_tile_maps(starts, maps)
    return maps


def write_tile_maps(starts: torch.Tensor, maps: TileMaps) -> None:
    """Write every element of `maps`."""
    if not use_triton(starts):
        tile_maps_ref(starts, maps)
        return
    from experts.triton_kernels.kernels.tile_maps import tile_maps_kernel

    num_experts, max_tiles = maps.counts.numel(), maps.maps.shape[1]
    block_e = next_power_of_2(num_experts)
    block_t = max(1, min(next_power_of_2(max_tiles), _MAX_COMPARISONS // block_e))
    launch(
        tile_maps_kernel,
        (-(-max_tiles // block_t), len(TILE_ROWS)),
        starts_ptr=starts,
        counts_ptr=maps.counts,
        ends_ptr=maps.ends,
        maps_ptr=maps.maps,
        num_local=num_experts,
        max_tiles=max_tiles,
        MIN_TILE_ROWS=TILE_ROWS[0],
        BLOCK_T=block_t,
        BLOCK_E=block_e,
    )


def tile_maps_ref(starts: torch.Tensor, maps: TileMaps) -> None:
    """PyTorch reference for `write_tile_maps`."""
    counts = starts.diff()
    maps.counts.copy_(counts)
    program = torch.arange(maps.maps.shape[1], device=starts.device)
    for index, tile_rows in enumerate(TILE_ROWS):
        ends = torch.nn.functional.pad((-(-counts.long() // tile_rows)).cumsum(0), (1, 0))
        maps.ends[index] = ends
        expert = torch.searchsorted(ends, program, right=True) - 1
        entry = ((program - ends[expert.clamp(max=len(counts))]) << 16) | expert
        maps.maps[index] = torch.where(program < ends[-1], entry, -1)
