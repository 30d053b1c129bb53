"""Everything a verb prints: tables and JSON to stdout, notes and errors to stderr."""

import functools
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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from modular_kernel.cli.file_options import STDOUT as STDOUT
from modular_kernel.cli.output_streams import LOST_OUTPUT, JsonOutput, json_alone
from modular_kernel.cli.tables import Layout, folded, layout, records
from modular_kernel.errors import (
    ConfigurationError,
    IncompatibleError,
    InputError,
    ModularKernelError,
)
from modular_kernel.settings import read_launcher
from modular_kernel.text import counted, printable
from modular_kernel.utils import json_files

if TYPE_CHECKING:
    from modular_kernel.compatibility.support import Rejection

_PIPE_WIDTH = 10_000
BROKEN = 70  # EX_SOFTWARE of sysexits.h
_FIRST_WORD_S, _LATER_WORDS_S, _STEADY_S = 5.0, 20.0, 4.0

_STYLES = {  # of a verdict, on a terminal that shows colors
    **dict.fromkeys(("ok", "valid", "passed"), "green"),
    **dict.fromkeys(("refused", "failed", "FAILED", "MISSED"), "bold red"),
}

_json_output: ContextVar[JsonOutput | None] = ContextVar("json_output", default=None)

Json = None | bool | int | float | str | list[Any] | dict[str, Any]


def plain(value: object) -> Json:
    """Anything the toolkit holds as what JSON holds: enums and dtypes become their names."""
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, frozenset | set):
        return sorted((plain(item) for item in value), key=str)
    return str(value).removeprefix("torch.")


def print_json(value: object, to: str = STDOUT) -> None:
    """Print one JSON document on stdout, or write it to a file.

    SystemExit with LOST_OUTPUT where the file takes it no more.
    """
    text = json.dumps(plain(value), indent=2)
    if to == STDOUT:
        print_document(text)
        return
    write_file(to, f"{text}\n")


def print_document(text: str) -> None:
    """Print a document in JSON, alone on stdout where the verb has --json."""
    printed = _json_output.get()
    if printed is None:
        print(text)
    else:
        printed.print(text)


def write_file(path: Path | str, text: str) -> None:
    """Write a whole file or none, in a folder made for it.

    SystemExit with LOST_OUTPUT where that fails.
    """
    with writing(path):
        json_files.write(Path(path), text)


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Write a file within it, in a folder made for it; where that fails exit with LOST_OUTPUT."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        tell_error(f"output was lost: {path}: {error.strerror or error}")
        raise SystemExit(LOST_OUTPUT) from None


def reports() -> bool:
    """Tell whether this process reports: of a launcher's ranks, which all know the same, rank 0."""
    return not _later_rank()


def _later_rank() -> int:
    """Return this process's rank in a launcher's world; 0 without one."""
    try:
        launcher = read_launcher()
    except ConfigurationError:  # told where it matters
        return 0
    return 0 if launcher is None else launcher.rank


def answer(value: object, to: str | None, show: Callable[[], None]) -> None:
    """Give a result as text (`to` None), as JSON on stdout ("-"), or as text and JSON in a file."""
    if not reports():
        return
    try:
        if to is not None:
            print_json(value, to)
    finally:
        if to != STDOUT:
            show()


def width(to: TextIO | None = None) -> int:
    """Characters of a line: of the terminal; without one a row stays one line, for grep.

    to: the stream; None means stdout.
    """
    stream = sys.stdout if to is None else to
    return shutil.get_terminal_size().columns if stream.isatty() else _PIPE_WIDTH


def line(text: str = "") -> None:
    """Print one line of text on stdout, folded where a terminal is narrower.

    What is not printable is shown as escapes.
    """
    for part in printable(text, lines=True).splitlines() or [""]:
        print("\n".join(folded(part, width())))


def note(text: str) -> None:
    """Print one line for the reader, not for a program: on stderr."""
    if reports():
        _tell(text)


def tell_error(text: str) -> None:
    """Print an error on stderr, of any rank: it may be this one's alone."""
    rank = _later_rank()
    _tell(f"rank {rank}: error: {text}" if rank else f"error: {text}")


def _tell(text: str) -> None:
    for part in printable(text, lines=True).splitlines():
        print("\n".join(folded(part, width(sys.stderr))), file=sys.stderr)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str = "",
    optional: Sequence[str] = (),
) -> None:
    """Print a table on stdout; nothing at all without rows.

    Names are never cut: where a terminal is too narrow, words fold, then `optional` columns are
    left out, those that say nothing and then the last one first, and named below; if that is not
    enough, each row is a record.
    """
    cells = [[printable(cell, lines=True) for cell in row] for row in rows]
    if not cells:
        return
    wide = width()
    found = layout(
        columns, cells, wide, sorted(optional, key=partial(_says_nothing, columns, cells))
    )
    if not found.columns:
        print("\n".join(([title] if title else []) + records(columns, cells, wide)))
        return
    _print_table(columns, cells, found, wide, title)
    left_out = [column for i, column in enumerate(columns) if i not in found.columns]
    if left_out:
        line(f"not shown in {wide} columns: {', '.join(left_out)}")


def _says_nothing(columns: Sequence[str], cells: list[list[str]], name: str) -> bool:
    at = [index for index, column in enumerate(columns) if column == name]
    return all(row[index] in ("", "-") for row in cells for index in at)


