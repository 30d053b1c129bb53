"""`mk doctor`: shows versions, devices, process settings and optional packages of this machine.

The fields of DoctorReport are the keys of the JSON record.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from modular_kernel.cli import output
from modular_kernel.cli.machine_setup import prepare_host
from modular_kernel.cli.options import AsJson
from modular_kernel.errors import ConfigurationError
from modular_kernel.utils.package_probes import installed_version

if TYPE_CHECKING:
    from modular_kernel.catalog import BrokenEntry
    from modular_kernel.compatibility.support import Requirements
    from modular_kernel.process_status import ProcessState

# Import name -> what the package enables. These optional packages are not required by any part.
_EXTRA_PACKAGES = {
    "ml_dtypes": "bfloat16 and fp8 in Triton's CPU interpreter",
    "transformers": "mk demo and the integration with transformers",
    "matplotlib": "plots of benchmarks",
}
# (name, value) of a process setting -> explanation of a normal value. ProcessState.why explains the
# other values.
_EXPLANATIONS = {
    ("replay", "on"): "plans replay their launches without running host code",
    ("interpreter", "on"): "Triton kernels run on the CPU",
    ("interpreter", "off"): "Triton kernels are compiled",
    ("packages", "ours"): "the parts imported are those of this installation",
    ("C compiler", "found"): "Triton builds launchers with it",
    ("caches", "kept"): "measurements and compiled kernels are cached between runs",
    ("variables", "known"): "all MK_ variables that are set are known",
}


@dataclass(frozen=True)
class DeviceReport:
    """A CUDA device.

    arch: compute capability, such as "9.0".
    sms: number of streaming multiprocessors.
    """

    index: int
    name: str
    arch: str
    memory_gib: float
    sms: int


@dataclass(frozen=True)
class PackageReport:
    """An optional package.

    enables: the parts or features that need it.
    version: "" if unknown.
    why: the reason why an installed package cannot be used, or "".
    get: how to install it.
    """

    name: str
    present: bool
    enables: str
    version: str = ""
    why: str = ""
    get: str = ""


@dataclass(frozen=True)
class DoctorReport:
    """The report of `mk doctor`.

    peer_access: matrix whose element [i][j] is whether device i can access the memory of device j;
        empty with fewer than two devices.
    topology: output of `nvidia-smi topo -m`.
    interpreter: whether Triton kernels run in the CPU interpreter.
    broken: entry points that failed to load.
    states: process-wide settings, such as launch replay.
    """

    versions: dict[str, str | None]
    devices: list[DeviceReport]
    peer_access: list[list[bool]]
    topology: str | None
    packages: list[PackageReport]
    interpreter: bool
    broken: "tuple[BrokenEntry, ...]"
    states: "tuple[ProcessState, ...]"


def doctor(as_json: AsJson = None) -> None:
    """Show versions, devices, GPU links, process settings and missing optional packages.

    Process settings are, for example, launch replay and Triton's interpreter.
    """
    prepare_host()
    from modular_kernel.catalog import load_catalog, this_machine
    from modular_kernel.measure.environment import run_nvidia_smi
    from modular_kernel.process_status import get_all_states

    report = DoctorReport(
        versions=_collect_versions(),
        devices=_collect_devices(),
        peer_access=_collect_peer_access(),
        topology=run_nvidia_smi("topo", "-m"),
        packages=_collect_packages(),
        interpreter=this_machine().interpreter,
        broken=load_catalog().broken,
        states=get_all_states(),
    )
    output.print_result(report, as_json, lambda: _print_text(report))
    try:
        load_catalog().require_parts()
    except ConfigurationError as error:
        output.print_note(str(error))


def _collect_versions() -> dict[str, str | None]:
    import torch

    from modular_kernel.measure.environment import read_driver_version

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "modular-kernel": installed_version("modular-kernel"),
        "torch": torch.__version__,
        "triton": installed_version("triton"),
        "numpy": installed_version("numpy"),
        "cuda": torch.version.cuda,
        "driver": read_driver_version(),
        "nccl": _get_nccl_version(),
    }


def _get_nccl_version() -> str | None:
    import torch

    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return None
    version: object = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def _collect_devices() -> list[DeviceReport]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = []
    for index in range(count):
        props = torch.cuda.get_device_properties(index)
        arch, memory = (
            f"{props.major}.{props.minor}",
            round(props.total_memory / 2**30, 1),
        )
        devices.append(DeviceReport(index, props.name, arch, memory, props.multi_processor_count))
    return devices


def _collect_peer_access() -> list[list[bool]]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return []
    can_access: Callable[[int, int], bool] = torch.cuda.can_device_access_peer
    return [[i == j or can_access(i, j) for j in range(count)] for i in range(count)]


def _collect_packages() -> list[PackageReport]:
    from modular_kernel.catalog import collect_packages, collect_probes, load_catalog
    from modular_kernel.machine import find_importable
    from modular_kernel.utils.package_probes import find_package

    catalog = load_catalog()
    importable = find_importable({*_EXTRA_PACKAGES, *collect_packages(catalog)})
    required = {name for part in catalog.parts for name in _list_required_packages(part.cls)}
    names = sorted({*_EXTRA_PACKAGES, *required})
    probe_by_name = {provider.name: find_package(provider) for provider in collect_probes(catalog)}
    packages = []
    for name in names:
        dependents = [p for p in catalog.parts if name in _list_required_packages(p.cls)]
        enabled = [p.name for p in dependents if not importable & _list_excluded_packages(p.cls)]
        enables = ", ".join(enabled) or _EXTRA_PACKAGES.get(name, "")
        install_command = (
            _get_requirements(dependents[0].cls).install_hint(name)
            if dependents
            else f"pip install {name}"
        )
        if name in probe_by_name:
            probe = probe_by_name[name]
            is_present, reason = probe.folder is not None, probe.reason
            version = probe.version or installed_version(name) or ""
        else:
            is_present, version, reason = name in importable, installed_version(name) or "", ""
        packages.append(
            PackageReport(
                name, is_present, enables, version if is_present else "", reason, install_command
            )
        )
    return packages


def _get_requirements(cls: type) -> "Requirements":
    from modular_kernel.compatibility.support import Requirements

    requires = getattr(cls, "requires", None)
    assert isinstance(requires, Requirements)
    return requires


def _list_required_packages(cls: type) -> tuple[str, ...]:
    return _get_requirements(cls).packages if hasattr(cls, "requires") else ()


def _list_excluded_packages(cls: type) -> frozenset[str]:
    excluded = _get_requirements(cls).excluded_packages if hasattr(cls, "requires") else ()
    return frozenset(excluded)


def _print_text(report: DoctorReport) -> None:
    output.print_table(
        ("component", "version"), [(k, v or "absent") for k, v in report.versions.items()]
    )
    gpus = [(d.index, d.name, d.arch, d.memory_gib, d.sms) for d in report.devices]
    output.print_table(("gpu", "name", "arch", "GiB", "SMs"), gpus)
    if not gpus:
        output.print_line("No CUDA device.")
    states = [
        (s.name, s.word, s.why or _EXPLANATIONS.get((s.name, s.word), "")) for s in report.states
    ]
    output.print_table(("setting", "value", "meaning or reason"), states)
    links = report.peer_access
    rows = [(f"gpu {i}", *("yes" if ok else "no" for ok in row)) for i, row in enumerate(links)]
    output.print_table(("peer access", *(f"gpu {i}" for i in range(len(links)))), rows)
    if report.topology:
        output.print_line(f"{report.topology}\n")
    packages = [(p.name, _format_presence(p), p.enables) for p in report.packages]
    output.print_table(("optional package", "present", "enables"), packages)
    # A separate table, because part names and an installation command do not fit in 80 columns.
    absent = [(p.name, p.get) for p in report.packages if not p.present]
    output.print_table(("absent package", "how to install it"), absent)
    broken = [(b.name, b.origin, b.error) for b in report.broken]
    output.print_table(("broken entry point", "from", "error"), broken)


def _format_presence(package: PackageReport) -> str:
    if package.present:
        return package.version or "yes"
    return f"no: {package.why}" if package.why else "no"
