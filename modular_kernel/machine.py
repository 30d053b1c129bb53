"""Reads the machine into a frozen `Machine`, and says where operations leave the interpreter."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Literal

import torch

from modular_kernel.settings import read_settings
from modular_kernel.spec.problem import Machine
from modular_kernel.utils.package_probes import Provider, sort_out

_twins: ContextVar[bool] = ContextVar("torch_twins", default=False)


def importable(packages: Iterable[str]) -> frozenset[str]:
    """Return those of `packages` that can be found, without importing them."""
    found = set()
    for package in packages:
        try:
            if find_spec(package) is not None:
                found.add(package)
        except (ImportError, ValueError):  # a stub in sys.modules, or a parent that is missing
            continue
    return frozenset(found)


def interpreted_since_import() -> bool | None:
    """Tell whether triton was imported with its interpreter on; None if not imported yet.

    triton reads the variable while its own functions are defined, so that a later change leaves a
    process with functions of both kinds, which cannot call each other.
    """
    standard = sys.modules.get("triton.language.standard")
    function = getattr(standard, "cdiv", None)
    return None if function is None else type(function).__name__ == "InterpretedFunction"


def current_machine(
    packages: Iterable[str] = (),
    *,
    device: Literal["cuda", "cpu"] | None = None,
    providers: Iterable[Provider] = (),
) -> Machine:
    """Describe this machine. `packages` are looked for beside triton and ml_dtypes.

    providers: how those of them are told whose names prove nothing.
    device: "cpu" describes this machine's CPU even where a GPU is present; None prefers the GPU.
    """
    probed = tuple(providers)
    here, others = sort_out(probed)
    plain = {"triton", "ml_dtypes", *packages} - {provider.name for provider in probed}
    found, unlike = importable(plain) | here, tuple(sorted(others.items()))
    if device != "cpu" and torch.cuda.is_available():
        arch = torch.cuda.get_device_capability()
        name = torch.cuda.get_device_name()
        return Machine("cuda", arch, found, name=name, others=unlike, cuda=_cuda_version())
    interpreter = (
        read_settings().triton_interpret
        and interpreted_since_import() is not False
        and {"triton", "ml_dtypes"} <= found
    )
    return Machine("cpu", None, found, interpreter, others=unlike)


def _cuda_version() -> tuple[int, int] | None:
    """Return the version of CUDA that torch was built for; None for another kind of GPU."""
    parts = (torch.version.cuda or "").split(".")
    numbers = [int(part) for part in parts[:2] if part.isdecimal()]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else None


@contextmanager
def torch_twins(*, wanted: bool = True) -> Iterator[None]:
    """Have operations on a CPU take their torch twins within it, the interpreter being active too.

    For measuring parts of plain torch as they run for a user. wanted: False changes nothing.
    """
    before = _twins.set(_twins.get() or wanted)
    try:
        yield
    finally:
        _twins.reset(before)


def twins_are_wanted() -> bool:
    """Return whether `torch_twins` holds here."""
    return _twins.get()
