"""tools/peer_suites.py: cases extracted from other projects' tests, attributed mismatches."""

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


def fake_layer_suite(checkout: Path, factor: float = 1.0) -> Any:
    """Return the suite of the fake project's layers, whose reference is wrong unless factor is
    1.
    """
    from peer_suites_lib.checkout import Source
    from peer_suites_lib.layers import Layer, LayerCheck
    from peer_suites_lib.outcomes import Suite, Tolerance

    source = Source(checkout, "test_fake.py", {"FACTOR": factor})
    reference: Any = source.function("torch_moe")
    check = LayerCheck(
        lambda layer, given: reference(
            given.x, given.weights.w1, given.weights.w2, given.score, layer.top_k
        ),
        Tolerance(5e-2, 0.1),
    )

    def case(p: Any) -> Any:
        return check(
            Layer(p["m"], p["k"], p["n"], p["e"], p["topk"], p["dtype"], scale=(1, 0.3, 0.3))
        )

    return Suite("fake", "layers", lambda: source.grid("test_moe"), case)


def test_grids_and_functions_are_extracted_without_importing(checkout: Path) -> None:
    from peer_suites_lib.checkout import Source, UnreadableError

    source = Source(checkout, "test_fake.py", {"FACTOR": 1.0})
    grid = list(source.grid("test_moe"))
    assert len(grid) == 8
    assert {tuple(p[key] for key in ("m", "k", "n")) for p in grid} == {(3, 64, 32), (2, 32, 64)}
    assert {p["topk"] for p in grid} == {1, 2}
    assert {p["dtype"] for p in grid} == {torch.bfloat16, torch.float32}
    rows = list(source.class_grid("TestRows", "M", "widths"))
    assert rows == [{"M": m, "widths": w} for m in (1, 5) for w in (32, 48)]
    for what in (lambda: list(source.grid("test_big")), lambda: source.function("absent")):
        with pytest.raises(UnreadableError):
            what()


def test_agreeing_parts(tool: ModuleType, checkout: Path) -> None:
    tally = tool.run_suite(fake_layer_suite(checkout), 100)
    assert tally.outcomes == {"agree": 8}
    assert not tally.failed
    assert set(tally.compared) == {
        "TorchExperts", "NaiveBatchedExperts", "TritonExperts", "GroupedGemmExperts",
        "BatchedTritonExperts",
    }  # fmt: skip


def test_wrong_reference_is_attributed_to_them(tool: ModuleType, checkout: Path) -> None:
    tally = tool.run_suite(fake_layer_suite(checkout, factor=1.5), 100)
    assert tally.outcomes == {"mismatch: theirs": 8}
    assert not tally.failed


@pytest.mark.parametrize("broken", ["TorchExperts", "GroupedGemmExperts"])
def test_defective_part_is_attributed_to_us(
    tool: ModuleType,
    checkout: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
) -> None:
    from peer_suites_lib import layers

    sound = layers.make_kernel

    def kernel_of(prepare: str, experts: str, problem: Any, **options: Any) -> Any:
        kernel = sound(prepare, experts, problem, **options)
        return (lambda *given: kernel(*given) * 1.2) if experts == broken else kernel

    monkeypatch.setattr(layers, "make_kernel", kernel_of)
    monkeypatch.setattr(tool, "PROJECTS", {"fake": lambda root: [fake_layer_suite(root)]})
    record = tmp_path / "record.json"
    assert tool.main(["--fake", str(checkout), "--out", str(record)]) == 1
    kept = json.loads(record.read_text())
    assert kept["outcomes"] == {"mismatch: ours": 8}
    assert all(broken in why for why in kept["suites"]["fake layers"]["reasons"])


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

    def check(p: Any) -> CaseOutcome:
        return p["what"]()

    def raising(error: Exception) -> Any:
        def what() -> CaseOutcome:
            raise error

        return what

    def reference() -> CaseOutcome:
        call_reference(raising(ZeroDivisionError("theirs")))
        raise AssertionError

    kinds = [
        lambda: CaseOutcome("agree", key=1), lambda: CaseOutcome("agree", key=1),
        raising(ShapeError("x", got="(1,)", need="(2,)")), raising(MissingError("a thing")),
        raising(SkippedError("too large")), reference, raising(IndexError("ours")),
    ]  # fmt: skip
    suite = Suite("fake", "all", lambda: iter([{"what": kind} for kind in kinds]), check)
    many = Suite("fake", "many", lambda: iter([{"what": kinds[3]}] * 9), check)
    monkeypatch.setattr(tool, "PROJECTS", {"fake": lambda root: [suite, many]})
    record = tmp_path / "record.json"
    assert tool.main(["--fake", "x", "--max-cases", "7", "--out", str(record)]) == 1
    kept = json.loads(record.read_text())
    assert kept["suites"]["fake all"]["outcomes"] == {
        "agree": 1, "the same after shrinking": 1, "refused": 1, "feature missing": 1,
        "skipped by their test": 1, "their reference raises": 1, "raw exception": 1,
    }  # fmt: skip
    assert kept["suites"]["fake many"]["outcomes"] == {
        "feature missing": 7, "left out of the sample": 2,
    }  # fmt: skip
    assert kept["cases"] == len(kinds) + 9
    assert set(kept["outcomes"]) <= set(OUTCOMES)
    # A suite that is run again takes its own place.
    assert tool.main(["--fake", "x", "--only", "many", "--out", str(record)]) == 0
    kept = json.loads(record.read_text())
    assert kept["cases"] == len(kinds) + 9
    assert kept["suites"]["fake many"]["outcomes"] == {"feature missing": 9}
    other = tmp_path / "other.json"
    assert tool.main(["--add", str(record), "--out", str(other), "--commits", "fake=abc"]) == 0
    assert json.loads(other.read_text()) == kept | {"checkouts": {"fake": "abc"}}


