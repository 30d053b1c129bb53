"""The verbs of the `mk` command: exit codes, refusals with every reason, JSON, traces."""

import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from run_mk import Ended, Mk, run_mk, runs_mk

from experts import TorchExperts
from modular_kernel.catalog import this_machine
from modular_kernel.cli import output
from modular_kernel.cli.ranks import Host
from modular_kernel.testing.cases.lists import BASE, Case
from modular_kernel.testing.input_mutations import run as mutants
from modular_kernel.testing.verify.one_process import Proof

ROOT = Path(__file__).resolve().parents[2]
TORCH_PAIR = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TorchExperts")
IN_CALLS = ("test", "--mutate", "TorchExperts", "--mutants", "0", *TORCH_PAIR)
REFUSED_PAIR = ("--pf-type", "BatchedPrepareAndFinalize", "--experts-type", "TritonExperts")
TRITON_HERE = this_machine().device == "cuda" or this_machine().interpreter


mk = runs_mk()


def python(*words: str) -> Ended:
    """Runs a fresh interpreter in the checkout."""
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def test_the_module_and_the_version() -> None:
    assert python("-m", "modular_kernel", "--version").out.count(".") >= 2
    refused = python("-m", "modular_kernel", "check", *REFUSED_PAIR)
    assert refused.code == 1
    assert "format" in refused.out


@pytest.mark.parametrize(
    ("script", "words", "expected"),
    [
        ("check_combinations.py", REFUSED_PAIR, "batched_experts from BatchedPrepareAndFinalize"),
        ("profile_modular_kernel.py", REFUSED_PAIR, "batched_experts from Batched"),
        ("check_combinations.py", ("--help",), "Usage: mk check"),
        ("profile_modular_kernel.py", ("--help",), "Usage: mk profile"),
    ],
)
def test_scripts_run_in_a_checkout(script: str, words: tuple[str, ...], expected: str) -> None:
    done = python(f"tools/{script}", *words)
    assert done.code == (0 if words == ("--help",) else 1), done.err
    assert expected in done.out


def test_json_holds_no_infinity() -> None:
    """JSON has no infinity: an error that could not be measured becomes a string."""
    values = {"errors": (float("inf"), float("nan"), 0.5)}
    assert output.to_json_types(values) == {"errors": ["inf", "nan", 0.5]}


# ------------------------------------------------------------------------------------------ list


def test_list(mk: Mk) -> None:
    shown, record = mk("list"), mk("list", "--json").json
    assert shown.code == 0
    parts = {part["name"]: part for part in record["parts"]}
    assert {"MoEPrepareAndFinalizeNoEP", "BatchedPrepareAndFinalize", "TorchExperts"} <= set(parts)
    assert [name for name in parts if name not in shown.out] == []
    triton = parts["TritonExperts"]
    assert triton["kind"] == "experts"
    assert triton["origin"] == "modular-kernel (experts:COMPONENTS)"
    assert triton["available"] is TRITON_HERE
    assert triton["requires"]["activation_format"] == "standard"
    assert triton["requires"]["dtypes"] == ["bfloat16", "float16", "float32"]
    assert triton["requires"]["packages"] == ["triton"]
    assert parts["KeepTopK"]["requires"] is None
    assert (record["broken"], record["duplicates"]) == ([], {})


def test_list_explains_its_terms(mk: Mk) -> None:
    """The legend has every option and format of the parts, and so has the glossary."""
    shown, told = mk("list").out, mk("list", "--json").json
    parts, words = shown.split("meaning")
    assert "terms are explained at the end" in parts
    requires = [part["requires"] for part in told["parts"] if part["requires"]]
    said = {word for line in parts.splitlines() for word in line.replace(",", "").split()}
    options = {name for one in requires for name, value in one.items() if value is True}
    options -= {package for one in requires for package in one["packages"]}
    formats = {one["activation_format"] for one in requires}
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    assert options & said
    for word in (options & said) | formats:
        assert f" {word} " in words
        assert f"`{word}`" in glossary


def test_interpreter_is_noted_once_on_stderr(mk: Mk) -> None:
    announced = mk("list").err.count("no CUDA device here")
    assert announced == (0 if torch.cuda.is_available() else 1)
    assert mk("check", "--arch", "9.0").err == ""


# ----------------------------------------------------------------------------------------- check


