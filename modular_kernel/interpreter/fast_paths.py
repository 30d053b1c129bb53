"""Fast paths for operations of interpreted kernels whose operands need no conversion.

Upstream (Triton's interpreter as released) inspects both operands several times, broadcasts them,
and wraps numpy's result twice. The numpy operation alone gives the same result for two operands of
equal type (int32, int64, float32 or int1), for an operand of these types with a Python number, and
for a pointer with an offset.

Each function of type `FastPath -> FastPath` takes upstream's function, `upstream_function`, and
returns a faster replacement, which calls upstream's function in all other cases, including errors.
"""

from collections.abc import Callable
from functools import cache
from math import copysign, inf

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as upstream

from modular_kernel.interpreter.block_types import get_scalar_shape
from modular_kernel.interpreter.dtypes import Array, Dtype, TritonObject, convert, get_storage_dtype

FastPath = Callable[..., TritonObject]

_new_object = object.__new__
_tensor, _block, _pointer = tl.tensor, tl.block_type, tl.pointer_type
# Numpy dtypes of the supported types, by the type's id. Triton has one object per type.
_NUMERIC_STORAGE = {
    id(tl_dtype): get_storage_dtype(tl_dtype) for tl_dtype in (tl.int32, tl.int64, tl.float32)
}
_INTEGER_STORAGE = {id(tl_dtype): get_storage_dtype(tl_dtype) for tl_dtype in (tl.int32, tl.int64)}
_BITWISE_STORAGE = {
    id(tl_dtype): get_storage_dtype(tl_dtype) for tl_dtype in (tl.int1, tl.int32, tl.int64)
}
_OFFSET_TYPES = frozenset(_INTEGER_STORAGE)
_FULL_SLICE = slice(None)
MIN_INT32, MAX_INT32 = -(2**31), 2**31 - 1
_MIN_NORMAL_FLOAT32, _MAX_FLOAT32 = 2.0**-126, (2 - 2**-23) * 2.0**127
# Conversions that `to` does in one step. Upstream handles all others, because it converts between
# 16-bit types through float32, and has separate code for fp8.
_INTEGER_DTYPES = (tl.int8, tl.uint8, tl.int16, tl.int32, tl.int64)
_DIRECT_CASTS = frozenset(
    (id(source), id(target))
    for source, target in (
        *(
            (source, target)
            for source in (*_INTEGER_DTYPES, tl.int1)
            for target in (*_INTEGER_DTYPES, tl.float32)
        ),
        *((tl.float32, target) for target in (*_INTEGER_DTYPES, tl.bfloat16, tl.float16)),
        *((source, tl.float32) for source in (tl.bfloat16, tl.float16)),
    )
    if source is not target
)


