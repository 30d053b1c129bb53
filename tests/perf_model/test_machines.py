"""parse_machine, with names of machines and with files, and parse_packages."""

import json
from pathlib import Path
from typing import Any

import pytest

from modular_kernel.errors import ConfigurationError
from modular_kernel.perf_model.hardware import NAMED_GPUS, Cluster
from modular_kernel.perf_model.machines import parse_machine, parse_packages

CUSTOM = {"gpu": "x1", "arch": "12.0", "memory_gb": 32, "bandwidth_tbs": 1.5}
CUSTOM |= {"peak_tflops": 200, "link_gbs": 40}


@pytest.mark.parametrize(
    ("machine_name", "hosts", "per_host", "name"),
    [("h200", 1, 1, "h200"), ("8xH200", 1, 8, "h200"), ("2x8xh200", 2, 8, "h200"),
     ("8xb200", 1, 8, "b200"), ("4xa100", 1, 4, "a100"), ("16x4xh100", 16, 4, "h100")],
)  # fmt: skip
def test_name_consists_of_hosts_gpus_and_gpu(
    machine_name: str, hosts: int, per_host: int, name: str
) -> None:
    machine = parse_machine(machine_name)
    assert (machine.hosts, machine.per_host, machine.gpus) == (hosts, per_host, hosts * per_host)
    assert (machine.gpu, machine.inside) == NAMED_GPUS[name]
    described = machine.machine(frozenset({"triton"}))
    assert (described.arch, described.memory) == (machine.gpu.arch, machine.gpu.memory)
    assert described.packages == {"triton"}


@pytest.mark.parametrize(
    ("machine_name", "need"),
    [("8xh20", "did you mean h200?"), ("b20", "did you mean b200?"), ("8 h200", "such as 8xh200"),
     ("", "such as 8xh200"), ("0xh200", "ranks of a host"), ("0x8xh200", "hosts"),
     ("1x2x3xh200", "such as 8xh200"), ("8xfoo", "one of the GPUs a100, h100, h200, b200")],
)  # fmt: skip
def test_unknown_name_is_refused_with_the_nearest(machine_name: str, need: str) -> None:
    with pytest.raises(ConfigurationError) as exc_info:
        parse_machine(machine_name)
    assert need in str(exc_info.value)


def write_machine_file(folder: Path, content: Any) -> str:
    path = folder / "machine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("content", "measured"),
    [({"gpu": "h200", "net_gbs": 25}, True), ({"gpu": "h200", "peak_tflops": 500}, False),
     ({"gpu": "h200", "bandwidth_tbs": 4}, False), ({"gpu": "b200"}, False), (CUSTOM, False)],
)  # fmt: skip
def test_given_rates_do_not_count_as_measured(
    tmp_path: Path, content: dict[str, Any], measured: bool
) -> None:
    assert parse_machine(write_machine_file(tmp_path, content)).gpu.measured is measured


def test_file_replaces_values_of_a_named_gpu(tmp_path: Path) -> None:
    content = {"gpu": "h200", "gpus_per_host": 4, "hosts": 2, "net_gbs": 25, "net_latency_us": 7}
    machine = parse_machine(write_machine_file(tmp_path, {**content, "packages": ["deep_ep"]}))
    assert (machine.gpu, machine.inside) == NAMED_GPUS["h200"]
    assert (machine.hosts, machine.per_host) == (2, 4)
    assert (machine.between.bandwidth, machine.between.latency) == (25e9, pytest.approx(7e-6))
    assert machine.packages == {"deep_ep"}
    custom = parse_machine(write_machine_file(tmp_path, CUSTOM))
    assert (custom.gpu.name, custom.gpu.arch, custom.gpu.memory) == ("x1", (12, 0), 32e9)
    assert custom.gpu.flops == {n: 2e14 if "16" in n else 4e14 for n in custom.gpu.flops}
    assert "float8_e4m3fn" in custom.gpu.flops
    assert (custom.inside.bandwidth, custom.between) == (40e9, Cluster().between)
    assert custom.packages is None
    without_fp8 = parse_machine(write_machine_file(tmp_path, CUSTOM | {"arch": "8.6"}))
    assert "float8_e4m3fn" not in without_fp8.gpu.flops


@pytest.mark.parametrize(
    ("content", "need"),
    [("{", "need JSON"), ([], "need a JSON object"), ({}, "the name of a GPU"),
     ({"gpu": "h20"}, "or arch, memory_gb, bandwidth_tbs, peak_tflops, link_gbs in addition"),
     ({"gpu": "h200", "net_gb": 1}, "did you mean net_gbs?"),
     ({"gpu": "h200", "hosts": 0}, "an integer from 1 to 1024"),
     ({"gpu": "h200", "hosts": True}, "an integer from 1 to 1024"),
     ({"gpu": "h200", "net_gbs": 0}, "a number > 0"),
     ({"gpu": "h200", "memory_gb": "80"}, "a number > 0"),
     ({"gpu": "h200", "arch": 9.0}, 'such as "9.0"'),
     ({"gpu": "h200", "packages": "all"}, "a list of package names")],
    ids=str,
)  # fmt: skip
def test_an_invalid_file_is_refused(tmp_path: Path, content: Any, need: str) -> None:
    with pytest.raises(ConfigurationError) as exc_info:
        parse_machine(write_machine_file(tmp_path, content))
    assert need in str(exc_info.value)
    with pytest.raises(ConfigurationError, match="a JSON file that can be read"):
        parse_machine(str(tmp_path / "none.json"))


def test_packages_are_all_or_known_ones() -> None:
    known_packages = ("deep_ep", "deep_gemm")
    assert parse_packages("all", known_packages) == {"deep_ep", "deep_gemm", "triton", "ml_dtypes"}
    assert parse_packages("triton, deep_ep", known_packages) == {"triton", "deep_ep"}
    assert parse_packages("", known_packages) == frozenset()
    for packages, got, nearest in (("deep_gem", "deep_gem", "deep_gemm"), ("all,tritn", "all", "")):
        with pytest.raises(ConfigurationError) as exc_info:
            parse_packages(packages, known_packages)
        assert f"got '{got}', need all, or some of deep_ep, deep_gemm" in str(exc_info.value)
        assert (f"did you mean {nearest}?" in str(exc_info.value)) is bool(nearest)
