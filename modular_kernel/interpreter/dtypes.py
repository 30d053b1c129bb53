"""Storage dtypes and conversions of Triton's CPU interpreter.

`modular_kernel.interpreter.patch` installs these rules in place of Triton's own. In this package,
*upstream* is Triton's interpreter as released.
"""

from typing import Any

import ml_dtypes
import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray

# Triton has no type annotations; TritonObject stands for its objects.
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
_MAX_FINITE: dict[Dtype, float] = {dtype: float(_finfo(dtype).max) for dtype in _FP8.values()}
NARROW: frozenset[Dtype] = frozenset({BF16, *_MAX_FINITE})
# Unsigned integers of the same size, for upstream's C++ loads and stores, which do not support the
# dtypes of ml_dtypes.
BITS: dict[Dtype, Dtype] = {dtype: np.dtype(f"u{dtype.itemsize}") for dtype in NARROW}
# Built once, because upstream rebuilds its table in every operation. fp8e4b15 is omitted: a
# KeyError is better than unverified results.
_STORAGE: dict[str, Dtype] = {
    "int1": np.dtype(np.bool_),
    **{f"{sign}{n}": np.dtype(f"{sign}{n}") for sign in ("int", "uint") for n in (8, 16, 32, 64)},
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
    "bf16": BF16,
    **_FP8,
}
_POINTER: Dtype = np.dtype(np.uint64)
FLOAT32: Dtype = np.dtype(np.float32)
FLOAT64: Dtype = np.dtype(np.float64)
BOOL: Dtype = np.dtype(np.bool_)


def storage_of(tl_dtype: TritonObject) -> Dtype:
    """Return the numpy dtype that stores a triton scalar, pointer or block type."""
    scalar = tl_dtype.scalar
    return _POINTER if isinstance(scalar, tl.pointer_type) else _STORAGE[scalar.name]


def convert(data: Array, storage: Dtype) -> Array:
    """Convert `data` of any shape to the dtype `storage`, rounded and saturated as on a GPU."""
    if data.dtype == storage:
        return data
    if storage in _MAX_FINITE:
        wide = data if data.dtype == FLOAT64 else data.astype(FLOAT32)
        # np.clip propagates NaN, as cvt.satfinite does.
        return np.clip(wide, -_MAX_FINITE[storage], _MAX_FINITE[storage]).astype(storage)
    if storage.kind in "iu" and data.dtype.kind not in "iub":
        return _float_to_int(widen(data), storage)
    if storage == BF16 and data.dtype.kind in "iub":
        return data.astype(FLOAT32).astype(storage)
    return data.astype(storage)


def widen(data: Array) -> Array:
    """Return `data`, converted exactly to float32 if it is bf16 or fp8."""
    return data.astype(FLOAT32) if data.dtype in NARROW else data


def _float_to_int(data: Array, storage: Dtype) -> Array:
    """Truncate toward zero and saturate; NaN becomes 0.

    8-bit targets saturate to 16 bits and then wrap, because PTX converts to 16-bit registers.
    """
    register = np.dtype(f"{storage.kind}{max(2, storage.itemsize)}")
    low, high = np.iinfo(register).min, np.iinfo(register).max
    exact = data.astype(FLOAT64)
    below, above = exact < low, exact >= float(high) + (1 if register.itemsize < 8 else 0)
    integers = np.where(below | above | np.isnan(exact), 0.0, exact).astype(register)
    integers[below] = low
    integers[above] = high
    return integers.astype(storage)


def toward_zero(exact: Array, rounded: Array) -> Array:
    """Return `exact` rounded toward zero.

    rounded: `exact` rounded to nearest even. Where that increased the magnitude, the result is the
    next value toward zero.
    """
    bits = rounded.view(np.dtype(f"u{rounded.dtype.itemsize}"))
    grew = np.abs(widen(rounded).astype(FLOAT64)) > np.abs(exact.astype(FLOAT64))
    stepped: Array = (bits - grew.astype(bits.dtype)).view(rounded.dtype)
    return stepped


def fused_multiply_add(x: Array, y: Array, z: Array, storage: Dtype) -> Array:
    """Return `x * y + z` of float32 or narrower operands, rounded once to `storage`.

    The product is exact in float64. The sum is rounded to odd in float64, so that rounding it to
    `storage` afterwards gives the same result as a single rounding.
    """
    product, addend = x.astype(FLOAT64) * y.astype(FLOAT64), z.astype(FLOAT64)
    total = product + addend
    shifted = total - product
    error = (product - (total - shifted)) + (addend - shifted)
    is_even = (total.view(np.int64) & 1) == 0
    must_become_odd = is_even & np.isfinite(total) & (error != 0)
    neighbor = np.nextafter(total, np.copysign(np.inf, error))
    return convert(np.where(must_become_odd, neighbor, total), storage)


def tf32(data: Array) -> Array:
    """Truncate float32 to tf32 as tensor cores do: the low 13 bits are ignored."""
    truncated: Array = (data.view(np.uint32) & np.uint32(0xFFFFE000)).view(FLOAT32)
    return truncated


def tree_sum(data: Array, axis: int | None, keep_dims: bool) -> Array:
    """Sum along `axis` (None: all axes) by adding halves, rounded to `data.dtype` at each step.

    Threads of a GPU reduce in this order, too. A sequential sum of ones in bf16 would stop at 256.
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
    """Compute erf in float64, with torch because numpy has no erf."""
    values = torch.from_numpy(np.ascontiguousarray(data, dtype=FLOAT64))
    result: Array = torch.special.erf(values).numpy()
    return result


def argmax(data: Array, **axis: TritonObject) -> TritonObject:
    """Return the leftmost index of the maximum.

    NaN is ignored; if all values are NaN, the index is 0.
    """
    without_nan = data if data.dtype.kind in "iub" else np.where(np.isnan(data), -np.inf, data)
    return np.argmax(without_nan, **axis)


def argmin(data: Array, **axis: TritonObject) -> TritonObject:
    """Return the leftmost index of the minimum.

    NaN is ignored; if all values are NaN, the index is 0.
    """
    without_nan = data if data.dtype.kind in "iub" else np.where(np.isnan(data), np.inf, data)
    return np.argmin(without_nan, **axis)
