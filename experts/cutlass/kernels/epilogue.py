"""Epilogue of `block_gemm`: apply the activation to the accumulators, and store the results."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from experts.cutlass.kernels.tile import (
    ACC_PER_THREAD,
    BOX_BYTES,
    F32,
    I32,
    MIN_SCALE,
    PART_N,
    PARTS,
    QMAX,
    ROWS,
)


class Epilogue:
    """Mixin of BlockGemm that stores the accumulators of one warpgroup.

    BlockGemm defines these attributes:

    gated: whether the two parts of a tile are gate and up rows (see `BlockGemm`).
    columns: output columns per tile.
    boxes: TMA boxes of the output that a warpgroup stages in shared memory.
    """

    gated: bool
    columns: int
    boxes: int

    @cute.jit
    def store_tile(
        self, sums, s_out, o_atom, o_tma, out, out_scale, row, end, n, group, warp, lane
    ):  # fmt: skip
        """Store the results of rows [row, min(row + 64, end)).

        sums: the thread's accumulators, (ACC_PER_THREAD, PARTS). The parts are the two halves of
            the columns, or gate and up.
        s_out: shared memory that stages the output of all warpgroups.
        o_atom: TMA copy to out.
        o_tma: out as a TMA tensor.
        n: index of the column tile.
        group: index of the warpgroup.
        warp: index of the warp in the warpgroup.
        """
        # The shuffle keeps the compiler from hoisting lane-dependent addresses above the GEMM.
        lane = cute.arch.shuffle_sync(lane, lane)
        if cutlass.const_expr(self.gated):
            self.store_silu_mul_fp8(
                sums, s_out, o_atom, o_tma, out, out_scale, row, end, n, group, warp, lane
            )
        else:
            self.store_bf16(sums, s_out, o_atom, o_tma, out, row, end, n, group, warp, lane)

    @cute.jit
    def store_bf16(self, sums, s_out, o_atom, o_tma, out, row, end, n, group, warp, lane):
        """Store bf16 rows. If all 64 rows are valid, TMA stores two boxes of 64 columns at once."""
        columns = cute.size(out, mode=[1])
        first_column = n * self.columns
        local_row = warp * 16 + lane // 4
        for part in cutlass.range_constexpr(PARTS):
            if row + ROWS <= end:
                self.wait_for_staging(group, warp)
                for column_group in cutlass.range_constexpr(PART_N // 16):
                    # One stmatrix stores four 8 x 8 matrices, in this order: rows 0 to 7 and rows
                    # 8 to 15 of the first 8 columns, then the same rows of the next 8 columns.
                    dst = s_out[None, None, group * 2 + column_group // 4].iterator
                    byte = (column_group % 4) * 32 + 16 * (lane // 16)
                    store_matrices(
                        dst, warp * 16 + lane % 16, byte, pack_bf16_words(sums, part, column_group)
                    )
                self.tma_store(s_out, o_atom, o_tma, row, first_column + part * PART_N, group, warp)
            else:
                for column_group in cutlass.range_constexpr(PART_N // 16):
                    words = pack_bf16_words(sums, part, column_group)
                    for word in cutlass.range_constexpr(4):
                        out_row = row + local_row + 8 * (word % 2)
                        column = (
                            first_column
                            + part * PART_N
                            + column_group * 16
                            + 8 * (word // 2)
                            + 2 * (lane % 4)
                        )
                        if out_row < end and column < columns:
                            dst = out.iterator + (cutlass.Int64(out_row) * columns + column)
                            cute.arch.store(cute.recast_ptr(dst, dtype=I32), words[word])

    @cute.jit
    def store_silu_mul_fp8(
        self, sums, s_out, o_atom, o_tma, out, out_scale, row, end, n, group, warp, lane
    ):  # fmt: skip
        """Round h = silu(gate) * up to bf16, quantize it to e4m3 and store it.

        The tile has 128 output columns, so each row of the tile has one scale.
        """
        columns = cute.size(out, mode=[1])
        first_column = n * self.columns
        thread_row = warp * 16 + lane // 4
        amax = [F32(0.0), F32(0.0)]
        for i in cutlass.range_constexpr(ACC_PER_THREAD):
            h = F32(cutlass.BFloat16(silu_mul(sums[i, 0], sums[i, 1])))
            sums[i, 0] = h
            amax[(i // 2) % 2] = max_nan(amax[(i // 2) % 2], compute_abs(h))
        amax_r0, amax_r8 = amax  # of rows thread_row and thread_row + 8
        for d in cutlass.range_constexpr(2):  # four threads share a row
            amax_r0 = max_nan(amax_r0, cute.arch.shuffle_sync_bfly(amax_r0, 1 << d))
            amax_r8 = max_nan(amax_r8, cute.arch.shuffle_sync_bfly(amax_r8, 1 << d))
        scale_r0 = max_nan(divide(amax_r0, F32(QMAX)), F32(MIN_SCALE))
        scale_r8 = max_nan(divide(amax_r8, F32(QMAX)), F32(MIN_SCALE))
        inverse_scales = (divide(F32(1.0), scale_r0), divide(F32(1.0), scale_r8))
        if lane % 4 == 0 and first_column < columns:
            if row + thread_row < end:
                out_scale[row + thread_row, n] = scale_r0
            if row + thread_row + 8 < end:
                out_scale[row + thread_row + 8, n] = scale_r8
        all_valid = row + ROWS <= end
        if all_valid:
            self.wait_for_staging(group, warp)
        staging_address = I32(s_out[None, None, group].iterator.toint())
        for i in cutlass.range_constexpr(0, ACC_PER_THREAD, 2):
            half = (i // 2) % 2
            pair = pack_e4m3_pair(
                sums[i, 0] * inverse_scales[half], sums[i + 1, 0] * inverse_scales[half]
            )
            local_row = thread_row + 8 * half
            column = (i // 4) * 8 + 2 * (lane % 4)
            if all_valid:
                dst = staging_address + local_row * BOX_BYTES + (column ^ ((local_row % 8) * 16))
                cute.arch.inline_ptx("st.shared.b16 [{$r0}], {$r1};", read_only_args=[dst, pair])
            elif row + local_row < end and first_column < columns:
                offset = cutlass.Int64(row + local_row) * columns + first_column + column
                dst = cute.recast_ptr(out.iterator + offset, dtype=cutlass.Int16)
                cute.arch.store(dst, pair)
        if all_valid:
            self.tma_store(s_out, o_atom, o_tma, row, first_column, group, warp)

    @cute.jit
    def wait_for_staging(self, group, warp):
        """Wait until TMA has read the previous boxes of the warpgroup from shared memory."""
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=group + 1, number_of_threads=128)

    @cute.jit
    def tma_store(self, s_out, o_atom, o_tma, row, column, group, warp):
        """Store the staged boxes of the warpgroup with TMA, which skips columns out of bounds."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=group + 1, number_of_threads=128)
        if warp == 0:
            box_columns = cute.size(s_out, mode=[1])
            for box in cutlass.range_constexpr(self.boxes):
                g_out = cute.domain_offset((row, column + box * box_columns), o_tma)
                g_out = cute.local_tile(g_out, (ROWS, box_columns), (0, 0))
                src, dst = cpasync.tma_partition(
                    o_atom, 0, cute.make_layout(1), cute.group_modes(s_out, 0, 2),
                    cute.group_modes(g_out, 0, 2),
                )  # fmt: skip
                cute.copy(o_atom, src[None, group * self.boxes + box], dst)
            cute.arch.cp_async_bulk_commit_group()


