"""Fast paths for operations whose operands need no conversion.

Upstream inspects both operands several times, broadcasts them, and wraps numpy's result twice. For
two operands of type int32, int64, float32 or int1, for a Python number that converts to such a
type, and for a pointer and an offset, the numpy operation alone gives the result.
Every fast path takes the upstream function and calls it in all other cases, including errors.
`modular_kernel.interpreter.patch` installs them.
"""

from collections.abc import Callable
from functools import cache
from math import copysign, inf

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as upstream

from modular_kernel.interpreter.block_types import shape_of_scalars
from modular_kernel.interpreter.dtypes import Array, Dtype, TritonObject, convert, storage_of

FastPath = Callable[..., TritonObject]

_new = object.__new__
_tensor, _block, _pointer = tl.tensor, tl.block_type, tl.pointer_type
# Keyed by the type's id: triton has one object per type.
_NUMERIC_STORAGE = {id(kind): storage_of(kind) for kind in (tl.int32, tl.int64, tl.float32)}
_INTEGER_STORAGE = {id(kind): storage_of(kind) for kind in (tl.int32, tl.int64)}
_BITWISE_STORAGE = {id(kind): storage_of(kind) for kind in (tl.int1, tl.int32, tl.int64)}
_OFFSET_TYPES = frozenset(_INTEGER_STORAGE)
_FULL_SLICE = slice(None)
MIN_INT32, MAX_INT32 = -(2**31), 2**31 - 1
_MIN_NORMAL_FLOAT32, _MAX_FLOAT32 = 2.0**-126, (2 - 2**-23) * 2.0**127
# Conversions that `to` does in one step. Upstream converts 16-bit values through float32, and has
# separate code for fp8.
_INTEGER_DTYPES = (tl.int8, tl.uint8, tl.int16, tl.int32, tl.int64)
_DIRECT_CASTS = frozenset(
    (id(a), id(b))
    for a, b in (
        *((a, b) for a in (*_INTEGER_DTYPES, tl.int1) for b in (*_INTEGER_DTYPES, tl.float32)),
        *((tl.float32, b) for b in (*_INTEGER_DTYPES, tl.bfloat16, tl.float16)),
        *((a, tl.float32) for a in (tl.bfloat16, tl.float16)),
    )
    if a is not b
)


