"""`gemv_down_kernel`: GEMM 2 of the gemv path (h W2^T), with the sum over each token's pairs.

A pair is a token together with one of its top_k experts: pair p belongs to token p // top_k. A
program computes a block of hidden columns of one token, from the intermediate rows h of all its
pairs, which `gemv_gate_up_kernel` has computed.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from experts.triton.gemv.kernels.common import (
    compute_adapter_sums,
    compute_n_major_sums,
    compute_step_sums,
    quantize_groups,
    quantize_to_float32,
)
from modular_kernel.ops.kernels.extrema import max_nan, maximum_nan
from modular_kernel.ops.kernels.ids import load_local_ids
from modular_kernel.ops.kernels.quantize import scale_of


@triton.jit
def _compute_pair_scales(
    amax_ptr, pairs, valid, num_amax_blocks, num_pairs,
    topk_ids_ptr, expert_map_ptr, num_experts, num_local_experts, HAS_EXPERT_MAP: tl.constexpr,
    INPUT_QUANT: tl.constexpr, QMAX: tl.constexpr, MIN_SCALE: tl.constexpr,
    PAIRS_PER_STEP: tl.constexpr, BLOCK_AMAX: tl.constexpr,
):  # fmt: skip
    """Compute the quantization scales (PAIRS_PER_STEP,) of h from the maxima that GEMM 1 wrote.

    amax_ptr: (num_pairs, num_amax_blocks), the largest magnitude in each block of columns of h.
    pairs: (PAIRS_PER_STEP,), the pairs.
    valid: (PAIRS_PER_STEP,), False for pairs that are skipped.
    INPUT_QUANT: "token": one scale per pair; "tensor": one scale for all pairs.
    """
    block = tl.arange(0, BLOCK_AMAX)
    if INPUT_QUANT == "token":
        mask = valid[:, None] & (block < num_amax_blocks)[None, :]
        ptrs = amax_ptr + pairs[:, None] * num_amax_blocks + block[None, :]
        amax = max_nan(tl.load(ptrs, mask=mask, other=0.0), 1)
    else:
        tl.static_assert(INPUT_QUANT == "tensor")
        block_amax = tl.zeros((BLOCK_AMAX,), tl.float32)
        for pair in range(num_pairs):
            local_expert, _ = load_local_ids(
                topk_ids_ptr,
                pair,
                pair >= 0,
                expert_map_ptr,
                num_experts,
                num_local_experts,
                HAS_EXPERT_MAP,
            )
            mask = (block < num_amax_blocks) & (local_expert >= 0)
            pair_amax = tl.load(amax_ptr + pair * num_amax_blocks + block, mask=mask, other=0.0)
            block_amax = maximum_nan(block_amax, pair_amax)
        amax = tl.zeros((PAIRS_PER_STEP,), tl.float32) + max_nan(block_amax, 0)
    return scale_of(amax, QMAX, MIN_SCALE)


@triton.jit
def _add_step(
    sums, codes, start, h, h_scale, scale_mask, size_k, scale_ptrs, zero_point_ptrs,
    stride_bsk, stride_bzk,
    INPUT_QUANT: tl.constexpr, QMAX: tl.constexpr, ROUND_TO_INT: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr, ZERO_POINT: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr,
    GROUP_K: tl.constexpr,
    PAIRS_PER_STEP: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    VECTOR_SIZE: tl.constexpr,
):  # fmt: skip
    """Add the products of one step along K to `sums` and return them.

    codes: (PAIRS_PER_STEP, ROWS, BLOCK_K), stored weights.
    h: (PAIRS_PER_STEP, BLOCK_K). It is quantized here according to INPUT_QUANT.
    h_scale: (PAIRS_PER_STEP,), used if INPUT_QUANT is "token", "tensor" or "static".
    scale_mask: (PAIRS_PER_STEP, SCALE_ROWS, 1), False for weight rows that do not exist.
    """
    h = h.to(tl.float32)
    scales = tl.zeros((PAIRS_PER_STEP, BLOCK_K // VECTOR_SIZE), tl.float32)
    if INPUT_QUANT == "group":
        h, scales = quantize_groups(
            h, QMAX, ROUND_TO_INT, MIN_SCALE, WEIGHT_DTYPE, GROUP_K, PAIRS_PER_STEP, BLOCK_K,
            VECTOR_SIZE
        )  # fmt: skip
    elif INPUT_QUANT != "none":
        h = quantize_to_float32(h, h_scale[:, None], QMAX, ROUND_TO_INT, WEIGHT_DTYPE)
    else:
        scales += 1.0
    vector = start + tl.arange(0, BLOCK_K // VECTOR_SIZE) * VECTOR_SIZE
    group = (vector // (GROUP_K if GROUP_K > 0 else 1))[None, None, :]
    sums += compute_step_sums(
        codes, h, scales, scale_ptrs + group * stride_bsk, zero_point_ptrs + group * stride_bzk,
        scale_mask & (vector < size_k)[None, None, :],
        ZERO_POINT, HAS_ZERO_POINTS, GROUP_K, PAIRS_PER_STEP, ROWS, BLOCK_K, VECTOR_SIZE,
    )  # fmt: skip
    return sums


@triton.jit
def gemv_down_kernel(
    h_ptr, h_scale_ptr, b_ptr, b_scale_ptr, zero_point_ptr, bias_ptr, router_weights_ptr,
    topk_ids_ptr, expert_map_ptr, out_ptr, amax_ptr,
    num_pairs, hidden_size, size_k, num_amax_blocks, num_experts, num_local_experts,
    routed_scaling_factor,
    stride_be, stride_bn, stride_bk, stride_bse, stride_bsn, stride_bsk,
    stride_bze, stride_bzn, stride_bzk, stride_bias,
    PAIRS_PER_OUTPUT: tl.constexpr, HAS_EXPERT_MAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_ROUTER_WEIGHTS: tl.constexpr, INPUT_QUANT: tl.constexpr, QMAX: tl.constexpr,
    ROUND_TO_INT: tl.constexpr, MIN_SCALE: tl.constexpr, HAS_SCALES: tl.constexpr,
    ZERO_POINT: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    SCALE_ROWS: tl.constexpr, BLOCK_AMAX: tl.constexpr,
    PAIRS_PER_STEP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    VECTOR_SIZE: tl.constexpr,
    STAGES: tl.constexpr, USE_PDL: tl.constexpr = False,
    lora_u_ptr=None, adapter_slots_ptr=None, lora_b_ptr=None, num_adapter_slots=0, lora_rank=0,
    stride_lora_u=0, stride_lora_b_slot=0, stride_lora_b_expert=0, stride_lora_b_n=0,
    PAIRS_PER_TOKEN: tl.constexpr = 1, HAS_LORA: tl.constexpr = False,
    BLOCK_RANK: tl.constexpr = 16,
    N_MAJOR: tl.constexpr = False, STEP_ROWS: tl.constexpr = 1,
):  # fmt: skip
    """Compute GEMM 2 for each pair, and write the weighted sum over the pairs of each token to out.

    The term of pair p is routed_scaling_factor * weight[p] * (h[p] @ w[expert of p]^T + bias). If
    PAIRS_PER_OUTPUT = 1, every pair has its own output row, which is zero if the pair is skipped.

    Grid: (num_pairs / PAIRS_PER_OUTPUT * blocks of BLOCK_N columns,), in which the token index
        varies fastest. A program computes BLOCK_N columns of one token. It processes PAIRS_PER_STEP
        of the token's pairs at once, in order.

    h_ptr: (num_pairs, K), contiguous, the output of GEMM 1.
    h_scale_ptr: (1,), the scale of h if INPUT_QUANT is "static".
    b_ptr: weights (num_experts, hidden_size, K). Weights of skipped pairs are not read.
    b_scale_ptr: weight scales, one per GROUP_N rows and GROUP_K columns; used if HAS_SCALES.
    zero_point_ptr: zero points of integer weights, used if HAS_ZERO_POINTS. Otherwise, ZERO_POINT
        is subtracted from all weights.
    bias_ptr: (num_experts, hidden_size), used if HAS_BIAS.
    router_weights_ptr: (num_pairs,) float32, used if HAS_ROUTER_WEIGHTS.
    topk_ids_ptr, expert_map_ptr, num_experts, num_local_experts, HAS_EXPERT_MAP: the expert ids of
        the pairs, and how they map to the experts on this rank; see `load_local_ids`. Pairs whose
        expert is not on this rank are skipped.
    out_ptr: (num_pairs / PAIRS_PER_OUTPUT, hidden_size), contiguous.
    amax_ptr: (num_pairs, num_amax_blocks) float32, the largest magnitude in each block of columns
        of h.
    size_k: K, the intermediate size.
    stride_*: strides, named as in vLLM: b (weights), bs (weight scales), bz (zero points);
        dimensions e (expert), n, k.
    PAIRS_PER_OUTPUT: pairs per output row, top_k or 1.
    INPUT_QUANT: how h is quantized:
        "none": h is not quantized.
        "token", "group", "tensor": with one scale per token, group or tensor.
        "static": with the scale at h_scale_ptr.
    QMAX, ROUND_TO_INT, MIN_SCALE: the largest value of the quantized type, whether the type is an
        integer, and the minimum scale.
    GROUP_K: K elements per weight scale; 0 if one scale covers all of K.
    SCALE_ROWS: 1 if all BLOCK_N weight rows share a scale, otherwise BLOCK_N.
    BLOCK_AMAX: a power of two >= num_amax_blocks.
    VECTOR_SIZE: adjacent weights per load of a thread.
    STAGES: stages of the software pipeline.
    USE_PDL: whether the launch uses programmatic dependent launch (`pdl_wait`).
    HAS_LORA: whether B[adapter slot of the token, expert] @ u[p] is added before the bias.
        lora_u_ptr is u, (num_pairs, lora_rank); adapter_slots_ptr has one slot per token, and
        PAIRS_PER_TOKEN is top_k.
    BLOCK_RANK: a power of two >= lora_rank.
    N_MAJOR: whether weights are contiguous along the weight rows. Only for unquantized weights.
    STEP_ROWS: see `compute_n_major_sums`.
    """
    WEIGHT_DTYPE: tl.constexpr = b_ptr.dtype.element_ty
    num_outputs = num_pairs // PAIRS_PER_OUTPUT
    token = tl.program_id(0) % num_outputs
    column = tl.program_id(0) // num_outputs * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < hidden_size
    k = tl.arange(0, BLOCK_K)
    row_offset = column.to(tl.int64)[None, :, None] * stride_bn + k[None, None, :] * stride_bk
    scale_row = tl.program_id(0) // num_outputs * BLOCK_N + tl.arange(0, SCALE_ROWS)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, PAIRS_PER_OUTPUT, PAIRS_PER_STEP):
        k_index = first + tl.arange(0, PAIRS_PER_STEP)
        pairs = token * PAIRS_PER_OUTPUT + k_index
        local_expert, _ = load_local_ids(
            topk_ids_ptr,
            pairs,
            k_index < PAIRS_PER_OUTPUT,
            expert_map_ptr,
            num_experts,
            num_local_experts,
            HAS_EXPERT_MAP,
        )
        valid = local_expert >= 0
        expert = tl.maximum(local_expert, 0).to(tl.int64)  # NaN-free: integer operands
        w_ptrs = b_ptr + expert[:, None, None] * stride_be + row_offset
        row_mask = valid[:, None, None] & column_mask[None, :, None]
        scale_mask = valid[:, None, None] & (scale_row < hidden_size)[None, :, None]
        if N_MAJOR:
            tl.static_assert(not HAS_SCALES and INPUT_QUANT == "none")
            # The ids are valid before the wait, because GEMM 1 waited for them before this kernel
            # could start. See `pdl_wait`.
            if USE_PDL:
                gdc_wait()
                gdc_launch_dependents()
            pair_sums = compute_n_major_sums(
                h_ptr + pairs.to(tl.int64)[:, None] * size_k, valid[:, None],
                b_ptr + expert[:, None, None] * stride_be + column.to(tl.int64)[None, None, :],
                valid[:, None, None] & column_mask[None, None, :], 1, stride_bk, size_k,
                PAIRS_PER_STEP, BLOCK_N, BLOCK_K, STEP_ROWS, STAGES,
            )  # fmt: skip
        else:
            codes = tl.load(w_ptrs, mask=row_mask & (k < size_k)[None, None, :], other=0.0)
            # Load the first weights before waiting for h. The ids are valid here, because GEMM 1
            # waited for them before this kernel could start. See `pdl_wait`.
            if USE_PDL:
                gdc_wait()
                gdc_launch_dependents()
            h_ptrs = h_ptr + pairs.to(tl.int64)[:, None] * size_k + k[None, :]
            # Issue the loads of h before the loads of its amax values.
            h = tl.load(h_ptrs, mask=valid[:, None] & (k < size_k)[None, :], other=0.0)
            h_scale = tl.full((PAIRS_PER_STEP,), 1.0, tl.float32)
            if INPUT_QUANT == "token" or INPUT_QUANT == "tensor":
                h_scale = _compute_pair_scales(
                    amax_ptr, pairs, valid, num_amax_blocks, num_pairs, topk_ids_ptr,
                    expert_map_ptr, num_experts,
                    num_local_experts, HAS_EXPERT_MAP, INPUT_QUANT, QMAX, MIN_SCALE,
                    PAIRS_PER_STEP, BLOCK_AMAX,
                )  # fmt: skip
            elif INPUT_QUANT == "static":
                h_scale *= tl.load(h_scale_ptr)
            scale_ptrs = (
                b_scale_ptr + expert[:, None, None] * stride_bse
                + (scale_row // GROUP_N)[None, :, None] * stride_bsn
            )  # fmt: skip
            zero_point_ptrs = (
                zero_point_ptr + expert[:, None, None] * stride_bze
                + scale_row[None, :, None] * stride_bzn
            )  # fmt: skip
            sums = _add_step(
                tl.zeros((PAIRS_PER_STEP, BLOCK_N, BLOCK_K // VECTOR_SIZE), tl.float32), codes, 0,
                h, h_scale,
                scale_mask, size_k, scale_ptrs, zero_point_ptrs, stride_bsk, stride_bzk,
                INPUT_QUANT, QMAX, ROUND_TO_INT, MIN_SCALE, WEIGHT_DTYPE, ZERO_POINT,
                HAS_ZERO_POINTS, GROUP_K,
                PAIRS_PER_STEP, BLOCK_N, BLOCK_K, VECTOR_SIZE,
            )  # fmt: skip
            for start in tl.range(BLOCK_K, size_k, BLOCK_K, num_stages=STAGES):
                in_bounds = start + k < size_k
                w_ptrs += BLOCK_K * stride_bk
                codes = tl.load(w_ptrs, mask=row_mask & in_bounds[None, None, :], other=0.0)
                h = tl.load(h_ptrs + start, mask=valid[:, None] & in_bounds[None, :], other=0.0)
                sums = _add_step(
                    sums, codes, start, h, h_scale, scale_mask,
                    size_k, scale_ptrs, zero_point_ptrs, stride_bsk, stride_bzk,
                    INPUT_QUANT, QMAX, ROUND_TO_INT, MIN_SCALE, WEIGHT_DTYPE, ZERO_POINT,
                    HAS_ZERO_POINTS, GROUP_K,
                    PAIRS_PER_STEP, BLOCK_N, BLOCK_K, VECTOR_SIZE,
                )  # fmt: skip
            pair_sums = tl.sum(sums, axis=2)
        row_valid = valid[:, None] & column_mask[None, :]
        if HAS_SCALES and GROUP_K == 0:
            ptrs = b_scale_ptr + expert[:, None] * stride_bse
            ptrs += (column // GROUP_N)[None, :] * stride_bsn
            pair_sums *= h_scale[:, None] * tl.load(ptrs, mask=row_valid, other=0.0).to(tl.float32)
        if HAS_LORA:
            adapter = tl.load(adapter_slots_ptr + token * PAIRS_PER_OUTPUT // PAIRS_PER_TOKEN).to(
                tl.int64
            )
            if (adapter >= 0) & (adapter < num_adapter_slots):
                lora_u_ptrs = lora_u_ptr + pairs.to(tl.int64)[:, None] * stride_lora_u
                lora_b_ptrs = (
                    lora_b_ptr
                    + adapter * stride_lora_b_slot
                    + expert[:, None, None] * stride_lora_b_expert
                )
                lora_b_ptrs += column.to(tl.int64)[None, :, None] * stride_lora_b_n
                pair_sums += compute_adapter_sums(
                    lora_u_ptrs,
                    valid[:, None],
                    lora_b_ptrs,
                    row_valid[:, :, None],
                    lora_rank,
                    BLOCK_RANK,
                )
        if HAS_BIAS:
            ptrs = bias_ptr + expert[:, None] * stride_bias + column[None, :]
            pair_sums += tl.load(ptrs, mask=row_valid, other=0.0).to(tl.float32)
        if HAS_ROUTER_WEIGHTS:
            # The router weight of a skipped pair may have any value, including NaN.
            pair_sums *= tl.load(router_weights_ptr + pairs, mask=valid, other=0.0)[:, None]
        if INPUT_QUANT == "tensor" or INPUT_QUANT == "static":
            # A shared scale may be NaN, and 0 * NaN is NaN.
            pair_sums = tl.where(valid[:, None], pair_sums, 0.0)
        total += tl.sum(pair_sums, axis=0)
    out_ptrs = out_ptr + token.to(tl.int64) * hidden_size + column
    tl.store(
        out_ptrs, (total * routed_scaling_factor).to(out_ptr.dtype.element_ty), mask=column_mask
    )
