"""Run the checks of many test cases, in this process or in several worker processes.

The result of a case is called its proof.
"""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.process import BaseProcess

import torch

from modular_kernel.errors import ModularKernelError
from modular_kernel.spec.problem import Machine
from modular_kernel.testing.cases.case import Case, command
from modular_kernel.testing.verify.one_process import Proof, prove


class WorkerError(ModularKernelError):
    """A worker process ended before it had finished its cases."""


def prove_all(cases: Sequence[Case], machine: Machine, workers: int) -> Iterator[Proof]:
    """Yield the proof of every case, in the order of `cases`.

    The workers end when the iterator is closed, and when this process ends. If a worker process
    ends early, raises WorkerError, which names the first case without a proof.

    workers: number of worker processes, each with one torch thread; 1 means this process.
    """
    if workers == 1:
        for case in cases:
            yield prove(case, machine)
        return
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_init_worker)
    try:
        proofs, processes = _submit_cases(pool, cases, machine)
        try:
            for case, proof in zip(cases, proofs, strict=True):
                yield _wait_for_proof(proof, case)
        except BaseException:  # such as KeyboardInterrupt, while the workers still run
            for process in processes:
                process.kill()
            raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _submit_cases(
    pool: ProcessPoolExecutor, cases: Sequence[Case], machine: Machine
) -> tuple[list[Future[Proof]], list[BaseProcess]]:
    """Submit all cases; return the futures of their proofs and the started processes."""
    existing = active_children()
    # Workers inherit the mask and ignore Ctrl-C. The parent handles Ctrl-C and ends the workers.
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        proofs = [pool.submit(prove, case, machine) for case in cases]
        return proofs, [process for process in active_children() if process not in existing]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def _wait_for_proof(proof: Future[Proof], case: Case) -> Proof:
    try:
        return proof.result()
    except BrokenProcessPool as error:
        reason = "this case or one that ran at the same time ended it"
        raise WorkerError(f"a worker process ended; {reason}: {command(case)}") from error


def _init_worker() -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exit this process when its parent ends. Otherwise, it would wait for work forever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
