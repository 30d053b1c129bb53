"""Every verb's output in terminals of 80 and of 200 columns."""

import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_mk import Mk, run_mk
from test_cli_output import EXCHANGE, PRINTED, TINY, TORCH_PAIR
from test_tune_cli import TUNED, small_layer

from modular_kernel.cli import demo, main, mutate, output, tune_output
from modular_kernel.cli.demo_output import CheckpointRow, DemoRow
from modular_kernel.spec.problem import Machine
from modular_kernel.testing.compile import cases as compiled
from modular_kernel.testing.compile.report import CompileRecord

WIDTHS = (80, 200)
PARTS = ("AllGatherReduceScatterPrepareAndFinalize", "BatchedTritonExperts")
PAIR = " x ".join(PARTS)
MORE = {
    **PRINTED,
    "models of a type": ("models", "--types"),
    "check, over ranks": ("check", "--world-size", "4", "--quant", "fp8_w8a8_block"),
    "profile, two pairs": (
        *("profile", *TINY, "--calls", "1", *TORCH_PAIR),
        *("--against", "BatchedPrepareAndFinalize", "NaiveBatchedExperts"),
    ),
    "bench, two routings": (
        *("bench", *TORCH_PAIR, *TINY, "--ms", "0.01", "--routing", "uniform,hot1"),
    ),
    "exchange, two schemes": ("exchange", *EXCHANGE, "--quant", "none,fp8_w8a8_block"),
    "compose, explained": ("compose", *TINY, "--explain"),
    "plan, large": (
        "plan",
        "--model",
        "deepseek-v3",
        "--machine",
        "8xh200,2x8xb200",
        "--packages",
        "all",
    ),
    "report, checked": ("report", "--check", "--docs", "docs"),
    "defects in calls": ("test", "--mutate", "TorchExperts", "--mutants", "0", *TORCH_PAIR),
    "demo": ("demo", "--device", "cpu"),
    "new": ("new", "path", "their_path"),
    "compile": ("compile",),
    "compile, checked": ("compile", "--check"),
}


