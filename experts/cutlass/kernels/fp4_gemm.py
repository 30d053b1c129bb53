"""Grouped nvfp4 product for sm_100a: block-scaled tcgen05.mma, TMA, sums in tensor memory.

Rows lie in the order of experts. A tile is 128 rows by 128 weight rows of one expert. One warp
loads values by TMA, and scales as they lie, into a ring of shared memory; one copies a step's
scales to tensor memory and issues its products there; four scale the sums and store them, while
the next tile's are made. Nothing here has been run: no such GPU was at hand.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.utils import blackwell_helpers, blockscaled_layout

from experts.cutlass.kernels.fp4_tile import (
    COLUMNS,
    DEPTH,
    E2M1,
    E4M3,
    F32,
    GROUP,
    I32,
    LOADING,
    MULTIPLYING,
    PIECE,
    SCALE_BYTES,
    STAGES,
    STEP_BYTES,
    STORING,
    SUMS,
    THREADS,
    TILE_M,
    TILE_N,
)
from experts.cutlass.kernels.ring import next_place
from experts.cutlass.kernels.tile_order import tile_at

ONE = tcgen05.CtaGroup.ONE


class Fp4Gemm:
    """out[r] = (a[r] @ b[expert of r]^T) * factor, for every row r of every tile.

    group_m: row tiles that walk the columns together and share weights in the L2 cache.
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
        factors: cute.Tensor,  # (E, matrices) float32: what the expert's sums are multiplied by
        out: cute.Tensor,  # (R, rows_b) bf16
        tiles: cute.Tensor,  # (3 * max_tiles + 1,) int32: experts, first rows, ends, how many
        max_tiles: I32,
        rows_b: I32,
        matrix_rows: I32,  # rows_b / matrices
        programs: I32,  # blocks
        stream,
    ) -> None:
        a, b = cute.recast_tensor(a, E2M1), cute.recast_tensor(b, E2M1)
        a_scale, b_scale = cute.recast_tensor(a_scale, E4M3), cute.recast_tensor(b_scale, E4M3)
        shape = (TILE_M, TILE_N, DEPTH)
        op = tcgen05.MmaMXF4NVF4Op(E4M3, (TILE_M, TILE_N, 64), ONE, tcgen05.OperandSource.SMEM)
        tiled_mma = cute.make_tiled_mma(op)
        a_layout = blackwell_helpers.make_smem_layout_a(tiled_mma, shape, E2M1, STAGES)
        b_layout = blackwell_helpers.make_smem_layout_b(tiled_mma, shape, E2M1, STAGES)
        sfa_layout = blockscaled_layout.make_smem_layout_sfa(tiled_mma, shape, GROUP, STAGES)
        sfb_layout = blockscaled_layout.make_smem_layout_sfb(tiled_mma, shape, GROUP, STAGES)
        alone = cute.tiled_divide(cute.make_layout((1, 1, 1)), (tiled_mma.thr_id.shape,)).shape
        load = cpasync.CopyBulkTensorTileG2SOp(ONE)
        first = (None, None, None, 0)
        a_atom, a_tma = cute.nvgpu.make_tiled_tma_atom_A(
            load, a, cute.slice_(a_layout, first), shape, tiled_mma, alone
        )
        b_atom, b_tma = cute.nvgpu.make_tiled_tma_atom_B(
            load, b, cute.slice_(b_layout, first), shape, tiled_mma, alone
        )

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[cutlass.Int64, STAGES]
            empty: cute.struct.MemRange[cutlass.Int64, STAGES]
            made: cute.struct.MemRange[cutlass.Int64, SUMS]
            stored: cute.struct.MemRange[cutlass.Int64, SUMS]
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
            grid=[programs, 1, 1], block=[THREADS, 1, 1], cluster=[1, 1, 1], min_blocks_per_mp=1,
            stream=stream,
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
        made, stored = storage.made.data_ptr(), storage.stored.data_ptr()
        s_a = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        s_b = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        s_sfa = storage.sfa.get_tensor(sfa_layout)
        s_sfb = storage.sfb.get_tensor(sfb_layout)
        if warp == LOADING:
            cpasync.prefetch_descriptor(a_atom)
            cpasync.prefetch_descriptor(b_atom)
        if warp == MULTIPLYING:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(STAGES):
                    cute.arch.mbarrier_init(full + i, 1)  # the loading thread, and its bytes
                    cute.arch.mbarrier_init(empty + i, 1)  # the products that read the step
                for i in cutlass.range_constexpr(SUMS):
                    cute.arch.mbarrier_init(made + i, 1)  # the tile's products
                    cute.arch.mbarrier_init(stored + i, STORING)
        cute.arch.mbarrier_init_fence()
        if warp == 0:
            cute.arch.alloc_tmem(COLUMNS, storage.tensor_memory)
            cute.arch.relinquish_tmem_alloc_permit()
            fence_before_thread_sync()
        cute.arch.sync_threads()
        fence_after_thread_sync()
        base = cute.arch.retrieve_tmem_ptr(F32, 16, storage.tensor_memory)

        num_m = tiles[3 * max_tiles]
        num_n = (rows_b + TILE_N - 1) // TILE_N
        steps = (cute.size(a_tma, mode=[1]) + DEPTH - 1) // DEPTH
        # This block's first tile, how far its next one is, and where they end.
        turns = (I32(block), I32(blocks), num_m * num_n)
        accumulators = tiled_mma.make_fragment_C(
            cute.append(tiled_mma.partition_shape_C((TILE_M, TILE_N)), SUMS)
        )
        sums = cute.make_tensor(base, accumulators.layout)
        if warp == LOADING:
            self.load(
                tiled_mma, a_atom, a_tma, b_atom, b_tma, s_a, s_b, storage.sfa.data_ptr(),
                storage.sfb.data_ptr(), a_scale, b_scale, full, empty, tiles, max_tiles, rows_b,
                num_m, num_n, turns, steps,
            )  # fmt: skip
        elif warp == MULTIPLYING:
            self.multiply(
                tiled_mma, s_a, s_b, s_sfa, s_sfb, sums, sfa_layout, sfb_layout, full, empty, made,
                stored, turns, steps,
            )  # fmt: skip
        else:
            self.store(
                sums, made, stored, factors, out, tiles, max_tiles, rows_b, matrix_rows, num_m,
                num_n, turns, thread,
            )  # fmt: skip
        fence_before_thread_sync()
        cute.arch.sync_threads()
        fence_after_thread_sync()
        if warp == 0:
            cute.arch.dealloc_tmem(base, COLUMNS)

    @cute.jit
    def load(
        self, tiled_mma, a_atom, a_tma, b_atom, b_tma, s_a, s_b, sfa, sfb, a_scale, b_scale, full,
        empty, tiles, max_tiles, rows_b, num_m, num_n, turns, steps,
    ):  # fmt: skip
        """One warp: fill places of the ring as the products that read them have ended."""
        mine = tiled_mma.get_slice(0)
        alone = cute.make_layout(1)
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), E4M3, num_bits_per_copy=SCALE_BYTES * 8)
        index, stride, total = turns
        place, phase = I32(0), I32(1)
        while index < total:
            m, n = tile_at(index, num_m, num_n, self.group_m)
            row_b = tiles[m] * rows_b + n * TILE_N
            g_a = cute.domain_offset((tiles[max_tiles + m], 0), a_tma)
            g_a = mine.partition_A(cute.local_tile(g_a, (TILE_M, DEPTH), (0, None)))
            g_b = cute.domain_offset((row_b, 0), b_tma)
            g_b = mine.partition_B(cute.local_tile(g_b, (TILE_N, DEPTH), (0, None)))
            to_a, from_a = cpasync.tma_partition(
                a_atom, 0, alone, cute.group_modes(s_a, 0, 3), cute.group_modes(g_a, 0, 3)
            )
            to_b, from_b = cpasync.tma_partition(
                b_atom, 0, alone, cute.group_modes(s_b, 0, 3), cute.group_modes(g_b, 0, 3)
            )
            g_sfa = cute.zipped_divide(a_scale[m, None], (SCALE_BYTES,))
            g_sfb = cute.zipped_divide(b_scale[row_b // TILE_N, None], (SCALE_BYTES,))
            one = cute.make_layout(SCALE_BYTES)
            for k in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(empty + place, phase)
                ready = full + place
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(ready, STEP_BYTES)
                cute.copy(a_atom, from_a[None, k], to_a[None, place], tma_bar_ptr=ready)
                cute.copy(b_atom, from_b[None, k], to_b[None, place], tma_bar_ptr=ready)
                with cute.arch.elect_one():
                    to_sfa = cute.make_tensor(sfa + place * SCALE_BYTES, one)
                    to_sfb = cute.make_tensor(sfb + place * SCALE_BYTES, one)
                    cute.copy(bulk, g_sfa[None, k], to_sfa, mbar_ptr=ready)
                    cute.copy(bulk, g_sfb[None, k], to_sfb, mbar_ptr=ready)
                place, phase = next_place(place, phase, STAGES)
            index += stride

    @cute.jit
    def multiply(
        self, tiled_mma, s_a, s_b, s_sfa, s_sfb, sums, sfa_layout, sfb_layout, full, empty, made,
        stored, turns, steps,
    ):  # fmt: skip
        """One warp: issue every product of this block's tiles; tensor memory holds the sums."""
        t_a, t_b = tiled_mma.make_fragment_A(s_a), tiled_mma.make_fragment_B(s_b)
        first, shape = (None, None, None, 0), (TILE_M, TILE_N, DEPTH)
        sfa_at = sums.iterator + tcgen05.find_tmem_tensor_col_offset(sums)
        t_sfa = cute.make_tensor(
            cute.recast_ptr(sfa_at, dtype=E4M3),
            blockscaled_layout.make_tmem_layout_sfa(
                tiled_mma, shape, GROUP, cute.slice_(sfa_layout, first)
            ),
        )
        sfb_at = sfa_at + tcgen05.find_tmem_tensor_col_offset(t_sfa)
        t_sfb = cute.make_tensor(
            cute.recast_ptr(sfb_at, dtype=E4M3),
            blockscaled_layout.make_tmem_layout_sfb(
                tiled_mma, shape, GROUP, cute.slice_(sfb_layout, first)
            ),
        )
        copy_a, from_sfa, to_sfa = scales_to_tensor_memory(s_sfa, t_sfa)
        copy_b, from_sfb, to_sfb = scales_to_tensor_memory(s_sfb, t_sfb)
        index, stride, total = turns
        place, phase = I32(0), I32(0)
        which, which_phase = I32(0), I32(1)
        while index < total:
            cute.arch.mbarrier_wait(stored + which, which_phase)
            fence_after_thread_sync()
            part = sums[None, None, None, which]
            for k in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(full + place, phase)
                fence_after_thread_sync()
                at = (None, None, None, None, place)
                cute.copy(copy_a, from_sfa[at], to_sfa)
                cute.copy(copy_b, from_sfb[at], to_sfb)
                tiled_mma.set(tcgen05.Field.ACCUMULATE, k != 0)
                step = (None, None, None, place)
                cute.gemm(tiled_mma, part, [t_a[step], t_sfa], [t_b[step], t_sfb], part)
                with cute.arch.elect_one():
                    tcgen05.commit(empty + place)
                place, phase = next_place(place, phase, STAGES)
            with cute.arch.elect_one():
                tcgen05.commit(made + which)
            which, which_phase = next_place(which, which_phase, SUMS)
            index += stride

    @cute.jit
    def store(
        self, sums, made, stored, factors, out, tiles, max_tiles, rows_b, matrix_rows, num_m, num_n,
        turns, thread,
    ):  # fmt: skip
        """Four warps: a thread has a row of the tile, and stores what lies in the expert."""
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), F32)
        pieces = cute.flat_divide(sums[(None, None), 0, 0, None], (TILE_M, PIECE))
        tiled = tcgen05.make_tmem_copy(atom, pieces[None, None, 0, 0, 0])
        mine = tiled.get_slice(thread)
        source = mine.partition_S(pieces)
        shape = cute.make_identity_tensor((TILE_M, PIECE))
        piece = cute.make_rmem_tensor(mine.partition_D(shape).shape, F32)
        words = cute.make_rmem_tensor((PIECE // 2,), I32)
        index, stride, total = turns
        which, phase = I32(0), I32(0)
        while index < total:
            m, n = tile_at(index, num_m, num_n, self.group_m)
            row = tiles[max_tiles + m] + thread
            valid = row < tiles[2 * max_tiles + m]
            column = n * TILE_N
            factor = factors[tiles[m], column // matrix_rows]
            to = out.iterator + (cutlass.Int64(row) * rows_b + column)
            cute.arch.mbarrier_wait(made + which, phase)
            fence_after_thread_sync()
            for p in cutlass.range_constexpr(TILE_N // PIECE):
                cute.copy(tiled, source[None, None, None, 0, p, which], piece)
                cute.arch.fence_view_async_tmem_load()
                for i in cutlass.range_constexpr(PIECE // 2):
                    words[i] = bf16_pair(piece[2 * i] * factor, piece[2 * i + 1] * factor)
                if valid:
                    for q in cutlass.range_constexpr(PIECE // 8):
                        store_16_bytes(to + p * PIECE + q * 8, [words[4 * q + z] for z in range(4)])
            fence_before_thread_sync()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(stored + which)
            which, phase = next_place(which, phase, SUMS)
            index += stride


def scales_to_tensor_memory(shared, tensor):
    """Return a copy of a step's scales, what it reads of every stage, and where it writes."""
    atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(ONE), E4M3)
    compact = cute.filter_zeros(tensor)
    copy = tcgen05.make_s2t_copy(atom, compact)
    mine = copy.get_slice(0)
    source = tcgen05.get_s2t_smem_desc_tensor(copy, mine.partition_S(cute.filter_zeros(shared)))
    return copy, source, mine.partition_D(compact)


def fence_before_thread_sync():
    """Order this thread's tcgen05 operations before what it tells other threads."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def fence_after_thread_sync():
    """Order this thread's tcgen05 operations behind what other threads told it."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


def bf16_pair(low, high):
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[I32],
        read_only_args=[high, low],
    )  # fmt: skip


def store_16_bytes(to, words):
    cute.arch.inline_ptx(
        "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[cutlass.Int64(to.toint()), *words],
    )
