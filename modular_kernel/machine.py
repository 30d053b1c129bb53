"""Detection of this machine as a frozen `Machine`, and the switch to torch reference operations."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Literal

import torch

from modular_kernel.settings import read_settings
from modular_kernel.spec.problem import Machine
from modular_kernel.utils.package_probes import PackageProbe, probe_all

_torch_reference: ContextVar[bool] = ContextVar("torch_reference", default=False)


def importable(packages: Iterable[str]) -> frozenset[str]:
    """Return those of `packages` that can be found, without importing them."""
    available = set()
    for package in packages:
        try:
            if find_spec(package) is not None:
                available.add(package)
        except (ImportError, ValueError):  # a stub in sys.modules, or a missing parent package
            continue
    return frozenset(available)


def interpreted_since_import() -> bool | None:
    """Return whether triton was imported with its interpreter enabled; None if not imported yet.

    Triton reads TRITON_INTERPRET while it defines its own functions. After a later change, a
    process has functions of both kinds, which cannot call each other.
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
    """Describe this machine.

    packages: names of packages to look for in addition to triton and ml_dtypes.
    probes: for packages that share their name with other packages.
    device: "cpu" describes this machine's CPU even if a GPU is present; None prefers the GPU.
    """
    probes = tuple(probes)
    confirmed, others = probe_all(probes)
    by_name = {"triton", "ml_dtypes", *packages} - {probe.name for probe in probes}
    available, mismatched = importable(by_name) | confirmed, tuple(sorted(others.items()))
    if device != "cpu" and torch.cuda.is_available():
        arch = torch.cuda.get_device_capability()
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return Machine(
            "cuda",
            arch,
            available,
            name=properties.name,
            others=mismatched,
            cuda=_cuda_version(),
            memory=properties.total_memory,
        )
    interpreter = (
        read_settings().triton_interpret
        and interpreted_since_import() is not False
        and {"triton", "ml_dtypes"} <= available
    )
    return Machine("cpu", None, available, interpreter, others=mismatched)


def _cuda_version() -> tuple[int, int] | None:
    """Return the CUDA version that torch was built for; None for another kind of GPU."""
    parts = (torch.version.cuda or "").split(".")
    numbers = [int(part) for part in parts[:2] if part.isdecimal()]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else None


@contextmanager
def prefer_torch_reference(*, enabled: bool = True) -> Iterator[None]:
    """Inside the block, run CPU operations by their torch references, even when interpreting.

    For timing plain-torch parts as a user runs them. enabled: False makes the block a no-op.
    """
    token = _torch_reference.set(_torch_reference.get() or enabled)
    try:
        yield
    finally:
        _torch_reference.reset(token)


def torch_reference_preferred() -> bool:
    """Return whether `prefer_torch_reference` is active in this context."""
    return _torch_reference.get()
