"""Cases that several processes share are proven as in one, and none is lost."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence

import pytest
from run_mk import run_mk

from modular_kernel.cli.ranks import Host
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.spec.problem import Machine
from modular_kernel.testing import Case, cases_for
from modular_kernel.testing.verify.one_process import Proof, prove
from modular_kernel.testing.verify.parallel_runs import WorkerError, prove_all

PAIR = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
TORCH_PAIR = ("--pf-type", PAIR[0], "--experts-type", PAIR[1])


class Deadly(Case):
    """A case that ends the process that reads it."""

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (9,)


def test_two_processes_prove_what_one_proves(machine: Machine) -> None:
    cases = cases_for(*PAIR, machine, "smoke").cases[:6]
    alone, shared = (list(prove_all(cases, machine, workers)) for workers in (1, 2))
    assert [proof.case for proof in shared] == list(cases)
    facts = [[(p.case, p.error, p.bound, p.failures) for p in found] for found in (alone, shared)]
    assert facts[0] == facts[1]
    assert all(proof.passed for proof in shared)


def test_a_process_that_ends_is_an_error_that_names_the_case(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = cases_for(*PAIR, machine, "smoke").cases[0]
    deadly = Deadly(case.prepare_finalize, case.experts, case.problem)
    with pytest.raises(WorkerError, match=r"ended it: mk test --one") as ended:
        list(prove_all([deadly], machine, 2))

    def dead(host: Host, cases: Sequence[Case], workers: int) -> Generator[Proof, None, None]:
        yield from ()
        raise ended.value

    monkeypatch.setattr(Host, "prove_all", dead)
    assert run_mk(capsys, "test", *TORCH_PAIR).code == 70


# A case that keeps its process at work for long, and who waits for two of them.
LONG = """
import multiprocessing, signal, threading, time
from modular_kernel.testing import Case
from modular_kernel.testing.verify.parallel_runs import WorkerError, prove_all
from modular_kernel.spec.problem import Machine

class Long(Case):
    def __reduce__(self):
        return time.sleep, (600,)

def tell():
    while len(found := multiprocessing.active_children()) < 2:
        time.sleep(0.1)
    time.sleep(SECONDS)
    print(*(process.pid for process in found), flush=True)

if __name__ == "__main__":
    # Who is started in the background may have been told to ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=tell, daemon=True).start()
    list(prove_all([Long("", "", None)] * 2, Machine(), 2))
"""


@pytest.mark.parametrize(
    ("how", "seconds"), [(signal.SIGINT, 0.2), (signal.SIGINT, 6.0), (signal.SIGKILL, 6.0)]
)
def test_no_process_outlives_the_one_that_waits(how: signal.Signals, seconds: float) -> None:
    """Ctrl-C goes to all of a terminal's processes: one of them tells of it."""
    words = [sys.executable, "-c", LONG.replace("SECONDS", str(seconds))]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, process_group=0) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        if how is signal.SIGINT:
            os.killpg(parent.pid, how)
        else:
            parent.send_signal(how)
        try:
            parent.wait(30)
        except subprocess.TimeoutExpired:
            parent.kill()
            raise
        deadline = time.monotonic() + 60
        while any(map(alive, workers)) and time.monotonic() < deadline:
            time.sleep(0.2)
        left = [pid for pid in workers if alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert left == []
        assert parent.stderr.read().count("Traceback") == (how is signal.SIGINT)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_part_that_cannot_be_made_is_a_failed_case(machine: Machine) -> None:
    """Of another's parts, too: the other cases have their proofs, in one process or in several."""
    case = cases_for(*PAIR, machine, "smoke").cases[0]

    def build(case: Case, machine: Machine, poison: bool) -> FusedMoEModularKernel:
        raise OSError("no such library")

    proof = prove(case, machine, build)
    assert proof.failures == ("build: raised OSError: no such library",)
    assert "FAILED, error inf" in str(proof)


def test_full_lists_are_shared_by_one_process_a_processor(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU: a GPU is one process's."""
    asked = []

    def all_pass(host: Host, cases: Sequence[Case], workers: int) -> Generator[Proof, None, None]:
        asked.append(workers)
        return (Proof(case, host.machine, 0.0, 1.0, (), 0.0) for case in cases)

    monkeypatch.setattr(Host, "prove_all", all_pass)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3)))
    for words in ((), ("--level", "full"), ("--level", "full", "--workers", "2")):
        assert run_mk(capsys, "test", *TORCH_PAIR, *words).code == 0
    assert asked == [1, 3 if machine.device == "cpu" else 1, 2]
    ended = run_mk(capsys, "test", *TORCH_PAIR, "--workers", "1000")
    assert asked[-1] == 3
    assert "--workers 1000: using 3, one per CPU\n" in ended.err


@pytest.mark.parametrize(
    "words",
    [("2", "--one"), ("2", "--mutate", "TorchExperts"), ("2", "--world-size", "2")],
    ids=" ".join,
)
def test_workers_that_could_share_nothing_are_refused(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run_mk(capsys, "test", *TORCH_PAIR, "--workers", *words)
    assert ended.code == 2
    need = "no --one, --mutate or --world-size"
    assert f"--workers: got {words[0]}, need {need}" in ended.err
