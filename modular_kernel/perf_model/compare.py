"""Comparison of the performance model with measurements that it can predict.

Measurements are read from files like those in the folder `data`: whole layers on one GPU (`mk bench
--json`, or the older format whose rows have a `peer`), exchanges between GPUs (`mk exchange
--json`, or h200-exchange.json with a report for each world size), and published results
(mk-published/1). For measured exchanges, the sum of dispatch and combine is used, because the
events around a short one alone take a large part of its time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from modular_kernel.bench.all2all.records import SCHEMA as EXCHANGES
from modular_kernel.errors import ConfigurationError
from modular_kernel.measure.records import OK, SCHEMA
from modular_kernel.measure.routing_patterns import RoutingKind
from modular_kernel.perf_model.exchange_time import (
    DEEPEP,
    DEEPEP_2,
    DEEPEP_HT,
    PPLX,
    TRAFFIC,
    exchange_time,
)
from modular_kernel.perf_model.experts_time import FITTED, MEASURED, PART, experts_time
from modular_kernel.perf_model.hardware import Cluster, Link
from modular_kernel.perf_model.load import ONE_GROUP, Groups, rank_load
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.text import pluralize
from modular_kernel.utils import json_files

PUBLISHED = "mk-published/1"
WITHIN = 0.25  # maximum error of an estimate that counts as accurate
_MAX_BYTES = 1 << 24
_REPLACEMENTS_KEY = "symm_mem_as_shipped_from_1024_tokens"
_LAYER, _PAIR = "layer", "pair"
_QUANTITIES = ("dispatch", "combine", _PAIR, _LAYER)
# Sizes of the rows in h200-exchange.json, which does not contain them (h200-exchange.md).
_SIZES = {"hidden": 7168, "experts": 256, "top_k": 8}
_TRANSPORTS = {"DeepEP V1 low latency": DEEPEP}  # names in older files
# Rows of h200-exchange.json that are not used: h200-exchange-libraries.json has later ones.
_REPLACED = (DEEPEP, DEEPEP_HT, DEEPEP_2, PPLX)
# Schemes by the `peer` of a row in the older format.
_PEERS = {
    "mk_triton": "none",
    "mk_triton_fp8ch": "fp8_w8a8_channel",
    "mk_triton_fp8blk": "fp8_w8a8_block",
}


@dataclass(frozen=True)
class ComparedTime:
    """One measured time.

    part: the PrepareAndFinalize part, or PART for experts on one GPU. quantity: "dispatch",
    "combine", "pair" (both) or "layer". us: microseconds. fitted: whether the model's parameters
    were fitted to this time. eager: whether it includes host time, which varies between runs; its
    error is reported, but never counts as a misprediction. groups: of the experts, in routing.
    """

    label: str
    problem: Problem
    part: str
    quantity: str
    us: float
    cluster: Cluster
    fitted: bool = False
    eager: bool = False
    groups: Groups = ONE_GROUP


@dataclass(frozen=True)
class Compared:
    """A measured time with its prediction. error: predicted / measured - 1."""

    cell: ComparedTime
    predicted_us: float

    @property
    def error(self) -> float:
        return self.predicted_us / self.cell.us - 1

    @property
    def is_accurate(self) -> bool:
        return abs(self.error) <= WITHIN

    @property
    def is_mispredicted(self) -> bool:
        """Whether the prediction is inaccurate although the model was expected to predict it.

        Times that the model was fitted to, and eager ones, do not count.
        """
        return not (self.is_accurate or self.cell.fitted or self.cell.eager)


@dataclass(frozen=True)
class Summary:
    """Errors of one group of cells.

    quantity: name of the group. count: number of cells. accurate: number with an error of at most
    WITHIN. mean, worst: mean and maximum of |error|.
    """

    quantity: str
    count: int
    accurate: int
    mean: float
    worst: float


def compare(cells: Sequence[ComparedTime]) -> tuple[Compared, ...]:
    """Predict the time of each cell."""
    return tuple(Compared(cell, _predict(cell) * 1e6) for cell in cells)


def _predict(cell: ComparedTime) -> float:
    """Return the predicted seconds."""
    problem = cell.problem
    load = rank_load(
        experts=problem.experts,
        top_k=problem.top_k,
        world_size=problem.parallel.world_size,
        tokens=problem.tokens,
        kind=RoutingKind("uniform"),
        per_host=cell.cluster.per_host,
        groups=cell.groups,
    )
    experts = experts_time(problem, load, cell.cluster.gpu).seconds
    if problem.parallel.world_size == 1:
        return experts
    exchange = exchange_time(problem, TRAFFIC[cell.part], load, cell.cluster)
    if cell.quantity == _LAYER:
        return exchange.dispatch + experts + exchange.combine
    if cell.quantity == _PAIR:
        return exchange.dispatch + exchange.combine
    return exchange.dispatch if cell.quantity == "dispatch" else exchange.combine


def summaries(comparisons: Sequence[Compared]) -> list[Summary]:
    """Return summaries by number of GPUs, with fitted and predicted cells separate."""
    groups: dict[str, list[Compared]] = {}
    for compared in comparisons:
        world = compared.cell.problem.parallel.world_size
        kind = "fitted" if compared.cell.fitted else "predicted"
        mode = ", eager" if compared.cell.eager else ""
        groups.setdefault(f"{world:3} {pluralize('GPU', world)}, {kind}{mode}", []).append(compared)
    return [_summary(quantity, groups[quantity]) for quantity in sorted(groups)]


def _summary(quantity: str, group: Sequence[Compared]) -> Summary:
    errors = [abs(comparison.error) for comparison in group]
    return Summary(
        quantity, len(group), sum(c.is_accurate for c in group), fmean(errors), max(errors)
    )


def cells_of(path: Path) -> list[ComparedTime]:
    """Read the measurements in a file that the model can predict.

    Raises ConfigurationError if the file has none of the formats above.
    """
    try:
        record = json_files.parse(json_files.read_file(path, _MAX_BYTES), allow_constants=True)
        return _reader_of(record)(record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        got = _reason_of(error)
        need = f"rows of mk bench, of mk exchange, or {PUBLISHED}"
        raise ConfigurationError(f"measured rows in {path}", got=got, need=need) from None


def _reason_of(error: Exception) -> str:
    """Return the reason why a file is invalid, from the exception that was raised."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, ValueError):
        return f"invalid JSON: {error}"
    return f"an incomplete record: {str(error)[:200]}"


