"""The text of `mk plan`, and of `mk check` and `mk list` for a described machine."""

import json
import re
from pathlib import Path

import pytest
from run_mk import CommandResult, Mk, make_mk_fixture

from modular_kernel.perf_model.estimate import PairingEstimates, estimate_pairings
from modular_kernel.perf_model.machines import parse_machine
from modular_kernel.perf_model.recommend import _format_token_range, recommend
from modular_kernel.perf_model.selection_table import problem_of

mk = make_mk_fixture()
TWO_HOSTS = ("--machine", "2x8xh200")
DEEPSEEK = ("--model", "deepseek-v3")
# Models and machines whose whole output is read in 80 columns.
PLANS = (
    (*DEEPSEEK, "--machine", "8xh200"),
    (*DEEPSEEK, *TWO_HOSTS),
    ("--model", "qwen3-30b-a3b", "--machine", "1xh200"),
    ("--model", "qwen3-30b-a3b", "--machine", "4xa100"),
    ("--model", "mixtral-8x7b", "--machine", "8xh200"),
    ("--model", "gpt-oss-120b", "--machine", "8xb200"),
)


def find_line(result: CommandResult, start: str) -> str:
    """Return the first line that starts with `start`, apart from its indentation."""
    lines = [line.strip() for line in result.out.splitlines()]
    return next(line for line in lines if line.startswith(start))


# ---------------------------------------------------------------------------- experts and ranks


@pytest.mark.parametrize("options", [TWO_HOSTS, ("--world-size", "16")])
@pytest.mark.parametrize("verb", ["plan", "check"])
def test_default_layer_has_an_expert_for_each_rank(
    mk: Mk, verb: str, options: tuple[str, ...]
) -> None:
    result = mk(verb, *options)
    assert result.code == 0
    assert "the default (for another: --model NAME" in find_line(result, "layer: ")
    assert "it has an expert for each of 16 ranks" in find_line(result, "layer: ")
    record = mk(verb, *options, "--json").json
    problem = record["problem"] if verb == "check" else record["cases"][0]["problem"]
    assert (problem["experts"], problem["parallel"]["world_size"]) == (16, 16)


def test_default_layer_of_few_ranks_has_8_experts(mk: Mk) -> None:
    for options in ((), ("--machine", "4xh200"), ("--world-size", "8")):
        record = mk("plan", *options, "--phase", "decode", "--json").json
        assert record["cases"][0]["problem"]["experts"] == 8
    assert "for each of" not in mk("plan", "--machine", "4xh200").out


@pytest.mark.parametrize("verb", ["plan", "check"])
def test_error_for_too_few_experts_says_where_they_are_from(mk: Mk, verb: str) -> None:
    model = mk(verb, *TWO_HOSTS, "--model", "mixtral-8x7b")
    assert model.code == 2
    start = (
        "error: --model mixtral-8x7b: got 8 experts for 16 ranks, need at most 8 ranks "
        "(--world-size 8), or a smaller --machine."
    )
    assert model.err.startswith(start)
    assert "--placement, such as 0/1/0/1 for 2 experts on 4 ranks" in model.err
    assert "tensor parallelism" in model.err
    assert mk(verb, *TWO_HOSTS, "--model", "mixtral-8x7b", "--world-size", "8").code == 0
    option = mk(verb, *TWO_HOSTS, "--experts", "9")
    assert option.err == (
        "error: --experts: got 9 experts for 16 ranks, need --experts 16 or more, or at most 9 "
        "ranks (--world-size 9)\n"
    )
    assert mk(verb, *TWO_HOSTS, "--experts", "16").code == 0


def test_error_for_a_layer_that_runs_names_the_default(mk: Mk) -> None:
    result = mk("compose", "--world-size", "9")
    assert result.code == 2
    assert result.err.splitlines()[-1] == (
        "error: default layer without --model: got 8 experts for 9 ranks, need a --model with "
        "as many experts, --experts 9, or at most 8 ranks (--world-size 8)"
    )


def test_check_judges_copies_on_more_ranks_than_experts(mk: Mk) -> None:
    placement = "/".join(str(rank % 8) for rank in range(16))
    options = (*TWO_HOSTS, "--model", "mixtral-8x7b", "--placement", placement)
    pairs = mk("check", *options, "--json").json["pairs"]
    valid = {(pair["prepare_finalize"], pair["experts"]) for pair in pairs if pair["ok"]}
    assert ("TorchAll2AllPrepareAndFinalize", "TritonExperts") in valid


# ------------------------------------------------------------------------------------- subjects