def make_tensor(data: Array, kind: TritonObject, tensor_type: TritonObject) -> TritonObject:
    """Return a tensor of type `tensor_type`, with `data` stored as its scalar type `kind`."""
    handle = _new(upstream.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, kind, {}
    tensor = _new(_tensor)
    tensor.handle, tensor.type, tensor.dtype = handle, tensor_type, kind
    shape_and_numel = tensor_type.__dict__.get("of_tensors")
    tensor.shape, tensor.numel = shape_of_scalars() if shape_and_numel is None else shape_and_numel
    return tensor


def _result(data: Array, kind: TritonObject, lhs: TritonObject, rhs: TritonObject) -> TritonObject:
    is_block = type(lhs.type) is _block or (type(rhs) is _tensor and type(rhs.type) is _block)
    return make_tensor(data, kind, block_of(kind, data.shape) if is_block else kind)


_blocks: dict[tuple[int, tuple[int, ...]], TritonObject] = {}


def block_of(kind: TritonObject, shape: tuple[int, ...]) -> TritonObject:
    """Return triton's type of a block of `kind`, cached."""
    block = _blocks.get((id(kind), shape))
    if block is None:
        block = _blocks[id(kind), shape] = _block(kind, shape)
    return block


@cache
def _number(number: float, storage: Dtype) -> Array:
    data = np.array([number], storage)
    data.flags.writeable = False
    return data


def converts_to(kind: TritonObject, number: object) -> bool:
    """Return whether a Python number in an operation with a `kind` tensor converts to `kind`."""
    if type(number) is int:
        is_convertible = kind is tl.int32 or kind is tl.float32 or kind is tl.int64
        return is_convertible and MIN_INT32 <= number <= MAX_INT32
    # Only some releases of triton keep the sign of a zero.
    return (
        type(number) is float and kind is tl.float32 and (number != 0 or is_positive_zero(number))
    )


def is_positive_zero(number: float) -> bool:
    """Return whether the number is 0 and not -0."""
    return number == 0 and copysign(1, number) > 0


def is_float32(number: float) -> bool:
    """Return whether upstream converts the number to float32; outside that range it is float64."""
    return _MIN_NORMAL_FLOAT32 <= abs(number) <= _MAX_FLOAT32 or abs(number) == inf


def _operand(
    kind: TritonObject, other: TritonObject, kinds: dict[int, Dtype]
) -> tuple[Array, TritonObject] | None:
    """Return the data of `other`, and the type to which it and a tensor of `kind` are converted.

    Returns None if that is not one of `kinds`, or if numpy would convert differently.
    """
    storage = kinds.get(id(kind))
    if storage is None:
        return None
    if type(other) is _tensor:
        other_kind = other.dtype
        if other_kind is kind:
            return other.handle.data, kind
        # Integers of two sizes: numpy widens as triton does.
        both_integers = id(kind) in _OFFSET_TYPES and id(other_kind) in _OFFSET_TYPES
        return (other.handle.data, tl.int64) if both_integers else None
    return (_number(other, storage), kind) if converts_to(kind, other) else None


def arithmetic(op: Callable[..., Array], kinds: dict[int, Dtype]) -> Callable[[FastPath], FastPath]:
    """Return the fast path of an operation on a tensor and a tensor of equal type, or a number."""

    def fast_path(slow: FastPath) -> FastPath:
        def fast(self: TritonObject, other: TritonObject, **kwargs: TritonObject) -> TritonObject:
            operand = _operand(self.dtype, other, kinds)
            if operand is None:
                return slow(self, other, **kwargs)
            try:
                data = op(self.handle.data, operand[0])
            except ValueError:  # incompatible shapes, which upstream reports
                return slow(self, other, **kwargs)
            return _result(data, operand[1], self, other)

        return fast

    return fast_path


def _reversed(op: Callable[..., Array]) -> Callable[..., Array]:
    return lambda lhs, rhs: op(rhs, lhs)


def _add(slow: FastPath) -> FastPath:
    add_numbers = arithmetic(np.add, _NUMERIC_STORAGE)(slow)

    def fast(self: TritonObject, other: TritonObject, **kwargs: TritonObject) -> TritonObject:
        kind = self.dtype
        if type(kind) is not _pointer:
            return add_numbers(self, other, **kwargs)
        element = kind.element_ty
        is_number = type(other) is int and MIN_INT32 <= other <= MAX_INT32
        is_offset = type(other) is _tensor and id(other.dtype) in _OFFSET_TYPES
        if not (is_number or is_offset) or hasattr(element, "element_ty"):
            return slow(self, other, **kwargs)
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
            return slow(self, other, **kwargs)
        is_block = type(result_type) is _block
        if is_block or (is_offset and _is_block(other)):
            result_type = (
                result_type if is_block and data.shape == base.shape else _block(kind, data.shape)
            )
        return make_tensor(data, kind, result_type)

    return fast


def _is_block(tensor: TritonObject) -> bool:
    return type(tensor.type) is _block


def _comparison(op: Callable[..., Array]) -> Callable[[FastPath], FastPath]:
    def fast_path(slow: FastPath) -> FastPath:
        def fast(self: TritonObject, other: TritonObject, **kwargs: TritonObject) -> TritonObject:
            operand = _operand(self.dtype, other, _NUMERIC_STORAGE)
            if operand is None or (type(other) is float and not is_float32(other)):
                return slow(self, other, **kwargs)
            try:
                data = op(self.handle.data, operand[0])
            except ValueError:
                return slow(self, other, **kwargs)
            return _result(data, tl.int1, self, other)

        return fast

    return fast_path


def _division(op: Callable[..., Array]) -> Callable[[FastPath], FastPath]:
    """Return the fast path of integer division toward zero; upstream handles division by 0."""

    def fast_path(slow: FastPath) -> FastPath:
        def fast(self: TritonObject, other: TritonObject, **kwargs: TritonObject) -> TritonObject:
            operand = _operand(self.dtype, other, _INTEGER_STORAGE)
            if operand is None or not operand[0].all():
                return slow(self, other, **kwargs)
            try:
                data = op(self.handle.data, operand[0])
            except ValueError:
                return slow(self, other, **kwargs)
            return _result(data, operand[1], self, other)

        return fast

    return fast_path


def _quotient(left: Array, right: Array) -> Array:
    quotient: Array = (left - np.fmod(left, right)) // right
    return quotient


def _index(slow: FastPath) -> FastPath:
    """Return the fast path of indexing with one `:` per dimension, and any number of None."""

    def fast(self: TritonObject, slices: TritonObject, **kwargs: TritonObject) -> TritonObject:
        kind = self.dtype
        if type(slices) is not tuple or type(self.type) is not _block:
            return slow(self, slices, **kwargs)
        num_slices = 0
        for index in slices:
            if index is not None:
                if type(index) is not slice or index != _FULL_SLICE:
                    return slow(self, slices, **kwargs)
                num_slices += 1
        data = self.handle.data
        if num_slices != data.ndim:
            return slow(self, slices, **kwargs)
        data = data[slices]
        is_pointer = type(kind) is _pointer
        return make_tensor(
            data, kind, _block(kind, data.shape) if is_pointer else block_of(kind, data.shape)
        )

    return fast


def _to(slow: FastPath) -> FastPath:
    def fast(self: TritonObject, *args: TritonObject, **kwargs: TritonObject) -> TritonObject:
        kind = self.dtype
        if len(args) != 1 or kwargs:
            return slow(self, *args, **kwargs)
        target = args[0].value if type(args[0]) is tl.constexpr else args[0]
        if target is kind:
            return self
        if (id(kind), id(target)) not in _DIRECT_CASTS:
            return slow(self, *args, **kwargs)
        data = convert(self.handle.data, storage_of(target))
        return make_tensor(
            data, target, block_of(target, data.shape) if _is_block(self) else target
        )

    return fast


def _where(slow: FastPath) -> FastPath:
    def fast(
        condition: TritonObject, x: TritonObject, y: TritonObject, **kwargs: TritonObject
    ) -> TritonObject:
        if not (type(condition) is type(x) is _tensor and condition.dtype is tl.int1):
            return slow(condition, x, y, **kwargs)
        operand_and_kind = _operand(x.dtype, y, _NUMERIC_STORAGE)
        if operand_and_kind is None:
            return slow(condition, x, y, **kwargs)
        operand, kind = operand_and_kind
        try:
            data = np.where(condition.handle.data, x.handle.data, operand)
        except ValueError:
            return slow(condition, x, y, **kwargs)
        return _result(data, kind, condition if _is_block(condition) else x, y)

    return fast


# Fast paths by the name of the upstream function, in a class and in modules of triton.
TENSOR_FAST_PATHS: dict[str, Callable[[FastPath], FastPath]] = {
    "__add__": _add,
    "__radd__": arithmetic(np.add, _NUMERIC_STORAGE),
    "__sub__": arithmetic(np.subtract, _NUMERIC_STORAGE),
    "__rsub__": arithmetic(_reversed(np.subtract), _NUMERIC_STORAGE),
    "__mul__": arithmetic(np.multiply, _NUMERIC_STORAGE),
    "__rmul__": arithmetic(np.multiply, _NUMERIC_STORAGE),
    "__floordiv__": _division(_quotient),
    "__mod__": _division(np.fmod),
    "__and__": arithmetic(np.bitwise_and, _BITWISE_STORAGE),
    "__or__": arithmetic(np.bitwise_or, _BITWISE_STORAGE),
    "__xor__": arithmetic(np.bitwise_xor, _BITWISE_STORAGE),
    "__lt__": _comparison(np.less),
    "__le__": _comparison(np.less_equal),
    "__gt__": _comparison(np.greater),
    "__ge__": _comparison(np.greater_equal),
    "__eq__": _comparison(np.equal),
    "__ne__": _comparison(np.not_equal),
    "__getitem__": _index,
    "to": _to,
}
LANGUAGE_FAST_PATHS: dict[str, Callable[[FastPath], FastPath]] = {"where": _where}
