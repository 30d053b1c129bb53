"""`gemv_gate_up_kernel`: GEMM 1 of the gemv path, h = act(x W1^T).

A pair is a token together with one of its top_k experts: pair p belongs to token p // top_k. A
program computes a block of intermediate columns of one pair.
"""

import triton
import triton.language as tl

from experts.triton.gemv.kernels.common import (
    compute_adapter_sums,
    compute_n_major_sums,
    compute_step_sums,
    quantize_groups,
    quantize_to_float32,
)
from experts.triton.kernels.gemm_tile import finish_tile
from modular_kernel.ops.kernels.extrema import max_nan, maximum_nan
from modular_kernel.ops.kernels.ids import count_invalid_ids, load_local_ids
from modular_kernel.ops.kernels.pdl import pdl_wait
from modular_kernel.ops.kernels.quantize import scale_of


@triton.jit
def _compute_rows_amax(x_ptr, rows, hidden_size, stride_xm, stride_xk, AMAX_BLOCK_K: tl.constexpr):
    """Return the largest magnitude in `rows` rows of x, the first of which is at x_ptr.

    AMAX_BLOCK_K: columns that are read at once.
    """
    amax = tl.zeros((AMAX_BLOCK_K,), tl.float32)
    column = tl.arange(0, AMAX_BLOCK_K)
    for _ in range(rows):
        for start in range(0, hidden_size, AMAX_BLOCK_K):
            mask = start + column < hidden_size
            value = tl.load(x_ptr + (start + column) * stride_xk, mask=mask, other=0.0)
            amax = maximum_nan(amax, tl.abs(value.to(tl.float32)))
        x_ptr += stride_xm
    return max_nan(amax, 0)


