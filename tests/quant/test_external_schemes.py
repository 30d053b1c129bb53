"""Quantization schemes defined by other packages: declaration, loading, refusals, computation and
verification.
"""

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from third_party import ROOT, install, install_new, mk

from modular_kernel import load_experts
from modular_kernel.catalog import check
from modular_kernel.errors import BrokenPartError, ConfigurationError, DuplicatePartError
from modular_kernel.measure.roofline import expert_bytes
from modular_kernel.quant.quantized_weights import (
    dequantize,
    dequantize_weights,
    quantize_weights,
    weight_specs,
)
from modular_kernel.quant.scale_tiles import unpack_pairs
from modular_kernel.reference.weights import dequantize_matrix
from modular_kernel.spec import external_schemes, quantization
from modular_kernel.spec.external_schemes import (
    GROUP,
    ExternalScheme,
    ExternalSchemes,
    TableScheme,
)
from modular_kernel.spec.intermediate_split import split_intermediate
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights
from modular_kernel.testing.cases import pairwise
from modular_kernel.testing.cases.case import Case
from modular_kernel.testing.cases.quantized import list_declared_problems
from modular_kernel.testing.checkpoints.samples import write
from modular_kernel.testing.stress.fuzz import independent_reference
from modular_kernel.testing.verify.one_process import prove

FOUR_BITS = (0.0, *(2.0**-e for e in range(8)), *(-(2.0**-e) for e in range(7)))
# The values are neither ordered nor symmetric.
EIGHT_BITS = (3.0, *((code - 100) / 64 for code in range(1, 256)))
CASES = ({"tokens": 1},)
SCHEMES = (
    TableScheme("four_group", FOUR_BITS, "group", (32,), CASES),
    TableScheme("four_block", FOUR_BITS, "block", (48, 64), CASES),
    TableScheme("four_channel", FOUR_BITS, "channel", cases=CASES),
    TableScheme("eight_tensor", EIGHT_BITS, "tensor", cases=CASES),
    TableScheme("eight_group", EIGHT_BITS, "group", (40,), CASES),
)
NAMES = tuple(scheme.name for scheme in SCHEMES)


def clear_caches() -> None:
    quantization._parse.cache_clear()
    pairwise._list_all_axes.cache_clear()
    pairwise._build_problem_from_subrow.cache_clear()


@pytest.fixture
def _schemes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make SCHEMES available as if a package provided them."""
    schemes = ExternalSchemes(
        tuple(ExternalScheme(scheme, "them (them:SCHEMES)") for scheme in SCHEMES)
    )
    clear_caches()
    monkeypatch.setattr(external_schemes, "_load_all", lambda _names: schemes)
    yield
    clear_caches()


def make_problem(quant: str, **changes: Any) -> Problem:
    fields: dict[str, Any] = {"tokens": 7, "hidden": 136, "intermediate": 72, "experts": 3}
    return Problem(**{**fields, "top_k": 2, "quant": quant, **changes})


def make_random_weights(problem: Problem) -> ExpertWeights:
    generator = torch.Generator().manual_seed(0)
    w1, w2 = (
        torch.randn(problem.e, rows, depth, generator=generator)
        for rows, depth in (
            (problem.w1_rows, problem.hidden),
            (problem.hidden, problem.intermediate),
        )
    )
    return ExpertWeights(w1, w2)


# ---------------------------------------------------------------------------------- declaration


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Four-Bits"}, "name: got 'Four-Bits', need lowercase words"),
        ({"name": 4}, "name of a scheme: got 4, need a str"),
        ({"name": "a" * 61}, "got 61 characters, need at most 60"),
        ({"values": list(FOUR_BITS)}, "need a tuple of numbers"),
        ({"values": ("0",) * 16}, "need a tuple of numbers"),
        ({"values": FOUR_BITS[:15]}, "values: got 15, need 16 or 256 values"),
        ({"values": (0.0, 1e39, *FOUR_BITS[2:])}, "need values that are finite in float32"),
        ({"values": (0.0, float("nan"), *FOUR_BITS[2:])}, "need values that are finite"),
        ({"values": (0.5, *FOUR_BITS[1:])}, "need 0 and other values"),
        ({"values": (0.0,) * 16}, "need 0 and other values"),
        ({"granularity": "row"}, "granularity: got 'row', need one of tensor, channel, block"),
        ({"group": ()}, "group: got (), need (columns,) for granularity group"),
        ({"group": (33,)}, "group: got (33,), need (columns,) for granularity group, even"),
        ({"group": (True,)}, "need (columns,)"),
        ({"granularity": "block"}, "need (rows, columns) for granularity block"),
        ({"granularity": "tensor"}, "need () for granularity tensor"),
        ({"cases": ()}, "cases: got none, need at least one"),
        ({"cases": ("tokens",)}, "need a tuple of mappings from Problem fields"),
    ],
)
def test_invalid_schemes_are_refused(changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"name": "mine", "values": FOUR_BITS, "granularity": "group"}
    with pytest.raises(ConfigurationError) as exc_info:
        TableScheme(**{**fields, "group": (32,), "cases": CASES, **changes})
    assert message in str(exc_info.value)


def test_values_are_rounded_to_float32() -> None:
    values = (0.0, 0.1, *FOUR_BITS[2:])
    assert TableScheme("mine", values, "tensor", cases=CASES).values[1] == 0.10000000149011612


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant": "none"}, "need fields other than quant"),
        ({"depth": 3}, "need fields of Problem"),
        ({"top_k": 0}, "top_k: got 0"),
    ],
)
def test_cases_that_are_not_problems_are_refused(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = replace(SCHEMES[0], cases=(changes,))
    schemes = ExternalSchemes((ExternalScheme(scheme, "them"),))
    monkeypatch.setattr(external_schemes, "_load_all", lambda _names: schemes)
    with pytest.raises(ConfigurationError) as exc_info:
        list(list_declared_problems())
    assert message in str(exc_info.value)


# -------------------------------------------------------------------------------------- loading


OFFERED: dict[str, object] = {
    "first": (SCHEMES[0],),
    "second": (replace(SCHEMES[0], values=FOUR_BITS[::-1]),),
    "other": (SCHEMES[1],),
    "list": [SCHEMES[0]],
    "tuple_of_names": ("four_group",),
    "built_in": (replace(SCHEMES[0], name="mxfp4_w4a16"),),
}


@pytest.fixture
def _offered(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Make the entry points available that the test's parameter `names` lists."""
    names = request.node.callspec.params["names"]
    entries = [EntryPoint(name, f"{__name__}:OFFERED.{name}", GROUP) for name in names]
    monkeypatch.setattr(external_schemes, "entry_points", lambda *, group: entries)
    monkeypatch.setattr(EntryPoint, "load", lambda self: OFFERED[self.name])
    external_schemes._list_entries.cache_clear()
    external_schemes._load_all.cache_clear()
    clear_caches()
    yield
    external_schemes._list_entries.cache_clear()
    external_schemes._load_all.cache_clear()
    clear_caches()


