"""Kernels that dequantize 4- and 8-bit weights to bf16 and select the tiles of a range of experts.

With many rows per expert, each weight is read many times, so dequantizing it once is cheaper than
unpacking it in every GEMM tile.
"""

import triton
import triton.language as tl

from experts.triton.kernels.unpack_w4 import e8m0_values, unpack_int4

TARGETS = ("sm_90",)  # targets of `mk compile`, the same as for this path's GEMM kernels
# Kernels that `mk compile` does not compile, and the reason.
LEFT_OUT = {"select_expert_tiles_kernel": "launched only for weights of more than 1 GiB"}
_E2M1_UNIT: tl.constexpr = tl.constexpr(2.0**126)


@triton.jit
def _unpack_values(codes, FORMAT: tl.constexpr, PACKED: tl.constexpr):
    """Unpack (ROWS, GROUPS, stored elements) to float32 (ROWS, GROUPS, STEP), exactly and unscaled.

    If an e2m1 code is placed at the boundary of the exponent and mantissa fields of a float32, the
    float32 is the value of the code times 2^-126. This holds for subnormal codes, too.
    """
    ROWS: tl.constexpr = codes.shape[0]
    GROUPS: tl.constexpr = codes.shape[1]
    if FORMAT == "e2m1_repacked":  # int32 words
        words: tl.constexpr = codes.shape[2]
        codes_int32 = tl.reshape(unpack_int4(codes, FORMAT, tl.bfloat16), (ROWS, GROUPS, 8 * words))
        values = codes_int32.to(tl.float32) * _E2M1_UNIT
    elif PACKED:
        codes_int32 = codes.to(tl.int32)
        nibbles = tl.join(codes_int32 & 15, codes_int32 >> 4)
        code = tl.reshape(nibbles, (ROWS, GROUPS, 2 * codes.shape[2]))
        if FORMAT == "e2m1" or FORMAT == "nvfp4":
            bits = ((code & 8) << 28) | ((code & 7) << 22)
            values = bits.to(tl.float32, bitcast=True) * _E2M1_UNIT
        else:
            values = code.to(tl.float32)
    elif FORMAT == "float8":
        values = codes.to(tl.float32)
    else:
        values = codes.to(tl.int32).to(tl.float32)
    return values


