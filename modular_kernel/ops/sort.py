"""sort_pairs: assign a row to each pair, grouped by expert without padding, and list row tiles.

A pair is a token together with one of its K experts. A pair is skipped if its expert id is -1, or
if its expert is on another rank. Unlike vLLM's `moe_align_block_size`, this operation does not pad
the rows of an expert, so the block_m rows from the start of a tile may include rows of the next
expert.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from modular_kernel.ops.count import CHUNK, count_pairs, counts_spec, id_arguments, local_ids
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.tensors import DispatchedRouting
from modular_kernel.workspace import BufferSpec, Workspace

VALUES_PER_TILE = 3  # in a list of tiles: local expert, first row, end of the expert's rows
_TILES_PER_PROGRAM = 64  # tiles that a program writes


@dataclass(frozen=True)
class SortedPairs:
    """Rows of pairs that are sorted by expert, and the tiles of these rows.

    A tile is up to block_m adjacent rows of one expert. A program of a grouped GEMM handles the
    rows of one tile.

    row_of_pair_TK: (T, K) int32, the row of each pair, or -1 if the pair is skipped. Rows are
        grouped by expert without gaps. Pairs of an expert keep their order.
    token_of_row: (T * K,) int32, the token of the pair in each row. Values past the last row are
        undefined.
    tiles: (3 * max_tiles + 1,) int32: three arrays of max_tiles values, followed by the number of
        tiles. The arrays hold the local expert of each tile, its first row, and the end of the
        expert's rows. Values past the number of tiles are undefined.
    starts: (e + 1,) int32, the first row of each expert, followed by the number of rows.
    """

    row_of_pair_TK: torch.Tensor
    token_of_row: torch.Tensor
    tiles: torch.Tensor
    starts: torch.Tensor

    @property
    def max_tiles(self) -> int:
        """The maximum number of tiles."""
        return self.tiles.numel() // 3


def max_tile_count(num_pairs: int, block_m: int, num_local: int) -> int:
    """Return the maximum number of tiles.

    num_pairs: number of pairs.
    block_m: maximum number of rows of a tile.
    num_local: number of local experts.
    """
    return min(num_pairs, num_local + num_pairs // block_m)


def sort_specs(tokens: int, top_k: int, block_m: int, num_local: int) -> Mapping[str, BufferSpec]:
    """Return the specs of the workspace buffers of `sort_pairs`."""
    num_pairs = tokens * top_k
    tiles = max_tile_count(num_pairs, block_m, num_local)
    return {
        "sort_rows": BufferSpec((tokens, top_k), torch.int32),
        "sort_tokens": BufferSpec((num_pairs,), torch.int32),
        "sort_tiles": BufferSpec((3 * tiles + 1,), torch.int32),
        "sort_starts": BufferSpec((num_local + 1,), torch.int32),
        "sort_scratch": counts_spec(num_pairs, num_local),
    }


def sort_pairs(
    routing: DispatchedRouting, *, block_m: int, num_local: int, workspace: Workspace
) -> SortedPairs:
    """Sort the pairs of `routing` into workspace buffers that `sort_specs` declares.

    routing: a routing with T > 0.
    block_m: maximum number of rows of a tile, a power of two.
    num_local: number of local experts.
    """
    tokens, top_k = routing.topk_ids_TK.shape
    specs = sort_specs(tokens, top_k, block_m, num_local)
    buffers = [workspace.take(name, spec.shape) for name, spec in specs.items()]
    rows, token_of_row, tiles, starts, scratch = buffers
    result = SortedPairs(rows, token_of_row, tiles, starts)
    if not use_triton(rows):
        sort_pairs_ref(routing, block_m, num_local, out=result)
        return result
    from modular_kernel.ops.kernels.sort import sort_place_kernel

    counts = count_pairs(routing, num_local, scratch=scratch)
    tile_programs = -(-result.max_tiles // _TILES_PER_PROGRAM)
    launch(
        sort_place_kernel,
        (counts.num_chunks + tile_programs,),
        chunk_prefix_ptr=counts.prefix,
        bucket_totals_ptr=counts.totals,
        row_of_pair_ptr=rows,
        token_of_row_ptr=token_of_row,
        tiles_ptr=tiles,
        expert_starts_ptr=starts,
        num_pairs=rows.numel(),
        num_chunks=counts.num_chunks,
        max_tiles=result.max_tiles,
        top_k=top_k,
        CHUNK_SIZE=CHUNK,
        NUM_BINS=counts.bins,
        BLOCK_M=block_m,
        TILES_PER_PROGRAM=_TILES_PER_PROGRAM,
        **id_arguments(routing, num_local),
    )
    return result


def sort_pairs_ref(
    routing: DispatchedRouting, block_m: int, num_local: int, *, out: SortedPairs
) -> None:
    """Torch reference of `sort_pairs`."""
    ids = local_ids(routing, num_local).flatten()
    rows = out.row_of_pair_TK.view(-1)
    rows.fill_(-1)
    tile_list: list[tuple[int, int, int]] = []
    start = 0
    for expert in range(num_local):
        pairs = (ids == expert).nonzero()[:, 0]
        end = start + pairs.numel()
        rows[pairs] = torch.arange(start, end, dtype=torch.int32, device=rows.device)
        out.token_of_row[start:end] = pairs // out.row_of_pair_TK.shape[1]
        out.starts[expert] = start
        tile_list += [(expert, row, end) for row in range(start, end, block_m)]
        start = end
    out.starts[-1] = start
    tile_arrays = out.tiles[: 3 * out.max_tiles].view(3, -1)
    tile_arrays[:, : len(tile_list)] = (
        torch.tensor(tile_list, dtype=torch.int32, device="cpu").reshape(-1, 3).T
    )
    out.tiles[-1] = len(tile_list)
