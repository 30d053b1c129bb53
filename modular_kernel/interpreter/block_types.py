"""Faster constructors of Triton's block types and tensors, which cache the properties of a shape.

Every interpreted operation creates a tensor and its type. Upstream (Triton's interpreter as
released) formats the shape into a name and constants each time. This took more than a third of the
time of a kernel, although few distinct shapes occur. These constructors do it once per shape.
"""

from collections.abc import Iterable
from functools import cache

import triton.language as tl

from modular_kernel.interpreter.dtypes import TritonObject

# The original functions, which the replacements below call.
_block_init = tl.block_type.__init__
_tensor_init = tl.tensor.__init__
_type_for_tuple_values = tl.core._type_for_tuple_values


def init_block_type(self: TritonObject, element_ty: TritonObject, shape: TritonObject) -> None:
    """Replace `tl.block_type.__init__`."""
    sizes = _unwrap_sizes(shape)
    if sizes is None:
        _block_init(self, element_ty, shape)
        return
    self.element_ty = element_ty
    self.shape, self.numel, name = _block_shape(sizes)
    self.name = f"<{name}, {element_ty}>"
    self.shape_and_numel = _tensor_shape(sizes)


def init_tensor(self: TritonObject, handle: TritonObject, type: TritonObject) -> None:
    """Replace `tl.tensor.__init__`."""
    shape_and_numel = type.__dict__.get("shape_and_numel")
    if shape_and_numel is None:
        if type.is_block():
            _tensor_init(self, handle, type)
            return
        shape_and_numel = _tensor_shape(())
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = shape_and_numel


def make_tuple_type(values: TritonObject, fields: TritonObject = None) -> TritonObject:
    """Replace `tl.core._type_for_tuple_values`."""
    sizes = None if fields is not None else _unwrap_sizes(values)
    return _type_for_tuple_values(values, fields) if sizes is None else _type_of_sizes(sizes)


def _unwrap_sizes(values: Iterable[TritonObject]) -> tuple[int, ...] | None:
    """Return `values`, integers or constexprs, as integers; None if any value is not an integer."""
    sizes = tuple([v.value if type(v) is tl.constexpr else v for v in values])
    return sizes if set(map(type, sizes)) <= {int} else None


@cache
def _block_shape(sizes: tuple[int, ...]) -> tuple[TritonObject, int, str]:
    """Return (shape, number of elements, name of the shape) of a block type with these sizes.

    Raises Triton's error if the sizes are invalid.
    """
    block = tl.block_type.__new__(tl.block_type)
    _block_init(block, tl.float32, list(sizes))
    return block.shape, block.numel, str(block.shape)


@cache
def _tensor_shape(sizes: tuple[int, ...]) -> tuple[TritonObject, TritonObject]:
    """Return shape and number of elements of a tensor with these sizes, as Triton constants."""
    tensor_type = tl.float32
    if sizes:
        tensor_type = tl.block_type.__new__(tl.block_type)
        _block_init(tensor_type, tl.float32, list(sizes))
    tensor = tl.tensor.__new__(tl.tensor)
    _tensor_init(tensor, None, tensor_type)
    return tensor.shape, tensor.numel


def scalar_shape() -> tuple[TritonObject, TritonObject]:
    """Return shape and number of elements of a scalar tensor, as Triton constants."""
    return _tensor_shape(())


@cache
def _type_of_sizes(sizes: tuple[int, ...]) -> TritonObject:
    return _type_for_tuple_values(sizes)
