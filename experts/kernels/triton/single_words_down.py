"""GEMM 2 of the single path for 4-bit weights."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from experts.kernels.triton.single_words import fetch_ahead, word_sums
from modular_kernel.ops.kernels.ids import load_local_ids


@triton.jit(do_not_specialize=["num_pairs"])
def single_words_down_kernel(
    h_ptr, b_ptr, b_scale_ptr, zero_ptr, bias_ptr, row_weights_ptr, ids_ptr, map_ptr, out_ptr,
    num_pairs, hidden, depth, num_experts, num_local, factor,
    stride_be, stride_bn, stride_bse, stride_bsn, stride_bze, stride_bzn, stride_bias,
    SLOTS: tl.constexpr, HAS_MAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_ROW_WEIGHTS: tl.constexpr, E2M1: tl.constexpr, HAS_ZERO: tl.constexpr,
    EVEN_K: tl.constexpr, GROUP_K: tl.constexpr, S: tl.constexpr, PARTS: tl.constexpr,
    PART_K: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """out[t, n] = factor * sum over the pairs p of t of weight[p] * (h[p] @ w[expert, n] + bias).

    As single_down_kernel, with weights as in single_words_up_kernel. S slots are held at once, and
    PARTS / S warps share the depth of each. AHEAD: lines of a row that are sent for before h is
    waited for.
    """
    rows = num_pairs // SLOTS
    token = tl.program_id(0) % rows
    column = tl.program_id(0) // rows * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < hidden
    SPLITS: tl.constexpr = PARTS // S
    part = tl.arange(0, PARTS)
    first_k = (part % SPLITS * PART_K)[:, None, None]
    row = column[None, :, None]
    w_rows = row * (stride_bn // 4)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, SLOTS, S):
        slot = first + part // SPLITS
        pairs = token * SLOTS + slot
        local, _ = load_local_ids(
            ids_ptr, pairs, slot < SLOTS, map_ptr, num_experts, num_local, HAS_MAP
        )
        live = local >= 0
        of_part = tl.maximum(local, 0).to(tl.int64)
        expert = of_part[:, None, None]
        w_ptrs = b_ptr.to(tl.pointer_type(tl.int32)) + expert * (stride_be // 4)
        # GEMM 1 has waited for the ids when this kernel may begin; h is what it waits for itself.
        if OVERLAP:
            if AHEAD > 0:
                fetch_ahead(
                    w_ptrs, w_rows, column_mask[None, :, None], live[:, None, None], first_k, depth,
                    SPLITS * PART_K, PART_K, PARTS, BLOCK_N, AHEAD,
                )  # fmt: skip
            gdc_wait()
            gdc_launch_dependents()
        sums = word_sums(
            w_ptrs, w_rows,
            h_ptr + pairs.to(tl.int64)[:, None, None] * depth,
            b_scale_ptr + expert * stride_bse + row * stride_bsn,
            zero_ptr + expert * stride_bze + (row // 2) * stride_bzn, (row % 2) * 4,
            column_mask[None, :, None], live[:, None, None], first_k, depth, 1,
            E2M1, HAS_ZERO, EVEN_K, GROUP_K, SPLITS * PART_K, PARTS, BLOCK_N, PART_K, STAGES,
        )  # fmt: skip
        if HAS_BIAS:
            ptrs = bias_ptr + of_part[:, None] * stride_bias + column[None, :]
            once = live & (part % SPLITS == 0)
            mask = once[:, None] & column_mask[None, :]
            sums += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        if HAS_ROW_WEIGHTS:
            # A skipped pair's weight may be anything, NaN too.
            sums *= tl.load(row_weights_ptr + pairs, mask=live, other=0.0)[:, None]
        total += tl.sum(sums, axis=0)
    out_ptrs = out_ptr + token.to(tl.int64) * hidden + column
    tl.store(out_ptrs, (total * factor).to(out_ptr.dtype.element_ty), mask=column_mask)
