"""The record of a run: one row for each layer in each cell, and where it was measured."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from modular_kernel.utils import json_files

SCHEMA = "mk-bench/1"

OK, WRONG, FAILED, REFUSED, SKIPPED = "ok", "wrong", "failed", "refused", "skipped"
INTERPRETER = "interpreter"  # the mode of a row whose kernels were interpreted
OURS, BASELINE, PEER = "ours", "baseline", "peer"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layer in one cell. Only a row whose status is ok has a time.

    status: ok; wrong (its error is beyond error_bound, so it was not timed); failed (it raised);
    refused (it cannot run this problem); skipped (the deadline had passed). note: why.
    origin: ours, baseline or peer. prepared: its weights were, once, before. operands: what its
    products multiply; rows of one cell and one kind of operands compete.
    us, us_min, spread: of one call, see method.Timing. over_floor, over_best_peer: us divided by
    the floor, and by the fastest ok row of its kind that is not ours.
    touched, skew: experts with a token, and the fullest one's pairs over the mean; averages.
    eager_us: as us, of calls that are launched one by one. launches, host_us, allocations: of one
    eager call. None where not measured.
    """

    shape: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    tokens: int
    dtype: str
    problem: str
    routing: str
    layer: str
    origin: str
    quant: str
    operands: str
    prepared: bool = False
    status: str = SKIPPED
    note: str = ""
    error: float | None = None
    error_bound: float | None = None
    us: float | None = None
    us_min: float | None = None
    spread: float | None = None
    mode: str = ""
    replays: int | None = None
    calls: int | None = None
    weight_sets: int | None = None
    touched: float | None = None
    skew: float | None = None
    flops: float | None = None
    bytes: float | None = None
    floor_us: float | None = None
    floor_bound: str = ""
    over_floor: float | None = None
    over_best_peer: float | None = None
    eager_us: float | None = None
    launches: int | None = None
    host_us: float | None = None
    allocations: float | None = None

    @property
    def timed(self) -> bool:
        return self.status == OK and self.us is not None

    @property
    def competes(self) -> bool:
        """Whether its time can be compared: Triton's interpreter computes, and tells no time."""
        return self.timed and self.mode != INTERPRETER

    @property
    def group(self) -> tuple[str, int, str, str]:
        """Rows of one group compete."""
        return self.shape, self.tokens, self.routing, self.operands


@dataclass(frozen=True)
class Report:
    """A whole run. environment, peaks: what was measured on, see run.environment and floor.Peaks.

    stopped: why the run ended early, if it did.
    """

    environment: dict[str, Any]
    peaks: dict[str, Any]
    rows: tuple[Row, ...] = ()
    stopped: str = ""
    schema: str = field(default=SCHEMA)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """Read what `to_json` wrote; raise ConfigurationError for anything else."""
        record = json_files.record(text, SCHEMA, "benchmark record")
        known = {f.name for f in fields(Row)}
        rows = [Row(**{k: v for k, v in row.items() if k in known}) for row in record["rows"]]
        return cls(record["environment"], record["peaks"], tuple(rows), record["stopped"])

    def write(self, path: Path) -> None:
        """Through a file beside it: a run that is killed leaves the last whole record."""
        json_files.write(path, self.to_json() + "\n")


def best(rows: Iterable[Row], *, ours: bool) -> float | None:
    """Return the least time among the rows that compete and are ours, or are not."""
    times = [row.us for row in rows if row.competes and (row.origin == OURS) is ours]
    return min((us for us in times if us is not None), default=None)


def ranked(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Fill in each row's distance from the best peer of its group."""
    rows = tuple(rows)
    groups: dict[tuple[str, int, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    least = {group: best(members, ours=False) for group, members in groups.items()}

    def over(row: Row) -> float | None:
        peer = least[row.group]
        return row.us / peer if row.competes and row.us is not None and peer else None

    return tuple(replace(row, over_best_peer=over(row)) for row in rows)
