"""align_rows: sort pairs by expert; the rows of each expert start at a multiple of the tile."""

from collections.abc import Mapping

import torch

from modular_kernel.ops.count import CHUNK, count_pairs, counts_spec, id_arguments, local_ids
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.pdl import pdl_arguments
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.tensors import DispatchedRouting
from modular_kernel.workspace import BufferSpec, Workspace


def max_aligned_rows(pairs: int, experts: int, tile: int) -> int:
    """Return an upper bound on the rows of `pairs` pairs if experts are padded to whole tiles."""
    tiles = min(pairs, experts + pairs // tile)
    return tiles * tile


def aligned_specs(tokens: int, top_k: int, experts: int) -> Mapping[str, BufferSpec]:
    """Return the workspace buffers that `align_rows` takes."""
    return {
        "aligned_rows": BufferSpec((tokens, top_k), torch.int32),
        "aligned_ends": BufferSpec((experts,), torch.int32),
        "aligned_scratch": counts_spec(tokens * top_k, experts),
    }


def align_rows(
    routing: DispatchedRouting, tile: int, *, num_local: int, workspace: Workspace
) -> tuple[torch.Tensor, torch.Tensor]:
    """Assign a row to each pair, sorted stably by expert; return rows and the end of each expert.

    The rows are (T, K) int32, -1 where a pair is skipped. The ends are (e,) int32, one past the
    last row of each expert. Expert i starts at the end of expert i - 1, rounded up to a multiple of
    `tile`. On a GPU there are three launches: count, scan, place.
    """
    tokens, top_k = routing.topk_ids_TK.shape
    specs = aligned_specs(tokens, top_k, num_local)
    rows_TK, ends, scratch = (workspace.take(name, spec.shape) for name, spec in specs.items())
    if not use_triton(rows_TK):
        align_rows_ref(routing, tile, rows_TK=rows_TK, ends=ends)
        return rows_TK, ends
    from experts.deepgemm.kernels.align_rows import align_rows_kernel

    counts = count_pairs(routing, num_local, scratch=scratch)
    launch(
        align_rows_kernel,
        (counts.num_chunks,),
        prefix_ptr=counts.prefix,
        totals_ptr=counts.totals,
        rows_ptr=rows_TK,
        ends_ptr=ends,
        numel=rows_TK.numel(),
        num_chunks=counts.num_chunks,
        CHUNK=CHUNK,
        BINS=counts.bins,
        TILE=tile,
        **id_arguments(routing, num_local),
        **pdl_arguments(),
    )
    return rows_TK, ends


def align_rows_ref(
    routing: DispatchedRouting, tile: int, *, rows_TK: torch.Tensor, ends: torch.Tensor
) -> None:
    """Torch reference of `align_rows`: one expert at a time."""
    ids, rows, start = local_ids(routing, len(ends)).flatten(), rows_TK.view(-1), 0
    rows.fill_(-1)
    for expert in range(len(ends)):
        pairs = (ids == expert).nonzero()[:, 0]
        end = start + len(pairs)
        rows[pairs] = torch.arange(start, end, dtype=torch.int32, device=rows.device)
        ends[expert] = end
        start = -(-end // tile) * tile
