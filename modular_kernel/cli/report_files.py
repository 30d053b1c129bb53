"""Output files of verbs that measure: a JSON record and a Markdown document."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

from modular_kernel.cli import output
from modular_kernel.cli.command import option
from modular_kernel.cli.file_options import FilePath, FileUse
from modular_kernel.cli.options import AsJson
from modular_kernel.errors import ConfigurationError
from modular_kernel.utils import json_files

_MAX_RECORD_BYTES = 1 << 26

Record = TypeVar("Record")


class WritableReport(Protocol):
    """A report of measured rows."""

    def to_json(self) -> str: ...

    def write(self, path: Path) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ReportFiles:
    """Options of the output files of a measurement."""

    as_json: AsJson = None
    markdown: Annotated[
        Path | None, option("Write the tables to this Markdown file.", type=FilePath(FileUse.WRITE))
    ] = None

    @property
    def record(self) -> Path | None:
        """Path of the JSON record; None without --json or if --json prints to stdout."""
        return None if self.as_json in (None, output.STDOUT) else Path(str(self.as_json))

    def save(self, report: WritableReport) -> None:
        if self.record is not None:
            with output.report_write_errors(self.record):
                report.write(self.record)

    def show(
        self,
        report: WritableReport,
        print_text: Callable[[], None],
        format_markdown: Callable[[], str],
    ) -> None:
        """Print the report as JSON or text, and write the Markdown file if --markdown is set."""
        if self.as_json == output.STDOUT:
            output.print_document(report.to_json())
        else:
            print_text()
        if self.markdown is not None:
            output.write_file(self.markdown, format_markdown())


def load_record(option: str, path: Path, parse: Callable[[str], Record]) -> Record:
    """Load a record file of at most 64 MiB with `parse`.

    Raises ConfigurationError, with `option` and the path, if the file cannot be read or parsed.
    """
    try:
        return parse(json_files.read_file(path, _MAX_RECORD_BYTES).decode())
    except ConfigurationError as error:
        got, need = f"schema {error.got!r}", f"{error.need}, as written by --json"
    except OSError as error:
        got, need = error.strerror or str(error), "a record written by --json"
    except UnicodeDecodeError:
        got, need = "not UTF-8", "a record written by --json"
    except ValueError as error:
        got, need = f"invalid JSON: {error}", "a record written by --json"
    except (KeyError, TypeError, AttributeError) as error:
        got, need = f"an incomplete record: {error}", "a record written by --json"
    raise ConfigurationError(f"{option} {path}", got=got, need=need)
