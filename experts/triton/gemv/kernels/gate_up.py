"""Kernel of GEMM 1 of the gemv path.

A program computes a block of intermediate columns of one pair.
"""

import triton
import triton.language as tl

from experts.triton.gemv.kernels.common import (
    adapter_sums,
    n_major_sums,
    quantize_groups,
    quantize_to_float32,
    step_sums,
)
from experts.triton.kernels.gemm_tile import finish_tile
from modular_kernel.ops.kernels.extrema import max_nan, maximum_nan
from modular_kernel.ops.kernels.ids import count_invalid_ids, load_local_ids
from modular_kernel.ops.kernels.pdl import pdl_wait
from modular_kernel.ops.kernels.quantize import scale_of


@triton.jit
def _rows_amax(x_ptr, rows, hidden, stride_xm, stride_xk, BLOCK_R: tl.constexpr):
    """Return the largest magnitude in `rows` rows, the first of which is at x_ptr."""
    amax = tl.zeros((BLOCK_R,), tl.float32)
    column = tl.arange(0, BLOCK_R)
    for _ in range(rows):
        for start in range(0, hidden, BLOCK_R):
            mask = start + column < hidden
            value = tl.load(x_ptr + (start + column) * stride_xk, mask=mask, other=0.0)
            amax = maximum_nan(amax, tl.abs(value.to(tl.float32)))
        x_ptr += stride_xm
    return max_nan(amax, 0)


