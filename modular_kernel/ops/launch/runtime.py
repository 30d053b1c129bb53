"""Where an operation runs: its Triton kernel, or its torch twin. The only guard around triton."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from modular_kernel.machine import importable, twins_are_wanted

HAS_TRITON = "triton" in importable({"triton"})
HAS_INTERPRETER = HAS_TRITON and "ml_dtypes" in importable({"ml_dtypes"})

if HAS_INTERPRETER:
    from modular_kernel.interpreter import patch
    from modular_kernel.interpreter.access_log import watch


def make_honest() -> None:
    """Have Triton's interpreter give the numbers a GPU gives, where it is active."""
    if HAS_INTERPRETER and patch.active():
        patch.install()


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
    if HAS_INTERPRETER and patch.active():
        patch.install()
        return True
    return False


@contextmanager
def watched_races() -> Iterator[list[str]]:
    """Yield a list that is filled, within, by races between programs of one launch.

    It stays empty unless kernels are interpreted.
    """
    if HAS_INTERPRETER and patch.active():
        with watch.races() as found:
            yield found
    else:
        yield []
