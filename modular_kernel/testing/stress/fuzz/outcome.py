"""Classify the outcomes of calls with random input.

A typed error is an instance of one of this package's error classes. Invalid input must cause a
typed error. Any other exception is a failure. The kinds of outcomes below appear in reports.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from modular_kernel.errors import IncompatibleError, InputError

# The result is correct, or an error of this package was raised.
CORRECT, TYPED_ERROR = "right", "typed error"
# UNTYPED_ERROR: another exception was raised. INVALID_ACCEPTED: invalid input was accepted.
# WRONG_RESULT: the result is wrong.
UNTYPED_ERROR, INVALID_ACCEPTED, WRONG_RESULT = "raw exception", "accepted nonsense", "wrong number"
# LATE_ERROR: a typed error was raised, but a kernel may have been launched before.
# CRASH: the process died. HANG: the process did not answer in time.
LATE_ERROR, CRASH, HANG = "error after launch", "crash", "hang"
SUCCESS_KINDS = (CORRECT, TYPED_ERROR)
FAILURE_KINDS = (UNTYPED_ERROR, INVALID_ACCEPTED, WRONG_RESULT, LATE_ERROR, CRASH, HANG)

T = TypeVar("T")


@dataclass(frozen=True)
class FuzzOutcome:
    """Outcome of a call.

    kind: an element of SUCCESS_KINDS or FAILURE_KINDS.
    description: the call and, if the kind is in FAILURE_KINDS, the defect.
    """

    kind: str
    description: str = ""


def classify_error(error: Exception) -> str:
    """Return TYPED_ERROR or UNTYPED_ERROR for an exception."""
    return TYPED_ERROR if isinstance(error, InputError | IncompatibleError) else UNTYPED_ERROR


def format_error(error: Exception) -> str:
    """Format an exception in one line, with the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    location = f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else "?"
    message = " ".join(str(error).split())
    return f"{type(error).__name__} at {location}: {message[:160]}"


def run_or_classify(description: str, call: Callable[[], T]) -> T | FuzzOutcome:
    """Return the result of `call` or, if it raises, the outcome for the exception."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 (classifies any exception)
        kind = classify_error(error)
        return FuzzOutcome(
            kind, description if kind == TYPED_ERROR else f"{description}: {format_error(error)}"
        )
