"""What other packages bring: imported within a time, and checked before it is believed.

A package can do anything while it is imported: raise, exit, wait for ever. None of that may keep
the other parts from working, so each import has a thread of its own and a deadline. A thread that
does not come back is left behind; it ends with the process.
"""

import logging
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

from modular_kernel.errors import ConfigurationError
from modular_kernel.text import printable

_LOG = logging.getLogger("modular_kernel.parts")
_PATIENCE_S = 5.0  # before somebody who waits is told what for
_MOST_WORDS = 500  # of another package's message

# Import packages of this distribution beside modular_kernel itself.
OWN_PACKAGES = ("prepare_finalize", "experts", "topk_reduce")


def loaded_within(load: Callable[[], object], seconds: float, whose: str) -> object:
    """Return load(), called in a thread of its own; what it raises is raised here.

    whose: what is loaded, for the log. TimeoutError with the line that it hangs at if it does not
    end within `seconds`. Whatever leaves `load`, KeyboardInterrupt and SystemExit included, comes
    out as a RuntimeError if it is no Exception: this process was not asked to stop.
    """
    found: list[object] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(load())
        except BaseException as error:  # noqa: BLE001  of another thread: told below
            failed.append(error)

    thread = Thread(target=run, name=f"import of {whose}", daemon=True)
    thread.start()
    thread.join(min(_PATIENCE_S, seconds))
    if thread.is_alive() and seconds > _PATIENCE_S:
        _LOG.warning("waiting up to %g s for the import of %s", seconds, whose)
        thread.join(seconds - _PATIENCE_S)
    if found:
        return found[0]
    if not failed:
        where = _innermost(thread.ident)
        raise TimeoutError(f"did not end within {seconds:g} s (MK_IMPORT_DEADLINE_S){where}")
    error = failed[0]
    if isinstance(error, Exception):
        raise error
    raise RuntimeError(f"{type(error).__name__} at import: {error}")


def _innermost(ident: int | None) -> str:
    """Return where a thread is, outside the machinery of imports."""
    frame = sys._current_frames().get(ident or 0)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return "" if frame is None else f", at {frame.f_code.co_filename}:{frame.f_lineno}"


def reason(error: BaseException) -> str:
    """Say in one printable line what another package raised, of at most 500 characters."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  its __str__ is theirs too
        text = "(no text)"
    return f"{printable(type(error).__name__)}: {printable(text, most=_MOST_WORDS)}"


def require_own(package: str) -> None:
    """Raise ConfigurationError if importing `package` would give another than this distribution's.

    So a user's experts.py is named, and not run as if it held parts.
    """
    found = shadow_of(package)
    if found is not None:
        need = "the package of that name beside modular_kernel: rename yours, or move its folder"
        raise ConfigurationError(f"package {package}", got=printable(found), need=f"{need} back")


def shadow_of(package: str) -> str | None:
    """Return the file that hides this distribution's `package`, None if none does."""
    ours = Path(__file__).resolve().parents[2] / package / "__init__.py"
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # a stub in sys.modules: no file hides it
        return None
    if spec is None or spec.origin is None or not ours.exists():
        return None
    there = Path(spec.origin)
    return None if there.exists() and there.samefile(ours) else spec.origin
