"""Constants of the nvfp4 GEMM `Fp4Gemm`: sizes of tiles, steps and buffers, and roles of warps."""

import cutlass

E2M1 = cutlass.Float4E2M1FN
E4M3 = cutlass.Float8E4M3FN
F32 = cutlass.Float32
I32 = cutlass.Int32

GROUP = 16  # elements along K that share a scale
TILE_M = 128  # rows per tile: the M of one MMA, one row per lane of tensor memory
TILE_N = 128  # weight rows per tile
TILE_K = 256  # elements along K per step: 128 bytes of a row
STAGES = 6  # steps in shared memory
ACC_STAGES = 2  # tiles in tensor memory: one is stored while the next is computed
TMEM_COLUMNS = 512  # columns of tensor memory, for accumulators and the scales of one step
SCALE_BYTES = 128 * TILE_K // GROUP  # bytes of the scales of 128 rows in one step
STEP_BYTES = (TILE_M + TILE_N) * TILE_K // 2 + 2 * SCALE_BYTES

STORE_WARPS = 4  # warps that store accumulators; warp w reads lanes 32 w to 32 w + 31
LOAD_WARP, MMA_WARP = 4, 5  # indices of the warp that loads and the warp that issues MMAs
THREADS = 6 * 32
STORE_COLUMNS = 32  # accumulator columns that a thread reads at a time
