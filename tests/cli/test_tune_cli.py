"""`mk tune`: options, explanations, output, and measurements on this machine."""

import itertools
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.exceptions import Exit
from run_mk import Mk, run_mk
from tuned_config_files import LARGE_TILES, MACHINE, SMALL_TILES, simulated_h200

from experts.triton.configs.files import ConfigKey, config_to_json
from experts.triton.launch_config import (
    Device,
    LaunchConfig,
    find_arch,
    gemms,
    shared_bytes,
)
from experts.triton.tuning.space import ConfigSpace
from modular_kernel.catalog import this_machine
from modular_kernel.cli.options import ProblemOptions
from modular_kernel.cli.presets import SHAPES
from modular_kernel.cli.tune import (
    TuneOptions,
    _find_valid_pair,
    _make_problems,
    _select_valid,
    _tune_layers,
)
from modular_kernel.cli.tune_output import (
    TunedLayer,
    TuneProgress,
    TuneRecorder,
    make_record,
    print_text,
)
from modular_kernel.contracts import StageTimes, TunedChoice
from modular_kernel.errors import ConfigurationError, IncompatibleError
from modular_kernel.quant.quantized_weights import check_weights_quantized
from modular_kernel.reference.weights import dequantize_matrix
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.tuning import compilation
from modular_kernel.tuning.compilation import TunedPair
from modular_kernel.tuning.measurement import DeviceBenchmarker
from modular_kernel.tuning.search import Refusal, TuneResult
from modular_kernel.tuning.workload import make_tuning_weights

SMALL = Problem(tokens=40, hidden=64, intermediate=64, experts=4, top_k=2)
PAIR = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")
HAS_GPU = torch.cuda.is_available()


@pytest.fixture
def mk(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Mk:
    """Run `mk tune` in this process; return the exit code, stdout and stderr."""
    monkeypatch.setenv("MK_CONFIG_DIR", str(tmp_path / "config"))
    return partial(run_mk, capsys, "tune")


@pytest.mark.skipif(HAS_GPU, reason="this machine has a GPU")
@pytest.mark.parametrize("args", [(), ("--model", "mixtral", "--out", "made")])
def test_nothing_is_written_without_a_gpu(
    mk: Mk, args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = mk(*args)
    assert (code, out) == (1, "")
    assert "no CUDA device" in err
    assert "--explain" in err
    assert list(tmp_path.iterdir()) == []
    code, out, _ = mk(*args, "--json")
    assert code == 1
    assert json.loads(out)["ok"] is False


def test_explain_needs_no_gpu(mk: Mk) -> None:
    code, out, _ = mk(
        *("--explain", "--model", "mixtral,qwen3-30b-a3b", "--tokens-list", "1,100"),
        *("--device-name", "NVIDIA B200"),
    )
    assert code == 0
    assert out.count("on NVIDIA B200") == 4
    assert "E=128,N=768,device_name=NVIDIA_B200.json" in out
    assert re.search(r"heuristic \d of \d: 25 rows per expert", out)
    code, out, _ = mk("--explain", "--json")
    assert code == 0
    (text,) = json.loads(out)["explanations"]
    assert text.startswith("T16-")


GPUS = {
    "NVIDIA GeForce RTX 4090": (8, 9),
    "NVIDIA L40S": (8, 9),
    "NVIDIA RTX 6000 Ada Generation": (8, 9),
    "NVIDIA RTX A6000": (8, 6),
    "NVIDIA A10G": (8, 6),
    "NVIDIA A100-SXM4-80GB": (8, 0),
    "NVIDIA H100 80GB HBM3": (9, 0),
    "NVIDIA_H200": (9, 0),
    "NVIDIA B200": (10, 0),
    "NVIDIA GB300": (10, 3),
    "NVIDIA GeForce RTX 5090": (12, 0),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": (12, 0),
    "Tesla T4": None,
}


@pytest.mark.parametrize(("name", "arch"), GPUS.items())
def test_explained_launches_fit_shared_memory(
    mk: Mk, name: str, arch: tuple[int, int] | None
) -> None:
    """For an unknown GPU, the smallest shared memory of all GPUs is assumed."""
    assert find_arch(name) == arch
    device = Device.from_name(name)
    if arch is not None:
        assert device == Device.from_machine(Machine("cuda", arch, name=name))
    assert device.shared == {9: 232_448, 10: 232_448}.get((arch or (0,))[0], device.shared)
    for quant in ("none", "fp8_w8a8_block"):
        args = ("--explain", "--model", "mixtral", "--tokens-list", "1,128,4096")
        text = mk(*args, "--quant", quant, "--device-name", name).out
        problem = replace(SMALL, hidden=4096, intermediate=14336, experts=8, quant=quant)
        for line, gemm in zip(
            re.findall(r"^  GEMM [12]: .*", text, re.M), itertools.cycle(gemms(problem))
        ):
            assert line.startswith(f"  {gemm}: ")
            fields = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line)}
            fields["num_warps"], fields["num_stages"] = fields.pop("warps"), fields.pop("stages")
            assert shared_bytes(LaunchConfig(**fields), gemm, device) <= device.shared
    assert (f"{name} is not a known GPU; assuming 101376 bytes" in text) is (arch is None)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--tokens-list", "0,1"), "--tokens-list"),
        (("--tokens-list", "1,,2"), "--tokens-list"),
        (("--tokens-list", "1;2"), "--tokens-list"),
        (("--tokens-list", "1048576"), "--tokens-list"),
        (("--tokens-list", "٣"), "--tokens-list"),
        (("--budget", "0"), "--budget"),
        (("--budget", "nan"), "--budget"),
        (("--workers", "0"), "--workers"),
        (("--device-name", "X"), "--explain"),
        (("--model", "mixtral,unheard-of"), "model"),
        (("--explain", "--experts-type", "TorchExperts"), "can be tuned"),
        (("--explain", "--experts-type", "TritonExpert"), "did you mean TritonExperts"),
    ],
)
def test_invalid_options_are_bad_usage(mk: Mk, args: tuple[str, ...], expected: str) -> None:
    code, _, err = mk(*args)
    assert code == 2
    assert expected in err


