"""Device functions of the single path for 4-bit weights: rows of words times one vector each.

A warp is a part: it adds up rows of one expert over a share of the depth, PART_K of it in a step.
Tensor cores do it, because a word leaves its register as operands of theirs in few instructions,
and the eight columns that a product has are used to tell groups apart: column c of the right
operand holds the c-th group of the step and zeros elsewhere. So a step needs one product, however
small its groups, and scales meet the sums in the order in which they lie in memory.
"""

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

_COLUMNS: tl.constexpr = tl.constexpr(8)  # of the narrowest product


@triton.jit
def word_sums(
    w_ptrs, w_rows, x_ptrs, scale_ptrs, zero_ptrs, shift, row_mask, live, first_k, depth, stride_xk,
    E2M1: tl.constexpr, HAS_ZERO: tl.constexpr, EVEN_K: tl.constexpr, GROUP_K: tl.constexpr,
    STEP_K: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, PART_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """float32 (PARTS, ROWS): scaled sums of every part.

    w_ptrs: int32 (PARTS, 1, 1), an expert's first word, and w_rows (1, ROWS, 1) words further that
    of a row (32 bits, cheaper to add to a pointer than 64); x_ptrs (PARTS, 1, 1), its vector;
    scale_ptrs, zero_ptrs, shift, row_mask: (PARTS or 1, ROWS, 1); live, first_k: (PARTS, 1, 1),
    whether a part has anything to add, and where its first step begins. GROUP_K divides PART_K into
    eight groups at most, or PART_K divides it.
    """
    dtype: tl.constexpr = x_ptrs.dtype.element_ty
    LACK: tl.constexpr = lacking(E2M1, dtype)
    FROM_ZERO: tl.constexpr = counts_from_zero(E2M1, dtype)
    GROUPS: tl.constexpr = PART_K // GROUP_K if GROUP_K < PART_K else 1
    column = tl.arange(0, _COLUMNS)[None, None, :, None]
    eight = first_of_eight(PART_K)
    if GROUPS > 1:
        x_mask = live[:, :, :, None] & (eight // GROUP_K == column)
        group = tl.arange(0, _COLUMNS)[None, None, :]
    else:
        x_mask = live[:, :, :, None] & (column == 0) & (eight >= 0)
        group = tl.zeros((1, 1, 1), tl.int32)
    mask = row_mask & live
    word = tl.arange(0, PART_K // 8)[None, None, :]
    w_offsets = w_rows + first_k // 8 + word
    x_ptrs = x_ptrs[:, :, :, None]
    x_offsets = (first_k[:, :, :, None] + word_order_offsets(PART_K)) * stride_xk
    # Scales and zero points are loaded a step ahead: nothing else hides their way from memory.
    scale_mask = mask & (group < GROUPS) & (first_k + group * GROUP_K < depth)
    offsets = first_k // GROUP_K + group
    scale = load_scale(scale_ptrs + offsets, scale_mask, E2M1, LACK)
    zero = load_zero(zero_ptrs + offsets, shift, scale_mask, HAS_ZERO, FROM_ZERO)
    total = tl.zeros((PARTS, ROWS, _COLUMNS), tl.float32)
    for start in tl.range(0, depth, STEP_K, num_stages=STAGES):
        w_mask = mask & (word >= 0)
        x_inside = x_mask
        if not EVEN_K:
            left = depth - start - first_k
            w_mask = mask & (word // 4 * 32 < left)
            x_inside = x_mask & (eight < left[:, :, :, None])
        words = tl.load(w_ptrs + w_offsets, mask=w_mask, other=0)
        x = tl.load(x_ptrs + x_offsets, mask=x_inside, other=0.0)
        k = start + STEP_K + first_k
        scale_mask = mask & (group < GROUPS) & (k + group * GROUP_K < depth)
        offsets = k // GROUP_K + group
        next_scale = load_scale(scale_ptrs + offsets, scale_mask, E2M1, LACK)
        next_zero = load_zero(zero_ptrs + offsets, shift, scale_mask, HAS_ZERO, FROM_ZERO)
        x = boosted(rows_in_word_order(x, PARTS, _COLUMNS, PART_K), E2M1, PART_K)
        part = multiply_words(words, x, zero, E2M1, HAS_ZERO, PARTS, ROWS, PART_K, _COLUMNS)
        total += part * scale
        scale = next_scale
        zero = next_zero
        w_ptrs += STEP_K // 8
        x_ptrs += STEP_K * stride_xk
    return tl.sum(total, axis=2)


@triton.jit
def fetch_ahead(
    w_ptrs, w_rows, row_mask, live, first_k, depth,
    STEP_K: tl.constexpr, PART_K: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """Send for the first steps' weights of every part, to the L2 cache, and wait for nothing.

    w_ptrs, w_rows, row_mask, live, first_k: as in word_sums. LINES: of 128 bytes, most of a row.
    """
    PER_STEP: tl.constexpr = (PART_K + 255) // 256
    line = tl.arange(0, LINES)[None, None, :]
    k = first_k + line // PER_STEP * STEP_K + line % PER_STEP * 256
    inside = row_mask & live & (k < depth)
    # What is masked out falls on an expert's beginning.
    address = (w_ptrs + tl.where(inside, w_rows + k // 8, 0)).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
