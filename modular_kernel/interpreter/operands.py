"""The two operands of an interpreted operation, made alike without looking twice.

Before each operation upstream finds the type that both operands are converted to, makes constants
of Python numbers, twice, and compares shapes size by size: a third of the time of most kernels. Of
two operands that are alike already, of an address and an offset, and of a tensor and a number that
takes its type, the outcome is known. All others are upstream's, errors among them. Written for
`modular_kernel.interpreter.patch`, which puts these in place of upstream's.
"""

import inspect
from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as upstream

from modular_kernel.interpreter.dtypes import Array, Foreign, storage_of
from modular_kernel.interpreter.fast_memory import OF_MEMORY
from modular_kernel.interpreter.fast_paths import OF_LANGUAGE, OF_TENSORS, takes

# The originals that the replacements below still call.
_operands: Callable[..., tuple[Foreign, Foreign]] = TritonSemantic.binary_op_type_checking_impl
_broadcast: Callable[..., tuple[Foreign, Foreign]] = TritonSemantic.broadcast_impl_value
_to_tensor: Callable[..., Foreign] = TritonSemantic.to_tensor
_unwrap = tl.core._unwrap_if_constexpr
_check_handle = upstream.TensorHandle.__post_init__

# Two operands of such a type keep it, in every operation; triton has one object for each type.
_KEPT = frozenset(map(id, (tl.int1, tl.int8, tl.uint8, tl.int32, tl.int64, tl.float32)))
_INTEGERS = (tl.int32, tl.int64)
_WRAPPING = (list, tuple, tl.tuple, tl.constexpr)


def make_alike(
    self: Foreign,
    lhs: Foreign,
    rhs: Foreign,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[Foreign, Foreign]:
    """`TritonSemantic.binary_op_type_checking_impl`."""
    if type(lhs) is tl.tensor:
        kind = lhs.dtype
        if type(rhs) is tl.tensor:
            other = rhs.dtype
            alike = kind is other and id(kind) in _KEPT
            if alike or (allow_lhs_ptr and type(kind) is tl.pointer_type and other in _INTEGERS):
                return spread(self, lhs, rhs)
        elif arithmetic_check and takes(kind, rhs):
            return lhs, _number_like(lhs, rhs)
    elif type(rhs) is tl.tensor and arithmetic_check and takes(rhs.dtype, lhs):
        return _number_like(rhs, lhs), rhs
    return _operands(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def spread(self: Foreign, lhs: Foreign, rhs: Foreign) -> tuple[Foreign, Foreign]:
    """`TritonSemantic.broadcast_impl_value`."""
    if type(lhs) is not tl.tensor or type(rhs) is not tl.tensor:
        return _broadcast(self, lhs, rhs)
    if lhs.shape is rhs.shape:  # tensors of equal shapes have one between them, see block_types
        return lhs, rhs
    left, right = _sizes(lhs), _sizes(rhs)
    wanted = _common(left, right)
    if wanted is None:
        return _broadcast(self, lhs, rhs)
    return _spread_to(lhs, left, wanted), _spread_to(rhs, right, wanted)


def unwrap(value: Foreign) -> Foreign:
    """`tl.core._unwrap_if_constexpr`."""
    return _unwrap(value) if isinstance(value, _WRAPPING) else value


def to_tensor(self: Foreign, x: Foreign, check_type: bool = True) -> Foreign:
    """`TritonSemantic.to_tensor`."""
    return x if type(x) is tl.tensor else _to_tensor(self, x, check_type)


def check_handle(self: Foreign) -> None:
    """`TensorHandle.__post_init__`."""
    kind = self.dtype
    if type(kind) is not tl.pointer_type and self.data.itemsize * 8 > kind.primitive_bitwidth:
        _check_handle(self)


def patch_builtins(module: Foreign, builder: Foreign, scope: Foreign) -> None:
    """`_patch_builtin` of the interpreter: what it looks for is the same at every launch."""
    for name, member, function in _builtins(module, builder):
        now = getattr(module, name, None)
        if now is member:
            scope.set_attr(module, name, function)
        elif tl.core.is_builtin(now):  # somebody has put another one there since
            scope.set_attr(module, name, _with_semantic(now, TritonSemantic(builder)))


@cache
def _builtins(module: Foreign, builder: Foreign) -> tuple[tuple[str, Foreign, Foreign], ...]:
    semantic = TritonSemantic(builder)
    found = inspect.getmembers(module, tl.core.is_builtin)
    cuts: dict[str, Callable[[Foreign], Foreign]] = {}
    if module is tl.tensor:
        cuts = OF_TENSORS
    elif module in (tl, tl.core):
        cuts = OF_LANGUAGE | OF_MEMORY
    return tuple(
        (name, member, cuts.get(name, _unchanged)(_with_semantic(member, semantic)))
        for name, member in found
    )


def _unchanged(function: Foreign) -> Foreign:
    return function


def _with_semantic(member: Foreign, semantic: Foreign) -> Foreign:
    # Without the wrapper that asks for what is given here.
    plain = member.__code__.co_qualname == "builtin.<locals>.wrapper"
    inner = member.__wrapped__ if plain else member

    def called(*args: Foreign, **kwargs: Foreign) -> Foreign:
        kwargs["_semantic"] = semantic
        return inner(*args, **kwargs)

    return called


def _number_like(tensor: Foreign, number: float) -> Foreign:
    data = _full(number, tensor.dtype, _sizes(tensor) or (1,))
    return tl.tensor(upstream.TensorHandle(data, tensor.dtype), tensor.type)


def _sizes(tensor: Foreign) -> tuple[int, ...]:
    """Return the sizes of a block, none of a scalar, whose data may be an array of one."""
    sizes: tuple[int, ...] = tensor.handle.data.shape
    return sizes if type(tensor.type) is tl.block_type else ()


@cache
def _common(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the sizes that both are spread to, None where they do not go together."""
    try:
        return np.broadcast_shapes(left, right)
    except ValueError:
        return None


def _spread_to(tensor: Foreign, sizes: tuple[int, ...], wanted: tuple[int, ...]) -> Foreign:
    if sizes == wanted:
        return tensor
    kind, data = tensor.dtype, tensor.handle.data
    data = np.broadcast_to(data, wanted) if sizes else np.full(wanted, data, storage_of(kind))
    return tl.tensor(upstream.TensorHandle(data, kind), tl.block_type(kind, wanted))


@lru_cache(maxsize=4096)
def _full(number: float, kind: Foreign, shape: tuple[int, ...]) -> Array:
    """Return as many equal numbers; nobody may write them, since others have them, too."""
    data = np.full(shape, number, storage_of(kind))
    data.flags.writeable = False
    return data


INSTALLED: tuple[tuple[Foreign, str, Callable[..., object]], ...] = (
    (TritonSemantic, "binary_op_type_checking_impl", make_alike),
    (TritonSemantic, "broadcast_impl_value", spread),
    (TritonSemantic, "to_tensor", to_tensor),
    (upstream, "_patch_builtin", patch_builtins),
    (upstream.TensorHandle, "__post_init__", check_handle),
    (tl.core, "_unwrap_if_constexpr", unwrap),
)
