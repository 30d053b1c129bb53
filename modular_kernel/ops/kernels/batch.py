"""Kernel that assigns rows of the batched layout to pairs."""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.count import is_repeat, rank_in_chunk
from modular_kernel.ops.kernels.ids import load_local_ids


@triton.jit
def assign_rows_kernel(
    ids_ptr, map_ptr, prefix_ptr, row_of_pair_ptr,
    numel, num_experts, num_local, num_chunks, capacity,
    TOP_K: tl.constexpr, HAS_MAP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """row_of_pair[p] = expert * capacity + position among the expert's tokens; -1 if p is skipped.

    A program handles one chunk of pairs. A repeat, that is a later pair of the same token and
    expert, has the row of the first one. No pair of that expert is counted between them, so the row
    is the number of counted pairs before the repeat, minus one.
    """
    chunk = tl.program_id(0)
    pairs = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = pairs < numel
    local, _ = load_local_ids(ids_ptr, pairs, mask, map_ptr, num_experts, num_local, HAS_MAP)
    repeat = is_repeat(ids_ptr, pairs, mask, local, map_ptr, num_experts, num_local, TOP_K, HAS_MAP)
    key = local + 1
    preceding = tl.load(prefix_ptr + key * num_chunks + chunk, mask=mask, other=0)
    position = preceding + rank_in_chunk(key, mask & ~repeat, CHUNK) - repeat.to(tl.int32)
    row = tl.where(local >= 0, local * capacity + position, -1)
    tl.store(row_of_pair_ptr + pairs, row, mask=mask)
