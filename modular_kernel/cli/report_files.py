"""Output of the verbs that measure: reports as JSON, as text, and as a Markdown document."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

from modular_kernel.cli import output
from modular_kernel.cli.command import option
from modular_kernel.cli.file_options import FilePath, FileUse
from modular_kernel.cli.options import AsJson


class WritableReport(Protocol):
    """A report of measured rows."""

    def to_json(self) -> str: ...

    def write(self, path: Path) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ReportFiles:
    """Options for the output files of a report."""

    as_json: AsJson = None
    markdown: Annotated[
        Path | None, option("Write the tables of a document here.", type=FilePath(FileUse.WRITE))
    ] = None

    @property
    def record(self) -> Path | None:
        """Path of the JSON record; None if --json is absent or prints on stdout."""
        return None if self.as_json in (None, output.STDOUT) else Path(str(self.as_json))

    def keep(self, report: WritableReport) -> None:
        """Write the report to the file of --json, if any; may be called after each row."""
        if self.record is not None:
            with output.writing(self.record):
                report.write(self.record)

    def show(
        self, report: WritableReport, text: Callable[[], None], document: Callable[[], str]
    ) -> None:
        """Print the report as JSON or with `text`, and write `document` to the --markdown file."""
        if self.as_json == output.STDOUT:
            output.print_document(report.to_json())
        else:
            text()
        if self.markdown is not None:
            output.write_file(self.markdown, document())
