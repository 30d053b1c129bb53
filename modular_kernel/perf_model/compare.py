"""Comparison of the performance model with measured times, for `mk plan --compare`.

Times are read from JSON files in these formats. The folder `data` has examples.

    whole layers on one GPU    `mk bench --json`, or the older format of h200-layers.json
    exchanges between GPUs     `mk exchange --json`, or the older format of h200-exchange.json
    published results          mk-published/1, see published-exchange.json

Measured exchanges are compared by the time of a dispatch and a combine together. For a single short
dispatch or combine, the overhead of the timing events would be too large.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.measure.records import EXCHANGE_SCHEMA, OK, SCHEMA
from modular_kernel.measure.routing_patterns import RoutingKind
from modular_kernel.perf_model.exchange_time import (
    DEEPEP_HT,
    DEEPEP_LL,
    DEEPEP_V2,
    PPLX,
    TRAFFIC_BY_PART,
    exchange_time,
)
from modular_kernel.perf_model.experts_time import (
    EFFICIENCIES,
    FITTED_SHAPES,
    MODELED_EXPERTS_PART,
    experts_time,
)
from modular_kernel.perf_model.hardware import Cluster, Link
from modular_kernel.perf_model.load import ONE_GROUP, Groups, rank_load
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.text import pluralize
from modular_kernel.utils import json_files

PUBLISHED_SCHEMA = "mk-published/1"
MAX_ACCURATE_ERROR = 0.25  # maximum error of a prediction that counts as accurate
_MAX_BYTES = 1 << 24
# Key of h200-exchange.json whose rows replace other rows of the same case.
_NEWER_ROWS_KEY = "symm_mem_as_shipped_from_1024_tokens"
_LAYER, _PAIR = "layer", "pair"
_QUANTITIES = ("dispatch", "combine", _PAIR, _LAYER)
# Sizes of the layer in h200-exchange.json. The file does not have them.
_H200_EXCHANGE_SIZES = {"hidden": 7168, "experts": 256, "top_k": 8}
_OLD_TRANSPORT_NAMES = {"DeepEP V1 low latency": DEEPEP_LL}
# Transports whose rows in h200-exchange.json are ignored, because h200-exchange-libraries.json has
# newer times.
_IGNORED_TRANSPORTS = (DEEPEP_LL, DEEPEP_HT, DEEPEP_V2, PPLX)
# Value of `peer` in h200-layers.json -> quantization scheme, for the rows of TritonExperts. All
# other rows were measured with other libraries.
_SCHEMES_BY_PEER = {
    "mk_triton": "none",
    "mk_triton_fp8ch": "fp8_w8a8_channel",
    "mk_triton_fp8blk": "fp8_w8a8_block",
}


@dataclass(frozen=True)
class MeasuredTime:
    """One measured time in microseconds, and the case that it was measured in.

    part: the PrepareAndFinalize part, or MODELED_EXPERTS_PART for experts on one GPU.
    quantity: "dispatch", "combine", "pair" (both) or "layer".
    fitted: whether the model's parameters were fitted to this time.
    eager: whether the time includes host time, which varies between runs.
    groups: groups of group-limited routing.
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
class Comparison:
    """A measured time and its prediction."""

    measured: MeasuredTime
    predicted_us: float

    @property
    def error(self) -> float:
        """predicted / measured - 1"""
        return self.predicted_us / self.measured.us - 1

    @property
    def is_accurate(self) -> bool:
        return abs(self.error) <= MAX_ACCURATE_ERROR

    @property
    def is_mispredicted(self) -> bool:
        """Whether the prediction is inaccurate and the time is neither fitted nor eager."""
        return not (self.is_accurate or self.measured.fitted or self.measured.eager)


@dataclass(frozen=True)
class Summary:
    """Errors of one group of measured times.

    group: name of the group, for example "2 GPUs, predicted".
    count: number of times.
    accurate: number of times with an error of at most MAX_ACCURATE_ERROR.
    mean, worst: mean and maximum of |error|.
    """

    group: str
    count: int
    accurate: int
    mean: float
    worst: float


def compare(times: Sequence[MeasuredTime]) -> tuple[Comparison, ...]:
    return tuple(Comparison(measured, _predict(measured) * 1e6) for measured in times)


