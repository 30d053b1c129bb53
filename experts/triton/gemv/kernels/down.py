"""Kernel of GEMM 2 of the gemv path. A program computes a block of hidden columns of one token."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from experts.triton.gemv.kernels.common import (
    adapter_sums,
    n_major_sums,
    quantize_groups,
    quantize_to_float32,
    step_sums,
)
from modular_kernel.ops.kernels.extrema import max_nan, maximum_nan
from modular_kernel.ops.kernels.ids import load_local_ids
from modular_kernel.ops.kernels.quantize import scale_of


@triton.jit
def _pair_scales(
    amax_ptr, pairs, valid, blocks, num_pairs,
    ids_ptr, map_ptr, num_experts, num_local, HAS_MAP: tl.constexpr,
    QUANT: tl.constexpr, QMAX: tl.constexpr, MIN_SCALE: tl.constexpr,
    S: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Compute the scales (S,) of h from the amax values that GEMM 1 wrote."""
    block = tl.arange(0, BLOCK_B)
    if QUANT == "token":
        mask = valid[:, None] & (block < blocks)[None, :]
        ptrs = amax_ptr + pairs[:, None] * blocks + block[None, :]
        amax = max_nan(tl.load(ptrs, mask=mask, other=0.0), 1)
    else:
        tl.static_assert(QUANT == "tensor")
        block_amax = tl.zeros((BLOCK_B,), tl.float32)
        for pair in range(num_pairs):
            local, _ = load_local_ids(
                ids_ptr, pair, pair >= 0, map_ptr, num_experts, num_local, HAS_MAP
            )
            mask = (block < blocks) & (local >= 0)
            pair_amax = tl.load(amax_ptr + pair * blocks + block, mask=mask, other=0.0)
            block_amax = maximum_nan(block_amax, pair_amax)
        amax = tl.zeros((S,), tl.float32) + max_nan(block_amax, 0)
    return scale_of(amax, QMAX, MIN_SCALE)