def store_matrices(dst, row, byte, words):
    """Store four words per thread with stmatrix (8 x 8 matrices) into 128-byte swizzled rows."""
    address = I32(dst.toint()) + row * BOX_BYTES + (byte ^ ((row % 8) * 16))
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *words],
    )


def pack_bf16_words(sums, part, column_group):
    """Return four words of two bf16 each, for `store_matrices`.

    The words contain the thread's accumulators in the 16 columns of `column_group`. Words 0 and 1
    hold two adjacent columns of the thread's two rows, and words 2 and 3 hold the columns 8 further
    right.
    """
    code = "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};"
    base = column_group * 8
    return tuple(
        inline_ptx(code, I32, sums[base + 2 * word + 1, part], sums[base + 2 * word, part])
        for word in range(4)
    )


def pack_e4m3_pair(low, high):
    return inline_ptx("cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r0}, {$r1};", cutlass.Int16, high, low)


def compute_abs(value):
    return inline_ptx("abs.f32 {$w0}, {$r0};", F32, value)


def max_nan(a, b):
    """Return the larger of two values, or NaN if either is NaN. `cute.arch.fmax` ignores NaN."""
    return inline_ptx("max.NaN.f32 {$w0}, {$r0}, {$r1};", F32, a, b)


def divide(a, b):
    """Return a / b, rounded to nearest as in `modular_kernel.ops.kernels.quantize`."""
    return inline_ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", F32, a, b)


def silu_mul(gate, up):
    exponential = cute.arch.exp2(gate * F32(-1.4426950408889634))
    return gate * cute.arch.rcp_approx(exponential + F32(1.0)) * up


def inline_ptx(code, result_type, *operands):  # noqa: ANN002
    return cute.arch.inline_ptx(code, write_only_types=[result_type], read_only_args=list(operands))
