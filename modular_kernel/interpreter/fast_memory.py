"""Fast paths of `tl.load` and `tl.store` for operands that need no conversion.

As in `fast_paths`, `upstream_function` is the function of upstream (Triton's interpreter as
released), which handles all other cases. A lane is one element of a block. The mask of a load or
store selects the active lanes.
"""

from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as upstream

from modular_kernel.interpreter.dtypes import (
    BOOL,
    Array,
    Dtype,
    TritonObject,
    convert,
    get_storage_dtype,
)
from modular_kernel.interpreter.fast_paths import (
    MAX_INT32,
    MIN_INT32,
    FastPath,
    is_float32,
    is_positive_zero,
    make_block_type,
    make_tensor,
)

_tensor, _block, _pointer = tl.tensor, tl.block_type, tl.pointer_type
_STORAGE_BY_TYPE = {
    id(tl_dtype): get_storage_dtype(tl_dtype)
    for tl_dtype in (
        *(tl.int8, tl.uint8, tl.int16, tl.int32, tl.uint32, tl.int64, tl.uint64),
        *(tl.float32, tl.float16, tl.bfloat16, tl.float8e4nv, tl.float8e5),
    )
}
# (type of the value, type in memory) of stores that upstream, too, rounds only once.
_ROUNDING_STORES = frozenset(
    (id(tl.float32), id(tl_dtype)) for tl_dtype in (tl.float16, tl.bfloat16)
)
_LOAD_MODIFIERS = frozenset({"", ".ca", ".cg", ".cv"})
_STORE_MODIFIERS = frozenset({"", ".wb", ".cg", ".cs", ".wt"})
_CACHE_HINTS = frozenset({"cache_modifier", "eviction_policy"})
_EVICTION_POLICIES = frozenset({"", "evict_first", "evict_last"})


def _make_load_path(upstream_function: FastPath) -> FastPath:
    def fast_function(
        pointer: TritonObject,
        mask: TritonObject = None,
        other: TritonObject = None,
        *args: TritonObject,
        **kwargs: TritonObject,
    ) -> TritonObject:
        operands = _get_memory_operands(pointer, mask)
        if operands is None or args or not _has_only_cache_hints(kwargs, _LOAD_MODIFIERS):
            return upstream_function(pointer, mask, other, *args, **kwargs)
        addresses, lanes, tl_dtype, storage = operands
        fill = None
        if other is not None:
            fill = _get_fill_values(other, tl_dtype, storage, addresses.shape)
            is_compatible = type(other) is not _tensor or _is_block(other) == _is_block(pointer)
            if fill is None or mask is None or not is_compatible:
                return upstream_function(pointer, mask, other, **kwargs)
        data = upstream.interpreter_builder.read(addresses, lanes, fill, storage)
        return make_tensor(
            data,
            tl_dtype,
            make_block_type(tl_dtype, data.shape) if _is_block(pointer) else tl_dtype,
        )

    return fast_function


def _make_store_path(upstream_function: FastPath) -> FastPath:
    def fast_function(
        pointer: TritonObject,
        value: TritonObject,
        mask: TritonObject = None,
        *args: TritonObject,
        **kwargs: TritonObject,
    ) -> TritonObject:
        operands = _get_memory_operands(pointer, mask)
        if (
            operands is None
            or args
            or type(value) is not _tensor
            or not _has_only_cache_hints(kwargs, _STORE_MODIFIERS)
        ):
            return upstream_function(pointer, value, mask, *args, **kwargs)
        addresses, lanes, tl_dtype, storage = operands
        data, value_type = value.handle.data, value.dtype
        if value_type is not tl_dtype and (id(value_type), id(tl_dtype)) not in _ROUNDING_STORES:
            return upstream_function(pointer, value, mask, **kwargs)
        if _is_block(value) and (data.shape != addresses.shape or not _is_block(pointer)):
            return upstream_function(pointer, value, mask, **kwargs)
        data = convert(data, storage)
        if data.shape != addresses.shape:
            data = np.broadcast_to(data, addresses.shape)
        upstream.interpreter_builder.write(addresses, data, lanes, storage)
        return tl.tensor(None, tl.void)

    return fast_function


def _is_block(tensor: TritonObject) -> bool:
    return type(tensor.type) is _block


def _has_only_cache_hints(kwargs: dict[str, TritonObject], modifiers: frozenset[str]) -> bool:
    """Return whether `kwargs` has only cache hints, which do not change results."""
    if not kwargs.keys() <= _CACHE_HINTS:
        return False
    modifier, eviction = kwargs.get("cache_modifier", ""), kwargs.get("eviction_policy", "")
    return type(modifier) is type(eviction) is str and (
        modifier in modifiers and eviction in _EVICTION_POLICIES
    )


def _get_memory_operands(
    pointer: TritonObject, mask: TritonObject
) -> tuple[Array, Array, TritonObject, Dtype] | None:
    """Return (addresses, mask of active lanes, triton type of the elements, numpy dtype).

    Returns None if an operand needs upstream's implementation.
    """
    if type(pointer) is not _tensor or type(pointer.dtype) is not _pointer:
        return None
    tl_dtype = pointer.dtype.element_ty
    storage = _STORAGE_BY_TYPE.get(id(tl_dtype))
    if storage is None:
        return None
    addresses = pointer.handle.data
    if mask is None:
        return addresses, _make_all_lanes(addresses.shape), tl_dtype, storage
    if type(mask) is not _tensor or mask.dtype is not tl.int1:
        return None
    lanes = mask.handle.data
    if lanes.shape != addresses.shape:
        if (
            not _is_block(pointer)
            or _broadcast_shape(lanes.shape, addresses.shape) != addresses.shape
        ):
            return None
        lanes = np.broadcast_to(lanes, addresses.shape)
    elif _is_block(mask) and not _is_block(pointer):
        return None
    return addresses, lanes, tl_dtype, storage


@cache
def _broadcast_shape(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    try:
        return np.broadcast_shapes(left, right)
    except ValueError:
        return None


@cache
def _make_all_lanes(shape: tuple[int, ...]) -> Array:
    lanes = np.ones(shape, BOOL)
    lanes.flags.writeable = False
    return lanes


def _get_fill_values(
    other: TritonObject, tl_dtype: TritonObject, storage: Dtype, shape: tuple[int, ...]
) -> Array | None:
    """Return the values for inactive lanes; None if `other` needs upstream's implementation."""
    if type(other) is _tensor:
        data: Array = other.handle.data
        return data if other.dtype is tl_dtype and data.shape == shape else None
    if type(other) is int:
        is_zero = other == 0 and not tl_dtype.is_fp8()  # upstream does not convert integers to fp8
        is_exact = is_zero or (tl_dtype is tl.int32 and MIN_INT32 <= other <= MAX_INT32)
    elif type(other) is float:
        is_exact = is_positive_zero(other) or (tl_dtype is tl.float32 and is_float32(other))
    else:
        is_exact = False
    return _make_constant(other, storage, shape) if is_exact else None


@lru_cache(maxsize=1024)
def _make_constant(number: float, storage: Dtype, shape: tuple[int, ...]) -> Array:
    data = np.full(shape, number, storage)
    data.flags.writeable = False
    return data


MEMORY_FAST_PATHS: dict[str, Callable[[FastPath], FastPath]] = {
    "load": _make_load_path,
    "store": _make_store_path,
}
