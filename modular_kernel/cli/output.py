"""Output of the `mk` subcommands: tables and JSON on stdout, notes and errors on stderr.

A subcommand (verb) passes its result to `print_result`, which prints text, JSON, or both, depending
on --json. With several ranks, only rank 0 prints results and notes.
"""

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
from typing import Any

from modular_kernel.cli.file_options import STDOUT as STDOUT
from modular_kernel.cli.output_streams import EXIT_OUTPUT_LOST, reserve_stdout
from modular_kernel.cli.tables import fit_table, format_records, measure_table, wrap_line
from modular_kernel.errors import ConfigurationError
from modular_kernel.settings import read_launcher
from modular_kernel.text import escape_nonprintable
from modular_kernel.utils import json_files

_DEFAULT_WIDTH = 80  # characters, for a pipe, a file, and a terminal of unknown width
_WIDE_WIDTH = 200  # characters, enough for every column of most tables
EXIT_SOFTWARE = 70  # EX_SOFTWARE of sysexits.h
# Seconds before the first progress line, between later lines, and between the lines that a
# background thread prints.
_FIRST_LINE_S, _LINE_INTERVAL_S, _THREAD_INTERVAL_S = 5.0, 20.0, 4.0

_json_documents: ContextVar[list[str] | None] = ContextVar("json_output", default=None)

Json = None | bool | int | float | str | list[Any] | dict[str, Any]


def to_json_types(value: object) -> Json:
    """Convert a value to types that `json.dumps` accepts.

    An enum member becomes its value, a dtype its name, a dataclass a dict, and an infinite or NaN
    float a string.
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
    """Print a value as one JSON document to stdout, or write it to the file `json_path`.

    Raises SystemExit with EXIT_OUTPUT_LOST if the file cannot be written.
    """
    document = json.dumps(to_json_types(value), indent=2)
    if json_path == STDOUT:
        print_document(document)
        return
    write_file(json_path, f"{document}\n")


def print_document(document: str) -> None:
    """Print a JSON document to stdout, even inside `reserve_stdout_for_json`."""
    documents = _json_documents.get()
    if documents is None:
        print(document)
    else:
        documents.append(document)


def write_file(path: Path | str, text: str) -> None:
    """Create the folder of `path`, and write the file atomically.

    Raises SystemExit with EXIT_OUTPUT_LOST if this fails.
    """
    with report_write_errors(path):
        json_files.write(Path(path), text)


@contextmanager
def report_write_errors(path: Path | str) -> Iterator[None]:
    """Create the folder of `path`, and report an OSError in the context as lost output.

    Prints the error and raises SystemExit with EXIT_OUTPUT_LOST.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        print_error(f"output was lost: {path}: {error.strerror or error}")
        raise SystemExit(EXIT_OUTPUT_LOST) from None


def is_reporting_rank() -> bool:
    """Return whether this process prints results: rank 0 of a launcher, or the only process."""
    return _get_launcher_rank() == 0


def _get_launcher_rank() -> int:
    try:
        launcher = read_launcher()
    except ConfigurationError:  # reported by the code that needs the launcher
        return 0
    return 0 if launcher is None else launcher.rank


def print_result(value: object, json_path: str | None, print_text: Callable[[], None]) -> None:
    """Output the result of a verb on the reporting rank.

    value: the result, which `to_json_types` can convert.
    json_path: the value of --json. None calls `print_text`, and "-" prints JSON to stdout. With a
        path, JSON is written to that file and `print_text` is called.
    """
    if not is_reporting_rank():
        return
    try:
        if json_path is not None:
            print_json(value, json_path)
    finally:
        if json_path != STDOUT:
            print_text()


def get_line_width() -> int:
    """Return the line width in characters: COLUMNS, the width of the terminal, or 80."""
    return shutil.get_terminal_size((_DEFAULT_WIDTH, 25)).columns


def print_line(text: str = "") -> None:
    """Print text to stdout, with lines wrapped to the terminal width.

    Non-printable characters are escaped.
    """
    for line in escape_nonprintable(text, keep_lines=True).splitlines() or [""]:
        print("\n".join(wrap_line(line, get_line_width())))


def print_note(text: str) -> None:
    """Print a note to stderr on the reporting rank."""
    if is_reporting_rank():
        _print_to_stderr(text)


def print_error(text: str) -> None:
    """Print an error to stderr. Every rank prints, because an error may occur on only one."""
    rank = _get_launcher_rank()
    _print_to_stderr(f"rank {rank}: error: {text}" if rank else f"error: {text}")


def _print_to_stderr(text: str) -> None:
    for line in escape_nonprintable(text, keep_lines=True).splitlines():
        print("\n".join(wrap_line(line, get_line_width())), file=sys.stderr)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str = "",
    optional: Sequence[str] = (),
) -> None:
    """Print a table to stdout, or nothing if it has no rows.

    Names are never truncated. If the table is wider than the terminal, these steps are taken until
    it fits:

    1. Cells with several words are wrapped.
    2. Optional columns are dropped: first empty ones, then from the last to the first. A line below
       the table lists them.
    3. Each row is printed as a record, with a line per column.

    optional: names of the columns that may be dropped.
    """
    cells = [[escape_nonprintable(cell, keep_lines=True) for cell in row] for row in rows]
    if not cells:
        return
    line_width = get_line_width()
    optional = sorted(optional, key=lambda name: _is_empty(columns, cells, name))
    table = fit_table(columns, cells, line_width, optional)
    if table is None:
        lines = format_records(columns, cells, line_width)
        print("\n".join([title, *lines] if title else lines))
        return
    table.title = title or None
    # Cells may contain brackets, which are not markup. Without an explicit height, rich would
    # assume 80 columns on a dumb terminal and truncate names.
    from rich.console import Console

    Console(width=line_width, height=25, markup=False, emoji=False, highlight=False).print(table)
    printed = {column.header for column in table.columns}
    dropped = [name for name in columns if name not in printed]
    if dropped:
        needed_width = max(_WIDE_WIDTH, measure_table(columns, cells))
        names = ", ".join(dropped)
        print_line(f"not shown in {line_width} columns (set COLUMNS={needed_width}): {names}")


