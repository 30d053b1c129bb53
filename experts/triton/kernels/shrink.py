"""LoRA shrink kernels: u = A x, launched before each GEMM of a layer with adapters.

`experts.triton.adapters` launches them and describes the two steps of LoRA. A pair is a token
together with one of its top_k experts: pair p belongs to token p // top_k. An adapter is identified
by its slot in the stacked matrices A (slots, num_experts, lora_a_rows, K). lora_a_rows is the rank,
or twice the rank if gate and up have separate matrices A.

There is one kernel per row order: `shrink_few_kernel` for a few pairs, `shrink_pairs_kernel` for
pairs in blocks of one expert (`modular_kernel.ops.align`), `shrink_segments_kernel` for rows sorted
by expert (`modular_kernel.ops.sort`), and `shrink_batched_kernel` for the batched format
(num_experts, capacity, K).

The rows of a tile can have different adapters. SLOT_PROGRAMS programs divide the slots of a tile
among themselves: slot s belongs to program s % SLOT_PROGRAMS.
"""

import triton
import triton.language as tl

from experts.triton.kernels.adapters import SLOT_END, load_slots, shrink_tile
from modular_kernel.ops.kernels.ids import load_local_ids
from modular_kernel.ops.kernels.pdl import pdl_wait


@triton.jit
def _select_slots(adapter_slots, slot_program, SLOT_PROGRAMS: tl.constexpr):
    """Replace the slots that belong to other programs of the tile by SLOT_END.

    slot_program: the index of this program among the SLOT_PROGRAMS programs of the tile.
    """
    return tl.where(adapter_slots % SLOT_PROGRAMS == slot_program, adapter_slots, SLOT_END)


@triton.jit
def tile_rows(tiles_ptr, tokens_ptr, tile, max_tiles, BLOCK_M: tl.constexpr):
    """Return (expert, rows, row mask, tokens) of a tile of expert-sorted rows.

    tiles_ptr: `modular_kernel.ops.sort.SortedPairs.tiles`. Three arrays of max_tiles values have,
        for each tile, the expert, the first row, and the end of the expert's rows. The number of
        tiles follows.
    tokens_ptr: the token of each sorted row.
    """
    expert = tl.load(tiles_ptr + tile).to(tl.int64)
    row = tl.load(tiles_ptr + max_tiles + tile) + tl.arange(0, BLOCK_M)
    row_mask = row < tl.load(tiles_ptr + 2 * max_tiles + tile)
    return expert, row, row_mask, tl.load(tokens_ptr + row, mask=row_mask, other=0)


