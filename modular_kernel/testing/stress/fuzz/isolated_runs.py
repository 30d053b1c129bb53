"""Run fuzz configurations in a separate process, because they may crash or hang.

A configuration is one random input of one target, determined by a seed and a number. The process
(`worker`) prints the outcome of each configuration. If it ends or hangs, a new process continues
with the next configuration.
"""

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from modular_kernel.settings import make_child_environment
from modular_kernel.testing.stress.fuzz.outcome import CRASH, FAILURE_KINDS, HANG, SUCCESS_KINDS

_START_TIMEOUT_S = 120.0  # timeout for a process to start and import modules
_EXIT_TIMEOUT_S = 2.0  # timeout for a normal exit
_WORKER = "modular_kernel.testing.stress.fuzz.worker"


@dataclass(frozen=True)
class FuzzFinding:
    """A configuration with an outcome in FAILURE_KINDS.

    number: number of the configuration; -1 for saved failures and explicit examples.
    smallest: kind and description of the smallest failing input that Hypothesis found.
    """

    number: int
    target: str
    kind: str
    description: str
    smallest: str = ""


@dataclass
class FuzzReport:
    """Outcomes of the configurations of one seed.

    Attributes:
        seed: the seed.
        interpreted: whether kernels were interpreted.
        only: the name of the only target; "" for all.
        counts: number of configurations by kind of outcome.
        by_target: number of configurations by target and kind of outcome.
        findings: the configurations with an outcome in FAILURE_KINDS.
    """

    seed: str
    interpreted: bool
    only: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    by_target: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: list[FuzzFinding] = field(default_factory=list)

    def reproducer(self, finding: FuzzFinding) -> str:
        """Return the command that runs the configuration of a finding alone."""
        command = "python -m modular_kernel.testing.stress.fuzz"
        command += f" --seed {self.seed} --only {finding.number}"
        command += f" --target {self.only}" if self.only else ""
        return command + (" --interpreted" if self.interpreted else "")

    def lines(self) -> Iterator[str]:
        """Yield lines about each finding, then a line of counts by kind of outcome."""
        for finding in self.findings:
            yield f"{finding.kind}: {finding.target}: {finding.description}"
            yield f"    {self.reproducer(finding)}"
            if finding.smallest:
                yield f"    smallest input: {finding.smallest}"
        mode = "interpreted" if self.interpreted else "plain"
        counts = ", ".join(
            f"{self.counts[kind]} {kind}" for kind in (*SUCCESS_KINDS, *FAILURE_KINDS)
        )
        yield f"seed {self.seed}, {mode}: {sum(self.counts.values())} configurations: {counts}"


def run(
    seed: str,
    numbers: range,
    *,
    interpreted: bool = False,
    only: str = "",
    timeout_s: float = 60.0,
) -> FuzzReport:
    """Run configurations of a seed in worker processes, and return their outcomes.

    numbers: numbers of configurations. -1 stands for the explicit examples and saved failures.
    interpreted: whether kernels are interpreted.
    only: the name of the only target; "" means all targets.
    timeout_s: timeout for each configuration in seconds.
    """
    report = FuzzReport(seed, interpreted, only)
    next_number = numbers.start
    while next_number < numbers.stop:
        next_number = _run_process(report, range(next_number, numbers.stop), timeout_s)
    return report


def _run_process(report: FuzzReport, numbers: range, timeout_s: float) -> int:
    """Run configurations in one process until it ends; return the number to continue with."""
    command = [sys.executable, "-m", _WORKER, report.seed, str(numbers.start), str(numbers.stop)]
    command += ["calls" if report.interpreted else "", report.only]
    # All tensors are on the CPU, so hide GPUs.
    environment = make_child_environment(interpreted=report.interpreted)
    environment["CUDA_VISIBLE_DEVICES"] = ""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read_lines, args=(process, lines), daemon=True).start()
    current, timeout = numbers.start, _START_TIMEOUT_S
    try:
        while (line := lines.get(timeout=timeout)) is not None:
            number, target, kind, description = json.loads(line)
            current, timeout = number + 1, timeout_s
            if kind == "smaller":
                report.findings[-1] = replace(report.findings[-1], smallest=description)
            elif kind != "saved":
                _record(report, FuzzFinding(number, target, kind, description))
    except queue.Empty:
        _record(report, FuzzFinding(current, "?", HANG, f"no answer in {timeout:.0f} s"))
        return current + 1
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_TIMEOUT_S)
        process.kill()
        code = process.wait()
    if current < numbers.stop:
        _record(report, FuzzFinding(current, "?", CRASH, f"the process ended with {code}"))
    return current + 1


def _read_lines(process: subprocess.Popen[str], lines: "queue.Queue[str | None]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("["):
            lines.put(line)
    lines.put(None)


def _record(report: FuzzReport, finding: FuzzFinding) -> None:
    report.counts[finding.kind] += 1
    report.by_target[finding.target, finding.kind] += 1
    if finding.kind not in SUCCESS_KINDS:
        report.findings.append(finding)
