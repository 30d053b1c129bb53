"""The model beside what was measured: an error for every measured row that it can predict.

Rows come from the files of docs/benchmarks: whole layers on one GPU (`mk bench --json`, or the
older form with `peer`), and exchanges between GPUs (mk-exchange/1).
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from modular_kernel.bench.routing import RoutingKind
from modular_kernel.bench.rows import OK, SCHEMA
from modular_kernel.errors import ConfigurationError
from modular_kernel.sizing.exchange_time import DEEPEP, OTHERS, TRAFFIC, exchange_time
from modular_kernel.sizing.experts_time import FITTED, MEASURED, PART, experts_time
from modular_kernel.sizing.hardware import Cluster
from modular_kernel.sizing.load import rank_load
from modular_kernel.types import Parallel, Problem

EXCHANGES = "mk-exchange/1"
WITHIN = 0.25
_MOST_BYTES = 1 << 24
_SYMMETRIC = "SymmMemPrepareAndFinalize"
_LAYER, _WHATS = "layer", ("dispatch", "combine", "layer")
_PEERS = {
    "mk_triton": "none",
    "mk_triton_fp8ch": "fp8_w8a8_channel",
    "mk_triton_fp8blk": "fp8_w8a8_block",
}


@dataclass(frozen=True)
class Cell:
    """One measured number, in microseconds. part: whose exchange; PART alone on one GPU. fitted:
    whether the model's numbers were fitted to it."""

    label: str
    problem: Problem
    part: str
    what: str
    us: float
    cluster: Cluster
    fitted: bool = False


@dataclass(frozen=True)
class Compared:
    """error: predicted over measured, less one."""

    cell: Cell
    predicted_us: float

    @property
    def error(self) -> float:
        return self.predicted_us / self.cell.us - 1

    @property
    def good(self) -> bool:
        return abs(self.error) <= WITHIN


@dataclass(frozen=True)
class Summary:
    """Of some cells: how many, how many within WITHIN, the mean and the largest |error|."""

    what: str
    count: int
    good: int
    mean: float
    worst: float


def compare(cells: Sequence[Cell]) -> tuple[Compared, ...]:
    """Each cell with what the model says."""
    return tuple(Compared(cell, _predicted(cell) * 1e6) for cell in cells)


def _predicted(cell: Cell) -> float:
    problem = cell.problem
    load = rank_load(
        experts=problem.experts,
        top_k=problem.top_k,
        world_size=problem.parallel.world_size,
        tokens=problem.tokens,
        kind=RoutingKind("uniform"),
    )
    experts = experts_time(problem, load, cell.cluster.gpu).seconds
    if problem.parallel.world_size == 1:
        return experts
    exchange = exchange_time(problem, (TRAFFIC | OTHERS)[cell.part], load, cell.cluster)
    if cell.what == _LAYER:
        return exchange.dispatch + experts + exchange.combine
    return exchange.dispatch if cell.what == "dispatch" else exchange.combine


def summaries(found: Sequence[Compared]) -> list[Summary]:
    """By number of GPUs, fitted cells apart from predicted ones."""
    groups: dict[str, list[Compared]] = {}
    for one in found:
        world = one.cell.problem.parallel.world_size
        kind = "fitted" if one.cell.fitted else "predicted"
        groups.setdefault(f"{world:3} GPU(s), {kind}", []).append(one)
    return [_summary(what, groups[what]) for what in sorted(groups)]


def _summary(what: str, group: Sequence[Compared]) -> Summary:
    errors = [abs(one.error) for one in group]
    return Summary(what, len(group), sum(c.good for c in group), fmean(errors), max(errors))


def cells_of(path: Path) -> list[Cell]:
    """The rows of a file that the model has numbers for; ConfigurationError for another file."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        found = json.loads(content)
        return _reader(found)(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        got = f"{type(error).__name__}: {str(error)[:200]}"
        need = f"measured rows: {EXCHANGES}, {SCHEMA} or h200-layers.json"
        raise ConfigurationError(f"measured rows in {path}", got=got, need=need) from None


def _reader(found: Any) -> Callable[[Any], list[Cell]]:
    if found.get("schema") == EXCHANGES:
        return lambda given: [_exchange(row) for row in given["rows"]]
    if found.get("schema") == SCHEMA:
        return lambda given: [cell for row in given["rows"] if (cell := _benchmark(row))]
    return lambda given: [
        _older(row, given["shapes"][row["shape"]]) for row in given["rows"] if row["peer"] in _PEERS
    ]


def _exchange(row: Any) -> Cell:
    what, part, world = row["what"], row["part"], int(row["world_size"])
    if what not in _WHATS or part not in TRAFFIC | OTHERS:
        raise ValueError(f"{part} {what}")
    problem = Problem(
        tokens=int(row["tokens"]),
        hidden=int(row["hidden"]),
        intermediate=int(row.get("intermediate", 2048)),
        experts=int(row["experts"]),
        top_k=int(row["top_k"]),
        quant=row["quant"],
        parallel=Parallel(world),
    )
    cluster = replace(Cluster(), per_host=int(row["ranks_of_a_host"]))
    label = f"{part}, {what}"
    cell = Cell(label, problem, part, what, _us(row["us"]), cluster)
    return replace(cell, fitted=_fitted(cell))


def _fitted(cell: Cell) -> bool:
    """Which exchanges the numbers of exchange_time were fitted to."""
    tokens, world = cell.problem.tokens, cell.problem.parallel.world_size
    if cell.part == _SYMMETRIC and cell.what != _LAYER:
        quantised = cell.problem.scheme.quantised
        return world == 2 and (tokens == 1 or (tokens == 4096 and not quantised))
    if cell.part == DEEPEP:
        ends = (world == 4 and tokens in (1, 128)) or world in (16, 256)
        return ends and cell.problem.scheme.quantised
    return False


def _benchmark(row: Any) -> Cell | None:
    """A row of `mk bench`; None for other layers, and for what has no time."""
    mine = row["layer"].split("+")[-1] == PART and row["status"] == OK and row["mode"] == "graph"
    if not mine or row["quant"] not in MEASURED or row["routing"] != "uniform":
        return None
    sizes = row["experts"], row["top_k"], row["hidden"], row["intermediate"]
    return _one_gpu(row["shape"], sizes, row["tokens"], row["quant"], row["us"])


def _older(row: Any, shape: Any) -> Cell:
    sizes = shape["E"], shape["k"], shape["H"], shape["I"]
    return _one_gpu(row["shape"], sizes, row["tokens"], _PEERS[row["peer"]], row["us"])


def _one_gpu(shape: str, sizes: tuple[int, ...], tokens: int, quant: str, us: float) -> Cell:
    experts, top_k, hidden, intermediate = (int(size) for size in sizes)
    problem = Problem(int(tokens), hidden, intermediate, experts, top_k, quant=quant)
    return Cell(shape, problem, PART, _LAYER, _us(us), Cluster(), shape in FITTED)


def _us(value: Any) -> float:
    us = float(value)
    if not 0 < us < float("inf"):
        raise ValueError(f"{us} us")
    return us
