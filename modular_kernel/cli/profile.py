"""`mk profile`: one call under torch's profiler; a trace per rank and the time of every stage."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modular_kernel.cli import output
from modular_kernel.cli.host import prepare_host
from modular_kernel.cli.options import AsJson, ProblemOptions

if TYPE_CHECKING:
    from modular_kernel.kernel import FusedMoEModularKernel
    from modular_kernel.types import Problem

_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LONGEST_NAME = 200  # file systems allow 255 bytes


@dataclass(frozen=True)
class StageTime:
    """Time inside one named range. device_ms: of the GPU work it started; None on a CPU."""

    stage: str
    calls: int
    host_ms: float
    device_ms: float | None


def profile(
    *,
    options: ProblemOptions,
    pf_type: Annotated[str, typer.Option(help="Name of a PrepareAndFinalize (see mk list).")],
    experts_type: Annotated[str, typer.Option(help="Name of an experts part (see mk list).")],
    out: Annotated[Path, typer.Option(help="Folder for the trace.")] = Path("out"),
    as_json: AsJson = False,
) -> None:
    """Profile one call of a pair: a Chrome trace (for Perfetto) and a table of its stages.

    Exits with 1, and every reason, if the pair is refused.
    """
    problem = options.problem()
    prepare_host()
    from modular_kernel.catalog import make_kernel

    kernel = make_kernel(pf_type, experts_type, problem)
    out.mkdir(parents=True, exist_ok=True)
    path = out / trace_name(kernel.pairing, problem, rank=0)
    _write_trace(kernel, path)
    trace = json.loads(path.read_text(encoding="utf-8"))
    times = stage_times(trace["traceEvents"], on_gpu=kernel.machine.device == "cuda")
    if as_json:
        record = {"pairing": kernel.pairing, "problem": problem, "machine": kernel.machine}
        output.print_json({**record, "traces": [str(path)], "stages": times})
        return
    output.line(f"{kernel.pairing}, {problem} on {kernel.machine}")
    _print_times(times)
    output.line(f"trace of rank 0 (open it at https://ui.perfetto.dev): {path}")


def trace_name(pairing: str, problem: "Problem", *, rank: int) -> str:
    """A file name of its own for every pairing, problem and rank."""
    case = f"{pairing.replace(' ', '')}-{problem}"
    name = re.sub(r"[^A-Za-z0-9._=-]", "_", case)
    if name != case or len(name) > _LONGEST_NAME:
        # Two cases may differ in a replaced character, or past the cut.
        name = f"{name[:_LONGEST_NAME]}-{hashlib.sha256(case.encode()).hexdigest()[:8]}"
    return f"{name}-rank{rank}.trace.json"


def _write_trace(kernel: "FusedMoEModularKernel", path: Path) -> None:
    """The trace of one planned call, after calls that compile, load and wake the profiler."""
    import torch
    from torch.profiler import ProfilerActivity, schedule

    from modular_kernel.composer import random_inputs

    device = torch.device(kernel.machine.device)
    plan, inputs = kernel.plan(), random_inputs(kernel.problem, device)
    on_gpu = device.type == "cuda"

    def call() -> None:
        plan(*inputs)
        if on_gpu:
            torch.cuda.synchronize()

    for _ in range(3 if on_gpu else 1):
        call()
    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else []),
        # The first profiled call pays milliseconds for the profiler itself: it is not recorded.
        schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        acc_events=True,
    ) as profiler:
        for _ in range(2):
            call()
            profiler.step()


def stage_times(events: list[dict[str, Any]], *, on_gpu: bool) -> list[StageTime]:
    """One entry for each named range that the call entered, in the order of `stages.STAGES`.

    events: of a Chrome trace. A range's device time is that of the kernels, copies and fills
    whose launch lies in it, whenever they ran.
    """
    from modular_kernel.stages import STAGES

    ranges: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"] in STAGES:
            ranges.setdefault(event["name"], []).append(event)
    work = _launched(events)
    return [
        StageTime(
            stage,
            len(spans),
            sum(span["dur"] for span in spans) / 1e3,
            sum(dur for at, dur in work if any(_holds(span, at) for span in spans)) / 1e3
            if on_gpu
            else None,
        )
        for stage in STAGES
        if (spans := ranges.get(stage))
    ]


def _launched(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """When the host launched it, and how long it took, for everything that ran on the device."""
    launches: dict[int, float] = {}
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            launches[event["args"].get("correlation")] = event["ts"]
    ran = [event for event in events if event.get("cat") in _DEVICE_WORK]
    return [
        (launches[event["args"]["correlation"]], event["dur"])
        for event in ran
        if event["args"].get("correlation") in launches
    ]


def _holds(span: dict[str, Any], moment: float) -> bool:
    inside: bool = span["ts"] <= moment <= span["ts"] + span["dur"]
    return inside


def _print_times(times: list[StageTime]) -> None:
    """In microseconds: a stage of a small call takes a few."""
    on_gpu = any(time.device_ms is not None for time in times)
    columns = ("stage", "calls", "host us", *(("device us",) if on_gpu else ()))
    rows = [
        (time.stage, time.calls, *(f"{ms * 1e3:.1f}" for ms in _milliseconds(time)))
        for time in times
    ]
    output.table(columns, rows)


def _milliseconds(time: StageTime) -> tuple[float, ...]:
    return (time.host_ms,) if time.device_ms is None else (time.host_ms, time.device_ms)
