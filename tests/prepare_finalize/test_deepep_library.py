"""Releases of DeepEP: which are accepted, and how a release with another interface is refused."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import deepep_stand_in as stand_in
import pytest
import torch
import torch.distributed as dist
from test_deepep import BASE
from test_deepep_hosts import describe_outcome, make_manager_on_simulated_hosts

from modular_kernel.cli.doctor import _collect_packages
from modular_kernel.errors import ConfigurationError, UnsupportedError
from modular_kernel.machine import current_machine
from modular_kernel.settings import read_nvshmem_qp_depth
from modular_kernel.spec.problem import Parallel
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.utils.package_probes import find_package
from prepare_finalize import DeepEPGroup, DeepEPHTPrepareAndFinalize
from prepare_finalize.common import library_calls
from prepare_finalize.common.library_calls import unpack
from prepare_finalize.deepep import group as group_module
from prepare_finalize.deepep import library as library_module
from prepare_finalize.deepep import part as part_module
from prepare_finalize.deepep.arguments import high_throughput_arguments, low_latency_arguments
from prepare_finalize.deepep.group import HighThroughputBuffer
from prepare_finalize.deepep.library import (
    DEEP_EP,
    check_dispatch_between_hosts,
    check_torch_settings,
    get_version,
    ids_dtype,
    limits_tokens_by_qp_depth,
    load_deepep,
)

V1, V2 = stand_in.DEEP_EP_V1, stand_in.DEEP_EP_V2


def install(monkeypatch: pytest.MonkeyPatch, **attributes: object) -> None:
    """Replace the module deep_ep by a module that has only these attributes."""
    module = ModuleType("deep_ep")
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, "deep_ep", module)


def without(cls: type, method: str) -> type:
    """Return a subclass in which a method is missing."""
    return type(cls.__name__, (cls,), {method: None})


def replacing(cls: type, method: str, function: Callable[..., Any]) -> type:
    """Return a subclass in which a method is replaced."""
    return type(cls.__name__, (cls,), {method: function})


# ---------------------------------------------------------------------------------- both releases


@pytest.mark.parametrize(
    ("release", "generation", "expected_version"),
    [(V1, 1, "1"), (V2, 1, "2.1.0"), (V2, 2, "2.1.0"), (stand_in.DEEP_EP_V2_INT32, 1, "2.1.0")],
    ids=["1.2.1", "2.1.0", "2.1.0 ElasticBuffer", "2.1.0 with int32 ids"],
)
def test_releases_with_the_interface_are_accepted(
    monkeypatch: pytest.MonkeyPatch, release: ModuleType, generation: int, expected_version: str
) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", release)
    assert load_deepep(generation) is release
    assert get_version(release) == expected_version


def test_deepep_1_has_no_second_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", V1)
    need = r"got version 1, without the class ElasticBuffer, need deep_ep 2 with"
    with pytest.raises(ConfigurationError, match=need):
        load_deepep(2)


def test_the_dtype_of_ids_is_that_of_the_build() -> None:
    assert ids_dtype(V1) is torch.int64
    assert ids_dtype(V2) is torch.int64
    assert ids_dtype(stand_in.DEEP_EP_V2_INT32) is torch.int32


def test_the_version_of_deepep_1_is_that_of_its_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library_module, "version", lambda name: f"1.2.1 of {name}")
    assert get_version(V1) == "1.2.1 of deep_ep"
    assert get_version(SimpleNamespace(ElasticBuffer=object)) == "2"


# ----------------------------------------------------------------------------------- other releases


def required_argument(self: object, x: object, stream: object, **options: object) -> None:
    """A method with an additional required argument."""


def renamed_keywords(self: object, x: object, handle: object = None) -> None:
    """A method without the keywords of the parts."""


MISMATCHES: tuple[tuple[str, int, dict[str, object], str], ...] = (
    ("nothing", 1, {}, "version 1, without the class Buffer"),
    ("a function", 1, {"Buffer": print}, "without the class Buffer"),
    ("only the elastic class", 1, {"ElasticBuffer": V2.ElasticBuffer}, "without the class Buffer"),
    (
        "a missing method",
        1,
        {"Buffer": without(V2.Buffer, "low_latency_combine")},
        "Buffer.low_latency_combine: no such method",
    ),
    (
        "a missing method of the elastic class",
        2,
        {"ElasticBuffer": without(V2.ElasticBuffer, "combine")},
        "ElasticBuffer.combine: no such method",
    ),
    (
        "an additional argument",
        1,
        {"Buffer": replacing(V1.Buffer, "dispatch", required_argument)},
        "Buffer.dispatch: missing a required argument: 'stream'",
    ),
    (
        "renamed arguments",
        1,
        {"Buffer": replacing(V1.Buffer, "dispatch", renamed_keywords)},
        "Buffer.dispatch: got an unexpected keyword argument 'num_tokens_per_rank'",
    ),
    (
        "a constructor with renamed arguments",
        2,
        {"ElasticBuffer": replacing(V2.ElasticBuffer, "__init__", renamed_keywords)},
        "ElasticBuffer.__init__: got an unexpected keyword argument 'num_max_tokens_per_rank'",
    ),
    (
        "fewer positional arguments",
        1,
        {"Buffer": replacing(V1.Buffer, "combine", lambda self, x: None)},
        "Buffer.combine: too many positional arguments",
    ),
    (
        "no number of SMs",
        1,
        {"Buffer": type("Buffer", (V1.Buffer,), {"num_sms": None})},
        "Buffer.num_sms is not a number",
    ),
    (
        "ids of another dtype",
        1,
        {"Buffer": V2.Buffer, "topk_idx_t": torch.int16},
        "topk_idx_t is torch.int16",
    ),
)


@pytest.mark.parametrize(
    ("generation", "attributes", "message"),
    [m[1:] for m in MISMATCHES],
    ids=[m[0] for m in MISMATCHES],
)
def test_other_interfaces_are_refused_before_a_call(
    monkeypatch: pytest.MonkeyPatch, generation: int, attributes: dict[str, object], message: str
) -> None:
    install(monkeypatch, __version__="3.0.0", **attributes)
    with pytest.raises(ConfigurationError) as exc_info:
        load_deepep(generation)
    assert exc_info.value.what == "deep_ep"
    assert message.removeprefix("version 1, ") in str(exc_info.value)
    assert "got version 3.0.0" in str(exc_info.value)


def test_methods_without_a_signature_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods of an extension module may have no signature, so that nothing can be compared."""
    buffer_class = replacing(V1.Buffer, "destroy", dict.fromkeys)
    monkeypatch.setattr(library_calls.inspect, "signature", _raise_value_error)
    install(monkeypatch, Buffer=buffer_class)
    assert load_deepep(1).Buffer is buffer_class
    assert not limits_tokens_by_qp_depth(buffer_class)


