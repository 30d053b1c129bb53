"""Grouped fp8 product with a scale for each 128 by 128 block, for sm_90a: TMA, wgmma, clusters.

Rows lie in the order of experts. A tile is 128 rows by 256 weight rows: two parts of 128, side by
side, or gate rows and up rows. Two blocks of a cluster compute neighboring tiles of the same rows:
each loads half of the rows' values and sends them to both. In a block one warp loads values by TMA
into a ring of shared memory, another one scales; two warpgroups multiply 64 rows each.

A step is 128 deep. The product of a part and a step is scaled and added to float32 sums while the
other warpgroup multiplies. Nothing is on its way from one step to the next: the assembler would let
every product end at once.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from experts.cutlass.kernels.epilogue import Epilogue
from experts.cutlass.kernels.ring import next_place
from experts.cutlass.kernels.tile import (
    BOX_BYTES,
    CLUSTER,
    DEPTH,
    E4M3,
    F32,
    FEWEST,
    I32,
    MOST,
    PARTS,
    ROWS,
    STAGES,
    THREADS,
    TILE_M,
    VALUES,
    WIDTH,
)
from experts.cutlass.kernels.tile_order import tile_at


class BlockGemm(Epilogue):
    """out[r] = a[r] @ b[expert of r]^T, scaled, for every row r of every tile.

    gated: the parts are gate and up rows, up_rows apart. h = silu(gate) * up, rounded to bf16,
    leaves as e4m3 with a scale for each row and 128 columns. Otherwise out is bf16.
    group_m: row tiles that walk the columns together and share weights in the L2 cache.
    """

    def __init__(self, *, gated: bool, group_m: int = 8) -> None:
        self.gated, self.group_m = gated, group_m
        self.columns = WIDTH if gated else WIDTH * PARTS  # of a tile's results
        self.boxes = 1 if gated else 2  # of results that a warpgroup stages

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,  # (R, K) bytes of e4m3
        b: cute.Tensor,  # (E * rows_b, K) bytes of e4m3
        a_scale: cute.Tensor,  # (R, K / 128) float32
        b_scale: cute.Tensor,  # (E * blocks of rows_b, K / 128) float32
        out: cute.Tensor,  # (R, N) bf16, or bytes of e4m3
        out_scale: cute.Tensor,  # (R, N / 128) float32, written if gated
        tiles: cute.Tensor,  # (3 * max_tiles + 1,) int32: experts, first rows, ends, how many
        max_tiles: I32,
        rows_b: I32,
        up_rows: I32,
        num_n: I32,  # tiles side by side, rounded up to clusters
        programs: I32,  # blocks, whole clusters
        stream,
    ) -> None:
        a, b = cute.recast_tensor(a, E4M3), cute.recast_tensor(b, E4M3)
        if cutlass.const_expr(self.gated):
            out = cute.recast_tensor(out, E4M3)
        k_major = warpgroup.OperandMajorMode.K
        op = warpgroup.MmaF8Op(
            E4M3, E4M3, F32, (ROWS, WIDTH, 32), warpgroup.OperandSource.SMEM, k_major, k_major
        )
        tiled_mma = cute.make_tiled_mma(cute.make_mma_atom(op), (2, 1, 1))
        swizzled = warpgroup.SmemLayoutAtomKind.K_SW128
        atom = warpgroup.make_smem_layout_atom(swizzled, E4M3)
        a_layout = cute.tile_to_shape(atom, (TILE_M, DEPTH, STAGES), order=(0, 1, 2))
        b_layout = cute.tile_to_shape(atom, (WIDTH, DEPTH, STAGES * PARTS), order=(0, 1, 2))
        box = BOX_BYTES * 8 // out.element_type.width
        out_atom = warpgroup.make_smem_layout_atom(swizzled, out.element_type)
        o_layout = cute.tile_to_shape(out_atom, (ROWS, box, self.boxes * 2), order=(0, 1, 2))
        first = (None, None, 0)
        a_atom, a_tma = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SMulticastOp(), a, cute.slice_(a_layout, first),
            (TILE_M, DEPTH), num_multicast=CLUSTER,
        )  # fmt: skip
        b_atom, b_tma = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), b, cute.slice_(b_layout, first), (WIDTH, DEPTH)
        )
        o_atom, o_tma = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), out, cute.slice_(o_layout, first), (ROWS, box)
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
            a_scale, b_scale, out, out_scale, tiles, max_tiles, rows_b, up_rows, num_n,
        ).launch(
            grid=[programs, 1, 1], block=[THREADS, 1, 1], cluster=[CLUSTER, 1, 1],
            min_blocks_per_mp=1, stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, tiled_mma, a_atom, a_tma, b_atom, b_tma, o_atom, o_tma, a_layout, b_layout, o_layout,
        a_scale, b_scale, out, out_scale, tiles, max_tiles, rows_b, up_rows, num_n,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        group = cute.arch.make_warp_uniform(thread // 128)
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        s_a = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        s_b = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        s_rows = storage.row_scales.get_tensor(cute.make_layout((TILE_M, STAGES)))
        s_parts = storage.part_scales.get_tensor(cute.make_layout((PARTS, STAGES)))
        s_out = storage.results.get_tensor(o_layout.outer, swizzle=o_layout.inner)
        if warp == 0:
            cpasync.prefetch_descriptor(a_atom)
            cpasync.prefetch_descriptor(b_atom)
            cpasync.prefetch_descriptor(o_atom)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(STAGES):
                    cute.arch.mbarrier_init(full + i, 2)  # values and scales
                    cute.arch.mbarrier_init(empty + i, 8 * CLUSTER)  # warps of both blocks
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()

        num_m = tiles[3 * max_tiles]
        steps = cute.size(a_tma, mode=[1]) // DEPTH
        pairs = num_n // CLUSTER
        # This cluster's first pair of tiles, how far its next one is, and where they end.
        turns = (I32(block // CLUSTER), blocks // CLUSTER, num_m * pairs)
        if group == 2:
            cute.arch.warpgroup_reg_dealloc(FEWEST)
            if warp == 8:
                self.load(
                    a_atom, a_tma, b_atom, b_tma, s_a, s_b, full, empty, tiles, max_tiles, rows_b,
                    up_rows, num_m, pairs, turns, steps, rank,
                )  # fmt: skip
            if warp == 9:
                self.load_scales(
                    a_scale, b_scale, s_rows, s_parts, full, empty, tiles, max_tiles, rows_b,
                    up_rows, num_m, pairs, turns, steps, rank, thread % 32,
                )  # fmt: skip
        else:
            cute.arch.warpgroup_reg_alloc(MOST)
            self.multiply(
                tiled_mma, s_a, s_b, s_rows, s_parts, s_out, full, empty, o_atom, o_tma, out,
                out_scale, tiles, max_tiles, num_m, pairs, turns, steps, rank, group, thread % 128,
            )  # fmt: skip
        # A block must not end while the other one still sends to it.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def load(
        self, a_atom, a_tma, b_atom, b_tma, s_a, s_b, full, empty, tiles, max_tiles, rows_b,
        up_rows, num_m, pairs, turns, steps, rank,
    ):  # fmt: skip
        """One warp: fill places of the ring with values as both blocks' warps have read them."""
        index, stride, total = turns
        place, phase = I32(0), I32(1)
        alone = cute.make_layout(1)
        while index < total:
            m, pair = tile_at(index, num_m, pairs, self.group_m)
            row_b = tiles[m] * rows_b + (pair * CLUSTER + rank) * self.columns
            second = row_b + (up_rows if self.gated else WIDTH)
            g_a = cute.domain_offset((tiles[max_tiles + m], 0), a_tma)
            g_a = cute.local_tile(g_a, (TILE_M, DEPTH), (0, None))
            g_b = cute.local_tile(cute.domain_offset((row_b, 0), b_tma), (WIDTH, DEPTH), (0, None))
            g_c = cute.local_tile(cute.domain_offset((second, 0), b_tma), (WIDTH, DEPTH), (0, None))
            to_a, from_a = cpasync.tma_partition(
                a_atom, rank, cute.make_layout(CLUSTER), cute.group_modes(s_a, 0, 2),
                cute.group_modes(g_a, 0, 2),
            )  # fmt: skip
            s_flat = cute.group_modes(s_b, 0, 2)
            to_b, from_b = cpasync.tma_partition(
                b_atom, 0, alone, s_flat, cute.group_modes(g_b, 0, 2)
            )
            _, from_c = cpasync.tma_partition(b_atom, 0, alone, s_flat, cute.group_modes(g_c, 0, 2))
            for k in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(empty + place, phase)
                ready = full + place
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(ready, (TILE_M + PARTS * WIDTH) * DEPTH)
                cute.copy(
                    a_atom, from_a[None, k], to_a[None, place], tma_bar_ptr=ready,
                    mcast_mask=cutlass.Int16(2**CLUSTER - 1),
                )  # fmt: skip
                cute.copy(b_atom, from_b[None, k], to_b[None, place * PARTS], tma_bar_ptr=ready)
                cute.copy(b_atom, from_c[None, k], to_b[None, place * PARTS + 1], tma_bar_ptr=ready)
                place, phase = next_place(place, phase, STAGES)
            index += stride

    @cute.jit
    def load_scales(
        self, a_scale, b_scale, s_rows, s_parts, full, empty, tiles, max_tiles, rows_b, up_rows,
        num_m, pairs, turns, steps, rank, lane,
    ):  # fmt: skip
        """One warp: fill places of the ring with scales, which it reads a step ahead."""
        last_row = cute.size(a_scale, mode=[0]) - 1
        blocks_b = (rows_b + WIDTH - 1) // WIDTH
        index, stride, total = turns
        place, phase = I32(0), I32(1)
        while index < total:
            m, pair = tile_at(index, num_m, pairs, self.group_m)
            row = tiles[max_tiles + m]
            # Lanes but the first have the second part's scale.
            row_b = (pair * CLUSTER + rank) * self.columns
            row_b += cutlass.min(lane, 1) * (up_rows if self.gated else WIDTH)  # NaN-free: integers
            # NaN-free: integers
            block = tiles[m] * blocks_b + cutlass.min(row_b // WIDTH, blocks_b - 1)
            g_b = b_scale[block, None]
            # Rows past the expert's last are another's, or the last: they are not stored.
            # NaN-free: integers
            g_a = [a_scale[cutlass.min(row + lane + 32 * i, last_row), None] for i in range(4)]
            a0, a1, a2, a3, b0 = g_a[0][0], g_a[1][0], g_a[2][0], g_a[3][0], g_b[0]
            for k in cutlass.range(steps, unroll=1):
                ahead = cutlass.min(k + 1, steps - 1)  # NaN-free: integers
                c0, c1, c2, c3 = g_a[0][ahead], g_a[1][ahead], g_a[2][ahead], g_a[3][ahead]
                d0 = g_b[ahead]
                cute.arch.mbarrier_wait(empty + place, phase)
                s_rows[lane, place] = a0
                s_rows[lane + 32, place] = a1
                s_rows[lane + 64, place] = a2
                s_rows[lane + 96, place] = a3
                if lane < PARTS:
                    s_parts[lane, place] = b0
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(full + place)
                a0, a1, a2, a3, b0 = c0, c1, c2, c3, d0
                place, phase = next_place(place, phase, STAGES)
            index += stride

    @cute.jit
    def multiply(
        self, tiled_mma, s_a, s_b, s_rows, s_parts, s_out, full, empty, o_atom, o_tma, out,
        out_scale, tiles, max_tiles, num_m, pairs, turns, steps, rank, group, thread,
    ):  # fmt: skip
        """Be a multiplying warpgroup: rows group * 64 and on of every tile of this block."""
        warp = thread // 32
        # Through a shuffle, so that nobody computes it again in the loop.
        lane = cute.arch.shuffle_sync(thread % 32, thread % 32)
        mine = tiled_mma.get_slice(group * 128)
        t_a = tiled_mma.make_fragment_A(mine.partition_A(s_a))
        t_b = tiled_mma.make_fragment_B(mine.partition_B(s_b))
        part = cute.make_rmem_tensor(tiled_mma.partition_shape_C((TILE_M, WIDTH)), F32)
        sums = cute.make_rmem_tensor(cute.make_layout((VALUES, PARTS)), F32)
        here = group * ROWS + warp * 16 + lane // 4  # the upper one of this thread's two rows
        tells = lane < CLUSTER  # a block each that a place has been read
        index, stride, total = turns
        place, phase = I32(0), I32(0)
        ready = cutlass.Boolean(False)
        while index < total:
            m, pair = tile_at(index, num_m, pairs, self.group_m)
            row = tiles[max_tiles + m] + group * ROWS
            end = tiles[2 * max_tiles + m]
            sums.fill(0.0)
            if row < end:
                for _ in cutlass.range(steps, unroll=1):
                    if not ready:
                        cute.arch.mbarrier_wait(full + place, phase)
                    then, then_phase = next_place(place, phase, STAGES)
                    for p in cutlass.range_constexpr(PARTS):
                        warpgroup.fence()
                        self.begin(tiled_mma, part, t_a, t_b, place, p)
                        if cutlass.const_expr(p == 0):
                            upper, lower = s_rows[here, place], s_rows[here + 8, place]
                            scales = s_parts[None, place].load()
                        else:  # asked for the next step's values before they are needed
                            ready = cute.arch.mbarrier_test_wait(full + then, then_phase)
                        warpgroup.wait_group(0)
                        if cutlass.const_expr(p == PARTS - 1):
                            if tells:
                                cute.arch.mbarrier_arrive(empty + place, lane)
                        self.add_scaled(sums, part, p, (upper * scales[p], lower * scales[p]))
                    place, phase = then, then_phase
                self.finish(
                    sums, s_out, o_atom, o_tma, out, out_scale, row, end, pair * CLUSTER + rank,
                    group, warp, lane,
                )  # fmt: skip
            else:  # the expert's rows end before: the places go back unread
                for _ in cutlass.range(steps, unroll=1):
                    cute.arch.mbarrier_wait(full + place, phase)
                    if tells:
                        cute.arch.mbarrier_arrive(empty + place, lane)
                    place, phase = next_place(place, phase, STAGES)
                ready = cutlass.Boolean(False)
            index += stride
        cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def begin(self, tiled_mma, part, t_a, t_b, place, p: cutlass.Constexpr):
        """Begin the product of a part and a step."""
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        for j in cutlass.range_constexpr(DEPTH // 32):
            cute.gemm(
                tiled_mma, part, t_a[None, None, j, place], t_b[None, None, j, place * PARTS + p],
                part,
            )  # fmt: skip
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def add_scaled(self, sums, part, p: cutlass.Constexpr, scales):
        """Do sums[:, p] += part * scale, one row after the other: so a scale stays at hand."""
        for half in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(VALUES):
                if cutlass.const_expr((i // 2) % 2 == half):
                    sums[i, p] = sums[i, p] + part[i] * scales[half]
