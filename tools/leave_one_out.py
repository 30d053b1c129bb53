"""How good tiles are for a layer that has no tuned file: every tuned layer is left out in turn.

    python tools/leave_one_out.py time record.json                # on the GPU that files are for
    python tools/leave_one_out.py report record.json > leave-one-out.md

A layer that is left out takes the launches that the nearest other layers were tuned to
(experts/triton/configs/nearest.py), and then those of the heuristics alone (heuristics.py there).
Whole planned layers with them and with its own tuned tiles are checked and timed by turns, as the
tuner compares its finalists (modular_kernel/tuning/measurement.py). Tiles that are the same are not
timed.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import geometric_mean

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton

from experts.triton.configs.files import ConfigKey
from experts.triton.configs.heuristics import heuristics
from experts.triton.configs.lookup import PACKAGED, ConfigLookup, subfolder
from experts.triton.launch_config import Device, MoEConfig
from experts.triton.paths import PATHS
from modular_kernel.catalog import this_machine
from modular_kernel.cli.presets import SHAPES
from modular_kernel.spec.problem import Problem
from modular_kernel.text import counted
from modular_kernel.tuning.compilation import Compiler, Pair
from modular_kernel.tuning.measurement import TimedSearch

BOUND = 1.20
CONFIGS = Path(__file__).parents[1] / "experts" / "triton" / "configs" / "data"
TRITON = "3.6.0"
H200 = Device("NVIDIA H200", tma=True)
QUANTS = ("none", "fp8_w8a8_channel", "fp8_w8a8_block", "mxfp4_w4a16")
TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
Row = dict[str, object]  # of a record
PAIR = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")

_INTRO = """# Tiles without a tuned file, on one H200

Each layer is left out in turn, and takes the launches that the nearest other layers were tuned to
(where one is near), or those of the heuristics alone. Whole planned layers with them and with the
layer's own tuned tiles were checked against float64 and timed by turns, with uniform routing and
weights not in the cache (`tools/leave_one_out.py`). Ratios are to the tuned tiles' time; `within`
counts cells (a layer and a number of tokens) within {bound:.2f} x. In {timed} of {cells} cells
tiles differ, and were timed; where they are the tuned ones the ratio is 1. Below 1, kernels became
faster after the layer was tuned. Regimes leave nothing out: they were chosen with the tuned layers
in view, and those of mxfp4, of which few are tuned, are these layers' own. Measured {measured}.
Raw rows: `{record}`."""


@dataclass(frozen=True)
class TimedCell:
    """One number of tokens of one layer, and the tiles of it. origin: whose the neighbors' are."""

    layer: str
    problem: Problem
    tuned: MoEConfig
    neighbors: MoEConfig
    regimes: MoEConfig
    origin: str

    @property
    def choices(self) -> list[MoEConfig]:
        """All different tiles."""
        return list(dict.fromkeys((self.tuned, self.neighbors, self.regimes)))

    @property
    def differs(self) -> bool:
        return len(self.choices) > 1

    def record(self, seconds: Mapping[MoEConfig, float]) -> Row:
        """Return a row of the record: microseconds by where tiles come from, none where all are
        alike.
        """
        kinds = ("tuned", "neighbors", "regimes")
        times = {kind: seconds.get(getattr(self, kind)) for kind in kinds}
        us = {kind: round(s * 1e6, 2) for kind, s in times.items() if s is not None}
        p = self.problem
        row = {"layer": self.layer, "quant": p.quant, "tokens": p.tokens, "origin": self.origin}
        return {**row, "us": us}


def cells(
    layers: Iterable[str] = SHAPES,
    quants: Iterable[str] = QUANTS,
    tokens: Sequence[int] = TOKENS,
    configs: Path = CONFIGS,
) -> list[TimedCell]:
    """Every cell of the layers that have a file in `configs`."""
    found = []
    for quant in quants:
        for layer in layers:
            problem = Problem(tokens=max(tokens), quant=quant, **SHAPES[layer])
            found += _of_layer(layer, problem, tokens, configs)
    return found


def _of_layer(
    layer: str, problem: Problem, tokens: Sequence[int], configs: Path
) -> list[TimedCell]:
    files = sorted((configs / subfolder(TRITON)).glob("E=*.json"))
    own = ConfigKey.of(problem, H200.name)
    others = [path for path in files if ConfigKey.parse(path.name) != own]
    if len(others) == len(files):
        return []
    mine = ConfigLookup(((PACKAGED, configs),), H200, TRITON).source(problem)
    with tempfile.TemporaryDirectory() as folder:
        inner = Path(folder) / subfolder(TRITON)
        inner.mkdir()
        for path in others:
            (inner / path.name).symlink_to(path.resolve())
        lent = ConfigLookup(((PACKAGED, Path(folder)),), H200, TRITON).source(problem)
    alone, paths = heuristics(problem, H200), [p.name for p in PATHS if p.serves(problem, H200)]
    made = []
    for number in tokens:
        whose = lent.whose[lent.steps.index(number)] if lent.whose else "heuristics"
        tuned, neighbors = (
            source.launched(problem, H200, paths).choose(number) for source in (mine, lent)
        )
        here = problem.with_tokens(number)
        made.append(TimedCell(layer, here, tuned, neighbors, alone.choose(number), whose))
    return made


