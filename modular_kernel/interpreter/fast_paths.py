"""Operations on operands that are alike already, in one step instead of upstream's dozen.

Upstream looks at both operands several times, spreads them to one shape, and wraps what numpy
returns twice. Of two int32, int64, float32 or int1 operands, of a number that takes such a type,
and of an address and an offset, it is known what all that comes to: numpy's own operation, which
spreads its operands itself. Every short cut takes the upstream function, and leaves to it whatever
it does not know, errors among them. Written for `modular_kernel.interpreter.patch`.
"""

from collections.abc import Callable
from functools import cache
from math import copysign, inf

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as upstream

from modular_kernel.interpreter.block_types import shape_of_scalars
from modular_kernel.interpreter.dtypes import Array, Dtype, Foreign, convert, storage_of

ShortCut = Callable[..., Foreign]

_new = object.__new__
_tensor, _block, _pointer = tl.tensor, tl.block_type, tl.pointer_type
# By a type's id: triton has one object for each.
_NUMBERS = {id(kind): storage_of(kind) for kind in (tl.int32, tl.int64, tl.float32)}
_INTEGERS = {id(kind): storage_of(kind) for kind in (tl.int32, tl.int64)}
_BITS = {id(kind): storage_of(kind) for kind in (tl.int1, tl.int32, tl.int64)}
_OFFSETS = frozenset(_INTEGERS)
_ALL = slice(None)
LEAST_INT, MOST_INT = -(2**31), 2**31 - 1
_LEAST_FLOAT, _MOST_FLOAT = 2.0**-126, (2 - 2**-23) * 2.0**127
# What `to` converts in one step; from 16 bits upstream goes through float32, fp8 has its own way.
_WHOLE = (tl.int8, tl.uint8, tl.int16, tl.int32, tl.int64)
_DIRECT = frozenset(
    (id(a), id(b))
    for a, b in (
        *((a, b) for a in (*_WHOLE, tl.int1) for b in (*_WHOLE, tl.float32)),
        *((tl.float32, b) for b in (*_WHOLE, tl.bfloat16, tl.float16)),
        *((a, tl.float32) for a in (tl.bfloat16, tl.float16)),
    )
    if a is not b
)


