"""Grouped fp8 GEMM for sm_90a, with one scale per 128 x 128 block of weights.

Rows are sorted by expert. A tile is 128 rows by 256 weight rows. The weight rows form two parts of
128 rows each: adjacent rows, or gate rows and up rows. The two thread blocks of a cluster compute
adjacent tiles of the same rows. Each of them loads half of the rows' values and multicasts them to
both blocks. In a block, one warp loads values with TMA into a ring in shared memory, and another
warp loads scales. Two warpgroups multiply 64 rows each.

A step is 128 elements along K. In each step, a warpgroup computes a partial sum for each part,
scales it, and adds it to float32 accumulators. While one warpgroup scales, the other multiplies. No
wgmma stays in flight across steps, because ptxas would otherwise serialize all wgmmas.

A comment "NaN-free" gives the reason why a minimum cannot lose a NaN (docs/numerics.md).
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from experts.cutlass.kernels.epilogue import Epilogue
from experts.cutlass.kernels.ring import advance_slot
from experts.cutlass.kernels.tile import (
    ACC_PER_THREAD,
    BOX_BYTES,
    CLUSTER,
    E4M3,
    F32,
    I32,
    LOAD_REGS,
    MMA_REGS,
    PART_N,
    PARTS,
    ROWS,
    STAGES,
    THREADS,
    TILE_K,
    TILE_M,
)
from experts.cutlass.kernels.tile_order import tile_at


class BlockGemm(Epilogue):
    """out[r] = a[r] @ b[expert of r]^T, with scales applied, for every row r of every tile.

    gated: whether the two parts are gate and up rows. If so, an up row is up_row_offset rows after
        its gate row, and the kernel rounds h = silu(gate) * up to bf16 and stores it as e4m3, with
        one scale per row and 128 columns. Otherwise, out is bf16.
    group_m: number of row tiles in a group (see `tile_at`).
    """

    def __init__(self, *, gated: bool, group_m: int = 8) -> None:
        self.gated, self.group_m = gated, group_m
        self.columns = PART_N if gated else PART_N * PARTS  # output columns per tile
        self.boxes = 1 if gated else 2  # TMA boxes of output that a warpgroup stages

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,  # (R, K) bytes of e4m3
        b: cute.Tensor,  # (E * rows_b, K) bytes of e4m3
        a_scale: cute.Tensor,  # (R, K / 128) float32
        b_scale: cute.Tensor,  # (E * ceil(rows_b / 128), K / 128) float32
        out: cute.Tensor,  # (R, N) bf16, or bytes of e4m3
        out_scale: cute.Tensor,  # (R, N / 128) float32, written if gated
        tiles: cute.Tensor,  # (3 * max_tiles + 1,) int32: experts, first rows, ends, tile count
        max_tiles: I32,
        rows_b: I32,
        up_row_offset: I32,
        num_n_tiles: I32,  # column tiles, rounded up to whole clusters
        num_programs: I32,  # number of thread blocks, a multiple of the cluster size
        stream,
    ) -> None:
        a, b = cute.recast_tensor(a, E4M3), cute.recast_tensor(b, E4M3)
        if cutlass.const_expr(self.gated):
            out = cute.recast_tensor(out, E4M3)
        k_major = warpgroup.OperandMajorMode.K
        op = warpgroup.MmaF8Op(
            E4M3, E4M3, F32, (ROWS, PART_N, 32), warpgroup.OperandSource.SMEM, k_major, k_major
        )
        tiled_mma = cute.make_tiled_mma(cute.make_mma_atom(op), (2, 1, 1))
        swizzled = warpgroup.SmemLayoutAtomKind.K_SW128
        atom = warpgroup.make_smem_layout_atom(swizzled, E4M3)
        a_layout = cute.tile_to_shape(atom, (TILE_M, TILE_K, STAGES), order=(0, 1, 2))
        b_layout = cute.tile_to_shape(atom, (PART_N, TILE_K, STAGES * PARTS), order=(0, 1, 2))
        box = BOX_BYTES * 8 // out.element_type.width
        out_atom = warpgroup.make_smem_layout_atom(swizzled, out.element_type)
        o_layout = cute.tile_to_shape(out_atom, (ROWS, box, self.boxes * 2), order=(0, 1, 2))
        first_stage = (None, None, 0)
        a_atom, a_tma = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SMulticastOp(), a, cute.slice_(a_layout, first_stage),
            (TILE_M, TILE_K), num_multicast=CLUSTER,
        )  # fmt: skip
        b_atom, b_tma = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            b,
            cute.slice_(b_layout, first_stage),
            (PART_N, TILE_K),
        )
        o_atom, o_tma = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), out, cute.slice_(o_layout, first_stage), (ROWS, box)
        )

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[cutlass.Int64, STAGES]
            empty: cute.struct.MemRange[cutlass.Int64, STAGES]
            row_scales: cute.struct.Align[cute.struct.MemRange[F32, TILE_M * STAGES], 128]
            part_scales: cute.struct.Align[cute.struct.MemRange[F32, PARTS * STAGES], 8]
            a: cute.struct.Align[cute.struct.MemRange[E4M3, cute.cosize(a_layout)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[E4M3, cute.cosize(b_layout)], 1024]
            results: cute.struct.Align[
                cute.struct.MemRange[out.element_type, cute.cosize(o_layout)], 1024
            ]

        self.storage = Storage
        self.kernel(
            tiled_mma, a_atom, a_tma, b_atom, b_tma, o_atom, o_tma, a_layout, b_layout, o_layout,
            a_scale, b_scale, out, out_scale, tiles, max_tiles, rows_b, up_row_offset, num_n_tiles,
        ).launch(
            grid=[num_programs, 1, 1], block=[THREADS, 1, 1], cluster=[CLUSTER, 1, 1],
            min_blocks_per_mp=1, stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, tiled_mma, a_atom, a_tma, b_atom, b_tma, o_atom, o_tma, a_layout, b_layout, o_layout,
        a_scale, b_scale, out, out_scale, tiles, max_tiles, rows_b, up_row_offset, num_n_tiles,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        warpgroup_index = cute.arch.make_warp_uniform(thread // 128)
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        s_a = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        s_b = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        s_row_scales = storage.row_scales.get_tensor(cute.make_layout((TILE_M, STAGES)))
        s_part_scales = storage.part_scales.get_tensor(cute.make_layout((PARTS, STAGES)))
        s_out = storage.results.get_tensor(o_layout.outer, swizzle=o_layout.inner)
        if warp == 0:
            cpasync.prefetch_descriptor(a_atom)
            cpasync.prefetch_descriptor(b_atom)
            cpasync.prefetch_descriptor(o_atom)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(STAGES):
                    cute.arch.mbarrier_init(full + i, 2)  # the two warps that load
                    cute.arch.mbarrier_init(empty + i, 8 * CLUSTER)  # MMA warps of both blocks
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()

        num_m_tiles = tiles[3 * max_tiles]
        steps = cute.size(a_tma, mode=[1]) // TILE_K
        num_n_pairs = num_n_tiles // CLUSTER
        # The cluster's first pair of tiles, the stride to its next pair, and the number of pairs.
        schedule = (I32(block // CLUSTER), blocks // CLUSTER, num_m_tiles * num_n_pairs)
        if warpgroup_index == 2:
            cute.arch.warpgroup_reg_dealloc(LOAD_REGS)
            if warp == 8:
                self.load(
                    a_atom, a_tma, b_atom, b_tma, s_a, s_b, full, empty, tiles, max_tiles, rows_b,
                    up_row_offset, num_m_tiles, num_n_pairs, schedule, steps, rank,
                )  # fmt: skip
            if warp == 9:
                self.load_scales(
                    a_scale, b_scale, s_row_scales, s_part_scales, full, empty, tiles, max_tiles,
                    rows_b, up_row_offset, num_m_tiles, num_n_pairs, schedule, steps, rank,
                    thread % 32,
                )  # fmt: skip
        else:
            cute.arch.warpgroup_reg_alloc(MMA_REGS)
            self.multiply(
                tiled_mma, s_a, s_b, s_row_scales, s_part_scales, s_out, full, empty, o_atom, o_tma,
                out, out_scale, tiles, max_tiles, num_m_tiles, num_n_pairs, schedule, steps, rank,
                warpgroup_index, thread % 128,
            )  # fmt: skip
        # A block must not exit while the other block of the cluster still multicasts to it.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def load(
        self, a_atom, a_tma, b_atom, b_tma, s_a, s_b, full, empty, tiles, max_tiles, rows_b,
        up_row_offset, num_m_tiles, num_n_pairs, schedule, steps, rank,
    ):  # fmt: skip
        """Load values into the ring slots. Run by one warp.

        A slot is reused after the multiplying warps of both blocks have read it.
        """
        index, stride, total = schedule
        slot, phase = I32(0), I32(1)
        one_cta = cute.make_layout(1)
        while index < total:
            m, n_pair = tile_at(index, num_m_tiles, num_n_pairs, self.group_m)
            row_b0 = tiles[m] * rows_b + (n_pair * CLUSTER + rank) * self.columns
            row_b1 = row_b0 + (up_row_offset if self.gated else PART_N)
            g_a = cute.domain_offset((tiles[max_tiles + m], 0), a_tma)
            g_a = cute.local_tile(g_a, (TILE_M, TILE_K), (0, None))
            g_b0 = cute.local_tile(
                cute.domain_offset((row_b0, 0), b_tma), (PART_N, TILE_K), (0, None)
            )
            g_b1 = cute.local_tile(
                cute.domain_offset((row_b1, 0), b_tma), (PART_N, TILE_K), (0, None)
            )
            to_a, from_a = cpasync.tma_partition(
                a_atom, rank, cute.make_layout(CLUSTER), cute.group_modes(s_a, 0, 2),
                cute.group_modes(g_a, 0, 2),
            )  # fmt: skip
            s_flat = cute.group_modes(s_b, 0, 2)
            to_b, from_b0 = cpasync.tma_partition(
                b_atom, 0, one_cta, s_flat, cute.group_modes(g_b0, 0, 2)
            )
            _, from_b1 = cpasync.tma_partition(
                b_atom, 0, one_cta, s_flat, cute.group_modes(g_b1, 0, 2)
            )
            for k in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(empty + slot, phase)
                full_barrier = full + slot
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(
                        full_barrier, (TILE_M + PARTS * PART_N) * TILE_K
                    )
                cute.copy(
                    a_atom, from_a[None, k], to_a[None, slot], tma_bar_ptr=full_barrier,
                    mcast_mask=cutlass.Int16(2**CLUSTER - 1),
                )  # fmt: skip
                cute.copy(
                    b_atom, from_b0[None, k], to_b[None, slot * PARTS], tma_bar_ptr=full_barrier
                )
                cute.copy(
                    b_atom, from_b1[None, k], to_b[None, slot * PARTS + 1], tma_bar_ptr=full_barrier
                )
                slot, phase = advance_slot(slot, phase, STAGES)
            index += stride

    @cute.jit
    def load_scales(
        self, a_scale, b_scale, s_row_scales, s_part_scales, full, empty, tiles, max_tiles, rows_b,
        up_row_offset, num_m_tiles, num_n_pairs, schedule, steps, rank, lane,
    ):  # fmt: skip
        """Load scales into the ring slots, reading them one step ahead. Run by one warp."""
        last_row = cute.size(a_scale, mode=[0]) - 1
        blocks_b = (rows_b + PART_N - 1) // PART_N
        index, stride, total = schedule
        slot, phase = I32(0), I32(1)
        while index < total:
            m, n_pair = tile_at(index, num_m_tiles, num_n_pairs, self.group_m)
            row = tiles[max_tiles + m]
            # Lane 0 loads the scale of the first part, and all other lanes load the scale of the
            # second part.
            row_b = (n_pair * CLUSTER + rank) * self.columns
            # NaN-free: integer operands
            row_b += cutlass.min(lane, 1) * (up_row_offset if self.gated else PART_N)
            # NaN-free: integer operands
            scale_row = tiles[m] * blocks_b + cutlass.min(row_b // PART_N, blocks_b - 1)
            g_b = b_scale[scale_row, None]
            # Rows past the end of the expert are not stored, so they can use the scale of any valid
            # row.
            # NaN-free: integer operands
            g_a = [a_scale[cutlass.min(row + lane + 32 * i, last_row), None] for i in range(4)]
            a0, a1, a2, a3, b0 = g_a[0][0], g_a[1][0], g_a[2][0], g_a[3][0], g_b[0]
            for k in cutlass.range(steps, unroll=1):
                next_k = cutlass.min(k + 1, steps - 1)  # NaN-free: integer operands
                next_a0, next_a1, next_a2, next_a3 = (
                    g_a[0][next_k],
                    g_a[1][next_k],
                    g_a[2][next_k],
                    g_a[3][next_k],
                )
                next_b0 = g_b[next_k]
                cute.arch.mbarrier_wait(empty + slot, phase)
                s_row_scales[lane, slot] = a0
                s_row_scales[lane + 32, slot] = a1
                s_row_scales[lane + 64, slot] = a2
                s_row_scales[lane + 96, slot] = a3
                if lane < PARTS:
                    s_part_scales[lane, slot] = b0
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(full + slot)
                a0, a1, a2, a3, b0 = next_a0, next_a1, next_a2, next_a3, next_b0
                slot, phase = advance_slot(slot, phase, STAGES)
            index += stride

    @cute.jit
    def multiply(
        self, tiled_mma, s_a, s_b, s_row_scales, s_part_scales, s_out, full, empty, o_atom, o_tma,
        out, out_scale, tiles, max_tiles, num_m_tiles, num_n_pairs, schedule, steps, rank,
        warpgroup_index, thread,
    ):  # fmt: skip
        """Multiply 64 rows of every tile of this block, from row 64 * warpgroup_index on.

        Run by one warpgroup.
        """
        warp = thread // 32
        # The shuffle keeps the compiler from recomputing the lane in the loop.
        lane = cute.arch.shuffle_sync(thread % 32, thread % 32)
        thr_mma = tiled_mma.get_slice(warpgroup_index * 128)
        t_a = tiled_mma.make_fragment_A(thr_mma.partition_A(s_a))
        t_b = tiled_mma.make_fragment_B(thr_mma.partition_B(s_b))
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((TILE_M, PART_N)), F32)
        sums = cute.make_rmem_tensor(cute.make_layout((ACC_PER_THREAD, PARTS)), F32)
        # The first of this thread's two rows.
        row_in_tile = warpgroup_index * ROWS + warp * 16 + lane // 4
        releases_slot = lane < CLUSTER  # one lane for each block of the cluster
        index, stride, total = schedule
        slot, phase = I32(0), I32(0)
        is_ready = cutlass.Boolean(False)
        while index < total:
            m, n_pair = tile_at(index, num_m_tiles, num_n_pairs, self.group_m)
            row = tiles[max_tiles + m] + warpgroup_index * ROWS
            end = tiles[2 * max_tiles + m]
            sums.fill(0.0)
            if row < end:
                for _ in cutlass.range(steps, unroll=1):
                    if not is_ready:
                        cute.arch.mbarrier_wait(full + slot, phase)
                    next_slot, next_phase = advance_slot(slot, phase, STAGES)
                    for p in cutlass.range_constexpr(PARTS):
                        warpgroup.fence()
                        self.start_wgmma(tiled_mma, acc, t_a, t_b, slot, p)
                        if cutlass.const_expr(p == 0):
                            scale_r0 = s_row_scales[row_in_tile, slot]
                            scale_r8 = s_row_scales[row_in_tile + 8, slot]
                            scales = s_part_scales[None, slot].load()
                        else:  # test in advance whether the values of the next step are ready
                            is_ready = cute.arch.mbarrier_test_wait(full + next_slot, next_phase)
                        warpgroup.wait_group(0)
                        if cutlass.const_expr(p == PARTS - 1):
                            if releases_slot:
                                cute.arch.mbarrier_arrive(empty + slot, lane)
                        self.add_scaled(sums, acc, p, (scale_r0 * scales[p], scale_r8 * scales[p]))
                    slot, phase = next_slot, next_phase
                self.store_tile(
                    sums, s_out, o_atom, o_tma, out, out_scale, row, end, n_pair * CLUSTER + rank,
                    warpgroup_index, warp, lane,
                )  # fmt: skip
            else:  # all 64 rows are past the end of the expert, so only release the slots
                for _ in cutlass.range(steps, unroll=1):
                    cute.arch.mbarrier_wait(full + slot, phase)
                    if releases_slot:
                        cute.arch.mbarrier_arrive(empty + slot, lane)
                    slot, phase = advance_slot(slot, phase, STAGES)
                is_ready = cutlass.Boolean(False)
            index += stride
        cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def start_wgmma(self, tiled_mma, acc, t_a, t_b, slot, p: cutlass.Constexpr):
        """Start the wgmmas of part p in the K step that `slot` holds. The sum goes to `acc`."""
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        for j in cutlass.range_constexpr(TILE_K // 32):
            cute.gemm(
                tiled_mma, acc, t_a[None, None, j, slot], t_b[None, None, j, slot * PARTS + p],
                acc,
            )  # fmt: skip
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def add_scaled(self, sums, acc, p: cutlass.Constexpr, scales):
        """Add acc * scale to sums[:, p].

        scales: the scales of the thread's two rows.
        """
        # The first row is added before the second, so that the scale of a row stays in a register.
        for half in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(ACC_PER_THREAD):
                if cutlass.const_expr((i // 2) % 2 == half):
                    sums[i, p] = sums[i, p] + acc[i] * scales[half]
