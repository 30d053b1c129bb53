"""`prove_all` with several workers gives the same proofs as one worker, reports errors and leaves
no processes behind.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence

import pytest
from run_mk import run_mk

from modular_kernel.cli.ranks import Executor
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.spec.problem import Machine
from modular_kernel.testing import Case, cases_for
from modular_kernel.testing.verify.one_process import Proof, prove
from modular_kernel.testing.verify.parallel_runs import WorkerError, prove_all

PAIR = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
TORCH_PAIR = ("--pf-type", PAIR[0], "--experts-type", PAIR[1])


class ExitingCase(Case):
    """A case that ends the process that unpickles it."""

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (9,)


def test_two_workers_prove_the_same_as_one(machine: Machine) -> None:
    cases = cases_for(*PAIR, machine, "smoke").cases[:6]
    with_one_worker, with_two_workers = (
        list(prove_all(cases, machine, workers)) for workers in (1, 2)
    )
    assert [proof.case for proof in with_two_workers] == list(cases)
    first, second = (
        [(proof.case, proof.error, proof.bound, proof.failures) for proof in proofs]
        for proofs in (with_one_worker, with_two_workers)
    )
    assert first == second
    assert all(proof.passed for proof in with_two_workers)


def test_a_worker_that_exits_is_an_error_with_its_case(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = cases_for(*PAIR, machine, "smoke").cases[0]
    exiting_case = ExitingCase(case.prepare_finalize, case.experts, case.problem)
    with pytest.raises(WorkerError, match=r"ended it: mk test --one") as exc_info:
        list(prove_all([exiting_case], machine, 2))

    def raise_worker_error(
        executor: Executor, cases: Sequence[Case], workers: int
    ) -> Generator[Proof, None, None]:
        yield from ()
        raise exc_info.value

    monkeypatch.setattr(Executor, "verify_cases", raise_worker_error)
    assert run_mk(capsys, "test", *TORCH_PAIR).code == 70


# Two workers each run a case of 600 seconds. The program prints their process ids after SECONDS.
LONG_RUN = """
import multiprocessing, signal, threading, time
from modular_kernel.testing import Case
from modular_kernel.testing.verify.parallel_runs import WorkerError, prove_all
from modular_kernel.spec.problem import Machine

class LongCase(Case):
    def __reduce__(self):
        return time.sleep, (600,)

def print_workers():
    while len(workers := multiprocessing.active_children()) < 2:
        time.sleep(0.1)
    time.sleep(SECONDS)
    print(*(process.pid for process in workers), flush=True)

if __name__ == "__main__":
    # A process started in the background may ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=print_workers, daemon=True).start()
    list(prove_all([LongCase("", "", None)] * 2, Machine(), 2))
"""


@pytest.mark.parametrize(
    ("signal_number", "seconds"),
    [(signal.SIGINT, 0.2), (signal.SIGINT, 6.0), (signal.SIGKILL, 6.0)],
)
def test_workers_exit_with_their_parent(signal_number: signal.Signals, seconds: float) -> None:
    """Ctrl-C reaches the whole process group, but only the parent prints a traceback."""
    command = [sys.executable, "-c", LONG_RUN.replace("SECONDS", str(seconds))]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, process_group=0) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        if signal_number is signal.SIGINT:
            os.killpg(parent.pid, signal_number)
        else:
            parent.send_signal(signal_number)
        try:
            parent.wait(30)
        except subprocess.TimeoutExpired:
            parent.kill()
            raise
        deadline = time.monotonic() + 60
        while any(map(is_running, workers)) and time.monotonic() < deadline:
            time.sleep(0.2)
        remaining = [pid for pid in workers if is_running(pid)]
        for pid in remaining:
            os.kill(pid, signal.SIGKILL)
        assert remaining == []
        assert parent.stderr.read().count("Traceback") == (signal_number is signal.SIGINT)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_part_that_cannot_be_constructed_fails_its_case(machine: Machine) -> None:
    case = cases_for(*PAIR, machine, "smoke").cases[0]

    def build(case: Case, machine: Machine, poison: bool) -> FusedMoEModularKernel:
        raise OSError("no such library")

    proof = prove(case, machine, build)
    assert proof.failures == ("build: raised OSError: no such library",)
    assert "FAILED, error inf" in str(proof)


def test_full_lists_use_one_worker_per_cpu(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a GPU, one process runs all cases."""
    workers_used = []

    def pass_all_cases(
        executor: Executor, cases: Sequence[Case], workers: int
    ) -> Generator[Proof, None, None]:
        workers_used.append(workers)
        return (Proof(case, executor.machine, 0.0, 1.0, (), 0.0) for case in cases)

    monkeypatch.setattr(Executor, "verify_cases", pass_all_cases)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3)))
    for options in ((), ("--level", "full"), ("--level", "full", "--workers", "2")):
        assert run_mk(capsys, "test", *TORCH_PAIR, *options).code == 0
    assert workers_used == [1, 3 if machine.device == "cpu" else 1, 2]
    result = run_mk(capsys, "test", *TORCH_PAIR, "--workers", "1000")
    assert workers_used[-1] == 3
    assert "--workers 1000: using 3, one per CPU\n" in result.err


@pytest.mark.parametrize(
    "options",
    [("2", "--one"), ("2", "--mutate", "TorchExperts"), ("2", "--world-size", "2")],
    ids=" ".join,
)
def test_workers_are_refused_with_options_that_need_one_process(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_mk(capsys, "test", *TORCH_PAIR, "--workers", *options)
    assert result.code == 2
    expected = "no --one, --mutate or --world-size"
    assert f"--workers: got {options[0]}, need {expected}" in result.err