@triton.jit
def _quantize_step(
    x, x_scale_ptr, start, hidden_size, scale, stride_xsk,
    INPUT_QUANT: tl.constexpr, QMAX: tl.constexpr, ROUND_TO_INT: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr, GROUP_K: tl.constexpr, BLOCK_K: tl.constexpr,
    VECTOR_SIZE: tl.constexpr,
):  # fmt: skip
    """Quantize one step of x, (BLOCK_K,), according to INPUT_QUANT.

    Return the values as float32 (1, BLOCK_K), and the scales of their groups (1, BLOCK_K /
    VECTOR_SIZE). The scales are 1 if x is not quantized. They are not used if x has one scale per
    token or tensor.

    start: the first column of the step.
    scale: the scale of x if INPUT_QUANT is "token", "tensor" or "static".
    """
    x = x.to(tl.float32)[None, :]
    scales = tl.zeros((1, BLOCK_K // VECTOR_SIZE), tl.float32)
    if INPUT_QUANT == "group":
        x, scales = quantize_groups(
            x, QMAX, ROUND_TO_INT, MIN_SCALE, WEIGHT_DTYPE, GROUP_K, 1, BLOCK_K, VECTOR_SIZE
        )  # fmt: skip
    elif INPUT_QUANT == "prequantized":
        if GROUP_K > 0:
            vector = start + tl.arange(0, BLOCK_K // VECTOR_SIZE) * VECTOR_SIZE
            scale_ptrs = x_scale_ptr + (vector // GROUP_K) * stride_xsk
            scales = tl.load(scale_ptrs, mask=vector < hidden_size, other=0.0)[None, :]
    elif INPUT_QUANT != "none":
        x = quantize_to_float32(x, scale, QMAX, ROUND_TO_INT, WEIGHT_DTYPE)
    if INPUT_QUANT == "none":
        scales += 1.0
    return x, scales


@triton.jit
def _add_step(
    gate, up, gate_codes, up_codes, start, x, x_scale_ptr, x_scale, hidden_size, scale_mask,
    scale_ptrs, up_scale_ptrs, zero_point_ptrs, up_zero_point_ptrs, stride_xsk, stride_bsk,
    stride_bzk,
    INPUT_QUANT: tl.constexpr, QMAX: tl.constexpr, ROUND_TO_INT: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr, ZERO_POINT: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr,
    GATED: tl.constexpr,
    GROUP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR_SIZE: tl.constexpr,
):  # fmt: skip
    """Add the products of one step along K to gate and up, and return gate and up.

    gate_codes, up_codes: (1, BLOCK_N, BLOCK_K), stored weights.
    start: the first K element of the step.
    x: (BLOCK_K,). It is quantized here according to INPUT_QUANT.
    scale_mask: (SCALE_ROWS,), False for weight rows that do not exist.
    scale_ptrs, up_scale_ptrs, zero_point_ptrs, up_zero_point_ptrs: (SCALE_ROWS,), pointers to the
        first scale and zero point of each weight row.
    """
    x, scales = _quantize_step(
        x, x_scale_ptr, start, hidden_size, x_scale, stride_xsk,
        INPUT_QUANT, QMAX, ROUND_TO_INT, MIN_SCALE, WEIGHT_DTYPE, GROUP_K, BLOCK_K, VECTOR_SIZE,
    )  # fmt: skip
    vector = start + tl.arange(0, BLOCK_K // VECTOR_SIZE) * VECTOR_SIZE
    group = (vector // (GROUP_K if GROUP_K > 0 else 1))[None, None, :]
    mask = scale_mask[None, :, None] & (vector < hidden_size)[None, None, :]
    gate += compute_step_sums(
        gate_codes, x, scales, scale_ptrs[None, :, None] + group * stride_bsk,
        zero_point_ptrs[None, :, None] + group * stride_bzk, mask,
        ZERO_POINT, HAS_ZERO_POINTS, GROUP_K, 1, BLOCK_N, BLOCK_K, VECTOR_SIZE,
    )  # fmt: skip
    if GATED:
        up += compute_step_sums(
            up_codes, x, scales, up_scale_ptrs[None, :, None] + group * stride_bsk,
            up_zero_point_ptrs[None, :, None] + group * stride_bzk, mask,
            ZERO_POINT, HAS_ZERO_POINTS, GROUP_K, 1, BLOCK_N, BLOCK_K, VECTOR_SIZE,
        )  # fmt: skip
    return gate, up


@triton.jit
def _multiply_n_major(
    x_ptr, stride_xk, b_ptr, stride_bk, first, size_n, size_k, up_offset,
    GATED: tl.constexpr, GATE_STRIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STEP_ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return gate and up (1, BLOCK_N) of the columns from `first` on, for N-major weights.

    N-major weights are contiguous along the weight rows. If gate and up rows alternate, they are
    loaded as one run of adjacent rows. Otherwise, gate and up rows are separate runs, which are
    up_offset elements apart.
    """
    IS_INTERLEAVED: tl.constexpr = GATED and GATE_STRIDE == 2
    NUM_MATRICES: tl.constexpr = 2 if GATED and not IS_INTERLEAVED else 1
    WIDTH: tl.constexpr = 2 * BLOCK_N if IS_INTERLEAVED else BLOCK_N
    column = first * (2 if IS_INTERLEAVED else 1) + tl.arange(0, WIDTH)
    column_mask = column < size_n * (2 if IS_INTERLEAVED else 1)
    matrix = tl.arange(0, NUM_MATRICES)
    w_ptrs = b_ptr + (matrix * up_offset)[:, None, None] + column.to(tl.int64)[None, None, :]
    sums = compute_n_major_sums(
        x_ptr + matrix[:, None] * 0, (matrix >= 0)[:, None], w_ptrs, column_mask[None, None, :],
        stride_xk, stride_bk, size_k, NUM_MATRICES, WIDTH, BLOCK_K, STEP_ROWS, STAGES,
    )  # fmt: skip
    if IS_INTERLEAVED:
        gate, up = tl.split(tl.reshape(sums, (1, BLOCK_N, 2)))
    elif GATED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (1, 2, BLOCK_N)), (0, 2, 1)))
    else:
        gate, up = sums, sums
    return gate, up


@triton.jit
def gemv_gate_up_kernel(
    x_ptr, x_scale_ptr, b_ptr, b_scale_ptr, zero_point_ptr, bias_ptr, router_weights_ptr,
    topk_ids_ptr, expert_map_ptr, invalid_count_ptr, h_ptr, amax_ptr,
    num_pairs, intermediate_size, hidden_size, up_row_offset, up_offset, num_experts,
    num_local_experts,
    stride_xm, stride_xk, stride_xsm, stride_xsk,
    stride_be, stride_bn, stride_bk, stride_bse, stride_bsn, stride_bsk,
    stride_bze, stride_bzn, stride_bzk, stride_bias,
    TOP_K: tl.constexpr, GATE_STRIDE: tl.constexpr, HAS_EXPERT_MAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ROUTER_WEIGHTS: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    ACTIVATION_ALPHA: tl.constexpr,
    ACTIVATION_LIMIT: tl.constexpr, INPUT_QUANT: tl.constexpr, QMAX: tl.constexpr,
    ROUND_TO_INT: tl.constexpr,
    MIN_SCALE: tl.constexpr, HAS_SCALES: tl.constexpr, ZERO_POINT: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    STORE_AMAX: tl.constexpr, BLOCK_PAIRS: tl.constexpr, AMAX_BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR_SIZE: tl.constexpr, STAGES: tl.constexpr,
    USE_PDL: tl.constexpr = False,
    lora_u_ptr=None, adapter_slots_ptr=None, lora_b_ptr=None, num_adapter_slots=0, lora_rank=0,
    stride_lora_u=0, stride_lora_b_slot=0, stride_lora_b_expert=0, stride_lora_b_n=0,
    LORA_UP_OFFSET: tl.constexpr = 0, HAS_LORA: tl.constexpr = False, BLOCK_RANK: tl.constexpr = 16,
    N_MAJOR: tl.constexpr = False, STEP_ROWS: tl.constexpr = 1,
):  # fmt: skip
    """h[p, n] = act(x[p // TOP_K] @ w[expert of p, rows of n]^T) for pairs p of local experts.

    Grid: (num_pairs, blocks of BLOCK_N columns + 1). A program computes BLOCK_N columns of one
        pair. In the extra block, the program of pair 0 counts the ids that are not valid,
        BLOCK_PAIRS at a time.

    x_ptr: (num_pairs / TOP_K, hidden_size).
    x_scale_ptr: the scales of x if INPUT_QUANT is "prequantized" or "static".
    b_ptr: weights (num_experts, rows, hidden_size). Column n uses weight row n * GATE_STRIDE and,
        if GATED, also row n * GATE_STRIDE + up_row_offset for up, which is up_offset elements after
        the first row.
    b_scale_ptr: weight scales, one per GROUP_N rows and GROUP_K columns; used if HAS_SCALES.
    zero_point_ptr: zero points of integer weights, used if HAS_ZERO_POINTS. Otherwise, ZERO_POINT
        is subtracted from all weights.
    bias_ptr: (num_experts, rows), used if HAS_BIAS.
    router_weights_ptr: (num_pairs,) float32. If HAS_ROUTER_WEIGHTS, they multiply the sums before
        the bias is added.
    topk_ids_ptr, expert_map_ptr, num_experts, num_local_experts, HAS_EXPERT_MAP: the expert ids of
        the pairs, and how they map to the experts on this rank; see `load_local_ids`. Pairs whose
        expert is not on this rank are skipped.
    invalid_count_ptr: int32, incremented by the number of ids outside [-1, num_experts).
    h_ptr: output (num_pairs, intermediate_size), contiguous. Rows of skipped pairs are not written.
    amax_ptr: (num_pairs, blocks) float32. If STORE_AMAX, the kernel writes the largest magnitude in
        each block of columns of h, from which GEMM 2 computes scales.
    stride_*: strides, named as in vLLM: x, xs (scales of x), b (weights), bs (weight scales), bz
        (zero points); dimensions e (expert), m, n, k.
    GATE_STRIDE: 2 if gate and up rows alternate in b, otherwise 1.
    GATED: whether the activation function combines gate and up.
    ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT: the activation function
        (`modular_kernel.ops.kernels.activation`).
    INPUT_QUANT: how x is quantized:
        "none": x is not quantized.
        "prequantized": before the launch, with the scales at x_scale_ptr.
        "token", "group", "tensor": in this kernel, with one scale per token, group or tensor.
        "static": in this kernel, with the scale at x_scale_ptr.
    QMAX, ROUND_TO_INT, MIN_SCALE: the largest value of the quantized type, whether the type is an
        integer, and the minimum scale.
    GROUP_K: K elements per weight scale; 0 if one scale covers all of K.
    SCALE_ROWS: 1 if all BLOCK_N weight rows share a scale, otherwise BLOCK_N.
    AMAX_BLOCK_K: columns of x that are read at once to find its largest magnitude.
    VECTOR_SIZE: adjacent weights per load of a thread.
    STAGES: stages of the software pipeline.
    USE_PDL: whether the launch uses programmatic dependent launch (`pdl_wait`).
    HAS_LORA: whether B[adapter slot of the token, expert] @ u[p] is added before router weight,
        bias and activation. lora_u_ptr is u, (num_pairs, columns), and adapter_slots_ptr has one
        slot per token.
    LORA_UP_OFFSET: the first column of u for up; 0 if gate and up use the same columns.
    BLOCK_RANK: a power of two >= lora_rank.
    N_MAJOR: whether weights are contiguous along the weight rows (stride_bn is 1). Only for
        unquantized weights.
    STEP_ROWS: see `compute_n_major_sums`.
    """
    pdl_wait(USE_PDL)
    pair = tl.program_id(0)
    block = tl.program_id(1)
    if block * BLOCK_N >= intermediate_size:
        if pair == 0:
            count_invalid_ids(
                topk_ids_ptr,
                expert_map_ptr,
                invalid_count_ptr,
                num_pairs,
                num_experts,
                num_local_experts,
                HAS_EXPERT_MAP,
                BLOCK_PAIRS,
            )
        return
    local_expert, _ = load_local_ids(
        topk_ids_ptr,
        pair,
        pair >= 0,
        expert_map_ptr,
        num_experts,
        num_local_experts,
        HAS_EXPERT_MAP,
    )
    if local_expert < 0:
        return
    WEIGHT_DTYPE: tl.constexpr = b_ptr.dtype.element_ty
    expert, token = local_expert.to(tl.int64), (pair // TOP_K).to(tl.int64)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < intermediate_size
    if N_MAJOR:
        tl.static_assert(not HAS_SCALES and INPUT_QUANT == "none")
        gate_sums, up_sums = _multiply_n_major(
            x_ptr + token * stride_xm, stride_xk, b_ptr + expert * stride_be, stride_bk,
            block * BLOCK_N, intermediate_size, hidden_size, up_offset,
            GATED, GATE_STRIDE, BLOCK_N, BLOCK_K, STEP_ROWS, STAGES,
        )  # fmt: skip
    else:
        k = tl.arange(0, BLOCK_K)
        w_ptrs = (
            b_ptr + expert * stride_be
            + (column * GATE_STRIDE).to(tl.int64)[None, :, None] * stride_bn
            + k[None, None, :] * stride_bk
        )  # fmt: skip
        w_mask = column_mask[None, :, None] & (k < hidden_size)[None, None, :]
        # Issue the loads of the first weights before the loads of x.
        gate_codes = tl.load(w_ptrs, mask=w_mask, other=0.0)
        up_codes = gate_codes
        if GATED:
            up_codes = tl.load(w_ptrs + up_offset, mask=w_mask, other=0.0)
        x_ptr += token * stride_xm
        x_scale_ptr += token * stride_xsm
        # Issue the load of x before its amax is needed.
        x = tl.load(x_ptr + k * stride_xk, mask=k < hidden_size, other=0.0)
        x_scale = 1.0
        if INPUT_QUANT == "token":
            amax = _compute_rows_amax(x_ptr, 1, hidden_size, 0, stride_xk, AMAX_BLOCK_K)
            x_scale = scale_of(amax, QMAX, MIN_SCALE)
        elif INPUT_QUANT == "tensor":
            first_ptr, rows = x_ptr - token * stride_xm, num_pairs // TOP_K
            amax = _compute_rows_amax(
                first_ptr, rows, hidden_size, stride_xm, stride_xk, AMAX_BLOCK_K
            )
            x_scale = scale_of(amax, QMAX, MIN_SCALE)
        elif INPUT_QUANT == "static" or (INPUT_QUANT == "prequantized" and GROUP_K == 0):
            x_scale = tl.load(x_scale_ptr)
        # Each row has a scale and a zero point, or all rows share one.
        scale_column = block * BLOCK_N + tl.arange(0, SCALE_ROWS)
        scale_mask = scale_column < intermediate_size
        scale_row = scale_column * GATE_STRIDE
        b_scale_ptr += expert * stride_bse
        zero_point_ptr += expert * stride_bze
        scale_ptrs = b_scale_ptr + (scale_row // GROUP_N) * stride_bsn
        up_scale_ptrs = b_scale_ptr + ((scale_row + up_row_offset) // GROUP_N) * stride_bsn
        zero_point_ptrs = zero_point_ptr + scale_row * stride_bzn
        up_zero_point_ptrs = zero_point_ptr + (scale_row + up_row_offset) * stride_bzn
        gate = tl.zeros((1, BLOCK_N, BLOCK_K // VECTOR_SIZE), tl.float32)
        up = gate
        gate, up = _add_step(
            gate, up, gate_codes, up_codes, 0, x, x_scale_ptr, x_scale, hidden_size, scale_mask,
            scale_ptrs, up_scale_ptrs, zero_point_ptrs, up_zero_point_ptrs,
            stride_xsk, stride_bsk, stride_bzk,
            INPUT_QUANT, QMAX, ROUND_TO_INT, MIN_SCALE, WEIGHT_DTYPE, ZERO_POINT, HAS_ZERO_POINTS,
            GATED, GROUP_K,
            BLOCK_N, BLOCK_K, VECTOR_SIZE,
        )  # fmt: skip
        for start in tl.range(BLOCK_K, hidden_size, BLOCK_K, num_stages=STAGES):
            in_bounds = start + k < hidden_size
            w_mask = column_mask[None, :, None] & in_bounds[None, None, :]
            w_ptrs += BLOCK_K * stride_bk
            gate_codes = tl.load(w_ptrs, mask=w_mask, other=0.0)
            up_codes = gate_codes
            if GATED:
                up_codes = tl.load(w_ptrs + up_offset, mask=w_mask, other=0.0)
            x = tl.load(x_ptr + (start + k) * stride_xk, mask=in_bounds, other=0.0)
            gate, up = _add_step(
                gate, up, gate_codes, up_codes, start, x, x_scale_ptr, x_scale, hidden_size,
                scale_mask,
                scale_ptrs, up_scale_ptrs, zero_point_ptrs, up_zero_point_ptrs,
                stride_xsk, stride_bsk, stride_bzk,
                INPUT_QUANT, QMAX, ROUND_TO_INT, MIN_SCALE, WEIGHT_DTYPE, ZERO_POINT,
                HAS_ZERO_POINTS, GATED, GROUP_K,
                BLOCK_N, BLOCK_K, VECTOR_SIZE,
            )  # fmt: skip
        gate_sums, up_sums = tl.sum(gate, axis=2), tl.sum(up, axis=2)
        if HAS_SCALES and GROUP_K == 0:
            row = column * GATE_STRIDE
            scale = tl.load(
                b_scale_ptr + (row // GROUP_N) * stride_bsn, mask=column_mask, other=0.0
            )
            gate_sums *= (x_scale * scale.to(tl.float32))[None, :]
            row += up_row_offset
            scale = tl.load(
                b_scale_ptr + (row // GROUP_N) * stride_bsn, mask=column_mask, other=0.0
            )
            up_sums *= (x_scale * scale.to(tl.float32))[None, :]
    if HAS_LORA:
        adapter = tl.load(adapter_slots_ptr + token).to(tl.int64)
        if (adapter >= 0) & (adapter < num_adapter_slots):
            lora_u_ptrs = (
                lora_u_ptr + pair.to(tl.int64) * stride_lora_u + tl.zeros((1, 1), tl.int32)
            )
            lora_b_ptr += adapter * stride_lora_b_slot + expert * stride_lora_b_expert
            lora_b_ptrs = (
                lora_b_ptr + (column * GATE_STRIDE).to(tl.int64)[None, :, None] * stride_lora_b_n
            )
            lora_b_mask = column_mask[None, :, None]
            gate_sums += compute_adapter_sums(
                lora_u_ptrs, True, lora_b_ptrs, lora_b_mask, lora_rank, BLOCK_RANK
            )
            if GATED:
                up_rows = (column * GATE_STRIDE + up_row_offset).to(tl.int64)[None, :, None]
                lora_b_ptrs = lora_b_ptr + up_rows * stride_lora_b_n
                up_sums += compute_adapter_sums(
                    lora_u_ptrs + LORA_UP_OFFSET,
                    True,
                    lora_b_ptrs,
                    lora_b_mask,
                    lora_rank,
                    BLOCK_RANK,
                )
    row_weight = tl.zeros((1,), tl.float32)
    if HAS_ROUTER_WEIGHTS:
        row_weight += tl.load(router_weights_ptr + pair)
    h = finish_tile(
        gate_sums, up_sums, bias_ptr + expert * stride_bias, column * GATE_STRIDE, up_row_offset,
        column_mask, row_weight, HAS_BIAS, HAS_ROUTER_WEIGHTS, GATED, ACTIVATION, ACTIVATION_ALPHA,
        ACTIVATION_LIMIT,
    )  # fmt: skip
    h = h.to(h_ptr.dtype.element_ty)
    h_ptrs = h_ptr + pair.to(tl.int64) * intermediate_size + column[None, :]
    tl.store(h_ptrs, h, mask=column_mask[None, :])
    if STORE_AMAX:
        magnitude = tl.where(column_mask[None, :], tl.abs(h.to(tl.float32)), 0.0)
        blocks = tl.cdiv(intermediate_size, BLOCK_N)
        tl.store(amax_ptr + pair * blocks + block, max_nan(max_nan(magnitude, 1), 0))