def test_models_are_combined_with_sizes() -> None:
    layers = _make_problems(
        ProblemOptions(model="mixtral,gpt-oss-20b", hidden=1024, quant="mxfp4_w4a16")
    )
    (first_name, mixtral), (second_name, gpt_oss) = layers
    assert (first_name, second_name) == ("mixtral", "gpt-oss-20b")
    assert (mixtral.hidden, mixtral.intermediate, mixtral.experts) == (1024, 14336, 8)
    assert (gpt_oss.hidden, gpt_oss.intermediate, gpt_oss.act.kind) == (1024, 2880, "swiglu_oai")
    assert mixtral.quant == gpt_oss.quant == "mxfp4_w4a16"
    assert TuneOptions().resolve_token_counts(ProblemOptions()) == tuple(
        2**power for power in range(14)
    )
    assert TuneOptions().resolve_token_counts(ProblemOptions(tokens=7)) == (7,)
    assert TuneOptions(tokens_list=(8, 1)).resolve_token_counts(ProblemOptions(tokens=7)) == (8, 1)


def test_model_all_selects_every_shape_in_each_scheme() -> None:
    problems = _make_problems(ProblemOptions(model="mixtral,all", quant="none,fp8_w8a8_block"))
    assert [name for name, _ in problems] == list(SHAPES) * 2
    assert [problem.quant for _, problem in problems] == [
        quant for quant in ("none", "fp8_w8a8_block") for _ in SHAPES
    ]


def test_shapes_have_different_config_files() -> None:
    for quant in ("none", "fp8_w8a8_block", "int4_w4a16_group"):
        problems = [p for _, p in _make_problems(ProblemOptions(model="all", quant=quant))]
        names = {ConfigKey.from_problem(problem, "NVIDIA H200").file_name for problem in problems}
        assert len(names) == len(SHAPES) >= 13


def test_refused_layers_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    valid = Problem(tokens=4, hidden=64, intermediate=64, experts=4, top_k=2)
    refused = replace(valid, top_k=33)
    layers = _select_valid([("refused", refused), ("valid", valid)], MACHINE, None, None)
    assert [name for name, _, _ in layers] == ["valid"]
    assert "skipped refused" in capsys.readouterr().err
    with pytest.raises(IncompatibleError):
        _select_valid([("refused", refused)], MACHINE, None, None)
    with pytest.raises(Exit):
        _select_valid([("refused", refused), ("refused too", refused)], MACHINE, None, None)


def test_default_pair_is_the_first_valid_one() -> None:
    problem = Problem(tokens=4, hidden=64, intermediate=64, experts=4, top_k=2)
    pair = _find_valid_pair(problem, MACHINE, None, None)
    assert (pair.prepare_finalize, pair.experts) == ("MoEPrepareAndFinalizeNoEP", "TritonExperts")
    pair = _find_valid_pair(problem, MACHINE, None, "BatchedTritonExperts")
    assert pair.prepare_finalize == "BatchedPrepareAndFinalize"
    with pytest.raises(IncompatibleError) as refused:
        _find_valid_pair(problem, MACHINE, "BatchedPrepareAndFinalize", "TritonExperts")
    assert "format" in str(refused.value)
    with pytest.raises(IncompatibleError):
        _find_valid_pair(replace(problem, top_k=33), MACHINE, None, None)


