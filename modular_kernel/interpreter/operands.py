"""Fast type promotion and broadcasting of the two operands of an interpreted operation.

Before each operation, upstream (Triton's interpreter as released) determines the common type of the
operands, converts Python numbers to constants twice, and compares shapes size by size. These steps
take a third of the time of most kernels. The functions below convert operands directly if they have
equal types, if they are a pointer and an offset, or if they are a tensor and a number that converts
to the type of the tensor. Upstream handles all other cases, including errors.
"""

import inspect
from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as upstream

from modular_kernel.interpreter.dtypes import Array, TritonObject, get_storage_dtype
from modular_kernel.interpreter.fast_memory import MEMORY_FAST_PATHS
from modular_kernel.interpreter.fast_paths import (
    LANGUAGE_FAST_PATHS,
    TENSOR_FAST_PATHS,
    is_convertible,
)

# The original functions, which the replacements below call.
_upstream_promote_operands: Callable[..., tuple[TritonObject, TritonObject]] = (
    TritonSemantic.binary_op_type_checking_impl
)
_upstream_broadcast: Callable[..., tuple[TritonObject, TritonObject]] = (
    TritonSemantic.broadcast_impl_value
)
_upstream_to_tensor: Callable[..., TritonObject] = TritonSemantic.to_tensor
_upstream_unwrap = tl.core._unwrap_if_constexpr
_upstream_check_handle = upstream.TensorHandle.__post_init__

# Ids of the types that no operation promotes if both operands have them. Triton has one object per
# type.
_UNPROMOTED_TYPES = frozenset(map(id, (tl.int1, tl.int8, tl.uint8, tl.int32, tl.int64, tl.float32)))
_INTEGERS = (tl.int32, tl.int64)
_WRAPPER_TYPES = (list, tuple, tl.tuple, tl.constexpr)


