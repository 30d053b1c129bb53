"""Isolation of calls from torch's modes: tracing, torch functions, autocast, inference."""

import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch.compiler import is_compiling

from modular_kernel.errors import StateError, UnsupportedError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

# Message of torch.compile(fullgraph=True).
_NOT_TRACED = (
    "calls of a kernel or plan are not traced and break the graph. "
    "modular_kernel.integrations.fused_moe.fused_experts is an operator that needs no break"
)


_C: Any = torch._C
_is_finalizing = sys.is_finalizing


def untraced(function: F) -> F:
    """Break torch.compile's graph at a call instead of tracing it.

    Under fullgraph=True, torch raises an error with the reason. The call runs outside torch
    function modes, such as that of torch.set_default_device, which would add microseconds to every
    operation.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            torch._dynamo.graph_break(msg=_NOT_TRACED)
            eager = torch._dynamo.disable(function)  # type: ignore[no-untyped-call]
            return eager(*args, **kwargs)
        if _is_finalizing():  # torch may abort the process
            need = "a call before the interpreter exits, such as one of atexit"
            raise StateError("a kernel", got="a call while objects are deleted at exit", need=need)
        if _C._len_torch_function_stack():
            with _C.DisableTorchFunction():
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return cast("F", call)


def untraced_layer_call(function: F) -> F:
    """Do what `untraced` does for a method (x_TH, weights, routing, *, out=None).

    The explicit signature saves the host time of packing and unpacking the arguments.
    """

    @wraps(function)
    def call(self: Any, x_TH: Any, weights: Any, routing: Any, *, out: Any = None) -> Any:
        if is_compiling() or _is_finalizing() or _C._len_torch_function_stack():
            return isolated(self, x_TH, weights, routing, out=out)
        return function(self, x_TH, weights, routing, out=out)

    isolated = untraced(function)
    return cast("F", call)


def run_outside_function_modes(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run an eager call outside torch function modes, such as that of torch.set_default_device.

    Traced calls, and calls with a tensor subclass among the arguments, run inside the modes: a
    subclass needs its own `__torch_function__`.
    """
    if is_compiling() or not _C._len_torch_function_stack() or any(map(_is_subclass, args)):
        return function(*args, **kwargs)
    with _C.DisableTorchFunction():
        return function(*args, **kwargs)


def _is_subclass(value: object) -> bool:
    return isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter)


def is_exporting() -> bool:
    """Return whether torch.export traces this call.

    Under torch.compile, torch 2.11 replaces the result of torch.compiler.is_exporting() by True. It
    does not look into a function whose result it assumes to be constant, so this one is declared as
    such.
    """
    return torch.compiler.is_exporting()


# The decorator torch._dynamo.assume_constant_result sets the same attribute, but using it would
# import torch._dynamo, and with it triton, in processes that compile nothing.
is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def run_untraced(function: Callable[..., T], reason: str, *args: Any, **kwargs: Any) -> T:
    """Break the graph of torch.compile and call a function eagerly.

    Raise UnsupportedError under torch.export, which has no graph breaks.

    reason: shown by that error, and under fullgraph=True.
    """
    if is_exporting():
        raise UnsupportedError("torch.export", got=reason, need="a call that is an operator")
    torch._dynamo.graph_break(msg=reason)
    eager = torch._dynamo.disable(function)  # type: ignore[no-untyped-call]
    result: T = eager(*args, **kwargs)
    return result


def without_autocast(function: F) -> F:
    """Make a call compute in its problem's dtypes even if autocast is enabled."""

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


def outside_inference_mode() -> torch.inference_mode:
    """Disable inference mode, so that tensors that outlive the call can be written later."""
    return torch.inference_mode(False)  # positional: torch.compile does not accept a keyword