TIMES = StageTimes(9e-5, {"mk::gemm2": 3e-5})
TUNED = [
    TuneResult(
        1,
        TunedChoice(SMALL_TILES, 8e-5, 1e-4),
        {SMALL_TILES: TIMES, LARGE_TILES: TIMES},
        {},
        True,
        Path("folder/file.json"),
    ),
    TuneResult(
        64,
        TunedChoice(SMALL_TILES, 8e-5, None),
        {SMALL_TILES: TIMES},
        {LARGE_TILES: Refusal("spills")},
        False,
    ),
    TuneResult(256, None, {}, {LARGE_TILES: Refusal("error 1 > 2", is_wrong=True)}, True),
]


def make_small_layer() -> TunedLayer:
    problem = Problem(tokens=256, hidden=64, intermediate=64, experts=4, top_k=2)
    space, pair = ConfigSpace(problem, "E"), TunedPair("P", "E", MACHINE)
    return TunedLayer("mine", problem, pair, space, (1, 64, 256, 512), Path("folder"))


def test_all_times_are_recorded(tmp_path: Path) -> None:
    layer, path = make_small_layer(), tmp_path / "new" / "times.jsonl"
    for _ in range(2):  # a second run appends
        recorder = TuneRecorder(layer, path)
        for tuned in TUNED:
            recorder.append(tuned)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["tokens"] for line in lines] == [1, 64, 1, 64]
    first = lines[0]
    assert first["best"]["us"] == 80.0
    assert first["best"].items() >= config_to_json(SMALL_TILES).items()
    for choice, pair in zip(first["choices"], (SMALL_TILES, LARGE_TILES), strict=True):
        assert choice.items() >= config_to_json(pair).items()
    assert first["choices"][0]["stages"] == {"mk::gemm2": 30.0}
    TuneRecorder(layer, None).append(TUNED[0])


def test_progress_prints_a_line_per_token_count(capsys: pytest.CaptureFixture[str]) -> None:
    layer = make_small_layer()
    with TuneProgress(3) as progress:
        progress.advance()
        for tuned in TUNED:
            progress.print_result(layer, tuned)
    err = capsys.readouterr().err
    assert "mine: 1 token: 80.0 us, untuned 100.0 (2 timed, 0 refused)" in err
    assert "1 refused, stopped by the budget)" in err
    assert "256 tokens: nothing ran: error 1 > 2" in err


def test_tuned_layer_is_printed_and_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    layer = make_small_layer()
    print_text(layer, TUNED, [512])
    text = capsys.readouterr().out
    assert "25.0%" in text
    assert "WRONG, 256 tokens" in text
    assert "saved in folder/file.json" in text
    assert "not tuned: 512 tokens" in text
    record = make_record(layer, TUNED, [512])
    tuned: Any = record["tuned"]
    assert [row["us"] for row in tuned] == [pytest.approx(80.0)] * 2 + [None]
    assert tuned[2]["wrong"] == [str(LARGE_TILES)]
    assert [row["tried"] for row in tuned] == [2, 1, 0]
    assert record["left"] == [512]
    json.dumps({**record, "problem": str(layer.problem)}, allow_nan=False)
    print_text(layer, [], [])
    assert "nothing left to do" in capsys.readouterr().out


