"""Tests of tools/peer_suites.py, which extracts cases from the tests of other projects and
attributes mismatches to our part or to their reference.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from modular_kernel.errors import CorruptionError, ShapeError
from modular_kernel.ops.route import route_ref

# The tool enables the interpreter of its process.
pytestmark = pytest.mark.cpu

TOOLS = Path(__file__).parents[2] / "tools"
FAKE_TEST_FILE = """
import their_package
from their_package import SiluAndMul

BIG = their_package.sizes()
SIZES = [(3, 64, 32), (2, 32, 64)]
TOP_KS = [1, 2]

@their_package.decorated
def torch_moe(a, w1, w2, score, topk: their_package.Count):
    weight, ids = torch.softmax(score, -1, dtype=torch.float32).topk(topk)
    out = torch.zeros(len(a), w2.shape[1])
    for t in range(len(a)):
        for k in range(topk):
            gate, up = (w1[ids[t, k]].float() @ a[t].float()).chunk(2)
            h = F.silu(gate) * up * FACTOR
            out[t] += weight[t, k] * (w2[ids[t, k]].float() @ h)
    return out.to(a.dtype)

def pick(logits, topk):
    return torch.softmax(logits.float(), -1).topk(topk)

def per_row(x):
    scale = x.float().abs().amax(1, keepdim=True) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale

@pytest.mark.parametrize("m,k,n", SIZES)
@pytest.mark.parametrize("e", [4])
@pytest.mark.parametrize(("topk",), [(k,) for k in TOP_KS])
@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, id="b"), torch.float32])
def test_moe(m, k, n, e, topk, dtype):
    assert False, "never executed"

@pytest.mark.parametrize("m", BIG)
def test_big(m):
    pass