def make_tensor(data: Array, tl_dtype: TritonObject, tensor_type: TritonObject) -> TritonObject:
    """Return a tensor without calling the constructors of triton.

    data: stored as the scalar type `tl_dtype`.
    tensor_type: `tl_dtype`, or a block type of it.
    """
    handle = _new_object(upstream.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, tl_dtype, {}
    tensor = _new_object(_tensor)
    tensor.handle, tensor.type, tensor.dtype = handle, tensor_type, tl_dtype
    shape_and_numel = tensor_type.__dict__.get("shape_and_numel")
    tensor.shape, tensor.numel = get_scalar_shape() if shape_and_numel is None else shape_and_numel
    return tensor


def _make_result(
    data: Array, tl_dtype: TritonObject, lhs: TritonObject, rhs: TritonObject
) -> TritonObject:
    is_block = type(lhs.type) is _block or (type(rhs) is _tensor and type(rhs.type) is _block)
    return make_tensor(
        data, tl_dtype, make_block_type(tl_dtype, data.shape) if is_block else tl_dtype
    )


_block_types: dict[tuple[int, tuple[int, ...]], TritonObject] = {}


def make_block_type(tl_dtype: TritonObject, shape: tuple[int, ...]) -> TritonObject:
    """Return the block type of `tl_dtype` elements with this shape, cached."""
    block = _block_types.get((id(tl_dtype), shape))
    if block is None:
        block = _block_types[id(tl_dtype), shape] = _block(tl_dtype, shape)
    return block


@cache
def _make_number_array(number: float, storage: Dtype) -> Array:
    data = np.array([number], storage)
    data.flags.writeable = False
    return data


def is_convertible(tl_dtype: TritonObject, number: object) -> bool:
    """Return whether upstream converts `number` to the type `tl_dtype` of the other operand."""
    if type(number) is int:
        is_supported = tl_dtype is tl.int32 or tl_dtype is tl.float32 or tl_dtype is tl.int64
        return is_supported and MIN_INT32 <= number <= MAX_INT32
    # Only some releases of triton keep the sign of a zero.
    return (
        type(number) is float
        and tl_dtype is tl.float32
        and (number != 0 or is_positive_zero(number))
    )


def is_positive_zero(number: float) -> bool:
    """Return whether the number is 0 and not -0."""
    return number == 0 and copysign(1, number) > 0


def is_float32(number: float) -> bool:
    """Return whether upstream converts the number to float32 instead of float64."""
    return _MIN_NORMAL_FLOAT32 <= abs(number) <= _MAX_FLOAT32 or abs(number) == inf


def _get_operand(
    tl_dtype: TritonObject, other: TritonObject, storages: dict[int, Dtype]
) -> tuple[Array, TritonObject] | None:
    """Return (data of `other`, common type of `other` and a tensor of `tl_dtype`).

    Returns None if a type is not supported, or if numpy would convert it differently.

    storages: id of each supported triton type -> numpy dtype.
    """
    storage = storages.get(id(tl_dtype))
    if storage is None:
        return None
    if type(other) is _tensor:
        other_dtype = other.dtype
        if other_dtype is tl_dtype:
            return other.handle.data, tl_dtype
        # For integers of two sizes, numpy widens as triton does.
        both_integers = id(tl_dtype) in _OFFSET_TYPES and id(other_dtype) in _OFFSET_TYPES
        return (other.handle.data, tl.int64) if both_integers else None
    return (
        (_make_number_array(other, storage), tl_dtype) if is_convertible(tl_dtype, other) else None
    )


def make_arithmetic_path(
    op: Callable[..., Array], storages: dict[int, Dtype]
) -> Callable[[FastPath], FastPath]:
    """Return the fast path of an operation on a tensor and another tensor or a number.

    storages: as in `_get_operand`.
    """

    def fast_path(upstream_function: FastPath) -> FastPath:
        def fast_function(
            self: TritonObject, other: TritonObject, **kwargs: TritonObject
        ) -> TritonObject:
            operand = _get_operand(self.dtype, other, storages)
            if operand is None:
                return upstream_function(self, other, **kwargs)
            try:
                data = op(self.handle.data, operand[0])
            except ValueError:  # incompatible shapes, which upstream reports
                return upstream_function(self, other, **kwargs)
            return _make_result(data, operand[1], self, other)

        return fast_function

    return fast_path


def _swap_operands(op: Callable[..., Array]) -> Callable[..., Array]:
    return lambda lhs, rhs: op(rhs, lhs)


def _make_add_path(upstream_function: FastPath) -> FastPath:
    add_numbers = make_arithmetic_path(np.add, _NUMERIC_STORAGE)(upstream_function)

    def fast_function(
        self: TritonObject, other: TritonObject, **kwargs: TritonObject
    ) -> TritonObject:
        tl_dtype = self.dtype
        if type(tl_dtype) is not _pointer:
            return add_numbers(self, other, **kwargs)
        element = tl_dtype.element_ty
        is_number = type(other) is int and MIN_INT32 <= other <= MAX_INT32
        is_offset = type(other) is _tensor and id(other.dtype) in _OFFSET_TYPES
        if not (is_number or is_offset) or hasattr(element, "element_ty"):
            return upstream_function(self, other, **kwargs)
        nbytes = max(1, element.primitive_bitwidth // 8)
        if is_number:
            offset = np.uint64(other * nbytes % 2**64)
        else:
            offset = other.handle.data.astype(np.uint64)
            if nbytes != 1:
                offset *= np.uint64(nbytes)
        base, result_type = self.handle.data, self.type
        try:
            data = base + offset
        except ValueError:
            return upstream_function(self, other, **kwargs)
        is_block = type(result_type) is _block
        if is_block or (is_offset and _is_block(other)):
            result_type = (
                result_type
                if is_block and data.shape == base.shape
                else _block(tl_dtype, data.shape)
            )
        return make_tensor(data, tl_dtype, result_type)

    return fast_function


def _is_block(tensor: TritonObject) -> bool:
    return type(tensor.type) is _block


def _make_comparison_path(op: Callable[..., Array]) -> Callable[[FastPath], FastPath]:
    def fast_path(upstream_function: FastPath) -> FastPath:
        def fast_function(
            self: TritonObject, other: TritonObject, **kwargs: TritonObject
        ) -> TritonObject:
            operand = _get_operand(self.dtype, other, _NUMERIC_STORAGE)
            if operand is None or (type(other) is float and not is_float32(other)):
                return upstream_function(self, other, **kwargs)
            try:
                data = op(self.handle.data, operand[0])
            except ValueError:
                return upstream_function(self, other, **kwargs)
            return _make_result(data, tl.int1, self, other)

        return fast_function

    return fast_path


def _make_division_path(op: Callable[..., Array]) -> Callable[[FastPath], FastPath]:
    """Return the fast path of an integer division toward zero. Upstream handles divisors of 0."""

    def fast_path(upstream_function: FastPath) -> FastPath:
        def fast_function(
            self: TritonObject, other: TritonObject, **kwargs: TritonObject
        ) -> TritonObject:
            operand = _get_operand(self.dtype, other, _INTEGER_STORAGE)
            if operand is None or not operand[0].all():
                return upstream_function(self, other, **kwargs)
            try:
                data = op(self.handle.data, operand[0])
            except ValueError:
                return upstream_function(self, other, **kwargs)
            return _make_result(data, operand[1], self, other)

        return fast_function

    return fast_path


def _divide_toward_zero(left: Array, right: Array) -> Array:
    quotient: Array = (left - np.fmod(left, right)) // right
    return quotient


def _make_getitem_path(upstream_function: FastPath) -> FastPath:
    """Return the fast path of indexing such as `x[:, None]`, with only `:` and None."""

    def fast_function(
        self: TritonObject, slices: TritonObject, **kwargs: TritonObject
    ) -> TritonObject:
        tl_dtype = self.dtype
        if type(slices) is not tuple or type(self.type) is not _block:
            return upstream_function(self, slices, **kwargs)
        num_slices = 0
        for index in slices:
            if index is not None:
                if type(index) is not slice or index != _FULL_SLICE:
                    return upstream_function(self, slices, **kwargs)
                num_slices += 1
        data = self.handle.data
        if num_slices != data.ndim:
            return upstream_function(self, slices, **kwargs)
        data = data[slices]
        is_pointer = type(tl_dtype) is _pointer
        return make_tensor(
            data,
            tl_dtype,
            _block(tl_dtype, data.shape) if is_pointer else make_block_type(tl_dtype, data.shape),
        )

    return fast_function


def _make_cast_path(upstream_function: FastPath) -> FastPath:
    def fast_function(
        self: TritonObject, *args: TritonObject, **kwargs: TritonObject
    ) -> TritonObject:
        tl_dtype = self.dtype
        if len(args) != 1 or kwargs:
            return upstream_function(self, *args, **kwargs)
        target = args[0].value if type(args[0]) is tl.constexpr else args[0]
        if target is tl_dtype:
            return self
        if (id(tl_dtype), id(target)) not in _DIRECT_CASTS:
            return upstream_function(self, *args, **kwargs)
        data = convert(self.handle.data, get_storage_dtype(target))
        return make_tensor(
            data, target, make_block_type(target, data.shape) if _is_block(self) else target
        )

    return fast_function


def _make_where_path(upstream_function: FastPath) -> FastPath:
    def fast_function(
        condition: TritonObject, x: TritonObject, y: TritonObject, **kwargs: TritonObject
    ) -> TritonObject:
        if not (type(condition) is type(x) is _tensor and condition.dtype is tl.int1):
            return upstream_function(condition, x, y, **kwargs)
        operand_and_dtype = _get_operand(x.dtype, y, _NUMERIC_STORAGE)
        if operand_and_dtype is None:
            return upstream_function(condition, x, y, **kwargs)
        operand, tl_dtype = operand_and_dtype
        try:
            data = np.where(condition.handle.data, x.handle.data, operand)
        except ValueError:
            return upstream_function(condition, x, y, **kwargs)
        return _make_result(data, tl_dtype, condition if _is_block(condition) else x, y)

    return fast_function


# Fast paths by the name of upstream's function, for methods of `tl.tensor` and functions of `tl`.
TENSOR_FAST_PATHS: dict[str, Callable[[FastPath], FastPath]] = {
    "__add__": _make_add_path,
    "__radd__": make_arithmetic_path(np.add, _NUMERIC_STORAGE),
    "__sub__": make_arithmetic_path(np.subtract, _NUMERIC_STORAGE),
    "__rsub__": make_arithmetic_path(_swap_operands(np.subtract), _NUMERIC_STORAGE),
    "__mul__": make_arithmetic_path(np.multiply, _NUMERIC_STORAGE),
    "__rmul__": make_arithmetic_path(np.multiply, _NUMERIC_STORAGE),
    "__floordiv__": _make_division_path(_divide_toward_zero),
    "__mod__": _make_division_path(np.fmod),
    "__and__": make_arithmetic_path(np.bitwise_and, _BITWISE_STORAGE),
    "__or__": make_arithmetic_path(np.bitwise_or, _BITWISE_STORAGE),
    "__xor__": make_arithmetic_path(np.bitwise_xor, _BITWISE_STORAGE),
    "__lt__": _make_comparison_path(np.less),
    "__le__": _make_comparison_path(np.less_equal),
    "__gt__": _make_comparison_path(np.greater),
    "__ge__": _make_comparison_path(np.greater_equal),
    "__eq__": _make_comparison_path(np.equal),
    "__ne__": _make_comparison_path(np.not_equal),
    "__getitem__": _make_getitem_path,
    "to": _make_cast_path,
}
LANGUAGE_FAST_PATHS: dict[str, Callable[[FastPath], FastPath]] = {"where": _make_where_path}
