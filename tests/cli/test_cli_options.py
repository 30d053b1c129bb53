"""Options of `mk`: help, the problem that options describe, and bad usage."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import click
import pytest
import torch
from run_mk import run_mk

from modular_kernel.cli import main, verify
from modular_kernel.cli.command import IntegerList, make_verb, option
from modular_kernel.cli.machine_setup import parse_arch
from modular_kernel.cli.options import ProblemOptions
from modular_kernel.cli.presets import MODEL_FIELDS
from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Combine, Machine, Parallel, Problem
from modular_kernel.testing.cases.lists import BASE, Case, cases_for, command, list_axis_variants

ROOT = Path(__file__).resolve().parents[2]
VERBS = (
    "list",
    "models",
    "check",
    "test",
    "profile",
    "tune",
    "bench",
    "exchange",
    "compose",
    "plan",
    "report",
    "compile",
    "new",
    "doctor",
    "demo",
)
HELP_SECONDS = 0.3
TORCH_PAIR = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TorchExperts")


def run_python(*args: str) -> subprocess.CompletedProcess[str]:
    """Run a new Python process in the checkout."""
    command = [sys.executable, *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("args", [[], *([verb] for verb in VERBS)], ids=" ".join)
def test_help_does_not_import_torch(args: list[str]) -> None:
    process = run_python("-X", "importtime", "-m", "modular_kernel", *args, "--help")
    assert process.returncode == 0
    assert process.stdout.startswith("Usage: mk")
    lines = process.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert "click" in imported
    assert imported & {"torch", "triton", "numpy", "rich", "transformers", "pydantic"} == set()


@pytest.mark.parametrize("args", [[], *([verb] for verb in VERBS)], ids=" ".join)
def test_help_is_fast(args: list[str]) -> None:
    """An import of torch would take about ten times the limit.

    The limit is relative to the time of an import of click, so that slow machines do not exceed it.
    """
    for _ in range(8):
        limit = max(HELP_SECONDS, 8 * _measure_cpu_seconds("-c", "import click"))
        seconds = _measure_cpu_seconds("-m", "modular_kernel", *args, "--help")
        if seconds < limit:
            return
    pytest.fail(f"{seconds:.2f} s of processor time, the limit is {limit:.2f} s")


def _measure_cpu_seconds(*args: str) -> float:
    """Return the processor time of a new Python process."""
    before = os.times()
    run_python(*args)
    after = os.times()
    user = after.children_user - before.children_user
    return user + after.children_system - before.children_system


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    _, text, _ = run_mk(capsys, "--help")
    assert [verb for verb in VERBS if f"\n  {verb} " not in text] == []


@pytest.mark.parametrize("verb", ["check", "test", "profile", "bench", "compose", "plan"])
def test_problem_options_are_the_same_for_every_verb(
    capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    _, text, _ = run_mk(capsys, verb, "--help")
    names = [name.replace("_", "-") for name in ProblemOptions.__dataclass_fields__]
    assert len(names) == 28
    assert [name for name in names if f"--{name}" not in text] == []


def parse_problem(*args: str, monkeypatch: pytest.MonkeyPatch) -> Problem:
    """Return the problem that `mk test --one` makes from these options."""
    case = parse_case("test", "--one", *TORCH_PAIR, *args, monkeypatch=monkeypatch)
    return case.problem


def parse_case(*args: str, monkeypatch: pytest.MonkeyPatch) -> Case:
    """Return the case that `mk` with these arguments would verify."""
    recorded: list[verify.VerifyJob] = []

    def record_jobs(jobs: list[verify.VerifyJob], *_: object, as_json: bool) -> bool:
        recorded.extend(jobs)
        return True

    monkeypatch.setattr(verify, "_verify", record_jobs)
    with pytest.raises(SystemExit) as exit_info:
        main.run(list(args))
    assert not exit_info.value.code
    ((case,),) = [job.cases for job in recorded]
    return case


SMALL = Problem(tokens=16, hidden=64, intermediate=128, experts=8, top_k=2)


@pytest.mark.parametrize(
    ("args", "changes"),
    [
        ("", {}),
        ("--tokens 0", {"tokens": 0}),
        ("--hidden 96", {"hidden": 96}),
        ("--intermediate 80", {"intermediate": 80}),
        ("--experts 16", {"experts": 16}),
        ("--top-k 3", {"top_k": 3}),
        ("--dtype fp16", {"dtype": torch.float16}),
        ("--quant none", {}),
        ("--activation gelu", {"activation": "gelu"}),
        ("--activation swiglu_clamp_after:limit=2", {"activation": "swiglu_clamp_after:limit=2"}),
        ("--world-size 2", {"parallel": Parallel(2)}),
        ("--local-experts 4", {"local_experts": 4}),
        ("--ids-dtype int64", {"ids_dtype": torch.int64}),
        ("--bias", {"bias": True}),
        ("--no-bias", {}),
        ("--expert-map", {"expert_map": True}),
        ("--router-weight-on-input", {"apply_router_weight_on_input": True}),
        ("--routed-scaling-factor 2.5", {"routed_scaling_factor": 2.5}),
        ("--combine topk_weighted", {"combine": Combine.TOPK_WEIGHTED}),
        ("--inplace", {"inplace": True}),
        ("--fp32-precision tf32", {"fp32_precision": "tf32"}),
        ("--chunk-tokens 7", {"chunk_tokens": 7}),
        ("--max-received 9", {"max_received": 9}),
        ("--graph", {"graph": True}),
        ("--deterministic", {"deterministic": True}),
        ("--batch-invariant", {"batch_invariant": True}),
        ("--asynchronous", {"asynchronous": True}),
        ("--lora adapters=2,rank=8", {"lora": "adapters=2,rank=8"}),
    ],
)
def test_every_option_changes_the_problem(
    args: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = parse_problem(*args.split(), monkeypatch=monkeypatch)
    assert problem == replace(SMALL, **changes)


OAI = "activation=swiglu_oai:alpha=1.702,limit=7.0,interleaved=true-bias"
MODEL_PROBLEMS = {
    "mixtral-8x7b": "T16-H4096-I14336-E8-K2-bfloat16",
    "qwen3-30b-a3b": "T16-H2048-I768-E128-K8-bfloat16",
    "deepseek-v3": (
        "T16-H7168-I2048-E256-K8-bfloat16-quant=fp8_w8a8_block-routed_scaling_factor=2.5"
    ),
    "gpt-oss-120b": f"T16-H2880-I2880-E128-K4-bfloat16-quant=mxfp4_w4a16-{OAI}",
    "gpt-oss-20b": f"T16-H2880-I2880-E32-K4-bfloat16-quant=mxfp4_w4a16-{OAI}",
}


def test_models_of_this_file_exist() -> None:
    assert set(MODEL_PROBLEMS) <= set(MODEL_FIELDS)
    assert len(MODEL_FIELDS) >= 30


@pytest.mark.parametrize("model", MODEL_PROBLEMS)
def test_model_sets_the_problem_and_options_override_it(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = parse_problem("--model", model, monkeypatch=monkeypatch)
    assert str(problem) == MODEL_PROBLEMS[model]
    options = ("--model", model, "--hidden", "96", "--no-bias")
    overridden = parse_problem(*options, monkeypatch=monkeypatch)
    assert overridden == replace(problem, hidden=96, bias=False)
    overridden = parse_problem("--model", model, "--quant", "none", monkeypatch=monkeypatch)
    assert overridden == replace(problem, quant="none")


def test_command_of_a_case_reproduces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
    for seed, (problem, routing) in enumerate(list_axis_variants(BASE)):
        case = Case(*pair, problem, routing, seed)
        args = shlex.split(command(case))
        assert args[0] == "mk"
        assert parse_case(*args[1:], monkeypatch=monkeypatch) == case
    for case in cases_for(*pair, Machine()).cases:
        args = shlex.split(command(case))
        assert parse_case(*args[1:], monkeypatch=monkeypatch) == case


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("check --dtype int8", "dtype: got int8, need one of bfloat16, float16, float32\n"),
        ("check --quant fp8", "quant: got fp8, need one of fp8_w8a16_block, fp8_w8a16_channel, "),
        ("check --activation swish", "activation: got swish, need one of silu, gelu, gelu_tanh, "),
        ("check --combine max", "--combine: got 'max', need sum, topk_weighted or topk_unw"),
        ("check --ids-dtype int8", "--ids-dtype: got 'int8', need int32 or int64\n"),
        ("check --fp32-precision fp32", "--fp32-precision: got 'fp32', need ieee or tf32\n"),
        ("check --model gpt-2", "model: got 'gpt-2', need gpt-oss-"),
        ("check --model=", "model: got '', need a name of `mk models`"),
        ("plan --machine h200 --model=", "model: got '', need a name of `mk models`"),
        ("plan --machine h200 --world-size 2", "--world-size: got 2, need at most 1, the GPUs of"),
        ("plan --machine 2x4xh200 --world-size 6", "got 6, need a multiple of 4, the GPUs of a"),
        ("plan --machine 2x4xh200 --ranks-per-host 8", "need 4 as in --machine"),
        ("plan --placement round_robin", "--placement: got round_robin, need linear in mk plan"),
        (
            "check --machine 8xh20",
            "need one of the GPUs a100, h100, h200, b200, or a .json file (did",
        ),
        ("check --machine 8xh200 --arch 9.0", "--arch: got --arch together with --machine"),
        ("check --packages deep_gem", "(did you mean deep_gemm?)"),
        ("list --packages deep_gemm,al", "--packages: got 'al', need all, or some of"),
        ("plan --tokens-list=", "--tokens-list: got '', need numbers from 1 to 1048575"),
        ("check --top-k 0", "top_k: got 0, need an int >= 1"),
        ("check --inplace --combine topk_weighted", "inplace: got combine=TOPK_WEIGHTED"),
        ("check --tokens many", "--tokens: got 'many', need an integer"),
        ("compose --world-size 16", "default layer without --model: got 8 experts for 16 ranks"),
        ("check --no-such-option", "No such option"),
        ("check --arch nine", "--arch: got 'nine', need a capability such as 9.0"),
        ("check --device tpu", "--device: got 'tpu', need cuda or cpu"),
        ("check --device cpu --arch 9.0", "need no --arch with --device cpu"),
        ("check --pf-type NoSuchPart --experts-type TorchExperts", "'NoSuchPart', need one of"),
        ("check --pf-type MoEPrepareAndFinalizeNoE", "did you mean MoEPrepareAndFinalizeNoEP?"),
        ("test --experts-type TorchExpert", "did you mean TorchExperts?"),
        ("test --level some", "--level: got 'some', need smoke or full"),
        ("test --one", "--one: got no pairing"),
        ("test --tokens 5", "got no --one"),
        ("test --seed 5", "got no --one"),
        (f"test --one {' '.join(TORCH_PAIR)} --routing odd", "--routing: got 'odd', need one of"),
        (f"test --one {' '.join(TORCH_PAIR)} --layout odd", "layout: got odd, need one of plain"),
        (f"test --one {' '.join(TORCH_PAIR)} --values odd", "values: got odd, need one of ordin"),
        ("profile --calls 0", "--calls: got '0', need an integer from 1 to 100"),
        ("profile --out pyproject.toml/x", "pyproject.toml is a file, need a folder"),
        ("nonsense", "nonsense"),
    ],
)
def test_bad_usage_has_exit_code_2_and_a_reason(
    capsys: pytest.CaptureFixture[str], args: str, message: str
) -> None:
    code, out, err = run_mk(capsys, *args.split())
    assert code == 2
    assert message in err
    assert out == ""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("doctorr", "No such command 'doctorr'. Did you mean 'doctor'? (see mk -h)"),
        (
            "check --exprets-type X",
            "No such option '--exprets-type'. (Did you mean one of: '--experts'",
        ),
        ("check --tokens x", "--tokens: got 'x', need an integer\n"),
        ("check --routed-scaling-factor 1,5", "got '1,5', need a number\n"),
        ("check TorchExperts", "Got unexpected extra argument (TorchExperts) (see mk check -h)"),
        ("check --experts-type", "Option '--experts-type' requires an argument (see mk check -h)"),
        ("--no-such-option", "No such option '--no-such-option' (see mk -h)"),
        ("check --world 2", "'--world'. Did you mean '--world-size'? (see mk check -h)"),
        ("exchange --ranks 2", "'--ranks'. Did you mean '--world-size'? (see mk exchange -h)"),
        ("test --worlds 2", "'--worlds'. Did you mean '--world-size'? (see mk test -h)"),
        ("plan --ranks-per-node 2", "Did you mean '--ranks-per-host'? (see mk plan -h)"),
        ("test --gpus_per_node 2", "Did you mean '--ranks-per-host'? (see mk test -h)"),
        ("check --batch_invariant", "Did you mean '--batch-invariant'? (see mk check -h)"),
        ("exchange --ranks-per-node 2", "No such option '--ranks-per-node' (see mk exchange -h)"),
        ("doctor --ranks 2", "No such option '--ranks' (see mk doctor -h)"),
    ],
)
def test_usage_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], args: str, message: str
) -> None:
    code, out, err = run_mk(capsys, *args.split())
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def list_number_options() -> list[tuple[str, str, str]]:
    """Return (verb, option, description of valid values) for every option that takes a number."""
    return [
        (verb, parameter.opts[0], parameter.type.need)
        for verb, command in main.make_application().commands.items()
        for parameter in command.params
        if isinstance(parameter.type, click.types.IntParamType | click.types.FloatParamType)
    ]


def test_errors_of_number_options_have_name_and_need(
    capsys: pytest.CaptureFixture[str],
) -> None:
    number_options = list_number_options()
    assert len(number_options) > 100
    for verb, name, need in number_options:
        result = run_mk(capsys, verb, name, "x")
        assert result == (2, "", f"error: {name}: got 'x', need {need}\n")
        assert need.startswith(("an integer", "a number"))


def test_invalid_number_is_reported_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_mk(capsys, "check", "--json", "--tokens", "9" * 5000)
    assert code == 2
    error = json.loads(out)["error"]
    assert (error["what"], error["need"]) == ("--tokens", "an integer")
    assert len(error["got"]) < 200


def test_annotations_determine_the_types_of_options() -> None:
    values: dict[str, object] = {}

    def verb(
        *,
        many: Annotated[tuple[Path, ...], option("")] = (),
        one: Annotated[Path | None, option("")] = None,
        two: Annotated[tuple[str, str] | None, option("")] = None,
        counts: Annotated[tuple[int, ...] | None, option("", type=IntegerList(9, "1"))] = None,
        word: Annotated[Literal["a", "b"] | None, option("")] = None,
        share: Annotated[float, option("")] = 0.5,
        yes: Annotated[bool, option("")] = False,
        bias: Annotated[bool | None, option("", "--bias/--no-bias")] = None,
    ) -> None:
        values.update(many=many, one=one, two=two, counts=counts, word=word, share=share)
        values.update(yes=yes, bias=bias)

    command = make_verb("verb", verb, "")
    for args, expected in (
        ("", ((), None, None, None, None, 0.5, False, None)),
        (
            "--many a --many b --share 2 --yes --no-bias",
            ((Path("a"), Path("b")), None, None, None, None, 2.0, True, False),
        ),
        (
            "--one c --two d e --counts 3,1,3 --word b --bias",
            ((), Path("c"), ("d", "e"), (3, 1), "b", 0.5, False, True),
        ),
    ):
        command.main(args.split(), standalone_mode=False)
        assert tuple(values.values()) == expected
        assert [type(value) for value in values.values()] == [type(value) for value in expected]
    for args in ("--word c", "--counts 1,10", "--counts x", "--counts="):
        assert command.main(args.split(), standalone_mode=False) == 2


@pytest.mark.parametrize("number", ["0", "-1", "nan"])
def test_numbers_out_of_range_are_bad_usage(
    capsys: pytest.CaptureFixture[str], number: str
) -> None:
    result = run_mk(capsys, "bench", "--ms", number)
    assert result == (2, "", f"error: --ms: got '{number}', need a number > 0\n")


def test_choices_equal_those_of_a_problem() -> None:
    hints = get_type_hints(ProblemOptions)
    (combine, _), (precision, _) = map(get_args, (hints["combine"], hints["fp32_precision"]))
    assert get_args(combine) == tuple(member.value for member in Combine)
    assert precision == get_type_hints(Problem)["fp32_precision"]


def test_no_arguments_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_mk(capsys)
    assert code == 2
    assert "Usage: mk" in out + err


def test_bad_usage_is_reported_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_mk(capsys, "check", "--json", "--dtype", "int8")
    assert code == 2
    need = "one of bfloat16, float16, float32"
    error = {"type": "ConfigurationError", "what": "dtype", "got": "int8", "need": need}
    assert json.loads(out) == {"error": error}


def test_another_gpu_needs_an_arch(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, _ = run_mk(capsys, "check", "--device", "cuda")
    assert code == (0 if torch.cuda.is_available() else 2)


def test_arch_is_parsed() -> None:
    assert [parse_arch(text) for text in ("9.0", "90", "sm_90", "12.1", "sm_120")] == [
        *((9, 0),) * 3,
        (12, 1),
        (12, 0),
    ]
    with pytest.raises(ConfigurationError):
        parse_arch("9")


@pytest.mark.parametrize("verb", main.VERBS)
def test_help_does_not_break_lines_inside_option_names(
    capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    text = run_mk(capsys, verb, "--help").out
    assert re.search(r"--[a-z-]+-\n", text) is None
    assert "\N{NON-BREAKING HYPHEN}" not in text
    assert max(map(len, text.splitlines())) <= 80
