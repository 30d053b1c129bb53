"""The output of every subcommand fits into terminals of 80 and 200 columns."""

import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_mk import Mk, run_mk
from test_cli_output import EXCHANGE, TABLE_COMMANDS, TINY, TORCH_PAIR
from test_tune_cli import TUNED, make_small_layer

from modular_kernel.cli import demo, main, mutate, output, tune_output
from modular_kernel.cli.demo_output import CheckpointRow, DemoRow
from modular_kernel.spec.problem import Machine
from modular_kernel.testing.compile import cases as compiled
from modular_kernel.testing.compile.report import CompileRecord

WIDTHS = (80, 200)
PARTS = ("AllGatherReduceScatterPrepareAndFinalize", "BatchedTritonExperts")
PAIR = " x ".join(PARTS)
COMMANDS = {
    **TABLE_COMMANDS,
    "models with types": ("models", "--types"),
    "check, several ranks": ("check", "--world-size", "4", "--quant", "fp8_w8a8_block"),
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
        *("plan", "--model", "deepseek-v3"),
        *("--machine", "8xh200,2x8xb200", "--packages", "all"),
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
    """Run `mk` in an empty folder. Results whose computation takes minutes are replaced."""
    (tmp_path / "docs/benchmarks").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MK_CACHE_DIR", str(tmp_path / "cache"))
    # The interpreter must not be enabled, because other tests in this process may compile kernels.
    monkeypatch.setattr(demo, "enable_interpreter", lambda: None)
    monkeypatch.setattr(demo, "_run_models", lambda *_, **__: make_demo_rows())
    monkeypatch.setattr(demo, "_run_checkpoints", lambda *_, **__: make_checkpoint_rows())
    monkeypatch.setattr(
        demo, "_measure_rates", lambda *_: {"transformers' eager": 3417.0, PAIR: 2918.0}
    )
    monkeypatch.setattr(compiled, "compile_all", lambda *_, **__: make_compile_result())
    monkeypatch.setattr(mutate, "run_call_mutations", lambda *_: make_mutation_results())
    return partial(run_mk, capsys)


def make_demo_rows() -> list[DemoRow]:
    models = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
    rows = [DemoRow(model, "float32", PAIR, 1e-3, 2e-3, 32, 32, 1.0) for model in models]
    return [*rows, replace(rows[0], model="mixtral", dtype="bfloat16", difference=1.0)]


def make_checkpoint_rows() -> list[CheckpointRow]:
    formats = ("awq", "qwen3 fp8", "compressed int4", "mxfp4")
    rows = [
        CheckpointRow("deepseek_v3", name, "int4_w4a16", PAIR, 1e-3, 2e-3, 4096, 0.1)
        for name in formats
    ]
    return [*rows[1:], replace(rows[0], error=1.0)]


def make_compile_result() -> compiled.CompileResult:
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
    skipped = compiled.SkippedKernel(
        "_kernel", "experts.triton.gemv.kernels.gate_up", "needs two ranks"
    )
    return compiled.CompileResult(rows, (skipped,))


def make_mutation_results() -> list[SimpleNamespace]:
    case = SimpleNamespace(prepare_finalize=PARTS[0], experts=PARTS[1])
    outcomes = [
        ("float64 reference: 2 of 64 values", True),
        ("guard: written beyond", True),
        (None, False),
    ]
    return [
        SimpleNamespace(
            mutant="the scales of w1 are those of another expert",
            case=case,
            killed_by=check,
            ok=ok,
            failure_without_mutant=None,
            no_effect_reason=None,
        )
        for check, ok in outcomes
    ]


def check_width(text: str, width: int) -> None:
    """Check that no line with several words exceeds the width, and that no name is truncated."""
    long_lines = [line for line in text.splitlines() if len(line.rstrip()) > width]
    assert [line for line in long_lines if len(line.split()) > 1] == []
    assert "…" not in text


def find_part_names(text: str) -> set[str]:
    return set(re.findall(r"\w+(?:Experts|PrepareAndFinalize)\b", text))


@pytest.mark.parametrize("args", COMMANDS.values(), ids=COMMANDS.keys())
def test_output_of_every_verb_fits_the_terminal(
    mk: Mk, args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    names_by_width = []
    for width in WIDTHS:
        monkeypatch.setattr(output, "get_line_width", lambda _=None, width=width: width)
        shutil.rmtree("their_path", ignore_errors=True)  # the package of `mk new`
        result = mk(*args)
        assert result.code in ((2,) if args == TABLE_COMMANDS["bad usage"] else (0, 1)), result.err
        assert (result.out or result.err).strip()
        check_width(result.out + result.err, width)
        names_by_width.append(find_part_names(result.out))
    assert names_by_width[0] == names_by_width[1]


def test_every_verb_is_tested_here() -> None:
    """A new subcommand must be added to this file."""
    assert set(main.VERBS) == {args[0] for args in COMMANDS.values()}


@pytest.mark.parametrize("width", WIDTHS)
def test_results_of_tune_fit_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """The results of `mk tune` are not measured, because a measurement needs a GPU."""
    monkeypatch.setattr(output, "get_line_width", lambda _=None: width)
    tune_output.print_text(make_small_layer(), TUNED, [512])
    text = capsys.readouterr().out
    check_width(text, width)
    assert all(f"block_m={tuned.best.choice.gemm1.block_m}" in text for tuned in TUNED[:1])


@pytest.mark.parametrize("verb", ["exchange, two schemes", "bench, two routings"])
def test_distinguishing_columns_are_shown(
    mk: Mk, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Even in a narrow terminal, a column distinguishes the rows of different measurements."""
    monkeypatch.setattr(output, "get_line_width", lambda _=None: 80)
    text = mk(*COMMANDS[verb]).out
    for label in ("bfloat16", "fp8_w8a8_block") if verb.startswith("exchange") else ("hot1",):
        assert re.search(rf"\b{label}\b", text)


@pytest.mark.parametrize("gpu", [False, True])
def test_demo_fits_a_screen(mk: Mk, monkeypatch: pytest.MonkeyPatch, gpu: bool) -> None:
    """The tables fit into 80 columns, and the output names the parts that were interpreted."""
    experts = [name for _, name in demo.PAIRINGS]
    pairings = [" x ".join(pair) for pair in demo.PAIRINGS]
    rows = [replace(row, pairing=pairing) for row in make_demo_rows()[:4] for pairing in pairings]
    formats = ("awq", "qwen3 fp8", "compressed int4", "mxfp4")
    layer = CheckpointRow("deepseek_v3", "", "int4_w4a16", "", 1e-3, 2e-3, 4096, 0.1)
    checkpoints = [
        replace(layer, stored=name, pairing=pairing) for pairing in pairings[:2] for name in formats
    ]
    rates = {"transformers' eager": 59_837.0, pairings[0]: 52_197.0}
    monkeypatch.setattr(output, "get_line_width", lambda _=None: 80)
    monkeypatch.setattr(demo, "_is_available", lambda *_: True)
    monkeypatch.setattr(demo, "_run_models", lambda *_: iter(rows))
    monkeypatch.setattr(demo, "_run_checkpoints", lambda *_: iter(checkpoints))
    monkeypatch.setattr(demo, "_measure_rates", lambda *_: rates)
    machine = Machine("cuda", (9, 0)) if gpu else Machine("cpu", interpreter=True)
    monkeypatch.setattr(demo, "_select_machine", lambda _: machine)
    result = mk("demo")
    assert result.code == 0
    assert len((result.out + result.err).splitlines()) <= 34
    assert [part for pair in demo.PAIRINGS for part in pair if f" {part}" not in result.out] == []
    assert [name for name in formats if result.out.count(f"{name} ") != 1] == []
    assert "need a GPU" not in result.out
    note = f"ran in Triton's interpreter, times are meaningless: {experts[1]}, {experts[3]} "
    assert (note in " ".join(result.out.split())) is not gpu
    assert ("interpreter" in result.out) is not gpu


def test_doctor_prints_packages_as_tables(mk: Mk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records instead of tables would take more than a hundred lines."""
    monkeypatch.setattr(output, "get_line_width", lambda _=None: 80)
    text = mk("doctor").out
    assert re.search(r"optional package +present +enables", text)
    assert re.search(r"absent package +how to install it", text)
    packages = mk("doctor", "--json").json["packages"]
    absent = [package["name"] for package in packages if not package["present"]]
    assert [name for name in absent if len(re.findall(rf"^ {name} ", text, re.M)) != 2] == []
    tables = text[text.index("optional package") :]  # tables of GPUs may precede it
    assert len(tables.splitlines()) < 70
