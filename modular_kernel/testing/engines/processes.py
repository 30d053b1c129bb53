"""Runs cases in worker processes with time limits, so that a crash or hang affects one case.

The time limit of a call does not count the compilation of kernels, because the first call of each
case has a limit of its own.
"""

import os
import signal
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from queue import Empty, SimpleQueue
from tempfile import TemporaryFile
from time import monotonic

from modular_kernel.errors import ModularKernelError, UnsupportedError
from modular_kernel.integrations.engine import Description, EngineCase, Kind, Outcome
from modular_kernel.text import escape_nonprintable

Result = tuple[EngineCase, Outcome]

# After this many cases have ended their process, the other cases that differ from them only in
# sizes and routing are not run.
_MAX_ENDED = 2
_LOG_BYTES = 400  # number of bytes at the end of a process's output that a message quotes
_ASSERTION_PREFIX = "AssertionError: relative RMS error "  # of the line that shows the error


@dataclass(frozen=True)
class TimeLimits:
    """Time limits in seconds.

    setup: for loading the engine, for making a layer and its inputs, and for comparing an output.
    first_call: for the first call of a case, in which kernels are compiled.
    call: for a later call.
    total: for all cases; None means no limit.
    """

    setup: float = 300.0
    first_call: float = 180.0
    call: float = 20.0
    total: float | None = None

    def get_limit(self, phase: str) -> float:
        """Return the limit of a phase."""
        return {"first call": self.first_call, "call": self.call}.get(phase, self.setup)


@dataclass(frozen=True)
class EngineProgram:
    """How to start a worker process.

    module: name of the module with `load_engine`.
    environment: environment variables of the process.
    """

    module: str
    environment: Mapping[str, str]


class EngineProcess:
    """A worker process that has loaded an engine. As a context manager, it ends the process.

    The constructor raises the engine's ModularKernelError if the engine cannot be loaded, and
    UnsupportedError if the process ends while it loads the engine.
    """

    def __init__(self, program: EngineProgram, limits: TimeLimits) -> None:
        self._limits = limits
        self._log = TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._connection, child_connection = Pipe()
        command = [sys.executable, "-m", "modular_kernel.testing.engines.worker"]
        self._process = subprocess.Popen(
            [*command, str(child_connection.fileno()), program.module],
            env=dict(program.environment),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=[child_connection.fileno()],
            start_new_session=True,
        )
        child_connection.close()
        try:
            self.description = self._receive_description()
        except BaseException:
            self.close()
            raise

    def _receive_description(self) -> Description:
        message = self._receive("loading")
        if isinstance(message, ModularKernelError):
            raise message
        if isinstance(message, Outcome):
            need = "an engine that can be imported"
            raise UnsupportedError("engine", got=message.detail, need=need)
        assert isinstance(message, Description)
        return message

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
        self._log.close()

    @property
    def is_alive(self) -> bool:
        """Whether the process can receive another case."""
        return not self._log.closed

    def judge(self, case: EngineCase) -> Outcome:
        """Return the outcome of a case. Ends the process if it cannot run further cases."""
        phase = "setup"
        try:
            self._connection.send(case)
        except OSError:
            outcome = self._describe_exit("the process had ended")
        else:
            while isinstance(message := self._receive(phase), str):
                phase = message
            assert isinstance(message, Outcome)
            outcome = message
        if outcome.is_fatal:
            self.close()
        return outcome

    def _receive(self, phase: str) -> object:
        """Return the next message, or a fatal Outcome if there is none within the limit."""
        limit = self._limits.get_limit(phase)
        if not self._connection.poll(limit):
            return Outcome(Kind.TIMEOUT, f"{phase} took more than {limit:g} s", is_fatal=True)
        try:
            return self._connection.recv()
        except (EOFError, ConnectionError):
            return self._describe_exit(f"in its {phase}")

    def _describe_exit(self, when: str) -> Outcome:
        """Return the outcome of a case whose process has exited.

        when: what the process was doing.
        """
        status = self._process.wait()
        status_text = f"exit status {status}"
        if status < 0:
            status_text = signal.Signals(-status).name
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_BYTES))
        output = self._log.read().decode(errors="replace")
        last_output = escape_nonprintable(" ".join(output.split()))
        return Outcome(Kind.CRASHED, f"{status_text} {when}: {last_output}", is_fatal=True)


def describe_engine(program: EngineProgram, limits: TimeLimits) -> Description:
    """Return the engine that a worker process loads."""
    with EngineProcess(program, limits) as process:
        return process.description


