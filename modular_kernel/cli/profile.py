"""`mk profile`: one call under torch's profiler; a trace per rank and the time of every stage."""

import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modular_kernel.cli import output
from modular_kernel.cli.host import prepare_host
from modular_kernel.cli.options import AsJson, ProblemOptions
from modular_kernel.cli.ranks import Backend, host_of
from modular_kernel.errors import IncompatibleError

if TYPE_CHECKING:
    from modular_kernel.kernel import FusedMoEModularKernel
    from modular_kernel.types import Machine, Problem

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
    out: Annotated[Path, typer.Option(help="Folder for the traces.")] = Path("out"),
    backend: Backend = None,
    as_json: AsJson = False,
) -> None:
    """Profile one call of a pair: a Chrome trace (for Perfetto) of each rank, and a table of its
    stages.

    Exits with 1, and every reason, if the pair is refused.
    """
    problem = options.problem()
    prepare_host()
    from modular_kernel.catalog import make_kernel

    out.mkdir(parents=True, exist_ok=True)
    with host_of(options.world_size, backend) as host:
        machine, pool = host.machine, host.pool
        if pool is None:
            kernel = make_kernel(pf_type, experts_type, problem, machine=machine)
            paths = [_traced(kernel, out, rank=0)]
        else:
            refuse_unless_valid(pf_type, experts_type, problem, machine)
            paths = pool.run(profile_rank, pf_type, experts_type, problem, machine, out)
    traces = [json.loads(path.read_text(encoding="utf-8"))["traceEvents"] for path in paths]
    times = [stage_times(events, on_gpu=machine.device == "cuda") for events in traces]
    pairing = f"{pf_type} x {experts_type}"
    if as_json:
        record = {"pairing": pairing, "problem": problem, **host.facts}
        record |= {"traces": list(map(str, paths)), "stages": times[0]}
        if pool is not None:
            record["stages_by_rank"] = times
        output.print_json(record)
        return
    output.line(f"{pairing}, {problem} on {machine}")
    for rank, path in enumerate(paths):
        _print_times(times[rank])
        output.line(f"trace of rank {rank} (open it at https://ui.perfetto.dev): {path}")


def refuse_unless_valid(pf: str, experts: str, problem: "Problem", machine: "Machine") -> None:
    """IncompatibleError with every reason of the first rank that has one."""
    from modular_kernel.catalog import load_catalog
    from modular_kernel.cli.check import judged

    (verdict,) = judged(load_catalog(), pf, experts, problem, machine)
    if not verdict.ok:
        raise IncompatibleError(verdict.pairing, verdict.rejections)


def profile_rank(
    rank: int,
    _world_size: int,
    group: object,
    pf: str,
    experts: str,
    problem: "Problem",
    machine: "Machine",
    out: Path,
) -> Path:
    """What one rank of a pool does: as many tokens as the problem has, the same on all ranks."""
    from modular_kernel.catalog import make_kernel

    mine = replace(problem, parallel=replace(problem.parallel, rank=rank))
    return _traced(make_kernel(pf, experts, mine, group=group, machine=machine), out, rank=rank)


def _traced(kernel: "FusedMoEModularKernel", out: Path, *, rank: int) -> Path:
    """Profile a kernel into a file of its own."""
    path = out / trace_name(kernel.pairing, kernel.problem, rank=rank)
    _write_trace(kernel, path)
    return path


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
