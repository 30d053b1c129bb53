"""assign_rows: assign a row of the batched layout to each pair.

A pair is a token together with one of its K experts. The batched layout (e, C, H) has C rows for
each of the e local experts. If an expert has fewer tokens, its last rows are unused.
"""

import torch

from modular_kernel.ops.count import CHUNK, count_pairs, counts_spec, id_arguments, local_ids
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.tensors import DispatchedRouting
from modular_kernel.workspace import BufferSpec


def assign_rows_scratch(tokens: int, top_k: int, num_local: int) -> BufferSpec:
    """Return the spec of the scratch buffer of `assign_rows`, for `num_local` local experts."""
    return counts_spec(tokens * top_k, num_local)


def assign_rows(
    routing: DispatchedRouting,
    *,
    capacity: int,
    row_of_pair_TK: torch.Tensor,
    counts_e: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """Assign row expert * capacity + i to the pairs of the i-th token of each expert.

    Pairs of a token with the same expert share a row.

    capacity: number of rows of each expert. T is always sufficient.
    row_of_pair_TK: output, (T, K) int32, the row of each pair, or -1 if the pair is skipped.
    counts_e: output, (e,) int32, number of rows of each expert.
    scratch: buffer that `assign_rows_scratch` declares.
    """
    num_local = counts_e.numel()
    if row_of_pair_TK.numel() == 0:
        counts_e.zero_()
        return
    if not use_triton(row_of_pair_TK):
        assign_rows_ref(routing, capacity, row_of_pair_TK, counts_e)
        return
    from modular_kernel.ops.kernels.batch import assign_rows_kernel

    counts = count_pairs(routing, num_local, scratch=scratch, dedupe=True, counts_e=counts_e)
    launch(
        assign_rows_kernel,
        (counts.num_chunks,),
        chunk_prefix_ptr=counts.prefix,
        row_of_pair_ptr=row_of_pair_TK,
        num_pairs=row_of_pair_TK.numel(),
        num_chunks=counts.num_chunks,
        capacity=capacity,
        TOP_K=row_of_pair_TK.shape[1],
        CHUNK_SIZE=CHUNK,
        **id_arguments(routing, num_local),
    )


def assign_rows_ref(
    routing: DispatchedRouting,
    capacity: int,
    row_of_pair_TK: torch.Tensor,
    counts_e: torch.Tensor,
) -> None:
    """Torch reference of `assign_rows`."""
    num_local = counts_e.numel()
    ids_TK = local_ids(routing, num_local)
    # has_row[t, i] is 1 if token t has a row at expert i. The position of the row is the number of
    # earlier tokens with a row at this expert.
    has_row = torch.zeros(ids_TK.shape[0], num_local + 1, dtype=torch.int64, device=ids_TK.device)
    has_row.scatter_(1, torch.where(ids_TK < 0, num_local, ids_TK), 1)
    has_row = has_row[:, :num_local]
    position = has_row.cumsum(0) - has_row
    local = ids_TK.clamp(min=0)
    rows = local * capacity + position.gather(1, local)
    row_of_pair_TK.copy_(torch.where(ids_TK < 0, -1, rows))
    counts_e.copy_(has_row.sum(0))
