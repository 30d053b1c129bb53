"""Prove many cases, in this process or side by side in several."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import torch

from modular_kernel.errors import StateError
from modular_kernel.testing.cases.case import Case, command
from modular_kernel.testing.verify.one_process import Proof, prove
from modular_kernel.types import Machine


def prove_all(cases: Sequence[Case], machine: Machine, workers: int) -> Iterator[Proof]:
    """Yield the proof of every case, in the order of `cases`.

    workers: processes, each with one thread of torch; 1 proves in this process. Raises StateError
    that names the first case without a proof if one of them ends before its work does.
    """
    if workers == 1:
        for case in cases:
            yield prove(case, machine)
        return
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_one_thread)
    try:
        begun = [pool.submit(prove, case, machine) for case in cases]
        for case, proof in zip(cases, begun, strict=True):
            try:
                yield proof.result()
            except BrokenProcessPool as error:
                what = f"a process that proves cases ended: {command(case)}"
                need = "a proof: this case or one begun beside it ends its process"
                raise StateError(what, got="no proof", need=need) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _one_thread() -> None:
    torch.set_num_threads(1)
