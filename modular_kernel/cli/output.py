"""Everything a verb prints: tables and JSON to stdout, notes and errors to stderr."""

import functools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import typer

from modular_kernel.errors import IncompatibleError, InputError
from modular_kernel.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from modular_kernel.support import Rejection

_PIPE_WIDTH = 10_000  # without a terminal a row stays one line, for grep

_SHORT = 12

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


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    print(json.dumps(plain(value), indent=2))


@functools.cache
def _console() -> "Console":
    from rich.console import Console

    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    # Rules print in brackets and parts are named by others: nothing is markup.
    return Console(width=width, markup=False, emoji=False, highlight=False)


def line(text: str = "") -> None:
    """One line of text on stdout; of what is not printable, escapes."""
    print(printable(text, lines=True))


def note(text: str) -> None:
    """One line for the reader, not for a program: stderr."""
    print(printable(text, lines=True), file=sys.stderr)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> None:
    """A table on stdout; nothing at all without rows."""
    from rich import box
    from rich.table import Table

    cells = [[printable(cell, lines=True) for cell in row] for row in rows]
    if not cells:
        return
    made = Table(
        title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for column, values in zip(columns, zip(*cells, strict=True), strict=True):
        # On a narrow terminal long texts give way, numbers and single words do not.
        short = max(len(value) for value in values) <= _SHORT
        made.add_column(column, overflow="fold", no_wrap=short)
    for row in cells:
        made.add_row(*row)
    _console().print(made)


@contextmanager
def progress(total: int) -> Iterator[Callable[[], None]]:
    """Yields what to call after each of `total` steps; a bar on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("proving", total=total)
        yield lambda: bar.advance(task)


def rejections(found: Sequence["Rejection"]) -> None:
    """Every reason of a refusal, one row each."""
    rows = [(r.rule, " / ".join(r.parties), r.got, r.need, r.hint) for r in found]
    table(("rule", "parties", "got", "need", "hint"), rows)


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Bad usage ends with 2, a refusal with 1, both with their reasons and without a traceback."""

    @functools.wraps(command)
    def guarded(**values: Any) -> None:
        try:
            command(**values)
        except IncompatibleError as refusal:
            _refuse(refusal, as_json=bool(values.get("as_json")))
            raise typer.Exit(1) from None
        except InputError as error:
            if values.get("as_json"):
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
            note(f"error: {error}")
            raise typer.Exit(2) from None

    return guarded


def _refuse(refusal: IncompatibleError, *, as_json: bool) -> None:
    if as_json:
        print_json({"pairing": refusal.pairing, "ok": False, "rejections": refusal.rejections})
        return
    line(f"{refusal.pairing}: refused, {len(refusal.rejections)} reason(s)")
    rejections([r for r in refusal.rejections if hasattr(r, "rule")])  # type: ignore[misc]
