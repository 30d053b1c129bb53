"""Imports of third-party packages, with a deadline and validation.

A package can raise, exit or hang while it is imported. To protect other parts from this, each
import runs in its own thread with a deadline. A thread that does not finish is abandoned; it is a
daemon and ends with the process.
"""

import logging
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

from modular_kernel.errors import ConfigurationError
from modular_kernel.text import escape_nonprintable

_LOG = logging.getLogger("modular_kernel.parts")
_WARN_AFTER_S = 5.0
_MAX_CHARS = 500  # characters of another package's message

# Import packages of this distribution other than modular_kernel.
OWN_PACKAGES = ("prepare_finalize", "experts", "topk_reduce")


def load_with_deadline(load: Callable[[], object], seconds: float, origin: str) -> object:
    """Run `load` in its own thread, and return its result or raise its exception.

    origin: the entry point, for the log. Raises TimeoutError, with the line at which it hangs, if
    `load` does not finish within `seconds`. KeyboardInterrupt, SystemExit and other exceptions that
    are not an Exception are raised as RuntimeError, because they must not stop this process.
    """
    results: list[object] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(load())
        except BaseException as error:  # noqa: BLE001  raised again in the calling thread
            failures.append(error)

    thread = Thread(target=run, name=f"import of {origin}", daemon=True)
    thread.start()
    thread.join(min(_WARN_AFTER_S, seconds))
    if thread.is_alive() and seconds > _WARN_AFTER_S:
        _LOG.warning("waiting up to %g s for the import of %s", seconds, origin)
        thread.join(seconds - _WARN_AFTER_S)
    if results:
        return results[0]
    if not failures:
        location = _current_line(thread.ident)
        raise TimeoutError(f"did not end within {seconds:g} s (MK_IMPORT_DEADLINE_S){location}")
    error = failures[0]
    if isinstance(error, Exception):
        raise error
    raise RuntimeError(f"{type(error).__name__} at import: {error}")


def _current_line(ident: int | None) -> str:
    """Return the line that a thread is executing, ignoring import machinery."""
    frame = sys._current_frames().get(ident or 0)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return "" if frame is None else f", at {frame.f_code.co_filename}:{frame.f_lineno}"


def describe_error(error: BaseException) -> str:
    """Return another package's exception as one printable line of at most about 500 characters."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  its __str__ is third-party code too
        text = "(no text)"
    return (
        f"{escape_nonprintable(type(error).__name__)}: "
        f"{escape_nonprintable(text, max_chars=_MAX_CHARS)}"
    )


def require_own_package(package: str) -> None:
    """Raise ConfigurationError if importing `package` would not load this distribution's package.

    For example, a user's experts.py would be imported instead of the package `experts`.
    """
    shadow = shadow_of(package)
    if shadow is not None:
        need = "this distribution's package: rename or move the shadowing module"
        raise ConfigurationError(f"package {package}", got=escape_nonprintable(shadow), need=need)


def shadow_of(package: str) -> str | None:
    """Return the file that shadows this distribution's `package`; None if none does."""
    own_file = Path(__file__).resolve().parents[2] / package / "__init__.py"
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # a stub in sys.modules, which no file shadows
        return None
    if spec is None or spec.origin is None or not own_file.exists():
        return None
    actual = Path(spec.origin)
    return None if actual.exists() and actual.samefile(own_file) else spec.origin
