"""Kernel of the GEMMs of all experts over the batched format (e, capacity, depth)."""

import triton
import triton.language as tl

from experts.triton.kernels.adapters import expand_adapters, load_slots
from experts.triton.kernels.gemm_tile import finish_tile, grouped_tile_order, store_rows
from experts.triton.kernels.gemm_tile_dispatch import gemm_tile


@triton.jit
def batched_gemm_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, zero_ptr, bias_ptr, out_ptr, counts_ptr,
    capacity, columns, depth, up_row, up_offset, num_m,
    stride_ase, stride_asm, stride_ask,
    stride_be, stride_bn, stride_bk, stride_bse, stride_bsn, stride_bsk,
    stride_bze, stride_bzn, stride_bzk, stride_bias, order_ptr, stride_oe,
    ROW_STEP: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    MODE: tl.constexpr, FORMAT: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr,
    ONE_SCALE: tl.constexpr, ZERO_POINT: tl.constexpr, HAS_ZERO: tl.constexpr, PACKED: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_ORDER: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    u_ptr=None, slots_ptr=None, lora_b_ptr=None, num_slots=0, rank=0,
    stride_u=0, stride_lbl=0, stride_lbe=0, stride_lbn=0,
    U_UP: tl.constexpr = 0, LORA: tl.constexpr = False, BLOCK_R: tl.constexpr = 16,
):  # fmt: skip
    """out[i, c, n] = act(a[i, c] @ b[i, rows of n]^T) for the first counts[i] rows c of expert i.

    Grid: (tiles of one expert, e). A program computes BLOCK_M rows by BLOCK_N columns of one
    expert. It returns immediately if the expert has no rows there.

    a_ptr: (e, capacity, depth), contiguous.
    a_scale_ptr: the scales of a, with strides for expert, row and group.
    out_ptr: (e, capacity, columns), contiguous. Rows from counts[i] on are neither read nor
        written.
    LORA: add B u for the adapter of the row. The slots and the rows of u are (e, capacity).

    b, bias and the other constants are as in `grouped_gemm_kernel`.
    """
    expert = tl.program_id(1).to(tl.int64)
    pid_m, pid_n = grouped_tile_order(tl.program_id(0), num_m, tl.cdiv(columns, BLOCK_N), GROUP_M)
    count = tl.load(counts_ptr + expert)
    if pid_m * BLOCK_M >= count:
        return
    row = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = row < count
    column = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < columns
    slot = expert * capacity + row.to(tl.int64)
    a_scale_ptr += expert * stride_ase
    gate, up = gemm_tile(
        a_ptr + slot[:, None] * depth, a_scale_ptr + row.to(tl.int64) * stride_asm, row_mask,
        b_ptr + expert * stride_be, b_scale_ptr + expert * stride_bse,
        zero_ptr + expert * stride_bze, column * ROW_STEP, up_row, up_offset, column_mask, depth,
        1, stride_ask, stride_bn, stride_bk, stride_bsn, stride_bsk, stride_bzn, stride_bzk,
        order_ptr + expert * stride_oe,
        MODE, FORMAT, GROUP_N, GROUP_K, ONE_SCALE, ZERO_POINT, HAS_ZERO, PACKED, GATED, EVEN_K,
        HAS_ORDER, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if LORA:
        slots = load_slots(slots_ptr, slot, row_mask, num_slots)
        gate, up = expand_adapters(
            gate, up, slots, slot, u_ptr, lora_b_ptr + expert * stride_lbe,
            column * ROW_STEP, up_row, column_mask, rank, stride_u, stride_lbl, stride_lbn,
            U_UP, GATED, PRECISION, BLOCK_R,
        )  # fmt: skip
    result = finish_tile(
        gate, up, bias_ptr + expert * stride_bias, column * ROW_STEP, up_row, column_mask,
        gate, HAS_BIAS, False, GATED, KIND, ALPHA, LIMIT,
    )  # fmt: skip
    store_rows(out_ptr, slot, row_mask, column, column_mask, columns, result)