@triton.jit
def _store_u(lora_u_ptr, u, row, adapter_slots, u_column, lora_a_rows):
    """Round and store u for rows with an adapter.

    lora_u_ptr: output (rows, lora_a_rows), contiguous.
    u: float32 (BLOCK_M, BLOCK_RANK).
    row: (BLOCK_M,) int64, the output row of each row of the tile.
    u_column: (BLOCK_RANK,), the output columns. Columns from lora_a_rows on are not stored.
    """
    u_ptrs = lora_u_ptr + row[:, None] * lora_a_rows + u_column[None, :]
    mask = (adapter_slots < SLOT_END)[:, None] & (u_column < lora_a_rows)[None, :]
    tl.store(u_ptrs, u.to(lora_u_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_pairs"])
def shrink_few_kernel(
    x_ptr, adapter_slots_ptr, lora_a_ptr, lora_u_ptr, topk_ids_ptr, expert_map_ptr,
    num_pairs, num_adapter_slots, lora_a_rows, size_k, num_experts, num_local_experts,
    stride_xm, stride_xk, stride_lora_a_slot, stride_lora_a_expert, stride_lora_a_rank,
    TOP_K: tl.constexpr, PAIRS_PER_X_ROW: tl.constexpr, HAS_EXPERT_MAP: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_K: tl.constexpr, USE_PDL: tl.constexpr = False,
):  # fmt: skip
    """u[p] = A[slot of p's token, expert of p] @ x[p // PAIRS_PER_X_ROW], without tensor cores.

    For a few pairs. Grid: (num_pairs, blocks of BLOCK_RANK columns of u). A program computes one
    block for one pair.

    x_ptr: (num_pairs / PAIRS_PER_X_ROW, K). A row is a token (PAIRS_PER_X_ROW = TOP_K) or a pair
        (PAIRS_PER_X_ROW = 1).
    adapter_slots_ptr: (num_pairs / TOP_K,) int32, the adapter slot of each token.
    lora_a_ptr: A (slots, num_experts, lora_a_rows, K), with a contiguous last dimension.
    lora_u_ptr: output (num_pairs, lora_a_rows), contiguous. Rows of pairs whose expert is not on
        this rank, and of tokens without an adapter, are not written.
    topk_ids_ptr, expert_map_ptr, num_experts, num_local_experts, HAS_EXPERT_MAP: see
        `load_local_ids`.
    size_k: K.
    USE_PDL: whether the launch uses programmatic dependent launch (`pdl_wait`).
    """
    pdl_wait(USE_PDL)
    pair = tl.program_id(0)
    local_expert, _ = load_local_ids(
        topk_ids_ptr,
        pair,
        pair < num_pairs,
        expert_map_ptr,
        num_experts,
        num_local_experts,
        HAS_EXPERT_MAP,
    )
    slot = tl.load(adapter_slots_ptr + pair // TOP_K).to(tl.int64)
    if (local_expert < 0) | (slot < 0) | (slot >= num_adapter_slots):
        return
    u_column = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    rank_mask = u_column < lora_a_rows
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (pair // PAIRS_PER_X_ROW).to(tl.int64) * stride_xm + k * stride_xk
    lora_a_ptr += slot * stride_lora_a_slot + local_expert.to(tl.int64) * stride_lora_a_expert
    lora_a_ptrs = lora_a_ptr + u_column.to(tl.int64)[:, None] * stride_lora_a_rank + k[None, :]
    total = tl.zeros((BLOCK_RANK, BLOCK_K), tl.float32)
    for start in range(0, size_k, BLOCK_K):
        in_bounds = start + k < size_k
        x = tl.load(x_ptrs + start * stride_xk, mask=in_bounds, other=0.0)
        lora_a = tl.load(
            lora_a_ptrs + start, mask=rank_mask[:, None] & in_bounds[None, :], other=0.0
        )
        total += lora_a.to(tl.float32) * x.to(tl.float32)[None, :]
    u = tl.sum(total, axis=1)
    u_ptrs = lora_u_ptr + pair.to(tl.int64) * lora_a_rows + u_column
    tl.store(u_ptrs, u.to(lora_u_ptr.dtype.element_ty), mask=rank_mask)


@triton.jit(do_not_specialize=["num_pairs"])
def shrink_pairs_kernel(
    x_ptr, adapter_slots_ptr, lora_a_ptr, lora_u_ptr, sorted_token_ids_ptr, expert_ids_ptr,
    num_tokens_post_padded_ptr,
    num_pairs, num_adapter_slots, lora_a_rows, size_k,
    stride_xm, stride_xk, stride_lora_a_slot, stride_lora_a_expert, stride_lora_a_rank,
    TOP_K: tl.constexpr, PAIRS_PER_X_ROW: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    SLOT_PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """u[p] = A[slot of p's token, expert of p] @ x[p // PAIRS_PER_X_ROW] for aligned pairs p.

    Grid: (blocks of pairs, blocks of BLOCK_RANK columns of u, SLOT_PROGRAMS). A program computes
        BLOCK_M pairs by BLOCK_RANK columns of u, for its share of the slots.

    x_ptr: (num_pairs / PAIRS_PER_X_ROW, K). A row is a token (PAIRS_PER_X_ROW = TOP_K) or a pair
        (PAIRS_PER_X_ROW = 1).
    adapter_slots_ptr: (num_pairs / TOP_K,) int32, the adapter slot of each token.
    lora_a_ptr: A (slots, num_experts, lora_a_rows, K), with a contiguous last dimension.
    lora_u_ptr: output (num_pairs, lora_a_rows), contiguous. Rows of skipped pairs and of tokens
        without an adapter are not written.
    sorted_token_ids_ptr, expert_ids_ptr, num_tokens_post_padded_ptr: the blocks of pairs, as in
        vLLM's moe_align_block_size (`modular_kernel.ops.align.AlignedPairs`).
    size_k: K.
    """
    pid_m = tl.program_id(0)
    if pid_m * BLOCK_M >= tl.load(num_tokens_post_padded_ptr):
        return
    expert = tl.load(expert_ids_ptr + pid_m).to(tl.int64)
    if expert < 0:
        return
    pairs = tl.load(sorted_token_ids_ptr + pid_m * BLOCK_M + tl.arange(0, BLOCK_M))
    adapter_slots = load_slots(
        adapter_slots_ptr, pairs // TOP_K, pairs < num_pairs, num_adapter_slots
    )
    adapter_slots = _select_slots(adapter_slots, tl.program_id(2), SLOT_PROGRAMS)
    u_column = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    rank_mask = u_column < lora_a_rows
    x_row = (pairs // PAIRS_PER_X_ROW).to(tl.int64)
    u = shrink_tile(
        x_ptr + x_row[:, None] * stride_xm, adapter_slots,
        lora_a_ptr + expert * stride_lora_a_expert, u_column, rank_mask,
        size_k, stride_xk, stride_lora_a_slot, stride_lora_a_rank, INPUT_PRECISION, BLOCK_M,
        BLOCK_RANK, BLOCK_K,
    )  # fmt: skip
    _store_u(lora_u_ptr, u, pairs.to(tl.int64), adapter_slots, u_column, lora_a_rows)


@triton.jit(do_not_specialize=["max_tiles"])
def shrink_segments_kernel(
    x_ptr, adapter_slots_ptr, tokens_ptr, lora_a_ptr, lora_u_ptr, tiles_ptr,
    max_tiles, num_adapter_slots, lora_a_rows, size_k,
    stride_xm, stride_xk, stride_lora_a_slot, stride_lora_a_expert, stride_lora_a_rank,
    GATHER_TOKENS: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    SLOT_PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """u[r] = A[slot of r's token, expert of r] @ x[r] for rows r that are sorted by expert.

    If GATHER_TOKENS, x[r] is instead the row of x for r's token.

    Grid: (max_tiles, blocks of BLOCK_RANK columns of u, SLOT_PROGRAMS). A program computes a tile
        of at most BLOCK_M rows by BLOCK_RANK columns of u, for its share of the slots.

    x_ptr: (rows, K), or (num_tokens, K) if GATHER_TOKENS.
    adapter_slots_ptr: (num_tokens,) int32, the adapter slot of each token.
    tokens_ptr: (rows,) int32, the token of each row.
    lora_a_ptr: A (slots, num_experts, lora_a_rows, K), with a contiguous last dimension.
    lora_u_ptr: output (rows, lora_a_rows), contiguous. Rows without an adapter are not written.
    tiles_ptr: the tiles; see `tile_rows`.
    size_k: K.
    """
    pid_m = tl.program_id(0)
    if pid_m >= tl.load(tiles_ptr + 3 * max_tiles):
        return
    expert, row, row_mask, tokens = tile_rows(tiles_ptr, tokens_ptr, pid_m, max_tiles, BLOCK_M)
    adapter_slots = _select_slots(
        load_slots(adapter_slots_ptr, tokens, row_mask, num_adapter_slots),
        tl.program_id(2),
        SLOT_PROGRAMS,
    )
    u_column = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    rank_mask = u_column < lora_a_rows
    x_row = (tokens if GATHER_TOKENS else row).to(tl.int64)
    u = shrink_tile(
        x_ptr + x_row[:, None] * stride_xm, adapter_slots,
        lora_a_ptr + expert * stride_lora_a_expert, u_column, rank_mask,
        size_k, stride_xk, stride_lora_a_slot, stride_lora_a_rank, INPUT_PRECISION, BLOCK_M,
        BLOCK_RANK, BLOCK_K,
    )  # fmt: skip
    _store_u(lora_u_ptr, u, row.to(tl.int64), adapter_slots, u_column, lora_a_rows)


@triton.jit
def shrink_batched_kernel(
    x_ptr, adapter_slots_ptr, lora_a_ptr, lora_u_ptr, counts_ptr,
    capacity, num_adapter_slots, lora_a_rows, size_k, stride_lora_a_slot, stride_lora_a_expert,
    stride_lora_a_rank,
    INPUT_PRECISION: tl.constexpr,
    SLOT_PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """u[i, c] = A[slot of row c, i] @ x[i, c] for the first counts[i] rows c of each expert i.

    Grid: (row blocks of an expert * SLOT_PROGRAMS, blocks of BLOCK_RANK columns of u, num_experts).
        A program computes BLOCK_M rows by BLOCK_RANK columns of u, for its share of the slots.

    x_ptr: (num_experts, capacity, K), contiguous.
    adapter_slots_ptr: (num_experts, capacity) int32, contiguous, the adapter slot of each row.
    lora_a_ptr: A (slots, num_experts, lora_a_rows, K), with a contiguous last dimension.
    lora_u_ptr: output (num_experts, capacity, lora_a_rows), contiguous. Rows without an adapter are
        not written.
    counts_ptr: (num_experts,) int32, the number of rows of each expert.
    size_k: K.
    """
    expert = tl.program_id(2).to(tl.int64)
    count = tl.load(counts_ptr + expert)
    block = tl.program_id(0) // SLOT_PROGRAMS
    if block * BLOCK_M >= count:
        return
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    flat_row = expert * capacity + row.to(tl.int64)
    adapter_slots = load_slots(adapter_slots_ptr, flat_row, row < count, num_adapter_slots)
    adapter_slots = _select_slots(adapter_slots, tl.program_id(0) % SLOT_PROGRAMS, SLOT_PROGRAMS)
    u_column = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    rank_mask = u_column < lora_a_rows
    u = shrink_tile(
        x_ptr + flat_row[:, None] * size_k, adapter_slots,
        lora_a_ptr + expert * stride_lora_a_expert, u_column, rank_mask,
        size_k, 1, stride_lora_a_slot, stride_lora_a_rank, INPUT_PRECISION, BLOCK_M, BLOCK_RANK,
        BLOCK_K,
    )  # fmt: skip
    _store_u(lora_u_ptr, u, flat_row, adapter_slots, u_column, lora_a_rows)
