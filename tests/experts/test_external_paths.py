"""Paths of TritonExperts from other packages are found, preferred, listed and verified.

A path is one implementation of the GEMMs of TritonExperts.
"""

import logging
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from third_party import ROOT, install, install_new, mk

from experts.triton import external_paths
from experts.triton.aligned.aligned_path import AlignedPath
from experts.triton.external_paths import GROUP, load_external_paths
from experts.triton.gemv.gemv_path import GemvPath
from experts.triton.path import Path as LaunchPath
from experts.triton.paths import ALL_PATHS, BASE_PATH, BUILT_IN_PATHS, BY_NAME, NAMES
from modular_kernel.cli.scaffold import render

ORIGIN = "my-path (my_path:PATHS)"
USE_PROGRAM = """
import my_path  # the first import, as in its own tests: it imports experts, which looks for paths
from experts.triton.configs.select import choose_config, explain
from experts.triton.standard import TritonExperts, supported_paths
from experts.triton.paths import BASE_PATH, NAMES, ALL_PATHS
from modular_kernel.spec.problem import Problem

assert NAMES[-1] == "my_path" and ALL_PATHS[-1] is my_path.MyPath and BASE_PATH.name == "aligned"
layer = Problem(tokens=9, hidden=48, intermediate=32, experts=5, top_k=2)
gelu = Problem(tokens=9, hidden=48, intermediate=32, experts=5, top_k=2, activation="gelu")

def path_of(problem, tokens):
    return choose_config(problem, tokens, supported_paths(problem)).path

assert [path_of(layer, tokens) for tokens in (1, 4)] == ["my_path", "my_path"]
assert path_of(layer, 5) == path_of(gelu, 5) != "my_path"  # beyond its bound
assert path_of(gelu, 1) == "gemv" and "my_path" not in supported_paths(gelu)
text = explain(layer, 1, paths=supported_paths(layer))
assert "path: my_path" in text, text
assert "my_path from my-path (my_path:PATHS), untuned for 0 to 4 tokens" in text, text
text = explain(gelu, 1, paths=supported_paths(gelu))
assert "my_path from my-path (my_path:PATHS), not for this problem" in text, text
assert "another package" not in explain(layer, 1)  # for a part that has only the base path
from experts.triton.configs.select import on_device
from experts.triton.launch_config import Device

# The path also precedes launches that are borrowed from tuned layers.
wide = Problem(tokens=9, hidden=1536, intermediate=768, experts=64, top_k=4)
with on_device(Device.from_name("NVIDIA H200")):
    assert "from the nearest layer" in explain(wide, 5, paths=supported_paths(wide))
    paths = [path_of(wide, tokens) for tokens in (1, 4, 5, 6, 7)]
    assert paths[:2] == ["my_path"] * 2 and "my_path" not in paths[2:], paths
print("it is used")
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on PYTHONPATH with a package that `mk new` writes for a path."""
    install_new(tmp_path, "path", "my_path")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    return tmp_path


@pytest.mark.usefixtures("site")
def test_external_path_precedes_built_in_paths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The path that the program expects for small layers is that of a machine without a GPU.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = [sys.executable, "-c", USE_PROGRAM]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "it is used" in process.stdout, process.stderr[-3000:]


def test_external_paths_are_listed_and_a_broken_one_is_isolated(site: Path) -> None:
    group = {"group": GROUP, "attribute": "PATHS"}
    install(site, "broken_path", "import no_such_vendor_library\n", **group)
    source = render("path", "my_path")[Path("my_path/path.py")].replace('"my_path"', '"gemv"')
    install(site, "twin_path", f"{source}\n\nPATHS = (MyPath,)\n", **group)
    code, listing = mk("list")
    assert code == 0
    (part,) = [part for part in listing["parts"] if part["name"] == "TritonExperts"]
    origins = {path["name"]: path["origin"] for path in part["paths"] if not path["error"]}
    assert list(origins) == [*(path.name for path in BUILT_IN_PATHS), "my_path"]
    assert origins["my_path"] == ORIGIN
    errors = {path["origin"]: path["error"] for path in part["paths"] if path["error"]}
    assert errors == {
        "broken-path (broken_path:PATHS)": (
            "ModuleNotFoundError: No module named 'no_such_vendor_library'"
        ),
        "twin-path (twin_path:PATHS)": (
            "ConfigurationError: path: got 'gemv', need another name, because TritonExperts has a "
            "built-in path with this name"
        ),
    }
    torch_part = next(part for part in listing["parts"] if part["name"] == "TorchExperts")
    assert torch_part["paths"] == []