def _raise_value_error(function: object) -> None:
    raise ValueError(f"no signature found for {function}")


IMPORT_FAILURES = {
    "no extension module": ("import deep_ep._C\n", "No module named 'deep_ep._C'"),
    "an extension module of another release": (
        "import math as _C\n_C.init_jit('library')\n",
        "module 'math' has no attribute 'init_jit'",
    ),
    "no NCCL": ("import filecmp\nfilecmp.cmp(None, 'libnccl.so', shallow=False)\n", "NoneType"),
    "two NCCLs": ("assert False, 'Duplicate NCCL runtime'\n", "Duplicate NCCL runtime"),
    "no variable": ("import os\nos.environ['NO_SUCH_ROOT_DIR']\n", "NO_SUCH_ROOT_DIR"),
    "a wrong variable": ("int('on')\n", "invalid literal"),
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder on sys.path, without a loaded deep_ep."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "deep_ep"]:
        del sys.modules[name]


@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize(
    ("source", "message"), IMPORT_FAILURES.values(), ids=IMPORT_FAILURES.keys()
)
def test_a_half_installed_library_is_refused(
    site: Path, generation: int, source: str, message: str
) -> None:
    (site / "deep_ep").mkdir()
    (site / "deep_ep/__init__.py").write_text(source)
    with pytest.raises(ConfigurationError, match="need deep_ep") as exc_info:
        load_deepep(generation)
    assert message in str(exc_info.value)


# -------------------------------------------------------------------------------------- detection


def write_deepep_1(site: Path) -> Path:
    folder = site / "deep_ep"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise SystemExit('imported')\n")
    source = "class Buffer:\n    def dispatch(num_worst_tokens): explicitly_destroy\n"
    (folder / "buffer.py").write_text(source)
    (site / "deep_ep_cpp.cpython-311-x86_64-linux-gnu.so").write_bytes(b"\x7fELF")
    return folder


def write_deepep_2(site: Path) -> Path:
    folder = site / "deep_ep"
    (folder / "buffers").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise SystemExit('imported')\n__version__ = '2.1.0'\n")
    (folder / "buffers/legacy.py").write_text("class Buffer: ...\n")
    (folder / "buffers/elastic.py").write_text("class ElasticBuffer: ...\n")
    (folder / "_C.cpython-311-x86_64-linux-gnu.so").write_bytes(b"\x7fELF")
    return folder


def test_both_extension_modules_are_detected_without_an_import(site: Path) -> None:
    folder = write_deepep_2(site)
    assert find_package(DEEP_EP).folder == folder
    assert find_package(DEEP_EP).version == "2.1.0"
    (folder / "_C.cpython-311-x86_64-linux-gnu.so").unlink()
    reason = "unsupported deep_ep 2.1.0: no _C*.so and no buffer.py"
    assert find_package(DEEP_EP).reason == reason


def test_the_first_major_version_is_detected_by_its_extension_module(site: Path) -> None:
    folder = write_deepep_1(site)
    assert find_package(DEEP_EP).folder == folder
    (site / "deep_ep_cpp.cpython-311-x86_64-linux-gnu.so").unlink()
    assert "no ../deep_ep_cpp*" in find_package(DEEP_EP).reason


def test_a_package_of_the_same_name_is_refused(site: Path) -> None:
    (site / "deep_ep").mkdir()
    (site / "deep_ep/__init__.py").write_text("__version__ = '1.0.0'\n")
    machine = current_machine(["deep_ep"], device="cpu", probes=[DEEP_EP])
    assert "deep_ep" not in machine.packages
    reason = "unsupported deep_ep 1.0.0: no buffers/legacy.py and no buffer.py"
    assert dict(machine.others)["deep_ep"] == reason


HT, LL, ELASTIC = (f"DeepEP{name}PrepareAndFinalize" for name in ("HT", "LL", "V2"))


@pytest.mark.parametrize(
    ("write", "version", "enabled"),
    [(write_deepep_1, "", {HT, LL}), (write_deepep_2, "2.1.0", {HT, LL, ELASTIC})],
    ids=["1", "2"],
)
def test_doctor_names_the_parts_that_a_release_enables(
    site: Path, write: Callable[[Path], Path], version: str, enabled: set[str]
) -> None:
    write(site)
    (package,) = [p for p in _collect_packages() if p.name.startswith("deep_ep")]
    assert (package.name, package.present, package.version) == ("deep_ep", True, version)
    assert set(package.enables.split(", ")) == enabled


def test_doctor_tells_how_to_get_an_absent_library() -> None:
    (package,) = [p for p in _collect_packages() if p.name.startswith("deep_ep")]
    assert not package.present
    assert package.get == (
        "build DeepEP from https://github.com/deepseek-ai/DeepEP, not from a package index"
    )


# --------------------------------------------------------------------------------- each difference


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Use deterministic algorithms of torch, which fill new tensors by default."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_filled_tensors_are_refused_with_deepep_2(monkeypatch: pytest.MonkeyPatch) -> None:
    check_torch_settings(V1)
    with pytest.raises(UnsupportedError, match=r"got True, with .*need False with deep_ep 2"):
        check_torch_settings(V2)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    check_torch_settings(V2)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "part_class",
    [stand_in.HTOverGlooV2, stand_in.LLOverGlooV2, stand_in.V2OverGloo],
    ids=["HT", "LL", "V2"],
)
def test_calls_with_filled_tensors_are_refused_before_the_library(part_class: Any) -> None:
    part = part_class.__new__(part_class)
    part.library, part.manager = V2, SimpleNamespace(check_device=lambda device: None)
    x_TH = torch.zeros(1, 512, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="fill_uninitialized_memory"):
        part.send(x_TH, None, None, None, at_once=True)
    part.check_handle = lambda handle, kind: handle
    with pytest.raises(UnsupportedError, match="fill_uninitialized_memory"):
        part.finalize(x_TH, handle=None, reduce=None, out=x_TH)


