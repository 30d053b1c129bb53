"""torch's modes around a call: none of them changes what a kernel computes, or what it keeps."""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch.compiler import is_compiling

from modular_kernel.errors import UnsupportedError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

# For the message of torch.compile(fullgraph=True).
_NOT_TRACED = (
    "a kernel's own call, or a plan's, is not traced: the graph breaks there. "
    "modular_kernel.integrations.fused_moe.fused_experts is an operator that needs no break"
)


_C: Any = torch._C


def untraced(function: F) -> F:
    """Break the graph of torch.compile at a call instead of tracing it; fullgraph=True says why.

    The call runs outside of torch function modes, such as that of torch.set_default_device, which
    would cost microseconds in every operation inside.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            torch._dynamo.graph_break(msg=_NOT_TRACED)
            outside = torch._dynamo.disable(function)  # type: ignore[no-untyped-call]
            return outside(*args, **kwargs)
        if _C._len_torch_function_stack():
            with _C.DisableTorchFunction():
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return cast("F", call)


def run_untraced(function: Callable[..., T], why: str, *args: Any, **kwargs: Any) -> T:
    """Call a function that torch.compile must not look into: break the graph, and call it eagerly.

    why: what fullgraph=True quotes in its error. Under torch.export, which has no graph breaks,
    UnsupportedError with it.
    """
    if torch.compiler.is_exporting():
        raise UnsupportedError("torch.export", got=why, need="a call that is an operator")
    torch._dynamo.graph_break(msg=why)
    outside = torch._dynamo.disable(function)  # type: ignore[no-untyped-call]
    result: T = outside(*args, **kwargs)
    return result


def without_autocast(function: F) -> F:
    """Have a call compute in the dtypes that its problem declares, where autocast is on too."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch._C._is_any_autocast_enabled():
            with _no_autocast():
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return cast("F", call)


@contextmanager
def _no_autocast() -> Any:
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def kept() -> torch.inference_mode:
    """Have tensors made that outlive the caller's inference mode: to be written without."""
    return torch.inference_mode(False)  # by position: torch.compile takes no keyword
