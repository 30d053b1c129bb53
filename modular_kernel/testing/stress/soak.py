"""Soak test: many calls of varying size on several ranks, with checks of outputs and memory.

`run_soak` runs on each rank of a pool. The layer is small, so that many calls can be made. Each
step calls the kernel, a plan (a kernel with preallocated buffers), or a CUDA graph of the plan with
one of several input sets. Every `check_every` steps, a new input set is drawn, and the output of
that step is compared with the float64 reference. All ranks use the same seed, so they draw the same
inputs without communication.
"""

import gc
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from modular_kernel.catalog import check, load_catalog, make_kernel, this_machine
from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Machine, Parallel, Problem
from modular_kernel.testing.stress.soak_inputs import (
    SoakInputs,
    SoakInputSource,
    compare_with_float64_reference,
)

_NUM_EAGER_INPUTS, _NUM_GRAPH_INPUTS = 16, 4  # numbers of input sets
# Relative frequencies of the ways to make a call, with and without CUDA graphs.
_GRAPH_MODE_WEIGHTS = {"graph": 6, "plan": 3, "kernel": 1}
_MODE_WEIGHTS = {"plan": 7, "kernel": 3}
_PREFERRED_EXPERTS = {"cuda": "TritonExperts", "cpu": "TorchExperts"}
_PROGRESS_INTERVAL_S = 5.0  # time between progress lines
_MAX_FINDINGS = 5


@dataclass(frozen=True)
class Soak:
    """Parameters of a soak test, which ends after `steps` or `seconds`, whichever comes first.

    After the warm-up, GPU memory may grow by at most `cuda_bytes`, and resident memory by at most
    `rss_bytes`. The number of open files and threads must not grow.

    Attributes:
        part: name of a PrepareAndFinalize.
        experts: name of an experts part; None means one that is compatible and fast to call.
        tokens: maximum number of tokens per rank.
        num_experts: number of experts.
        check_every: number of steps between checks.
        warmup_steps: number of steps in the warm-up, limited to a tenth of the run.
        hosts: number of simulated hosts.
        checked: argument of the part's manager. If False, the ranks compare their arguments on the
            host in the first call only.
    """

    part: str
    experts: str | None = None
    steps: int = 100_000
    seconds: float = 120.0
    tokens: int = 16
    hidden: int = 128
    num_experts: int = 8
    top_k: int = 2
    dtype: torch.dtype = torch.bfloat16
    check_every: int = 100
    warmup_steps: int = 1000
    cuda_bytes: int = 1 << 20
    rss_bytes: int = 32 << 20
    seed: int = 0
    hosts: int = 1
    checked: bool = True

    def make_problem(self, world_size: int, rank: int, *, graph: bool) -> Problem:
        ranks_per_host = world_size // self.hosts
        return Problem(
            tokens=self.tokens,
            hidden=self.hidden,
            intermediate=64,
            experts=self.num_experts,
            top_k=self.top_k,
            dtype=self.dtype,
            graph=graph,
            parallel=Parallel(
                world_size, rank=rank, ranks_per_host=None if self.hosts == 1 else ranks_per_host
            ),
        )


@dataclass(frozen=True)
class SoakReport:
    """Result of one rank.

    Attributes:
        steps: number of steps.
        checked_outputs: number of outputs that were checked.
        modes: number of steps by the way in which the call was made.
        worst: largest error of the checked outputs, relative to its bound.
        cuda_growth, rss_growth: growth of GPU memory and of resident memory in bytes.
        handles_growth: growth of the number of open files and threads.
        findings: every deviation from the expected behavior.
        resources: step, bytes of the GPU, resident bytes, and number of open files and threads;
            after the warm-up, after each quarter of the steps, and at the end.
    """

    steps: int
    seconds: float
    checked_outputs: int
    modes: dict[str, int]
    worst: float
    cuda_growth: int
    rss_growth: int
    handles_growth: int
    findings: tuple[str, ...]
    resources: tuple[tuple[int, int, int, int], ...] = ()

    def __str__(self) -> str:
        modes = ", ".join(f"{count} {mode}" for mode, count in sorted(self.modes.items()))
        ms_per_step = self.seconds / max(self.steps, 1) * 1e3
        return (
            f"{self.steps} steps ({modes}) in {self.seconds:.1f} s, {ms_per_step:.3f} ms each, "
            f"{self.checked_outputs} outputs checked, worst {self.worst:.2f} of its bound, growth: "
            f"GPU {self.cuda_growth / 2**20:.2f} MiB, process {self.rss_growth / 2**20:.1f} MiB, "
            f"{self.handles_growth} files and threads"
        )

    def format_resources(self) -> str:
        """Return the resident memory and the number of open files and threads by step."""
        return "; ".join(
            f"step {step}: {resident / 2**20:.1f} MiB, {handles} files and threads"
            for step, _, resident, handles in self.resources
        )