def _predict(measured: MeasuredTime) -> float:
    problem = measured.problem
    load = rank_load(
        experts=problem.experts,
        top_k=problem.top_k,
        world_size=problem.parallel.world_size,
        tokens=problem.tokens,
        kind=RoutingKind("uniform"),
        per_host=measured.cluster.per_host,
        groups=measured.groups,
    )
    experts = experts_time(problem, load, measured.cluster.gpu).seconds
    if problem.parallel.world_size == 1:
        return experts
    exchange = exchange_time(problem, TRAFFIC_BY_PART[measured.part], load, measured.cluster)
    if measured.quantity == _LAYER:
        return exchange.dispatch + experts + exchange.combine
    if measured.quantity == _PAIR:
        return exchange.dispatch + exchange.combine
    return exchange.dispatch if measured.quantity == "dispatch" else exchange.combine


def summarize(comparisons: Sequence[Comparison]) -> list[Summary]:
    """Return a summary for each number of GPUs, separately for fitted and predicted times."""
    comparisons_by_group: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        world_size = comparison.measured.problem.parallel.world_size
        kind = "fitted" if comparison.measured.fitted else "predicted"
        mode = ", eager" if comparison.measured.eager else ""
        comparisons_by_group.setdefault(
            f"{world_size:3} {pluralize('GPU', world_size)}, {kind}{mode}", []
        ).append(comparison)
    return [
        _summarize_group(name, comparisons_by_group[name]) for name in sorted(comparisons_by_group)
    ]


def _summarize_group(name: str, comparisons: Sequence[Comparison]) -> Summary:
    errors = [abs(comparison.error) for comparison in comparisons]
    num_accurate = sum(comparison.is_accurate for comparison in comparisons)
    return Summary(name, len(comparisons), num_accurate, fmean(errors), max(errors))


