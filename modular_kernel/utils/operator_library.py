"""Registration of Python functions as torch operators with little overhead per call.

`torch.library.custom_op` wraps a function in several Python layers (autograd, aliasing checks,
disabling of torch.compile), which run in every call. With this module, the dispatcher calls the
function directly. On a CPU, this reduces the overhead of `experts_forward` from 14 us to 7 us.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._functorch import pyfunctorch
from torch.utils._pytree import tree_map_only

from modular_kernel.errors import LayoutError

NAMESPACE = "modular_kernel"
F = TypeVar("F", bound=Callable[..., Any])

# Libraries by name of the operator. Deleting a Library would remove its registrations.
_libraries: dict[str, Any] = {}
_make_library: Any = torch.library.Library
# The dispatch key that is active only inside vmap, grad, jvp and functionalize.
_TRANSFORM_KEY = "FuncTorchDynamicLayerFrontMode"
_C: Any = torch._C._functorch


def register_operator(name: str, fake: Callable[..., Any]) -> Callable[[F], F]:
    """Register the decorated function as the operator `torch.ops.modular_kernel.<name>`.

    The function must return new tensors, must not mutate its arguments, and needs annotations that
    `torch.library.infer_schema` accepts. It runs on every device. Without an autograd formula
    (`register_autograd`), callers must not pass tensors that require gradients. Tensors wrapped by
    vmap, grad or jvp raise LayoutError, because torch would silently return zero gradients.

    name: name of the operator.
    fake: implementation for fake tensors, which returns empty tensors with the shape and dtype of
        the results.
    """

    def register(function: F) -> F:
        schema = torch.library.infer_schema(function, mutates_args=())
        if name in _libraries:  # the module of the function was imported again
            _libraries.pop(name)._destroy()
        library = _libraries[name] = _make_library(NAMESPACE, "FRAGMENT")
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
        library.impl(name, lambda *args: _call_in_transform(name, args), _TRANSFORM_KEY)
        return function

    return register


def register_autograd(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., Any]
) -> None:
    """Register the autograd formula of an operator, as `torch.library.register_autograd` does."""
    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_libraries[name]
    )


def _call_in_transform(name: str, args: tuple[Any, ...]) -> Any:
    """Run an operator inside a function transform.

    Raises LayoutError for a tensor wrapped by vmap, grad or jvp, which the operator cannot read.
    Tensors wrapped by functionalize are unwrapped, because these operators do not mutate arguments.
    """
    interpreter: Any = pyfunctorch.retrieve_current_functorch_interpreter()
    level, call = interpreter.level(), getattr(getattr(torch.ops, NAMESPACE), name).default

    def unwrap(tensor: torch.Tensor) -> torch.Tensor:
        if _C.maybe_get_level(tensor) != level:
            return tensor
        if not _C.is_functionaltensor(tensor):
            got = "a tensor without memory (made by vmap, grad or jvp?)"
            raise LayoutError(f"{NAMESPACE}::{name}", got=got, need="plain tensors")
        torch._sync(tensor)  # type: ignore[attr-defined, no-untyped-call]
        return cast("torch.Tensor", _C._unwrap_functional_tensor(tensor, True))

    args = tree_map_only(torch.Tensor, unwrap, args)
    with interpreter.lower():
        output = call(*args)
    if interpreter.key() is not _C.TransformType.Functionalize:
        return output
    return tree_map_only(torch.Tensor, lambda t: _C._wrap_functional_tensor(t, level), output)