@pytest.fixture
def mk(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Mk:
    """Run `mk` in this process in an empty folder; results that take minutes are made up."""
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MK_CACHE_DIR", str(tmp_path / "cache"))
    # Other tests of this process may compile kernels.
    monkeypatch.setattr(demo, "enable_interpreter", lambda: None)
    monkeypatch.setattr(demo, "_model_results", lambda *_, **__: demo_rows())
    monkeypatch.setattr(demo, "_checkpoint_results", lambda *_, **__: checkpoint_rows())
    monkeypatch.setattr(demo, "_rates", lambda *_: {"transformers' eager": 3417.0, PAIR: 2918.0})
    monkeypatch.setattr(compiled, "compile_all", lambda *_, **__: compiled_kernels())
    monkeypatch.setattr(mutate, "run_input_mutations", lambda *_: kills())
    return partial(run_mk, capsys)


def demo_rows() -> list[DemoRow]:
    models = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
    rows = [DemoRow(model, "float32", PAIR, 1e-3, 2e-3, 32, 32, 1.0) for model in models]
    return [*rows, replace(rows[0], model="mixtral", dtype="bfloat16", difference=1.0)]


def checkpoint_rows() -> list[CheckpointRow]:
    stored = ("awq", "qwen3 fp8", "compressed int4", "mxfp4")
    made = [
        CheckpointRow("deepseek_v3", name, "int4_w4a16", PAIR, 1e-3, 2e-3, 4096, 0.1)
        for name in stored
    ]
    return [*made[1:], replace(made[0], error=1.0)]


def compiled_kernels() -> compiled.CompileResult:
    config = {f"BLOCK_{letter}": 128 for letter in "MNKH"} | {"ACTIVATION": "swiglu_oai"}
    counts = {"wgmma": 128, "cp.async": 24, "mma.sync": 16, "ldmatrix": 64}
    sizes = {"num_warps": 8, "num_stages": 4, "shared": 229_376, "registers": 255}
    record = CompileRecord(
        kernel="_grouped_gemm_kernel_of_sorted_rows",
        target="sm_90",
        config=config,
        dtypes={},
        stack=0,
        spill=8,
        instructions=counts,
        seconds=1.0,
        **sizes,
    )
    name = "TritonExperts, fp8_w8a8_block, swiglu_oai, 4096 tokens"
    rows = (
        compiled.CompiledRow(name, record, ()),
        compiled.CompiledRow(name, record, (f"{record}: 8 bytes of local memory per thread",)),
    )
    left = compiled.SkippedKernel(
        "_kernel", "experts.triton.gemv.kernels.gate_up", "needs two ranks"
    )
    return compiled.CompileResult(rows, (left,))


def kills() -> list[SimpleNamespace]:
    case = SimpleNamespace(prepare_finalize=PARTS[0], experts=PARTS[1])
    fates = [("oracle: 2 of 64 values", True), ("guard: written beyond", True), (None, False)]
    return [
        SimpleNamespace(
            mutant="the scales of w1 are those of another expert",
            case=case,
            killed_by=by,
            ok=ok,
            unsound=None,
            nothing=None,
        )
        for by, ok in fates
    ]


def fits(shown: str, width: int) -> None:
    """Check that only single words exceed the width, and that no name is truncated."""
    long = [line for line in shown.splitlines() if len(line.rstrip()) > width]
    assert [line for line in long if len(line.split()) > 1] == []
    assert "…" not in shown


def names(shown: str) -> set[str]:
    return set(re.findall(r"\w+(?:Experts|PrepareAndFinalize)\b", shown))


@pytest.mark.parametrize("words", MORE.values(), ids=MORE.keys())
def test_every_verb_fits_its_terminal(
    mk: Mk, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for width in WIDTHS:
        monkeypatch.setattr(output, "width", lambda _=None, width=width: width)
        shutil.rmtree("their_path", ignore_errors=True)  # what `mk new` wrote
        ended = mk(*words)
        assert ended.code in ((2,) if words == PRINTED["a wrong word"] else (0, 1)), ended.err
        assert (ended.out or ended.err).strip()
        fits(ended.out + ended.err, width)
        found.append(names(ended.out))
    assert found[0] == found[1]


def test_every_verb_is_tested_here() -> None:
    """A new verb must be added to the test."""
    assert set(main.VERBS) == {words[0] for words in MORE.values()}


@pytest.mark.parametrize("width", WIDTHS)
def test_a_tuned_layer_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """The final output of `mk tune` with made-up results, because tuning needs a GPU."""
    monkeypatch.setattr(output, "width", lambda _=None: width)
    tune_output.print_text(small_layer(), TUNED, [512])
    shown = capsys.readouterr().out
    fits(shown, width)
    assert all(f"block_m={tuned.best.choice.gemm1.block_m}" in shown for tuned in TUNED[:1])


@pytest.mark.parametrize("verb", ["exchange, two schemes", "bench, two routings"])
def test_distinguishing_columns_are_shown(
    mk: Mk, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """At any width, rows of different measurements differ in their text."""
    monkeypatch.setattr(output, "width", lambda _=None: 80)
    shown = mk(*MORE[verb]).out
    for label in ("bfloat16", "fp8_w8a8_block") if verb.startswith("exchange") else ("hot1",):
        assert re.search(rf"\b{label}\b", shown)


@pytest.mark.parametrize("gpu", [False, True])
def test_demo_fits_a_screen(mk: Mk, monkeypatch: pytest.MonkeyPatch, gpu: bool) -> None:
    """All rows fit into 80 columns, and the parts that were interpreted are named."""
    experts = [name for _, name in demo.PAIRINGS]
    pairings = [" x ".join(pair) for pair in demo.PAIRINGS]
    rows = [replace(row, pairing=pairing) for row in demo_rows()[:4] for pairing in pairings]
    stored = ("awq", "qwen3 fp8", "compressed int4", "mxfp4")
    layer = CheckpointRow("deepseek_v3", "", "int4_w4a16", "", 1e-3, 2e-3, 4096, 0.1)
    packed = [
        replace(layer, stored=name, pairing=pairing) for pairing in pairings[:2] for name in stored
    ]
    rates = {"transformers' eager": 59_837.0, pairings[0]: 52_197.0}
    monkeypatch.setattr(output, "width", lambda _=None: 80)
    monkeypatch.setattr(demo, "_available", lambda *_: True)
    monkeypatch.setattr(demo, "_model_results", lambda *_: iter(rows))
    monkeypatch.setattr(demo, "_checkpoint_results", lambda *_: iter(packed))
    monkeypatch.setattr(demo, "_rates", lambda *_: rates)
    machine = Machine("cuda", (9, 0)) if gpu else Machine("cpu", interpreter=True)
    monkeypatch.setattr(demo, "_machine", lambda _: machine)
    ended = mk("demo")
    assert ended.code == 0
    assert len((ended.out + ended.err).splitlines()) <= 34
    assert [n for pair in demo.PAIRINGS for n in pair if f" {n}" not in ended.out] == []
    assert [name for name in stored if ended.out.count(f"{name} ") != 1] == []
    assert "need a GPU" not in ended.out
    note = f"ran in Triton's interpreter, times are meaningless: {experts[1]}, {experts[3]} "
    assert (note in " ".join(ended.out.split())) is not gpu
    assert ("interpreter" in ended.out) is not gpu


def test_doctor_prints_packages_as_tables(mk: Mk, monkeypatch: pytest.MonkeyPatch) -> None:
    """One record per package would take more than a hundred lines."""
    monkeypatch.setattr(output, "width", lambda _=None: 80)
    shown = mk("doctor").out
    assert re.search(r"optional package +present +enables", shown)
    assert re.search(r"absent package +how to install it", shown)
    absent = [one["name"] for one in mk("doctor", "--json").json["packages"] if not one["present"]]
    assert [name for name in absent if len(re.findall(rf"^ {name} ", shown, re.M)) != 2] == []
    tables = shown[shown.index("optional package") :]  # a machine with GPUs has more before
    assert len(tables.splitlines()) < 70