def read_measurements(path: Path) -> list[MeasuredTime]:
    """Read measured times from a file.

    Rows of `mk bench` and `mk exchange` that the model cannot predict are skipped.

    Raises ConfigurationError if the file is not in a supported format.
    """
    try:
        record = json_files.parse(json_files.read_file(path, _MAX_BYTES), allow_constants=True)
        return _find_reader(record)(record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        got = _describe_error(error)
        need = f"rows of mk bench, of mk exchange, or {PUBLISHED_SCHEMA}"
        raise ConfigurationError(f"measured rows in {path}", got=got, need=need) from None


def _describe_error(error: Exception) -> str:
    """Return the reason why a file is invalid, for an error message."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, ValueError):
        return f"invalid JSON: {error}"
    return f"an incomplete record: {str(error)[:200]}"


def _find_reader(content: Any) -> Callable[[Any], list[MeasuredTime]]:
    if content.get("schema") == PUBLISHED_SCHEMA:
        return lambda record: [_read_published_row(row) for row in record["rows"]]
    if content.get("schema") == EXCHANGE_SCHEMA:
        return lambda record: _read_exchanges(record["rows"])
    if content and all(world.isdecimal() for world in content):
        return _read_h200_exchange
    if content.get("schema") == SCHEMA:
        return lambda record: [time for row in record["rows"] if (time := _read_benchmark_row(row))]
    return lambda record: [
        _read_older_row(row, record["shapes"][row["shape"]])
        for row in record["rows"]
        if row["peer"] in _SCHEMES_BY_PEER
    ]


def _read_h200_exchange(record: Any) -> list[MeasuredTime]:
    return [time for report in record.values() for time in _read_world_size(report)]


def _read_world_size(report: Any) -> list[MeasuredTime]:
    """Read the report of one world size in h200-exchange.json."""
    newer_rows = report.get(_NEWER_ROWS_KEY, {"rows": []})["rows"]
    latest = {(r["transport"], r["quant"], r["tokens"]): r for r in [*report["rows"], *newer_rows]}
    rows = [row for row in latest.values() if row["transport"] not in _IGNORED_TRANSPORTS]
    return _read_exchanges(rows)


def _read_exchanges(rows: list[Any]) -> list[MeasuredTime]:
    """Read the times of exchanges over the transports that the model supports."""
    parts_and_rows = [
        (_OLD_TRANSPORT_NAMES.get(row["transport"], row["transport"]), row) for row in rows
    ]
    return [
        _make_exchange_time(part, _PAIR, _H200_EXCHANGE_SIZES | row, row["pair_us"])
        for part, row in parts_and_rows
        if part in TRAFFIC_BY_PART and row["status"] == OK
    ]


def _read_published_row(row: Any) -> MeasuredTime:
    quantity, part = row["what"], row["part"]
    if quantity not in _QUANTITIES or part not in TRAFFIC_BY_PART:
        raise ValueError(f"{part} {quantity}")
    return _make_exchange_time(part, quantity, row, row["us"])


def _make_exchange_time(part: str, quantity: str, row: Any, us: Any) -> MeasuredTime:
    sizes = [int(row[name]) for name in ("tokens", "hidden", "experts", "top_k", "world_size")]
    tokens, hidden, experts, top_k, world_size = sizes
    problem = Problem(
        tokens=tokens,
        hidden=hidden,
        intermediate=int(row.get("intermediate", hidden)),
        experts=experts,
        top_k=top_k,
        quant=row["quant"],
        parallel=Parallel(world_size),
    )
    cluster = replace(Cluster(), per_host=int(row.get("ranks_of_a_host", Cluster().per_host)))
    if "link_gbs" in row:
        cluster = replace(cluster, inside=Link(float(row["link_gbs"]) * 1e9))
    groups = Groups(int(row.get("groups", 1)), int(row.get("kept_groups", 1)))
    measured = MeasuredTime(
        f"{part}, {quantity}", problem, part, quantity, _parse_us(us), cluster, groups=groups
    )
    return replace(measured, fitted=_is_fitted(measured), eager=row.get("mode") == "eager")


def _is_fitted(measured: MeasuredTime) -> bool:
    """Return whether parameters in exchange_time.TRAFFIC_BY_PART were fitted to this time."""
    tokens, world_size = measured.problem.tokens, measured.problem.parallel.world_size
    is_unquantized = measured.problem.quant == "none"
    if measured.part in (DEEPEP_LL, PPLX):
        return (world_size == 4 and tokens in (1, 128)) or world_size in (16, 256)
    if measured.part == DEEPEP_HT:
        return world_size in (16, 64) or (
            world_size in (2, 4) and is_unquantized and tokens in (1, 4096)
        )
    if measured.part == DEEPEP_V2:
        return world_size == 4 and is_unquantized and tokens in (1, 4096)
    return measured.quantity == _PAIR and world_size == 2 and tokens in (1, 4096)


def _read_benchmark_row(row: Any) -> MeasuredTime | None:
    """Read a row of `mk bench`. Returns None for other layers and for rows without a time."""
    is_timed_part = (
        row["layer"].split("+")[-1] == MODELED_EXPERTS_PART
        and row["status"] == OK
        and row["mode"] == "graph"
    )
    if not is_timed_part or row["quant"] not in EFFICIENCIES or row["routing"] != "uniform":
        return None
    sizes = row["experts"], row["top_k"], row["hidden"], row["intermediate"]
    return _make_layer_time(row["shape"], sizes, row["tokens"], row["quant"], row["us"])


def _read_older_row(row: Any, shape: Any) -> MeasuredTime:
    sizes = shape["E"], shape["k"], shape["H"], shape["I"]
    return _make_layer_time(
        row["shape"], sizes, row["tokens"], _SCHEMES_BY_PEER[row["peer"]], row["us"]
    )


def _make_layer_time(
    shape: str, sizes: tuple[int, ...], tokens: int, quant: str, us: float
) -> MeasuredTime:
    experts, top_k, hidden, intermediate = (int(size) for size in sizes)
    problem = Problem(int(tokens), hidden, intermediate, experts, top_k, quant=quant)
    return MeasuredTime(
        shape,
        problem,
        MODELED_EXPERTS_PART,
        _LAYER,
        _parse_us(us),
        Cluster(),
        shape in FITTED_SHAPES,
    )


def _parse_us(value: Any) -> float:
    us = float(value)
    if not 0 < us < float("inf"):
        raise ValueError(f"{us} us")
    return us
