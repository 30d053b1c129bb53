"""Grouped NVFP4 GEMM for sm_100a, with block-scaled MMAs (tcgen05.mma).

Rows are sorted by expert. An output tile is 128 rows by 128 weight rows of one expert. The load
warp copies operands (with TMA) and tiled scales (with bulk copies) into a ring of stages in shared
memory. The MMA warp copies the scales of a stage to tensor memory and issues the MMAs of the stage.
Four epilogue warps scale and store the accumulators of a tile while the MMAs of the next tile run.

This kernel has never been run, because no sm_100 GPU was available.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.utils import blackwell_helpers, blockscaled_layout

from experts.cutlass.kernels.fp4_tile import (
    ACC_STAGES,
    E2M1,
    E4M3,
    F32,
    GROUP,
    I32,
    LOAD_WARP,
    MMA_WARP,
    SCALE_BYTES,
    STAGES,
    STEP_BYTES,
    STORE_COLUMNS,
    STORE_WARPS,
    THREADS,
    TILE_K,
    TILE_M,
    TILE_N,
    TMEM_COLUMNS,
)
from experts.cutlass.kernels.ring import advance_slot
from experts.cutlass.kernels.tile_order import tile_at

ONE_CTA = tcgen05.CtaGroup.ONE


class Fp4Gemm:
    """out[r] = (a[r] @ b[expert of r]^T) * factor for every row r of every tile.

    group_m: number of row tiles in a group (see `tile_at`).
    """

    def __init__(self, *, group_m: int = 8) -> None:
        self.group_m = group_m

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,  # (R, K / 2) bytes, two e2m1 each
        b: cute.Tensor,  # (E * rows_b, K / 2) bytes
        a_scale: cute.Tensor,  # (max_tiles, steps * 2048) bytes of e4m3, tile by tile
        b_scale: cute.Tensor,  # (E * rows_b / 128, steps * 2048) bytes
        factors: cute.Tensor,  # (E, matrices) float32, which scale the accumulators
        out: cute.Tensor,  # (R, rows_b) bf16
        tiles: cute.Tensor,  # (3 * max_tiles + 1,) int32: experts, first rows, ends, tile count
        max_tiles: I32,
        rows_b: I32,
        matrix_rows: I32,  # rows_b / matrices
        num_programs: I32,  # number of thread blocks
        stream,
    ) -> None:
        a, b = cute.recast_tensor(a, E2M1), cute.recast_tensor(b, E2M1)
        a_scale, b_scale = cute.recast_tensor(a_scale, E4M3), cute.recast_tensor(b_scale, E4M3)
        shape = (TILE_M, TILE_N, TILE_K)
        op = tcgen05.MmaMXF4NVF4Op(E4M3, (TILE_M, TILE_N, 64), ONE_CTA, tcgen05.OperandSource.SMEM)
        tiled_mma = cute.make_tiled_mma(op)
        a_layout = blackwell_helpers.make_smem_layout_a(tiled_mma, shape, E2M1, STAGES)
        b_layout = blackwell_helpers.make_smem_layout_b(tiled_mma, shape, E2M1, STAGES)
        sfa_layout = blockscaled_layout.make_smem_layout_sfa(tiled_mma, shape, GROUP, STAGES)
        sfb_layout = blockscaled_layout.make_smem_layout_sfb(tiled_mma, shape, GROUP, STAGES)
        cluster = cute.tiled_divide(cute.make_layout((1, 1, 1)), (tiled_mma.thr_id.shape,)).shape
        load_op = cpasync.CopyBulkTensorTileG2SOp(ONE_CTA)
        first_stage = (None, None, None, 0)
        a_atom, a_tma = cute.nvgpu.make_tiled_tma_atom_A(
            load_op, a, cute.slice_(a_layout, first_stage), shape, tiled_mma, cluster
        )
        b_atom, b_tma = cute.nvgpu.make_tiled_tma_atom_B(
            load_op, b, cute.slice_(b_layout, first_stage), shape, tiled_mma, cluster
        )

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[cutlass.Int64, STAGES]
            empty: cute.struct.MemRange[cutlass.Int64, STAGES]
            acc_full: cute.struct.MemRange[cutlass.Int64, ACC_STAGES]
            acc_empty: cute.struct.MemRange[cutlass.Int64, ACC_STAGES]
            tensor_memory: I32
            a: cute.struct.Align[cute.struct.MemRange[E2M1, cute.cosize(a_layout)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[E2M1, cute.cosize(b_layout)], 1024]
            sfa: cute.struct.Align[cute.struct.MemRange[E4M3, SCALE_BYTES * STAGES], 128]
            sfb: cute.struct.Align[cute.struct.MemRange[E4M3, SCALE_BYTES * STAGES], 128]

        self.storage = Storage
        self.kernel(
            tiled_mma, a_atom, a_tma, b_atom, b_tma, a_layout, b_layout, sfa_layout, sfb_layout,
            a_scale, b_scale, factors, out, tiles, max_tiles, rows_b, matrix_rows,
        ).launch(
            grid=[num_programs, 1, 1], block=[THREADS, 1, 1], cluster=[1, 1, 1],
            min_blocks_per_mp=1, stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, tiled_mma, a_atom, a_tma, b_atom, b_tma, a_layout, b_layout, sfa_layout, sfb_layout,
        a_scale, b_scale, factors, out, tiles, max_tiles, rows_b, matrix_rows,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        acc_full, acc_empty = storage.acc_full.data_ptr(), storage.acc_empty.data_ptr()
        s_a = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        s_b = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        s_sfa = storage.sfa.get_tensor(sfa_layout)
        s_sfb = storage.sfb.get_tensor(sfb_layout)
        if warp == LOAD_WARP:
            cpasync.prefetch_descriptor(a_atom)
            cpasync.prefetch_descriptor(b_atom)
        if warp == MMA_WARP:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(STAGES):
                    cute.arch.mbarrier_init(full + i, 1)  # one thread, plus expected bytes
                    cute.arch.mbarrier_init(empty + i, 1)  # commit of the MMAs that read the step
                for i in cutlass.range_constexpr(ACC_STAGES):
                    cute.arch.mbarrier_init(acc_full + i, 1)  # commit of the tile's MMAs
                    cute.arch.mbarrier_init(acc_empty + i, STORE_WARPS)
        cute.arch.mbarrier_init_fence()
        if warp == 0:
            cute.arch.alloc_tmem(TMEM_COLUMNS, storage.tensor_memory)
            cute.arch.relinquish_tmem_alloc_permit()
            fence_before_thread_sync()
        cute.arch.sync_threads()
        fence_after_thread_sync()
        base = cute.arch.retrieve_tmem_ptr(F32, 16, storage.tensor_memory)

        num_m = tiles[3 * max_tiles]
        num_n = (rows_b + TILE_N - 1) // TILE_N
        steps = (cute.size(a_tma, mode=[1]) + TILE_K - 1) // TILE_K
        # This block's first tile, the stride to its next tile, and the number of tiles.
        schedule = (I32(block), I32(blocks), num_m * num_n)
        accumulators = tiled_mma.make_fragment_C(
            cute.append(tiled_mma.partition_shape_C((TILE_M, TILE_N)), ACC_STAGES)
        )
        sums = cute.make_tensor(base, accumulators.layout)
        if warp == LOAD_WARP:
            self.load(
                tiled_mma, a_atom, a_tma, b_atom, b_tma, s_a, s_b, storage.sfa.data_ptr(),
                storage.sfb.data_ptr(), a_scale, b_scale, full, empty, tiles, max_tiles, rows_b,
                num_m, num_n, schedule, steps,
            )  # fmt: skip
        elif warp == MMA_WARP:
            self.multiply(
                tiled_mma, s_a, s_b, s_sfa, s_sfb, sums, sfa_layout, sfb_layout, full, empty,
                acc_full,
                acc_empty, schedule, steps,
            )  # fmt: skip
        else:
            self.store(
                sums, acc_full, acc_empty, factors, out, tiles, max_tiles, rows_b, matrix_rows,
                num_m,
                num_n, schedule, thread,
            )  # fmt: skip
        fence_before_thread_sync()
        cute.arch.sync_threads()
        fence_after_thread_sync()
        if warp == 0:
            cute.arch.dealloc_tmem(base, TMEM_COLUMNS)

    @cute.jit
    def load(
        self, tiled_mma, a_atom, a_tma, b_atom, b_tma, s_a, s_b, sfa, sfb, a_scale, b_scale, full,
        empty, tiles, max_tiles, rows_b, num_m, num_n, schedule, steps,
    ):  # fmt: skip
        """Load operands and scales into the ring slots. Run by the load warp.

        A slot is reused after the MMAs that read it have finished.
        """
        thr_mma = tiled_mma.get_slice(0)
        cta_layout = cute.make_layout(1)
        bulk_atom = cute.make_copy_atom(
            cpasync.CopyBulkG2SOp(), E4M3, num_bits_per_copy=SCALE_BYTES * 8
        )
        index, stride, total = schedule
        slot, phase = I32(0), I32(1)
        while index < total:
            m, n = tile_at(index, num_m, num_n, self.group_m)
            row_b = tiles[m] * rows_b + n * TILE_N
            g_a = cute.domain_offset((tiles[max_tiles + m], 0), a_tma)
            g_a = thr_mma.partition_A(cute.local_tile(g_a, (TILE_M, TILE_K), (0, None)))
            g_b = cute.domain_offset((row_b, 0), b_tma)
            g_b = thr_mma.partition_B(cute.local_tile(g_b, (TILE_N, TILE_K), (0, None)))
            to_a, from_a = cpasync.tma_partition(
                a_atom, 0, cta_layout, cute.group_modes(s_a, 0, 3), cute.group_modes(g_a, 0, 3)
            )
            to_b, from_b = cpasync.tma_partition(
                b_atom, 0, cta_layout, cute.group_modes(s_b, 0, 3), cute.group_modes(g_b, 0, 3)
            )
            g_sfa = cute.zipped_divide(a_scale[m, None], (SCALE_BYTES,))
            g_sfb = cute.zipped_divide(b_scale[row_b // TILE_N, None], (SCALE_BYTES,))
            scale_layout = cute.make_layout(SCALE_BYTES)
            for k in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(empty + slot, phase)
                full_barrier = full + slot
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full_barrier, STEP_BYTES)
                cute.copy(a_atom, from_a[None, k], to_a[None, slot], tma_bar_ptr=full_barrier)
                cute.copy(b_atom, from_b[None, k], to_b[None, slot], tma_bar_ptr=full_barrier)
                with cute.arch.elect_one():
                    to_sfa = cute.make_tensor(sfa + slot * SCALE_BYTES, scale_layout)
                    to_sfb = cute.make_tensor(sfb + slot * SCALE_BYTES, scale_layout)
                    cute.copy(bulk_atom, g_sfa[None, k], to_sfa, mbar_ptr=full_barrier)
                    cute.copy(bulk_atom, g_sfb[None, k], to_sfb, mbar_ptr=full_barrier)
                slot, phase = advance_slot(slot, phase, STAGES)
            index += stride

    @cute.jit
    def multiply(
        self, tiled_mma, s_a, s_b, s_sfa, s_sfb, sums, sfa_layout, sfb_layout, full, empty,
        acc_full,
        acc_empty, schedule, steps,
    ):  # fmt: skip
        """Issue the MMAs of this block's tiles. Run by the MMA warp."""
        t_a, t_b = tiled_mma.make_fragment_A(s_a), tiled_mma.make_fragment_B(s_b)
        first_stage, shape = (None, None, None, 0), (TILE_M, TILE_N, TILE_K)
        sfa_ptr = sums.iterator + tcgen05.find_tmem_tensor_col_offset(sums)
        t_sfa = cute.make_tensor(
            cute.recast_ptr(sfa_ptr, dtype=E4M3),
            blockscaled_layout.make_tmem_layout_sfa(
                tiled_mma, shape, GROUP, cute.slice_(sfa_layout, first_stage)
            ),
        )
        sfb_ptr = sfa_ptr + tcgen05.find_tmem_tensor_col_offset(t_sfa)
        t_sfb = cute.make_tensor(
            cute.recast_ptr(sfb_ptr, dtype=E4M3),
            blockscaled_layout.make_tmem_layout_sfb(
                tiled_mma, shape, GROUP, cute.slice_(sfb_layout, first_stage)
            ),
        )
        copy_a, from_sfa, to_sfa = make_scale_copy(s_sfa, t_sfa)
        copy_b, from_sfb, to_sfb = make_scale_copy(s_sfb, t_sfb)
        index, stride, total = schedule
        slot, phase = I32(0), I32(0)
        acc_index, acc_phase = I32(0), I32(1)
        while index < total:
            cute.arch.mbarrier_wait(acc_empty + acc_index, acc_phase)
            fence_after_thread_sync()
            acc = sums[None, None, None, acc_index]
            for k in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(full + slot, phase)
                fence_after_thread_sync()
                stage = (None, None, None, None, slot)
                cute.copy(copy_a, from_sfa[stage], to_sfa)
                cute.copy(copy_b, from_sfb[stage], to_sfb)
                tiled_mma.set(tcgen05.Field.ACCUMULATE, k != 0)
                step = (None, None, None, slot)
                cute.gemm(tiled_mma, acc, [t_a[step], t_sfa], [t_b[step], t_sfb], acc)
                with cute.arch.elect_one():
                    tcgen05.commit(empty + slot)
                slot, phase = advance_slot(slot, phase, STAGES)
            with cute.arch.elect_one():
                tcgen05.commit(acc_full + acc_index)
            acc_index, acc_phase = advance_slot(acc_index, acc_phase, ACC_STAGES)
            index += stride

    @cute.jit
    def store(
        self, sums, acc_full, acc_empty, factors, out, tiles, max_tiles, rows_b, matrix_rows,
        num_m, num_n,
        schedule, thread,
    ):  # fmt: skip
        """Scale and store the accumulators, one row of a tile per thread. Run by epilogue warps."""
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), F32)
        column_chunks = cute.flat_divide(sums[(None, None), 0, 0, None], (TILE_M, STORE_COLUMNS))
        tiled_copy = tcgen05.make_tmem_copy(atom, column_chunks[None, None, 0, 0, 0])
        thr_copy = tiled_copy.get_slice(thread)
        source = thr_copy.partition_S(column_chunks)
        coordinates = cute.make_identity_tensor((TILE_M, STORE_COLUMNS))
        chunk = cute.make_rmem_tensor(thr_copy.partition_D(coordinates).shape, F32)
        words = cute.make_rmem_tensor((STORE_COLUMNS // 2,), I32)
        index, stride, total = schedule
        acc_index, phase = I32(0), I32(0)
        while index < total:
            m, n = tile_at(index, num_m, num_n, self.group_m)
            row = tiles[max_tiles + m] + thread
            is_valid = row < tiles[2 * max_tiles + m]
            column = n * TILE_N
            factor = factors[tiles[m], column // matrix_rows]
            dst = out.iterator + (cutlass.Int64(row) * rows_b + column)
            cute.arch.mbarrier_wait(acc_full + acc_index, phase)
            fence_after_thread_sync()
            for p in cutlass.range_constexpr(TILE_N // STORE_COLUMNS):
                cute.copy(tiled_copy, source[None, None, None, 0, p, acc_index], chunk)
                cute.arch.fence_view_async_tmem_load()
                for i in cutlass.range_constexpr(STORE_COLUMNS // 2):
                    words[i] = pack_bf16_pair(chunk[2 * i] * factor, chunk[2 * i + 1] * factor)
                if is_valid:
                    for q in cutlass.range_constexpr(STORE_COLUMNS // 8):
                        store_16_bytes(
                            dst + p * STORE_COLUMNS + q * 8, [words[4 * q + z] for z in range(4)]
                        )
            fence_before_thread_sync()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(acc_empty + acc_index)
            acc_index, phase = advance_slot(acc_index, phase, ACC_STAGES)
            index += stride


def make_scale_copy(shared, tensor):
    """Return a copy of scales from shared to tensor memory: (tiled copy, source, destination).

    The last mode of the source is the stage.
    """
    atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(ONE_CTA), E4M3)
    compact = cute.filter_zeros(tensor)
    tiled_copy = tcgen05.make_s2t_copy(atom, compact)
    thr_copy = tiled_copy.get_slice(0)
    source = tcgen05.get_s2t_smem_desc_tensor(
        tiled_copy, thr_copy.partition_S(cute.filter_zeros(shared))
    )
    return tiled_copy, source, thr_copy.partition_D(compact)


def fence_before_thread_sync():
    """Order this thread's tcgen05 operations before its next synchronization with other threads."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def fence_after_thread_sync():
    """Order this thread's tcgen05 operations after its last synchronization with other threads."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


def pack_bf16_pair(low, high):
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[I32],
        read_only_args=[high, low],
    )  # fmt: skip


def store_16_bytes(dst, words):
    cute.arch.inline_ptx(
        "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[cutlass.Int64(dst.toint()), *words],
    )