def run_cases(
    cases: Sequence[EngineCase], program: EngineProgram, limits: TimeLimits, workers: int
) -> Iterator[Result]:
    """Yield each case with its outcome, in the order in which they complete.

    workers: number of processes that run at a time. A process runs all cases of one class and
        scheme before those of the next. A process that ends is replaced.
    """
    groups: dict[tuple[str, str], list[EngineCase]] = defaultdict(list)
    for case in cases:
        groups[case.experts, case.problem.quant].append(case)
    queue, results = SimpleQueue[list[EngineCase]](), SimpleQueue[Result | Exception]()
    for group in groups.values():
        queue.put(group)
    run = _Run(program, limits, queue, results, threading.Event())
    threads = [threading.Thread(target=run.work) for _ in range(min(workers, len(groups)))]
    for thread in threads:
        thread.start()
    try:
        for _ in cases:
            result = results.get()
            if isinstance(result, Exception):
                raise result
            yield result
    finally:
        run.stop.set()
        for thread in threads:
            thread.join()


@dataclass(frozen=True)
class _Run:
    """State shared by the threads of `run_cases`.

    queue: the cases of each class and scheme.
    stop: set when the results are no longer needed.
    """

    program: EngineProgram
    limits: TimeLimits
    queue: "SimpleQueue[list[EngineCase]]"
    results: "SimpleQueue[Result | Exception]"
    stop: threading.Event
    start: float = field(default_factory=monotonic)

    def work(self) -> None:
        """Judge groups of cases until the queue is empty."""
        process: EngineProcess | None = None
        try:
            while not self.stop.is_set():
                process = self._judge_cases(self.queue.get_nowait(), process)
        except Empty:
            pass
        except Exception as error:  # noqa: BLE001 (raised in the thread that waits for results)
            self.results.put(error)
        finally:
            if process is not None and process.is_alive:
                process.close()

    def _judge_cases(
        self, cases: Sequence[EngineCase], process: EngineProcess | None
    ) -> EngineProcess | None:
        """Put the outcome of each case into `results`.

        Returns the process that ran the last case, which can run further cases.
        """
        num_ended, unavailable = Counter[object](), dict[object, Outcome]()
        for case in cases:
            row = get_row_key(case)
            # If the first case of a class and scheme is unavailable, so are all others.
            outcome = unavailable.get(get_row_key(cases[0])) or unavailable.get(row)
            outcome = outcome or self._explain_not_run(num_ended[row])
            if outcome is None:
                if process is None or not process.is_alive:
                    process = EngineProcess(self.program, self.limits)
                outcome = process.judge(case)
                num_ended[row] += outcome.is_fatal
                if outcome.kind is Kind.UNAVAILABLE:
                    unavailable[row] = outcome
            self.results.put((case, outcome))
        return process

    def _explain_not_run(self, num_ended: int) -> Outcome | None:
        total_limit = self.limits.total
        if self.stop.is_set():
            return Outcome(Kind.NOT_JUDGED, "not run: interrupted", was_run=False)
        if total_limit is not None and monotonic() > self.start + total_limit:
            return Outcome(Kind.NOT_JUDGED, "not run: time limit", was_run=False)
        if num_ended >= _MAX_ENDED:
            detail = "not run: similar cases ended their process"
            return Outcome(Kind.NOT_JUDGED, detail, was_run=False)
        return None


def get_row_key(case: EngineCase) -> tuple[str, str, str, str, bool]:
    """Return the class, scheme, activation, dtype and bias of a case."""
    problem = case.problem
    return case.experts, problem.quant, case.activation, str(problem.dtype), problem.bias


def run_reproducer(program: EngineProgram, source: str, limit: float) -> tuple[int, str]:
    """Run a reproducer in a separate process. Returns its exit status and a line of its output.

    The line is the message of the failed assertion, or the last line of output if there is none.

    program: its module executes the source on its standard input.
    source: the reproducer's source.
    limit: time limit in seconds. The exit status is -1 if it is exceeded.
    """
    try:
        result = subprocess.run(
            [sys.executable, "-m", program.module],
            input=source,
            env=dict(program.environment),
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"no result after {limit:g} s"
    lines = [*result.stdout.strip().splitlines(), *result.stderr.strip().splitlines()]
    assertion_lines = [line for line in lines if line.startswith(_ASSERTION_PREFIX)]
    output_lines = (result.stdout or result.stderr).strip().splitlines()
    last_line = (assertion_lines or output_lines or [""])[-1]
    return result.returncode, last_line.removeprefix("AssertionError: ")
