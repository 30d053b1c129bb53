"""Faster constructors of Triton's block types and tensors, which cache the properties of a shape.

Every interpreted operation creates a tensor and its type. Upstream (Triton's interpreter as
released) formats the shape into a name and constants each time, which takes more than a third of
the time of a kernel, although few distinct shapes occur. The constructors in this module do so only
once per shape.
"""

from collections.abc import Iterable
from functools import cache

import triton.language as tl

from modular_kernel.interpreter.dtypes import TritonObject

# The original functions, which the replacements below call.
_upstream_init_block_type = tl.block_type.__init__
_upstream_init_tensor = tl.tensor.__init__
_upstream_make_tuple_type = tl.core._type_for_tuple_values


def init_block_type(self: TritonObject, element_ty: TritonObject, shape: TritonObject) -> None:
    """Replace `tl.block_type.__init__`."""
    sizes = _unwrap_sizes(shape)
    if sizes is None:
        _upstream_init_block_type(self, element_ty, shape)
        return
    self.element_ty = element_ty
    self.shape, self.numel, name = _get_block_shape(sizes)
    self.name = f"<{name}, {element_ty}>"
    self.shape_and_numel = _get_tensor_shape(sizes)


def init_tensor(self: TritonObject, handle: TritonObject, type: TritonObject) -> None:
    """Replace `tl.tensor.__init__`."""
    shape_and_numel = type.__dict__.get("shape_and_numel")
    if shape_and_numel is None:
        if type.is_block():
            _upstream_init_tensor(self, handle, type)
            return
        shape_and_numel = _get_tensor_shape(())
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = shape_and_numel


def make_tuple_type(values: TritonObject, fields: TritonObject = None) -> TritonObject:
    """Replace `tl.core._type_for_tuple_values`."""
    sizes = None if fields is not None else _unwrap_sizes(values)
    return _upstream_make_tuple_type(values, fields) if sizes is None else _get_tuple_type(sizes)


def _unwrap_sizes(values: Iterable[TritonObject]) -> tuple[int, ...] | None:
    """Return `values`, integers or constexprs, as integers; None if any value is not an integer."""
    sizes = tuple([v.value if type(v) is tl.constexpr else v for v in values])
    return sizes if set(map(type, sizes)) <= {int} else None


@cache
def _get_block_shape(sizes: tuple[int, ...]) -> tuple[TritonObject, int, str]:
    """Return (shape, number of elements, name of the shape) of a block type with these sizes.

    Raises Triton's error if the sizes are invalid.
    """
    block = tl.block_type.__new__(tl.block_type)
    _upstream_init_block_type(block, tl.float32, list(sizes))
    return block.shape, block.numel, str(block.shape)


@cache
def _get_tensor_shape(sizes: tuple[int, ...]) -> tuple[TritonObject, TritonObject]:
    """Return shape and number of elements of a tensor with these sizes, as Triton constants."""
    tensor_type = tl.float32
    if sizes:
        tensor_type = tl.block_type.__new__(tl.block_type)
        _upstream_init_block_type(tensor_type, tl.float32, list(sizes))
    tensor = tl.tensor.__new__(tl.tensor)
    _upstream_init_tensor(tensor, None, tensor_type)
    return tensor.shape, tensor.numel


def get_scalar_shape() -> tuple[TritonObject, TritonObject]:
    """Return shape and number of elements of a scalar tensor, as Triton constants."""
    return _get_tensor_shape(())


@cache
def _get_tuple_type(sizes: tuple[int, ...]) -> TritonObject:
    return _upstream_make_tuple_type(sizes)
