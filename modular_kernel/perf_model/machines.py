"""Parse the option `--machine`, which takes a name or a JSON file.

A name is `8xh200` (GPUs x GPU) or `2x8xh200` (hosts x GPUs per host x GPU). A file lists the
differences from a named GPU, or describes another GPU completely:

    {"gpu": "h200", "gpus_per_host": 8, "hosts": 2, "net_gbs": 25, "packages": ["deep_ep"]}

The fields are:

- gpu: a name in NAMED_GPUS, or any other name if the file has arch, memory_gb, bandwidth_tbs,
  peak_tflops and link_gbs
- gpus_per_host, hosts: 1 by default
- arch: compute capability, such as "9.0"
- memory_gb, bandwidth_tbs: size (GB) and bandwidth (TB/s) of a GPU's memory
- peak_tflops: peak of dense 16-bit GEMMs (TFLOP/s); the 8-bit peak is assumed to be twice as high
- link_gbs, link_latency_us: bandwidth (GB/s) and latency of a GPU's link inside a host
- net_gbs, net_latency_us: the same for a GPU's share of the network between hosts
- packages: list of the installed packages
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.perf_model.hardware import NAMED_GPUS, Cluster, Gpu, Link, make_peak_rates
from modular_kernel.utils import json_files

OPTION = "--machine"
BASE_PACKAGES = frozenset({"triton", "ml_dtypes"})  # packages that this project itself needs
ALL_PACKAGES = "all"
# A package that deep_ep 1 has and deep_ep 2 does not. Only one of the two can be installed.
DEEP_EP_1_PACKAGE = "deep_ep_cpp"
_NAME = re.compile(r"(?:(?:(\d{1,4})x)?(\d{1,4})x)?([a-z]\w*)", re.ASCII)
_MAX_BYTES = 1 << 16
_GIGA, _TERA, _MICRO = 1e9, 1e12, 1e-6
_COUNT_FIELDS = ("gpus_per_host", "hosts")
_NUMBER_FIELDS = (
    *("memory_gb", "bandwidth_tbs", "peak_tflops", "link_gbs"),
    *("link_latency_us", "net_gbs", "net_latency_us"),
)
_FIELDS = ("gpu", *_COUNT_FIELDS, "arch", *_NUMBER_FIELDS, "packages")
_REQUIRED_FOR_UNNAMED_GPU = ("arch", "memory_gb", "bandwidth_tbs", "peak_tflops", "link_gbs")


def parse_machine(text: str) -> Cluster:
    """Return the machine that `text`, a name or the path of a JSON file, describes.

    Raises ConfigurationError for an invalid file or an unknown name. The message suggests the most
    similar known name.
    """
    if text.endswith(".json") or "/" in text:
        return _read_file(Path(text))
    match = _NAME.fullmatch(text.lower())
    need = f"[HOSTSx][GPUSx]GPU, such as 8xh200 or 2x8x{next(iter(NAMED_GPUS))}, or a .json file"
    if match is None:
        raise ConfigurationError(OPTION, got=repr(text[:100]), need=need)
    hosts, gpus, name = match.groups()
    gpu, link = _find_named_gpu(name, text)
    return Cluster(gpu, link, per_host=int(gpus or 1), hosts=int(hosts or 1))


def _find_named_gpu(name: str, text: str) -> tuple[Gpu, Link]:
    if name not in NAMED_GPUS:
        need = f"one of the GPUs {', '.join(NAMED_GPUS)}, or a .json file"
        if nearest := difflib.get_close_matches(name, NAMED_GPUS, n=1, cutoff=0.4):
            need = f"{need} (did you mean {nearest[0]}?)"
        raise ConfigurationError(OPTION, got=repr(text[:100]), need=need)
    return NAMED_GPUS[name]


def parse_packages(text: str, known: Iterable[str], option: str = "--packages") -> frozenset[str]:
    """Return the packages of a comma-separated list. "all" stands for every known package.

    known: packages that any part needs.
    option: name of the option, for messages.

    Raises ConfigurationError for an unknown package. The message suggests the most similar known
    package.
    """
    known_packages = sorted({*known, *BASE_PACKAGES})
    packages = [package.strip() for package in text.split(",") if package.strip()]
    if packages == [ALL_PACKAGES]:
        return frozenset(known_packages)
    for package in packages:
        if package not in known_packages:
            need = f"{ALL_PACKAGES}, or some of {', '.join(known_packages)}"
            if nearest := difflib.get_close_matches(package, known_packages, n=1, cutoff=0.4):
                need = f"{need} (did you mean {nearest[0]}?)"
            raise ConfigurationError(option, got=repr(package[:100]), need=need)
    return frozenset(packages)


def _read_file(path: Path) -> Cluster:
    try:
        record = json_files.parse(json_files.read_file(path, _MAX_BYTES))
    except OSError as error:
        need = "a JSON file that can be read"
        raise ConfigurationError(OPTION, got=f"{path}: {error.strerror}", need=need) from None
    except ValueError as error:
        raise ConfigurationError(OPTION, got=f"{path}: {error}"[:200], need="JSON") from None
    return parse_machine_record(record)


def parse_machine_record(record: Any) -> Cluster:
    """Return the machine that a parsed JSON file describes.

    Raises ConfigurationError for an invalid field.
    """
    if not isinstance(record, dict):
        raise ConfigurationError(OPTION, got=type(record).__name__, need="a JSON object")
    for name in record:
        if name not in _FIELDS:
            need = f"fields among {', '.join(_FIELDS)}"
            if nearest := difflib.get_close_matches(name, _FIELDS, n=1):
                need = f"{need} (did you mean {nearest[0]}?)"
            raise ConfigurationError(OPTION, got=repr(name[:100]), need=need)
    values = {name: _parse_number(record, name) for name in _NUMBER_FIELDS if name in record}
    counts = {name: _parse_count(record, name) for name in _COUNT_FIELDS}
    gpu, link = _parse_gpu(record, values)
    default = Cluster()
    inside = _make_link(values, "link", link)
    between = _make_link(values, "net", default.between)
    packages = _parse_packages(record)
    return Cluster(gpu, inside, between, counts["gpus_per_host"], counts["hosts"], packages)


def _parse_gpu(record: dict[str, Any], values: dict[str, float]) -> tuple[Gpu, Link]:
    name = record.get("gpu")
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"{OPTION} gpu", got=repr(name)[:100], need="the name of a GPU")
    missing = [field for field in _REQUIRED_FOR_UNNAMED_GPU if field not in record]
    if name.lower() not in NAMED_GPUS and missing:
        need = f"one of {', '.join(NAMED_GPUS)}, or {', '.join(missing)} in addition"
        raise ConfigurationError(f"{OPTION} gpu", got=repr(name[:100]), need=need)
    gpu, link = NAMED_GPUS.get(name.lower(), (Gpu(name[:100]), Link(1.0)))
    if "arch" in record:
        gpu = replace(gpu, arch=_parse_arch(record["arch"]))
    if "memory_gb" in values:
        gpu = replace(gpu, memory=values["memory_gb"] * _GIGA)
    if "bandwidth_tbs" in values:
        gpu = replace(gpu, bandwidth=values["bandwidth_tbs"] * _TERA, measured=False)
    if "peak_tflops" in values:
        rates = make_peak_rates(
            values["peak_tflops"], 2 * values["peak_tflops"], fp8=gpu.arch >= (8, 9)
        )
        gpu = replace(gpu, flops=rates, measured=False)
    return gpu, link


def _make_link(values: dict[str, float], name: str, default: Link) -> Link:
    bandwidth, latency = values.get(f"{name}_gbs"), values.get(f"{name}_latency_us")
    return Link(
        default.bandwidth if bandwidth is None else bandwidth * _GIGA,
        default.latency if latency is None else latency * _MICRO,
    )


def _parse_number(record: dict[str, Any], name: str) -> float:
    value = record[name]
    minimum = 0 if name.endswith("latency_us") else 1e-9
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not minimum <= value < 1e9:
        need = "a number >= 0" if minimum == 0 else "a number > 0"
        raise ConfigurationError(f"{OPTION} {name}", got=repr(value)[:100], need=need)
    return float(value)


def _parse_count(record: dict[str, Any], name: str) -> int:
    value = record.get(name, 1)
    if type(value) is not int or not 1 <= value <= 1024:
        need = "an integer from 1 to 1024"
        raise ConfigurationError(f"{OPTION} {name}", got=repr(value)[:100], need=need)
    return value


def _parse_arch(value: Any) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,2})\.(\d)", value) if isinstance(value, str) else None
    if match is None:
        need = 'a compute capability such as "9.0"'
        raise ConfigurationError(f"{OPTION} arch", got=repr(value)[:100], need=need)
    return int(match[1]), int(match[2])


def _parse_packages(record: dict[str, Any]) -> frozenset[str] | None:
    names = record.get("packages")
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        need = "a list of package names"
        raise ConfigurationError(f"{OPTION} packages", got=repr(names)[:100], need=need)
    return frozenset(names)
