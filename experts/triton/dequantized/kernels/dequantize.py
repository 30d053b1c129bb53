"""Kernels that dequantize 4- and 8-bit weights to bf16, and that select the tiles of some experts.

With many rows per expert, each weight is read by many GEMM tiles, so dequantizing it once is
cheaper than unpacking it in every tile. The path processes a range of experts at a time, to limit
the size of the bf16 weights. e2m1 is the 4-bit floating-point type of mxfp4 and NVFP4.
"""

import triton
import triton.language as tl

from experts.triton.kernels.unpack_w4 import e8m0_values, unpack_int4

TARGETS = ("sm_90",)  # targets of `mk compile`, the same as for this path's GEMM kernels
# Kernels that `mk compile` does not compile, and the reason.
LEFT_OUT = {"select_expert_tiles_kernel": "launched only for weights of more than 1 GiB"}
_E2M1_UNIT: tl.constexpr = tl.constexpr(2.0**126)  # see _unpack_values


@triton.jit
def _unpack_values(codes, WEIGHT_FORMAT: tl.constexpr, PACKED: tl.constexpr):
    """Unpack stored weights to float32 (BLOCK_N, groups, STEP_K), exactly and without scales.

    Shifts move the sign of an e2m1 code to bit 31 of a float32, its two exponent bits to the lowest
    bits of the exponent, and its mantissa bit to the highest bit of the mantissa. This float32 is
    2^-126 times the value of the code, also for subnormal codes. _E2M1_UNIT removes the factor.

    codes: (BLOCK_N, groups, stored elements).
    """
    BLOCK_N: tl.constexpr = codes.shape[0]
    GROUPS: tl.constexpr = codes.shape[1]
    if WEIGHT_FORMAT == "e2m1_repacked":  # int32 words
        words: tl.constexpr = codes.shape[2]
        codes_int32 = tl.reshape(
            unpack_int4(codes, WEIGHT_FORMAT, tl.bfloat16), (BLOCK_N, GROUPS, 8 * words)
        )
        values = codes_int32.to(tl.float32) * _E2M1_UNIT
    elif PACKED:
        codes_int32 = codes.to(tl.int32)
        nibbles = tl.join(codes_int32 & 15, codes_int32 >> 4)
        code = tl.reshape(nibbles, (BLOCK_N, GROUPS, 2 * codes.shape[2]))
        if WEIGHT_FORMAT == "e2m1" or WEIGHT_FORMAT == "nvfp4":
            bits = ((code & 8) << 28) | ((code & 7) << 22)
            values = bits.to(tl.float32, bitcast=True) * _E2M1_UNIT
        else:
            values = code.to(tl.float32)
    elif WEIGHT_FORMAT == "float8":
        values = codes.to(tl.float32)
    else:
        values = codes.to(tl.int32).to(tl.float32)
    return values