def _reader_of(content: Any) -> Callable[[Any], list[ComparedTime]]:
    if content.get("schema") == PUBLISHED:
        return lambda record: [_read_published(row) for row in record["rows"]]
    if content.get("schema") == EXCHANGES:
        return lambda record: _exchange_cells(record["rows"])
    if content and all(world.isdecimal() for world in content):
        return _read_worlds
    if content.get("schema") == SCHEMA:
        return lambda record: [cell for row in record["rows"] if (cell := _read_benchmark(row))]
    return lambda record: [
        _read_older(row, record["shapes"][row["shape"]])
        for row in record["rows"]
        if row["peer"] in _PEERS
    ]


def _read_worlds(record: Any) -> list[ComparedTime]:
    return [cell for report in record.values() for cell in _read_world(report)]


def _read_world(report: Any) -> list[ComparedTime]:
    """Read one world size of h200-exchange.json; later rows replace those of the same transport."""
    replacements = report.get(_REPLACEMENTS_KEY, {"rows": []})["rows"]
    latest = {
        (r["transport"], r["quant"], r["tokens"]): r for r in [*report["rows"], *replacements]
    }
    rows = [row for row in latest.values() if row["transport"] not in _REPLACED]
    return _exchange_cells(rows)


def _exchange_cells(rows: list[Any]) -> list[ComparedTime]:
    """Read the times of a dispatch and its combine, for transports that the model supports."""
    rows_by_part = [(_TRANSPORTS.get(row["transport"], row["transport"]), row) for row in rows]
    return [
        _exchange_cell(part, _PAIR, _SIZES | row, row["pair_us"])
        for part, row in rows_by_part
        if part in TRAFFIC and row["status"] == OK
    ]


