"""Checks that public functions apply to every tensor before kernels read it.

    check_tensor("logits", logits_TE)                        # dense, with memory for all elements
    check_output("out", out, {"rows": rows})                 # shares no memory with inputs
    check_no_gradients({"x": x_TH, "w1": w1_eNH})            # kernels are forward only

No check synchronizes with a device.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeGuard

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn.parameter import is_lazy

from modular_kernel.errors import (
    ConfigurationError,
    DeviceError,
    DtypeError,
    LayoutError,
    StateError,
    UnsupportedError,
)

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_is_transformed: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
_unpack_dual: Callable[[torch.Tensor], Any] = forward_ad.unpack_dual
_compile_only: ContextVar[bool] = ContextVar("kernels are compiled, not launched", default=False)


@contextmanager
def compile_only() -> Iterator[None]:
    """Accept meta tensors inside the block, where kernels are compiled but not launched."""
    token = _compile_only.set(True)
    try:
        yield
    finally:
        _compile_only.reset(token)


def is_dense(value: object) -> bool:
    """Return True if `value` is certain to pass `check_strided`. This is a fast path."""
    return (
        type(value) in _PLAIN_TYPES
        and value.layout is torch.strided  # type: ignore[attr-defined]
        and not value.is_nested  # type: ignore[attr-defined]
        and not value.is_neg()  # type: ignore[attr-defined]
    )


def check_strided(what: str, value: object) -> None:
    """Check that `value` is a dense tensor. Unlike `check_tensor`, this does not check its memory.

    Raises DtypeError for a value that is not a tensor, an uninitialized parameter, or a quantized
    tensor. Raises LayoutError for a nested, sparse or lazily negated tensor, or a DTensor.
    """
    if not isinstance(value, torch.Tensor):
        raise DtypeError(what, got=type(value).__name__, need="a tensor")
    if type(value) not in _PLAIN_TYPES:
        if is_lazy(value):
            raise DtypeError(what, got="an uninitialized parameter", need="a tensor")
        check_not_dtensor(what, value)
    if value.is_nested:
        raise LayoutError(what, got="a nested tensor", need="a dense tensor (torch.strided)")
    if value.is_quantized:
        raise DtypeError(what, got=value.dtype, need="a tensor that is not of torch.quantize_*")
    if value.layout is not torch.strided:
        raise LayoutError(what, got=str(value.layout), need="a dense tensor (torch.strided)")
    if not is_compiling() and value.is_neg():  # torch.compile cannot trace is_neg
        raise LayoutError(what, got="a lazily negated view", need="tensor.resolve_neg()")


def check_not_dtensor(what: str, value: torch.Tensor) -> None:
    """Raise LayoutError for a DTensor, because kernels would read only the memory of a shard."""
    if type(value).__name__ == "DTensor":
        need = "a plain tensor: .to_local() of a shard, or .full_tensor().detach()"
        raise LayoutError(what, got="a DTensor", need=need)


def check_tensor(
    what: str, value: object, *, device: torch.device | None = None, meta: bool = False
) -> torch.Tensor:
    """Return `value` if it is a plain tensor whose values can be read. Otherwise, raise an error.

    Under torch.compile, memory and tangents are not checked, because tracing launches nothing.

    what: name of the tensor in messages.
    device: required device; None accepts any device.
    meta: accept a tensor without memory (meta or fake), for functions that read no values.

    Raises DtypeError if `value` is not a tensor. Raises LayoutError if the tensor is sparse, lazily
    negated or conjugated, or wrapped by a function transform (vmap, grad, jvp), or if its storage
    is too small for its shape and strides. Raises UnsupportedError for a dual tensor, whose tangent
    would be lost. Raises DeviceError if the tensor is on another device.
    """
    compiling = is_compiling()
    if not compiling and _is_plain(value) and (device is None or value.device == device):
        return value
    if not isinstance(value, torch.Tensor):
        raise DtypeError(what, got=type(value).__name__, need="a tensor")
    if not compiling and _is_transformed(value):
        got = "a tensor without memory (made by vmap, grad or jvp?)"
        raise LayoutError(what, got=got, need="a plain tensor")
    check_strided(what, value)
    if compiling:
        return value
    if value.is_conj():
        raise LayoutError(what, got="a lazily conjugated view", need="tensor.resolve_conj()")
    if device is not None and value.device != device:
        raise DeviceError(what, got=value.device, need=device)
    if value.is_meta or isinstance(value, FakeTensor):
        if not meta and not _compile_only.get():
            raise DeviceError(what, got=f"{value.device}, without memory", need="values")
    else:
        check_storage(what, value)
    if forward_ad._current_level >= 0 and _unpack_dual(value).tangent is not None:
        raise _make_tangent_error(what)
    return value


def _is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Return True if `value` is certain to pass `check_tensor`.

    This is a fast path for contiguous tensors without storage offset.
    """
    return (
        forward_ad._current_level < 0
        and type(value) in _PLAIN_TYPES
        and value.layout is torch.strided  # type: ignore[attr-defined]
        and not (value.is_nested or value.is_quantized or value.is_meta)  # type: ignore[attr-defined]
        and not (value.is_neg() or value.is_conj())  # type: ignore[attr-defined]
        and not _is_transformed(value)  # type: ignore[arg-type]
        and value.is_contiguous()  # type: ignore[attr-defined]
        and value.storage_offset() == 0  # type: ignore[attr-defined]
        and value.untyped_storage().nbytes() >= value.nbytes  # type: ignore[attr-defined]
        and (value.data_ptr() != 0 or not value.numel())  # type: ignore[attr-defined]
    )


