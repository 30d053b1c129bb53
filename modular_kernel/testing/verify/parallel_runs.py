"""Prove many cases, in this process or side by side in several."""

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
    """A process that proves cases ended before its work did."""


def prove_all(cases: Sequence[Case], machine: Machine, workers: int) -> Iterator[Proof]:
    """Yield the proof of every case, in the order of `cases`.

    workers: processes, each with one thread of torch; 1 proves in this process. Raises WorkerError
    that names the first case without a proof if one of them ends before its work does. None of
    them is left when this ends, or when this process does.
    """
    if workers == 1:
        for case in cases:
            yield prove(case, machine)
        return
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin)
    try:
        begun, processes = _submitted(pool, cases, machine)
        try:
            for case, proof in zip(cases, begun, strict=True):
                yield _result(proof, case)
        except BaseException:  # such as a keyboard interrupt: they are still at work
            for process in processes:
                process.kill()
            raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _submitted(
    pool: ProcessPoolExecutor, cases: Sequence[Case], machine: Machine
) -> tuple[list[Future[Proof]], list[BaseProcess]]:
    """Hand out all cases; return what will be their proofs, and the processes that this starts."""
    before = active_children()
    # Ctrl-C is this process's affair, which ends the others: they inherit the mask.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        begun = [pool.submit(prove, case, machine) for case in cases]
        return begun, [process for process in active_children() if process not in before]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _result(proof: Future[Proof], case: Case) -> Proof:
    try:
        return proof.result()
    except BrokenProcessPool as error:
        why = "this case or one begun beside it ends its process"
        raise WorkerError(f"a process that proves cases ended, {why}: {command(case)}") from error


def _begin() -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent has: it would wait for work for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