@triton.jit
def _add_step(
    sums, codes, start, h, h_scale, scale_mask, depth, scale_ptrs, zero_ptrs,
    stride_bsk, stride_bzk,
    QUANT: tl.constexpr, QMAX: tl.constexpr, ROUND: tl.constexpr, MIN_SCALE: tl.constexpr,
    TYPE: tl.constexpr, ZERO_POINT: tl.constexpr, HAS_ZERO: tl.constexpr, GROUP_K: tl.constexpr,
    S: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Add the products of one step along K to `sums` and return them.

    codes: (S, N, BLOCK_K), stored weights.
    h: (S, BLOCK_K). This function quantizes h according to QUANT.
    h_scale: (S,), used if QUANT is "token", "tensor" or "static".
    scale_mask: (S, SCALE_ROWS, 1), which rows have scales.
    """
    h = h.to(tl.float32)
    scales = tl.zeros((S, BLOCK_K // VEC), tl.float32)
    if QUANT == "group":
        h, scales = quantize_groups(
            h, QMAX, ROUND, MIN_SCALE, TYPE, GROUP_K, S, BLOCK_K, VEC
        )  # fmt: skip
    elif QUANT != "none":
        h = quantize_to_float32(h, h_scale[:, None], QMAX, ROUND, TYPE)
    else:
        scales += 1.0
    vector = start + tl.arange(0, BLOCK_K // VEC) * VEC
    group = (vector // (GROUP_K if GROUP_K > 0 else 1))[None, None, :]
    sums += step_sums(
        codes, h, scales, scale_ptrs + group * stride_bsk, zero_ptrs + group * stride_bzk,
        scale_mask & (vector < depth)[None, None, :],
        ZERO_POINT, HAS_ZERO, GROUP_K, S, N, BLOCK_K, VEC,
    )  # fmt: skip
    return sums


@triton.jit
def gemv_down_kernel(
    h_ptr, h_scale_ptr, b_ptr, b_scale_ptr, zero_ptr, bias_ptr, row_weights_ptr,
    ids_ptr, map_ptr, out_ptr, amax_ptr,
    num_pairs, hidden, depth, blocks, num_experts, num_local, factor,
    stride_be, stride_bn, stride_bk, stride_bse, stride_bsn, stride_bsk,
    stride_bze, stride_bzn, stride_bzk, stride_bias,
    SLOTS: tl.constexpr, HAS_MAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_ROW_WEIGHTS: tl.constexpr, QUANT: tl.constexpr, QMAX: tl.constexpr,
    ROUND: tl.constexpr, MIN_SCALE: tl.constexpr, HAS_SCALES: tl.constexpr,
    ZERO_POINT: tl.constexpr, HAS_ZERO: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr,
    SCALE_ROWS: tl.constexpr, BLOCK_B: tl.constexpr,
    S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VEC: tl.constexpr,
    STAGES: tl.constexpr, OVERLAP: tl.constexpr = False,
    u_ptr=None, slots_ptr=None, lora_b_ptr=None, num_slots=0, rank=0,
    stride_u=0, stride_lbl=0, stride_lbe=0, stride_lbn=0,
    LORA_TOP_K: tl.constexpr = 1, LORA: tl.constexpr = False, LORA_R: tl.constexpr = 16,
    N_MAJOR: tl.constexpr = False, STEP_ROWS: tl.constexpr = 1,
):  # fmt: skip
    """out[t, n] = factor * sum over pairs p of t of weight[p] * (h[p] @ w[expert of p, n] + bias).

    Grid: (num_pairs / SLOTS * blocks of BLOCK_N columns,). The token varies fastest. A program
    computes BLOCK_N columns of one token. It processes S of the token's SLOTS pairs at once, and
    adds pairs in order. If SLOTS = 1, every pair has an output row, which is zero if the pair is
    skipped.

    h_ptr: (num_pairs, depth), contiguous.
    amax_ptr: (num_pairs, blocks), the amax of each block of h.
    b_ptr: w, (e, hidden, depth). Weights of skipped pairs are not read.
    out_ptr: (num_pairs / SLOTS, hidden), contiguous.
    QUANT: how h is quantized:
        "none": h is not quantized.
        "token", "group", "tensor": with one scale per token, group or tensor.
        "static": with the scale at h_scale_ptr.
    QMAX, ROUND, MIN_SCALE: see `quantize_rows`.
    HAS_SCALES, GROUP_N, GROUP_K, SCALE_ROWS, ZERO_POINT, HAS_ZERO: see `gemv_gate_up_kernel`.
    BLOCK_B: a power of two >= blocks.
    VEC: adjacent weights per load.
    LORA: whether B[slot of the pair's token, expert] @ u[p] is added before the bias.
    LORA_R: a power of two >= rank.
    N_MAJOR, STEP_ROWS: see `gemv_gate_up_kernel`.
    """
    TYPE: tl.constexpr = b_ptr.dtype.element_ty
    rows = num_pairs // SLOTS
    token = tl.program_id(0) % rows
    column = tl.program_id(0) // rows * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < hidden
    k = tl.arange(0, BLOCK_K)
    row_offset = column.to(tl.int64)[None, :, None] * stride_bn + k[None, None, :] * stride_bk
    scale_row = tl.program_id(0) // rows * BLOCK_N + tl.arange(0, SCALE_ROWS)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, SLOTS, S):
        slot = first + tl.arange(0, S)
        pairs = token * SLOTS + slot
        local, _ = load_local_ids(
            ids_ptr, pairs, slot < SLOTS, map_ptr, num_experts, num_local, HAS_MAP
        )
        valid = local >= 0
        expert = tl.maximum(local, 0).to(tl.int64)  # NaN-free: integers
        w_ptrs = b_ptr + expert[:, None, None] * stride_be + row_offset
        row_mask = valid[:, None, None] & column_mask[None, :, None]
        scale_mask = valid[:, None, None] & (scale_row < hidden)[None, :, None]
        if N_MAJOR:
            tl.static_assert(not HAS_SCALES and QUANT == "none")
            # The ids are valid before the wait; the other branch explains why.
            if OVERLAP:
                gdc_wait()
                gdc_launch_dependents()
            row = n_major_sums(
                h_ptr + pairs.to(tl.int64)[:, None] * depth, valid[:, None],
                b_ptr + expert[:, None, None] * stride_be + column.to(tl.int64)[None, None, :],
                valid[:, None, None] & column_mask[None, None, :], 1, stride_bk, depth,
                S, BLOCK_N, BLOCK_K, STEP_ROWS, STAGES,
            )  # fmt: skip
        else:
            codes = tl.load(w_ptrs, mask=row_mask & (k < depth)[None, None, :], other=0.0)
            # Load the first weights before waiting for h. The ids are valid here, because GEMM 1
            # waited for them before this kernel could start. See `pdl_wait`.
            if OVERLAP:
                gdc_wait()
                gdc_launch_dependents()
            h_ptrs = h_ptr + pairs.to(tl.int64)[:, None] * depth + k[None, :]
            # Issue the loads of h before those of its amax values.
            h = tl.load(h_ptrs, mask=valid[:, None] & (k < depth)[None, :], other=0.0)
            h_scale = tl.full((S,), 1.0, tl.float32)
            if QUANT == "token" or QUANT == "tensor":
                h_scale = _pair_scales(
                    amax_ptr, pairs, valid, blocks, num_pairs, ids_ptr, map_ptr, num_experts,
                    num_local, HAS_MAP, QUANT, QMAX, MIN_SCALE, S, BLOCK_B,
                )  # fmt: skip
            elif QUANT == "static":
                h_scale *= tl.load(h_scale_ptr)
            scale_ptrs = (
                b_scale_ptr + expert[:, None, None] * stride_bse
                + (scale_row // GROUP_N)[None, :, None] * stride_bsn
            )  # fmt: skip
            zero_ptrs = (
                zero_ptr + expert[:, None, None] * stride_bze
                + scale_row[None, :, None] * stride_bzn
            )  # fmt: skip
            sums = _add_step(
                tl.zeros((S, BLOCK_N, BLOCK_K // VEC), tl.float32), codes, 0, h, h_scale,
                scale_mask, depth, scale_ptrs, zero_ptrs, stride_bsk, stride_bzk,
                QUANT, QMAX, ROUND, MIN_SCALE, TYPE, ZERO_POINT, HAS_ZERO, GROUP_K,
                S, BLOCK_N, BLOCK_K, VEC,
            )  # fmt: skip
            for start in tl.range(BLOCK_K, depth, BLOCK_K, num_stages=STAGES):
                in_bounds = start + k < depth
                w_ptrs += BLOCK_K * stride_bk
                codes = tl.load(w_ptrs, mask=row_mask & in_bounds[None, None, :], other=0.0)
                h = tl.load(h_ptrs + start, mask=valid[:, None] & in_bounds[None, :], other=0.0)
                sums = _add_step(
                    sums, codes, start, h, h_scale, scale_mask,
                    depth, scale_ptrs, zero_ptrs, stride_bsk, stride_bzk,
                    QUANT, QMAX, ROUND, MIN_SCALE, TYPE, ZERO_POINT, HAS_ZERO, GROUP_K,
                    S, BLOCK_N, BLOCK_K, VEC,
                )  # fmt: skip
            row = tl.sum(sums, axis=2)
        row_valid = valid[:, None] & column_mask[None, :]
        if HAS_SCALES and GROUP_K == 0:
            ptrs = b_scale_ptr + expert[:, None] * stride_bse
            ptrs += (column // GROUP_N)[None, :] * stride_bsn
            row *= h_scale[:, None] * tl.load(ptrs, mask=row_valid, other=0.0).to(tl.float32)
        if LORA:
            adapter = tl.load(slots_ptr + token * SLOTS // LORA_TOP_K).to(tl.int64)
            if (adapter >= 0) & (adapter < num_slots):
                u_ptrs = u_ptr + pairs.to(tl.int64)[:, None] * stride_u
                b_ptrs = lora_b_ptr + adapter * stride_lbl + expert[:, None, None] * stride_lbe
                b_ptrs += column.to(tl.int64)[None, :, None] * stride_lbn
                row += adapter_sums(
                    u_ptrs, valid[:, None], b_ptrs, row_valid[:, :, None], rank, LORA_R
                )
        if HAS_BIAS:
            ptrs = bias_ptr + expert[:, None] * stride_bias + column[None, :]
            row += tl.load(ptrs, mask=row_valid, other=0.0).to(tl.float32)
        if HAS_ROW_WEIGHTS:
            # The router weight of a skipped pair may be anything, including NaN.
            row *= tl.load(row_weights_ptr + pairs, mask=valid, other=0.0)[:, None]
        if QUANT == "tensor" or QUANT == "static":
            # A shared scale may be NaN, and 0 * NaN is NaN.
            row = tl.where(valid[:, None], row, 0.0)
        total += tl.sum(row, axis=0)
    out_ptrs = out_ptr + token.to(tl.int64) * hidden + column
    tl.store(out_ptrs, (total * factor).to(out_ptr.dtype.element_ty), mask=column_mask)