def run_soak(rank: int, world_size: int, group: Any, params: Soak) -> SoakReport:
    """Run the soak test on one rank of a RankPool. If it raises an error, a note names the step.

    On a CPU, oneDNN is disabled. It keeps compiled code for each shape of a matrix product, about
    0.4 MiB in bfloat16, so memory would grow with every new number of rows of an expert.
    """
    one_dnn: Any = torch.backends.mkldnn
    was_enabled, one_dnn.enabled = one_dnn.enabled, False
    try:
        run = _Run(rank, world_size, group, params)
        try:
            report = run.run_all_steps()
            run.close()
            return report
        except Exception as error:
            error.add_note(f"at step {run.step} of the soak, by {run.mode}")
            raise
    finally:
        one_dnn.enabled = was_enabled


class _Run:
    """State of one rank: kernel, input sets and results."""

    def __init__(self, rank: int, world_size: int, group: Any, params: Soak) -> None:
        self.rank, self.group, self.params = rank, group, params
        is_cuda = dist.get_backend(group) == "nccl"
        device = (
            torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
        )
        self.device, self.step, self.mode = device, 0, "set-up"
        self.rng = random.Random(params.seed)
        self.modes: Counter[str] = Counter()
        self.checked_outputs, self.worst = 0, 0.0
        self.findings: list[str] = []
        machine = this_machine(device="cuda" if is_cuda else "cpu")
        requires = load_catalog().prepare_finalize(params.part).requires
        problem = params.make_problem(world_size, rank, graph=is_cuda and requires.graph_capturable)
        experts = params.experts or _find_experts(params.part, problem, machine)
        if not params.checked:
            part_class: Any = load_catalog().prepare_finalize(params.part)
            group = part_class.manager_class(group, checked=False)
        self.kernel = make_kernel(params.part, experts, problem, group=group, machine=machine)
        self.plan = self.kernel.plan()
        part = self.kernel.prepare_finalize
        self.input_source = SoakInputSource(
            problem,
            device,
            self.rng,
            replicated=requires.replicated_input,
            ids_dtype=part.topk_indices_dtype() or torch.int32,
        )
        self.check_part: Callable[[], object] | None = getattr(part, "check", None)
        self.eager_inputs = [self.input_source.draw_inputs() for _ in range(_NUM_EAGER_INPUTS)]
        num_graphs = _NUM_GRAPH_INPUTS if problem.graph else 0
        self._graphs = list[torch.cuda.CUDAGraph]()
        self.captured_inputs = [self._capture() for _ in range(num_graphs)]
        frequencies = _GRAPH_MODE_WEIGHTS if num_graphs else _MODE_WEIGHTS
        self.mode_choices = [mode for mode, count in frequencies.items() for _ in range(count)]

    def _capture(self) -> SoakInputs:
        """Draw an input set and capture its call in a CUDA graph."""
        inputs = self.input_source.draw_inputs()
        inputs.out = torch.empty_like(inputs.x_TH)

        def call() -> None:
            self.plan(inputs.x_TH, self.input_source.weights, inputs.routing, out=inputs.out)

        for _ in range(2):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        inputs.replay = graph.replay
        self._graphs.append(graph)
        return inputs

    def close(self) -> None:
        """Reset the graphs, which keep the communicator alive, and close the part's manager."""
        for graph in self._graphs:
            graph.reset()
        part: Any = self.kernel.prepare_finalize
        if hasattr(part, "destroy"):
            part.destroy()

    def run_all_steps(self) -> SoakReport:
        """Make steps until any rank has reached a limit; return the report."""
        params, started = self.params, time.monotonic()
        warmup_steps = min(params.warmup_steps, max(params.steps // 10, params.check_every))
        resources_before, last_progress = self._measure_resources(), started
        resources, quarter = [(0, *resources_before)], max(1, params.steps // 4)
        while not self._should_stop(started):
            for _ in range(params.check_every - 1):
                self._run_step()
            self._run_step(redraw=True)
            if self.step <= warmup_steps:
                resources_before = self._measure_resources()
                resources = [(self.step, *resources_before)]
            elif self.step // quarter > (self.step - params.check_every) // quarter:
                resources.append((self.step, *self._measure_resources()))
            if self.rank == 0 and time.monotonic() - last_progress > _PROGRESS_INTERVAL_S:
                last_progress = time.monotonic()
                progress = (
                    f"{self.step} steps, {last_progress - started:.0f} s, "
                    f"{self.checked_outputs} outputs checked"
                )
                print(progress, file=sys.stderr, flush=True)  # noqa: T201  in a worker process
        resources_after = self._measure_resources()
        if resources[-1][0] < self.step:
            resources.append((self.step, *resources_after))
        growth = (
            resources_after[0] - resources_before[0],
            resources_after[1] - resources_before[1],
            resources_after[2] - resources_before[2],
        )
        names = "bytes of the GPU", "bytes of the process", "open files and threads"
        max_growth = params.cuda_bytes, params.rss_bytes, 0
        for name, increase, limit in zip(names, growth, max_growth, strict=True):
            if increase > limit:
                self.findings.append(f"{name} grew by {increase}, limit {limit}")
        return SoakReport(
            self.step,
            time.monotonic() - started,
            self.checked_outputs,
            dict(self.modes),
            self.worst,
            *growth,
            tuple(self.findings),
            tuple(resources),
        )

    def _run_step(self, *, redraw: bool = False) -> None:
        """Make one call.

        redraw: whether to draw new inputs before the call, and to check its output.
        """
        self.step += 1
        self.mode = self.rng.choice(self.mode_choices)
        self.modes[self.mode] += 1
        input_sets = self.captured_inputs if self.mode == "graph" else self.eager_inputs
        index = self.rng.randrange(len(input_sets))
        if redraw:
            self._redraw_inputs(input_sets, index)
        out = self._call(input_sets[index])
        if not redraw:
            return
        if self.check_part is not None:
            self.check_part()
        worst, message = compare_with_float64_reference(input_sets[index], out, self.kernel.problem)
        self.checked_outputs, self.worst = self.checked_outputs + 1, max(self.worst, worst)
        if message:
            self.findings.append(f"step {self.step}, {self.mode}: {message}")

    def _redraw_inputs(self, input_sets: list[SoakInputs], index: int) -> None:
        old_inputs = input_sets[index]
        if old_inputs.replay is None:
            input_sets[index] = self.input_source.draw_inputs()
            return
        assert old_inputs.out is not None
        old_inputs.refill(self.input_source.draw_inputs(old_inputs.tokens_W))
        old_inputs.out.fill_(float("nan"))

    def _call(self, inputs: SoakInputs) -> torch.Tensor:
        if self.mode == "graph":
            assert inputs.replay is not None
            assert inputs.out is not None
            inputs.replay()
            return inputs.out
        call = self.plan if self.mode == "plan" else self.kernel
        return call(inputs.x_TH, self.input_source.weights, inputs.routing)

    def _should_stop(self, started: float) -> bool:
        """Return whether any rank has reached a limit, which is the same on all ranks."""
        is_late = time.monotonic() - started > self.params.seconds
        is_done = self.step >= self.params.steps or len(self.findings) >= _MAX_FINDINGS
        vote = torch.tensor([float(is_late or is_done)], device=self.device)
        dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self.group)
        return bool(vote.item())

    def _measure_resources(self) -> tuple[int, int, int]:
        """Return allocated GPU bytes, resident bytes, and the number of open files and threads."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        resident = pages * os.sysconf("SC_PAGE_SIZE")
        handles = sum(1 for kind in ("fd", "task") for _ in Path("/proc/self", kind).iterdir())
        if self.device.type != "cuda":
            return 0, resident, handles
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), resident, handles


def _find_experts(part: str, problem: Problem, machine: Machine) -> str:
    """Return the name of an experts class that is compatible with the part.

    Raises ConfigurationError if there is none.
    """
    names = (_PREFERRED_EXPERTS[machine.device], *load_catalog().names("experts"))
    for name in names:
        if check(part, name, problem, machine).ok:
            return name
    raise ConfigurationError("experts", got=f"none compatible with {part}", need="at least one")
