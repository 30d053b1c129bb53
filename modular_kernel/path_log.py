"""Log of the paths that calls of an experts part take, for the test harness.

A part that has several paths from tokens to output calls `log_path` once it has chosen one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights


@dataclass(frozen=True)
class EnteredPath:
    """One call: the name of its path, the part's problem, and the call's weights."""

    path: str
    problem: Problem
    weights: ExpertWeights


_log: ContextVar[list[EnteredPath] | None] = ContextVar("paths entered", default=None)


def log_path(path: str, problem: Problem, weights: ExpertWeights) -> None:
    """Log that a call takes `path`, if `record_paths` is active in this thread."""
    log = _log.get()
    if log is not None:
        log.append(EnteredPath(path, problem, weights))


@contextmanager
def record_paths() -> Iterator[list[EnteredPath]]:
    """Collect the paths that calls inside the block take, in this thread.

    A replayed call of a plan runs no host code of the part, so it is not logged.
    """
    log: list[EnteredPath] = []
    token = _log.set(log)
    try:
        yield log
    finally:
        _log.reset(token)