def test_part_as_wrong_as_the_reference_is_attributed_to_us(
    tool: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peer_suites_lib import layers

    sound = layers.make_kernel
    monkeypatch.setattr(
        layers, "make_kernel", lambda *a, **options: lambda *call: sound(*a, **options)(*call) * 1.5
    )
    tally = tool.run_suite(fake_layer_suite(checkout, factor=1.5), 100)
    assert tally.outcomes == {"mismatch: ours": 8}


def test_corrupted_memory_is_a_raw_exception(
    tool: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peer_suites_lib import layers

    def spoils(*given: Any, **options: Any) -> Any:
        raise CorruptionError("a kernel wrote behind its output")

    monkeypatch.setattr(layers, "make_kernel", spoils)
    assert tool.run_suite(fake_layer_suite(checkout), 100).outcomes == {"raw exception": 8}


def test_failure_of_a_repeated_case_is_reported(tool: ModuleType) -> None:
    from peer_suites_lib.outcomes import CaseOutcome, Suite

    ends = [CaseOutcome(outcome, key=1) for outcome in ("agree", "mismatch: ours", "agree")]
    grid = [{"what": end} for end in ends]
    suite = Suite("fake", "again", lambda: iter(grid), lambda p: p["what"])
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
    wrong = routers.check_router(case, lambda x, _: pick(-x, 2))
    assert wrong.outcome == "mismatch: theirs"
    scaled = routers.check_router(case, lambda x, _: (pick(x, 2)[0] * 1.1, pick(x, 2)[1]))
    assert scaled.outcome == "mismatch: theirs"

    def broken(logits: torch.Tensor, *others: Any) -> None:
        route_ref(logits.flip(1), *others)

    def no_numbers(*given: Any) -> None:
        route_ref(*given)
        given[-1].routing.topk_weights_TK[0] = torch.nan

    for each in (broken, no_numbers):
        monkeypatch.setattr(routers, "route_ref", each)
        assert routers.check_router(case, lambda x, _: pick(x, 2)).outcome == "mismatch: ours"


def test_quantizer_mismatches_are_attributed(
    tool: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peer_suites_lib import row_operations
    from peer_suites_lib.checkout import Source

    per_row: Any = Source(checkout, "test_fake.py").function("per_row")
    x = row_operations.normal_rows(3, 40, torch.bfloat16)
    assert row_operations.check_quantizer(x, "fp8_w8a8_channel", per_row, "").outcome == "agree"

    def twice(part: torch.Tensor) -> Any:
        q, scale = per_row(part)
        return q, scale * 1.1

    found = row_operations.check_quantizer(x, "fp8_w8a8_channel", twice, "")
    assert found.outcome == "mismatch: theirs"
    sound = row_operations.quantize_values
    monkeypatch.setattr(
        row_operations, "quantize_values", lambda *given: (sound(*given)[0], sound(*given)[1] * 1.1)
    )
    found = row_operations.check_quantizer(x, "fp8_w8a8_channel", per_row, "")
    assert found.outcome == "mismatch: ours"


@pytest.mark.parametrize("quant", ["fp8_w8a8_channel", "fp8_w8a8_tensor", "int8_w8a8_channel"])
def test_too_large_scale_is_attributed_to_us(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, quant: str
) -> None:
    """Its codes are as close to the values as others, but in steps that are too large."""
    from peer_suites_lib import row_operations

    sound = row_operations.quantize_values

    def reference(part: torch.Tensor) -> Any:
        return sound(part.float(), row_operations.QuantScheme.parse(quant))

    x = row_operations.normal_rows(3, 40, torch.bfloat16)
    assert row_operations.check_quantizer(x, quant, reference, "").outcome == "agree"
    monkeypatch.setattr(
        row_operations,
        "quantize_values",
        lambda x, scheme: sound(x, scheme, sound(x, scheme)[1] * 1.7),
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
    # A tolerance wider than the numbers hides nothing.
    assert compare_with_exact(far, near, exact, wide, 2e-3).outcome == "mismatch: ours"
    assert compare_with_exact(far, far, exact, tight, 2e-3).outcome == "mismatch: ours"
    for other in (near, near * torch.nan, near * 2):
        assert (
            compare_with_exact(near * torch.nan, other, exact, wide, 1.0).outcome
            == "mismatch: ours"
        )
        assert compare_with_exact(far, other, exact, wide, 2e-3).outcome == "mismatch: ours"
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
        found = row_operations.check_align(ids, 2, 4, lambda _, wrong=wrong: wrong, "")
        assert found.outcome == "mismatch: theirs"
