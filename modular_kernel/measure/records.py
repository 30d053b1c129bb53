"""Benchmark records: a row for each implementation and case, and the environment of the run.

A case is a layer shape, a number of tokens and a routing (`measure.cases.LayerCase`). `mk bench`
writes a `Report`, and `mk report` shows it. The fields of `Row` are the keys of the JSON file.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from modular_kernel.utils import json_files

SCHEMA = "mk-bench/1"
EXCHANGE_SCHEMA = "mk-exchange/1"  # of bench.all2all.records, which readers need not import

OK, WRONG, FAILED, REFUSED, SKIPPED = "ok", "wrong", "failed", "refused", "skipped"
INTERPRETER = "interpreter"  # mode of rows whose kernels ran in Triton's interpreter
OURS, BASELINE, PEER = "ours", "baseline", "peer"


@dataclass(frozen=True, kw_only=True)
class Row:
    """The measurement of one implementation in one case. Values that were not measured are None.

    shape: name of the layer shape.
    experts, top_k, hidden, intermediate, tokens, dtype: fields of the case's Problem.
    problem: str(Problem).
    routing: distribution of the tokens over the experts, for example "uniform".
    layer: name of the implementation that computed the layer, for example the name of a pairing.
    origin: "ours", "peer" (a layer of another library) or "baseline" (plain torch).
    quant: name of the quantization scheme.
    operands: types of weights and activations (`measure.cases.operand_types`). Rows of a case with
        equal types are compared.
    prepared: whether weights were prepared before the calls.
    library: for our rows, the vendor library that computes the GEMMs; "" for our own kernels.
    status: "ok"; "wrong" (error larger than error_bound, not timed); "failed" (an exception);
        "refused" (not supported); or "skipped" (after the deadline).
    note: reason of a status other than "ok".
    error, error_bound: see measure.check.CheckResult.
    us, us_min: median and minimum time of one call, in microseconds.
    spread: interquartile range of the time divided by its median.
    mode: "graph", "eager" or "cpu", followed by "+flush" if the L2 cache was overwritten before
        each call; or "interpreter".
    replays: number of timed replays.
    calls: number of calls per replay.
    weight_sets: number of copies of the weights that calls use in turn, so that no call finds its
        weights in the L2 cache.
    touched: mean number of experts with a token.
    skew: number of pairs of the busiest expert, divided by the mean over all experts. If inputs
        differ, the mean over the inputs.
    flops, bytes: work of one call, see measure.roofline.Work.
    floor_us, floor_bound: the roofline, see measure.roofline.Roofline.
    over_floor: us divided by floor_us.
    over_best_peer: us divided by the time of the fastest "peer" or "baseline" row in the same case
        and with the same operand types.
    eager_us: median time of one eager call, in microseconds.
    launches, host_us, allocations: kernel launches, host time in microseconds, and device memory
        allocations of one eager call.
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
        """Whether the output is correct and the row has a time."""
        return self.status == OK and self.us is not None

    @property
    def is_comparable(self) -> bool:
        """Whether the row has a time, which was not measured in Triton's interpreter."""
        return self.is_timed and self.mode != INTERPRETER

    @property
    def group(self) -> tuple[str, int, str, str]:
        """Key of the rows that are compared with each other: the case and the operand types."""
        return self.shape, self.tokens, self.routing, self.operands


@dataclass(frozen=True)
class Report:
    """The record of a benchmark run.

    environment: see measure.environment.collect_environment.
    peaks: fields of measure.roofline.Peaks.
    stopped: the reason why the run ended early, or "".
    missing: names of layers whose packages are not installed.
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
        """Parse the output of `to_json`. Raises ConfigurationError if the text is invalid."""
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
        """Write a JSON file atomically, so that an interrupted run leaves a complete file."""
        json_files.write(path, self.to_json() + "\n")


def min_time_us(rows: Iterable[Row], *, ours: bool) -> float | None:
    """Return the minimum time of the comparable rows in microseconds; None if there are none.

    ours: True uses only our rows, False only the rows of peers and baselines.
    """
    times = [row.us for row in rows if row.is_comparable and (row.origin == OURS) is ours]
    return min((us for us in times if us is not None), default=None)


def add_peer_ratios(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return the rows with `over_best_peer`."""
    rows = tuple(rows)
    groups: dict[tuple[str, int, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    best_us = {group: min_time_us(members, ours=False) for group, members in groups.items()}

    def compute_ratio_to_best(row: Row) -> float | None:
        best = best_us[row.group]
        return row.us / best if row.is_comparable and row.us is not None and best else None

    return tuple(replace(row, over_best_peer=compute_ratio_to_best(row)) for row in rows)
