"""The machine a verb runs on, made ready before anything imports triton; or one described."""

import ctypes
import os
import re
from typing import TYPE_CHECKING, Literal

from modular_kernel.cli.output import note
from modular_kernel.errors import ConfigurationError
from modular_kernel.settings import enable_interpreter

if TYPE_CHECKING:
    from modular_kernel.spec.problem import Machine

_ARCH = re.compile(r"(?:sm_?)?(\d+)(?:\.(\d)|(\d))a?")


def prepare_host(*, quiet: bool = False) -> None:
    """Without a CUDA device, have Triton interpret its kernels, and say so once."""
    if not _has_cuda_driver():
        enable_interpreter()  # before torch: it loads numpy, which then starts its threads
    import torch

    if torch.cuda.is_available():
        return
    enable_interpreter()
    if not quiet:
        note(_how_triton_runs())


def _how_triton_runs() -> str:
    """Say what becomes of Triton kernels on a machine without a GPU."""
    from modular_kernel.machine import importable

    wanted = ("triton", "ml_dtypes")
    missing = [name for name in wanted if name not in importable(wanted)]
    if not missing:
        return "no CUDA device here: Triton kernels run in Triton's CPU interpreter"
    need = "pip install 'modular-kernel[interpreter]'"
    return f"no CUDA device and no {missing[0]} here: parts of Triton kernels are refused ({need})"


def prepare_torch_only() -> None:
    """Leave the interpreter off, so that plain torch runs as for a user on a CPU, and say so.

    ConfigurationError where Triton kernels run all the same.
    """
    import torch

    from modular_kernel.settings import read_settings

    need = "a machine without a CUDA device, and TRITON_INTERPRET not set"
    if torch.cuda.is_available():
        raise ConfigurationError("--torch-only", got="a CUDA device", need=need)
    if read_settings().triton_interpret:
        raise ConfigurationError("--torch-only", got="TRITON_INTERPRET=1", need=need)
    note("plain torch alone: parts of Triton kernels are refused")


def workers_of(asked: int) -> int:
    """Return the processes that `--workers` asks for, at most one for each CPU; a note says so.

    ConfigurationError for none.
    """
    if asked < 1:
        raise ConfigurationError("--workers", got=asked, need="1 or more")
    cpus = len(os.sched_getaffinity(0))
    if asked <= cpus:
        return asked
    note(f"--workers {asked}: {cpus} are started, one for each CPU")
    return cpus


def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def chosen_machine(arch: str | None, device: str | None, packages: str | None) -> "Machine":
    """Return this machine, or the one described where any option is given.

    packages: comma-separated; those importable here if None.
    """
    prepare_host(quiet=device is not None or arch is not None)
    from modular_kernel.catalog import this_machine
    from modular_kernel.spec.problem import Machine

    here = this_machine()
    if arch is None and device is None and packages is None:
        return here
    kind = _device(arch, device, here)
    capability = parse_arch(arch) if arch is not None else None
    if kind == "cuda" and capability is None:
        if here.arch is None:
            raise ConfigurationError("--arch", got="nothing", need="one such as 9.0 beside cuda")
        capability = here.arch
    found = here.packages
    if packages is not None:
        found = frozenset(name.strip() for name in packages.split(",") if name.strip())
    # As prepare_host does it where there is no GPU.
    interpreter = kind == "cpu" and {"triton", "ml_dtypes"} <= found
    return Machine(kind, capability, found, interpreter, name="described")


def _device(arch: str | None, device: str | None, here: "Machine") -> Literal["cuda", "cpu"]:
    if device is None:
        return "cuda" if arch is not None else here.device
    if device == "cuda":
        return "cuda"
    if device == "cpu":
        if arch is not None:
            raise ConfigurationError("--arch", got=arch, need="no arch beside --device cpu")
        return "cpu"
    raise ConfigurationError("--device", got=repr(device), need="cuda or cpu")


def parse_arch(text: str) -> tuple[int, int]:
    """(9, 0) from "9.0", "90" or "sm_90"; the last digit is the minor version."""
    match = _ARCH.fullmatch(text)
    if match is None:
        raise ConfigurationError("--arch", got=repr(text), need="a capability such as 9.0")
    return int(match[1]), int(match[2] or match[3])
