"""Sets up the process for this machine, and describes other machines.

Without a GPU, Triton kernels run in Triton's CPU interpreter, which must be enabled before triton
is imported. The commands of `mk` therefore call `prepare_host` before they import parts.
"""

import ctypes
import os
import re
from typing import TYPE_CHECKING, Literal

from modular_kernel.cli.output import print_note
from modular_kernel.errors import ConfigurationError
from modular_kernel.settings import enable_interpreter

if TYPE_CHECKING:
    from modular_kernel.spec.problem import Machine

_ARCH = re.compile(r"(?:sm_?)?(\d+)(?:\.(\d)|(\d))a?")


def prepare_host(*, quiet: bool = False) -> None:
    """Enable Triton's interpreter if there is no CUDA device, and print a note unless `quiet`."""
    if not _has_cuda_driver():
        # This must precede the import of torch, because torch imports numpy, which starts threads.
        enable_interpreter()
    import torch

    if torch.cuda.is_available():
        return
    enable_interpreter()
    if not quiet:
        print_note(_describe_triton_support())


def _describe_triton_support() -> str:
    """Describe how Triton kernels run on a machine without a GPU."""
    from modular_kernel.machine import find_importable

    packages = ("triton", "ml_dtypes")
    missing = [name for name in packages if name not in find_importable(packages)]
    if not missing:
        return "no CUDA device here: Triton kernels run in Triton's CPU interpreter"
    install_command = "pip install 'modular-kernel[interpreter]'"
    return (
        f"no CUDA device, and {missing[0]} is not installed: parts that use Triton are unavailable "
        f"({install_command})"
    )


def check_torch_only() -> None:
    """Check that Triton kernels cannot run, and print a note that only parts in plain torch run.

    Raises ConfigurationError if there is a CUDA device or TRITON_INTERPRET=1.
    """
    import torch

    from modular_kernel.settings import read_settings

    need = "a machine without a CUDA device, and TRITON_INTERPRET not set"
    if torch.cuda.is_available():
        raise ConfigurationError("--torch-only", got="a CUDA device", need=need)
    if read_settings().triton_interpret:
        raise ConfigurationError("--torch-only", got="TRITON_INTERPRET=1", need=need)
    print_note("plain torch only: parts with Triton kernels are unavailable")


def limit_workers(workers: int) -> int:
    """Limit the number of workers to the number of CPUs, and print a note if it was larger."""
    cpus = len(os.sched_getaffinity(0))
    if workers <= cpus:
        return workers
    print_note(f"--workers {workers}: using {cpus}, one per CPU")
    return cpus


def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def select_machine(
    arch: str | None, device: Literal["cuda", "cpu"] | None, packages: frozenset[str] | None
) -> "Machine":
    """Return the machine that the arguments describe, or this machine if all are None.

    `prepare_host` must have been called.

    arch: compute capability. None stands for this machine's GPU.
    device: None stands for cuda if `arch` is given, and otherwise for the device of this machine.
    packages: None stands for the packages of this machine.

    Raises ConfigurationError if `arch` is not a compute capability or is combined with the device
    cpu, or if the device is cuda, `arch` is None and this machine has no GPU.
    """
    from modular_kernel.catalog import this_machine
    from modular_kernel.spec.problem import Machine

    current = this_machine()
    if arch is None and device is None and packages is None:
        return current
    device_type = _resolve_device_type(arch, device, current)
    capability = parse_arch(arch) if arch is not None else None
    if device_type == "cuda" and capability is None:
        if current.arch is None:
            need = "a compute capability such as 9.0, because this machine has no GPU"
            raise ConfigurationError("--arch", got="nothing", need=need)
        capability = current.arch
    available = current.packages if packages is None else packages
    # Must match the condition under which `prepare_host` enables the interpreter.
    interpreter = device_type == "cpu" and {"triton", "ml_dtypes"} <= available
    memory = current.memory if arch is None and device_type == current.device else None
    return Machine(device_type, capability, available, interpreter, name="described", memory=memory)


def _resolve_device_type(
    arch: str | None, device: Literal["cuda", "cpu"] | None, current: "Machine"
) -> Literal["cuda", "cpu"]:
    if device is None:
        return "cuda" if arch is not None else current.device
    if device == "cpu" and arch is not None:
        raise ConfigurationError("--arch", got=arch, need="no --arch with --device cpu")
    return device


def parse_arch(arch: str) -> tuple[int, int]:
    """Parse a compute capability: "9.0", "90" and "sm_90" give (9, 0).

    Raises ConfigurationError for any other text.
    """
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise ConfigurationError("--arch", got=repr(arch), need="a capability such as 9.0")
    return int(match[1]), int(match[2] or match[3])
