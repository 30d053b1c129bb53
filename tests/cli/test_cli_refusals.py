"""Refused pairings: the list by reason, and the defaults of options that cause a refusal."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from run_mk import Mk, make_mk_fixture

from modular_kernel.catalog import check, collect_packages, load_catalog
from modular_kernel.cli import output, ranks
from modular_kernel.cli.options import (
    DEFAULTS,
    DESCRIBED_DEFAULTS,
    DescribedProblemOptions,
    MeasuredProblemOptions,
)
from modular_kernel.cli.refusals import add_default_hints, describe_defaults
from modular_kernel.compatibility.support import Rejection
from modular_kernel.errors import CapacityError
from modular_kernel.profiling import record
from modular_kernel.profiling.record import _check_memory
from modular_kernel.select.inputs import weight_bytes
from modular_kernel.spec.problem import Machine, Parallel, Problem

ON_CPU = not torch.cuda.is_available()
SIZES = ("--hidden", "64", "--intermediate", "64", "--experts", "4")
H200 = Machine("cuda", (9, 0), frozenset(collect_packages(load_catalog())))

mk = make_mk_fixture()


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "get_line_width", lambda: 80)


# ------------------------------------------------------------------------------------- the list


def read_list(text: str, all_experts: list[str]) -> Iterator[tuple[str, str, set[str], bool]]:
    """Yield (part, experts, rules, exact) of each pairing in the list; valid ones have no rules."""
    # Undo the wrapping. Lists of rules, which have lowercase names, start a line.
    continuation = r"[A-Z]|x [A-Z]|refused |because |of |the |rules:"
    joined = re.sub(rf"\n +(?={continuation})", " ", text)
    parts, is_folded = list[str](), False
    for line in joined.splitlines():
        if match := re.fullmatch(r"valid: ([\w, ]+) x (.*)", line):
            for part in match[1].split(", "):
                yield from ((part, name, set(), True) for name in match[2].split(", "))
        elif match := re.fullmatch(r"([\w, ]+): refused because of the rules:", line):
            parts, is_folded = match[1].split(", "), False
        elif line.startswith("refused with every experts part"):
            is_folded = True
        elif match := re.fullmatch(r"  ([a-z_0-9]+(?:, [a-z_0-9]+)*): (\w.*)", line):
            rules = set(match[1].split(", "))
            for name in match[2].split(", "):
                if is_folded:
                    yield from ((name, experts, rules, False) for experts in all_experts)
                else:
                    yield from ((part, name, rules, True) for part in parts)


@pytest.mark.parametrize(
    "args", [(), ("--machine", "8xh200", "--packages", "all"), ("--top-k", "99")]
)
@pytest.mark.usefixtures("narrow")
def test_list_has_every_pairing_once_with_its_rules(mk: Mk, args: tuple[str, ...]) -> None:
    text = mk("check", *args).out
    pairs = mk("check", *args, "--json").json["pairs"]
    experts = list(dict.fromkeys(pair["experts"] for pair in pairs))
    listed = list(read_list(text, experts))
    assert len(listed) == len(pairs)
    by_pair = {(part, name): (rules, is_exact) for part, name, rules, is_exact in listed}
    for pair in pairs:
        rules, is_exact = by_pair[pair["prepare_finalize"], pair["experts"]]
        expected = {rejection["rule"] for rejection in pair["rejections"]}
        assert rules == expected if is_exact else rules and rules <= expected
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"\[\d+\]", text)  # no numbers in place of names


@pytest.mark.skipif(not ON_CPU, reason="CUTLASS may be usable on a GPU")
@pytest.mark.usefixtures("narrow")
def test_list_of_one_experts_part_is_exact(mk: Mk) -> None:
    text = mk("bench", "--experts-type", "BatchedCutlassExpertsFP4", "--hidden", "64").out
    assert "refused with BatchedCutlassExpertsFP4 because of the rules:" in text
    assert "every experts part" not in text


# ----------------------------------------------------------------------------------- defaults


def test_layer_is_printed_only_if_it_is_the_default(mk: Mk) -> None:
    for args, is_default in (
        ((), True),
        (("--tokens", "3"), True),
        (("--hidden", "2048"), False),
        (("--model", "mixtral-8x7b"), False),
    ):
        first_line = "layer: the default (for another: --model NAME, or --hidden N ...)\n"
        assert mk("check", *args).out.startswith(first_line) is is_default, args
        assert "layer:" not in mk("check", *args, "--json").out


@pytest.mark.parametrize(("device", "defaults"), [("cuda", DESCRIBED_DEFAULTS), ("cpu", DEFAULTS)])
def test_default_sizes_depend_on_the_device(
    capsys: pytest.CaptureFixture[str], device: str, defaults: dict[str, int]
) -> None:
    problem = MeasuredProblemOptions().with_default_sizes(device).problem()
    assert (problem.hidden, problem.intermediate) == (defaults["hidden"], defaults["intermediate"])
    assert f"layer: H{problem.hidden}-I{problem.intermediate}-E8-K2 " in capsys.readouterr().err
    given = MeasuredProblemOptions(hidden=0, experts=3).with_default_sizes(device)
    assert (given.hidden, given.intermediate) == (0, defaults["intermediate"])
    with_model = MeasuredProblemOptions(model="mixtral-8x7b").with_default_sizes(device)
    assert with_model.problem().hidden == 4096
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("gpus", "world_size", "backend", "device"),
    [
        *((0, None, None, "cpu"), (1, None, None, "cuda"), (1, 2, None, "cpu")),
        *((2, 2, None, "cuda"), (2, 2, "gloo", "cpu"), (0, 2, "nccl", "cuda")),
    ],
)
def test_device_of_the_ranks_is_known_before_they_start(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    world_size: int | None,
    backend: str | None,
    device: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert ranks.resolve_device(world_size, backend) == device


@pytest.mark.skipif(not ON_CPU, reason="on a GPU the default layer is large")
@pytest.mark.parametrize("verb", ["bench", "profile", "compose"])
def test_default_layer_of_a_measurement_is_small_on_a_cpu(
    mk: Mk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MK_CACHE_DIR", str(tmp_path))
    args = {"bench": ("--ms", "0.01", "--tokens", "1"), "compose": ("--budget", "0")}
    pair = () if verb == "compose" else ("--experts-type", "TorchExperts")
    result = mk(verb, *pair, *args.get(verb, ()))
    assert result.code == 0
    assert "layer: H64-I128-E8-K2 (default; " in result.err


def test_rejections_of_defaults_name_the_option() -> None:
    problem = DescribedProblemOptions(hidden=None).problem()
    verdict = check("MoEPrepareAndFinalizeNoEP", "CutlassExpertsFP8", problem, H200)
    (rejection,) = verdict.rejections
    (hinted,) = add_default_hints(verdict.rejections, DescribedProblemOptions())
    assert rejection.rule == "quant"
    assert hinted.hint == "none is the default; set --quant or --model"
    assert describe_defaults([hinted]) == (
        "refused only because of default values; set --quant or --model"
    )
    assert add_default_hints([rejection], DescribedProblemOptions(quant="none")) == (rejection,)
    assert add_default_hints([rejection], DescribedProblemOptions(model="x")) == (rejection,)
    other = Rejection("device", ("part", "machine"), "cpu", "cuda")
    assert describe_defaults([hinted, other]) == ""
    assert describe_defaults([]) == ""


@pytest.mark.parametrize(
    ("rejection", "hint"),
    [
        (("hidden", "64"), "64 is the default; set --hidden or --model"),
        (("packing", "intermediate=128"), "128 is the default; set --intermediate or --model"),
        (("max_experts", "8"), "8 is the default; set --experts or --model"),
        (("world_size", "1"), "1 is the default; set --world-size"),
        (("capacity", "tokens=16"), "16 is the default; set --tokens"),
        (("format", "standard"), ""),
    ],
)
def test_hint_has_the_default_and_its_option(rejection: tuple[str, str], hint: str) -> None:
    rule, got = rejection
    (hinted,) = add_default_hints([Rejection(rule, ("a", "b"), got, "x")], MeasuredProblemOptions())
    assert hinted.hint == hint
    (kept,) = add_default_hints(
        [Rejection(rule, ("a", "b"), got, "x", "do y")], MeasuredProblemOptions()
    )
    assert kept.hint == "; ".join(filter(None, ("do y", hint)))


@pytest.mark.usefixtures("narrow")
def test_check_says_that_only_a_default_is_refused(mk: Mk) -> None:
    args = ("--machine", "8xh200", "--packages", "all", "--world-size", "1")
    pair = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "CutlassExpertsFP8")
    result = mk("check", *args, *pair)
    assert result.code == 1
    assert "refused only because of default values; set --quant or --model\n" in result.out
    text = mk("check", *args, *pair, "--quant", "none").out
    assert "default values" not in text
    assert "none is the default" not in text
    # The machine sets the number of ranks.
    text = mk("check", *args[:4], *pair).out
    assert "none is the default" in text
    assert "set --world-size" not in text


# -------------------------------------------------------------------------- verbs that refuse


@pytest.mark.skipif(not ON_CPU, reason="DeepGEMM may be usable on a GPU")
@pytest.mark.parametrize(
    "args",
    [
        ("bench", "--experts-type", "DeepGemmExperts"),
        ("bench", "--pf-type", "DeepEPHTPrepareAndFinalize"),
        ("test", "--experts-type", "DeepGemmExperts"),
        ("test", "--pf-type", "DeepEPHTPrepareAndFinalize"),
    ],
    ids=lambda args: " ".join(args[:2]),
)
def test_part_that_cannot_run_here_is_refused_with_reasons(mk: Mk, args: tuple[str, ...]) -> None:
    result = mk(*args)
    assert result.code == 1
    assert result.out.startswith(f"every pairing with {args[2]}: refused, ")
    assert re.search(r"device +\d+ +got cpu, need cuda", result.out)
    assert " us" not in result.err  # nothing was measured
    if args[0] == "test":  # the sizes of a case are no reason
        assert not re.search(r"hidden|intermediate|dtype", result.out)
    record = mk(*args, "--json").json
    assert record["ok"] is False
    assert {"device", "package"} <= {rejection["rule"] for rejection in record["rejections"]}


@pytest.mark.skipif(not ON_CPU, reason="on a GPU other pairings are valid")
@pytest.mark.usefixtures("narrow")
def test_compose_summarizes_what_was_not_measured(
    mk: Mk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MK_CACHE_DIR", str(tmp_path))
    args = ("compose", *SIZES, "--tokens-list", "1", "--budget", "0")
    (line,) = [line for line in mk(*args).out.splitlines() if line.startswith("not measured:")]
    assert re.fullmatch(r"not measured: \d+ pairings need a GPU \(--explain lists them\)", line)
    explained = mk(*args, "--explain").out
    assert len(explained.splitlines()) < 150
    assert "MoEPrepareAndFinalizeNoEP: refused because of the rules:" in explained


@pytest.mark.skipif(not ON_CPU, reason="on a GPU other pairings are valid")
def test_compose_lists_the_reasons_if_every_pairing_is_refused(mk: Mk) -> None:
    result = mk("compose", "--budget", "0", "--top-k", "33")
    assert result.code == 1
    assert result.out.startswith("every pairing for ")
    assert len(result.out.splitlines()) < 80


# ------------------------------------------------------------------------------------ mk test


def test_skipped_cases_are_counted_by_rule(mk: Mk) -> None:
    pair = ("--pf-type", "BatchedPrepareAndFinalize", "--experts-type", "NaiveBatchedExperts")
    result = mk("test", *pair)
    assert result.code == 0
    (line,) = [line for line in result.out.splitlines() if "skipped:" in line]
    match = re.fullmatch(
        r"(\d+) cases skipped: the parts do not declare them \(by rule: (.*)\)\. To run them, "
        r"declare support in `requires` of the part",
        line,
    )
    assert match is not None, line
    assert int(match[1]) > 0
    counts = [int(rule.split()[1]) for rule in match[2].split(", ")]
    assert max(counts) <= int(match[1]) <= sum(counts)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--one --path nope", "--path: got nope, need one of aligned, aligned_w4, gemv, "),
        ("--path gemvv", "(did you mean gemv?)"),
        ("--path gemv", "need --experts-type TritonExperts or "),
        ("--path gemv --one", "--path: got gemv, need no --one, --mutate or --world-size"),
        ("--path gemv --experts-type TorchExperts", "TorchExperts has a single code path"),
        ("--path gemvv --experts-type TritonExperts", "(did you mean gemv?)"),
    ],
)
def test_unknown_path_names_the_known_ones(mk: Mk, args: str, message: str) -> None:
    result = mk("test", *args.split())
    assert result.code == 2
    assert message in result.err


# ----------------------------------------------------------------------------------- profile


def test_memory_of_a_profile_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(4, 512, 512, 8, 2, torch.bfloat16, quant="fp8_w8a8_block")
    required = weight_bytes(problem)
    monkeypatch.setattr(record, "free_bytes", lambda _device: int(required) + 1)
    _check_memory(problem, torch.device("cpu"), None)  # the weights fit
    monkeypatch.setattr(record, "free_bytes", lambda _device: int(required / 2) + 1)
    big = Problem(4, 7168, 2048, 256, 8, torch.bfloat16, quant="fp8_w8a8_block")
    monkeypatch.setattr(record, "free_bytes", lambda _device: 24 * 10**9)
    with pytest.raises(CapacityError) as error:
        _check_memory(big, torch.device("cpu"), None)
    assert str(error.value) == (
        "weights of 256 experts of one layer: got 22.5 GB in bfloat16 and, quantized from them, "
        "11.3 GB in fp8_w8a8_block: 33.8 GB, need at most 24.0 GB, the free memory; 181 experts "
        "would fit (--experts 181)"
    )
    smaller = Problem(4, 7168, 2048, 181, 8, torch.bfloat16, quant="fp8_w8a8_block")
    _check_memory(smaller, torch.device("cpu"), None)


def test_message_names_one_number_if_a_range_has_one() -> None:
    problem = Problem(4, 64, 64, 8, 2, torch.bfloat16, parallel=Parallel(2))
    verdict = check("MoEPrepareAndFinalizeNoEP", "TorchExperts", problem, Machine("cpu"))
    (rejection,) = [r for r in verdict.rejections if r.rule == "world_size"]
    assert (rejection.got, rejection.need) == ("2", "1")
