"""Quantise a token and write it to the rows of its pairs."""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.quantise import quantised_values, scale_of


@triton.jit
def _load_tile(x_row_ptr, columns, inside, num_columns):
    """Float32 values of a tile, 0 where there are none."""
    return tl.load(x_row_ptr + columns, mask=inside & (columns < num_columns), other=0.0).to(
        tl.float32
    )


@triton.jit
def permute_and_quantise_kernel(
    x_ptr, row_of_pair_ptr, weights_ptr, q_ptr, scale_ptr,
    num_columns, group, num_groups, stride_x,
    TOP_K: tl.constexpr, HAS_WEIGHTS: tl.constexpr, COMPUTED: tl.constexpr,
    LARGEST: tl.constexpr, ROUND: tl.constexpr, MIN_SCALE: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """q[row of (t, k)] = (weight of (t, k) *) x[t] / scale. Grid (tokens, ceil(groups / BLOCK_G)).

    A program takes BLOCK_G groups of `group` columns and reads them once, unless one is longer
    than BLOCK_C (not WHOLE; BLOCK_G is 1 then). COMPUTED: each row and group has a scale of its
    own, stored; otherwise the one at scale_ptr is read.
    """
    token = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    places = tl.arange(0, BLOCK_C)
    columns = groups[:, None] * group + places[None, :]
    x_row_ptr = x_ptr + token * stride_x
    inside = (places < group)[None, :]
    value = _load_tile(x_row_ptr, columns, inside, num_columns)
    largest = tl.max(tl.abs(value), axis=1)
    if COMPUTED and not WHOLE:
        for start in range(BLOCK_C, group, BLOCK_C):
            inside = (start + places < group)[None, :]
            more = _load_tile(x_row_ptr, columns + start, inside, num_columns)
            largest = tl.maximum(largest, tl.max(tl.abs(more), axis=1))
    scale = tl.zeros((BLOCK_G,), tl.float32)
    if not COMPUTED:
        scale += tl.load(scale_ptr)
    for slot in range(TOP_K):
        pair = token * TOP_K + slot
        row = tl.load(row_of_pair_ptr + pair).to(tl.int64)
        weight = 1.0
        if HAS_WEIGHTS:
            weight = tl.load(weights_ptr + pair)
        if COMPUTED:
            # Rounding keeps order: the largest product is that of the largest value.
            scale = scale_of(largest * tl.abs(weight), LARGEST, MIN_SCALE)
            scale_ptrs = scale_ptr + row * num_groups + groups
            tl.store(scale_ptrs, scale, mask=(groups < num_groups) & (row >= 0))
        inverse = tl.div_rn(1.0, scale)[:, None]
        q_row_ptr = q_ptr + row * num_columns
        for start in range(0, BLOCK_C if WHOLE else group, BLOCK_C):
            inside = (start + places < group)[None, :]
            moved = value
            if not WHOLE:
                moved = _load_tile(x_row_ptr, columns + start, inside, num_columns)
            q = quantised_values(moved * weight, inverse, LARGEST, ROUND).to(q_ptr.dtype.element_ty)
            mask = inside & (columns + start < num_columns) & (row >= 0)
            tl.store(q_row_ptr + columns + start, q, mask=mask)
