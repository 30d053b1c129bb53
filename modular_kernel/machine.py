"""Detects this machine (`Machine`), and lets operations prefer their torch references."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Literal

import torch

from modular_kernel.settings import read_settings
from modular_kernel.spec.problem import Machine
from modular_kernel.utils.package_probes import PackageProbe, find_packages

_prefers_torch_reference: ContextVar[bool] = ContextVar("prefers_torch_reference", default=False)


def find_importable(packages: Iterable[str]) -> frozenset[str]:
    """Return the packages that can be found, without importing them."""
    available = set()
    for package in packages:
        try:
            if find_spec(package) is not None:
                available.add(package)
        except (ImportError, ValueError):  # a stub in sys.modules, or a missing parent package
            continue
    return frozenset(available)


def was_imported_with_interpreter() -> bool | None:
    """Return whether triton was imported with its interpreter, or None if it was not imported.

    Triton reads TRITON_INTERPRET when its own functions are defined. If the variable changes later,
    functions defined before and after the change cannot call each other.
    """
    standard = sys.modules.get("triton.language.standard")
    function = getattr(standard, "cdiv", None)
    return None if function is None else type(function).__name__ == "InterpretedFunction"


def current_machine(
    packages: Iterable[str] = (),
    *,
    device: Literal["cuda", "cpu"] | None = None,
    probes: Iterable[PackageProbe] = (),
) -> Machine:
    """Return a description of this machine.

    packages: names of packages to look for in addition to triton and ml_dtypes.
    device: "cpu" describes this machine without its GPU. None prefers the GPU.
    probes: probes for packages that share their name with other packages.
    """
    probes = tuple(probes)
    confirmed, others = find_packages(probes)
    unprobed = {"triton", "ml_dtypes", *packages} - {probe.name for probe in probes}
    available, mismatched = find_importable(unprobed) | confirmed, tuple(sorted(others.items()))
    if device != "cpu" and torch.cuda.is_available():
        arch = torch.cuda.get_device_capability()
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return Machine(
            "cuda",
            arch,
            available,
            name=properties.name,
            others=mismatched,
            cuda=_get_cuda_version(),
            memory=properties.total_memory,
        )
    interpreter = (
        read_settings().triton_interpret
        and was_imported_with_interpreter() is not False
        and {"triton", "ml_dtypes"} <= available
    )
    return Machine("cpu", None, available, interpreter, others=mismatched)


def _get_cuda_version() -> tuple[int, int] | None:
    """Return the CUDA version that torch was built for, or None if torch was built without CUDA."""
    parts = (torch.version.cuda or "").split(".")
    numbers = [int(part) for part in parts[:2] if part.isdecimal()]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else None


@contextmanager
def prefer_torch_reference(*, enabled: bool = True) -> Iterator[None]:
    """Use torch references instead of interpreted kernels for operations on a CPU, in this context.

    Benchmarks can then time parts that use only torch as they run without the interpreter.

    enabled: if False, the block changes nothing.
    """
    token = _prefers_torch_reference.set(_prefers_torch_reference.get() or enabled)
    try:
        yield
    finally:
        _prefers_torch_reference.reset(token)


def is_torch_reference_preferred() -> bool:
    """Return whether `prefer_torch_reference` is active in this context."""
    return _prefers_torch_reference.get()
