"""GEMM 1 of the single path for 4-bit weights."""

import triton
import triton.language as tl

from experts.kernels.triton.single_up import count_invalid
from experts.kernels.triton.single_words import word_sums
from experts.kernels.triton.tile import finish_tile
from modular_kernel.ops.kernels.ids import load_local_ids
from modular_kernel.ops.kernels.overlap import after_predecessor


@triton.jit(do_not_specialize=["num_pairs"])
def single_words_up_kernel(
    x_ptr, b_ptr, b_scale_ptr, zero_ptr, bias_ptr, row_weights_ptr, ids_ptr, map_ptr, invalid_ptr,
    h_ptr, num_pairs, intermediate, hidden, up_row, num_experts, num_local, stride_xm, stride_xk,
    stride_be, stride_bn, stride_bse, stride_bsn, stride_bze, stride_bzn, stride_bias,
    TOP_K: tl.constexpr, ROW_STEP: tl.constexpr, HAS_MAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_ROW_WEIGHTS: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, E2M1: tl.constexpr, HAS_ZERO: tl.constexpr, EVEN_K: tl.constexpr,
    GROUP_K: tl.constexpr, PARTS: tl.constexpr, PART_K: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """h[p, n] = act(x[p // TOP_K] @ w[expert of p, rows of n]^T) for pairs p of experts here.

    As single_up_kernel, with weights in bytes, (e, rows, hidden / 2), read as int32 words of eight;
    scales and zero points lie side by side along the depth. The PARTS warps share the depth.
    """
    after_predecessor(OVERLAP)
    if tl.program_id(0) == 0:
        count_invalid(
            ids_ptr, map_ptr, invalid_ptr, num_pairs, num_experts, num_local, HAS_MAP, BLOCK_P
        )
    pair = tl.program_id(0) % num_pairs
    block = tl.program_id(0) // num_pairs
    local, _ = load_local_ids(ids_ptr, pair, pair >= 0, map_ptr, num_experts, num_local, HAS_MAP)
    if local < 0:
        return
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    expert, token = local.to(tl.int64), (pair // TOP_K).to(tl.int64)
    # Gate rows, then up rows.
    of_row = tl.arange(0, ROWS)
    of_column = block * BLOCK_N + of_row % BLOCK_N
    row = (of_column * ROW_STEP + (of_row // BLOCK_N) * up_row)[None, :, None]
    part = tl.arange(0, PARTS)[:, None, None]
    words_ptr = b_ptr.to(tl.pointer_type(tl.int32)) + expert * (stride_be // 4)
    sums = word_sums(
        words_ptr + part * 0, row * (stride_bn // 4),
        x_ptr + token * stride_xm + part * 0,
        b_scale_ptr + expert * stride_bse + row * stride_bsn,
        zero_ptr + expert * stride_bze + (row // 2) * stride_bzn, (row % 2) * 4,
        (of_column < intermediate)[None, :, None], part >= 0, part * PART_K, hidden, stride_xk,
        E2M1, HAS_ZERO, EVEN_K, GROUP_K, PARTS * PART_K, PARTS, ROWS, PART_K, STAGES,
    )  # fmt: skip
    tile = tl.sum(sums, axis=0)
    if GATED:
        gate, up = tl.split(tl.trans(tl.reshape(tile, (2, BLOCK_N))))
    else:
        gate = tile
        up = tile
    row_weight = tl.zeros((1,), tl.float32)
    if HAS_ROW_WEIGHTS:
        row_weight += tl.load(row_weights_ptr + pair)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < intermediate
    h = finish_tile(
        gate[None, :], up[None, :], bias_ptr + expert * stride_bias, column * ROW_STEP, up_row,
        column_mask, row_weight, HAS_BIAS, HAS_ROW_WEIGHTS, GATED, KIND, ALPHA, LIMIT,
    )  # fmt: skip
    h_ptrs = h_ptr + pair.to(tl.int64) * intermediate + column[None, :]
    tl.store(h_ptrs, h.to(h_ptr.dtype.element_ty), mask=column_mask[None, :])