def promote_operands(
    self: TritonObject,
    lhs: TritonObject,
    rhs: TritonObject,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[TritonObject, TritonObject]:
    """Replace `TritonSemantic.binary_op_type_checking_impl`."""
    if type(lhs) is tl.tensor:
        tl_dtype = lhs.dtype
        if type(rhs) is tl.tensor:
            rhs_dtype = rhs.dtype
            same_type = tl_dtype is rhs_dtype and id(tl_dtype) in _UNPROMOTED_TYPES
            if same_type or (
                allow_lhs_ptr and type(tl_dtype) is tl.pointer_type and rhs_dtype in _INTEGERS
            ):
                return broadcast(self, lhs, rhs)
        elif arithmetic_check and is_convertible(tl_dtype, rhs):
            return lhs, _make_number_tensor(lhs, rhs)
    elif type(rhs) is tl.tensor and arithmetic_check and is_convertible(rhs.dtype, lhs):
        return _make_number_tensor(rhs, lhs), rhs
    return _upstream_promote_operands(
        self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
    )


def broadcast(
    self: TritonObject, lhs: TritonObject, rhs: TritonObject
) -> tuple[TritonObject, TritonObject]:
    """Replace `TritonSemantic.broadcast_impl_value`."""
    if type(lhs) is not tl.tensor or type(rhs) is not tl.tensor:
        return _upstream_broadcast(self, lhs, rhs)
    if lhs.shape is rhs.shape:  # equal shapes are one object; see block_types
        return lhs, rhs
    left, right = _get_sizes(lhs), _get_sizes(rhs)
    target = _broadcast_sizes(left, right)
    if target is None:
        return _upstream_broadcast(self, lhs, rhs)
    return _broadcast_to(lhs, left, target), _broadcast_to(rhs, right, target)


def unwrap(value: TritonObject) -> TritonObject:
    """Replace `tl.core._unwrap_if_constexpr`."""
    return _upstream_unwrap(value) if isinstance(value, _WRAPPER_TYPES) else value


def to_tensor(self: TritonObject, x: TritonObject, check_type: bool = True) -> TritonObject:
    """Replace `TritonSemantic.to_tensor`."""
    return x if type(x) is tl.tensor else _upstream_to_tensor(self, x, check_type)


def check_handle(self: TritonObject) -> None:
    """Replace `TensorHandle.__post_init__`."""
    tl_dtype = self.dtype
    if (
        type(tl_dtype) is not tl.pointer_type
        and self.data.itemsize * 8 > tl_dtype.primitive_bitwidth
    ):
        _upstream_check_handle(self)


def patch_builtins(module: TritonObject, builder: TritonObject, scope: TritonObject) -> None:
    """Replace `_patch_builtin` of upstream. Each module's builtins are looked up only once."""
    for name, member, function in _find_builtins(module, builder):
        current = getattr(module, name, None)
        if current is member:
            scope.set_attr(module, name, function)
        elif tl.core.is_builtin(current):  # the builtin was replaced since the lookup
            scope.set_attr(module, name, _bind_semantic(current, TritonSemantic(builder)))


@cache
def _find_builtins(
    module: TritonObject, builder: TritonObject
) -> tuple[tuple[str, TritonObject, TritonObject], ...]:
    semantic = TritonSemantic(builder)
    members = inspect.getmembers(module, tl.core.is_builtin)
    fast_paths: dict[str, Callable[[TritonObject], TritonObject]] = {}
    if module is tl.tensor:
        fast_paths = TENSOR_FAST_PATHS
    elif module in (tl, tl.core):
        fast_paths = LANGUAGE_FAST_PATHS | MEMORY_FAST_PATHS
    return tuple(
        (name, member, fast_paths.get(name, _identity)(_bind_semantic(member, semantic)))
        for name, member in members
    )


def _identity(function: TritonObject) -> TritonObject:
    return function


def _bind_semantic(member: TritonObject, semantic: TritonObject) -> TritonObject:
    # Call the wrapped function, because triton's wrapper only checks that `_semantic` is passed.
    is_wrapper = member.__code__.co_qualname == "builtin.<locals>.wrapper"
    function = member.__wrapped__ if is_wrapper else member

    def call_with_semantic(*args: TritonObject, **kwargs: TritonObject) -> TritonObject:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    return call_with_semantic


def _make_number_tensor(tensor: TritonObject, number: float) -> TritonObject:
    data = _make_constant(number, tensor.dtype, _get_sizes(tensor) or (1,))
    return tl.tensor(upstream.TensorHandle(data, tensor.dtype), tensor.type)


def _get_sizes(tensor: TritonObject) -> tuple[int, ...]:
    """Return the shape of a block; () for a scalar, whose data may be an array of one element."""
    sizes: tuple[int, ...] = tensor.handle.data.shape
    return sizes if type(tensor.type) is tl.block_type else ()


@cache
def _broadcast_sizes(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape to which both operands are broadcast; None if they are incompatible."""
    try:
        return np.broadcast_shapes(left, right)
    except ValueError:
        return None


def _broadcast_to(
    tensor: TritonObject, sizes: tuple[int, ...], target: tuple[int, ...]
) -> TritonObject:
    if sizes == target:
        return tensor
    tl_dtype, data = tensor.dtype, tensor.handle.data
    data = (
        np.broadcast_to(data, target)
        if sizes
        else np.full(target, data, get_storage_dtype(tl_dtype))
    )
    return tl.tensor(upstream.TensorHandle(data, tl_dtype), tl.block_type(tl_dtype, target))


@lru_cache(maxsize=4096)
def _make_constant(number: float, tl_dtype: TritonObject, shape: tuple[int, ...]) -> Array:
    data = np.full(shape, number, get_storage_dtype(tl_dtype))
    data.flags.writeable = False
    return data


REPLACEMENTS: tuple[tuple[TritonObject, str, Callable[..., object]], ...] = (
    (TritonSemantic, "binary_op_type_checking_impl", promote_operands),
    (TritonSemantic, "broadcast_impl_value", broadcast),
    (TritonSemantic, "to_tensor", to_tensor),
    (upstream, "_patch_builtin", patch_builtins),
    (upstream.TensorHandle, "__post_init__", check_handle),
    (tl.core, "_unwrap_if_constexpr", unwrap),
)
