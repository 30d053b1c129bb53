"""`mk profile`: traces, tables and reports of real calls."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_mk import run_mk

from modular_kernel.catalog import this_machine
from modular_kernel.cli import profile
from modular_kernel.profiling.chrome import find_violations
from modular_kernel.replay import stages
from modular_kernel.testing.cases.lists import BASE, list_axis_variants

TORCH_PAIR = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TorchExperts")
NAIVE_PAIR = ("BatchedPrepareAndFinalize", "NaiveBatchedExperts")
REFUSED_PAIR = ("--pf-type", "BatchedPrepareAndFinalize", "--experts-type", "TritonExperts")
HAS_TRITON = this_machine().device == "cuda" or this_machine().interpreter
Capsys = pytest.CaptureFixture[str]
FLAGS = (
    "bias",
    "expert_map",
    "inplace",
    "graph",
    "deterministic",
    "batch_invariant",
    "asynchronous",
)


def run_profile(capsys: Capsys, *args: str) -> tuple[int, str]:
    """Run `mk` in this process; return the exit code and stdout."""
    return run_mk(capsys, *args)[:2]


def read_stage_events(path: Path) -> dict[str, dict[str, Any]]:
    """Return the host range of each stage in a Chrome trace."""
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert find_violations(trace) == []
    return {
        event["name"]: event
        for event in trace["traceEvents"]
        if event.get("cat") == "user_annotation" and event["name"].startswith("mk::")
    }


def test_traces_have_the_stages_and_reports_have_their_times(
    capsys: Capsys, tmp_path: Path
) -> None:
    experts = "TritonExperts" if HAS_TRITON else "TorchExperts"
    pair = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", experts)
    args = ("--tokens", "4", "--out", str(tmp_path / "new"), "--json")
    code, out = run_profile(capsys, "profile", *pair, *args)
    record = json.loads(out)
    assert code == 0
    (trace,) = (tmp_path / "new").glob("*.trace.json")
    assert record["traces"] == [str(trace)]
    assert record["merged_trace"] is None
    events = read_stage_events(trace)
    inner = {stages.SORT, stages.GATHER_GEMM1, stages.GEMM2_SCATTER, stages.REDUCE}
    if not HAS_TRITON:
        inner = {stages.SORT, stages.PERMUTE, stages.GEMM1, stages.GEMM2, stages.UNPERMUTE}
    assert inner <= set(events)
    outer = events[stages.EXPERTS]
    for name in inner:
        assert outer["ts"] <= events[name]["ts"]
        assert _get_end(events[name]) <= _get_end(outer)
    rows = {row["stage"]: row for row in record["stages"]}
    # On a CPU, a scope without stages gets the name of a default stage if it is a large part of the
    # call.
    scopes = {default: scope for scope, default in stages.DEFAULT_STAGES.items()}
    assert {scopes.get(name, name) for name in rows} == set(events) - {"mk::barrier"}
    assert all(row["host_us"] > 0 for row in rows.values())
    on_gpu = record["machine"]["device"] == "cuda"
    assert all((row["device_us"] is not None) is on_gpu for row in rows.values())
    assert all(rows[name]["floor"]["us"] > 0 for name in inner)
    (rank,) = record["pairs"][0]["ranks"]
    assert (rank["furthest_from_floor"] in inner) is on_gpu  # interpreted times are meaningless
    assert rank["coverage"] > 0.9
    # Interpreted stages take about a hundred milliseconds, much more than the time between stages.
    assert rank["sum_to_span"] == pytest.approx(1, abs=0.1)


def _get_end(event: dict[str, Any]) -> float:
    end: float = event["ts"] + event["dur"]
    return end


def test_two_pairings_are_compared(capsys: Capsys, tmp_path: Path) -> None:
    against = ("--against", *NAIVE_PAIR, "--routing", "zipf", "--calls", "2")
    code, out = run_profile(capsys, "profile", *TORCH_PAIR, *against, "--out", str(tmp_path))
    assert code == 0
    assert len(list(tmp_path.glob("*-rank0.trace.json"))) == 2
    for word in ("sum of stages", "total (planned)", "Largest gap to the roofline"):
        assert word in out
    assert ("No GPU was" in out) is not torch.cuda.is_available()
    (page,) = tmp_path.glob("*.profile.html")
    assert "TorchExperts" in page.read_text()
    assert str(page) in out
    (saved,) = tmp_path.glob("*.profile.json")
    record = json.loads(saved.read_text())
    first, second = record["pairs"]
    assert (first["pairing"], second["pairing"]) == (
        "MoEPrepareAndFinalizeNoEP x TorchExperts",
        " x ".join(NAIVE_PAIR),
    )
    loads = [pair["ranks"][0]["load"] for pair in (first, second)]
    assert loads[0] == loads[1]
    assert 0 < record["output_difference"] < 0.05 or record["output_difference"] == 0.0
    assert first["ranks"][0]["traced_calls"] == 2
    assert record["routing"] == "zipf1.2"


def test_file_names_are_unique() -> None:
    problems = [problem for problem, _ in list_axis_variants(BASE)]
    flags = dict.fromkeys(FLAGS, True)
    longest = replace(
        BASE,
        activation="swiglu_oai",
        chunk_tokens=7,
        lora="adapters=65536,rank=256,a13=shared,outer=shared",
        **flags,
    )
    names = [profile.make_file_stem("A x B", problem) for problem in {*problems, longest}]
    assert len(set(names)) == len({*problems, longest})
    assert all(len(name) < 200 and set(name).isdisjoint("/:, ") for name in names)
    names = [profile.make_file_stem(pair, BASE) for pair in ("A+ x B", "A: x B", "A_ x B")]
    names.append(profile.make_file_stem("A_ x B against C x D", BASE))
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "args", [REFUSED_PAIR, (*TORCH_PAIR, "--against", REFUSED_PAIR[1], REFUSED_PAIR[3])]
)
def test_profile_refuses_with_every_reason(
    capsys: Capsys, tmp_path: Path, args: tuple[str, ...]
) -> None:
    code, out = run_profile(capsys, "profile", *args, "--out", str(tmp_path))
    assert code == 1
    assert "\n format " in out
    assert "\n reduce " in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (("--calls", "0"), "--calls"),
        (("--calls", "101"), "--calls"),
        (("--routing", "spiral"), "routing"),
        (("--against", TORCH_PAIR[1], TORCH_PAIR[3]), "--against"),
        (("--tokens", "0"), "tokens to profile"),
    ],
)
def test_invalid_options_are_bad_usage(
    capsys: Capsys, tmp_path: Path, args: tuple[str, ...], what: str
) -> None:
    code, out = run_profile(capsys, "profile", *TORCH_PAIR, *args, "--out", str(tmp_path), "--json")
    assert code == 2
    assert json.loads(out)["error"]["what"] == what