def _read_published(row: Any) -> ComparedTime:
    quantity, part = row["what"], row["part"]
    if quantity not in _QUANTITIES or part not in TRAFFIC:
        raise ValueError(f"{part} {quantity}")
    return _exchange_cell(part, quantity, row, row["us"])


def _exchange_cell(part: str, quantity: str, row: Any, us: Any) -> ComparedTime:
    sizes = [int(row[name]) for name in ("tokens", "hidden", "experts", "top_k", "world_size")]
    tokens, hidden, experts, top_k, world = sizes
    problem = Problem(
        tokens=tokens,
        hidden=hidden,
        intermediate=int(row.get("intermediate", hidden)),
        experts=experts,
        top_k=top_k,
        quant=row["quant"],
        parallel=Parallel(world),
    )
    cluster = replace(Cluster(), per_host=int(row.get("ranks_of_a_host", Cluster().per_host)))
    if "link_gbs" in row:
        cluster = replace(cluster, inside=Link(float(row["link_gbs"]) * 1e9))
    groups = Groups(int(row.get("groups", 1)), int(row.get("kept_groups", 1)))
    cell = ComparedTime(
        f"{part}, {quantity}", problem, part, quantity, _us(us), cluster, groups=groups
    )
    return replace(cell, fitted=_is_fitted(cell), eager=row.get("mode") == "eager")


def _is_fitted(cell: ComparedTime) -> bool:
    """Return whether the parameters in exchange_time.TRAFFIC were fitted to this time."""
    tokens, world = cell.problem.tokens, cell.problem.parallel.world_size
    is_unquantized = cell.problem.quant == "none"
    if cell.part in (DEEPEP, PPLX):
        return (world == 4 and tokens in (1, 128)) or world in (16, 256)
    if cell.part == DEEPEP_HT:
        return world in (16, 64) or (world in (2, 4) and is_unquantized and tokens in (1, 4096))
    if cell.part == DEEPEP_2:
        return world == 4 and is_unquantized and tokens in (1, 4096)
    return cell.quantity == _PAIR and world == 2 and tokens in (1, 4096)


def _read_benchmark(row: Any) -> ComparedTime | None:
    """Read a row of `mk bench`; None for other layers, and for rows without a time."""
    is_timed_part = (
        row["layer"].split("+")[-1] == PART and row["status"] == OK and row["mode"] == "graph"
    )
    if not is_timed_part or row["quant"] not in MEASURED or row["routing"] != "uniform":
        return None
    sizes = row["experts"], row["top_k"], row["hidden"], row["intermediate"]
    return _layer_cell(row["shape"], sizes, row["tokens"], row["quant"], row["us"])


def _read_older(row: Any, shape: Any) -> ComparedTime:
    sizes = shape["E"], shape["k"], shape["H"], shape["I"]
    return _layer_cell(row["shape"], sizes, row["tokens"], _PEERS[row["peer"]], row["us"])


def _layer_cell(
    shape: str, sizes: tuple[int, ...], tokens: int, quant: str, us: float
) -> ComparedTime:
    experts, top_k, hidden, intermediate = (int(size) for size in sizes)
    problem = Problem(int(tokens), hidden, intermediate, experts, top_k, quant=quant)
    return ComparedTime(shape, problem, PART, _LAYER, _us(us), Cluster(), shape in FITTED)


def _us(value: Any) -> float:
    us = float(value)
    if not 0 < us < float("inf"):
        raise ValueError(f"{us} us")
    return us
