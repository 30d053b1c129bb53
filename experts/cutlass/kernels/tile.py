"""Sizes of the fp8 product: of a tile, a step, the ring of shared memory, and a block's threads."""

import cutlass

E4M3 = cutlass.Float8E4M3FN
F32 = cutlass.Float32
I32 = cutlass.Int32

TILE_M = 128
DEPTH = 128  # of a step, and of a scale
WIDTH = 128  # weight rows of a part, and of a scale
PARTS = 2
ROWS = 64  # of a warpgroup
STAGES = 4
CLUSTER = 2
THREADS = 3 * 128
VALUES = WIDTH // 2  # of a part in a thread
# Registers of a thread that multiplies, and of the others: together no more than at the start,
# 168 for each of 384, or the first would wait for ever.
MOST, FEWEST = 232, 40
BOX_BYTES = 128  # of a row of results on its way out
LARGEST = 448.0  # of e4m3
LEAST_SCALE = 2.0**-33