def test_check_refuses_with_rule_parties_got_and_need(mk: Mk) -> None:
    ended = mk("check", *REFUSED_PAIR)
    assert ended.code == 1
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in _lines(ended)]
    both = "BatchedPrepareAndFinalize / TritonExperts"
    got = "batched_experts from BatchedPrepareAndFinalize"
    hint = "choose a batched_experts experts part"
    assert ["format", both, got, "standard for TritonExperts", hint] in rows
    assert ["reduce", both, "noop left by TritonExperts", "one of delegate, naive_batched"] in rows
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
    assert record["problem"]["hidden"] == 64
    names = {"device", "arch", "packages", "interpreter", "name", "others", "cuda", "memory"}
    assert set(record["machine"]) == names


def _lines(ended: Ended) -> Iterator[str]:
    yield from ended.out.splitlines()


def test_check_accepts(mk: Mk) -> None:
    ended = mk("check", *TORCH_PAIR)
    assert ended.code == 0
    assert "MoEPrepareAndFinalizeNoEP x TorchExperts: valid" in ended.out
    assert mk("check", *TORCH_PAIR, "--json").json["ok"]


def test_check_shows_every_reason(mk: Mk) -> None:
    words = ("--graph", "--top-k", "33", "--batch-invariant")
    record = mk("check", *TORCH_PAIR, *words, "--json").json
    rules = {rejection["rule"] for rejection in record["rejections"]}
    assert rules == {"graph", "top_k", "batch_invariant"}
    shown = mk("check", *TORCH_PAIR, *words).out
    assert [rule for rule in rules if f"\n {rule} " not in shown] == []


def test_check_all_pairs(mk: Mk) -> None:
    record = mk("check", "--json").json
    pairs = {(pair["prepare_finalize"], pair["experts"]): pair for pair in record["pairs"]}
    assert pairs["MoEPrepareAndFinalizeNoEP", "TorchExperts"]["ok"]
    refused = pairs["BatchedPrepareAndFinalize", "TorchExperts"]
    assert [r["rule"] for r in refused["rejections"]] == ["format", "reduce"]
    shown = mk("check")
    assert shown.code == 0
    valid = sum(pair["ok"] for pair in pairs.values())
    assert f"{valid} of {len(pairs)} pairs are valid" in shown.out
    one_side = mk("check", "--json", "--experts-type", "TorchExperts").json["pairs"]
    assert {pair["experts"] for pair in one_side} == {"TorchExperts"}
    assert len(one_side) == len({pf for pf, _ in pairs})


def test_check_exits_with_1_if_no_pair_is_valid(mk: Mk) -> None:
    assert mk("check", "--top-k", "99").code == 1


