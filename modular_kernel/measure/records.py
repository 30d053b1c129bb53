"""Benchmark records: one row per layer and cell, and the environment of the measurement."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from modular_kernel.utils import json_files

SCHEMA = "mk-bench/1"

OK, WRONG, FAILED, REFUSED, SKIPPED = "ok", "wrong", "failed", "refused", "skipped"
INTERPRETER = "interpreter"  # mode of rows whose kernels ran in Triton's interpreter
OURS, BASELINE, PEER = "ours", "baseline", "peer"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layer in one cell. Only a row with status ok has a time.

    status: ok; wrong (error beyond error_bound, not timed); failed (raised an exception); refused
        (not supported); skipped (after the deadline). note: the reason.
    origin: ours; peer (a layer of another library); baseline (plain torch).
    prepared: whether weights were prepared before the calls.
    library: the library whose GEMMs our part runs; "" for its own kernels.
    operands: the operands' types; rows of a cell with equal operands are compared.
    us, us_min, spread: time of one call, see measure.timing.Timing.
    over_floor, over_best_peer: us divided by the roofline, and by the time of the fastest ok row
        with these operands that is not ours.
    touched: mean number of experts with a token. skew: mean ratio of the pairs of the fullest
        expert to those of the average expert.
    floor_us, floor_bound: the roofline, see measure.roofline.Roofline.
    eager_us: like us, for eager calls.
    launches, host_us, allocations: launches, host time and device allocations of one eager call.

    Values that were not measured are None.
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
    library: str = ""
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
    def is_timed(self) -> bool:
        return self.status == OK and self.us is not None

    @property
    def is_comparable(self) -> bool:
        """Whether the row has a time that may be compared, so not one of Triton's interpreter."""
        return self.is_timed and self.mode != INTERPRETER

    @property
    def group(self) -> tuple[str, int, str, str]:
        """Key that is equal for the rows that are compared with each other."""
        return self.shape, self.tokens, self.routing, self.operands


@dataclass(frozen=True)
class Report:
    """The record of a whole run.

    environment, peaks: see measure.environment and measure.roofline.Peaks.
    stopped: the reason why the run ended early, or "".
    missing: layers that were not measured because their packages are not installed.
    """

    environment: dict[str, Any]
    peaks: dict[str, Any]
    rows: tuple[Row, ...] = ()
    stopped: str = ""
    missing: tuple[str, ...] = ()
    schema: str = field(default=SCHEMA)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """Parse the output of `to_json`; raise ConfigurationError for anything else."""
        record = json_files.parse_record(text, SCHEMA, "benchmark record")
        field_names = {f.name for f in fields(Row)}
        rows = [Row(**{k: v for k, v in row.items() if k in field_names}) for row in record["rows"]]
        return cls(
            record["environment"],
            record["peaks"],
            tuple(rows),
            record["stopped"],
            tuple(record.get("missing", ())),
        )

    def write(self, path: Path) -> None:
        """Write the file atomically, so that an interrupted run leaves a complete file."""
        json_files.write(path, self.to_json() + "\n")


def min_time_us(rows: Iterable[Row], *, ours: bool) -> float | None:
    """Return the minimum time of the competing rows; None if there are none.

    ours: whether to use only our rows, or only those of others.
    """
    times = [row.us for row in rows if row.is_comparable and (row.origin == OURS) is ours]
    return min((us for us in times if us is not None), default=None)


def add_peer_ratios(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return the rows with `over_best_peer` set."""
    rows = tuple(rows)
    groups: dict[tuple[str, int, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    best_peers = {group: min_time_us(members, ours=False) for group, members in groups.items()}

    def ratio_to_peer(row: Row) -> float | None:
        peer = best_peers[row.group]
        return row.us / peer if row.is_comparable and row.us is not None and peer else None

    return tuple(replace(row, over_best_peer=ratio_to_peer(row)) for row in rows)
