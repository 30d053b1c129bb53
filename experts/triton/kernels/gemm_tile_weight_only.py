"""`multiply_tile_weight_only`: compute one output tile, dequantizing the weights in the loop.

The activations have 16 or 32 bits, and the weights have 8 or 4. `unpack_w4` explains the formats of
4-bit weights. e2m1 is the 4-bit floating-point type of mxfp4 and NVFP4.
"""

import triton
import triton.language as tl

from experts.triton.kernels.unpack_w4 import e8m0_values, is_e2m1, unpack_int4


@triton.jit
def _decode_int4(codes, zero_point, dtype: tl.constexpr):
    """Return q - zero_point in `dtype` for 4-bit codes q, without a slow integer conversion.

    The bits 0x4300 | q represent 128 + q in bf16, and 0x6400 | q represent 1024 + q in fp16.
    Subtracting 128 + zero_point or 1024 + zero_point is exact.
    """
    if dtype == tl.bfloat16:
        values = (codes.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
        result = values - (zero_point + 128).to(tl.bfloat16)
    elif dtype == tl.float16:
        values = (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
        result = values - (zero_point + 1024).to(tl.float16)
    else:
        result = (codes.to(tl.int32) - zero_point).to(dtype)
    return result


@triton.jit
def _decode_e2m1(codes, dtype: tl.constexpr):
    """Convert e2m1 codes (one sign bit, two exponent bits, one mantissa bit) to `dtype`, exactly.

    The exponent and mantissa bits of a code are moved to the position where the exponent and
    mantissa fields of the wider format meet. The result is the value of the code times a power of
    two, 2^-126 in bf16 and 2^-14 in fp16, also for subnormal codes. A multiplication removes the
    factor.
    """
    wide = codes.to(tl.uint16)
    if dtype == tl.bfloat16:
        bits = ((wide & 8) << 12) | ((wide & 7) << 6)
        result = bits.to(tl.bfloat16, bitcast=True) * tl.full((1, 1), 2.0**126, tl.bfloat16)
    else:
        bits = ((wide & 8) << 12) | ((wide & 7) << 9)
        result = (bits.to(tl.float16, bitcast=True) * tl.full((1, 1), 2.0**14, tl.float16)).to(
            dtype
        )
    return result


@triton.jit
def _decode_repacked_e2m1(codes, dtype: tl.constexpr):
    """Convert bytes (K / 2, N) in the "e2m1_repacked" format to `dtype` (K, N), exactly."""
    BYTES: tl.constexpr = codes.shape[0]
    COLUMNS: tl.constexpr = codes.shape[1]
    word_bytes = tl.reshape(tl.trans(codes).to(tl.int32), (COLUMNS, BYTES // 4, 2, 2))
    even, odd = tl.split(word_bytes)  # bytes of a word
    pair = even | (odd << 8)
    low, high = tl.split(pair)
    words = low | (high << 16)
    if dtype == tl.bfloat16:
        values = unpack_int4(words, "e2m1_repacked", tl.bfloat16) * tl.full(
            (1, 1, 1, 1, 1), 2.0**126, tl.bfloat16
        )
    else:
        values = unpack_int4(words, "e2m1_repacked", tl.float16) * tl.full(
            (1, 1, 1, 1, 1), 2.0**14, tl.float16
        )
    return tl.trans(tl.reshape(values, (COLUMNS, 2 * BYTES))).to(dtype)


@triton.jit
def _multiply_step(
    a, codes, zero_point, WEIGHT_FORMAT: tl.constexpr, PACKED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return a @ (decoded weights) of one K step, float32 (BLOCK_M, BLOCK_N), without scales.

    If PACKED, a byte holds the weights of an even k and of the next odd k. One MMA multiplies the
    even columns of `a`, and another MMA multiplies the odd columns. Repacked weights need only one
    MMA.

    a: (BLOCK_M, BLOCK_K), activations.
    codes: stored weights, (BLOCK_K, BLOCK_N), or bytes (BLOCK_K / 2, BLOCK_N) if PACKED.
    zero_point: int32 (1, BLOCK_N) or (1, 1), subtracted from integer weights.
    """
    dtype: tl.constexpr = a.dtype
    if WEIGHT_FORMAT == "e2m1_repacked":
        result = tl.dot(a, _decode_repacked_e2m1(codes, dtype), input_precision=INPUT_PRECISION)
    elif PACKED:
        even, odd = tl.split(tl.reshape(a, (BLOCK_M, BLOCK_K // 2, 2)))
        if WEIGHT_FORMAT == "e2m1":
            low = _decode_e2m1(codes & 15, dtype)
            high = _decode_e2m1(codes >> 4, dtype)
        else:
            low = _decode_int4(codes & 15, zero_point, dtype)
            high = _decode_int4(codes >> 4, zero_point, dtype)
        result = tl.dot(even, low, input_precision=INPUT_PRECISION)
        result = tl.dot(odd, high, result, input_precision=INPUT_PRECISION)
    elif WEIGHT_FORMAT == "float8":
        result = tl.dot(a, codes.to(dtype), input_precision=INPUT_PRECISION)
    else:
        b = (codes.to(tl.int32) - zero_point).to(dtype)
        result = tl.dot(a, b, input_precision=INPUT_PRECISION)
    return result


@triton.jit
def _multiply_nvfp4_step(
    a, codes, scale_ptrs, mask, INPUT_PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return a @ (weights * scales) of one K step with NVFP4 weights, float32 (BLOCK_M, BLOCK_N).

    A scale covers only 16 weights, fewer than a K step. The weights are therefore multiplied by
    their scales before the MMA. The products are exact in 16 bits.

    a: (BLOCK_M, BLOCK_K), activations.
    codes: bytes (BLOCK_K / 2, BLOCK_N), two weights each.
    scale_ptrs: (BLOCK_K / 2, BLOCK_N), pointers to the scale of the two weights of each byte.
    mask: (BLOCK_K / 2, BLOCK_N), False for scales that do not exist.
    """
    dtype: tl.constexpr = a.dtype
    scale = tl.load(scale_ptrs, mask=mask, other=0.0).to(dtype)
    even, odd = tl.split(tl.reshape(a, (BLOCK_M, BLOCK_K // 2, 2)))
    result = tl.dot(even, _decode_e2m1(codes & 15, dtype) * scale, input_precision=INPUT_PRECISION)
    return tl.dot(
        odd, _decode_e2m1(codes >> 4, dtype) * scale, result, input_precision=INPUT_PRECISION
    )


@triton.jit
def _load_scale(ptrs, mask, WEIGHT_FORMAT: tl.constexpr, ONE_SCALE_PER_TILE: tl.constexpr):
    """Load weight scales as float32: (1,) if ONE_SCALE_PER_TILE, otherwise (BLOCK_N,).

    The scales of e2m1 weights are stored as E8M0, an 8-bit exponent.
    """
    if ONE_SCALE_PER_TILE:
        scale = tl.load(ptrs + tl.arange(0, 1))
    else:
        scale = tl.load(ptrs, mask=mask, other=0)
    if is_e2m1(WEIGHT_FORMAT):
        result = e8m0_values(scale)
    else:
        result = scale.to(tl.float32)
    return result


@triton.jit
def _load_zero_points(ptrs, shift, mask, HAS_ZERO_POINTS: tl.constexpr, ZERO_POINT: tl.constexpr):
    """Load zero points as int32 (1, BLOCK_N). Without HAS_ZERO_POINTS, return ZERO_POINT as (1, 1).

    ptrs: (BLOCK_N,), pointers to the byte with the zero point of each column.
    shift: (BLOCK_N,), the position of the zero point in its byte, bit 0 or 4.
    ZERO_POINT: the default zero point. It is 8 for 4-bit weights, whose zero points are packed two
        to a byte.
    """
    if HAS_ZERO_POINTS:
        zero_point = tl.load(ptrs, mask=mask, other=0).to(tl.int32) >> shift
        if ZERO_POINT == 8:
            zero_point = zero_point & 15
        zero_point = zero_point[None, :]
    else:
        zero_point = tl.full((1, 1), ZERO_POINT, tl.int32)
    return zero_point


@triton.jit
def multiply_tile_weight_only(
    a_ptrs, a_mask, b_ptrs, up_offset, stride_ak, stride_bk, size_k,
    scale_ptrs, up_scale_ptrs, stride_bsk,
    zero_point_ptrs, up_zero_point_ptrs, zero_point_shift, up_zero_point_shift, stride_bzk,
    column_mask,
    act_order_ptr,
    GATED: tl.constexpr, WEIGHT_FORMAT: tl.constexpr, GROUP_K: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr, PACKED: tl.constexpr, ONE_SCALE_PER_TILE: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_ACT_ORDER: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply activation rows by quantized weights; return (gate, up), float32 (BLOCK_M, BLOCK_N).

    Weights are multiplied as integers, float8 or e2m1 values, and the scales multiply the partial
    sum of each K step. The scales of NVFP4 multiply the weights instead. Its global scales, one per
    matrix, are left to the caller. If not GATED, `up` is the same as `gate`.

    a_ptrs: (BLOCK_M, 1), pointers to the activation rows at k = 0.
    a_mask: (BLOCK_M, 1). Rows where it is False are read as 0.
    b_ptrs: (1, BLOCK_N), pointers to the gate (or only) weights of each column at k = 0.
    up_offset: offset in stored elements from a gate weight to the up weight of the same column.
    stride_ak: stride of the activations along K.
    stride_bk: stride of the stored weights along K.
    scale_ptrs: (BLOCK_N,), pointers to the first scale of each gate (or only) weight row; a single
        pointer if ONE_SCALE_PER_TILE.
    zero_point_ptrs: (BLOCK_N,), pointers to the byte with the first zero point of each gate weight
        row.
    zero_point_shift: (BLOCK_N,), the position of the zero point in its byte, bit 0 or 4.
    up_scale_ptrs, up_zero_point_ptrs, up_zero_point_shift: the same for the up weight rows.
    stride_bsk, stride_bzk: strides of scales and zero points along their groups.
    column_mask: (BLOCK_N,), False for columns that do not exist.
    act_order_ptr: pointer to (K,) integers. If HAS_ACT_ORDER, weight column k multiplies activation
        column act_order_ptr[k], as in GPTQ checkpoints with act order.
    GATED: whether to compute up in addition to gate.
    WEIGHT_FORMAT: "float8", "integer", "e2m1", "e2m1_repacked" or "nvfp4".
    GROUP_K: K elements per scale; 0 if one scale covers all of K. A multiple of BLOCK_K, except for
        NVFP4.
    ZERO_POINT: the zero point of all integer weights. Used unless HAS_ZERO_POINTS.
    PACKED: whether a byte holds two weights that are adjacent along K.
    ONE_SCALE_PER_TILE: whether all gate rows of a tile share one scale, and all up rows share one.
    EVEN_K: whether BLOCK_K divides K, so that no masks along K are needed.
    """
    VALUES_PER_BYTE: tl.constexpr = 2 if PACKED else 1
    k = tl.arange(0, BLOCK_K)
    stored_k = tl.arange(0, BLOCK_K // VALUES_PER_BYTE)
    a_rows = a_ptrs
    a_ptrs = a_ptrs + k[None, :] * stride_ak
    b_ptrs = b_ptrs + stored_k[:, None] * stride_bk
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = gate
    for start in range(0, size_k, BLOCK_K):
        a_mask_k = a_mask
        b_mask = column_mask[None, :]
        if not EVEN_K:
            a_mask_k = a_mask & (start + k < size_k)[None, :]
            # The bound is in bytes. With a bound on start + 2 * stored_k, the compiler could not
            # prove that adjacent bytes have the same mask, which wide asynchronous copies require.
            b_mask = (
                b_mask & (start // VALUES_PER_BYTE + stored_k < size_k // VALUES_PER_BYTE)[:, None]
            )
        if HAS_ACT_ORDER:
            column = tl.load(act_order_ptr + start + k, mask=start + k < size_k, other=-1)
            in_range = (column >= 0) & (column < size_k)
            ordered_a_ptrs = a_rows + column[None, :].to(tl.int64) * stride_ak
            a = tl.load(ordered_a_ptrs, mask=a_mask & in_range[None, :], other=0.0)
        else:
            a = tl.load(a_ptrs, mask=a_mask_k, other=0.0)
        codes = tl.load(b_ptrs, mask=b_mask, other=0.0)
        if WEIGHT_FORMAT == "nvfp4":
            # GROUP_K may be 0. On a GPU, the result of a division by 0 would be used in an address.
            group = (
                (start // VALUES_PER_BYTE + stored_k) // (GROUP_K // VALUES_PER_BYTE)
                if GROUP_K > 0
                else stored_k * 0
            )
            group_offset = group[:, None] * stride_bsk
            gate += _multiply_nvfp4_step(
                a,
                codes,
                scale_ptrs[None, :] + group_offset,
                b_mask,
                INPUT_PRECISION,
                BLOCK_M,
                BLOCK_K,
            )
            if GATED:
                codes = tl.load(b_ptrs + up_offset, mask=b_mask, other=0.0)
                up += _multiply_nvfp4_step(
                    a,
                    codes,
                    up_scale_ptrs[None, :] + group_offset,
                    b_mask,
                    INPUT_PRECISION,
                    BLOCK_M,
                    BLOCK_K,
                )
        else:
            group = start // GROUP_K if GROUP_K > 0 else 0
            scale = _load_scale(
                scale_ptrs + group * stride_bsk, column_mask, WEIGHT_FORMAT, ONE_SCALE_PER_TILE
            )
            zero_point = _load_zero_points(
                zero_point_ptrs + group * stride_bzk,
                zero_point_shift,
                column_mask,
                HAS_ZERO_POINTS,
                ZERO_POINT,
            )
            gate += scale[None, :] * _multiply_step(
                a, codes, zero_point, WEIGHT_FORMAT, PACKED, INPUT_PRECISION, BLOCK_M, BLOCK_K
            )
            if GATED:
                codes = tl.load(b_ptrs + up_offset, mask=b_mask, other=0.0)
                scale = _load_scale(
                    up_scale_ptrs + group * stride_bsk,
                    column_mask,
                    WEIGHT_FORMAT,
                    ONE_SCALE_PER_TILE,
                )
                zero_point = _load_zero_points(
                    up_zero_point_ptrs + group * stride_bzk,
                    up_zero_point_shift,
                    column_mask,
                    HAS_ZERO_POINTS,
                    ZERO_POINT,
                )
                part = _multiply_step(
                    a, codes, zero_point, WEIGHT_FORMAT, PACKED, INPUT_PRECISION, BLOCK_M, BLOCK_K
                )
                up += scale[None, :] * part
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += (BLOCK_K // VALUES_PER_BYTE) * stride_bk
    return gate, up
