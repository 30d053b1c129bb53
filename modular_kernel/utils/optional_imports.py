"""Imports of packages that provide parts, with a timeout and a check against shadowing.

A package can raise, exit or hang while it is imported. To protect the parts of other packages, each
import runs in its own thread with a timeout. A thread that does not finish is abandoned. It is a
daemon thread, so it ends with the process.
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
_MAX_MESSAGE_CHARS = 500  # maximum length of the message of a third-party exception

# Import packages of this distribution other than modular_kernel.
DISTRIBUTION_PACKAGES = ("prepare_finalize", "experts", "topk_reduce")


def load_with_timeout(load: Callable[[], object], seconds: float, origin: str) -> object:
    """Run `load` in its own thread. Return its result or raise its exception.

    Raises TimeoutError, with the line that `load` was executing, if it does not finish within
    `seconds`. An exception that would stop this process, such as SystemExit or KeyboardInterrupt,
    is raised as RuntimeError.

    origin: the entry point, for the log.
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
        location = _find_current_line(thread.ident)
        raise TimeoutError(f"did not end within {seconds:g} s (MK_IMPORT_TIMEOUT_S){location}")
    error = failures[0]
    if isinstance(error, Exception):
        raise error
    raise RuntimeError(f"{type(error).__name__} at import: {error}")


def _find_current_line(ident: int | None) -> str:
    """Return the line that a thread is executing, outside of Python's import system."""
    frame = sys._current_frames().get(ident or 0)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return "" if frame is None else f", at {frame.f_code.co_filename}:{frame.f_lineno}"


def describe_error(error: BaseException) -> str:
    """Return a third-party exception as one printable line of limited length."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  __str__ is also third-party code
        text = "(no text)"
    text = escape_nonprintable(text, max_chars=_MAX_MESSAGE_CHARS)
    return f"{escape_nonprintable(type(error).__name__)}: {text}"


def check_not_shadowed(package: str) -> None:
    """Raise ConfigurationError if another module shadows a package of this distribution.

    For example, Python imports a user's experts.py instead of the package `experts`.
    """
    shadow = find_shadow(package)
    if shadow is not None:
        need = "this distribution's package: rename or move the shadowing module"
        raise ConfigurationError(f"package {package}", got=escape_nonprintable(shadow), need=need)


def find_shadow(package: str) -> str | None:
    """Return the file that Python would import instead of this distribution's `package`, if any."""
    expected = Path(__file__).resolve().parents[2] / package / "__init__.py"
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # a stub in sys.modules, which no file shadows
        return None
    if spec is None or spec.origin is None or not expected.exists():
        return None
    actual = Path(spec.origin)
    return None if actual.exists() and actual.samefile(expected) else spec.origin
