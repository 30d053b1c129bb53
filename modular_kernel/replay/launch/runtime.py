"""Selection between the Triton kernel and the torch implementation of an operation.

Each operation in `modular_kernel.ops` has both, and calls `use_triton` to select one. Triton is
optional, so other modules read HAS_TRITON before they import it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from threading import get_ident
from types import ModuleType
from typing import Any

import torch

from modular_kernel.machine import find_importable, is_torch_reference_preferred

HAS_TRITON = "triton" in find_importable({"triton"})
HAS_INTERPRETER = HAS_TRITON and "ml_dtypes" in find_importable({"ml_dtypes"})


def patch_interpreter() -> bool:
    """Patch Triton's interpreter to compute as a GPU does. Return whether it is active."""
    patch = _import_patch()
    if patch is None or not patch.is_active():
        return False
    patch.install()
    return True


@cache
def patch_interpreter_once() -> None:
    """Patch Triton's interpreter to compute as a GPU does. Later calls do nothing."""
    patch = _import_patch()
    if patch is not None:
        patch.install()


@cache
def _import_patch() -> ModuleType | None:
    """Return the module that patches the interpreter; None without triton or ml_dtypes."""
    return import_module("modular_kernel.interpreter.patch") if HAS_INTERPRETER else None


def use_triton(tensor: torch.Tensor) -> bool:
    """Return whether operations on `tensor` launch Triton kernels.

    On a GPU, this is the case if triton is installed. On a CPU, this is the case if Triton's
    interpreter is active, which this function then patches to compute as a GPU does. A meta tensor
    counts as a GPU tensor, because `mk compile` launches kernels with meta tensors.
    """
    if not HAS_TRITON:
        return False
    if tensor.is_cuda or tensor.is_meta:
        return True
    if is_torch_reference_preferred():
        return False
    return patch_interpreter()


@contextmanager
def call_before_compilation(function: Callable[[], object]) -> Iterator[None]:
    """Inside the block, call `function` before each compilation of a Triton kernel by this thread.

    Kernels in Triton's cache on disk count as well, but interpreted kernels do not. If `function`
    raises an error, the kernel is not compiled, and its launch raises the error.
    """
    if not HAS_TRITON:
        yield
        return
    from triton.runtime.jit import JITFunction

    # Triton's hook `jit_cache_hook` would encode the constants of each kernel as JSON, which not
    # all constants support.
    compile_kernel: Any = JITFunction._do_compile
    thread = get_ident()

    def compile_after_call(*args: object, **kwargs: object) -> object:
        if get_ident() == thread:
            function()
        return compile_kernel(*args, **kwargs)

    JITFunction._do_compile = compile_after_call
    try:
        yield
    finally:
        JITFunction._do_compile = compile_kernel


@contextmanager
def record_races() -> Iterator[list[str]]:
    """Yield a list of the data races between programs of one launch inside the block.

    The list stays empty unless kernels are interpreted.
    """
    if patch_interpreter():
        from modular_kernel.interpreter.access_log import ACCESS_LOG

        with ACCESS_LOG.races() as races:
            yield races
    else:
        yield []


@contextmanager
def cache_interpreted_launches() -> Iterator[None]:
    """Replace interpreted launches inside the block with the cached writes of an equal launch.

    Two launches are equal if they have the same kernel, arguments of equal layout, and equal bytes
    at every address that they read. Compiled kernels are not affected.
    """
    if patch_interpreter():
        from modular_kernel.interpreter import launch_cache as interpreted

        with interpreted.cache_launches():
            yield
    else:
        yield