def _is_empty(columns: Sequence[str], cells: list[list[str]], name: str) -> bool:
    indices = [index for index, column in enumerate(columns) if column == name]
    return all(row[index] in ("", "-") for row in cells for index in indices)


@contextmanager
def show_progress(
    total: int, noun: str = "steps", *, from_thread: bool = False
) -> Iterator[Callable[..., None]]:
    """Yield a function to call after each of `total` steps, optionally with a description of it.

    Shows a progress bar on a terminal. Otherwise prints lines to stderr: the first after 5 seconds,
    then one every 20 seconds, and one for each step with a description.

    noun: plural noun for the steps.
    from_thread: whether a background thread prints a line every 4 seconds instead, even during a
        long step. Must be False if processes are forked in the context, because a fork copies only
        the calling thread.
    """
    if is_reporting_rank() and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(noun, total=total)
            yield lambda _="": bar.advance(task)
        return
    lines = _ProgressLines(total, noun, print_on_advance=not from_thread)
    with _call_periodically(lines.print, _THREAD_INTERVAL_S) if from_thread else nullcontext():
        yield lines.advance


class _ProgressLines:
    """Prints the number of completed steps to stderr.

    print_on_advance: whether `advance` prints lines: the first after 5 seconds, then one every 20
        seconds.
    """

    def __init__(self, total: int, noun: str, *, print_on_advance: bool) -> None:
        self.total, self.noun, self.print_on_advance = total, noun, print_on_advance
        self.start, self.completed, self.next_print_s = time.monotonic(), 0, _FIRST_LINE_S

    def print(self, description: str = "") -> None:
        elapsed = time.monotonic() - self.start
        message = f"{self.completed} of {self.total} {self.noun} in {elapsed:.0f} s"
        print_note(f"{message}: {description}" if description else message)

    def advance(self, description: str = "") -> None:
        self.completed += 1
        if description:
            self.print(description)
            return
        elapsed = time.monotonic() - self.start
        is_due = elapsed >= self.next_print_s and self.completed < self.total
        if self.print_on_advance and is_due:
            self.next_print_s = elapsed + _LINE_INTERVAL_S
            self.print()


@contextmanager
def show_steps(total: int, noun: str) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with a description of each of `total` completed steps.

    Prints the descriptions to stderr. On a terminal, a progress bar is shown instead.
    """
    if not sys.stderr.isatty():
        yield print_note
        return
    with show_progress(total, noun) as advance:
        yield lambda _: advance()


class PositionPrinter:
    """Prints the position in long steps to stderr.

    A line is printed once a step has taken 5 seconds, then every 20 seconds. Nothing is printed by
    a thread, so processes may be forked between calls.

    noun: plural noun for the items of a step.
    """

    def __init__(self, noun: str) -> None:
        self._noun, self._step = noun, ""
        self._start = self._next_print_s = 0.0

    def __call__(self, step: str, completed: int, total: int) -> None:
        """Report the position in a step: the numbers of completed items and of all items."""
        if step != self._step:
            self._step, self._start = step, time.monotonic()
            self._next_print_s = _FIRST_LINE_S
        elapsed = time.monotonic() - self._start
        if elapsed >= self._next_print_s:
            self._next_print_s = elapsed + _LINE_INTERVAL_S
            print_note(f"{step}: {completed} of {total} {self._noun} in {elapsed:.0f} s")


@contextmanager
def show_activity(get_activity: Callable[[], str]) -> Iterator[None]:
    """Print the current activity to stderr once it has taken 5 seconds, then every 20 seconds.

    get_activity: returns a description of the activity. A background thread calls it.
    """
    activity, start, next_print_s = get_activity(), time.monotonic(), _FIRST_LINE_S

    def print_long_activity() -> None:
        nonlocal activity, start, next_print_s
        elapsed = time.monotonic() - start
        if get_activity() != activity:
            activity, start, next_print_s = get_activity(), time.monotonic(), _FIRST_LINE_S
        elif elapsed >= next_print_s:
            next_print_s = elapsed + _LINE_INTERVAL_S
            print_note(f"{activity}: {elapsed:.0f} s so far")

    if not is_reporting_rank():
        yield
        return
    with _call_periodically(print_long_activity, min(_FIRST_LINE_S, 1.0)):
        yield


@contextmanager
def _call_periodically(action: Callable[[], None], interval_s: float) -> Iterator[None]:
    """Call `action` every `interval_s` seconds from a background thread until the context ends."""
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


def print_interpreted_layers(names: Iterable[str]) -> None:
    """Print a warning with the names of layers that ran in Triton's interpreter, if any did."""
    layers = ", ".join(dict.fromkeys(names))
    if layers:
        print_line(f"ran in Triton's interpreter, times are meaningless: {layers}")


@contextmanager
def reserve_stdout_for_json() -> Iterator[None]:
    """Redirect stdout to stderr inside the context; only `print_document` prints on stdout."""
    with reserve_stdout() as documents:
        token = _json_documents.set(documents)
        try:
            yield
        finally:
            _json_documents.reset(token)
