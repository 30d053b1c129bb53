"""align_rows: sort pairs by expert, and start each expert's rows at a multiple of the tile size."""

from collections.abc import Mapping

import torch

from modular_kernel.ops.count import CHUNK, count_pairs, counts_spec, id_arguments, local_ids
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.pdl import pdl_arguments
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.tensors import DispatchedRouting
from modular_kernel.workspace import BufferSpec, Workspace


def max_aligned_rows(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """Return an upper bound on the number of rows if each expert is padded to whole tiles."""
    max_tiles = min(num_pairs, num_experts + num_pairs // tile_rows)
    return max_tiles * tile_rows


def aligned_specs(num_tokens: int, top_k: int, num_experts: int) -> Mapping[str, BufferSpec]:
    """Return the workspace buffers of `align_rows`."""
    return {
        "aligned_rows": BufferSpec((num_tokens, top_k), torch.int32),
        "aligned_ends": BufferSpec((num_experts,), torch.int32),
        "aligned_scratch": counts_spec(num_tokens * top_k, num_experts),
    }


def align_rows(
    routing: DispatchedRouting, tile_rows: int, *, num_local: int, workspace: Workspace
) -> tuple[torch.Tensor, torch.Tensor]:
    """Assign a row to each pair, in a stable sort by expert.

    tile_rows: rows per tile. Expert i starts at the end of expert i - 1, rounded up to a multiple
        of tile_rows.
    num_local: number of local experts, e.
    workspace: has the buffers of `aligned_specs`.

    Return (rows_TK, ends). rows_TK is the row of each pair, (T, K) int32, -1 for a skipped pair.
    ends is one past the last row of each expert, (e,) int32.
    """
    num_tokens, top_k = routing.topk_ids_TK.shape
    specs = aligned_specs(num_tokens, top_k, num_local)
    rows_TK, ends, scratch = (workspace.take(name, spec.shape) for name, spec in specs.items())
    if not use_triton(rows_TK):
        align_rows_ref(routing, tile_rows, rows_TK=rows_TK, ends=ends)
        return rows_TK, ends
    from experts.deepgemm.kernels.align_rows import align_rows_kernel

    counts = count_pairs(routing, num_local, scratch=scratch)
    launch(
        align_rows_kernel,
        (counts.num_chunks,),
        chunk_prefix_ptr=counts.prefix,
        bucket_totals_ptr=counts.totals,
        rows_ptr=rows_TK,
        ends_ptr=ends,
        num_pairs=rows_TK.numel(),
        num_chunks=counts.num_chunks,
        CHUNK_SIZE=CHUNK,
        NUM_BINS=counts.bins,
        TILE=tile_rows,
        **id_arguments(routing, num_local),
        **pdl_arguments(),
    )
    return rows_TK, ends


def align_rows_ref(
    routing: DispatchedRouting, tile_rows: int, *, rows_TK: torch.Tensor, ends: torch.Tensor
) -> None:
    """PyTorch reference for `align_rows`."""
    ids, rows, start = local_ids(routing, len(ends)).flatten(), rows_TK.view(-1), 0
    rows.fill_(-1)
    for expert in range(len(ends)):
        pairs = (ids == expert).nonzero()[:, 0]
        end = start + len(pairs)
        rows[pairs] = torch.arange(start, end, dtype=torch.int32, device=rows.device)
        ends[expert] = end
        start = -(-end // tile_rows) * tile_rows
