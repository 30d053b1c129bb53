"""Registration of Python functions as torch operators with little overhead per call.

`torch.library.custom_op` adds Python layers to every call: for autograd, aliasing checks, and to
keep torch.compile out. On the host of an H200 they take 20 us, as long as the rest of a call. A
function registered here is called by the dispatcher directly.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

NAMESPACE = "modular_kernel"
F = TypeVar("F", bound=Callable[..., Any])

# Torch has no type annotations here.
_library: Any = cast("Any", torch.library.Library)(NAMESPACE, "FRAGMENT")


def operator(name: str, fake: Callable[..., Any]) -> Callable[[F], F]:
    """Register the decorated function as the operator `torch.ops.modular_kernel.<name>`.

    The function must return new tensors, write to none of its arguments, and have annotations that
    `torch.library.infer_schema` accepts. It runs on every device. Without an autograd formula
    (`torch.library.register_autograd`), callers must not pass tensors that require gradients.
    fake: the same for tensors without memory; returns empty outputs.
    """

    def register(function: F) -> F:
        schema = torch.library.infer_schema(function, mutates_args=())
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
        return function

    return register