@pytest.mark.parametrize(
    ("words", "rules"),
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
def test_check_for_a_described_machine(mk: Mk, words: str, rules: list[str]) -> None:
    pair = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TritonExperts")
    ended = mk("check", *pair, *words.split(), "--json")
    assert [rejection["rule"] for rejection in ended.json["rejections"]] == rules
    assert ended.code == (1 if rules else 0)
    assert all(r["parties"] == ["TritonExperts", "machine"] for r in ended.json["rejections"])


# ------------------------------------------------------------------------------------------ test


def test_verify_a_pair(mk: Mk) -> None:
    ended = mk("test", *TORCH_PAIR, "--json")
    assert ended.code == 0
    (pair,) = ended.json["pairs"]
    assert pair["cases"] >= 6
    assert pair["failed"] == 0
    assert 0 < pair["worst"]["error"] <= pair["worst"]["bound"]


def test_verify_one_case(mk: Mk) -> None:
    words = ("--one", "--routing", "zipf", "--seed", "3", "--tokens", "5")
    ended = mk("test", *TORCH_PAIR, *words)
    assert ended.code == 0
    assert "1 case of 1 pair: 1 passed, 0 failed" in ended.out
    record = mk("test", *TORCH_PAIR, *words, "--json").json
    case = "MoEPrepareAndFinalizeNoEP+TorchExperts-T5-H64-I128-E8-K2-bfloat16-zipf-seed3"
    assert record["pairs"][0]["worst"]["case"] == case


def test_failure_is_noted_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases, told = list[Case](), list[str]()

    def every_second_fails(host: Host, asked: Sequence[Case], workers: int) -> Iterator[Proof]:
        assert workers == 1
        for case in asked:
            told.append(capsys.readouterr().err)
            cases.append(case)
            failures = ("oracle: no",) if len(cases) % 2 else ()
            yield Proof(case, host.machine, 0.0, 1.0, failures, 0.0)

    monkeypatch.setattr(Host, "prove_all", every_second_fails)
    assert run_mk(capsys, "test", *TORCH_PAIR).code == 1
    assert len(cases) > 3
    assert told[1:3] == [f"failed: {cases[0]}\n", ""]


@pytest.mark.parametrize("words", [(), ("--one",)], ids=["level", "one"])
def test_refused_pair_has_every_reason(mk: Mk, words: tuple[str, ...]) -> None:
    ended = mk("test", *REFUSED_PAIR, *words)
    assert ended.code == 1
    assert "\n format " in ended.out
    assert "\n reduce " in ended.out
    record = mk("test", *REFUSED_PAIR, *words, "--json").json
    assert [rejection["rule"] for rejection in record["rejections"]] == ["format", "reduce"]


def test_failure_has_a_command_that_reproduces_it(mk: Mk, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: TorchExperts, *_: object, output: torch.Tensor, **__: object) -> None:
        output.zero_()

    words = (*TORCH_PAIR, "--one", "--tokens", "5")
    with monkeypatch.context() as broken:
        broken.setattr(TorchExperts, "apply", wrong)
        shown, record = mk("test", *words), mk("test", *words, "--json")
        assert (shown.code, record.code) == (1, 1)
        (failure,) = record.json["pairs"][0]["failures"]
        assert any(text.startswith("numeric: ") for text in failure["failures"])
        assert failure["command"] in shown.out
        assert [text for text in failure["failures"] if text not in shown.out] == []
        again = shlex.split(failure["command"])[1:]
        assert mk(*again).code == 1
    assert mk(*again).code == 0


def test_every_input_mutation_is_printed(mk: Mk, monkeypatch: pytest.MonkeyPatch) -> None:
    two = mutants.MUTANTS[:2]
    few = partial(mutants.sensitivity, mutants=two, cases_each=1)
    monkeypatch.setattr(mutants, "sensitivity", few)
    shown, record = mk(*IN_CALLS), mk(*IN_CALLS, "--json")
    assert (shown.code, record.code) == (0, 0)
    assert [kill["mutant"] for kill in record.json["calls"]] == [mutant.name for mutant in two]
    for kill in record.json["calls"]:
        assert f"\n {kill['mutant']} " in shown.out
        assert kill["killed_by"]


def test_missed_input_mutation_exits_with_1(mk: Mk, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("MoEPrepareAndFinalizeNoEP", "TorchExperts", BASE)
    kill = mutants.Kill("harmless", case, unsound=None, killed_by=None)
    monkeypatch.setattr(mutants, "sensitivity", lambda *_: (kill,))
    ended = mk(*IN_CALLS)
    assert ended.code == 1
    assert "MISSED" in ended.out
    assert mk(*IN_CALLS, "--one").code == 2


def test_input_mutation_without_effect_is_not_applicable(
    mk: Mk, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("MoEPrepareAndFinalizeNoEP", "TorchExperts", BASE)
    kill = mutants.Kill("idle", case, unsound=None, killed_by=None, nothing="nobody reads it")
    monkeypatch.setattr(mutants, "sensitivity", lambda *_: (kill,))
    ended = mk(*IN_CALLS)
    assert ended.code == 0
    assert "1 input mutation: 0 killed, 0 missed, 1 not applicable" in ended.out
    assert f"idle in {case}: no effect: nobody reads it" in ended.out
    assert mk(*IN_CALLS, "--json").json["calls"][0]["changes_nothing"] == "nobody reads it"


def test_pair_that_fails_without_mutation_is_reported(
    mk: Mk, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("MoEPrepareAndFinalizeNoEP", "TorchExperts", BASE)
    kill = mutants.Kill("zeros", case, unsound="numeric: far off", killed_by="numeric: all zeros")
    monkeypatch.setattr(mutants, "sensitivity", lambda *_: (kill,))
    ended = mk(*IN_CALLS)
    assert ended.code == 1
    assert f"zeros in {case}: fails without the mutant: numeric: far off" in ended.out
    assert "fails without the mutation" in ended.out
    record = mk(*IN_CALLS, "--json").json
    assert not record["ok"]
    assert record["calls"][0]["unsound"] == "numeric: far off"


# -------------------------------------------------------------------------------- doctor, compile


def test_doctor(mk: Mk) -> None:
    shown, record = mk("doctor"), mk("doctor", "--json").json
    assert shown.code == 0
    assert record["versions"]["torch"] == torch.__version__
    assert len(record["devices"]) == torch.cuda.device_count()
    packages = {package["name"]: package for package in record["packages"]}
    assert {"deep_ep", "pplx_kernels", "transformers", "ml_dtypes"} <= set(packages)
    assert "TritonExperts" in packages["triton"]["enables"]
    assert not packages["pplx_kernels"]["present"]
    assert all(package["enables"] for package in packages.values())
    assert record["interpreter"] is this_machine().interpreter
    assert [name for name in packages if f"\n {name} " not in shown.out] == []


@pytest.mark.parametrize("reason", [None, "for sm_80 alone", ""])
@pytest.mark.parametrize("violations", [(), ("spills",)], ids=["clean", "violated"])
def test_compile(
    mk: Mk, violations: tuple[str, ...], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --check, it fails if a kernel exceeds a limit, or is left out without a reason."""
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
    left_out = SimpleNamespace(kernel="other_kernel", module="parts.kernels", reason=reason)
    asked: list[tuple[str, int, str]] = []
    module = ModuleType("modular_kernel.testing.compile.cases")
    done = SimpleNamespace(rows=[row], left_out=[left_out] if reason is not None else [])
    module.compile_all = lambda t, bar, workers, name_filter: (
        asked.append((t, workers, name_filter)) or done
    )  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert mk("compile", "--arch", "10.0").code == 0
    ended = mk("compile", "--check", "--workers", "2", "--only", "bf16")
    assert ended.code == (1 if violations or reason == "" else 0)
    assert ("other_kernel" in ended.out) is (reason is not None)
    assert ("no case launches it" in ended.out) is (reason == "")
    assert asked == [("sm_100", 1, ""), ("sm_90", 2, "bf16")]
    assert "; only cases and kernels matching 'bf16' were compiled" in ended.out
    assert " left out" not in ended.out.splitlines()[-1]  # nothing was counted against all kernels
    assert ended.err.startswith("kernels of cases named 'bf16' for sm_90: may take minutes")
    record = mk("compile", "--check", "--only", "bf16", "--json").json
    assert record["only"] == "bf16"
    assert mk("compile", "--workers", "0").code == 2
    done.rows = done.left_out = []
    assert "--only: got 'nothing', need part of the name" in mk("compile", "--only", "nothing").err
    kernels = "modular_kernel.testing.compile.kernels_defined.defined_kernels"
    monkeypatch.setattr(kernels, lambda: dict.fromkeys(("route_kernel", "gemm_kernel")))
    assert mk("compile").err.startswith("2 kernels for sm_90, in every form that parts launch")
    begun = mk("compile", "--only", "route").err
    assert begun.startswith("1 of 2 kernels for sm_90 (named 'route'), and all kernels of matching")
    for text in ("gemm_kernel", "BLOCK_M=64, warps=4, stages=3", "168", "1024", "HGMMA x12"):
        assert text in ended.out
    assert ("exceeds a limit" in ended.out) is bool(violations)


def test_compile_check_shows_counted_instructions(mk: Mk, monkeypatch: pytest.MonkeyPatch) -> None:
    from modular_kernel.testing.compile import report as compiling
    from modular_kernel.testing.compile.cases import CompiledRow, CompileResult

    absent = dict.fromkeys(compiling.FAMILIES, 0)
    monkeypatch.setattr(
        compiling, "_count_instructions", lambda cubin: {**absent, cubin.decode(): 7}
    )

    def row(name: str) -> CompiledRow:
        counts = compiling.Instructions(name.encode())
        record = compiling.CompileRecord("k", "sm_90", {}, {}, 4, 1, 0, 9, 0, 0, counts, 0.0)
        return CompiledRow(f"case {name}", record, ())

    def done(*_: object, **__: object) -> CompileResult:
        read = row("HGMMA")
        assert read.record.instructions["HGMMA"] == 7
        return CompileResult((read, row("FFMA")), ())

    monkeypatch.setattr("modular_kernel.testing.compile.cases.compile_all", done)
    checked = mk("compile", "--check").out
    assert "HGMMA x7" in checked
    assert checked.count("not counted") == 1
    assert "FFMA x7" not in checked
    everything = mk("compile").out
    assert "HGMMA x7" in everything
    assert "FFMA x7" in everything