def check_tensors(
    tensors: Mapping[str, object],
    *,
    optional: Container[str] = (),
    device: torch.device | None = None,
    meta: bool = False,
) -> None:
    """Call `check_tensor` on each tensor of a mapping. Tensors in `optional` may be None."""
    for what, value in tensors.items():
        if value is not None or what not in optional:
            check_tensor(what, value, device=device, meta=meta)


def check_output(
    what: str, output: torch.Tensor, inputs: Mapping[str, torch.Tensor | None]
) -> None:
    """Check that elements of `output` share memory neither with each other nor with inputs.

    All tensors must have passed `check_tensor`. Raises ConfigurationError if `output` shares memory
    with an input, and LayoutError if its own elements overlap, as in an expanded tensor.
    """
    if is_compiling() or output.is_meta or isinstance(output, FakeTensor):
        return
    strides = zip(output.shape, output.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in strides):
        got = f"strides {output.stride()}"
        raise LayoutError(what, got=got, need="elements that do not overlap")
    for name, tensor in inputs.items():
        if tensor is not None and tensor.device == output.device and is_overlapping(output, tensor):
            raise ConfigurationError(what, got=f"memory of {name}", need="separate memory")


def check_storage(what: str, tensor: torch.Tensor) -> None:
    """Raise LayoutError if the storage of a tensor is too small for its shape and strides."""
    if tensor.is_meta or not tensor.numel():
        return  # device checks reject meta tensors where necessary
    try:
        pointer, available = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        got = "a tensor without memory (made by vmap, grad or jvp?)"
        raise LayoutError(what, got=got, need="a plain tensor") from None
    start, stop = (0, int(tensor.nbytes)) if tensor.is_contiguous() else address_range(tensor)
    required = tensor.storage_offset() * tensor.element_size() + stop - start
    if not pointer or available < required:
        got = f"{available if pointer else 0} bytes of memory (freed or resized?)"
        raise LayoutError(what, got=got, need=f"the {required} that its shape and strides reach")


def address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first byte of a tensor, and the address after its last byte."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    if tensor.numel() == 0:
        return start, start
    last_element = sum(
        (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start, start + (last_element + 1) * tensor.element_size()


def is_overlapping(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the address ranges of two tensors intersect."""
    (a_start, a_stop), (b_start, b_stop) = address_range(a), address_range(b)
    return max(a_start, b_start) < min(a_stop, b_stop)


class TensorMemorySnapshot:
    """The addresses, sizes and layouts of tensors, to detect later changes of their memory.

    tensors: tensors by name, with memory or on the meta device. None is skipped.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        given_tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        self._snapshots = {
            name: (tensor, _get_memory(tensor)) for name, tensor in given_tensors.items()
        }

    def check_unchanged(self, since: str) -> None:
        """Raise StateError if a tensor was freed or resized, or has another address or layout.

        since: name of the function that made the snapshot, for the message.
        """
        for name, (tensor, memory) in self._snapshots.items():
            if _get_memory(tensor) != memory:
                need = f"the memory and layout that it had at the call of {since}"
                raise StateError(name, got="freed, resized or replaced memory", need=need)


def _get_memory(tensor: torch.Tensor) -> tuple[object, ...]:
    memory = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    return *memory, tensor.shape, tensor.stride(), tensor.dtype


def needs_gradient(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether a tensor requires grad, or has a tangent (forward-mode gradient)."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return True
    if forward_ad._current_level < 0:
        return False
    return any(_unpack_dual(tensor).tangent is not None for tensor in tensors)


def check_no_gradients(tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Raise UnsupportedError if a tensor requires grad or has a tangent."""
    given_tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if not needs_gradient(given_tensors.values()):
        return
    names = ", ".join(name for name, tensor in given_tensors.items() if needs_gradient((tensor,)))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given_tensors.values()):
        got, need = f"{names} that require grad", "torch.no_grad() or inference_mode()"
        raise UnsupportedError("gradients", got=got, need=need)
    raise _make_tangent_error(names)


def _make_tangent_error(names: str) -> UnsupportedError:
    got, need = f"{names} with a forward gradient", "no dual tensors: unpack_dual(x).primal"
    return UnsupportedError("gradients", got=got, need=need)