def made(data: Array, kind: Foreign, whole: Foreign) -> Foreign:
    """Return a tensor of type `whole`, whose scalar type `kind` is what `data` is stored as."""
    handle = _new(upstream.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, kind, {}
    tensor = _new(_tensor)
    tensor.handle, tensor.type, tensor.dtype = handle, whole, kind
    found = whole.__dict__.get("of_tensors")
    tensor.shape, tensor.numel = shape_of_scalars() if found is None else found
    return tensor


def _result(data: Array, kind: Foreign, lhs: Foreign, rhs: Foreign) -> Foreign:
    is_block = type(lhs.type) is _block or (type(rhs) is _tensor and type(rhs.type) is _block)
    return made(data, kind, block_of(kind, data.shape) if is_block else kind)


_blocks: dict[tuple[int, tuple[int, ...]], Foreign] = {}


def block_of(kind: Foreign, shape: tuple[int, ...]) -> Foreign:
    """Return the type of a block of `kind`, one of triton's own."""
    found = _blocks.get((id(kind), shape))
    if found is None:
        found = _blocks[id(kind), shape] = _block(kind, shape)
    return found


@cache
def _number(number: float, storage: Dtype) -> Array:
    data = np.array([number], storage)
    data.flags.writeable = False
    return data


def takes(kind: Foreign, number: object) -> bool:
    """Tell whether `number` beside a tensor of `kind` becomes one of that type, and of no other."""
    if type(number) is int:
        taken = kind is tl.int32 or kind is tl.float32 or kind is tl.int64
        return taken and LEAST_INT <= number <= MOST_INT
    # A zero's sign is kept by some releases of triton alone.
    return type(number) is float and kind is tl.float32 and (number != 0 or is_plus_zero(number))


def is_plus_zero(number: float) -> bool:
    """Tell 0 from -0."""
    return number == 0 and copysign(1, number) > 0


def is_float32(number: float) -> bool:
    """Tell whether a tensor that upstream makes of it is float32: beyond, it is float64."""
    return _LEAST_FLOAT <= abs(number) <= _MOST_FLOAT or abs(number) == inf


def _operand(
    kind: Foreign, other: Foreign, kinds: dict[int, Dtype]
) -> tuple[Array, Foreign] | None:
    """Return the data of `other` beside a tensor of `kind`, and what both are converted to.

    None where that is not one of `kinds`, or where numpy would convert in another way.
    """
    storage = kinds.get(id(kind))
    if storage is None:
        return None
    if type(other) is _tensor:
        own = other.dtype
        if own is kind:
            return other.handle.data, kind
        # Integers of two sizes: numpy widens as triton does.
        both = id(kind) in _OFFSETS and id(own) in _OFFSETS
        return (other.handle.data, tl.int64) if both else None
    return (_number(other, storage), kind) if takes(kind, other) else None


def arithmetic(op: Callable[..., Array], kinds: dict[int, Dtype]) -> Callable[[ShortCut], ShortCut]:
    """Return the short cut of an operation on a tensor and one of its type, or a number."""

    def short_cut(slow: ShortCut) -> ShortCut:
        def fast(self: Foreign, other: Foreign, **given: Foreign) -> Foreign:
            found = _operand(self.dtype, other, kinds)
            if found is None:
                return slow(self, other, **given)
            try:
                data = op(self.handle.data, found[0])
            except ValueError:  # shapes that do not go together, which upstream tells
                return slow(self, other, **given)
            return _result(data, found[1], self, other)

        return fast

    return short_cut


def _reversed(op: Callable[..., Array]) -> Callable[..., Array]:
    return lambda own, other: op(other, own)


def _add(slow: ShortCut) -> ShortCut:
    numbers = arithmetic(np.add, _NUMBERS)(slow)

    def fast(self: Foreign, other: Foreign, **given: Foreign) -> Foreign:
        kind = self.dtype
        if type(kind) is not _pointer:
            return numbers(self, other, **given)
        element = kind.element_ty
        is_number = type(other) is int and LEAST_INT <= other <= MOST_INT
        is_offset = type(other) is _tensor and id(other.dtype) in _OFFSETS
        if not (is_number or is_offset) or hasattr(element, "element_ty"):
            return slow(self, other, **given)
        nbytes = max(1, element.primitive_bitwidth // 8)
        if is_number:
            offset = np.uint64(other * nbytes % 2**64)
        else:
            offset = other.handle.data.astype(np.uint64)
            if nbytes != 1:
                offset *= np.uint64(nbytes)
        base, whole = self.handle.data, self.type
        try:
            data = base + offset
        except ValueError:
            return slow(self, other, **given)
        is_block = type(whole) is _block
        if is_block or (is_offset and _is_block(other)):
            whole = whole if is_block and data.shape == base.shape else _block(kind, data.shape)
        return made(data, kind, whole)

    return fast


def _is_block(tensor: Foreign) -> bool:
    return type(tensor.type) is _block


def _comparison(op: Callable[..., Array]) -> Callable[[ShortCut], ShortCut]:
    def short_cut(slow: ShortCut) -> ShortCut:
        def fast(self: Foreign, other: Foreign, **given: Foreign) -> Foreign:
            found = _operand(self.dtype, other, _NUMBERS)
            if found is None or (type(other) is float and not is_float32(other)):
                return slow(self, other, **given)
            try:
                data = op(self.handle.data, found[0])
            except ValueError:
                return slow(self, other, **given)
            return _result(data, tl.int1, self, other)

        return fast

    return short_cut


def _division(op: Callable[..., Array]) -> Callable[[ShortCut], ShortCut]:
    """Of integers, rounded toward zero; by 0 it is upstream's."""

    def short_cut(slow: ShortCut) -> ShortCut:
        def fast(self: Foreign, other: Foreign, **given: Foreign) -> Foreign:
            found = _operand(self.dtype, other, _INTEGERS)
            if found is None or not found[0].all():
                return slow(self, other, **given)
            try:
                data = op(self.handle.data, found[0])
            except ValueError:
                return slow(self, other, **given)
            return _result(data, found[1], self, other)

        return fast

    return short_cut


def _quotient(left: Array, right: Array) -> Array:
    quotient: Array = (left - np.fmod(left, right)) // right
    return quotient


def _index(slow: ShortCut) -> ShortCut:
    """Index by `:` and None alone, one `:` for each dimension."""

    def fast(self: Foreign, slices: Foreign, **given: Foreign) -> Foreign:
        kind = self.dtype
        if type(slices) is not tuple or type(self.type) is not _block:
            return slow(self, slices, **given)
        kept = 0
        for each in slices:
            if each is not None:
                if type(each) is not slice or each != _ALL:
                    return slow(self, slices, **given)
                kept += 1
        data = self.handle.data
        if kept != data.ndim:
            return slow(self, slices, **given)
        data = data[slices]
        own = type(kind) is _pointer
        return made(data, kind, _block(kind, data.shape) if own else block_of(kind, data.shape))

    return fast


def _to(slow: ShortCut) -> ShortCut:
    def fast(self: Foreign, *args: Foreign, **given: Foreign) -> Foreign:
        kind = self.dtype
        if len(args) != 1 or given:
            return slow(self, *args, **given)
        wanted = args[0].value if type(args[0]) is tl.constexpr else args[0]
        if wanted is kind:
            return self
        if (id(kind), id(wanted)) not in _DIRECT:
            return slow(self, *args, **given)
        data = convert(self.handle.data, storage_of(wanted))
        return made(data, wanted, block_of(wanted, data.shape) if _is_block(self) else wanted)

    return fast


def _where(slow: ShortCut) -> ShortCut:
    def fast(condition: Foreign, x: Foreign, y: Foreign, **given: Foreign) -> Foreign:
        if not (type(condition) is type(x) is _tensor and condition.dtype is tl.int1):
            return slow(condition, x, y, **given)
        found = _operand(x.dtype, y, _NUMBERS)
        if found is None:
            return slow(condition, x, y, **given)
        operand, kind = found
        try:
            data = np.where(condition.handle.data, x.handle.data, operand)
        except ValueError:
            return slow(condition, x, y, **given)
        return _result(data, kind, condition if _is_block(condition) else x, y)

    return fast


# By name, of a module or class of triton's: what stands before the upstream function.
OF_TENSORS: dict[str, Callable[[ShortCut], ShortCut]] = {
    "__add__": _add,
    "__radd__": arithmetic(np.add, _NUMBERS),
    "__sub__": arithmetic(np.subtract, _NUMBERS),
    "__rsub__": arithmetic(_reversed(np.subtract), _NUMBERS),
    "__mul__": arithmetic(np.multiply, _NUMBERS),
    "__rmul__": arithmetic(np.multiply, _NUMBERS),
    "__floordiv__": _division(_quotient),
    "__mod__": _division(np.fmod),
    "__and__": arithmetic(np.bitwise_and, _BITS),
    "__or__": arithmetic(np.bitwise_or, _BITS),
    "__xor__": arithmetic(np.bitwise_xor, _BITS),
    "__lt__": _comparison(np.less),
    "__le__": _comparison(np.less_equal),
    "__gt__": _comparison(np.greater),
    "__ge__": _comparison(np.greater_equal),
    "__eq__": _comparison(np.equal),
    "__ne__": _comparison(np.not_equal),
    "__getitem__": _index,
    "to": _to,
}
OF_LANGUAGE: dict[str, Callable[[ShortCut], ShortCut]] = {"where": _where}
