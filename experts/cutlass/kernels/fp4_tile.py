"""Sizes of the nvfp4 product: of a tile, a step, the rings of shared and of tensor memory."""

import cutlass

E2M1 = cutlass.Float4E2M1FN
E4M3 = cutlass.Float8E4M3FN
F32 = cutlass.Float32
I32 = cutlass.Int32

GROUP = 16  # values that share a scale
TILE_M = 128  # rows of a tile: what one instruction multiplies, one of tensor memory's lanes each
TILE_N = 128  # weight rows of a tile
DEPTH = 256  # of a step: 128 bytes of a row
STAGES = 6  # steps in shared memory
SUMS = 2  # tiles in tensor memory: one is stored while the next is computed
COLUMNS = 512  # of tensor memory: those of the sums and of a step's scales, a power of two
SCALE_BYTES = 128 * DEPTH // GROUP  # of a step's scales of 128 rows
STEP_BYTES = (TILE_M + TILE_N) * DEPTH // 2 + 2 * SCALE_BYTES

STORING = 4  # warps that store sums: warp w reads lanes 32 w and on
LOADING, MULTIPLYING = 4, 5  # the warp that loads, and that which issues products
THREADS = 6 * 32
PIECE = 32  # columns of sums that a thread holds
