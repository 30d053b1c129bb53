"""Parts of other packages are listed, checked and verified like built-in parts.

A broken package does not affect other packages.
"""

import threading
from abc import ABCMeta
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from run_mk import run_mk
from third_party import install, mk, tutorial_parts

from experts import NaiveBatchedExperts, TorchExperts
from modular_kernel import catalog as catalogs
from modular_kernel.catalog import Catalog, PartSource, build_catalog
from modular_kernel.compatibility.rules import judge
from modular_kernel.errors import BrokenPartError, DuplicatePartError
from modular_kernel.machine import current_machine
from modular_kernel.spec.problem import Machine, Problem
from prepare_finalize import MoEPrepareAndFinalizeNoEP
from topk_reduce import TopKWeightAndReduceNoOp

# The source of the tutorial's package, which has one part of each kind.
THEIR_PARTS = tutorial_parts()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on PYTHONPATH with a working and a broken package."""
    install(tmp_path, "my_moe", THEIR_PARTS)
    install(tmp_path, "broken_moe", "import no_such_vendor_library\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return tmp_path


@pytest.mark.usefixtures("site")
def test_list_shows_working_and_broken_parts() -> None:
    code, catalog_record = mk("list")
    assert code == 0
    parts = {part["name"]: part for part in catalog_record["parts"]}
    for name, kind in (("MyPrepare", "prepare_finalize"), ("MyExperts", "experts")):
        assert parts[name]["kind"] == kind
        assert parts[name]["origin"] == "my-moe (my_moe:PARTS)"
        assert parts[name]["available"]
    assert parts["MyExperts"]["requires"]["activations"] == ["silu"]
    assert "TorchExperts" in parts
    assert catalog_record["broken"] == [
        {
            "name": "broken_moe_parts",
            "origin": "broken-moe (broken_moe:PARTS)",
            "error": "ModuleNotFoundError: No module named 'no_such_vendor_library'",
        }
    ]


@pytest.mark.usefixtures("site")
def test_check_judges_third_party_parts_like_ours() -> None:
    code, output = mk("check")
    assert code == 0
    pairs = {(pair["prepare_finalize"], pair["experts"]): pair for pair in output["pairs"]}
    assert pairs["MyPrepare", "MyExperts"]["ok"]
    assert pairs["MyPrepare", "TorchExperts"]["ok"]
    assert pairs["MoEPrepareAndFinalizeNoEP", "MyExperts"]["ok"]
    rules_by_pair = {
        ("MyPrepare", "NaiveBatchedExperts"): ["format", "reduce"],
        ("BatchedPrepareAndFinalize", "MyExperts"): ["format", "reduce"],
    }
    for pair, rules in rules_by_pair.items():
        assert [rejection["rule"] for rejection in pairs[pair]["rejections"]] == rules
    pair_options = ("--pf-type", "MyPrepare", "--experts-type", "MyExperts")
    code, output = mk("check", *pair_options, "--activation", "gelu", "--combine", "topk_weighted")
    assert code == 1
    assert [(r["rule"], r["parties"]) for r in output["rejections"]] == [
        ("keep_topk", ["MyPrepare", "problem"]),
        ("keep_topk", ["MyExperts", "problem"]),
        ("activation", ["MyExperts", "problem"]),
    ]


@pytest.mark.share(2)
@pytest.mark.usefixtures("site")
def test_the_harness_verifies_third_party_parts() -> None:
    pair_options = ("--pf-type", "MyPrepare", "--experts-type", "MyExperts")
    code, output = mk("test", *pair_options, "--level", "full")
    (pair,) = output["pairs"]
    assert pair["failures"] == []
    assert code == 0
    assert pair["cases"] >= 60
    assert pair["refused"] == 0  # no case is drawn that a rule refuses


def test_the_harness_rejects_a_wrong_third_party_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_parts = THEIR_PARTS.replace("gate, up = h.chunk", "up, gate = h.chunk")
    assert wrong_parts != THEIR_PARTS
    install(tmp_path, "my_moe", wrong_parts)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    pair_options = ("--pf-type", "MyPrepare", "--experts-type", "MyExperts")
    code, output = mk("test", *pair_options, "--one")
    assert code == 1
    (failure,) = output["pairs"][0]["failures"]
    assert failure["failures"][0].startswith("numeric: ")
    assert not any("raised" in message for message in failure["failures"])


def test_a_name_of_ours_in_another_package_is_refused(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from experts import TorchExperts\n\n\nclass Twin(TorchExperts):\n    pass\n\n\n"
    source += 'Twin.__name__ = "TorchExperts"\nPARTS = (Twin,)\n'
    install(site, "twin_moe", source)
    _, catalog_record = mk("list")
    ours, theirs = "modular-kernel (experts:COMPONENTS)", "twin-moe (twin_moe:PARTS)"
    assert catalog_record["duplicates"] == {"TorchExperts": [ours, theirs]}
    pair = ("--pf-type", "MyPrepare", "--experts-type", "TorchExperts")
    code, output = mk("check", *pair)
    assert code == 2
    assert output["error"]["type"] == "DuplicatePartError"
    assert output["error"]["got"] == f"{ours} and {theirs}"


# ------------------------------------------------------- catalogs that are not built from packages


def make_catalog(*sources: tuple[str, str, Callable[[], object]]) -> Catalog:
    """Build a catalog from the name, the origin and the loader of each source of parts."""
    return build_catalog(PartSource(*source) for source in sources)


def make_failing_loader(error: BaseException) -> Callable[[], object]:
    def load() -> object:
        raise error

    return load


def test_a_name_registered_twice_is_refused_with_both_origins() -> None:
    twin = type("TorchExperts", (TorchExperts,), {})
    catalog = make_catalog(
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


def test_a_broken_entry_point_is_listed_and_does_not_affect_others() -> None:
    catalog = make_catalog(
        (
            "missing",
            "one (one:PARTS)",
            make_failing_loader(ModuleNotFoundError("No module named 'moon'")),
        ),
        ("typo", "two (two:PARTS)", make_failing_loader(SyntaxError("invalid syntax"))),
        ("exits", "three (three:PARTS)", make_failing_loader(SystemExit("no license"))),
        ("list", "four (four:PARTS)", lambda: [TorchExperts]),
        ("other", "five (five:PARTS)", lambda: (dict,)),
        ("good", "six (six:PARTS)", lambda: (TorchExperts,)),
    )
    assert [(b.name, b.origin) for b in catalog.broken] == [
        ("missing", "one (one:PARTS)"),
        ("typo", "two (two:PARTS)"),
        ("exits", "three (three:PARTS)"),
        ("list", "four (four:PARTS)"),
        ("dict", "five (five:PARTS)"),
    ]
    assert catalog.broken[0].error == "ModuleNotFoundError: No module named 'moon'"
    assert "a tuple of classes" in catalog.broken[3].error
    assert "part dict" in catalog.broken[4].error
    assert catalog.names("experts") == ("TorchExperts",)
    with pytest.raises(BrokenPartError) as caught:
        catalog.experts("missing")
    assert caught.value.got == "ModuleNotFoundError: No module named 'moon'"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit("x")])
def test_an_import_that_calls_exit_does_not_end_the_program(error: BaseException) -> None:
    catalog = make_catalog(
        ("ends", "one (one:PARTS)", make_failing_loader(error)),
        ("good", "six (six:PARTS)", lambda: (TorchExperts,)),
    )
    assert catalog.names("experts") == ("TorchExperts",)
    (broken,) = catalog.broken
    assert type(error).__name__ in broken.error


def test_ctrl_c_during_the_import_of_our_parts_is_raised() -> None:
    source = PartSource(
        "experts", "ours", make_failing_loader(KeyboardInterrupt()), is_builtin=True
    )
    with pytest.raises(KeyboardInterrupt):
        build_catalog([source])


def test_an_import_that_hangs_is_reported_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MK_IMPORT_TIMEOUT_S", "0.2")
    release = threading.Event()
    try:
        catalog = make_catalog(
            ("hangs", "one (one:PARTS)", lambda: release.wait()),
            ("good", "six (six:PARTS)", lambda: (TorchExperts,)),
        )
    finally:
        release.set()
    assert catalog.names("experts") == ("TorchExperts",)
    (broken,) = catalog.broken
    assert broken.error.startswith("TimeoutError: did not end within 0.2 s (MK_IMPORT_TIMEOUT_S)")
    assert "threading.py:" in broken.error


class RaisingMeta(ABCMeta):
    """Metaclass of parts that raise when their requirements are read."""

    def __getattribute__(cls, name: str) -> object:
        if name == "requires":
            raise RuntimeError("not today")
        return super().__getattribute__(name)


def make_part_class(value: object) -> type:
    return type("Theirs", (TorchExperts,), {"requires": value})


@pytest.mark.parametrize(
    ("requires", "message"),
    [
        (7, "Theirs.requires: got 7, need an ExpertsRequirements"),
        (None, "Theirs.requires: got None"),
        (MoEPrepareAndFinalizeNoEP.requires, "need an ExpertsRequirements"),
        (replace(TorchExperts.requires, packages=7), "Theirs.requires.packages: got 7"),  # type: ignore[arg-type]
        (replace(TorchExperts.requires, packages="torch"), "packages: got 'torch'"),  # type: ignore[arg-type]
        (replace(TorchExperts.requires, dtypes=frozenset({"x"})), "requires.dtypes"),  # type: ignore[arg-type]
        (replace(TorchExperts.requires, top_k=(1, 2, 3)), "requires.top_k: got tuple"),  # type: ignore[arg-type]
        (replace(TorchExperts.requires, hidden_multiple=True), "hidden_multiple: got True"),
        (replace(TorchExperts.requires, intermediate_multiple=0), "intermediate_multiple: got 0"),
        (replace(TorchExperts.requires, min_arch=9.0), "requires.min_arch: got 9.0"),  # type: ignore[arg-type]
    ],
)
def test_a_part_with_invalid_declarations_is_unavailable_and_does_not_affect_others(
    requires: object, message: str
) -> None:
    catalog = make_catalog(
        ("both", "one (one:PARTS)", lambda: (make_part_class(requires), TorchExperts))
    )
    assert catalog.names("experts") == ("TorchExperts",)
    (broken,) = catalog.broken
    assert broken.name == "Theirs"
    assert message in broken.error


def test_a_part_whose_declarations_raise_is_unavailable() -> None:
    raising_part = RaisingMeta("Raising", (NaiveBatchedExperts,), {})
    misnamed_part = type("\x1b[31mred", (TorchExperts,), {})
    misdeclared_part = type("Kind", (TopKWeightAndReduceNoOp,), {"kind": "noop"})
    parts = (raising_part, misnamed_part, misdeclared_part, TorchExperts)
    catalog = make_catalog(("all", "one (one:PARTS)", lambda: parts))
    assert [part.name for part in catalog.parts] == ["TorchExperts"]
    assert [b.name for b in catalog.broken] == ["Raising", "all", "Kind"]
    assert "\x1b" not in "".join(b.error for b in catalog.broken)
    assert catalog.broken[0].error == "RuntimeError: not today"


@pytest.mark.parametrize("found", [ValueError("no"), 7, ("words",)])
def test_rejections_that_raise_refuse_only_that_part(found: object) -> None:
    def reject(cls: type, problem: Problem, machine: Machine) -> object:
        if isinstance(found, Exception):
            raise found
        return found

    theirs = type("Theirs", (TorchExperts,), {"extra_rejections": classmethod(reject)})
    problem = Problem(tokens=1, hidden=32, intermediate=32, experts=2, top_k=1)
    (rejection,) = judge(MoEPrepareAndFinalizeNoEP, theirs, problem, current_machine()).rejections
    assert rejection.rule == "extra_rejections"
    assert rejection.parties == ("Theirs",)


# Packages whose import hangs, exits or fails, or whose part is invalid.
HOSTILE = {
    "hanging_moe": "import time\ntime.sleep(3600)\n",
    "interrupting_moe": "raise KeyboardInterrupt\n",
    "leaving_moe": "raise SystemExit(1)\n",
    "painting_moe": "raise ImportError('\\x1b[2J\\u202egone')\n",
    "seven_moe": "from experts import TorchExperts\n\n"
    "class Seven(TorchExperts):\n    requires = 7\n\nPARTS = (Seven,)\n",
}


@pytest.mark.share(2)
def test_hostile_packages_break_no_verb(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, source in HOSTILE.items():
        install(site, package, source)
    monkeypatch.setenv("MK_IMPORT_TIMEOUT_S", "2")
    code, catalog_record = mk("list")
    assert code == 0
    assert {"TorchExperts", "MyExperts"} <= {part["name"] for part in catalog_record["parts"]}
    broken = {b["origin"].split("-")[0]: b for b in catalog_record["broken"]}
    assert set(broken) == {"broken", "hanging", "interrupting", "leaving", "painting", "seven"}
    assert "hanging_moe/__init__.py:2" in broken["hanging"]["error"]
    assert broken["painting"]["error"] == "ImportError: \\x1b[2J\\u202egone"
    assert broken["seven"]["name"] == "Seven"
    pair = ("--pf-type", "MyPrepare", "--experts-type", "MyExperts")
    assert mk("check", *pair)[0] == 0
    assert mk("test", *pair, "--one")[0] == 0


def test_missing_packages_are_not_listed_for_the_machine() -> None:
    assert "no_such_package" not in current_machine({"no_such_package", "no_such.child"}).packages


def test_every_verb_states_why_no_part_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A source checkout that is not installed has no entry points."""
    monkeypatch.setattr(catalogs, "load_catalog", lambda: build_catalog([]))
    pair = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TorchExperts")
    for args in (["list"], ["check"], ["check", *pair], ["test", *pair]):
        code, stdout, stderr = run_mk(capsys, *args)[:3]
        assert code == 2, args
        message = " ".join((stdout + stderr).split())
        assert "got no entry point of modular_kernel.parts" in message
        assert "pip install -e ." in message
