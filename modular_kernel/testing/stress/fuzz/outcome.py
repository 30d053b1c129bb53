"""Kinds of outcomes of a call with random input."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from modular_kernel.errors import IncompatibleError, InputError

RIGHT, TYPED = "right", "typed error"
RAW, ACCEPTED, WRONG = "raw exception", "accepted nonsense", "wrong number"
LATE, CRASH, HANG = "error after launch", "crash", "hang"
GOOD = (RIGHT, TYPED)
BAD = (RAW, ACCEPTED, WRONG, LATE, CRASH, HANG)

T = TypeVar("T")


@dataclass(frozen=True)
class FuzzOutcome:
    """Outcome of a call.

    kind: an element of GOOD or BAD. what: the configuration, and the defect if the kind is BAD.
    """

    kind: str
    what: str = ""


def refused(error: Exception) -> str:
    """Return TYPED or RAW for an exception."""
    return TYPED if isinstance(error, InputError | IncompatibleError) else RAW


def format_error(error: Exception) -> str:
    """Format an exception in one line, with the place that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else "?"
    text = " ".join(str(error).split())
    return f"{type(error).__name__} at {where}: {text[:160]}"


def run_or_outcome(what: str, call: Callable[[], T]) -> T | FuzzOutcome:
    """Return the result of `call`, or the outcome of its exception."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 (classifies any exception)
        kind = refused(error)
        return FuzzOutcome(kind, what if kind == TYPED else f"{what}: {format_error(error)}")
