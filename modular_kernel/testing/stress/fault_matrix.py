"""Run the fault matrix: all fault scenarios of the exchange classes ("parts") over ranks.

In a fault scenario, rank 1 is killed, stopped, late, or makes a wrong call. The other ranks must
raise CommunicationError in time and name rank 1. `faults` runs one scenario on one rank. This
module lists the scenarios, runs them on pools of processes, and formats a table of the findings.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

from modular_kernel.catalog import check, load_catalog, this_machine
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.testing.ranks.pool import Backend, RankError, RankPool
from modular_kernel.testing.stress.faults import (
    CPU_LAYER,
    FAULTY_RANK,
    GPU_LAYER,
    MAX_TIMEOUT_S,
    POINTS,
    SLACK_S,
    RankReport,
    Scenario,
    get_pid,
    run_faulty_rank,
)

# Fields of the problem that rank 1 changes, one at a time, in scenarios of kind "disagrees".
LAYER_CHANGES: tuple[tuple[tuple[str, object], ...], ...] = (
    (("hidden", 4096),),
    (("top_k", 1),),
    (("dtype", "float16"),),
    (("quant", "fp8_w8a8_block"),),
    (("routed_scaling_factor", 2.0),),
)
_START_TIMEOUT_S = 60.0  # timeout for starting processes and importing modules in them


@dataclass(frozen=True)
class FaultResult:
    """Result of a scenario.

    Attributes:
        reports: reports by rank, of the ranks that made one.
        lost: maps each other rank to the reason why it made no report.
        seconds: duration of the scenario.
    """

    scenario: Scenario
    world_size: int
    reports: dict[int, RankReport]
    lost: dict[int, str]
    seconds: float

    @property
    def survivors(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world_size) if rank != FAULTY_RANK)

    def findings(self) -> list[str]:
        """Return every deviation from the expected result; [] if the part handled the fault."""
        scenario, deviations = self.scenario, []
        expected_lost = {FAULTY_RANK} if scenario.kind == "killed" else set[int]()
        for rank, message in self.lost.items():
            if rank not in expected_lost or "SIGKILL" not in message:
                deviations.append(f"rank {rank}: {message.strip().splitlines()[-1][:300]}")
        for rank in self.survivors:
            if rank in self.reports:
                deviations += [
                    f"rank {rank}: {message}"
                    for message in self._check_survivor(self.reports[rank])
                ]
        faulty_report = self.reports.get(FAULTY_RANK)
        if faulty_report is not None and not faulty_report.error:
            deviations.append(f"rank {FAULTY_RANK}: raised no error, although it caused the fault")
        for rank, report in self.reports.items():
            if scenario.kind != "killed" and not report.usable_again:
                deviations.append(f"rank {rank}: the group is not usable afterwards")
        return deviations

    def _check_survivor(self, report: RankReport) -> Iterator[str]:
        if report.error != "CommunicationError":
            yield f"raised {report.error or 'no error'}: {report.message[:200]}"
            return
        if report.peers != (FAULTY_RANK,):
            yield f"the error names the peers {report.peers}: {report.message[:200]}"
        if report.phase not in self.scenario.phases:
            yield f"the error is in phase {report.phase!r}: {report.message[:200]}"
        max_seconds = report.timeout_s + SLACK_S
        if report.seconds > max_seconds:
            yield f"took {report.seconds:.1f} s, more than {max_seconds:g} s"


def list_scenarios(part: str, backend: Backend, *, checked: bool = True) -> tuple[Scenario, ...]:
    """Return all scenarios of a part.

    checked: see `Scenario`.
    """
    layer = GPU_LAYER if backend == "nccl" else CPU_LAYER
    scenarios = [
        Scenario(part, kind, point, layer=layer)
        for kind in ("killed", "stopped", "late")
        for point in POINTS
    ]
    scenarios += [Scenario(part, kind, layer=layer) for kind in ("raises", "overflow", "refuses")]
    scenarios.append(Scenario(part, "raises", "before dispatch", layer=layer))
    scenarios += [
        Scenario(part, "disagrees", faulty_changes=changes, layer=layer)
        for changes in LAYER_CHANGES
    ]
    return tuple(replace(scenario, checked=checked) for scenario in scenarios)


def list_supported_parts(world_size: int, backend: Backend) -> tuple[str, ...]:
    """Return the parts that support the layer of the scenarios on this number of ranks.

    Parts that wrap third-party libraries are excluded, because they may hang if a rank is lost.
    """
    catalog = load_catalog()
    machine = this_machine(device="cuda" if backend == "nccl" else "cpu")
    fields: dict[str, Any] = dict(GPU_LAYER if backend == "nccl" else CPU_LAYER)
    problem = Problem(tokens=8, parallel=Parallel(world_size), **fields)
    return tuple(
        name
        for name in catalog.names("prepare_finalize")
        if not catalog.prepare_finalize(name).requires.packages
        and any(check(name, ex, problem, machine).ok for ex in catalog.names("experts"))
    )


def run_scenario(scenario: Scenario, pool: RankPool, *, timeout: float = 30.0) -> FaultResult:
    """Run one scenario on a pool. The pool can be used again afterwards.

    timeout: seconds after which a rank that does not answer is killed and reported as lost.
    """
    with tempfile.TemporaryDirectory(prefix="mk-fault-") as folder:
        pids = tuple(pool.run(get_pid, timeout=_START_TIMEOUT_S))
        started = time.monotonic()
        lost: dict[int, str] = {}
        try:
            task = scenario, folder, pids
            reports = dict(enumerate(pool.run(run_faulty_rank, *task, timeout=timeout)))
        except RankError as error:
            reports, lost = error.results, error.failures
        seconds = time.monotonic() - started
    return FaultResult(scenario, pool.world_size, reports, lost, seconds)


def run_matrix(
    scenarios_to_run: Iterable[Scenario],
    world_size: int,
    backend: Backend,
    *,
    num_pools: int = 1,
    ranks_per_host: int | None = None,
    on_result: Callable[[FaultResult], None] = lambda _: None,
    start_limit_s: float = 300.0,
) -> tuple[FaultResult, ...]:
    """Run every scenario, starting with those that kill processes.

    num_pools: number of pools that run scenarios in parallel. This is faster than one pool, because
        ranks mostly wait.
    ranks_per_host: number of ranks per simulated host; None means that all are on one host.
    on_result: called with each result.
    start_limit_s: scenarios that have not started after this many seconds are reported with all
        ranks lost.
    """
    ordered_scenarios = sorted(scenarios_to_run, key=lambda scenario: scenario.kind != "killed")
    queue: SimpleQueue[tuple[int, Scenario]] = SimpleQueue()
    for indexed_scenario in enumerate(ordered_scenarios):
        queue.put(indexed_scenario)
    results: dict[int, FaultResult] = {}
    start_deadline, results_lock = time.monotonic() + start_limit_s, threading.Lock()

    def run_pool() -> None:
        timeout_s = max(MAX_TIMEOUT_S, *(scenario.timeout_s for scenario in ordered_scenarios))
        grace = timeout_s + 2 * SLACK_S
        with RankPool(world_size, backend, grace=grace, ranks_per_host=ranks_per_host) as pool:
            while True:
                try:
                    index, scenario = queue.get_nowait()
                except Empty:
                    return
                is_late = time.monotonic() > start_deadline
                if is_late:
                    result = _make_not_started_result(scenario, world_size)
                else:
                    result = _try_scenario(scenario, pool)
                with results_lock:
                    results[index] = result
                    on_result(result)

    with ThreadPoolExecutor(num_pools) as threads:
        for future in [
            threads.submit(run_pool) for _ in range(min(num_pools, len(ordered_scenarios)))
        ]:
            future.result()
    return tuple(results[index] for index in range(len(ordered_scenarios)))


def _try_scenario(scenario: Scenario, pool: RankPool) -> FaultResult:
    """Run a scenario. If the pool does not start, return a result in which all ranks are lost."""
    try:
        return run_scenario(scenario, pool)
    except RankError as error:
        return FaultResult(scenario, pool.world_size, {}, error.failures, 0.0)


def _make_not_started_result(scenario: Scenario, world_size: int) -> FaultResult:
    lost = dict.fromkeys(range(world_size), "not started: time limit reached")
    return FaultResult(scenario, world_size, {}, lost, 0.0)


def format_markdown(results: Sequence[FaultResult]) -> str:
    """Format a Markdown table with one line per scenario.

    The columns are the part, the scenario, the seconds until each other rank raised its error, the
    errors of the other ranks, the error of rank 1, and the findings.
    """
    header = (
        "part",
        "what happens to rank 1",
        "time to error",
        "the others raise",
        "rank 1 raises",
        "findings",
    )
    lines = [_format_table_row(header), _format_table_row(["---"] * len(header))]
    parts = list(dict.fromkeys(result.scenario.part for result in results))
    for result in sorted(results, key=lambda result: parts.index(result.scenario.part)):
        survivor_reports = [result.reports[r] for r in result.survivors if r in result.reports]
        times = "/".join(f"{report.seconds:.1f}" for report in survivor_reports)
        faulty_report = result.reports.get(FAULTY_RANK)
        lines.append(
            _format_table_row(
                [
                    result.scenario.part.removesuffix("PrepareAndFinalize"),
                    str(result.scenario),
                    f"{times} s" if times else "-",
                    "; ".join(dict.fromkeys(map(_describe_error, survivor_reports))) or "-",
                    "-" if faulty_report is None else _describe_error(faulty_report),
                    "; ".join(result.findings()).replace("|", "/") or "none",
                ]
            )
        )
    return "\n".join(lines) + "\n"


def format_summary(results: Sequence[FaultResult]) -> str:
    """Format a one-line summary of the results."""
    num_failed = sum(bool(result.findings()) for result in results)
    seconds = (
        report.seconds
        for result in results
        for rank, report in result.reports.items()
        if rank != FAULTY_RANK
    )
    slowest = max(seconds, default=0.0)
    return f"{len(results)} scenarios, {num_failed} with findings, slowest survivor {slowest:.1f} s"


def to_json(results: Sequence[FaultResult]) -> list[dict[str, object]]:
    """Return the results as JSON-compatible data."""
    return [
        {
            "part": result.scenario.part,
            "scenario": str(result.scenario),
            "seconds": result.seconds,
            "reports": {rank: vars(replace(r)) for rank, r in result.reports.items()},
            "lost": result.lost,
            "findings": result.findings(),
        }
        for result in results
    ]


def _describe_error(report: RankReport) -> str:
    if not report.error:
        return "nothing"
    if report.error != "CommunicationError":
        return f"`{report.error}`"
    peers = ", ".join(map(str, report.peers)) or "unknown"
    return f"`{report.error}` in {report.phase}, peer {peers}"


def _format_table_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
