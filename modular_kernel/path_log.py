"""Which paths the calls of an experts part enter, for a harness that watches.

A part that has several ways from tokens to output calls `entered` where it has chosen one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights


@dataclass(frozen=True)
class EnteredPath:
    """One call. path: its name. problem: the part's. weights: those of the call."""

    path: str
    problem: Problem
    weights: ExpertWeights


_log: ContextVar[list[EnteredPath] | None] = ContextVar("paths entered", default=None)


def entered(path: str, problem: Problem, weights: ExpertWeights) -> None:
    """Note that a call takes `path`, if somebody watches in this thread."""
    log = _log.get()
    if log is not None:
        log.append(EnteredPath(path, problem, weights))


@contextmanager
def watched_paths() -> Iterator[list[EnteredPath]]:
    """Collect the paths that calls inside the block enter, in this thread.

    A plan's replayed call runs no host code of the part, so it enters nothing.
    """
    log: list[EnteredPath] = []
    token = _log.set(log)
    try:
        yield log
    finally:
        _log.reset(token)
