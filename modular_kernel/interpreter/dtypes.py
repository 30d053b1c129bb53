"""Numpy dtypes that store Triton's types in the CPU interpreter, and conversions between them.

In this package, *upstream* means Triton's interpreter as released.
"""

from typing import Any

import ml_dtypes
import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray

# Triton has no type annotations. TritonObject stands for its objects.
TritonObject = Any
Array = NDArray[Any]
Dtype = np.dtype[Any]

_finfo: TritonObject = ml_dtypes.finfo
BF16: Dtype = np.dtype(ml_dtypes.bfloat16)
_FP8: dict[str, Dtype] = {
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
    "fp8e4b8": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "fp8e5b16": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
_FP8_MAX: dict[Dtype, float] = {dtype: float(_finfo(dtype).max) for dtype in _FP8.values()}
NARROW_DTYPES: frozenset[Dtype] = frozenset({BF16, *_FP8_MAX})
# Unsigned integers of equal size, because upstream's C++ loads and stores do not support ml_dtypes.
BIT_DTYPES: dict[Dtype, Dtype] = {dtype: np.dtype(f"u{dtype.itemsize}") for dtype in NARROW_DTYPES}
# fp8e4b15 is missing and raises KeyError, because its conversions were not verified.
_STORAGE_BY_NAME: dict[str, Dtype] = {
    "int1": np.dtype(np.bool_),
    **{f"{sign}{n}": np.dtype(f"{sign}{n}") for sign in ("int", "uint") for n in (8, 16, 32, 64)},
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
    "bf16": BF16,
    **_FP8,
}
_POINTER_STORAGE: Dtype = np.dtype(np.uint64)
FLOAT32: Dtype = np.dtype(np.float32)
FLOAT64: Dtype = np.dtype(np.float64)
BOOL: Dtype = np.dtype(np.bool_)


def get_storage_dtype(tl_dtype: TritonObject) -> Dtype:
    """Return the numpy dtype that stores elements of a triton scalar, pointer or block type."""
    scalar = tl_dtype.scalar
    return (
        _POINTER_STORAGE if isinstance(scalar, tl.pointer_type) else _STORAGE_BY_NAME[scalar.name]
    )


def convert(data: Array, storage: Dtype) -> Array:
    """Convert `data` to the dtype `storage`, with the rounding and saturation of a GPU."""
    if data.dtype == storage:
        return data
    if storage in _FP8_MAX:
        wide = data if data.dtype == FLOAT64 else data.astype(FLOAT32)
        # np.clip propagates NaN, as cvt.satfinite does.
        return np.clip(wide, -_FP8_MAX[storage], _FP8_MAX[storage]).astype(storage)
    if storage.kind in "iu" and data.dtype.kind not in "iub":
        return _convert_float_to_int(widen(data), storage)
    if storage == BF16 and data.dtype.kind in "iub":
        return data.astype(FLOAT32).astype(storage)
    return data.astype(storage)


def widen(data: Array) -> Array:
    """Convert bf16 and fp8 to float32, which is exact. Return other data unchanged."""
    return data.astype(FLOAT32) if data.dtype in NARROW_DTYPES else data


def _convert_float_to_int(data: Array, storage: Dtype) -> Array:
    """Convert floats to integers by truncation and saturation. NaN becomes 0.

    8-bit results saturate to 16 bits and then wrap, because PTX converts to 16-bit registers.
    """
    register = np.dtype(f"{storage.kind}{max(2, storage.itemsize)}")
    low, high = np.iinfo(register).min, np.iinfo(register).max
    wide = data.astype(FLOAT64)
    below, above = wide < low, wide >= float(high) + (1 if register.itemsize < 8 else 0)
    integers = np.where(below | above | np.isnan(wide), 0.0, wide).astype(register)
    integers[below] = low
    integers[above] = high
    return integers.astype(storage)


def round_toward_zero(exact: Array, rounded: Array) -> Array:
    """Return `exact` rounded toward zero, in the dtype of `rounded`.

    rounded: `exact` rounded to nearest even.
    """
    bits = rounded.view(np.dtype(f"u{rounded.dtype.itemsize}"))
    is_larger = np.abs(widen(rounded).astype(FLOAT64)) > np.abs(exact.astype(FLOAT64))
    truncated: Array = (bits - is_larger.astype(bits.dtype)).view(rounded.dtype)
    return truncated


def fused_multiply_add(x: Array, y: Array, z: Array, storage: Dtype) -> Array:
    """Return `x * y + z` of operands of at most 32 bits, rounded once to `storage`.

    The product is exact in float64. The sum is first rounded to float64 with rounding to odd: if it
    is inexact, the last bit of the mantissa is set. Rounding such a value to `storage` gives the
    same result as a single rounding.
    """
    product, addend = x.astype(FLOAT64) * y.astype(FLOAT64), z.astype(FLOAT64)
    total = product + addend
    shifted = total - product
    error = (product - (total - shifted)) + (addend - shifted)
    is_even = (total.view(np.int64) & 1) == 0
    must_become_odd = is_even & np.isfinite(total) & (error != 0)
    neighbor = np.nextafter(total, np.copysign(np.inf, error))
    return convert(np.where(must_become_odd, neighbor, total), storage)


def truncate_to_tf32(data: Array) -> Array:
    """Truncate float32 to tf32 as tensor cores do, by clearing the low 13 bits."""
    truncated: Array = (data.view(np.uint32) & np.uint32(0xFFFFE000)).view(FLOAT32)
    return truncated


def tree_sum(data: Array, axis: int | None, keep_dims: bool) -> Array:
    """Sum along `axis` by repeatedly adding the second half to the first half.

    Each step rounds to `data.dtype`. The threads of a GPU reduce in the same order. A sequential
    sum of ones in bf16 would stop at 256.

    axis: the axis to reduce; None reduces all axes.
    """
    shape = data.shape
    rows = data.reshape(-1) if axis is None else np.moveaxis(data, axis, 0)
    while len(rows) > 1:
        half = len(rows) // 2  # triton's block sizes are powers of two
        rows = (rows[:half].astype(FLOAT32) + rows[half:].astype(FLOAT32)).astype(data.dtype)
    shape_after = (1,) * len(shape) if axis is None else (*shape[:axis], 1, *shape[axis + 1 :])
    total: Array = rows[0].reshape(shape_after) if keep_dims else rows[0]
    return total


def erf(data: Array) -> Array:
    """Compute erf in float64 with torch, because numpy has no erf."""
    values = torch.from_numpy(np.ascontiguousarray(data, dtype=FLOAT64))
    result: Array = torch.special.erf(values).numpy()
    return result


def argmax(data: Array, **axis: TritonObject) -> TritonObject:
    """Return the index of the first maximum. NaN is ignored; if all values are NaN, return 0."""
    without_nan = data if data.dtype.kind in "iub" else np.where(np.isnan(data), -np.inf, data)
    return np.argmax(without_nan, **axis)


def argmin(data: Array, **axis: TritonObject) -> TritonObject:
    """Return the index of the first minimum. NaN is ignored; if all values are NaN, return 0."""
    without_nan = data if data.dtype.kind in "iub" else np.where(np.isnan(data), np.inf, data)
    return np.argmin(without_nan, **axis)