@pytest.mark.usefixtures("site")
def test_cases_of_mk_test_cover_combinations_of_an_external_path() -> None:
    pair = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TritonExperts")
    sizes = ("--tokens", "4", "--hidden", "48", "--intermediate", "32", "--experts", "5")
    code, report = mk("test", *pair, "--one", *sizes, "--top-k", "2")
    assert code == 0
    assert report["pairs"][0]["failures"] == []
    program = f"""
from modular_kernel.cli.machine_setup import prepare_host
prepare_host(quiet=True)
from modular_kernel.catalog import this_machine
from modular_kernel.testing.cases.handpicked import list_handpicked_cases
from modular_kernel.testing.cases.path_coverage import predict_combinations, reachable_combinations
pair, machine = {("MoEPrepareAndFinalizeNoEP", "TritonExperts")!r}, this_machine()
mine = {{c for c in reachable_combinations(*pair, machine) if c.path == "my_path"}}
assert len(mine) >= 7, mine
unquantized = [c for c in list_handpicked_cases(*pair, machine) if c.problem.quant == "none"]
entered = {{c: predict_combinations(c) for c in unquantized}}
print(mine - frozenset().union(*entered.values()))
several = [c for c in entered if c.problem.tokens > 1 and entered[c] & mine]
print(mine - frozenset().union(*(entered[c] for c in several)))
"""
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.stdout.split() == ["set()"] * 2, process.stdout + process.stderr[-3000:]


# ------------------------------------------------------------- entry points without packages


class OtherPath(AlignedPath):
    name = "other"


class Unnamed(AlignedPath):
    name = "no identifier"


class Unlaunched(AlignedPath):
    name, launch = "unlaunched", int


class PartialPath(LaunchPath):
    name = "partial"


class GemvPathWithTheSameName(GemvPath):
    name = "other"


OFFERED_PATHS = {
    "first": (OtherPath,),
    "second": (GemvPathWithTheSameName,),
    "list": [OtherPath],
    "strings": ("other",),
    "unnamed": (Unnamed,),
    "unlaunched": (Unlaunched,),
    "partial": (PartialPath,),
    "foreign": (dict,),
    "base": (AlignedPath,),
}


def load_offered_paths(
    monkeypatch: pytest.MonkeyPatch, *names: str
) -> external_paths.ExternalPaths:
    entries = [EntryPoint(name, f"{__name__}:OFFERED_PATHS.{name}", GROUP) for name in names]
    monkeypatch.setattr(external_paths, "entry_points", lambda *, group: entries)
    monkeypatch.setattr(EntryPoint, "load", lambda self: OFFERED_PATHS[self.name])
    return load_external_paths(["aligned"])


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("list", "need a tuple of classes"),
        ("strings", "need a tuple of classes"),
        ("unnamed", "path Unnamed: name: got 'no identifier', need an identifier"),
        ("unlaunched", "path Unlaunched: launch: got <class 'int'>, need a dataclass"),
        ("partial", "need definitions of all abstract methods of Path"),
        (
            "foreign",
            "path dict: got a class with other bases, need a subclass of experts",
        ),
        ("base", "need another name, because TritonExperts has a built-in path"),
    ],
)
def test_an_invalid_entry_point_is_refused_and_logged(
    name: str, error: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="modular_kernel.parts"):
        loaded = load_offered_paths(monkeypatch, "first", name)
    assert [offered.path for offered in loaded.usable] == [OtherPath]
    (broken,) = loaded.broken
    assert error in broken.error
    assert error in caplog.text


def test_a_path_name_of_two_packages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_offered_paths(monkeypatch, "second", "first")
    assert loaded.usable == ()
    assert len(loaded.broken) == 2
    assert all("first" in b.error and "second" in b.error for b in loaded.broken)


def test_lists_of_paths_agree() -> None:
    assert list(ALL_PATHS) == list(BY_NAME.values())
    assert list(NAMES) == list(BY_NAME) == [path.name for path in ALL_PATHS]
    assert ALL_PATHS[0] is BASE_PATH is BUILT_IN_PATHS[0]
    assert ALL_PATHS[:2] == BUILT_IN_PATHS[:2]
    assert NAMES[:2] == tuple(path.name for path in BUILT_IN_PATHS[:2])
