"""`mk plan` recommends pairings that fit in memory and that `mk check` accepts."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_mk import Mk, make_mk_fixture

from modular_kernel.catalog import load_catalog
from modular_kernel.perf_model import recommend
from modular_kernel.perf_model.estimate import (
    distribute_over_ranks,
    estimate_pairings,
    machines_with_all_packages,
)
from modular_kernel.perf_model.hardware import Cluster
from modular_kernel.perf_model.recommend import PHASE_TOKENS, phase_of, select_best
from modular_kernel.spec.problem import Problem

mk = make_mk_fixture()
DEEPSEEK = Problem(128, 7168, 2048, 256, 8, quant="fp8_w8a8_block")
MODELS = {
    "deepseek-v3": ("--model", "deepseek-v3", "--quant", "fp8_w8a8_block"),
    "qwen3": ("--model", "qwen3-30b-a3b"),
    "gpt-oss": ("--model", "gpt-oss-120b", "--quant", "mxfp4_w4a16"),
    "mixtral, channel": ("--model", "mixtral-8x7b", "--quant", "fp8_w8a8_channel"),
}
MACHINES = ("h200", "8xh200", "2x8xh200", "8xb200", "4xa100")
MODELS_WITH_8_EXPERTS = {"mixtral, channel"}  # Some of 16 ranks would hold no expert.


def get_pairings(rows: list[dict[str, Any]]) -> set[str]:
    return {row["pairing"] for row in rows}


@pytest.mark.share(4)
@pytest.mark.parametrize("packages", [("--packages", "all"), ("--packages", "deep_ep,triton"), ()])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_plan_has_exactly_the_pairs_that_check_accepts(
    mk: Mk, model: str, machine: str, packages: tuple[str, ...]
) -> None:
    if machine == "2x8xh200" and model in MODELS_WITH_8_EXPERTS:
        assert mk("plan", *MODELS[model], "--machine", machine).code == 2
        return
    options = (*MODELS[model], "--machine", machine, *packages)
    for tokens in ("128", "4096"):
        verdicts = mk("check", *options, "--tokens", tokens, "--json").json["pairs"]
        planned = mk("plan", *options, "--tokens", tokens, "--json").json
        verdict_by_pairing = {f"{p['prepare_finalize']} x {p['experts']}": p for p in verdicts}
        valid = {name for name, pair in verdict_by_pairing.items() if pair["ok"]}
        estimates, without_estimate = (
            get_pairings(planned["estimates"]),
            get_pairings(planned["no_estimate"]),
        )
        assert estimates | without_estimate == valid, "each valid pairing once, and no other"
        assert not estimates & without_estimate
        rules = {
            n: {r["rule"] for r in pair["rejections"]} for n, pair in verdict_by_pairing.items()
        }
        assert get_pairings(planned["too_large"]) == {n for n in rules if rules[n] == {"memory"}}
        recommended = [row["pairing"] for row in planned["recommendations"]]
        assert set(recommended) <= estimates
        assert bool(recommended) is bool(estimates)


@pytest.mark.parametrize("tokens", [1, 128, 4096])
def test_all_rows_are_for_the_same_work(tokens: int) -> None:
    """Each of 8 ranks has its own tokens. With replicated input, it has those of all ranks."""
    problem = distribute_over_ranks(DEEPSEEK.with_tokens(tokens), 8)
    estimates = estimate_pairings(problem, Cluster()).estimates
    assert {estimate.world_tokens for estimate in estimates} == {8 * tokens}
    by_kind = {e.prepare_finalize: e.problem.tokens for e in estimates}
    assert by_kind.pop("ReplicatedEPPrepareAndFinalize") == 8 * tokens
    assert set(by_kind.values()) == {tokens}
    for estimate in estimates:
        assert estimate.tokens_per_second == 8 * tokens / estimate.seconds
    rates = [estimate.tokens_per_second for estimate in estimates]
    assert rates == sorted(rates, reverse=True), "the fastest pairing has the highest throughput"
    replicated = next(e for e in estimates if e.prepare_finalize.startswith("ReplicatedEP"))
    reduced = 2 * 7 / 8 * 8 * tokens * 7168 * 4
    assert replicated.exchange.combine_bytes == pytest.approx(reduced)
    other = next(e for e in estimates if e.experts_part == replicated.experts_part)
    assert replicated.experts == other.experts, (
        "each rank has as many pairs of a token and an expert"
    )


def test_pair_that_replicated_tokens_make_invalid_has_no_estimate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = load_catalog().prepare_finalize("ReplicatedEPPrepareAndFinalize")
    monkeypatch.setattr(part, "requires", replace(part.requires, max_tokens=1000))
    result = estimate_pairings(distribute_over_ranks(DEEPSEEK, 8), Cluster())
    pair = f"{part.__name__} x TritonExperts"
    assert pair not in {estimate.pairing for estimate in result.estimates}
    reason = dict(result.unestimated)[pair]
    assert reason.startswith("with the tokens of all ranks on every rank: [capacity]")
    assert "got tokens=1024, need <= 1000 per rank" in reason


def test_pairs_over_libraries_have_estimates_from_records() -> None:
    estimates = {
        e.pairing: e
        for e in estimate_pairings(distribute_over_ranks(DEEPSEEK, 8), Cluster()).estimates
    }
    for pair in ("DeepEPLLPrepareAndFinalize x BatchedDeepGemmExperts",
                 "SymmMemPrepareAndFinalize x DeepGemmExperts",
                 "SymmMemPrepareAndFinalize x CutlassExpertsFP8"):  # fmt: skip
        assert estimates[pair].correction.source == (
            "recorded times of dsv3_256 and dsv3_ep8 in fp8_w8a8_block"
        )
    assert len({estimates[pair].experts.seconds for pair in estimates if "SymmMem" in pair}) > 3


@pytest.mark.parametrize(("machine", "arch"), [("8xb200", "sm_100"), ("8xh100", "")])
def test_library_records_apply_to_one_architecture_only(mk: Mk, machine: str, arch: str) -> None:
    options = (
        "--model",
        "qwen3-30b-a3b",
        "--machine",
        machine,
        "--packages",
        "all",
        "--tokens",
        "9",
    )
    record = mk("plan", *options, "--json").json
    pair = "SymmMemPrepareAndFinalize x TritonKernelsExperts"
    assert (pair in get_pairings(record["estimates"])) is not bool(arch)
    if arch:
        reasons = {row["pairing"]: row["reason"] for row in record["no_estimate"]}
        assert reasons[pair] == f"no recorded time of TritonKernelsExperts in 16 bits on {arch}"


def test_plan_and_check_refuse_what_exceeds_memory(mk: Mk) -> None:
    options = ("--model", "deepseek-v3", "--quant", "fp8_w8a8_block", "--machine", "8xh200")
    options += ("--packages", "all", "--tokens", "8192")
    pair = ("DeepEPLLPrepareAndFinalize", "BatchedDeepGemmExperts")
    result = mk("check", *options, "--pf-type", pair[0], "--experts-type", pair[1])
    assert result.code == 1
    assert "workspace" in result.out
    planned = mk("plan", *options)
    assert "does not fit: DeepEPLLPrepareAndFinalize x" in planned.out
    assert "need <= 141.0 GB of NVIDIA H200 sm_90" in planned.out
    assert "prefill on 8xh200, 8,192 tokens on each of 8 ranks, 65,536 in all:" in planned.out


def test_layers_share_buffers_but_not_weights(mk: Mk) -> None:
    options = ("plan", "--model", "deepseek-v3", "--quant", "fp8_w8a8_block", "--tokens", "128")
    one_layer, many_layers = (
        mk(*options, "--machine", "8xh200", "--layers", n, "--json").json for n in ("1", "58")
    )
    first, last = one_layer["estimates"][0], many_layers["estimates"][0]
    assert last["weights_bytes"] == 58 * first["weights_bytes"]
    assert last["workspace_bytes"] == first["workspace_bytes"]
    refused = mk(*options, "--machine", "4xh200", "--layers", "58")
    assert refused.code == 1
    assert "no recommendation, no valid pairing fits in memory" in refused.out
    assert " for 58 layers, of 141.0 GB" in refused.out


def test_one_recommendation_for_each_phase(mk: Mk) -> None:
    options = (
        "plan",
        "--model",
        "deepseek-v3",
        "--quant",
        "fp8_w8a8_block",
        "--machine",
        "2x8xh200",
    )
    result = mk(*options)
    lines = result.out.splitlines()
    assert [line for line in lines if line.endswith(" in all:")] == [
        "decode on 2x8xh200, 128 tokens on each of 16 ranks, 2,048 in all:",
        "prefill on 2x8xh200, 4,096 tokens on each of 16 ranks, 65,536 in all:",
    ]
    assert len([line for line in lines if re.fullmatch(r"  take \w+ x \w+", line)]) == 2
    assert sum(line.startswith("  runner-up: ") for line in lines) == 2
    option = "--packages deep_ep,ml_dtypes,triton"
    start = (
        f"  faster with deep_ep 2 ({option}): DeepEPV2PrepareAndFinalize x TritonExperts, 0.14 x"
    )
    assert sum(line.startswith(start) for line in lines) == 1
    record = mk(*options, "--phase", "decode", "--json").json
    assert [row["phase"] for row in record["recommendations"]] == ["decode"]
    assert {row["tokens"] for row in record["estimates"]} == {PHASE_TOKENS["decode"]}
    complete = mk(*options, "--packages", "all").out
    assert f"  faster with deep_ep 2 ({option}): DeepEPV2PrepareAndFinalize x" in complete
    assert "with deep_ep 1" not in complete
    change = "\n  at 32 tokens or fewer on each rank (--tokens 32): DeepEPLLPrepareAndFinalize x"
    assert change in complete


@pytest.mark.parametrize(
    ("words", "phases"),
    [((), ["decode", "prefill"]), (("--tokens", "256"), ["decode"]),
     (("--tokens-list", "1,257"), ["decode", "prefill"]),
     (("--tokens-list", "1,257", "--phase", "decode"), ["decode", "decode"])],
)  # fmt: skip
def test_phases_follow_tokens(mk: Mk, words: tuple[str, ...], phases: list[str]) -> None:
    result = mk("plan", *words, "--json")
    assert [row["phase"] for row in result.json["recommendations"]] == phases
    assert (phase_of(256), phase_of(257)) == ("decode", "prefill")


def test_ties_prefer_fewer_packages() -> None:
    result = estimate_pairings(distribute_over_ranks(DEEPSEEK, 8), Cluster())
    by_name = {estimate.pairing: estimate for estimate in result.estimates}
    ours = by_name["SymmMemPrepareAndFinalize x TritonExperts"]
    vendor = by_name["SymmMemPrepareAndFinalize x CutlassExpertsFP8"]
    grouped = by_name["SymmMemPrepareAndFinalize x GroupedGemmExperts"]

    def select_experts(*seconds: float) -> str:
        pairs = zip((vendor, grouped, ours), seconds, strict=True)
        estimates = [
            replace(
                estimate,
                exchange=replace(estimate.exchange, dispatch=time, combine=0.0),
                experts=replace(estimate.experts, seconds=0.0),
            )
            for estimate, time in pairs
        ]
        estimates.sort(key=lambda estimate: estimate.seconds)
        best = select_best(replace(result, estimates=tuple(estimates)))
        assert best is not None
        return best.experts_part

    assert select_experts(1.0, 1.01, 1.02) == "TritonExperts"
    assert select_experts(1.0, 1.01, 1.04) == "GroupedGemmExperts"
    assert select_experts(1.0, 1.04, 1.04) == "CutlassExpertsFP8"
    assert select_best(replace(result, estimates=())) is None


def test_other_version_of_deep_ep_is_named() -> None:
    cluster = replace(Cluster(), hosts=2)
    problem = distribute_over_ranks(DEEPSEEK.with_tokens(64), 16, 8)
    first, second = machines_with_all_packages(cluster)
    results = [estimate_pairings(problem, cluster, machine) for machine in (first, second)]
    slow = estimate_pairings(problem, cluster, cluster.machine(frozenset({"triton", "ml_dtypes"})))
    changes_by_packages = [
        recommend._describe_changes_by_packages(select_best(estimates), estimates, results)
        for estimates in (slow, *results)
    ]  # type: ignore[arg-type]
    assert len(changes_by_packages[0]) == 1
    match = re.match(
        r"faster with deep_ep [12](?:, \w+)* \(--packages (\S+)\): (DeepEP.*),",
        changes_by_packages[0][0],
    )
    assert match is not None
    assert {"deep_ep", "ml_dtypes", "triton"} <= set(match[1].split(","))
    best = min((select_best(estimates) for estimates in results), key=lambda e: e.seconds)  # type: ignore[union-attr]
    assert best.pairing in changes_by_packages[0][0]  # type: ignore[union-attr]
    assert sorted(map(len, changes_by_packages[1:])) in ([0, 0], [0, 1])


def test_required_columns_fit_80_characters(mk: Mk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    options = ("plan", "--model", "deepseek-v3", "--quant", "fp8_w8a8_block", "--packages", "all")
    for machine in ("h200", "2x8xh200"):
        shown = mk(*options, "--machine", machine).out
        headers = re.findall(
            r"^ \.\.PrepareAndFinalize +\.\.Experts +layer us +Mtok/s +GB\b", shown, re.M
        )
        assert len(headers) == 2
        assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    assert "slower pairings: --rows 0 or --json shows them" in shown
    output_with_all_rows = mk(*options, "--machine", "2x8xh200", "--rows", "0").out
    assert "slower pairing" not in output_with_all_rows


def test_several_machines_and_ranks(mk: Mk) -> None:
    options = ("plan", "--model", "qwen3-30b-a3b", "--tokens", "128", "--json")
    record = mk(*options, "--machine", "8xh200,4xb200").json
    assert {(row["machine"], row["ranks"]) for row in record["recommendations"]} == {
        ("8xh200", 8),
        ("4xb200", 4),
    }
    assert {row["ranks"] for row in mk(*options, "--world-size", "16").json["estimates"]} == {16}
    ranks = mk(*options, "--world-size", "4", "--machine", "8xh200").json["estimates"]
    assert {row["ranks"] for row in ranks} == {4}
    slow = mk(*options, "--machine", "8xh200", "--bandwidth", "2.4", "--link", "100").json
    for before, after in zip(
        sorted(mk(*options, "--machine", "8xh200").json["estimates"], key=lambda r: r["pairing"]),
        sorted(slow["estimates"], key=lambda row: row["pairing"]),
        strict=True,
    ):
        assert after["layer_us"] > before["layer_us"]


def test_nearest_refusal_is_shown_without_a_valid_pair(mk: Mk) -> None:
    sizes = ("--tokens", "8", "--top-k", "99", "--experts", "128")
    result = mk("plan", "--machine", "h200", *sizes)
    assert result.code == 1
    assert "no recommendation, every pairing is refused" in result.out
    assert "nearest: MoEPrepareAndFinalizeNoEP x" in result.out
    assert "[top_k]" in result.out


def test_verbs_agree_on_the_described_machine(mk: Mk, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    content = {"gpu": "b200", "gpus_per_host": 2, "memory_gb": 90, "packages": ["deep_gemm"]}
    path.write_text(json.dumps(content))
    described = ("--machine", str(path))
    machine = {"arch": [10, 0], "packages": ["deep_gemm"], "memory": 90_000_000_000}
    for verb in ("list", "check"):
        shown_machine = mk(verb, *described, "--json").json["machine"]
        assert {name: shown_machine[name] for name in machine} == machine
    planned = mk("plan", *described, "--phase", "decode", "--json").json
    assert planned["machines"][str(path)]["gpu"]["memory"] == 90e9
    assert planned["machines"][str(path)]["per_host"] == 2
    shown = mk("list", "--machine", "8xb200", "--packages", "deep_gemm,triton").out
    assert shown.startswith("Parts on 8xb200 (NVIDIA B200 sm_100)")
    record = mk("check", "--machine", "8xb200", "--json").json
    assert record["machine"]["packages"] == ["ml_dtypes", "triton"]
    assert record["problem"]["parallel"]["world_size"] == 8
    machine_of_this_process = mk("list", "--packages", "triton", "--json").json["machine"]
    assert machine_of_this_process["packages"] == ["triton"]