@triton.jit
def dequantize_kernel(
    w_ptr, scale_ptr, zero_ptr, starts_ptr, out_ptr, first_expert, rows, depth, scale_groups,
    scale_rows, FORMAT: tl.constexpr, PACKED: tl.constexpr, HAS_ZERO: tl.constexpr,
    ZERO_POINT: tl.constexpr, MATRICES: tl.constexpr, UP_ROW: tl.constexpr, GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    STEP: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out[e, n, k] = bf16((q - zero) * scale) of expert first_expert + e, if that expert has rows.

    q is the stored weight (n, k). Program (row block, K block, e) writes ROWS rows by STEPS * STEP
    columns. The STEP columns of a step share a scale. All tensors are contiguous.

    w_ptr: (experts, rows, depth), with two values per byte if PACKED, or int32 words of eight
        values if repacked.
    scale_ptr: (experts, scale_rows, scale_groups), one scale per GROUP_N rows and GROUP_K columns.
        GROUP_N = 0 means all rows, GROUP_K = 0 all columns. GROUP_K is a multiple of STEP.
    zero_ptr: (experts, rows, scale_groups), or two rows per byte if PACKED. Without HAS_ZERO, the
        zero point is ZERO_POINT. For NVFP4, this is instead the float32 global scales, (experts,
        MATRICES); rows of the second matrix (up) start at UP_ROW.
    starts_ptr: (experts + 1,), the first row of each expert in the GEMM input, followed by the
        total number of rows (`ops.sort`).
    FORMAT: the storage format of the values; see `operands.word_format`.
    """
    expert = first_expert + tl.program_id(2)
    if tl.load(starts_ptr + expert) < tl.load(starts_ptr + expert + 1):
        REPACKED: tl.constexpr = FORMAT == "e2m1_repacked"
        # Values per stored element.
        VALUES_PER_WORD: tl.constexpr = 8 if REPACKED else (2 if PACKED else 1)
        row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None, None]
        start = (tl.program_id(1) * STEPS + tl.arange(0, STEPS))[None, :, None] * STEP
        stored = start // VALUES_PER_WORD + tl.arange(0, STEP // VALUES_PER_WORD)[None, None, :]
        row_mask = row < rows
        row_index = expert.to(tl.int64) * rows + row
        mask = row_mask & (stored < depth // VALUES_PER_WORD)
        codes = tl.load(
            w_ptr + row_index * (depth // VALUES_PER_WORD) + stored, mask=mask, other=0.0
        )
        values = _unpack_values(codes, FORMAT, PACKED)
        group = start // GROUP_K if GROUP_K > 0 else start * 0
        group_mask = row_mask & (start < depth)
        scale_row = row // GROUP_N if GROUP_N > 0 else row * 0
        scale_offsets = (expert.to(tl.int64) * scale_rows + scale_row) * scale_groups + group
        scale = tl.load(scale_ptr + scale_offsets, mask=group_mask, other=0.0)
        if FORMAT == "float8":
            scale = scale.to(tl.float32)
        elif FORMAT == "nvfp4":
            scale = scale.to(tl.float32)
            matrix = row // UP_ROW % MATRICES
            values *= scale
            scale = tl.load(zero_ptr + expert.to(tl.int64) * MATRICES + matrix)
        elif FORMAT == "integer":
            scale = scale.to(tl.float32)
            if HAS_ZERO and PACKED:
                pair = expert.to(tl.int64) * (rows // 2) + row // 2
                zero = tl.load(zero_ptr + pair * scale_groups + group, mask=group_mask, other=0)
                zero = (zero.to(tl.int32) >> (row % 2 * 4)) & 15
                values -= zero.to(tl.float32)
            elif HAS_ZERO:
                zero = tl.load(
                    zero_ptr + row_index * scale_groups + group, mask=group_mask, other=0
                )
                values -= zero.to(tl.int32).to(tl.float32)
            else:
                values -= ZERO_POINT
        else:
            scale = e8m0_values(scale)
        k = start + tl.arange(0, STEP)[None, None, :]
        out_offsets = (tl.program_id(2).to(tl.int64) * rows + row) * depth + k
        tl.store(
            out_ptr + out_offsets, (values * scale).to(tl.bfloat16), mask=row_mask & (k < depth)
        )


@triton.jit
def select_expert_tiles_kernel(
    tiles_ptr, starts_ptr, out_ptr, first_expert, experts, max_tiles,
    TILE_M: tl.constexpr, BINS: tl.constexpr, TILES_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Copy the tiles (`ops.sort`) of experts [first_expert, first_expert + experts) to out.

    In the copies, these experts are numbered from 0. Each program copies TILES_PER_PROGRAM tiles.
    The first program also writes the total number of tiles.

    TILE_M: rows per tile.
    BINS: a power of two >= first_expert + experts.
    """
    expert = tl.arange(0, BINS)
    in_range = expert < first_expert + experts
    begin = tl.load(starts_ptr + expert, mask=in_range, other=0)
    end = tl.load(starts_ptr + expert + 1, mask=in_range, other=0)
    tile_counts = (end - begin + TILE_M - 1) // TILE_M
    first_tile = tl.sum(tl.where(expert < first_expert, tile_counts, 0), axis=0)
    num_tiles = tl.sum(tl.where(expert >= first_expert, tile_counts, 0), axis=0)
    pid = tl.program_id(0)
    tile = pid * TILES_PER_PROGRAM + tl.arange(0, TILES_PER_PROGRAM)
    in_use = tile < num_tiles
    from_ptr = tiles_ptr + first_tile + tile
    tl.store(out_ptr + tile, tl.load(from_ptr, mask=in_use, other=0) - first_expert, mask=in_use)
    row = tl.load(from_ptr + max_tiles, mask=in_use, other=0)
    end_row = tl.load(from_ptr + 2 * max_tiles, mask=in_use, other=0)
    tl.store(out_ptr + max_tiles + tile, row, mask=in_use)
    tl.store(out_ptr + 2 * max_tiles + tile, end_row, mask=in_use)
    if pid == 0:
        tl.store(out_ptr + 3 * max_tiles, num_tiles)