def test_first_lines_name_the_layer_and_the_machine(mk: Mk) -> None:
    options = ("--packages", "triton,deep_ep", "--machine", "2x8xh200,8xb200")
    lines = mk("plan", *DEEPSEEK, *options, "--phase", "decode").out.splitlines()
    sizes = "hidden 7168, intermediate 2048, 256 experts, top-k 8, bfloat16, fp8_w8a8_block"
    assert lines[:4] == [
        f"layer: deepseek-v3: {sizes}",
        "machine 2x8xh200: 16 ranks on 2 hosts with 8 NVIDIA H200 each; packages: deep_ep, triton",
        "machine 8xb200: 8 ranks on 8 NVIDIA B200; packages: deep_ep, triton",
        "",
    ]
    assumed = mk("plan", "--machine", "h200", "--phase", "decode", "--hidden", "4096")
    sizes = "hidden 4096, intermediate 1024, 8 experts, top-k 2, bfloat16, no quantization"
    packages = "packages assumed: ml_dtypes, triton (--packages sets others)"
    assert assumed.out.splitlines()[:2] == [
        f"layer: layer of the given sizes, the others by default: {sizes}",
        f"machine h200: 1 rank on 1 NVIDIA H200; {packages}",
    ]


def test_number_of_layers_is_named_with_their_memory(mk: Mk) -> None:
    options = ("plan", "--model", "mixtral-8x7b", "--machine", "8xh200", "--phase", "decode")
    assert find_line(mk(*options, "--layers", "32"), "memory of a rank, 32 layers: 11.4 GB")
    assert find_line(mk(*options), "memory of a rank: 0.5 GB")


@pytest.mark.parametrize("verb", ["check", "list"])
def test_packages_of_a_described_machine_are_printed(mk: Mk, verb: str, tmp_path: Path) -> None:
    assumed = "packages assumed: ml_dtypes, triton (--packages sets others)"
    for options in (("--machine", "8xh200"), ("--arch", "9.0")):
        assert assumed in mk(verb, *options).out
        given = mk(verb, *options, "--packages", "triton,deep_ep").out
        assert "packages: deep_ep, triton\n" in given
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"gpu": "h200", "packages": ["triton"]}))
    assert "packages of its file: triton\n" in mk(verb, "--machine", str(path)).out
    assert "packages" not in mk(verb, "--json").out.splitlines()[0]
    assert "packages assumed" not in mk(verb).out


def test_list_takes_the_machine_options_of_check(mk: Mk) -> None:
    shown = mk("list", "--arch", "10.0", "--packages", "triton")
    assert shown.out.startswith("Parts on a described machine (described sm_100)")
    for options in (("--arch", "10.0"), ("--device", "cpu"), ("--machine", "8xb200")):
        listed, checked = (mk(verb, *options, "--json").json for verb in ("list", "check"))
        assert listed["machine"] == checked["machine"]
    for verb in ("list", "check"):
        refused = mk(verb, "--arch", "10.0", "--machine", "8xb200")
        assert refused.code == 2
        assert "--arch together with --machine" in refused.err


# ------------------------------------------------------------------------------- recommendation


def test_recommendation_says_how_well_its_time_is_known(mk: Mk) -> None:
    def plan(*options: str) -> CommandResult:
        return mk("plan", *options, "--phase", "decode")

    rough = plan(*DEEPSEEK, *TWO_HOSTS)
    assert find_line(rough, "estimate: ") == (
        "estimate: about 2,600 us a layer, 0.8 million tokens/s; order of magnitude only"
    )
    assert find_line(rough, "exchange: ") == "exchange: HostThenRank was never measured"
    recorded = plan(*DEEPSEEK, "--machine", "8xh200")
    assert find_line(recorded, "estimate: ") == (
        "estimate: 419 us a layer, 2.45 million tokens/s; parts within 15 % of records"
    )
    assert find_line(recorded, "experts: ") == (
        "experts: estimates of TritonExperts with fp8_w8a8_block are within 7 % of 6 records of "
        "these sizes on one H200"
    )
    other_gpu = plan("--model", "gpt-oss-120b", "--machine", "8xb200")
    assert find_line(other_gpu, "estimate: ").endswith("; not measured on NVIDIA B200")
    assert "GPU: NVIDIA B200 was not measured" in other_gpu.out


def test_runner_up_has_a_reason(mk: Mk) -> None:
    tied = find_line(mk("plan", *DEEPSEEK, "--machine", "8xh200"), "runner-up: ")
    assert tied == (
        "runner-up: SymmMemPrepareAndFinalize x GroupedGemmExperts, 1.00 x the time: a tie within "
        "3 %, second because `mk list` has TritonExperts before GroupedGemmExperts; within the "
        "error of the estimates: time both"
    )
    mixtral = mk("plan", "--model", "mixtral-8x7b", "--machine", "8xh200")
    assert re.search(r"1\.28 x the time: slower experts, \d+ us instead of \d+ us\n", mixtral.out)
    assert re.search(r"slower exchange, 1,8\d\d us instead of \d+ us\n", mixtral.out)
    options = ("--model", "mixtral-8x7b", "--machine", "8xh200", "--packages", "all")
    records = mk("plan", *options, "--json").json["recommendations"]
    assert all(row["runner_up_reason"] for row in records)


