"""Reading of benchmark records, as `mk bench --json` and `make bench` write them, from a folder."""

from dataclasses import dataclass
from pathlib import Path

from modular_kernel.errors import ConfigurationError
from modular_kernel.measure.records import SCHEMA, Report
from modular_kernel.utils import json_files


@dataclass(frozen=True)
class BenchmarkRecord:
    """A record file.

    name: file name without suffix. report: None if the file has another format.
    """

    name: str
    report: Report | None


def read_records(folder: Path) -> tuple[BenchmarkRecord, ...]:
    """Read every *.json in `folder`, sorted by name; () if there is no such folder.

    Raises ConfigurationError for a file that is not JSON.
    """
    return tuple(BenchmarkRecord(path.stem, _read(path)) for path in sorted(folder.glob("*.json")))


def _read(path: Path) -> Report | None:
    text = path.read_text(encoding="utf-8")
    try:
        record = json_files.parse(text, allow_constants=True)
    except ValueError as error:
        raise ConfigurationError(str(path), got=str(error), need="JSON") from error
    if isinstance(record, dict) and record.get("schema") == SCHEMA:
        return Report.from_json(text)
    return None
