"""`permute_and_quantize_kernel`: quantize each token and write it to the rows of its pairs.

A pair is a token together with one of its top_k experts: pair p belongs to token p // top_k. A
group is group_size adjacent columns of a row, which share a scale.
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.extrema import max_nan, maximum_nan
from modular_kernel.ops.kernels.pdl import pdl_wait
from modular_kernel.ops.kernels.quantize import quantized_values, scale_of


@triton.jit
def _load_tile(x_row_ptr, columns, in_group, num_columns):
    """Load float32 values of a tile (BLOCK_GROUPS, BLOCK_COLUMNS), 0 where masked."""
    return tl.load(x_row_ptr + columns, mask=in_group & (columns < num_columns), other=0.0).to(
        tl.float32
    )


@triton.jit
def permute_and_quantize_kernel(
    x_ptr, row_of_pair_ptr, router_weights_ptr, q_ptr, scale_ptr,
    num_columns, group_size, num_groups, stride_x, stride_scale,
    TOP_K: tl.constexpr, HAS_ROUTER_WEIGHTS: tl.constexpr, DYNAMIC_SCALE: tl.constexpr,
    QMAX: tl.constexpr, ROUND_TO_INT: tl.constexpr, MIN_SCALE: tl.constexpr,
    GROUP_FITS_BLOCK: tl.constexpr, SCALES_GROUP_MAJOR: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, BLOCK_TOP_K: tl.constexpr, USE_PDL: tl.constexpr = False,
):  # fmt: skip
    """q[row of (t, k)] = weight of (t, k) * x[t] / scale.

    Grid: (num_tokens * ceil(num_groups / BLOCK_GROUPS),). A program handles BLOCK_GROUPS groups of
        columns of a token. The programs of a token are adjacent.

    x_ptr: (num_tokens, num_columns); rows are stride_x apart.
    row_of_pair_ptr: (num_tokens, TOP_K) int32, the row of each pair; -1 skips it.
    router_weights_ptr: (num_tokens, TOP_K) float32, factors of x. Used if HAS_ROUTER_WEIGHTS.
    q_ptr: output (rows, num_columns), contiguous.
    scale_ptr: the scales; see DYNAMIC_SCALE.
    DYNAMIC_SCALE: whether to compute and store a scale per row and group. Otherwise, the scale at
        scale_ptr is used.
    QMAX: the largest value of the quantized type.
    ROUND_TO_INT: whether the quantized type is an integer.
    MIN_SCALE: the minimum scale.
    GROUP_FITS_BLOCK: whether a group has at most BLOCK_COLUMNS columns, so that x is read once.
        Otherwise, BLOCK_GROUPS is 1, and x is read again for each pair.
    SCALES_GROUP_MAJOR: whether the scales are stored as (num_groups, rows) instead of
        (rows, num_groups). Rows of this array are stride_scale apart.
    BLOCK_TOP_K: a power of two >= TOP_K.
    USE_PDL: whether the launch uses programmatic dependent launch (`pdl_wait`).
    """
    pdl_wait(USE_PDL)
    group_blocks = tl.cdiv(num_groups, BLOCK_GROUPS)
    token = (tl.program_id(0) // group_blocks).to(tl.int64)
    groups = tl.program_id(0) % group_blocks * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    offsets = tl.arange(0, BLOCK_COLUMNS)
    columns = groups[:, None] * group_size + offsets[None, :]
    x_row_ptr = x_ptr + token * stride_x
    in_group = (offsets < group_size)[None, :]
    value = _load_tile(x_row_ptr, columns, in_group, num_columns)
    k_indices = tl.arange(0, BLOCK_TOP_K)
    # Load all rows at once and concurrently with the values, so that no pair waits for its row.
    rows = tl.load(row_of_pair_ptr + token * TOP_K + k_indices, mask=k_indices < TOP_K, other=-1)
    amax = max_nan(tl.abs(value), 1)
    if DYNAMIC_SCALE and not GROUP_FITS_BLOCK:
        for start in range(BLOCK_COLUMNS, group_size, BLOCK_COLUMNS):
            in_group = (start + offsets < group_size)[None, :]
            next_value = _load_tile(x_row_ptr, columns + start, in_group, num_columns)
            amax = maximum_nan(amax, max_nan(tl.abs(next_value), 1))
    scale = tl.zeros((BLOCK_GROUPS,), tl.float32)
    if not DYNAMIC_SCALE:
        scale += tl.load(scale_ptr)
    for k_index in tl.static_range(TOP_K):
        # NaN-free: integer operands
        row = tl.max(tl.where(k_indices == k_index, rows, -1), axis=0).to(tl.int64)
        weight = 1.0
        if HAS_ROUTER_WEIGHTS:
            weight = tl.load(router_weights_ptr + token * TOP_K + k_index)
        if DYNAMIC_SCALE:
            # Rounding is monotonic, so the largest value has the largest product.
            scale = scale_of(amax * tl.abs(weight), QMAX, MIN_SCALE)
            if SCALES_GROUP_MAJOR:
                scale_ptrs = scale_ptr + groups.to(tl.int64) * stride_scale + row
            else:
                scale_ptrs = scale_ptr + row * stride_scale + groups
            tl.store(scale_ptrs, scale, mask=(groups < num_groups) & (row >= 0))
        inverse = tl.div_rn(1.0, scale)[:, None]
        q_row_ptr = q_ptr + row * num_columns
        for start in range(0, BLOCK_COLUMNS if GROUP_FITS_BLOCK else group_size, BLOCK_COLUMNS):
            in_group = (start + offsets < group_size)[None, :]
            pair_value = value
            if not GROUP_FITS_BLOCK:
                pair_value = _load_tile(x_row_ptr, columns + start, in_group, num_columns)
            q = quantized_values(
                pair_value * weight, inverse, QMAX, ROUND_TO_INT, not DYNAMIC_SCALE
            )
            mask = in_group & (columns + start < num_columns) & (row >= 0)
            tl.store(q_row_ptr + columns + start, q.to(q_ptr.dtype.element_ty), mask=mask)