@pytest.mark.usefixtures("_offered")
@pytest.mark.parametrize(
    ("names", "requested", "error", "message"),
    [
        (["first", "second"], "four_group", DuplicatePartError, "OFFERED.first"),
        (["first", "second"], "four_group", DuplicatePartError, "OFFERED.second"),
        (["other", "list"], "list", BrokenPartError, "need a tuple of TableScheme"),
        (
            ["other", "tuple_of_names"],
            "tuple_of_names",
            BrokenPartError,
            "need a tuple of TableScheme",
        ),
        (["other", "list"], "four_group", ConfigurationError, "Not usable: list from"),
        (["other"], "nothing", ConfigurationError, "four_block, "),
        (["other"], "four_block:group=64", ConfigurationError, "need no options"),
    ],
)
def test_unusable_schemes_raise_typed_errors(
    names: list[str], requested: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as exc_info:
        QuantScheme.parse(requested)
    assert type(exc_info.value) is error
    assert message in str(exc_info.value)
    if "other" in names:
        assert QuantScheme.parse("four_block").group == (48, 64)


@pytest.mark.usefixtures("_offered")
@pytest.mark.parametrize("names", [["built_in"]])
def test_schemes_with_a_built_in_name_are_not_used(
    names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="modular_kernel.parts"):
        (broken,) = quantization.load_external_schemes().broken
    assert "need another name: there is a built-in scheme with this one" in broken.error
    assert broken.error in caplog.text
    assert not QuantScheme.parse("mxfp4_w4a16").external


USE_OF_OWN_SCHEME = """
from modular_kernel import Problem
Problem(tokens=1, hidden=32, intermediate=32, experts=1, top_k=1, quant="my_scheme")
"""


@pytest.mark.parametrize("imported_by", ["the scheme", "the part"])
def test_a_package_that_uses_its_scheme_during_import_does_not_deadlock(
    imported_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_new(tmp_path, "scheme", "my_scheme")
    with (tmp_path / "my_scheme/scheme.py").open("a", encoding="utf-8") as file:
        file.write(USE_OF_OWN_SCHEME)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    start = time.monotonic()
    if imported_by == "the scheme":
        code, report = mk("check", "--quant", "my_scheme")
        assert code == 2
        assert report["error"]["type"] == "BrokenPartError"
        assert report["error"]["got"].startswith("ConfigurationError: quant: got my_scheme")
    else:
        # When the part's module is imported, SCHEMES exists already.
        code, report = mk("list")
        assert code == 0
        assert [scheme["scheme"]["name"] for scheme in report["schemes"]] == ["my_scheme"]
    assert time.monotonic() - start < 50, "waited for MK_IMPORT_TIMEOUT_S"


def test_mk_list_shows_external_and_broken_schemes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_new(tmp_path, "scheme", "my_scheme")
    install(tmp_path, "broken_scheme", "import no_such_library\n", group=GROUP, attribute="SCHEMES")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    code, report = mk("list")
    assert code == 0
    (scheme,) = report["schemes"]
    assert (scheme["scheme"]["name"], scheme["origin"]) == (
        "my_scheme",
        "my-scheme (my_scheme.scheme:SCHEMES)",
    )
    (broken,) = report["broken_schemes"]
    assert broken["error"] == "ModuleNotFoundError: No module named 'no_such_library'"
    sizes = ("--tokens", "4", "--hidden", "64", "--intermediate", "32", "--quant", "my_scheme")
    code, report = mk("check", *sizes)
    assert code == 0
    valid = {pair["experts"] for pair in report["pairs"] if pair["ok"]}
    assert valid == {"MySchemeExperts", "NaiveBatchedExperts", "TorchExperts"}
    command = [sys.executable, "-m", "modular_kernel", "list"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert "4-bit codes, one scale for each" in output
    assert "no_such_library" in output


# ---------------------------------------------------------------------------------- computation


@pytest.mark.usefixtures("_schemes")
@pytest.mark.parametrize("quant", NAMES)
def test_weights_are_rounded_to_the_nearest_values(quant: str) -> None:
    problem = make_problem(quant)
    weights = make_random_weights(problem)
    stored = quantize_weights(weights, problem)
    scheme = problem.scheme
    for name in ("w1", "w2"):
        w, scale = getattr(weights, name), getattr(stored, f"{name}_scale")
        rounded = dequantize_weights(stored, name, problem)
        codes = getattr(stored, name)
        codes = unpack_pairs(codes, 2) if scheme.packed else codes
        # Dequantizing the code of 1.0 gives the scale of each weight.
        ones = torch.full_like(codes, scheme.values.index(1.0))
        packed_ones = ones[..., ::2] * 0x11 if scheme.packed else ones
        scales = dequantize(packed_ones, scale, None, scheme)
        candidates = torch.tensor(sorted(set(scheme.values))) * scales[..., None]
        nearest = (w[..., None] - candidates).abs().amin(-1)
        torch.testing.assert_close((w - rounded).abs(), nearest, rtol=1e-5, atol=1e-6)
        max_value = max(map(abs, scheme.values))
        assert (w.abs() <= scales * max_value * (1 + 1e-6)).all()
        assert torch.equal(codes.unique(), codes.unique().clamp(max=len(scheme.values) - 1))


@pytest.mark.usefixtures("_schemes")
@pytest.mark.parametrize("quant", NAMES)
def test_all_references_decode_the_same_weights(quant: str) -> None:
    problem = make_problem(quant)
    specs = weight_specs(problem)
    generator = torch.Generator().manual_seed(1)
    # Use random codes, because quantization does not return all of them.
    stored = {
        name: torch.randint(0, 256, specs[name].shape, dtype=torch.uint8, generator=generator)
        for name in ("w1", "w2")
    }
    scales = {
        f"{name}_scale": torch.rand(specs[f"{name}_scale"].shape, generator=generator) + 0.5
        for name in ("w1", "w2")
    }
    weights = ExpertWeights(**stored, **scales)
    for name in ("w1", "w2"):
        dequantized = dequantize_weights(weights, name, problem).double()
        independent = independent_reference.dequantize_matrix(
            stored[name], scales[f"{name}_scale"], None, problem
        )
        torch.testing.assert_close(dequantized, independent, rtol=1e-6, atol=0)
        for expert in range(problem.e):
            exact = dequantize_matrix(weights, name, expert, problem, torch.float64)
            torch.testing.assert_close(dequantized[expert], exact, rtol=1e-6, atol=0)


@pytest.mark.usefixtures("_schemes")
def test_nan_makes_all_weights_with_its_scale_nan() -> None:
    problem = make_problem("four_group")
    weights = make_random_weights(problem)
    weights.w1[1, 3, 40] = torch.nan
    is_nan = dequantize_weights(quantize_weights(weights, problem), "w1", problem).isnan()
    assert is_nan[1, 3, 32:64].all()
    assert is_nan.sum() == 32


@pytest.mark.usefixtures("_schemes")
def test_sizes_follow_from_the_bits_of_codes_and_scales() -> None:
    four, eight = make_problem("four_group"), make_problem("eight_tensor")
    weights = (2 + 1) * four.hidden * four.intermediate
    assert expert_bytes(four, four.scheme) == weights * (4 + 16 / 32) / 8
    assert expert_bytes(eight, eight.scheme) == weights
    assert split_intermediate(96, 4, QuantScheme.parse("four_channel")).width % 2 == 0


@pytest.mark.usefixtures("_schemes")
def test_only_parts_that_declare_support_run_a_scheme() -> None:
    problem, machine = make_problem("four_group"), Machine("cuda", (9, 0), frozenset({"triton"}))
    assert check("MoEPrepareAndFinalizeNoEP", "TorchExperts", problem, machine).ok
    assert check("BatchedPrepareAndFinalize", "NaiveBatchedExperts", problem, machine).ok
    verdict = check("MoEPrepareAndFinalizeNoEP", "TritonExperts", problem, machine)
    assert [r.rule for r in verdict.rejections] == ["quant"]
    problem_with_odd_hidden = make_problem("four_group", hidden=33)
    verdict = check("MoEPrepareAndFinalizeNoEP", "TorchExperts", problem_with_odd_hidden, machine)
    assert [r.rule for r in verdict.rejections] == ["packing"]


@pytest.mark.usefixtures("_schemes")
@pytest.mark.parametrize("quant", NAMES)
@pytest.mark.parametrize(
    "pair",
    [
        ("MoEPrepareAndFinalizeNoEP", "TorchExperts"),
        ("BatchedPrepareAndFinalize", "NaiveBatchedExperts"),
    ],
    ids=" x ".join,
)
def test_torch_parts_pass_cases_of_each_scheme(quant: str, pair: tuple[str, str]) -> None:
    proof = prove(Case(*pair, make_problem(quant, bias=True), routing="skips"))
    assert proof.passed, str(proof)


@pytest.mark.usefixtures("_schemes")
@pytest.mark.parametrize("quant", ["four_group", "eight_group"])
def test_padding_of_a_share_is_zero(quant: str, tmp_path: Path) -> None:
    """In the table of 256 values, the code of the value 0 is not 0."""
    write(tmp_path, "mixtral", "bf16", intermediate=104)
    shares = [load_experts(tmp_path, 0, tp=(rank, 2), quantize=quant) for rank in range(2)]
    assert any(
        share.columns[1] - share.columns[0] < share.problem(1).intermediate for share in shares
    )
    for share in shares:
        problem, columns = share.problem(1), share.columns[1] - share.columns[0]
        w2 = dequantize_weights(share.weights, "w2", problem)
        assert not w2[..., columns:].any()
        gate, up = dequantize_weights(share.weights, "w1", problem).chunk(2, dim=1)
        assert not gate[:, columns:].any()
        assert not up[:, columns:].any()
        assert w2[..., :columns].any()


# --------------------------------------------------------------------------------- verification


@pytest.mark.usefixtures("_schemes")
def test_cases_of_a_part_include_the_schemes(monkeypatch: pytest.MonkeyPatch) -> None:
    axis = next(axis for axis in pairwise._list_all_axes() if axis.name == "quant")
    assert axis.values[-len(NAMES) :] == NAMES
    assert [p.quant for p in list_declared_problems()] == list(NAMES)
    assert all(p.tokens == 1 for p in list_declared_problems())


DEFECTS = {
    "another table": ("torch.tensor(VALUES", "torch.tensor(sorted(VALUES)"),
    "nibbles swapped": ("(packed & 15, packed >> 4)", "(packed >> 4, packed & 15)"),
    "scale of the next group": (
        "[expert].float()\n    scale =",
        "[expert].float().roll(1, 1)\n    scale =",
    ),
    "a scale of wider groups": ("repeat_interleave(GROUP", "repeat_interleave(2 * GROUP"),
}


@pytest.mark.parametrize("defect", ["none", *DEFECTS])
def test_smoke_cases_detect_defects_of_an_external_part(
    defect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_new(tmp_path, "scheme", "my_scheme")
    part = tmp_path / "my_scheme/part.py"
    source = part.read_text(encoding="utf-8")
    if defect != "none":
        old, new = DEFECTS[defect]
        assert old in source
        source = source.replace(old, new)
    part.write_text(source, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    pair = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "MySchemeExperts")
    code, report = mk("test", *pair)
    (row,) = report["pairs"]
    assert bool(row["failures"]) is (defect != "none")
    assert code == (1 if row["failures"] else 0)


@pytest.mark.usefixtures("_offered")
@pytest.mark.parametrize("names", [["first"]])
def test_schemes_of_a_module_being_imported_are_not_known(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[__name__]
    assert module.__spec__ is not None
    with monkeypatch.context() as patch:
        patch.setattr(module.__spec__, "_initializing", True, raising=False)
        patch.delattr(module, "OFFERED")
        assert external_schemes.external_schemes(()).usable == ()
    (scheme,) = external_schemes.external_schemes(()).usable
    assert scheme.name == SCHEMES[0].name