class TestRows:
    M = [1, 5]
    def test_all(self):
        widths = [32, 48]
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("peer_suites", TOOLS / "peer_suites.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tool: ModuleType, tmp_path: Path) -> Path:
    (tmp_path / "test_fake.py").write_text(FAKE_TEST_FILE)
    return tmp_path


def make_layer_suite(checkout: Path, factor: float = 1.0) -> Any:
    """Return the suite of the fake project's layers. Its reference is wrong unless `factor` is
    1.
    """
    from peer_suites_lib.checkout import Source
    from peer_suites_lib.layers import Layer, LayerCheck
    from peer_suites_lib.outcomes import Suite, Tolerance

    source = Source(checkout, "test_fake.py", {"FACTOR": factor})
    reference: Any = source.function("torch_moe")
    check = LayerCheck(
        lambda layer, inputs: reference(
            inputs.x, inputs.weights.w1, inputs.weights.w2, inputs.score, layer.top_k
        ),
        Tolerance(5e-2, 0.1),
    )

    def check_case(parameters: Any) -> Any:
        return check(
            Layer(
                parameters["m"],
                parameters["k"],
                parameters["n"],
                parameters["e"],
                parameters["topk"],
                parameters["dtype"],
                scale=(1, 0.3, 0.3),
            )
        )

    return Suite("fake", "layers", lambda: source.grid("test_moe"), check_case)


def test_grids_and_functions_are_extracted_without_importing(checkout: Path) -> None:
    from peer_suites_lib.checkout import Source, UnreadableError

    source = Source(checkout, "test_fake.py", {"FACTOR": 1.0})
    grid = list(source.grid("test_moe"))
    assert len(grid) == 8
    assert {tuple(parameters[key] for key in ("m", "k", "n")) for parameters in grid} == {
        (3, 64, 32),
        (2, 32, 64),
    }
    assert {parameters["topk"] for parameters in grid} == {1, 2}
    assert {parameters["dtype"] for parameters in grid} == {torch.bfloat16, torch.float32}
    rows = list(source.class_grid("TestRows", "M", "widths"))
    assert rows == [{"M": m, "widths": w} for m in (1, 5) for w in (32, 48)]
    for read in (lambda: list(source.grid("test_big")), lambda: source.function("absent")):
        with pytest.raises(UnreadableError):
            read()


def test_correct_parts_agree(tool: ModuleType, checkout: Path) -> None:
    tally = tool.run_suite(make_layer_suite(checkout), 100)
    assert tally.outcomes == {"agree": 8}
    assert not tally.failed
    assert set(tally.compared) == {
        "TorchExperts", "NaiveBatchedExperts", "TritonExperts", "GroupedGemmExperts",
        "BatchedTritonExperts",
    }  # fmt: skip


def test_wrong_reference_is_attributed_to_the_other_project(
    tool: ModuleType, checkout: Path
) -> None:
    tally = tool.run_suite(make_layer_suite(checkout, factor=1.5), 100)
    assert tally.outcomes == {"mismatch: theirs": 8}
    assert not tally.failed


@pytest.mark.parametrize("defective_part", ["TorchExperts", "GroupedGemmExperts"])
def test_defective_part_is_attributed_to_this_project(
    tool: ModuleType,
    checkout: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    defective_part: str,
) -> None:
    from peer_suites_lib import layers

    original = layers.make_kernel

    def make_kernel_with_defect(prepare: str, experts: str, problem: Any, **options: Any) -> Any:
        kernel = original(prepare, experts, problem, **options)
        return (lambda *inputs: kernel(*inputs) * 1.2) if experts == defective_part else kernel

    monkeypatch.setattr(layers, "make_kernel", make_kernel_with_defect)
    monkeypatch.setattr(tool, "PROJECTS", {"fake": lambda root: [make_layer_suite(root)]})
    record = tmp_path / "record.json"
    assert tool.main(["--fake", str(checkout), "--out", str(record)]) == 1
    saved = json.loads(record.read_text())
    assert saved["outcomes"] == {"mismatch: ours": 8}
    assert all(defective_part in why for why in saved["suites"]["fake layers"]["reasons"])


def test_every_case_is_counted(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peer_suites_lib.outcomes import (
        OUTCOMES,
        CaseOutcome,
        MissingError,
        SkippedError,
        Suite,
        call_reference,
    )

    def check(parameters: Any) -> CaseOutcome:
        return parameters["what"]()

    def make_raiser(error: Exception) -> Any:
        def raise_error() -> CaseOutcome:
            raise error

        return raise_error

    def reference() -> CaseOutcome:
        call_reference(make_raiser(ZeroDivisionError("theirs")))
        raise AssertionError

    behaviors = [
        lambda: CaseOutcome("agree", key=1), lambda: CaseOutcome("agree", key=1),
        make_raiser(ShapeError("x", got="(1,)", need="(2,)")), make_raiser(MissingError("a thing")),
        make_raiser(SkippedError("too large")), reference, make_raiser(IndexError("ours")),
    ]  # fmt: skip
    suite = Suite(
        "fake", "all", lambda: iter([{"what": behavior} for behavior in behaviors]), check
    )
    larger_suite = Suite("fake", "many", lambda: iter([{"what": behaviors[3]}] * 9), check)
    monkeypatch.setattr(tool, "PROJECTS", {"fake": lambda root: [suite, larger_suite]})
    record = tmp_path / "record.json"
    assert tool.main(["--fake", "x", "--max-cases", "7", "--out", str(record)]) == 1
    saved = json.loads(record.read_text())
    assert saved["suites"]["fake all"]["outcomes"] == {
        "agree": 1, "the same after shrinking": 1, "refused": 1, "feature missing": 1,
        "skipped by their test": 1, "their reference raises": 1, "raw exception": 1,
    }  # fmt: skip
    assert saved["suites"]["fake many"]["outcomes"] == {
        "feature missing": 7, "left out of the sample": 2,
    }  # fmt: skip
    assert saved["cases"] == len(behaviors) + 9
    assert set(saved["outcomes"]) <= set(OUTCOMES)
    # If a suite runs again, its new results replace the old ones.
    assert tool.main(["--fake", "x", "--only", "many", "--out", str(record)]) == 0
    saved = json.loads(record.read_text())
    assert saved["cases"] == len(behaviors) + 9
    assert saved["suites"]["fake many"]["outcomes"] == {"feature missing": 9}
    merged_record = tmp_path / "other.json"
    assert (
        tool.main(["--add", str(record), "--out", str(merged_record), "--commits", "fake=abc"]) == 0
    )
    assert json.loads(merged_record.read_text()) == saved | {"checkouts": {"fake": "abc"}}


def test_part_as_wrong_as_the_reference_is_attributed_to_this_project(
    tool: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peer_suites_lib import layers

    original = layers.make_kernel
    monkeypatch.setattr(
        layers,
        "make_kernel",
        lambda *a, **options: lambda *call: original(*a, **options)(*call) * 1.5,
    )
    tally = tool.run_suite(make_layer_suite(checkout, factor=1.5), 100)
    assert tally.outcomes == {"mismatch: ours": 8}


def test_corrupted_memory_is_a_raw_exception(
    tool: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peer_suites_lib import layers

    def raise_corruption_error(*inputs: Any, **options: Any) -> Any:
        raise CorruptionError("a kernel wrote behind its output")

    monkeypatch.setattr(layers, "make_kernel", raise_corruption_error)
    assert tool.run_suite(make_layer_suite(checkout), 100).outcomes == {"raw exception": 8}


def test_failure_of_a_repeated_case_is_reported(tool: ModuleType) -> None:
    from peer_suites_lib.outcomes import CaseOutcome, Suite

    outcomes = [CaseOutcome(outcome, key=1) for outcome in ("agree", "mismatch: ours", "agree")]
    grid = [{"what": outcome} for outcome in outcomes]
    suite = Suite("fake", "again", lambda: iter(grid), lambda parameters: parameters["what"])
    tally = tool.run_suite(suite, 100)
    assert tally.outcomes == {"agree": 1, "mismatch: ours": 1, "the same after shrinking": 1}
    assert tally.failed


def test_router_mismatches_are_attributed(
    tool: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peer_suites_lib import routers
    from peer_suites_lib.checkout import Source

    from modular_kernel.spec.router import RouterSpec

    pick: Any = Source(checkout, "test_fake.py").function("pick")
    case = routers.Router(RouterSpec(2), experts=6, tokens=5)
    assert routers.check_router(case, lambda x, _: pick(x, 2)).outcome == "agree"
    negated = routers.check_router(case, lambda x, _: pick(-x, 2))
    assert negated.outcome == "mismatch: theirs"
    scaled = routers.check_router(case, lambda x, _: (pick(x, 2)[0] * 1.1, pick(x, 2)[1]))
    assert scaled.outcome == "mismatch: theirs"

    def route_flipped(logits: torch.Tensor, *others: Any) -> None:
        route_ref(logits.flip(1), *others)

    def route_to_nan(*inputs: Any) -> None:
        route_ref(*inputs)
        inputs[-1].routing.topk_weights_TK[0] = torch.nan

    for defective_route in (route_flipped, route_to_nan):
        monkeypatch.setattr(routers, "route_ref", defective_route)
        assert routers.check_router(case, lambda x, _: pick(x, 2)).outcome == "mismatch: ours"


def test_quantizer_mismatches_are_attributed(
    tool: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peer_suites_lib import row_operations
    from peer_suites_lib.checkout import Source

    per_row: Any = Source(checkout, "test_fake.py").function("per_row")
    x = row_operations.draw_normal_rows(3, 40, torch.bfloat16)
    assert row_operations.check_quantizer(x, "fp8_w8a8_channel", per_row, "").outcome == "agree"

    def per_row_with_wrong_scale(rows: torch.Tensor) -> Any:
        q, scale = per_row(rows)
        return q, scale * 1.1

    result = row_operations.check_quantizer(x, "fp8_w8a8_channel", per_row_with_wrong_scale, "")
    assert result.outcome == "mismatch: theirs"
    original = row_operations.quantize_values
    monkeypatch.setattr(
        row_operations,
        "quantize_values",
        lambda *inputs: (original(*inputs)[0], original(*inputs)[1] * 1.1),
    )
    result = row_operations.check_quantizer(x, "fp8_w8a8_channel", per_row, "")
    assert result.outcome == "mismatch: ours"


@pytest.mark.parametrize("quant", ["fp8_w8a8_channel", "fp8_w8a8_tensor", "int8_w8a8_channel"])
def test_too_large_scale_is_attributed_to_this_project(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, quant: str
) -> None:
    """The codes are as close to the values as with a smaller scale, but the quantization steps are
    too large.
    """
    from peer_suites_lib import row_operations

    original = row_operations.quantize_values

    def reference(rows: torch.Tensor) -> Any:
        return original(rows.float(), row_operations.QuantScheme.parse(quant))

    x = row_operations.draw_normal_rows(3, 40, torch.bfloat16)
    assert row_operations.check_quantizer(x, quant, reference, "").outcome == "agree"
    monkeypatch.setattr(
        row_operations,
        "quantize_values",
        lambda x, scheme: original(x, scheme, original(x, scheme)[1] * 1.7),
    )
    assert row_operations.check_quantizer(x, quant, reference, "").outcome == "mismatch: ours"


def test_compare_with_exact_attributes_differences(tool: ModuleType) -> None:
    from peer_suites_lib.outcomes import Tolerance, compare_with_exact

    exact = torch.linspace(1, 2, 50, dtype=torch.float64)
    near, far = exact * 1.001, exact * 1.03
    tight, wide = Tolerance(0.0, 1e-2), Tolerance(0.0, 1e-1)
    assert compare_with_exact(near, far, exact, tight, 2e-3).outcome == "mismatch: theirs"
    assert compare_with_exact(far, near, exact, tight, 5e-2).outcome == "mismatch: roundings"
    assert compare_with_exact(far, near, exact, tight, 2e-3).outcome == "mismatch: ours"
    # A tolerance that exceeds the differences hides nothing.
    assert compare_with_exact(far, near, exact, wide, 2e-3).outcome == "mismatch: ours"
    assert compare_with_exact(far, far, exact, tight, 2e-3).outcome == "mismatch: ours"
    for theirs in (near, near * torch.nan, near * 2):
        assert (
            compare_with_exact(near * torch.nan, theirs, exact, wide, 1.0).outcome
            == "mismatch: ours"
        )
        assert compare_with_exact(far, theirs, exact, wide, 2e-3).outcome == "mismatch: ours"
    assert (
        compare_with_exact(near, near * torch.nan, exact, wide, 2e-3).outcome == "mismatch: theirs"
    )


def test_alignment_mismatches_are_attributed(tool: ModuleType) -> None:
    from peer_suites_lib import row_operations

    ids = torch.tensor([[0, 1], [1, 3]], dtype=torch.int32)
    right = torch.tensor([0, 4, 2, 1, 3, 4]), torch.tensor([0, 1, 3]), torch.tensor([6])
    assert row_operations.check_align(ids, 2, 4, lambda _: right, "").outcome == "agree"
    for wrong in (
        (torch.tensor([0, 4, 3, 1, 2, 4]), *right[1:]),
        (right[0], torch.tensor([0, 1, 2]), right[2]),
        (*right[:2], torch.tensor([8])),
    ):
        result = row_operations.check_align(ids, 2, 4, lambda _, wrong=wrong: wrong, "")
        assert result.outcome == "mismatch: theirs"
