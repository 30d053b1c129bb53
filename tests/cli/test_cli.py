"""The subcommands of `mk`: exit codes, refusals with every reason, and JSON."""

import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from run_mk import CommandResult, Mk, make_mk_fixture, run_mk

from experts import TorchExperts
from modular_kernel.catalog import this_machine
from modular_kernel.cli import output
from modular_kernel.cli.ranks import Executor
from modular_kernel.testing.cases.lists import BASE, Case
from modular_kernel.testing.input_mutations import run as input_mutations
from modular_kernel.testing.verify.one_process import Proof

ROOT = Path(__file__).resolve().parents[2]
TORCH_PAIR = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TorchExperts")
INPUT_MUTATIONS = ("test", "--mutate", "TorchExperts", "--mutants", "0", *TORCH_PAIR)
REFUSED_PAIR = ("--pf-type", "BatchedPrepareAndFinalize", "--experts-type", "TritonExperts")
HAS_TRITON = this_machine().device == "cuda" or this_machine().interpreter


mk = make_mk_fixture()


def run_python(*args: str) -> CommandResult:
    """Run a new Python process in the checkout."""
    process = subprocess.run(
        [sys.executable, *args], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return CommandResult(process.returncode, process.stdout, process.stderr)


def test_module_runs_like_the_command() -> None:
    assert run_python("-m", "modular_kernel", "--version").out.count(".") >= 2
    refused = run_python("-m", "modular_kernel", "check", *REFUSED_PAIR)
    assert refused.code == 1
    assert "format" in refused.out


@pytest.mark.parametrize(
    ("script", "args", "expected"),
    [
        ("check_combinations.py", REFUSED_PAIR, "batched_experts from BatchedPrepareAndFinalize"),
        ("profile_modular_kernel.py", REFUSED_PAIR, "batched_experts from Batched"),
        ("check_combinations.py", ("--help",), "Usage: mk check"),
        ("profile_modular_kernel.py", ("--help",), "Usage: mk profile"),
    ],
)
def test_scripts_run_in_a_checkout(script: str, args: tuple[str, ...], expected: str) -> None:
    result = run_python(f"tools/{script}", *args)
    assert result.code == (0 if args == ("--help",) else 1), result.err
    assert expected in result.out


def test_json_contains_no_infinity_or_nan() -> None:
    """JSON has no infinity and NaN, so they become strings."""
    values = {"errors": (float("inf"), float("nan"), 0.5)}
    assert output.to_json_types(values) == {"errors": ["inf", "nan", 0.5]}


# ------------------------------------------------------------------------------------------ list


def test_list_shows_every_part(mk: Mk) -> None:
    result, record = mk("list"), mk("list", "--json").json
    assert result.code == 0
    parts = {part["name"]: part for part in record["parts"]}
    assert {"MoEPrepareAndFinalizeNoEP", "BatchedPrepareAndFinalize", "TorchExperts"} <= set(parts)
    assert [name for name in parts if name not in result.out] == []
    triton = parts["TritonExperts"]
    assert triton["kind"] == "experts"
    assert triton["origin"] == "modular-kernel (experts:COMPONENTS)"
    assert triton["available"] is HAS_TRITON
    assert triton["requires"]["activation_format"] == "standard"
    assert triton["requires"]["dtypes"] == ["bfloat16", "float16", "float32"]
    assert triton["requires"]["packages"] == ["triton"]
    assert parts["KeepTopK"]["requires"] is None
    assert (record["broken"], record["duplicates"]) == ([], {})


def test_list_explains_capabilities_and_formats(mk: Mk) -> None:
    """The legend and the glossary explain every capability and activation format of the parts."""
    text, record = mk("list").out, mk("list", "--json").json
    parts, legend = text.split("meaning")
    assert "terms are explained at the end" in parts
    requirements = [part["requires"] for part in record["parts"] if part["requires"]]
    printed = {word for line in parts.splitlines() for word in line.replace(",", "").split()}
    capabilities = {
        name for required in requirements for name, value in required.items() if value is True
    }
    capabilities -= {package for required in requirements for package in required["packages"]}
    formats = {required["activation_format"] for required in requirements}
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    assert capabilities & printed
    for term in (capabilities & printed) | formats:
        assert f" {term} " in legend
        assert f"`{term}`" in glossary


def test_interpreter_is_noted_once_on_stderr(mk: Mk) -> None:
    count = mk("list").err.count("no CUDA device here")
    assert count == (0 if torch.cuda.is_available() else 1)
    assert mk("check", "--arch", "9.0", "--hidden", "128").err == ""


# ----------------------------------------------------------------------------------------- check


def test_check_shows_each_rejection(mk: Mk) -> None:
    result = mk("check", *REFUSED_PAIR)
    assert result.code == 1
    rows = [
        [cell.strip() for cell in line.split("  ") if cell.strip()]
        for line in result.out.splitlines()
    ]
    parties = "BatchedPrepareAndFinalize / TritonExperts"
    got = "batched_experts from BatchedPrepareAndFinalize"
    hint = "choose a batched_experts experts part"
    assert ["format", parties, got, "standard for TritonExperts", hint] in rows
    assert [
        "reduce",
        parties,
        "noop left by TritonExperts",
        "one of delegate, naive_batched",
    ] in rows
    record = mk("check", *REFUSED_PAIR, "--json").json
    assert not record["ok"]
    assert [rejection["rule"] for rejection in record["rejections"]] == ["format", "reduce"]
    assert record["rejections"][0] == {
        "rule": "format",
        "parties": ["BatchedPrepareAndFinalize", "TritonExperts"],
        "got": got,
        "need": "standard for TritonExperts",
        "hint": hint,
    }
    assert record["problem"]["hidden"] == 2048
    names = {"device", "arch", "packages", "interpreter", "name", "others", "cuda", "memory"}
    assert set(record["machine"]) == names


def test_check_accepts_a_valid_pair(mk: Mk) -> None:
    result = mk("check", *TORCH_PAIR)
    assert result.code == 0
    assert "MoEPrepareAndFinalizeNoEP x TorchExperts: valid" in result.out
    assert mk("check", *TORCH_PAIR, "--json").json["ok"]


def test_check_shows_every_reason(mk: Mk) -> None:
    args = ("--graph", "--top-k", "33", "--batch-invariant")
    record = mk("check", *TORCH_PAIR, *args, "--json").json
    rules = {rejection["rule"] for rejection in record["rejections"]}
    assert rules == {"graph", "top_k", "batch_invariant"}
    text = mk("check", *TORCH_PAIR, *args).out
    assert [rule for rule in rules if f"\n {rule} " not in text] == []


def test_check_without_a_pair_judges_all_pairs(mk: Mk) -> None:
    record = mk("check", "--json").json
    pairs = {(pair["prepare_finalize"], pair["experts"]): pair for pair in record["pairs"]}
    assert pairs["MoEPrepareAndFinalizeNoEP", "TorchExperts"]["ok"]
    refused = pairs["BatchedPrepareAndFinalize", "TorchExperts"]
    assert [r["rule"] for r in refused["rejections"]] == ["format", "reduce"]
    result = mk("check")
    assert result.code == 0
    valid = sum(pair["ok"] for pair in pairs.values())
    assert f"{valid} of {len(pairs)} pairings are valid" in result.out
    same_experts = mk("check", "--json", "--experts-type", "TorchExperts").json["pairs"]
    assert {pair["experts"] for pair in same_experts} == {"TorchExperts"}
    assert len(same_experts) == len({pf for pf, _ in pairs})


def test_check_lists_the_valid_pairs(mk: Mk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    args = ("check", "--machine", "8xh200", "--packages", "all")
    listed = {
        f"{part} x {experts}"
        for line in mk(*args).out.splitlines()
        if line.startswith("valid: ")
        for parts, experts_of_part in [line.removeprefix("valid: ").split(" x ")]
        for part in parts.split(", ")
        for experts in experts_of_part.split(", ")
    }
    pairs = mk(*args, "--json").json["pairs"]
    assert listed == {f"{p['prepare_finalize']} x {p['experts']}" for p in pairs if p["ok"]}
    assert "valid: " not in mk("check", "--top-k", "99").out


@pytest.mark.parametrize("machine", [(), ("--machine", "8xh200", "--packages", "all")])
def test_no_pair_is_refused_for_the_default_sizes(mk: Mk, machine: tuple[str, ...]) -> None:
    pairs = mk("check", *machine, "--json").json["pairs"]
    rules = {rejection["rule"] for pair in pairs for rejection in pair["rejections"]}
    assert "quant" in rules
    assert rules.isdisjoint({"hidden", "intermediate"})
    help_text = " ".join(mk("check", "--help").out.split())
    assert "Hidden size. [default: 2048, or the model's]" in help_text


@pytest.mark.parametrize("verb", ["check", "test", "profile"])
def test_ranks_per_host_needs_ranks(mk: Mk, verb: str) -> None:
    one_option = ("--one",) if verb == "test" else ()
    result = mk(verb, *TORCH_PAIR, *one_option, "--ranks-per-host", "4")
    assert result.code == 2
    assert "error: --ranks-per-host: got 4, need --world-size N in addition" in result.err


def test_check_exits_with_1_if_no_pair_is_valid(mk: Mk) -> None:
    assert mk("check", "--top-k", "99").code == 1


@pytest.mark.parametrize(
    ("args", "rules"),
    [
        ("--arch 9.0 --device cuda --packages deep_ep,triton", []),
        ("--arch sm_90 --packages triton", []),
        ("--arch 7.5 --packages triton", ["arch"]),
        ("--arch 9.0 --packages deep_ep", ["package"]),
        ("--arch 7.0 --packages=", ["arch", "package"]),
        ("--device cpu --packages triton", ["device"]),
        ("--device cpu --packages triton,ml_dtypes", []),
    ],
)
def test_check_judges_pairs_for_another_machine(mk: Mk, args: str, rules: list[str]) -> None:
    pair = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TritonExperts")
    result = mk("check", *pair, *args.split(), "--json")
    assert [rejection["rule"] for rejection in result.json["rejections"]] == rules
    assert result.code == (1 if rules else 0)
    assert all(r["parties"] == ["TritonExperts", "machine"] for r in result.json["rejections"])


# ------------------------------------------------------------------------------------------ test


def test_all_cases_of_a_pair_are_verified(mk: Mk) -> None:
    result = mk("test", *TORCH_PAIR, "--json")
    assert result.code == 0
    (pair,) = result.json["pairs"]
    assert pair["cases"] >= 6
    assert pair["failed"] == 0
    assert 0 < pair["worst"]["error"] <= pair["worst"]["bound"]


def test_one_case_is_verified(mk: Mk) -> None:
    args = ("--one", "--routing", "zipf", "--seed", "3", "--tokens", "5")
    result = mk("test", *TORCH_PAIR, *args)
    assert result.code == 0
    assert "1 case of 1 pairing: 1 passed, 0 failed" in result.out
    record = mk("test", *TORCH_PAIR, *args, "--json").json
    case = "MoEPrepareAndFinalizeNoEP+TorchExperts-T5-H64-I128-E8-K2-bfloat16-zipf-seed3"
    assert record["pairs"][0]["worst"]["case"] == case


def test_failure_is_noted_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verified, errors = list[Case](), list[str]()

    def fail_every_second(
        executor: Executor, cases: Sequence[Case], workers: int
    ) -> Iterator[Proof]:
        assert workers == 1
        for case in cases:
            errors.append(capsys.readouterr().err)
            verified.append(case)
            failures = ("float64 reference: no",) if len(verified) % 2 else ()
            yield Proof(case, executor.machine, 0.0, 1.0, failures, 0.0)

    monkeypatch.setattr(Executor, "verify_cases", fail_every_second)
    assert run_mk(capsys, "test", *TORCH_PAIR).code == 1
    assert len(verified) > 3
    assert errors[1:3] == [f"failed: {verified[0]}\n", ""]


@pytest.mark.parametrize("args", [(), ("--one",)], ids=["level", "one"])
def test_refused_pair_has_every_reason(mk: Mk, args: tuple[str, ...]) -> None:
    result = mk("test", *REFUSED_PAIR, *args)
    assert result.code == 1
    assert "\n format " in result.out
    assert "\n reduce " in result.out
    record = mk("test", *REFUSED_PAIR, *args, "--json").json
    assert [rejection["rule"] for rejection in record["rejections"]] == ["format", "reduce"]


def test_failures_have_a_command_that_reproduces_them(
    mk: Mk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_zeros(self: TorchExperts, *_: object, output: torch.Tensor, **__: object) -> None:
        output.zero_()

    args = (*TORCH_PAIR, "--one", "--tokens", "5")
    with monkeypatch.context() as patch:
        patch.setattr(TorchExperts, "apply", write_zeros)
        result, record = mk("test", *args), mk("test", *args, "--json")
        assert (result.code, record.code) == (1, 1)
        (failure,) = record.json["pairs"][0]["failures"]
        assert any(text.startswith("numeric: ") for text in failure["failures"])
        assert failure["command"] in result.out
        assert [text for text in failure["failures"] if text not in result.out] == []
        command_line = shlex.split(failure["command"])[1:]
        assert mk(*command_line).code == 1
    assert mk(*command_line).code == 0


def test_every_input_mutation_is_printed(mk: Mk, monkeypatch: pytest.MonkeyPatch) -> None:
    first_mutants = input_mutations.MUTANTS[:2]
    run_first_mutants = partial(input_mutations.sensitivity, mutants=first_mutants, cases_each=1)
    monkeypatch.setattr(input_mutations, "sensitivity", run_first_mutants)
    result, record = mk(*INPUT_MUTATIONS), mk(*INPUT_MUTATIONS, "--json")
    assert (result.code, record.code) == (0, 0)
    assert [kill["mutant"] for kill in record.json["calls"]] == [
        mutant.name for mutant in first_mutants
    ]
    for kill in record.json["calls"]:
        assert f"\n {kill['mutant']} " in result.out
        assert kill["killed_by"]


def test_missed_input_mutation_exits_with_1(mk: Mk, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("MoEPrepareAndFinalizeNoEP", "TorchExperts", BASE)
    kill = input_mutations.CallMutantResult(
        "harmless", case, failure_without_mutant=None, killed_by=None
    )
    monkeypatch.setattr(input_mutations, "sensitivity", lambda *_, on_mutant: (kill,))
    result = mk(*INPUT_MUTATIONS)
    assert result.code == 1
    assert "MISSED" in result.out
    assert mk(*INPUT_MUTATIONS, "--one").code == 2


def test_input_mutation_without_effect_is_not_applicable(
    mk: Mk, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("MoEPrepareAndFinalizeNoEP", "TorchExperts", BASE)
    kill = input_mutations.CallMutantResult(
        "idle",
        case,
        failure_without_mutant=None,
        killed_by=None,
        no_effect_reason="no part reads it",
    )
    monkeypatch.setattr(input_mutations, "sensitivity", lambda *_, on_mutant: (kill,))
    result = mk(*INPUT_MUTATIONS)
    assert result.code == 0
    assert "1 input mutation: 0 killed, 0 missed, 1 not applicable" in result.out
    assert f"idle in {case}: no effect: no part reads it" in result.out
    assert mk(*INPUT_MUTATIONS, "--json").json["calls"][0]["changes_nothing"] == "no part reads it"


def test_pair_that_fails_without_mutation_is_reported(
    mk: Mk, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("MoEPrepareAndFinalizeNoEP", "TorchExperts", BASE)
    kill = input_mutations.CallMutantResult(
        "zeros",
        case,
        failure_without_mutant="numeric: far off",
        killed_by="numeric: all zeros",
    )
    monkeypatch.setattr(input_mutations, "sensitivity", lambda *_, on_mutant: (kill,))
    result = mk(*INPUT_MUTATIONS)
    assert result.code == 1
    assert f"zeros in {case}: fails without the mutant: numeric: far off" in result.out
    assert "fails without the mutation" in result.out
    record = mk(*INPUT_MUTATIONS, "--json").json
    assert not record["ok"]
    assert record["calls"][0]["unsound"] == "numeric: far off"


# -------------------------------------------------------------------------------- doctor, compile


def test_doctor_shows_versions_and_packages(mk: Mk) -> None:
    result, record = mk("doctor"), mk("doctor", "--json").json
    assert result.code == 0
    assert record["versions"]["torch"] == torch.__version__
    assert len(record["devices"]) == torch.cuda.device_count()
    packages = {package["name"]: package for package in record["packages"]}
    assert {"deep_ep", "pplx_kernels", "transformers", "ml_dtypes"} <= set(packages)
    assert "TritonExperts" in packages["triton"]["enables"]
    assert not packages["pplx_kernels"]["present"]
    assert all(package["enables"] for package in packages.values())
    assert record["interpreter"] is this_machine().interpreter
    assert [name for name in packages if f"\n {name} " not in result.out] == []


@pytest.mark.parametrize("reason", [None, "for sm_80 alone", ""])
@pytest.mark.parametrize("violations", [(), ("spills",)], ids=["clean", "violated"])
def test_compile_shows_kernels_and_checks_limits(
    mk: Mk, violations: tuple[str, ...], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --check, kernels that exceed a limit or are skipped without a reason are failures."""
    record = SimpleNamespace(
        kernel="gemm_kernel",
        config={"BLOCK_M": 64},
        num_warps=4,
        num_stages=3,
        registers=168,
        shared=1024,
        stack=8,
        spill=0,
        instructions={"HGMMA": 12, "HMMA": 0},
    )
    row = SimpleNamespace(case="bf16", record=record, violations=violations)
    skipped_kernel = SimpleNamespace(kernel="other_kernel", module="parts.kernels", reason=reason)
    calls: list[tuple[str, int, str]] = []
    module = ModuleType("modular_kernel.testing.compile.cases")
    compiled = SimpleNamespace(rows=[row], left_out=[skipped_kernel] if reason is not None else [])
    module.compile_all = lambda target, progress, workers, name_filter: (
        calls.append((target, workers, name_filter)) or compiled
    )  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert mk("compile", "--arch", "10.0").code == 0
    result = mk("compile", "--check", "--workers", "2", "--only", "bf16")
    assert result.code == (1 if violations or reason == "" else 0)
    assert ("other_kernel" in result.out) is (reason is not None)
    assert ("no case launches it" in result.out) is (reason == "")
    assert calls == [("sm_100", 1, ""), ("sm_90", 2, "bf16")]
    assert "; only cases and kernels matching 'bf16' were compiled" in result.out
    assert " left out" not in result.out.splitlines()[-1]  # with --only, the others are not listed
    assert result.err.startswith("kernels of cases named 'bf16' for sm_90: may take minutes")
    record = mk("compile", "--check", "--only", "bf16", "--json").json
    assert record["only"] == "bf16"
    assert mk("compile", "--workers", "0").code == 2
    compiled.rows = compiled.left_out = []
    assert "--only: got 'nothing', need part of the name" in mk("compile", "--only", "nothing").err
    kernels = "modular_kernel.testing.compile.kernels_defined.defined_kernels"
    monkeypatch.setattr(kernels, lambda: dict.fromkeys(("route_kernel", "gemm_kernel")))
    assert mk("compile").err.startswith("2 kernels for sm_90, in every form that parts launch")
    note = mk("compile", "--only", "route").err
    assert note.startswith("1 of 2 kernels for sm_90 (named 'route'), and all kernels of matching")
    for text in ("gemm_kernel", "BLOCK_M=64, warps=4, stages=3", "168", "1024", "HGMMA x12"):
        assert text in result.out
    assert ("exceeds a limit" in result.out) is bool(violations)


def test_compile_check_shows_counted_instructions(mk: Mk, monkeypatch: pytest.MonkeyPatch) -> None:
    from modular_kernel.testing.compile import report as compile_report
    from modular_kernel.testing.compile.cases import CompiledRow, CompileResult

    zeros = dict.fromkeys(compile_report.FAMILIES, 0)
    monkeypatch.setattr(
        compile_report, "_count_instructions", lambda cubin: {**zeros, cubin.decode(): 7}
    )

    def make_row(name: str) -> CompiledRow:
        counts = compile_report.Instructions(name.encode())
        record = compile_report.CompileRecord("k", "sm_90", {}, {}, 4, 1, 0, 9, 0, 0, counts, 0.0)
        return CompiledRow(f"case {name}", record, ())

    def compile_all(*_: object, **__: object) -> CompileResult:
        counted = make_row("HGMMA")
        assert counted.record.instructions["HGMMA"] == 7  # reading the counts computes them
        return CompileResult((counted, make_row("FFMA")), ())

    monkeypatch.setattr("modular_kernel.testing.compile.cases.compile_all", compile_all)
    text = mk("compile", "--check").out
    assert "HGMMA x7" in text
    assert text.count("not counted") == 1
    assert "FFMA x7" not in text
    text = mk("compile").out
    assert "HGMMA x7" in text
    assert "FFMA x7" in text