@triton.jit
def dequantize_kernel(
    w_ptr, scale_ptr, zero_point_or_global_scale_ptr, expert_starts_ptr, out_ptr, first_expert,
    size_n, size_k, scale_groups, scale_rows,
    WEIGHT_FORMAT: tl.constexpr, PACKED: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr,
    ZERO_POINT: tl.constexpr, NUM_GLOBAL_SCALES: tl.constexpr, UP_ROW_OFFSET: tl.constexpr,
    GROUP_N: tl.constexpr, GROUP_K: tl.constexpr,
    STEP_K: tl.constexpr, K_STEPS_PER_PROGRAM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[e, n, k] = bf16((q - zero_point) * scale), if expert first_expert + e has rows.

    q is the stored weight (n, k) of the expert. Grid: (blocks of BLOCK_N rows, blocks of K,
    experts). A program writes BLOCK_N weight rows by K_STEPS_PER_PROGRAM * STEP_K columns. The
    STEP_K columns of a step share a scale. All tensors are contiguous.

    w_ptr: (num_experts, N, K), with two values per byte if PACKED, or int32 words of eight values
        with WEIGHT_FORMAT "e2m1_repacked".
    scale_ptr: (num_experts, scale_rows, scale_groups), one scale per GROUP_N rows and GROUP_K
        columns. GROUP_N = 0 means all rows, GROUP_K = 0 all columns. GROUP_K is a multiple of
        STEP_K.
    zero_point_or_global_scale_ptr: for NVFP4, the float32 global scales (num_experts,
        NUM_GLOBAL_SCALES), of which row n uses number n // UP_ROW_OFFSET % NUM_GLOBAL_SCALES. For
        other formats with HAS_ZERO_POINTS, the zero points (num_experts, N, scale_groups), with two
        rows per byte if PACKED. Otherwise, the pointer is not read, and the zero point is
        ZERO_POINT.
    expert_starts_ptr: (num_experts + 1,) int32, the first activation row of each expert, then the
        number of rows (`modular_kernel.ops.sort`).
    out_ptr: bf16 output (experts of this launch, N, K).
    size_n, size_k: N and K.
    WEIGHT_FORMAT: "float8", "integer", "e2m1", "e2m1_repacked" or "nvfp4"
        (`experts.triton.operands.word_format`).
    """
    expert = first_expert + tl.program_id(2)
    if tl.load(expert_starts_ptr + expert) < tl.load(expert_starts_ptr + expert + 1):
        REPACKED: tl.constexpr = WEIGHT_FORMAT == "e2m1_repacked"
        # Values per stored element.
        VALUES_PER_WORD: tl.constexpr = 8 if REPACKED else (2 if PACKED else 1)
        row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None, None]
        start = (tl.program_id(1) * K_STEPS_PER_PROGRAM + tl.arange(0, K_STEPS_PER_PROGRAM))[
            None, :, None
        ] * STEP_K
        stored = start // VALUES_PER_WORD + tl.arange(0, STEP_K // VALUES_PER_WORD)[None, None, :]
        row_mask = row < size_n
        row_index = expert.to(tl.int64) * size_n + row
        mask = row_mask & (stored < size_k // VALUES_PER_WORD)
        codes = tl.load(
            w_ptr + row_index * (size_k // VALUES_PER_WORD) + stored, mask=mask, other=0.0
        )
        values = _unpack_values(codes, WEIGHT_FORMAT, PACKED)
        group = start // GROUP_K if GROUP_K > 0 else start * 0
        group_mask = row_mask & (start < size_k)
        scale_row = row // GROUP_N if GROUP_N > 0 else row * 0
        scale_offsets = (expert.to(tl.int64) * scale_rows + scale_row) * scale_groups + group
        scale = tl.load(scale_ptr + scale_offsets, mask=group_mask, other=0.0)
        if WEIGHT_FORMAT == "float8":
            scale = scale.to(tl.float32)
        elif WEIGHT_FORMAT == "nvfp4":
            scale = scale.to(tl.float32)
            matrix = row // UP_ROW_OFFSET % NUM_GLOBAL_SCALES
            values *= scale
            scale = tl.load(
                zero_point_or_global_scale_ptr + expert.to(tl.int64) * NUM_GLOBAL_SCALES + matrix
            )
        elif WEIGHT_FORMAT == "integer":
            scale = scale.to(tl.float32)
            if HAS_ZERO_POINTS and PACKED:
                row_pair = expert.to(tl.int64) * (size_n // 2) + row // 2
                zero_points = tl.load(
                    zero_point_or_global_scale_ptr + row_pair * scale_groups + group,
                    mask=group_mask,
                    other=0,
                )
                zero_points = (zero_points.to(tl.int32) >> (row % 2 * 4)) & 15
                values -= zero_points.to(tl.float32)
            elif HAS_ZERO_POINTS:
                zero_points = tl.load(
                    zero_point_or_global_scale_ptr + row_index * scale_groups + group,
                    mask=group_mask,
                    other=0,
                )
                values -= zero_points.to(tl.int32).to(tl.float32)
            else:
                values -= ZERO_POINT
        else:
            scale = e8m0_values(scale)
        k = start + tl.arange(0, STEP_K)[None, None, :]
        out_offsets = (tl.program_id(2).to(tl.int64) * size_n + row) * size_k + k
        tl.store(
            out_ptr + out_offsets, (values * scale).to(tl.bfloat16), mask=row_mask & (k < size_k)
        )


@triton.jit
def select_expert_tiles_kernel(
    tiles_ptr, expert_starts_ptr, out_ptr, first_expert, num_experts, max_tiles,
    BLOCK_M: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, TILES_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Copy the tiles of experts [first_expert, first_expert + num_experts) to out.

    In the copies, these experts are numbered from 0. Grid: (blocks of TILES_PER_PROGRAM tiles,).
    The first program also writes the number of tiles.

    tiles_ptr, out_ptr: tiles of at most BLOCK_M rows, in the int32 layout of
        `modular_kernel.ops.sort.SortedPairs.tiles`. Three arrays of max_tiles values have, for each
        tile, the expert, the first row, and the end of the expert's rows. The number of tiles
        follows.
    expert_starts_ptr: the first row of each expert, then the number of rows.
    BLOCK_EXPERTS: a power of two >= first_expert + num_experts.
    """
    expert = tl.arange(0, BLOCK_EXPERTS)
    in_range = expert < first_expert + num_experts
    begin = tl.load(expert_starts_ptr + expert, mask=in_range, other=0)
    end = tl.load(expert_starts_ptr + expert + 1, mask=in_range, other=0)
    tile_counts = (end - begin + BLOCK_M - 1) // BLOCK_M
    first_tile = tl.sum(tl.where(expert < first_expert, tile_counts, 0), axis=0)
    num_tiles = tl.sum(tl.where(expert >= first_expert, tile_counts, 0), axis=0)
    pid = tl.program_id(0)
    tile = pid * TILES_PER_PROGRAM + tl.arange(0, TILES_PER_PROGRAM)
    in_use = tile < num_tiles
    tile_ptrs = tiles_ptr + first_tile + tile
    tl.store(out_ptr + tile, tl.load(tile_ptrs, mask=in_use, other=0) - first_expert, mask=in_use)
    row = tl.load(tile_ptrs + max_tiles, mask=in_use, other=0)
    end_row = tl.load(tile_ptrs + 2 * max_tiles, mask=in_use, other=0)
    tl.store(out_ptr + max_tiles + tile, row, mask=in_use)
    tl.store(out_ptr + 2 * max_tiles + tile, end_row, mask=in_use)
    if pid == 0:
        tl.store(out_ptr + 3 * max_tiles, num_tiles)
