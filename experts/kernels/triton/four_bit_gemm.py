"""Grouped GEMM of a few rows an expert with 4-bit weights, for calls bound by reading those."""

import triton
import triton.language as tl

from experts.kernels.triton.four_bit import (
    boosted,
    counts_from_zero,
    first_of_eight,
    lacking,
    load_scale,
    load_zero,
    multiply_words,
    rows_in_word_order,
    word_order_offsets,
)
from experts.kernels.triton.tile import finish_tile, grouped_tile_order, store_rows
from modular_kernel.ops.kernels.overlap import after_predecessor


@triton.jit(do_not_specialize=["num_pairs", "num_m"])
def four_bit_gemm_kernel(
    a_ptr, b_ptr, b_scale_ptr, zero_ptr, bias_ptr, row_weights_ptr, out_ptr,
    sorted_ptr, expert_ids_ptr, num_post_ptr,
    num_pairs, columns, depth, up_row, num_m,
    stride_am, stride_be, stride_bn, stride_bse, stride_bsn, stride_bze, stride_bzn, stride_bias,
    A_TOP_K: tl.constexpr, ROW_STEP: tl.constexpr, WRITE_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROW_WEIGHTS: tl.constexpr, GATED: tl.constexpr,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    E2M1: tl.constexpr, HAS_ZERO: tl.constexpr, EVEN_K: tl.constexpr,
    GROUP_K: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """out[p, n] = act(a[p // A_TOP_K] @ b[expert of p, rows of n]^T) for every aligned pair p.

    As grouped_gemm_kernel, with weights in bytes, read as int32 words of eight. The weights
    are the left operand, so that they go from a word to the product within a thread. A step is
    PARTS * GROUPS products of DEPTH, a part being a warp's: each adds up a share of the depth.
    DEPTH divides GROUP_K, the depth of one scale; 32 divides the depth of the product.
    """
    after_predecessor(OVERLAP)
    num_n = tl.cdiv(columns, BLOCK_N)
    pid_m, pid_n = grouped_tile_order(tl.program_id(0), num_m, num_n, 1)
    if pid_m * BLOCK_M >= tl.load(num_post_ptr):
        return
    pairs = tl.load(sorted_ptr + pid_m * BLOCK_M + tl.arange(0, BLOCK_M))
    row_mask = pairs < num_pairs
    column = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < columns
    expert = tl.load(expert_ids_ptr + pid_m).to(tl.int64)
    if expert < 0:
        if WRITE_ZEROS:
            zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            store_rows(out_ptr, pairs, row_mask, column, column_mask, columns, zeros)
        return
    STEPS: tl.constexpr = PARTS * GROUPS
    PART_K: tl.constexpr = GROUPS * DEPTH
    STEP_K: tl.constexpr = PARTS * PART_K
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    LACK: tl.constexpr = lacking(E2M1, a_ptr.dtype.element_ty)
    FROM_ZERO: tl.constexpr = counts_from_zero(E2M1, a_ptr.dtype.element_ty)
    # Gate rows, then up rows.
    of_row = tl.arange(0, ROWS)
    of_column = pid_n * BLOCK_N + of_row % BLOCK_N
    row = (of_column * ROW_STEP + (of_row // BLOCK_N) * up_row)[None, :, None]
    inside_n = (of_column < columns)[None, :, None]
    step = tl.arange(0, STEPS)[:, None, None]
    step_k = (step % PARTS) * PART_K + (step // PARTS) * DEPTH
    words_ptr = b_ptr.to(tl.pointer_type(tl.int32)) + expert * (stride_be // 4)
    # A part's words stand side by side: pieces of 16 bytes would be fetched twice, by sectors.
    word = tl.arange(0, PARTS)[:, None, None] * (PART_K // 8)
    word += tl.arange(0, PART_K // 8)[None, None, :]
    # Of one expert: 32 bits are enough, and cheaper to add to a pointer than 64.
    words_offsets = row * (stride_bn // 4) + word
    a_row = (pairs // A_TOP_K).to(tl.int64)[None, None, :, None]
    a_k = step_k[:, :, :, None] + word_order_offsets(DEPTH)
    a_ptrs = a_ptr + a_row * stride_am + a_k
    a_mask = row_mask[None, None, :, None]
    scale_ptrs = b_scale_ptr + expert * stride_bse + row * stride_bsn
    zero_ptrs = zero_ptr + expert * stride_bze + (row // 2) * stride_bzn
    shift = (row % 2) * 4
    total = tl.zeros((PARTS, ROWS, BLOCK_M), tl.float32)
    # Scales and zero points are loaded a step ahead: nothing else hides their way from memory.
    group = step_k // GROUP_K
    mask = inside_n & (step_k < depth)
    scale = load_scale(scale_ptrs + group, mask, E2M1, LACK)
    zero = load_zero(zero_ptrs + group, shift, mask, HAS_ZERO, FROM_ZERO)
    for start in range(0, depth, STEP_K):
        words_mask = inside_n
        a_inside = a_mask
        if not EVEN_K:
            # A copy of 16 bytes holds 32 weights.
            words_mask = inside_n & (word // 4 * 32 < depth - start)
            a_inside = a_mask & (step_k[:, :, :, None] + first_of_eight(DEPTH) < depth - start)
        words = tl.load(words_ptr + words_offsets, mask=words_mask, other=0)
        a = tl.load(a_ptrs, mask=a_inside, other=0.0)
        group = (start + STEP_K + step_k) // GROUP_K
        mask = inside_n & (step_k < depth - start - STEP_K)
        next_scale = load_scale(scale_ptrs + group, mask, E2M1, LACK)
        next_zero = load_zero(zero_ptrs + group, shift, mask, HAS_ZERO, FROM_ZERO)
        groups = tl.reshape(words, (PARTS, ROWS, GROUPS, DEPTH // 8))
        words = tl.reshape(tl.permute(groups, (2, 0, 1, 3)), (STEPS, ROWS, DEPTH // 8))
        x = boosted(rows_in_word_order(a, STEPS, BLOCK_M, DEPTH), E2M1, DEPTH)
        part = multiply_words(words, x, zero, E2M1, HAS_ZERO, STEPS, ROWS, DEPTH, BLOCK_M)
        part *= scale
        if GROUPS > 1:
            part = tl.sum(tl.reshape(part, (GROUPS, PARTS, ROWS, BLOCK_M)), 0)
        total += part
        scale = next_scale
        zero = next_zero
        words_ptr += STEP_K // 8
        a_ptrs += STEP_K
    tile = tl.sum(total, 0)
    if GATED:
        sides = tl.permute(tl.reshape(tile, (2, BLOCK_N, BLOCK_M)), (2, 1, 0))
        gate_tile, up_tile = tl.split(sides)
    else:
        gate_tile = tl.trans(tile)
        up_tile = gate_tile
    row_weights = gate_tile
    if HAS_ROW_WEIGHTS:
        row_weights = tl.load(row_weights_ptr + pairs, mask=row_mask, other=0.0)
    result = finish_tile(
        gate_tile, up_tile, bias_ptr + expert * stride_bias, column * ROW_STEP, up_row, column_mask,
        row_weights, HAS_BIAS, HAS_ROW_WEIGHTS, GATED, KIND, ALPHA, LIMIT,
    )  # fmt: skip
    store_rows(out_ptr, pairs, row_mask, column, column_mask, columns, result)
