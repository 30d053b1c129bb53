"""tile_maps: what the ragged product is told of the rows of experts, for each size of its tiles."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from modular_kernel.ops.count import next_power_of_2
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.workspace import BufferSpec, Workspace

SIZES = (16, 32, 64, 128)  # rows of a tile that the library may choose
_TILES_AND_EXPERTS = 8192  # comparisons of a program


@dataclass(frozen=True)
class TileMaps:
    """Of each size of tiles.

    counts: (e,) int32 rows of each expert. ends: (sizes, e + 1) int32, tiles before each expert,
    and last all of them. maps: (sizes, tiles) int32: of each program tile << 16 | expert, or -1.
    """

    counts: torch.Tensor
    ends: torch.Tensor
    maps: torch.Tensor


def most_tiles(rows: int, experts: int) -> int:
    """Return the most tiles of the smallest size that so many rows make: the library's bound."""
    if rows <= experts:
        return rows
    return -(-(rows - experts + 1) // SIZES[0]) + experts - 1


def tile_specs(rows: int, experts: int) -> Mapping[str, BufferSpec]:
    """Return the buffers that `tile_maps` takes."""
    return {
        "tile_counts": BufferSpec((experts,), torch.int32),
        "tile_ends": BufferSpec((len(SIZES), experts + 1), torch.int32),
        "tile_maps": BufferSpec((len(SIZES), most_tiles(rows, experts)), torch.int32),
    }


def tile_maps(starts: torch.Tensor, rows: int, workspace: Workspace) -> TileMaps:
    """Name the tiles of `rows` rows, of which expert i has those from starts[i], (e + 1,) int32."""
    experts = starts.numel() - 1
    specs = tile_specs(rows, experts)
    made = TileMaps(*(workspace.take(name, spec.shape) for name, spec in specs.items()))
    write_tile_maps(starts, made)
    return made


def write_tile_maps(starts: torch.Tensor, made: TileMaps) -> None:
    """Write every element of `made`: one launch, or the twin."""
    if not use_triton(starts):
        tile_maps_ref(starts, made)
        return
    from experts.triton_kernels.kernels.tile_maps import tile_maps_kernel

    experts, most = made.counts.numel(), made.maps.shape[1]
    block_e = next_power_of_2(experts)
    block_t = max(1, min(next_power_of_2(most), _TILES_AND_EXPERTS // block_e))
    launch(
        tile_maps_kernel,
        (-(-most // block_t), len(SIZES)),
        starts_ptr=starts,
        counts_ptr=made.counts,
        ends_ptr=made.ends,
        maps_ptr=made.maps,
        num_local=experts,
        most_tiles=most,
        LEAST=SIZES[0],
        BLOCK_T=block_t,
        BLOCK_E=block_e,
    )


def tile_maps_ref(starts: torch.Tensor, made: TileMaps) -> None:
    """Torch twin of `write_tile_maps`: one size after the other."""
    counts = starts.diff()
    made.counts.copy_(counts)
    program = torch.arange(made.maps.shape[1], device=starts.device)
    for size, rows in enumerate(SIZES):
        ends = torch.nn.functional.pad((-(-counts.long() // rows)).cumsum(0), (1, 0))
        made.ends[size] = ends
        expert = torch.searchsorted(ends, program, right=True) - 1
        named = ((program - ends[expert.clamp(max=len(counts))]) << 16) | expert
        made.maps[size] = torch.where(program < ends[-1], named, -1)
