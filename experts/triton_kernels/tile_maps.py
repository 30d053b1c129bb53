"""tile_maps: the tile schedules of the ragged matmul, one for each tile size."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from modular_kernel.ops.count import next_power_of_2
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.workspace import BufferSpec, Workspace

SIZES = (16, 32, 64, 128)  # rows per tile; the library chooses one of them
_COMPARISONS = 8192  # maximum (tile, expert) comparisons per program


@dataclass(frozen=True)
class TileMaps:
    """Tile schedules for all sizes in SIZES.

    counts: (e,) int32, the rows of each expert.
    ends: (sizes, e + 1) int32, the number of tiles before each expert, then the total.
    maps: (sizes, tiles) int32, tile << 16 | expert for each program, where `tile` counts within the
        expert; -1 for unused entries.
    """

    counts: torch.Tensor
    ends: torch.Tensor
    maps: torch.Tensor


def max_num_tiles(rows: int, experts: int) -> int:
    """Return the library's upper bound on the number of tiles of the smallest size."""
    if rows <= experts:
        return rows
    return -(-(rows - experts + 1) // SIZES[0]) + experts - 1


def tile_specs(rows: int, experts: int) -> Mapping[str, BufferSpec]:
    """Return the buffers that `tile_maps` takes."""
    return {
        "tile_counts": BufferSpec((experts,), torch.int32),
        "tile_ends": BufferSpec((len(SIZES), experts + 1), torch.int32),
        "tile_maps": BufferSpec((len(SIZES), max_num_tiles(rows, experts)), torch.int32),
    }


def tile_maps(starts: torch.Tensor, rows: int, workspace: Workspace) -> TileMaps:
    """Schedule the tiles of `rows` rows, given the first row of each expert, (e + 1,) int32."""
    experts = starts.numel() - 1
    specs = tile_specs(rows, experts)
    maps = TileMaps(*(workspace.take(name, spec.shape) for name, spec in specs.items()))
    write_tile_maps(starts, maps)
    return maps


def write_tile_maps(starts: torch.Tensor, maps: TileMaps) -> None:
    """Write every element of `maps` in one launch, or with the torch reference."""
    if not use_triton(starts):
        tile_maps_ref(starts, maps)
        return
    from experts.triton_kernels.kernels.tile_maps import tile_maps_kernel

    experts, max_tiles = maps.counts.numel(), maps.maps.shape[1]
    block_e = next_power_of_2(experts)
    block_t = max(1, min(next_power_of_2(max_tiles), _COMPARISONS // block_e))
    launch(
        tile_maps_kernel,
        (-(-max_tiles // block_t), len(SIZES)),
        starts_ptr=starts,
        counts_ptr=maps.counts,
        ends_ptr=maps.ends,
        maps_ptr=maps.maps,
        num_local=experts,
        max_tiles=max_tiles,
        MIN_TILE_ROWS=SIZES[0],
        BLOCK_T=block_t,
        BLOCK_E=block_e,
    )


def tile_maps_ref(starts: torch.Tensor, maps: TileMaps) -> None:
    """Torch reference of `write_tile_maps`: one size at a time."""
    counts = starts.diff()
    maps.counts.copy_(counts)
    program = torch.arange(maps.maps.shape[1], device=starts.device)
    for size, rows in enumerate(SIZES):
        ends = torch.nn.functional.pad((-(-counts.long() // rows)).cumsum(0), (1, 0))
        maps.ends[size] = ends
        expert = torch.searchsorted(ends, program, right=True) - 1
        entry = ((program - ends[expert.clamp(max=len(counts))]) << 16) | expert
        maps.maps[size] = torch.where(program < ends[-1], entry, -1)
