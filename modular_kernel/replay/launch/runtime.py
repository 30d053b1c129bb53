"""Where an operation runs: its Triton kernel, or its torch twin. The only guard around triton."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from modular_kernel.machine import importable, twins_are_wanted

HAS_TRITON = "triton" in importable({"triton"})
HAS_INTERPRETER = HAS_TRITON and "ml_dtypes" in importable({"ml_dtypes"})


def make_honest() -> bool:
    """Have Triton's interpreter give the numbers a GPU gives; return whether it is active."""
    patch = _patch()
    if patch is None or not patch.active():
        return False
    patch.install()
    return True


@cache
def make_interpreted_honest() -> None:
    """Have interpreted kernels give the numbers a GPU gives: once, at the first launch of one."""
    patch = _patch()
    if patch is not None:
        patch.install()


@cache
def _patch() -> ModuleType | None:
    """Return what makes the interpreter honest, imported where something is to be computed."""
    return import_module("modular_kernel.interpreter.patch") if HAS_INTERPRETER else None


def use_triton(tensor: torch.Tensor) -> bool:
    """Tell whether operations on `tensor` launch Triton kernels.

    On a GPU always, where triton is installed; on a CPU where Triton's interpreter is active, in
    which case it is first made numerically honest. A meta tensor counts as a GPU's: the compile
    reports record launches made with meta tensors.
    """
    if not HAS_TRITON:
        return False
    if tensor.is_cuda or tensor.is_meta:
        return True
    if twins_are_wanted():
        return False
    return make_honest()


@contextmanager
def watched_races() -> Iterator[list[str]]:
    """Yield a list that is filled, within, by races between programs of one launch.

    It stays empty unless kernels are interpreted.
    """
    if make_honest():
        from modular_kernel.interpreter.access_log import watch

        with watch.races() as found:
            yield found
    else:
        yield []


@contextmanager
def known_launches() -> Iterator[None]:
    """Within it, an interpreted launch whose outcome an earlier one tells is not run again.

    It must be the same kernel, with arguments that lie alike, and find the same bytes in every
    place that it reads; it writes the same bytes then. Nothing changes where kernels are compiled.
    """
    if make_honest():
        from modular_kernel.interpreter import launch_cache as interpreted

        with interpreted.known_launches():
            yield
    else:
        yield