def test_tuning_writes_configs_and_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tune as on a GPU, but without compiler processes and with the clock of this machine."""
    monkeypatch.setenv("COLUMNS", "300")

    class NoCompiler:
        def __init__(self, workers: int) -> None:
            assert workers == 3

        def __enter__(self) -> "NoCompiler":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def submit(self, *_: object) -> None:
            pass

        def wait_compiled(self, *_: object) -> None:
            pass

    machine = this_machine()
    if machine.device == "cpu" and not machine.interpreter:
        pytest.skip("no Triton here")
    monkeypatch.setattr(compilation, "Compiler", NoCompiler)
    monkeypatch.setattr(ConfigSpace, "candidates", lambda _self, tokens: [SMALL_TILES, LARGE_TILES])
    times = tmp_path / "times.jsonl"
    pair, options = (
        TunedPair(*PAIR, machine),
        TuneOptions(budget=250, out=tmp_path / "out", workers=3, times=times),
    )
    with simulated_h200(tmp_path, monkeypatch):
        _tune_layers([("small", SMALL, pair)], (1, 2), options, as_json=None)
        out, err = capsys.readouterr()
        space = pair.make_search_space(SMALL)
        best = space.saved(tmp_path / "out")
    assert sorted(best) == [1, 2]
    assert len(times.read_text(encoding="utf-8").splitlines()) == 2
    assert "saved in " in out
    assert (err.count(" 1 token: "), err.count(" 2 tokens: ")) == (1, 1)
    assert "stopped by the budget" not in err
    assert "WRONG" not in out + err


# -------------------------------------------------------------------------------------- measurement


def make_benchmarker(problem: Problem = SMALL, **options: Any) -> DeviceBenchmarker:
    machine = this_machine()
    if machine.device == "cpu" and not machine.interpreter:
        pytest.skip("no Triton here")
    compiler: Any = SimpleNamespace()
    options = {"tokens": (1, 5, 17, 40), "target_ms": 1.0, **options}
    return DeviceBenchmarker(TunedPair(*PAIR, machine), problem, compiler, **options)


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_block", "int4_w4a16_group"])
def test_correct_choice_has_a_time(quant: str) -> None:
    width = 64 if quant == "none" else 128
    problem = replace(SMALL, hidden=width, intermediate=width, experts=2, quant=quant)
    benchmarker = make_benchmarker(problem)
    for tokens in (1, 17) if quant == "none" else (5,):
        times = benchmarker.screen(tokens, SMALL_TILES)
        assert isinstance(times, StageTimes), times
        assert sorted(times.stages) == sorted(ConfigSpace.stages)
        # The stages and the sum are timed in different calls, and other processes may interfere.
        assert 0 < sum(times.stages.values()) < 2 * times.seconds
        seconds = benchmarker.compare(tokens, [SMALL_TILES, LARGE_TILES])
        assert sorted(seconds, key=str) == [SMALL_TILES, LARGE_TILES]
        assert all(isinstance(value, float) and value > 0 for value in seconds.values())


def test_wrong_choice_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmarker = make_benchmarker()
    for corrupt in (torch.zeros_like, lambda out: out * float("nan"), lambda out: out.flip(0)):
        monkeypatch.setattr(
            benchmarker,
            "_build_kernel",
            lambda *_, corrupt=corrupt, **__: (
                lambda x, w, r: corrupt(compute_reference(benchmarker, x, r))
            ),
        )
        outcome = benchmarker.screen(17, SMALL_TILES)
        assert isinstance(outcome, Refusal)
        assert outcome.is_wrong
        assert benchmarker.compare(17, [SMALL_TILES]) == {SMALL_TILES: outcome}


def test_unchecked_rows_are_compared_with_another_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    benchmarker = make_benchmarker()
    assert isinstance(benchmarker.screen(17, SMALL_TILES), StageTimes)

    def compute_wrong_row(x: torch.Tensor, routing: Any) -> torch.Tensor:
        out = compute_reference(benchmarker, x, routing)
        out[8] *= 1.5
        return out

    monkeypatch.setattr(
        benchmarker, "_build_kernel", lambda *_, **__: lambda x, w, r: compute_wrong_row(x, r)
    )
    outcome = benchmarker.screen(17, LARGE_TILES)
    assert isinstance(outcome, Refusal)
    assert outcome.is_wrong
    assert "another correct choice" in outcome.reason


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_tensor", "int4_w4a16_group", "mxfp4_w4a16"])
def test_tuning_weights_differ_by_expert(quant: str) -> None:
    problem = replace(SMALL, experts=9, quant=quant, bias=True)
    weights = make_tuning_weights(problem, torch.device("cpu"))
    if quant != "none":
        check_weights_quantized(weights, problem, torch.device("cpu"))
    assert weights.b1 is not None
    assert tuple(weights.b1.shape) == (9, 128)
    w1 = [dequantize_matrix(weights, "w1", e, problem, torch.float32) for e in range(9)]
    equal = [(a, b) for a in range(9) for b in range(a) if torch.equal(w1[a], w1[b])]
    # The scales of mxfp4 are powers of two, so that some experts may have equal weights.
    assert len(equal) <= (9 if quant == "mxfp4_w4a16" else 0)


def compute_reference(
    benchmarker: DeviceBenchmarker, x_TH: torch.Tensor, routing: Any
) -> torch.Tensor:
    from modular_kernel.reference import rounded_reference

    problem = benchmarker.problem.with_tokens(len(x_TH))
    return rounded_reference(x_TH, benchmarker.weights, routing, problem).to(problem.dtype)


def test_failed_launch_is_refused_with_its_reason() -> None:
    def fail_for_first(choice: object) -> Any:
        if choice == SMALL_TILES:
            raise RuntimeError("out of resources: shared memory")
        return nullcontext()

    benchmarker = make_benchmarker(space=SimpleNamespace(using=fail_for_first, stages=()))
    refusal = Refusal("RuntimeError: out of resources: shared memory")
    assert benchmarker.screen(17, SMALL_TILES) == refusal
    assert isinstance(benchmarker.screen(17, LARGE_TILES), StageTimes)


def test_inplace_problem_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="inplace while tuning"):
        make_benchmarker(replace(SMALL, inplace=True))


def test_part_without_tunable_launches_is_refused() -> None:
    pair = TunedPair("MoEPrepareAndFinalizeNoEP", "TorchExperts", MACHINE)
    with pytest.raises(ConfigurationError, match="TorchExperts"):
        pair.make_search_space(SMALL)
