"""`mk profile`: a trace per case with the stages in it, and the time of each."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modular_kernel import stages
from modular_kernel.catalog import this_machine
from modular_kernel.cli import main, profile
from modular_kernel.testing.cases import BASE, axes

TORCH_PAIR = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TorchExperts")
REFUSED_PAIR = ("--pf-type", "BatchedPrepareAndFinalize", "--experts-type", "TritonExperts")
TRITON_HERE = this_machine().device == "cuda" or this_machine().interpreter
Capsys = pytest.CaptureFixture[str]


def run(capsys: Capsys, *words: str) -> tuple[int, str]:
    """Exit code and stdout of `mk` in this process."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main.run(list(words))
    code = ended.value.code
    assert isinstance(code, int | None)
    return code or 0, capsys.readouterr().out


def stage_events(path: Path) -> dict[str, dict[str, Any]]:
    """The named ranges of a Chrome trace, as the host saw them."""
    trace = json.loads(path.read_text(encoding="utf-8"))
    return {
        event["name"]: event
        for event in trace["traceEvents"]
        if event.get("cat") == "user_annotation" and event["name"].startswith("mk::")
    }


def test_profile_writes_a_trace_with_the_stages(capsys: Capsys, tmp_path: Path) -> None:
    experts = "TritonExperts" if TRITON_HERE else "TorchExperts"
    pair = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", experts)
    words = ("--tokens", "4", "--out", str(tmp_path / "new"), "--json")
    code, out = run(capsys, "profile", *pair, *words)
    record = json.loads(out)
    assert code == 0
    (path,) = (tmp_path / "new").iterdir()
    assert record["traces"] == [str(path)]
    events = stage_events(path)
    outer = {stages.PREPARE, stages.EXPERTS, stages.FINALIZE}
    inner = {stages.PERMUTE, stages.GEMM1, stages.GEMM2, stages.REDUCE}
    assert set(events) == (outer | inner if TRITON_HERE else outer | {stages.PERMUTE})
    around = events[stages.EXPERTS]
    for name in inner & set(events):
        assert around["ts"] <= events[name]["ts"]
        assert _end(events[name]) <= _end(around)
    assert {stage["stage"] for stage in record["stages"]} == set(events)
    assert all(stage["host_ms"] > 0 for stage in record["stages"])
    on_gpu = record["machine"]["device"] == "cuda"
    assert all((stage["device_ms"] is not None) is on_gpu for stage in record["stages"])


def _end(event: dict[str, Any]) -> float:
    end: float = event["ts"] + event["dur"]
    return end


def test_profile_prints_a_table_and_the_path(capsys: Capsys, tmp_path: Path) -> None:
    code, out = run(capsys, "profile", *TORCH_PAIR, "--out", str(tmp_path))
    assert code == 0
    (path,) = tmp_path.iterdir()
    assert str(path) in out
    for name in (stages.PREPARE, stages.EXPERTS, stages.FINALIZE):
        assert f"\n {name} " in out


def test_two_cases_make_two_traces(capsys: Capsys, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path))
    run(capsys, "profile", *TORCH_PAIR, *out, "--tokens", "4")
    run(capsys, "profile", *TORCH_PAIR, *out, "--tokens", "4", "--top-k", "1")
    assert len(list(tmp_path.iterdir())) == 2
    run(capsys, "profile", *TORCH_PAIR, *out, "--tokens", "4")
    assert len(list(tmp_path.iterdir())) == 2


def test_trace_names_are_distinct_and_safe() -> None:
    problems = [problem for problem, _ in axes(BASE)]
    flags = dict.fromkeys(_FLAGS, True)
    longest = replace(BASE, activation="swiglu_oai", chunk_tokens=7, **flags)
    names = [profile.trace_name("A x B", problem, rank=0) for problem in {*problems, longest}]
    assert len(set(names)) == len({*problems, longest})
    assert all(len(name) < 255 and set(name).isdisjoint("/:, ") for name in names)
    names = [profile.trace_name(pair, BASE, rank=0) for pair in ("A+ x B", "A: x B", "A_ x B")]
    names.append(profile.trace_name("A_ x B", BASE, rank=1))
    assert len(set(names)) == len(names)


_FLAGS = ("bias", "expert_map", "inplace", "graph", "deterministic", "asynchronous", "lora")


def test_profile_refuses_with_every_reason(capsys: Capsys, tmp_path: Path) -> None:
    code, out = run(capsys, "profile", *REFUSED_PAIR, "--out", str(tmp_path))
    assert code == 1
    assert "\n format " in out
    assert "\n reduce " in out
    assert list(tmp_path.iterdir()) == []


def test_device_time_is_that_of_the_work_a_range_launched() -> None:
    """Two kernels launched in GEMM 1 that run after the range, a copy in between, one outside."""

    def event(kind: str, name: str, begin: float, dur: float, link: int = 0) -> dict[str, Any]:
        return {"cat": kind, "name": name, "ts": begin, "dur": dur, "args": {"correlation": link}}

    events = [
        {"ph": "M", "name": "process_name"},
        event("user_annotation", stages.EXPERTS, 0, 100),
        event("user_annotation", stages.GEMM1, 10, 20),
        event("gpu_user_annotation", stages.GEMM1, 200, 999),
        event("cuda_driver", "cuLaunchKernelEx", 12, 2, 1),
        event("cuda_runtime", "cudaMemcpyAsync", 15, 2, 2),
        event("cuda_driver", "cuLaunchKernelEx", 30, 2, 3),
        event("cuda_driver", "cuLaunchKernelEx", 31, 2, 4),
        event("cuda_driver", "cuLaunchKernelEx", 101, 2, 5),
        event("kernel", "a", 200, 1000, 1),
        event("gpu_memcpy", "copy", 1300, 200, 2),
        event("kernel", "b", 1600, 30, 3),
        event("kernel", "c", 1700, 4, 4),
        event("kernel", "d", 1800, 7, 5),
        event("kernel", "launched before the profiler ran", 1, 7, 6),
    ]
    gemm1, experts = profile.stage_times(events, on_gpu=True)
    assert gemm1 == profile.StageTime(stages.GEMM1, 1, 0.020, 1.230)
    assert experts == profile.StageTime(stages.EXPERTS, 1, 0.100, 1.234)
    assert profile.stage_times(events, on_gpu=False)[0].device_ms is None
