"""Isolation of calls from torch's modes: tracing, torch function modes, autocast, inference mode.

The calls of a layer launch kernels with raw pointers, which tracing cannot follow, and cache
tensors for later calls. The other modes would add host time, change dtypes, or make cached tensors
read-only. The decorators of this module wrap the public methods of kernels and plans.
"""

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

# Reason that torch.compile(fullgraph=True) shows.
_GRAPH_BREAK_REASON = (
    "calls of a kernel or plan are not traced and break the graph. "
    "modular_kernel.integrations.fused_moe.fused_experts is an operator that needs no break"
)

_C: Any = torch._C
_is_finalizing = sys.is_finalizing


def disable_tracing(function: F) -> F:
    """Make torch.compile break its graph at calls of `function` instead of tracing them.

    Under fullgraph=True, torch raises an error with the reason. The call runs outside torch
    function modes, such as the mode of torch.set_default_device, which would add microseconds to
    every operation.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            torch._dynamo.graph_break(msg=_GRAPH_BREAK_REASON)
            eager_function = torch._dynamo.disable(function)  # type: ignore[no-untyped-call]
            return eager_function(*args, **kwargs)
        if _is_finalizing():  # torch operations may abort the process during finalization
            need = "a call before the interpreter exits, such as one of atexit"
            raise StateError("a kernel", got="a call while objects are deleted at exit", need=need)
        if _C._len_torch_function_stack():
            with _C.DisableTorchFunction():
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return cast("F", call)


def disable_tracing_of_layer_call(function: F) -> F:
    """Apply `disable_tracing` to a method with the arguments (x_TH, weights, routing, *, out=None).

    The explicit signature saves the host time of packing and unpacking the arguments.
    """

    @wraps(function)
    def call(self: Any, x_TH: Any, weights: Any, routing: Any, *, out: Any = None) -> Any:
        if is_compiling() or _is_finalizing() or _C._len_torch_function_stack():
            return isolated_function(self, x_TH, weights, routing, out=out)
        return function(self, x_TH, weights, routing, out=out)

    isolated_function = disable_tracing(function)
    return cast("F", call)


def run_without_function_modes(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run an eager call outside torch function modes, such as torch.set_default_device.

    Traced calls, and calls with a tensor subclass among the arguments, run inside the modes.
    Disabling the modes would also disable the `__torch_function__` of the subclass.
    """
    if is_compiling() or not _C._len_torch_function_stack() or any(map(_is_subclass, args)):
        return function(*args, **kwargs)
    with _C.DisableTorchFunction():
        return function(*args, **kwargs)


def _is_subclass(value: object) -> bool:
    return isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter)


def is_exporting() -> bool:
    """Return whether torch.export traces this call.

    While torch.compile traces, torch 2.11 replaces torch.compiler.is_exporting() with True. The
    mark below prevents this, because torch does not trace into functions with constant results.
    """
    return torch.compiler.is_exporting()


# torch._dynamo.assume_constant_result also sets this attribute. However, it would import
# torch._dynamo and triton in processes that compile nothing.
is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def run_with_graph_break(function: Callable[..., T], reason: str, *args: Any, **kwargs: Any) -> T:
    """Break the graph of torch.compile and call `function` eagerly.

    Raises UnsupportedError under torch.export, which has no graph breaks.

    reason: text for the errors of torch.export and torch.compile(fullgraph=True).
    """
    if is_exporting():
        raise UnsupportedError("torch.export", got=reason, need="a call that is an operator")
    torch._dynamo.graph_break(msg=reason)
    eager_function = torch._dynamo.disable(function)  # type: ignore[no-untyped-call]
    result: T = eager_function(*args, **kwargs)
    return result


def disable_autocast(function: F) -> F:
    """Disable autocast in calls of `function`, so that they use the dtypes of the problem."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch._C._is_any_autocast_enabled():
            with _disable_autocast_on_all_devices():
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return cast("F", call)


@contextmanager
def _disable_autocast_on_all_devices() -> Any:
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def disable_inference_mode() -> torch.inference_mode:
    """Return a context manager or decorator that disables inference mode.

    Tensors that are made in inference mode cannot be written outside of inference mode. Tensors
    that outlive a call are therefore made inside this context.
    """
    return torch.inference_mode(False)  # positional: torch.compile does not accept a keyword
