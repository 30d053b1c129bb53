"""Runs configurations one after the other in a separate process, which may crash or hang."""

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from modular_kernel.settings import child_environment
from modular_kernel.testing.stress.fuzz.outcome import BAD, CRASH, GOOD, HANG

_START_TIMEOUT_S = 120.0  # timeout in seconds for a process to start and import
_EXIT_TIMEOUT_S = 2.0  # timeout in seconds for a normal exit
_WORKER = "modular_kernel.testing.stress.fuzz.worker"


@dataclass(frozen=True)
class FuzzFinding:
    """A configuration with a bad outcome. number: -1 for a saved failure or an explicit example."""

    number: int
    target: str
    kind: str
    what: str
    smallest: str = ""  # the outcome of the smallest input that Hypothesis found


@dataclass
class FuzzReport:
    """Outcomes of the configurations of one seed."""

    seed: str
    interpreted: bool
    only: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    by_target: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: list[FuzzFinding] = field(default_factory=list)

    def reproducer(self, finding: FuzzFinding) -> str:
        """Return a command that runs this configuration alone."""
        words = "python -m modular_kernel.testing.stress.fuzz"
        words += f" --seed {self.seed} --only {finding.number}"
        words += f" --target {self.only}" if self.only else ""
        return words + (" --interpreted" if self.interpreted else "")

    def lines(self) -> Iterator[str]:
        """Yield the lines of each finding, then the counts of each class."""
        for finding in self.findings:
            yield f"{finding.kind}: {finding.target}: {finding.what}"
            yield f"    {self.reproducer(finding)}"
            if finding.smallest:
                yield f"    smallest input: {finding.smallest}"
        mode = "interpreted" if self.interpreted else "plain"
        counts = ", ".join(f"{self.counts[kind]} {kind}" for kind in (*GOOD, *BAD))
        yield f"seed {self.seed}, {mode}: {sum(self.counts.values())} configurations: {counts}"


def run(
    seed: str,
    numbers: range,
    *,
    interpreted: bool = False,
    only: str = "",
    deadline_s: float = 60.0,
) -> FuzzReport:
    """Run the configurations of `numbers`. -1 stands for explicit examples and saved failures.

    only: the name of the only target; "" for all. deadline_s: timeout in seconds for each.
    """
    report = FuzzReport(seed, interpreted, only)
    first = numbers.start
    while first < numbers.stop:
        first = _run_process(report, range(first, numbers.stop), deadline_s)
    return report


def _run_process(report: FuzzReport, numbers: range, deadline_s: float) -> int:
    """Run until the process ends; return the number to continue from."""
    words = [sys.executable, "-m", _WORKER, report.seed, str(numbers.start), str(numbers.stop)]
    words += ["calls" if report.interpreted else "", report.only]
    # All tensors are on the CPU, so hide GPUs.
    environment = child_environment(interpreted=report.interpreted)
    environment["CUDA_VISIBLE_DEVICES"] = ""
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    current, patience = numbers.start, _START_TIMEOUT_S
    try:
        while (line := lines.get(timeout=patience)) is not None:
            number, target, kind, what = json.loads(line)
            current, patience = number + 1, deadline_s
            if kind == "smaller":
                report.findings[-1] = replace(report.findings[-1], smallest=what)
            elif kind != "saved":
                _note(report, FuzzFinding(number, target, kind, what))
    except queue.Empty:
        _note(report, FuzzFinding(current, "?", HANG, f"no answer in {patience:.0f} s"))
        return current + 1
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_TIMEOUT_S)
        process.kill()
        code = process.wait()
    if current < numbers.stop:
        _note(report, FuzzFinding(current, "?", CRASH, f"the process ended with {code}"))
    return current + 1


def _read(process: subprocess.Popen[str], lines: "queue.Queue[str | None]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("["):
            lines.put(line)
    lines.put(None)


def _note(report: FuzzReport, found: FuzzFinding) -> None:
    report.counts[found.kind] += 1
    report.by_target[found.target, found.kind] += 1
    if found.kind not in GOOD:
        report.findings.append(found)
