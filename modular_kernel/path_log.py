"""Log of the paths that calls of an experts part take, for the test harness.

A path is one of several implementations in the same part. A part with paths chooses a path in each
call, and then calls `log_path`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights


@dataclass(frozen=True)
class EnteredPath:
    """The path of one call: its name, the problem of the part, and the weights of the call."""

    path: str
    problem: Problem
    weights: ExpertWeights


_log: ContextVar[list[EnteredPath] | None] = ContextVar("entered paths", default=None)


def log_path(path: str, problem: Problem, weights: ExpertWeights) -> None:
    """Log that a call takes `path`, if `record_paths` is active in this thread."""
    log = _log.get()
    if log is not None:
        log.append(EnteredPath(path, problem, weights))


@contextmanager
def record_paths() -> Iterator[list[EnteredPath]]:
    """Return a context manager that yields a list of the paths that calls take in its block.

    Only calls of this thread are logged.

    Calls in which a plan replays recorded launches, without running the host code of the part, are
    not logged.
    """
    log: list[EnteredPath] = []
    token = _log.set(log)
    try:
        yield log
    finally:
        _log.reset(token)