def test_high_throughput_between_hosts_needs_a_later_release() -> None:
    check_dispatch_between_hosts(V1)
    check_dispatch_between_hosts(V2)
    release = SimpleNamespace(ElasticBuffer=object, __version__="2.0.0+b306af0")
    with pytest.raises(
        ConfigurationError, match=r"got version 2\.0\.0\+b306af0, need deep_ep 1\.2"
    ):
        check_dispatch_between_hosts(release)


@pytest.mark.parametrize("text", ["", "-1024", "0", "1e3"])
def test_the_depth_of_queue_pairs_is_a_number(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", text)
    with pytest.raises(ConfigurationError, match="NVSHMEM_QP_DEPTH: got"):
        read_nvshmem_qp_depth()


@pytest.mark.parametrize("results", [(1, 2, 3, 4, 5), None, [1, 2], 7], ids=str)
def test_other_results_are_refused(results: object) -> None:
    with pytest.raises(ConfigurationError, match=r"DeepEP's dispatch: got .*, need 6 results"):
        unpack(results, 6, "DeepEP's dispatch")


class ShortResults(V2.Buffer):  # type: ignore[name-defined, misc]
    """A Buffer whose methods return fewer results."""

    def get_dispatch_layout(self, topk_idx: object, num_experts: object) -> tuple[object, ...]:
        return None, None, None, None

    def combine(self, x: object, handle: object, config: object = None) -> object:
        return x


def test_fewer_results_of_a_buffer_are_refused() -> None:
    buffer = HighThroughputBuffer(ShortResults.__new__(ShortResults), None, None)
    tensor = torch.zeros(1, 1)
    with pytest.raises(ConfigurationError, match="get_dispatch_layout: got 4 results, need 5"):
        buffer.dispatch(tensor, tensor, tensor, num_experts=2, num_worst_tokens=1, is_async=False)
    with pytest.raises(ConfigurationError, match="combine: got Tensor, need 3 results"):
        buffer.combine(tensor, None)


@pytest.mark.parametrize("ranks", [2, 8, 16, 64, 160])
def test_the_arguments_of_buffers_satisfy_the_checks_of_deepep_2(ranks: int) -> None:
    group = SimpleNamespace(size=lambda: ranks)
    arguments = high_throughput_arguments(V2.Buffer, 7168, ranks, 24).buffer
    assert V2.Buffer.num_sms == 20  # The num_sms of one call must not change the default.
    V2.Buffer.num_sms = 24
    try:
        arguments.make_buffer(V2.Buffer, group)
    finally:
        V2.Buffer.num_sms = 20
    low_latency_arguments(V2.Buffer, 128, 7168, 320, ranks).make_buffer(V2.Buffer, group)


# ------------------------------------------------------------------------------------ the manager


def make_manager(rank: int, group: dist.ProcessGroup, release: ModuleType) -> Any:
    manager = make_manager_on_simulated_hosts(rank, group, nic=True)
    group_module.load_deepep = lambda generation: release
    return manager


def make_low_latency_buffers(
    rank: int, world: int, group: dist.ProcessGroup, depths: list[str], tokens: int
) -> str:
    """Make a low-latency buffer of DeepEP 2 with a depth of queue pairs for each rank."""
    os.environ["NVSHMEM_QP_DEPTH"] = depths[rank]  # noqa: TID251
    manager = make_manager(rank, group, V2)
    group_module.LowLatencyBuffer.self_test = lambda self, hidden, dtype: None
    return describe_outcome(lambda: manager.low_latency(tokens, 2048, 4))


@pytest.mark.parametrize(
    ("depths", "tokens", "message"),
    [
        (["1024", "1024"], 508, "made"),
        (["1024", "1024"], 512, "<= 511 tokens, or NVSHMEM_QP_DEPTH=1026 or more"),
        (["2048", "2048"], 512, "made"),
        (["1024", "2048"], 8, "NVSHMEM_QP_DEPTH 1024, 2048 by rank"),
    ],
    ids=["few tokens", "too many tokens", "deeper", "different"],
)
def test_low_latency_buffers_need_deep_queue_pairs(
    depths: list[str], tokens: int, message: str
) -> None:
    with RankPool(2, grace=10) as pool:
        reports = pool.run(make_low_latency_buffers, depths, tokens)
    assert all(message in report for report in reports), reports


def make_buffers_of_other_releases(rank: int, world: int, group: dist.ProcessGroup) -> list[str]:
    """Make buffers of releases whose Python code does not match their extension module."""

    def fail_to_initialize(self: object, group: object, **options: object) -> None:
        raise TypeError("__init__(): incompatible constructor arguments")

    def fail_to_find(num_ranks: int) -> None:
        raise AttributeError("module 'deep_ep._C' has no attribute 'Config'")

    old_release = ModuleType("deep_ep")
    vars(old_release).update(vars(V2), __version__="2.0.0")
    broken_constructor = ModuleType("deep_ep")
    vars(broken_constructor)["Buffer"] = replacing(V2.Buffer, "__init__", fail_to_initialize)
    broken_config = ModuleType("deep_ep")
    vars(broken_config)["Buffer"] = replacing(
        V2.Buffer, "get_dispatch_config", staticmethod(fail_to_find)
    )
    messages = []
    for release, kind, sizes in (
        (old_release, "high_throughput", (2048,)),
        (broken_constructor, "low_latency", (8, 2048, 4)),
        (broken_config, "high_throughput", (2048,)),
    ):
        manager = make_manager(rank, group, release)
        make = getattr(manager, kind)
        messages.append(describe_outcome(lambda make=make, sizes=sizes: make(*sizes)))
    return messages


def test_a_release_that_does_not_match_its_extension_module_is_refused() -> None:
    with RankPool(2, grace=10) as pool:
        reports = pool.run(make_buffers_of_other_releases)
    for old, constructor, config in reports:
        assert "ConfigurationError: deep_ep: got version 2.0.0, need deep_ep 1.2, or 2.1" in old
        assert (
            "ConfigurationError: DeepEP's low latency buffer: got __init__(): incom" in constructor
        )
        assert (
            "ConfigurationError: DeepEP's high throughput buffer: got module 'deep_ep._C'" in config
        )


def make_parts_of_two_releases(rank: int, world: int, group: dist.ProcessGroup) -> str:
    """Make the high-throughput part with DeepEP 1 on rank 0 and with DeepEP 2 on rank 1."""
    part_module.load_deepep = lambda generation: (V1, V2)[rank]
    group_module._resolve_nccl_group = lambda group: group
    manager = DeepEPGroup(group, timeout_s=5)
    problem = replace(BASE, parallel=Parallel(2, rank=rank))
    return describe_outcome(lambda: DeepEPHTPrepareAndFinalize(problem, manager))


def test_ranks_with_different_releases_are_refused() -> None:
    with RankPool(2, grace=10) as pool:
        reports = pool.run(make_parts_of_two_releases)
    assert all("deep_ep 1, 2.1.0 by rank" in report for report in reports), reports