def _print_table(
    columns: Sequence[str], cells: list[list[str]], found: Layout, wide: int, title: str
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(
        title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for index in found.columns:
        folds = index in found.folding
        made.add_column(columns[index], overflow="fold", no_wrap=not folds)
    for row in cells:
        made.add_row(*(Text(row[i], style=_STYLES.get(row[i], "")) for i in found.columns))
    # Rules print in brackets and parts are named by others: nothing is markup. Without a height,
    # too, rich takes a dumb terminal for one of 80 columns and cuts names.
    console = Console(width=wide, height=25, markup=False, emoji=False, highlight=False)
    console.print(made)


@contextmanager
def progress(
    total: int, what: str = "steps", *, steady: bool = False
) -> Iterator[Callable[[], None]]:
    """Yield what to call after each of `total` steps: a bar on a terminal, else lines on stderr.

    what: the steps in the plural. Lines come after 5 seconds, then every 20; what is quicker says
    nothing. steady: every 4 seconds instead, also within a step: from a thread, so never where
    processes are forked.
    """
    if not reports() or not sys.stderr.isatty():
        if steady:
            with _told_steadily(total, what) as advance:
                yield advance
        else:
            yield _told_at_times(total, what)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def _told_at_times(total: int, what: str) -> Callable[[], None]:
    began = time.monotonic()
    done, next_s = 0, _FIRST_WORD_S

    def step() -> None:
        nonlocal done, next_s
        done += 1
        took = time.monotonic() - began
        if took >= next_s and done < total:
            next_s = took + _LATER_WORDS_S
            note(f"{done} of {total} {what} in {took:.0f} s")

    return step


@contextmanager
def steps_told(total: int, what: str) -> Iterator[Callable[[str], None]]:
    """Yield what to call with a line on each of `total` steps: a bar in its place on a terminal.

    There a result fits a screen, which the lines before it would scroll away.
    """
    if not sys.stderr.isatty():
        yield note
        return
    with progress(total, what) as advance:
        yield lambda _: advance()


@contextmanager
def _told_steadily(total: int, what: str) -> Iterator[Callable[[], None]]:
    began, done, ended = time.monotonic(), [0], threading.Event()

    def tell() -> None:
        while not ended.wait(_STEADY_S):
            note(f"{done[0]} of {total} {what} in {time.monotonic() - began:.0f} s")

    def step() -> None:
        done[0] += 1

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield step
    finally:
        ended.set()
        thread.join()


@contextmanager
def waiting(doing: Callable[[], str]) -> Iterator[None]:
    """Say on stderr what is being done, where one thing takes more than 5 seconds, then every 20.

    doing: what it is now, asked in a thread of its own.
    """
    ended = threading.Event()

    def tell() -> None:
        now, since, next_s = doing(), time.monotonic(), _FIRST_WORD_S
        while not ended.wait(min(_FIRST_WORD_S, 1.0)):
            took = time.monotonic() - since
            if doing() != now:
                now, since, next_s = doing(), time.monotonic(), _FIRST_WORD_S
            elif took >= next_s:
                next_s = took + _LATER_WORDS_S
                note(f"{now}: {took:.0f} s so far")

    if not reports():
        yield
        return
    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def interpreted(names: Iterable[str]) -> None:
    """Say below a table whose times are the interpreter's; nothing without names."""
    found = ", ".join(dict.fromkeys(names))
    if found:
        line(f"interpreted, no machine's speed: {found}")


def rejections(found: Sequence["Rejection"]) -> None:
    """Every reason of a refusal, one row each."""
    rows = [(r.rule, " / ".join(r.parties), r.got, r.need, r.hint) for r in found]
    table(("rule", "parties", "got", "need", "hint"), rows)


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Bad usage ends with 2, a refusal with 1, both with their reasons and without a traceback.

    What fails on the way, such as a rank that does not answer, ends with BROKEN and its reason.
    """

    @functools.wraps(command)
    def guarded(**values: Any) -> None:
        to: str | None = values.get("as_json")
        with _json_on_stdout() if to == STDOUT else nullcontext():
            _guarded(command, values, to)

    return guarded


@contextmanager
def _json_on_stdout() -> Iterator[None]:
    with json_alone() as found:
        token = _json_output.set(found)
        try:
            yield
        finally:
            _json_output.reset(token)


def _guarded(command: Callable[..., None], values: dict[str, Any], to: str | None) -> None:
    try:
        command(**values)
    except IncompatibleError as refusal:
        _refuse(refusal, to)
        raise typer.Exit(1) from None
    except InputError as error:
        if to == STDOUT and reports():
            kind = type(error).__name__
            print_json(
                {
                    "error": {
                        "type": kind,
                        "what": error.what,
                        "got": error.got,
                        "need": error.need,
                    }
                }
            )
        tell_error(str(error))
        raise typer.Exit(2) from None
    except ModularKernelError as error:
        tell_error(str(error))
        raise typer.Exit(BROKEN) from None


def _refuse(refusal: IncompatibleError, to: str | None) -> None:
    record = {"pairing": refusal.pairing, "ok": False, "rejections": refusal.rejections}
    answer(record, to, lambda: _print_refusal(refusal))


def _print_refusal(refusal: IncompatibleError) -> None:
    line(f"{refusal.pairing}: refused, {counted(len(refusal.rejections), 'reason')}")
    rejections([r for r in refusal.rejections if hasattr(r, "rule")])  # type: ignore[misc]
