"""Output of the verbs: tables and JSON on stdout, notes and errors on stderr."""

import json
import math
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modular_kernel.cli.file_options import STDOUT as STDOUT
from modular_kernel.cli.output_streams import LOST_OUTPUT, only_json_on_stdout
from modular_kernel.cli.tables import fit_table, fold, format_records
from modular_kernel.errors import (
    ConfigurationError,
    IncompatibleError,
    InputError,
    ModularKernelError,
)
from modular_kernel.settings import read_launcher
from modular_kernel.text import escape_nonprintable, format_count
from modular_kernel.utils import json_files

if TYPE_CHECKING:
    from modular_kernel.compatibility.support import Rejection

_DEFAULT_WIDTH = 80  # characters, for a pipe, a file, and a terminal of unknown width
BROKEN = 70  # EX_SOFTWARE of sysexits.h
_FIRST_LINE_S, _LINE_INTERVAL_S, _STEADY_INTERVAL_S = 5.0, 20.0, 4.0  # of progress lines

_json_output: ContextVar[list[str] | None] = ContextVar("json_output", default=None)

Json = None | bool | int | float | str | list[Any] | dict[str, Any]


def to_json_types(value: object) -> Json:
    """Convert a value to JSON types.

    Enums become their values, dtypes their names, dataclasses dicts, and infinite and NaN floats
    strings.
    """
    if isinstance(value, Enum):
        return to_json_types(value.value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json_types(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json_types(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_types(item) for item in value]
    if isinstance(value, frozenset | set):
        return sorted((to_json_types(item) for item in value), key=str)
    return str(value).removeprefix("torch.")


def print_json(value: object, json_path: str = STDOUT) -> None:
    """Print one JSON document on stdout, or write it to the file `json_path`.

    Raises SystemExit with LOST_OUTPUT if the file cannot be written.
    """
    text = json.dumps(to_json_types(value), indent=2)
    if json_path == STDOUT:
        print_document(text)
        return
    write_file(json_path, f"{text}\n")


def print_document(text: str) -> None:
    """Print a JSON document on stdout; with --json nothing else is printed there."""
    documents = _json_output.get()
    if documents is None:
        print(text)
    else:
        documents.append(text)


def write_file(path: Path | str, text: str) -> None:
    """Write a text file atomically and create its folder.

    Raises SystemExit with LOST_OUTPUT if that fails.
    """
    with writing(path):
        json_files.write(Path(path), text)


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Create the folder of `path`, and report an OSError in the context that writes the file.

    Raises SystemExit with LOST_OUTPUT if there was one.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        print_error(f"output was lost: {path}: {error.strerror or error}")
        raise SystemExit(LOST_OUTPUT) from None


def is_reporting_rank() -> bool:
    """Return whether this process prints results: rank 0 of a launcher, or the only process."""
    return _launcher_rank() == 0


def _launcher_rank() -> int:
    """Return this process's rank under a launcher; 0 without one."""
    try:
        launcher = read_launcher()
    except ConfigurationError:  # reported by the code that needs the launcher
        return 0
    return 0 if launcher is None else launcher.rank


def print_result(value: object, json_path: str | None, print_text: Callable[[], None]) -> None:
    """Output a result on the reporting rank.

    json_path: the value of --json. None calls `print_text`, "-" prints JSON on stdout, and a path
    does both, with the JSON in that file.
    """
    if not is_reporting_rank():
        return
    try:
        if json_path is not None:
            print_json(value, json_path)
    finally:
        if json_path != STDOUT:
            print_text()


def width() -> int:
    """Return the line width of the output in characters.

    That is COLUMNS if it is set, else the width of the terminal, else 80. To keep each row of a
    table on one line for grep, set COLUMNS, or use --json.
    """
    return shutil.get_terminal_size((_DEFAULT_WIDTH, 25)).columns


def line(text: str = "") -> None:
    """Print text on stdout, folded to the terminal width.

    Non-printable characters are escaped.
    """
    for part in escape_nonprintable(text, keep_lines=True).splitlines() or [""]:
        print("\n".join(fold(part, width())))


def note(text: str) -> None:
    """Print a note for the user on stderr; only on the reporting rank."""
    if is_reporting_rank():
        _print_to_stderr(text)


def print_error(text: str) -> None:
    """Print an error on stderr, on every rank, because it may have occurred on this rank only."""
    rank = _launcher_rank()
    _print_to_stderr(f"rank {rank}: error: {text}" if rank else f"error: {text}")


def _print_to_stderr(text: str) -> None:
    for part in escape_nonprintable(text, keep_lines=True).splitlines():
        print("\n".join(fold(part, width())), file=sys.stderr)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str = "",
    optional: Sequence[str] = (),
) -> None:
    """Print a table on stdout; print nothing if it has no rows.

    Names are never truncated. On a narrow terminal, prose is folded. If that does not suffice,
    optional columns are dropped (empty ones first, then from the last to the first) and listed
    below the table. If the table still does not fit, each row is printed as a record.

    optional: names of the columns that may be dropped.
    """
    cells = [[escape_nonprintable(cell, keep_lines=True) for cell in row] for row in rows]
    if not cells:
        return
    line_width = width()
    optional = sorted(optional, key=lambda name: _is_empty(columns, cells, name))
    fitting = fit_table(columns, cells, line_width, optional)
    if fitting is None:
        lines = format_records(columns, cells, line_width)
        print("\n".join([title, *lines] if title else lines))
        return
    fitting.title = title or None
    # Markup is off, because cells may contain brackets. Without a height, rich would assume 80
    # columns on a dumb terminal, and truncate names.
    from rich.console import Console

    Console(width=line_width, height=25, markup=False, emoji=False, highlight=False).print(fitting)
    shown = {column.header for column in fitting.columns}
    dropped = [name for name in columns if name not in shown]
    if dropped:
        line(f"not shown in {line_width} columns: {', '.join(dropped)}")


def _is_empty(columns: Sequence[str], cells: list[list[str]], name: str) -> bool:
    indices = [index for index, column in enumerate(columns) if column == name]
    return all(row[index] in ("", "-") for row in cells for index in indices)


@contextmanager
def progress(
    total: int, what: str = "steps", *, steady: bool = False
) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each of `total` steps.

    Shows a progress bar on a terminal, and otherwise prints lines on stderr: the first after 5
    seconds, then one every 20 seconds.

    what: plural noun for the steps. steady: whether to print lines every 4 seconds from a thread,
    also during a long step; must be False where processes are forked.
    """
    if is_reporting_rank() and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)
        return
    lines = _ProgressLines(total, what, timed=not steady)
    with _repeat(lines.print, _STEADY_INTERVAL_S) if steady else nullcontext():
        yield lines.advance


class _ProgressLines:
    """Lines with the number of completed steps.

    timed: whether `advance` prints them: the first after 5 seconds, then one every 20 seconds.
    """

    def __init__(self, total: int, what: str, *, timed: bool) -> None:
        self.total, self.what, self.timed = total, what, timed
        self.start, self.done, self.next_s = time.monotonic(), 0, _FIRST_LINE_S

    def print(self) -> None:
        elapsed = time.monotonic() - self.start
        note(f"{self.done} of {self.total} {self.what} in {elapsed:.0f} s")

    def advance(self) -> None:
        self.done += 1
        elapsed = time.monotonic() - self.start
        if self.timed and elapsed >= self.next_s and self.done < self.total:
            self.next_s = elapsed + _LINE_INTERVAL_S
            self.print()


@contextmanager
def step_lines(total: int, what: str) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with a line of text after each of `total` steps.

    The lines are printed on stderr. On a terminal, a progress bar is shown instead.
    """
    if not sys.stderr.isatty():
        yield note
        return
    with progress(total, what) as advance:
        yield lambda _: advance()


@contextmanager
def activity_notes(current: Callable[[], str]) -> Iterator[None]:
    """Print the current activity on stderr once it has taken 5 seconds, then every 20 seconds.

    current: returns a description of the activity; it is called from a background thread.
    """
    activity, start, next_s = current(), time.monotonic(), _FIRST_LINE_S

    def note_long_activity() -> None:
        nonlocal activity, start, next_s
        elapsed = time.monotonic() - start
        if current() != activity:
            activity, start, next_s = current(), time.monotonic(), _FIRST_LINE_S
        elif elapsed >= next_s:
            next_s = elapsed + _LINE_INTERVAL_S
            note(f"{activity}: {elapsed:.0f} s so far")

    if not is_reporting_rank():
        yield
        return
    with _repeat(note_long_activity, min(_FIRST_LINE_S, 1.0)):
        yield


@contextmanager
def _repeat(action: Callable[[], None], interval_s: float) -> Iterator[None]:
    """Call `action` every `interval_s` seconds from a background thread, inside the context."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(interval_s):
            action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def note_interpreted(names: Iterable[str]) -> None:
    """Print the names of layers that ran in Triton's interpreter, if there are any."""
    text = ", ".join(dict.fromkeys(names))
    if text:
        line(f"ran in Triton's interpreter, times are meaningless: {text}")


def print_rejections(rejections: Sequence["Rejection"]) -> None:
    """Print a table with a row per rejection."""
    rows = [(r.rule, " / ".join(r.parties), r.got, r.need, r.hint) for r in rejections]
    table(("rule", "parties", "got", "need", "hint"), rows)


@contextmanager
def json_on_stdout() -> Iterator[None]:
    """Redirect stdout to stderr inside the context, except for what `print_document` prints."""
    with only_json_on_stdout() as documents:
        token = _json_output.set(documents)
        try:
            yield
        finally:
            _json_output.reset(token)


def report_error(error: ModularKernelError, json_path: str | None) -> int:
    """Print an error of a verb, and return the exit status.

    The status is 1 for an IncompatibleError, 2 for another InputError (bad usage), and BROKEN (70)
    for any other error, such as a rank that does not respond.

    json_path: the value of --json.
    """
    if isinstance(error, IncompatibleError):
        _report_incompatible(error, json_path)
        return 1
    if isinstance(error, InputError) and json_path == STDOUT and is_reporting_rank():
        values = {"what": error.what, "got": error.got, "need": error.need}
        print_json({"error": {"type": type(error).__name__, **values}})
    print_error(str(error))
    return 2 if isinstance(error, InputError) else BROKEN


def _report_incompatible(error: IncompatibleError, json_path: str | None) -> None:
    record = {"pairing": error.pairing, "ok": False, "rejections": error.rejections}
    print_result(record, json_path, lambda: _print_refusal(error))


def _print_refusal(error: IncompatibleError) -> None:
    line(f"{error.pairing}: refused, {format_count(len(error.rejections), 'reason')}")
    print_rejections([r for r in error.rejections if hasattr(r, "rule")])  # type: ignore[misc]
