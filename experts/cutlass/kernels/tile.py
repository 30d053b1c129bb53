"""Constants of the fp8 GEMM `BlockGemm`: sizes of tiles, steps and buffers, and register counts."""

import cutlass

E4M3 = cutlass.Float8E4M3FN
F32 = cutlass.Float32
I32 = cutlass.Int32

TILE_M = 128  # rows per tile
TILE_K = 128  # elements along K per step, which share a scale
PART_N = 128  # weight rows per part, which share a scale
PARTS = 2  # parts per tile
ROWS = 64  # rows per warpgroup
STAGES = 4  # steps in shared memory
CLUSTER = 2  # thread blocks per cluster
THREADS = 3 * 128
ACC_PER_THREAD = PART_N // 2  # accumulators of one part per thread
# Registers per thread of the two warpgroups that multiply, and of the warpgroup that loads. The
# three warpgroups must not need more than 168 registers per thread on average, which is the initial
# allocation. Otherwise, the warpgroups that multiply would wait forever for registers.
MMA_REGS, LOAD_REGS = 232, 40
BOX_BYTES = 128  # bytes per row of an output TMA box
QMAX = 448.0  # largest e4m3 value
MIN_SCALE = 2.0**-33  # as in `modular_kernel.quant.quantized_weights`
