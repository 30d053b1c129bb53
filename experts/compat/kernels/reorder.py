"""Kernels that permute and activate the rows of a range of experts, with one scale per expert."""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.activation import activate
from modular_kernel.ops.kernels.extrema import clamp_nan


@triton.jit
def _apply_scale(value, scale_ptr, HAS_SCALES: tl.constexpr, QMAX: tl.constexpr):
    """Divide value by the scale if HAS_SCALES, and clamp it to [-QMAX, QMAX] unless QMAX is 0.

    1 / scale is rounded before the multiplication, as in torch.
    """
    if HAS_SCALES:
        value = value * tl.div_rn(1.0, tl.load(scale_ptr))
    if QMAX > 0:
        value = clamp_nan(value, -QMAX, QMAX)
    return value


@triton.jit
def pre_reorder_kernel(
    x_ptr, rows_ptr, src2dst_ptr, ids_ptr, scales_ptr, hidden, stride_x, start_expert, end_expert,
    TOP_K: tl.constexpr, HAS_SCALES: tl.constexpr, QMAX: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """rows[src2dst[t, k]] = x[t] / scale, for pairs of the experts start_expert to end_expert.

    Grid: (tokens, blocks of BLOCK_H columns). src2dst and ids are (tokens, TOP_K).

    HAS_SCALES: whether values are divided by scales[expert - start_expert].
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = columns < hidden
    value = tl.load(x_ptr + token * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    for k in range(TOP_K):
        pair = token * TOP_K + k
        expert = tl.load(ids_ptr + pair)
        if (expert >= start_expert) & (expert <= end_expert):
            row = tl.load(src2dst_ptr + pair).to(tl.int64)
            scaled = _apply_scale(value, scales_ptr + expert - start_expert, HAS_SCALES, QMAX)
            out_ptrs = rows_ptr + row * hidden + columns
            tl.store(out_ptrs, scaled.to(rows_ptr.dtype.element_ty), mask=mask)


@triton.jit
def silu_and_mul_kernel(
    x_ptr, out_ptr, ids_ptr, scales_ptr, intermediate, start_expert, end_expert,
    HAS_SCALES: tl.constexpr, QMAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[r] = silu(x[r, :I]) * x[r, I:] / scale, for rows of start_expert to end_expert.

    Grid: (rows, blocks of BLOCK columns). ids has the expert of each row.

    HAS_SCALES: whether values are divided by scales[expert - start_expert].
    """
    row = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids_ptr + row)
    if (expert < start_expert) | (expert > end_expert):
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < intermediate
    x_ptrs = x_ptr + row * 2 * intermediate + columns
    gate = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptrs + intermediate, mask=mask, other=0.0).to(tl.float32)
    value = activate(gate, up, "silu", 0.0, 0.0)
    scaled = _apply_scale(value, scales_ptr + expert - start_expert, HAS_SCALES, QMAX)
    out_ptrs = out_ptr + row * intermediate + columns
    tl.store(out_ptrs, scaled.to(out_ptr.dtype.element_ty), mask=mask)
