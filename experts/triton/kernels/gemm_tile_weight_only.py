"""Device functions that compute one output tile from 16- or 32-bit rows and 8- or 4-bit weights."""

import triton
import triton.language as tl

from experts.triton.kernels.unpack_w4 import e8m0_values, is_e2m1, unpack_int4


@triton.jit
def _four_bit_integers(codes, zero, dtype: tl.constexpr):
    """Return q - zero in `dtype` for codes q = 0 to 15, without a slow integer conversion.

    The bits 0x4300 | q are 128 + q in bf16, and 0x6400 | q are 1024 + q in fp16. The differences
    are exact.
    """
    if dtype == tl.bfloat16:
        values = (codes.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
        result = values - (zero + 128).to(tl.bfloat16)
    elif dtype == tl.float16:
        values = (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
        result = values - (zero + 1024).to(tl.float16)
    else:
        result = (codes.to(tl.int32) - zero).to(dtype)
    return result


@triton.jit
def _e2m1(codes, dtype: tl.constexpr):
    """Convert e2m1 codes (sign, two exponent bits, one mantissa bit) to `dtype`, exactly.

    If a code is placed at the boundary of the exponent and mantissa fields of a wider format, the
    result is the value of the code times a power of two: 2^-126 in bf16, 2^-14 in fp16. This holds
    for subnormal codes, too.
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
def _repacked_values(codes, dtype: tl.constexpr):
    """Unpack repacked e2m1 weights, bytes (K / 2, N), to values (K, N) in `dtype`, exactly."""
    BYTES: tl.constexpr = codes.shape[0]
    COLUMNS: tl.constexpr = codes.shape[1]
    four = tl.reshape(tl.trans(codes).to(tl.int32), (COLUMNS, BYTES // 4, 2, 2))
    even, odd = tl.split(four)  # bytes of a word
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
def _step(
    a, codes, zero, FORMAT: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the float32 partial sum of one K step, without scales.

    If PACKED, there are two MMAs, for even and for odd k. Repacked weights need only one.
    """
    dtype: tl.constexpr = a.dtype
    if FORMAT == "e2m1_repacked":
        result = tl.dot(a, _repacked_values(codes, dtype), input_precision=PRECISION)
    elif PACKED:
        even, odd = tl.split(tl.reshape(a, (BLOCK_M, BLOCK_K // 2, 2)))
        if FORMAT == "e2m1":
            low = _e2m1(codes & 15, dtype)
            high = _e2m1(codes >> 4, dtype)
        else:
            low = _four_bit_integers(codes & 15, zero, dtype)
            high = _four_bit_integers(codes >> 4, zero, dtype)
        result = tl.dot(even, low, input_precision=PRECISION)
        result = tl.dot(odd, high, result, input_precision=PRECISION)
    elif FORMAT == "float8":
        result = tl.dot(a, codes.to(dtype), input_precision=PRECISION)
    else:
        b = (codes.to(tl.int32) - zero).to(dtype)
        result = tl.dot(a, b, input_precision=PRECISION)
    return result


@triton.jit
def _nvfp4_step(
    a, codes, scale_ptrs, mask, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the partial sum of one K step with NVFP4 weights.

    Weights are multiplied by their scales before the MMA. The products are exact in 16 bits.

    scale_ptrs: (BLOCK_K / 2, BLOCK_N), pointers to the scale of each byte, which has two weights.
    mask: (BLOCK_K / 2, BLOCK_N), the mask of these scales.
    """
    dtype: tl.constexpr = a.dtype
    scale = tl.load(scale_ptrs, mask=mask, other=0.0).to(dtype)
    even, odd = tl.split(tl.reshape(a, (BLOCK_M, BLOCK_K // 2, 2)))
    result = tl.dot(even, _e2m1(codes & 15, dtype) * scale, input_precision=PRECISION)
    return tl.dot(odd, _e2m1(codes >> 4, dtype) * scale, result, input_precision=PRECISION)


@triton.jit
def _load_scale(ptrs, mask, FORMAT: tl.constexpr, ONE_SCALE: tl.constexpr):
    """Load scales as float32, (1,) if ONE_SCALE, else (BLOCK_N,). e2m1 has scales in E8M0."""
    if ONE_SCALE:
        scale = tl.load(ptrs + tl.arange(0, 1))
    else:
        scale = tl.load(ptrs, mask=mask, other=0)
    if is_e2m1(FORMAT):
        result = e8m0_values(scale)
    else:
        result = scale.to(tl.float32)
    return result


@triton.jit
def _load_zero(ptrs, shift, mask, HAS_ZERO: tl.constexpr, ZERO_POINT: tl.constexpr):
    """Load zero points as int32 (1, BLOCK_N). Without HAS_ZERO, return ZERO_POINT as (1, 1)."""
    if HAS_ZERO:
        zero = tl.load(ptrs, mask=mask, other=0).to(tl.int32) >> shift
        if ZERO_POINT == 8:
            zero = zero & 15
        zero = zero[None, :]
    else:
        zero = tl.full((1, 1), ZERO_POINT, tl.int32)
    return zero


@triton.jit
def multiply_tile_weight_only(
    a_ptrs, a_mask, b_ptrs, up_offset, stride_ak, stride_bk, depth,
    scale_ptrs, up_scale_ptrs, stride_bsk,
    zero_ptrs, up_zero_ptrs, zero_shift, up_zero_shift, stride_bzk, column_mask,
    order_ptr,
    GATED: tl.constexpr, FORMAT: tl.constexpr, GROUP_K: tl.constexpr, ZERO_POINT: tl.constexpr,
    HAS_ZERO: tl.constexpr, PACKED: tl.constexpr, ONE_SCALE: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_ORDER: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Like `multiply_tile`, for weights that are dequantized in the loop.

    Return (gate, up) in float32. Weights are multiplied as integers, float8 or e2m1 values. The
    scale is applied to the partial sum of each K step. NVFP4 scales are applied to the weights
    instead, and the global scales are not applied here.

    b_ptrs: (1, BLOCK_N), pointers to the weights at k = 0, with two k per byte if PACKED.
    scale_ptrs: (BLOCK_N,), pointers to the first scale of each column; a single pointer if
        ONE_SCALE.
    zero_ptrs: (BLOCK_N,), pointers to the first zero point of each column.
    zero_shift: (BLOCK_N,), the position of the zero point in its byte, bit 0 or 4.
    up_scale_ptrs, up_zero_ptrs, up_zero_shift: the same for up.
    GROUP_K: K elements per scale; 0 for all of K. A multiple of BLOCK_K, except for NVFP4.
    ZERO_POINT, HAS_ZERO, HAS_ORDER: as in `gemm_tile`.
    """
    WIDTH: tl.constexpr = 2 if PACKED else 1
    k = tl.arange(0, BLOCK_K)
    row = tl.arange(0, BLOCK_K // WIDTH)
    a_rows = a_ptrs
    a_ptrs = a_ptrs + k[None, :] * stride_ak
    b_ptrs = b_ptrs + row[:, None] * stride_bk
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = gate
    for start in range(0, depth, BLOCK_K):
        a_mask_k = a_mask
        b_mask = column_mask[None, :]
        if not EVEN_K:
            a_mask_k = a_mask & (start + k < depth)[None, :]
            # The bound is in bytes. With a bound on start + 2 * row, the compiler could not prove
            # that adjacent bytes have the same mask, which wide asynchronous copies require.
            b_mask = b_mask & (start // WIDTH + row < depth // WIDTH)[:, None]
        if HAS_ORDER:
            column = tl.load(order_ptr + start + k, mask=start + k < depth, other=-1)
            in_range = (column >= 0) & (column < depth)
            ordered = a_rows + column[None, :].to(tl.int64) * stride_ak
            a = tl.load(ordered, mask=a_mask & in_range[None, :], other=0.0)
        else:
            a = tl.load(a_ptrs, mask=a_mask_k, other=0.0)
        codes = tl.load(b_ptrs, mask=b_mask, other=0.0)
        if FORMAT == "nvfp4":
            # Avoid a division by 0, which the interpreter ignores. On a GPU, its result would be
            # used in an address.
            group = (start // WIDTH + row) // (GROUP_K // WIDTH) if GROUP_K > 0 else row * 0
            group_offset = group[:, None] * stride_bsk
            gate += _nvfp4_step(
                a, codes, scale_ptrs[None, :] + group_offset, b_mask, PRECISION, BLOCK_M, BLOCK_K
            )
            if GATED:
                codes = tl.load(b_ptrs + up_offset, mask=b_mask, other=0.0)
                up += _nvfp4_step(
                    a,
                    codes,
                    up_scale_ptrs[None, :] + group_offset,
                    b_mask,
                    PRECISION,
                    BLOCK_M,
                    BLOCK_K,
                )
        else:
            group = start // GROUP_K if GROUP_K > 0 else 0
            scale = _load_scale(scale_ptrs + group * stride_bsk, column_mask, FORMAT, ONE_SCALE)
            zero = _load_zero(
                zero_ptrs + group * stride_bzk, zero_shift, column_mask, HAS_ZERO, ZERO_POINT
            )
            gate += scale[None, :] * _step(
                a, codes, zero, FORMAT, PACKED, PRECISION, BLOCK_M, BLOCK_K
            )
            if GATED:
                codes = tl.load(b_ptrs + up_offset, mask=b_mask, other=0.0)
                scale = _load_scale(
                    up_scale_ptrs + group * stride_bsk, column_mask, FORMAT, ONE_SCALE
                )
                zero = _load_zero(
                    up_zero_ptrs + group * stride_bzk,
                    up_zero_shift,
                    column_mask,
                    HAS_ZERO,
                    ZERO_POINT,
                )
                part = _step(a, codes, zero, FORMAT, PACKED, PRECISION, BLOCK_M, BLOCK_K)
                up += scale[None, :] * part
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += (BLOCK_K // WIDTH) * stride_bk
    return gate, up