@triton.jit
def _step_input(
    x, x_scale_ptr, start, hidden, scale, stride_xsk,
    QUANT: tl.constexpr, QMAX: tl.constexpr, ROUND: tl.constexpr, MIN_SCALE: tl.constexpr,
    TYPE: tl.constexpr, GROUP_K: tl.constexpr, BLOCK_K: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Quantize x (BLOCK_K,) according to QUANT. Return it as float32 (1, BLOCK_K), and its scales.

    The scales are (1, BLOCK_K / VEC), and have the scale of each value's group. The caller does not
    use them if x has one scale per token or tensor, or no scale.
    """
    x = x.to(tl.float32)[None, :]
    scales = tl.zeros((1, BLOCK_K // VEC), tl.float32)
    if QUANT == "group":
        x, scales = quantize_groups(
            x, QMAX, ROUND, MIN_SCALE, TYPE, GROUP_K, 1, BLOCK_K, VEC
        )  # fmt: skip
    elif QUANT == "prequantized":
        if GROUP_K > 0:
            vector = start + tl.arange(0, BLOCK_K // VEC) * VEC
            scale_ptrs = x_scale_ptr + (vector // GROUP_K) * stride_xsk
            scales = tl.load(scale_ptrs, mask=vector < hidden, other=0.0)[None, :]
    elif QUANT != "none":
        x = quantize_to_float32(x, scale, QMAX, ROUND, TYPE)
    if QUANT == "none":
        scales += 1.0
    return x, scales


@triton.jit
def _add_step(
    gate, up, gate_codes, up_codes, start, x, x_scale_ptr, x_scale, hidden, scale_mask,
    scale_ptrs, up_scale_ptrs, zero_ptrs, up_zero_ptrs, stride_xsk, stride_bsk, stride_bzk,
    QUANT: tl.constexpr, QMAX: tl.constexpr, ROUND: tl.constexpr, MIN_SCALE: tl.constexpr,
    TYPE: tl.constexpr, ZERO_POINT: tl.constexpr, HAS_ZERO: tl.constexpr, GATED: tl.constexpr,
    GROUP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Add the products of one step along K to gate and up, and return gate and up.

    scale_mask: (SCALE_ROWS,), which rows have scales.
    """
    x, scales = _step_input(
        x, x_scale_ptr, start, hidden, x_scale, stride_xsk,
        QUANT, QMAX, ROUND, MIN_SCALE, TYPE, GROUP_K, BLOCK_K, VEC,
    )  # fmt: skip
    vector = start + tl.arange(0, BLOCK_K // VEC) * VEC
    group = (vector // (GROUP_K if GROUP_K > 0 else 1))[None, None, :]
    mask = scale_mask[None, :, None] & (vector < hidden)[None, None, :]
    gate += step_sums(
        gate_codes, x, scales, scale_ptrs[None, :, None] + group * stride_bsk,
        zero_ptrs[None, :, None] + group * stride_bzk, mask,
        ZERO_POINT, HAS_ZERO, GROUP_K, 1, BLOCK_N, BLOCK_K, VEC,
    )  # fmt: skip
    if GATED:
        up += step_sums(
            up_codes, x, scales, up_scale_ptrs[None, :, None] + group * stride_bsk,
            up_zero_ptrs[None, :, None] + group * stride_bzk, mask,
            ZERO_POINT, HAS_ZERO, GROUP_K, 1, BLOCK_N, BLOCK_K, VEC,
        )  # fmt: skip
    return gate, up


@triton.jit
def _n_major_products(
    x_ptr, stride_xk, b_ptr, stride_bk, first, columns, depth, up_offset,
    GATED: tl.constexpr, ROW_STEP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STEP_ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return gate and up (1, BLOCK_N) of columns from `first`, for weights with contiguous N.

    If gate and up columns alternate, they are loaded as one run of adjacent columns. Otherwise gate
    and up are SIDES runs, which are up_offset apart.
    """
    PAIRS: tl.constexpr = GATED and ROW_STEP == 2
    SIDES: tl.constexpr = 2 if GATED and not PAIRS else 1
    WIDTH: tl.constexpr = 2 * BLOCK_N if PAIRS else BLOCK_N
    column = first * (2 if PAIRS else 1) + tl.arange(0, WIDTH)
    column_mask = column < columns * (2 if PAIRS else 1)
    side = tl.arange(0, SIDES)
    w_ptrs = b_ptr + (side * up_offset)[:, None, None] + column.to(tl.int64)[None, None, :]
    sums = n_major_sums(
        x_ptr + side[:, None] * 0, (side >= 0)[:, None], w_ptrs, column_mask[None, None, :],
        stride_xk, stride_bk, depth, SIDES, WIDTH, BLOCK_K, STEP_ROWS, STAGES,
    )  # fmt: skip
    if PAIRS:
        gate, up = tl.split(tl.reshape(sums, (1, BLOCK_N, 2)))
    elif GATED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (1, 2, BLOCK_N)), (0, 2, 1)))
    else:
        gate, up = sums, sums
    return gate, up


@triton.jit
def gemv_gate_up_kernel(
    x_ptr, x_scale_ptr, b_ptr, b_scale_ptr, zero_ptr, bias_ptr, row_weights_ptr,
    ids_ptr, map_ptr, invalid_ptr, h_ptr, amax_ptr,
    num_pairs, intermediate, hidden, up_row, up_offset, num_experts, num_local,
    stride_xm, stride_xk, stride_xsm, stride_xsk,
    stride_be, stride_bn, stride_bk, stride_bse, stride_bsn, stride_bsk,
    stride_bze, stride_bzn, stride_bzk, stride_bias,
    TOP_K: tl.constexpr, ROW_STEP: tl.constexpr, HAS_MAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_ROW_WEIGHTS: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, QUANT: tl.constexpr, QMAX: tl.constexpr, ROUND: tl.constexpr,
    MIN_SCALE: tl.constexpr, HAS_SCALES: tl.constexpr, ZERO_POINT: tl.constexpr,
    HAS_ZERO: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, SCALE_ROWS: tl.constexpr,
    STORE_AMAX: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr = False,
    u_ptr=None, slots_ptr=None, lora_b_ptr=None, num_slots=0, rank=0,
    stride_u=0, stride_lbl=0, stride_lbe=0, stride_lbn=0,
    U_UP: tl.constexpr = 0, LORA: tl.constexpr = False, LORA_R: tl.constexpr = 16,
    N_MAJOR: tl.constexpr = False, STEP_ROWS: tl.constexpr = 1,
):  # fmt: skip
    """h[p, n] = act(x[p // TOP_K] @ w[expert of p, rows of n]^T) for pairs p of local experts.

    Grid: (num_pairs, blocks of BLOCK_N columns + 1). A program computes BLOCK_N columns of one
    pair. In the extra block, the program of pair 0 counts invalid ids, BLOCK_P at a time.

    x_ptr: (num_pairs / TOP_K, hidden).
    b_ptr: w, (e, rows, hidden). Column n uses row n * ROW_STEP and, if GATED, also row n *
        ROW_STEP + up_row for up, which is up_offset elements after the first row.
    h_ptr: (num_pairs, intermediate), contiguous. Rows of skipped pairs are not written.
    amax_ptr: (num_pairs, blocks). If STORE_AMAX, the kernel writes the largest magnitude of each
        block of h.
    QUANT: how x is quantized:
        "none": x is not quantized.
        "prequantized": before the launch, with the scales at x_scale_ptr.
        "token", "group", "tensor": in this kernel, with one scale per token, group or tensor.
        "static": in this kernel, with the scale at x_scale_ptr.
    QMAX, ROUND, MIN_SCALE: see `quantize_rows`.
    BLOCK_R: columns of x that each step of its amax reads.
    HAS_SCALES: whether weights have scales, one per GROUP_N rows and GROUP_K columns. If GROUP_K is
        0, the scale is for all of K.
    SCALE_ROWS: 1 if all BLOCK_N rows share a scale, otherwise BLOCK_N.
    HAS_ZERO: whether integer weights have zero points. If not, ZERO_POINT is subtracted from all
        weights.
    KIND, ALPHA, LIMIT: see `ops.kernels.activation`.
    VEC: adjacent weights per load.
    STAGES: stages of the software pipeline.
    LORA: whether B[slot of p's token, expert] @ u[p] is added before weight, bias and activation.
    U_UP: offset from the columns of u for gate to the columns for up.
    LORA_R: a power of two >= rank.
    N_MAJOR: whether a thread loads adjacent columns. The weights are then not quantized, and
        stride_bn is 1.
    STEP_ROWS: see `n_major_sums`.
    """
    pdl_wait(OVERLAP)
    pair = tl.program_id(0)
    block = tl.program_id(1)
    if block * BLOCK_N >= intermediate:
        if pair == 0:
            count_invalid_ids(
                ids_ptr, map_ptr, invalid_ptr, num_pairs, num_experts, num_local, HAS_MAP, BLOCK_P
            )
        return
    local, _ = load_local_ids(ids_ptr, pair, pair >= 0, map_ptr, num_experts, num_local, HAS_MAP)
    if local < 0:
        return
    TYPE: tl.constexpr = b_ptr.dtype.element_ty
    expert, token = local.to(tl.int64), (pair // TOP_K).to(tl.int64)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < intermediate
    if N_MAJOR:
        tl.static_assert(not HAS_SCALES and QUANT == "none")
        gate_row, up_row_sum = _n_major_products(
            x_ptr + token * stride_xm, stride_xk, b_ptr + expert * stride_be, stride_bk,
            block * BLOCK_N, intermediate, hidden, up_offset,
            GATED, ROW_STEP, BLOCK_N, BLOCK_K, STEP_ROWS, STAGES,
        )  # fmt: skip
    else:
        k = tl.arange(0, BLOCK_K)
        w_ptrs = (
            b_ptr + expert * stride_be
            + (column * ROW_STEP).to(tl.int64)[None, :, None] * stride_bn
            + k[None, None, :] * stride_bk
        )  # fmt: skip
        w_mask = column_mask[None, :, None] & (k < hidden)[None, None, :]
        # Issue the loads of the first weights before those of x.
        gate_codes = tl.load(w_ptrs, mask=w_mask, other=0.0)
        up_codes = gate_codes
        if GATED:
            up_codes = tl.load(w_ptrs + up_offset, mask=w_mask, other=0.0)
        x_ptr += token * stride_xm
        x_scale_ptr += token * stride_xsm
        # Issue the load of x before its amax is needed.
        x = tl.load(x_ptr + k * stride_xk, mask=k < hidden, other=0.0)
        x_scale = 1.0
        if QUANT == "token":
            amax = _rows_amax(x_ptr, 1, hidden, 0, stride_xk, BLOCK_R)
            x_scale = scale_of(amax, QMAX, MIN_SCALE)
        elif QUANT == "tensor":
            first_ptr, rows = x_ptr - token * stride_xm, num_pairs // TOP_K
            amax = _rows_amax(first_ptr, rows, hidden, stride_xm, stride_xk, BLOCK_R)
            x_scale = scale_of(amax, QMAX, MIN_SCALE)
        elif QUANT == "static" or (QUANT == "prequantized" and GROUP_K == 0):
            x_scale = tl.load(x_scale_ptr)
        # Each row has a scale and a zero point, or all rows share one.
        scale_column = block * BLOCK_N + tl.arange(0, SCALE_ROWS)
        scale_mask = scale_column < intermediate
        scale_row = scale_column * ROW_STEP
        b_scale_ptr += expert * stride_bse
        zero_ptr += expert * stride_bze
        scale_ptrs = b_scale_ptr + (scale_row // GROUP_N) * stride_bsn
        up_scale_ptrs = b_scale_ptr + ((scale_row + up_row) // GROUP_N) * stride_bsn
        zero_ptrs = zero_ptr + scale_row * stride_bzn
        up_zero_ptrs = zero_ptr + (scale_row + up_row) * stride_bzn
        gate = tl.zeros((1, BLOCK_N, BLOCK_K // VEC), tl.float32)
        up = gate
        gate, up = _add_step(
            gate, up, gate_codes, up_codes, 0, x, x_scale_ptr, x_scale, hidden, scale_mask,
            scale_ptrs, up_scale_ptrs, zero_ptrs, up_zero_ptrs,
            stride_xsk, stride_bsk, stride_bzk,
            QUANT, QMAX, ROUND, MIN_SCALE, TYPE, ZERO_POINT, HAS_ZERO, GATED, GROUP_K,
            BLOCK_N, BLOCK_K, VEC,
        )  # fmt: skip
        for start in tl.range(BLOCK_K, hidden, BLOCK_K, num_stages=STAGES):
            in_bounds = start + k < hidden
            w_mask = column_mask[None, :, None] & in_bounds[None, None, :]
            w_ptrs += BLOCK_K * stride_bk
            gate_codes = tl.load(w_ptrs, mask=w_mask, other=0.0)
            up_codes = gate_codes
            if GATED:
                up_codes = tl.load(w_ptrs + up_offset, mask=w_mask, other=0.0)
            x = tl.load(x_ptr + (start + k) * stride_xk, mask=in_bounds, other=0.0)
            gate, up = _add_step(
                gate, up, gate_codes, up_codes, start, x, x_scale_ptr, x_scale, hidden, scale_mask,
                scale_ptrs, up_scale_ptrs, zero_ptrs, up_zero_ptrs,
                stride_xsk, stride_bsk, stride_bzk,
                QUANT, QMAX, ROUND, MIN_SCALE, TYPE, ZERO_POINT, HAS_ZERO, GATED, GROUP_K,
                BLOCK_N, BLOCK_K, VEC,
            )  # fmt: skip
        gate_row, up_row_sum = tl.sum(gate, axis=2), tl.sum(up, axis=2)
        if HAS_SCALES and GROUP_K == 0:
            row = column * ROW_STEP
            scale = tl.load(
                b_scale_ptr + (row // GROUP_N) * stride_bsn, mask=column_mask, other=0.0
            )
            gate_row *= (x_scale * scale.to(tl.float32))[None, :]
            row += up_row
            scale = tl.load(
                b_scale_ptr + (row // GROUP_N) * stride_bsn, mask=column_mask, other=0.0
            )
            up_row_sum *= (x_scale * scale.to(tl.float32))[None, :]
    if LORA:
        adapter = tl.load(slots_ptr + token).to(tl.int64)
        if (adapter >= 0) & (adapter < num_slots):
            u_ptrs = u_ptr + pair.to(tl.int64) * stride_u + tl.zeros((1, 1), tl.int32)
            lora_b_ptr += adapter * stride_lbl + expert * stride_lbe
            b_ptrs = lora_b_ptr + (column * ROW_STEP).to(tl.int64)[None, :, None] * stride_lbn
            b_mask = column_mask[None, :, None]
            gate_row += adapter_sums(u_ptrs, True, b_ptrs, b_mask, rank, LORA_R)
            if GATED:
                up_rows = (column * ROW_STEP + up_row).to(tl.int64)[None, :, None]
                b_ptrs = lora_b_ptr + up_rows * stride_lbn
                up_row_sum += adapter_sums(u_ptrs + U_UP, True, b_ptrs, b_mask, rank, LORA_R)
    row_weight = tl.zeros((1,), tl.float32)
    if HAS_ROW_WEIGHTS:
        row_weight += tl.load(row_weights_ptr + pair)
    h = finish_tile(
        gate_row, up_row_sum, bias_ptr + expert * stride_bias, column * ROW_STEP, up_row,
        column_mask, row_weight, HAS_BIAS, HAS_ROW_WEIGHTS, GATED, KIND, ALPHA, LIMIT,
    )  # fmt: skip
    h = h.to(h_ptr.dtype.element_ty)
    h_ptrs = h_ptr + pair.to(tl.int64) * intermediate + column[None, :]
    tl.store(h_ptrs, h, mask=column_mask[None, :])
    if STORE_AMAX:
        magnitude = tl.where(column_mask[None, :], tl.abs(h.to(tl.float32)), 0.0)
        blocks = tl.cdiv(intermediate, BLOCK_N)
        tl.store(amax_ptr + pair * blocks + block, max_nan(max_nan(magnitude, 1), 0))