def test_faster_runner_up_needs_more_packages(mk: Mk) -> None:
    options = ("plan", "--model", "qwen3-30b-a3b", "--machine", "h200", "--packages", "all")
    ties = [
        row
        for row in mk(*options, "--tokens-list", "1,16,128,1024,4096", "--json").json[
            "recommendations"
        ]
        if row["runner_up_us"] < row["layer_us"]
    ]
    assert ties, "no case in which the runner-up is faster"
    for row in ties:
        assert re.match(
            r"a tie within 3 %, second because (it also needs \w+|`mk list` has \w+ before \w+)",
            row["runner_up_reason"],
        )
    options = ("plan", *DEEPSEEK, *TWO_HOSTS, "--packages", "all", "--phase", "decode")
    line = find_line(mk(*options), "runner-up: ")
    assert line.startswith(
        "runner-up: DeepEPHTPrepareAndFinalize x TritonOrDeepGemmExperts, 0.99 x the time: a tie "
        "within 3 %, second because it also needs deep_gemm"
    )


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(
    "packages", [(), ("--packages", "all"), ("--packages", "triton,deep_gemm")]
)
def test_options_of_a_faster_choice_plan_it(mk: Mk, phase: str, packages: tuple[str, ...]) -> None:
    """The printed --packages and --tokens lead to the printed pairing."""
    options = ("plan", *DEEPSEEK, *TWO_HOSTS, "--phase", phase)
    (row,) = mk(*options, *packages, "--json").json["recommendations"]
    is_fastest = packages == ("--packages", "all") and phase == "prefill"
    assert bool(row["would_change"]) is not is_fastest
    for change in row["would_change"]:
        match = re.search(r"\((--\w+) (\S+)\): (\w+ x \w+), ", change)
        assert match is not None, change
        kept = packages if match[1] == "--tokens" else ()
        (planned,) = mk(*options, *kept, match[1], match[2], "--json").json["recommendations"]
        assert planned["pairing"] == match[3]


def test_range_of_tokens_holds_at_every_step() -> None:
    cluster = parse_machine("2x8xh200")
    problem = problem_of("deepseek-v3", cluster, 128)
    asked = set[int]()

    def estimate_at(tokens: int) -> PairingEstimates:
        result = estimate_pairings(problem.with_tokens(tokens), cluster)
        asked.add(tokens)
        return result

    recommendation = recommend("decode", estimate_at(128), estimate_at, ())
    assert recommendation is not None
    (change,) = [text for text in recommendation.changes if "or fewer" in text]
    assert change.startswith("at 32 tokens or fewer on each rank (--tokens 32): DeepEPLL")
    assert {1, 2, 4, 8, 16, 32} <= asked, "smaller numbers were not estimated"


@pytest.mark.parametrize(
    ("counts", "is_larger", "is_open", "text"),
    [
        ([32, 16, 1], False, True, "32 tokens or fewer"),
        ([1], False, True, "1 token"),
        ([16384, 32768], True, True, "16,384 tokens or more"),
        ([32, 16], False, False, "16 to 32 tokens"),
        ([2], False, False, "2 tokens"),
    ],
)
def test_ranges_of_tokens(counts: list[int], is_larger: bool, is_open: bool, text: str) -> None:
    assert _format_token_range(counts, is_larger=is_larger, is_open=is_open) == text


# --------------------------------------------------------------------------------- whole output


@pytest.mark.parametrize("options", PLANS, ids=" ".join)
def test_no_line_is_printed_twice(mk: Mk, options: tuple[str, ...]) -> None:
    lines = mk("plan", *options, "--packages", "all").out.splitlines()
    assumptions = [line for line in lines if line.startswith("- ")]
    parts = [part for line in assumptions for part in re.findall(r"\w+(?:Experts|EP)\b", line)]
    assert len(assumptions) == len(set(assumptions))
    assert len(parts) == len(set(parts)), "a part has two lines"
    assert sum(line.startswith("no estimate: ") for line in lines) == len(
        {line for line in lines if line.startswith("no estimate: ")}
    )
    assert "every one that a part needs" not in "".join(lines)
    assert "sets others" not in "".join(lines), "packages were given"


@pytest.mark.parametrize("options", [*PLANS, TWO_HOSTS], ids=" ".join)
def test_texts_have_plain_numbers(
    mk: Mk, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for tokens in ((), ("--tokens", "1"), ("--tokens", "16384")):
        text = mk("plan", *options, *tokens).out
        words = " ".join(text.split())
        assert not re.search(r"\b1 (tokens|ranks|rows|experts|hosts|pairings)\b", words)
        assert not re.search(r"\b(\d+) to \1\b|\de[+-]?\d", words)
        assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "16,384 tokens" in text


def test_help_of_plan_states_its_own_defaults(mk: Mk) -> None:
    text = " ".join(mk("plan", "--help").out.split())
    assert "--tokens INTEGER Tokens on each rank. [default: 128 for decode, 4096 for" in text
    assert "[default: 16]" not in text
    assert "installed here" not in text, "mk plan never plans for this machine"
    assert "[default: 8xh200, or as many H200 as --world-size]" in text
