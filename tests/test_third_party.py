"""Parts from another package: found, judged and proven like our own; a broken one harms nobody."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import module_source

from experts import NaiveBatchedExperts, TorchExperts
from modular_kernel.catalog import Catalog, Offer, build_catalog
from modular_kernel.errors import BrokenPartError, DuplicatePartError
from modular_kernel.machine import current_machine

ROOT = Path(__file__).resolve().parents[1]

# What a third party would write, one part of each kind: the tutorial's package.
THEIR_PARTS = module_source(ROOT / "docs/add-a-part.md", "my_moe/__init__.py")


def install(folder: Path, package: str, source: str) -> None:
    """What a wheel leaves in site-packages: a package, its metadata and its entry point."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(source, encoding="utf-8")
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 1.0\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    entry = f"[modular_kernel.parts]\n{package}_parts = {package}:PARTS\n"
    (info / "entry_points.txt").write_text(entry, encoding="utf-8")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that fresh interpreters find packages in, with a good and a broken one."""
    install(tmp_path, "my_moe", THEIR_PARTS)
    install(tmp_path, "broken_moe", "import no_such_vendor_library\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return tmp_path


def mk(*words: str) -> tuple[int, Any]:
    """Exit code and JSON of a fresh `mk`."""
    command = [sys.executable, "-m", "modular_kernel", *words, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.usefixtures("site")
def test_list_shows_them_and_what_is_broken() -> None:
    code, listed = mk("list")
    assert code == 0
    parts = {part["name"]: part for part in listed["parts"]}
    for name, kind in (("MyPrepare", "prepare_finalize"), ("MyExperts", "experts")):
        assert parts[name]["kind"] == kind
        assert parts[name]["origin"] == "my-moe (my_moe:PARTS)"
        assert parts[name]["available"]
    assert parts["MyExperts"]["requires"]["activations"] == ["silu"]
    assert "TorchExperts" in parts
    assert listed["broken"] == [
        {
            "name": "broken_moe_parts",
            "origin": "broken-moe (broken_moe:PARTS)",
            "error": "ModuleNotFoundError: No module named 'no_such_vendor_library'",
        }
    ]


@pytest.mark.usefixtures("site")
def test_check_judges_them_with_ours() -> None:
    code, judged = mk("check")
    assert code == 0
    pairs = {(pair["prepare_finalize"], pair["experts"]): pair for pair in judged["pairs"]}
    assert pairs["MyPrepare", "MyExperts"]["ok"]
    assert pairs["MyPrepare", "TorchExperts"]["ok"]
    assert pairs["MoEPrepareAndFinalizeNoEP", "MyExperts"]["ok"]
    refused = {
        ("MyPrepare", "NaiveBatchedExperts"): ["format", "reduce"],
        ("BatchedPrepareAndFinalize", "MyExperts"): ["format", "reduce"],
    }
    for pair, rules in refused.items():
        assert [rejection["rule"] for rejection in pairs[pair]["rejections"]] == rules
    theirs = ("--pf-type", "MyPrepare", "--experts-type", "MyExperts")
    code, judged = mk("check", *theirs, "--activation", "gelu", "--combine", "topk_weighted")
    assert code == 1
    assert [(r["rule"], r["parties"]) for r in judged["rejections"]] == [
        ("keep_topk", ["MyPrepare", "problem"]),
        ("keep_topk", ["MyExperts", "problem"]),
        ("activation", ["MyExperts", "problem"]),
    ]


@pytest.mark.usefixtures("site")
def test_the_harness_proves_them() -> None:
    theirs = ("--pf-type", "MyPrepare", "--experts-type", "MyExperts")
    code, proven = mk("test", *theirs, "--level", "full")
    (pair,) = proven["pairs"]
    assert pair["failures"] == []
    assert code == 0
    assert pair["cases"] >= 60
    assert pair["refused"] >= 1


def test_the_harness_does_not_prove_a_wrong_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = THEIR_PARTS.replace("gate, up = h.chunk", "up, gate = h.chunk")
    assert wrong != THEIR_PARTS
    install(tmp_path, "my_moe", wrong)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    theirs = ("--pf-type", "MyPrepare", "--experts-type", "MyExperts")
    code, proven = mk("test", *theirs, "--one")
    assert code == 1
    (failure,) = proven["pairs"][0]["failures"]
    assert failure["failures"][0].startswith("numeric: ")
    assert not any("raised" in text for text in failure["failures"])


def test_a_name_of_ours_claimed_by_another_package(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from experts import TorchExperts\n\n\nclass Twin(TorchExperts):\n    pass\n\n\n"
    source += 'Twin.__name__ = "TorchExperts"\nPARTS = (Twin,)\n'
    install(site, "twin_moe", source)
    _, listed = mk("list")
    ours, theirs = "modular-kernel (experts:COMPONENTS)", "twin-moe (twin_moe:PARTS)"
    assert listed["duplicates"] == {"TorchExperts": [ours, theirs]}
    pair = ("--pf-type", "MyPrepare", "--experts-type", "TorchExperts")
    code, refused = mk("check", *pair)
    assert code == 2
    assert refused["error"]["type"] == "DuplicatePartError"
    assert refused["error"]["got"] == f"{ours} and {theirs}"


# ----------------------------------------------------------------- the same, without entry points


def catalog_of(*offers: tuple[str, str, Callable[[], object]]) -> Catalog:
    return build_catalog(Offer(*offer) for offer in offers)


def failing(error: BaseException) -> Callable[[], object]:
    def load() -> object:
        raise error

    return load


def test_a_name_claimed_twice_is_refused_with_both_origins() -> None:
    twin = type("TorchExperts", (TorchExperts,), {})
    catalog = catalog_of(
        ("a", "first (a:PARTS)", lambda: (TorchExperts, NaiveBatchedExperts)),
        ("b", "second (b:PARTS)", lambda: (twin,)),
    )
    with pytest.raises(DuplicatePartError) as caught:
        catalog.experts("TorchExperts")
    assert caught.value.got == "first (a:PARTS) and second (b:PARTS)"
    assert catalog.duplicates() == {"TorchExperts": ("first (a:PARTS)", "second (b:PARTS)")}
    assert catalog.names("experts") == ("NaiveBatchedExperts",)
    assert catalog.experts("NaiveBatchedExperts") is NaiveBatchedExperts
    assert catalog.experts(twin) is twin


def test_a_broken_entry_point_is_listed_and_harms_no_other() -> None:
    catalog = catalog_of(
        ("missing", "one (one:PARTS)", failing(ModuleNotFoundError("No module named 'moon'"))),
        ("typo", "two (two:PARTS)", failing(SyntaxError("invalid syntax"))),
        ("exits", "three (three:PARTS)", failing(SystemExit("no licence"))),
        ("list", "four (four:PARTS)", lambda: [TorchExperts]),
        ("other", "five (five:PARTS)", lambda: (dict,)),
        ("good", "six (six:PARTS)", lambda: (TorchExperts,)),
    )
    assert [(b.name, b.origin) for b in catalog.broken] == [
        ("missing", "one (one:PARTS)"),
        ("typo", "two (two:PARTS)"),
        ("exits", "three (three:PARTS)"),
        ("list", "four (four:PARTS)"),
        ("other", "five (five:PARTS)"),
    ]
    assert catalog.broken[0].error == "ModuleNotFoundError: No module named 'moon'"
    assert "a tuple of classes" in catalog.broken[3].error
    assert "part dict" in catalog.broken[4].error
    assert catalog.names("experts") == ("TorchExperts",)
    with pytest.raises(BrokenPartError) as caught:
        catalog.experts("missing")
    assert caught.value.got == "ModuleNotFoundError: No module named 'moon'"


def test_a_package_that_is_not_there_is_absent() -> None:
    assert "no_such_package" not in current_machine({"no_such_package", "no_such.child"}).packages