def time_cells(
    found: Sequence[TimedCell], deadline: float, keep: Callable[[list[Row]], None]
) -> int:
    """Time on this GPU what differs; how many cells have no time: no layer is begun after
    `deadline` seconds, and tiles may give wrong numbers. keep: called with all rows so far."""
    pair, rows, left = Pair(*PAIR, this_machine()), list[Row](), 0
    end = time.monotonic() + deadline
    with Compiler(max(1, (os.cpu_count() or 2) - 1)) as compiler:
        for cell in found:  # of all layers, in their order: the processes run ahead
            if cell.differs:
                compiler.begin(pair, pair.space(cell.problem), cell.problem, cell.choices)
        for _, group in groupby(found, key=lambda cell: (cell.layer, cell.problem.quant)):
            of = list(group)
            late = time.monotonic() > end and any(cell.differs for cell in of)
            made = [] if late else _time_layer(of, pair, compiler)
            left += len(of) - len(made)
            rows += made
            keep(rows)
    return left


def _time_layer(of: Sequence[TimedCell], pair: Pair, compiler: Compiler) -> list[Row]:
    """Rows of one layer's cells; none of a cell in which tiles give wrong numbers."""
    rows = [cell.record({}) for cell in of if not cell.differs]
    numbers = [cell.problem.tokens for cell in of if cell.differs]
    if not numbers:
        return rows
    most = of[0].problem.with_tokens(max(numbers))
    bench = TimedSearch(pair, most, compiler, tokens=numbers, target_ms=40.0)
    for cell in (cell for cell in of if cell.differs):
        took = bench.compare(cell.problem.tokens, cell.choices)
        seconds = {c: t for c in cell.choices if isinstance(t := took[c], float)}
        if len(seconds) == len(cell.choices):
            rows.append(cell.record(seconds))
        else:
            print(f"{cell.layer}, {cell.problem}: {took}", file=sys.stderr)
    return rows


@dataclass(frozen=True)
class TimedResult:
    """Times over the tuned one."""

    layer: str
    quant: str
    tokens: int
    neighbors: float
    regimes: float
    origin: str


def results(rows: Iterable[Row]) -> list[TimedResult]:
    """Of a record's rows. Tiles that are the tuned ones are at 1."""
    found = []
    for row in rows:
        us = row["us"]
        assert isinstance(us, dict)
        over = {kind: us[kind] / us["tuned"] if us else 1.0 for kind in ("neighbors", "regimes")}
        sizes = str(row["layer"]), str(row["quant"]), int(str(row["tokens"]))
        found.append(TimedResult(*sizes, over["neighbors"], over["regimes"], str(row["origin"])))
    order = {(r.quant, r.layer): index for index, r in reversed(list(enumerate(found)))}
    return sorted(found, key=lambda r: (order[r.quant, r.layer], r.tokens))


def report(found: Sequence[TimedResult], **said: object) -> list[str]:
    """Return a document in Markdown. said: what its first lines name beside the number of cells:
    measured (when, and with what), timed (cells with different tiles) and record (a file's
    name)."""
    quants = list(dict.fromkeys(result.quant for result in found))
    lines = [
        *_INTRO.format(bound=BOUND, cells=len(found), **said).splitlines(),
        "",
        "| scheme | cells | neighbors: within | mean | worst | regimes: within | mean | worst |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for quant in [*quants, "all"]:
        of = [r for r in found if quant in ("all", r.quant)]
        both = _summary([r.neighbors for r in of]), _summary([r.regimes for r in of])
        lines.append(f"| {quant} | {len(of)} | {both[0]} | {both[1]} |")
    return [*lines, "", *_by_tokens(found), "", *_far(found)]


def _summary(ratios: Sequence[float]) -> str:
    within = sum(ratio <= BOUND for ratio in ratios)
    share = f"{within} of {len(ratios)}, {within / len(ratios):.1%}"
    return f"{share} | {geometric_mean(ratios):.3f} | {max(ratios):.2f}"


def _by_tokens(found: Sequence[TimedResult]) -> list[str]:
    """Neighbors' times, a line for each layer and scheme, a column for each number of tokens."""
    tokens = sorted({result.tokens for result in found})
    lines = [
        "| layer | scheme | " + " | ".join(f"T={number}" for number in tokens) + " |",
        "|---|---|" + "---:|" * len(tokens),
    ]
    for (layer, quant), of in groupby(found, key=lambda r: (r.layer, r.quant)):
        ratios = {result.tokens: f"{result.neighbors:.2f}" for result in of}
        values = " | ".join(ratios.get(number, "") for number in tokens)
        lines.append(f"| {layer} | {quant} | {values} |")
    return lines


def _far(found: Sequence[TimedResult]) -> list[str]:
    far = sorted((r for r in found if r.neighbors > BOUND), key=lambda r: -r.neighbors)
    return [
        f"- {r.layer} {r.quant}, {counted(r.tokens, 'token')}: {r.neighbors:.2f} x, "
        f"tiles of {r.origin}"
        for r in far
    ]


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    if args.what == "report":
        record = json.loads(args.record.read_text(encoding="utf-8"))
        rows = record["rows"]
        timed = sum(bool(row["us"]) for row in rows)
        said = {"measured": record["measured"], "timed": timed, "record": args.record.name}
        print("\n".join(report(results(rows), **said)))
        return 0
    versions = f"torch {torch.__version__} and triton {triton.__version__}"
    measured = f"{time.strftime('%Y-%m-%d')} with {versions}"

    def keep(rows: list[Row]) -> None:
        made = {"gpu": torch.cuda.get_device_name(), "measured": measured, "rows": rows}
        args.record.write_text(json.dumps(made, indent=1), encoding="utf-8")

    found = cells(args.model.split(","), args.quant.split(","))
    left = time_cells(found, args.deadline, keep)
    if left:
        print(f"{left} of {len(found)} cells have no time")
    return 1 if left else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("what", choices=("time", "report"))
    given.add_argument("record", type=Path)
    given.add_argument("--model", default=",".join(SHAPES))
    given.add_argument("--quant", default=",".join(QUANTS))
    given.add_argument("--deadline", type=float, default=1e9, help="no layer is begun later")
    return given.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
