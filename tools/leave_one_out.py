"""Measure the tiles that a tuned layer would get without its own tuned file.

    python tools/leave_one_out.py time record.json                # on the GPU of the tuned files
    python tools/leave_one_out.py report record.json > leave-one-out.md

Without its tuned file, a layer uses the launches of the nearest other tuned layers (nearest.py in
experts/triton/configs), or those of the heuristics (heuristics.py in the same folder). For each
tuned layer, the tool verifies and times planned calls with its own tuned tiles, with the tiles of
its neighbors, and with those of the heuristics. Calls are timed interleaved, like the finalists of
the tuner (modular_kernel/tuning/measurement.py). If all tiles are the same, nothing is timed.
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
from experts.triton.configs.heuristics import make_heuristic_steps
from experts.triton.configs.lookup import PACKAGED, ConfigLookup, triton_subfolder
from experts.triton.configs.nearest import depends_on_skew
from experts.triton.launch_config import Device, MoEConfig
from experts.triton.paths import ALL_PATHS
from modular_kernel.catalog import this_machine
from modular_kernel.cli.presets import SHAPES
from modular_kernel.spec.problem import Problem
from modular_kernel.text import format_count
from modular_kernel.tuning.compilation import Compiler, TunedPair
from modular_kernel.tuning.measurement import DeviceBenchmarker

BOUND = 1.20
CONFIGS = Path(__file__).parents[1] / "experts" / "triton" / "configs" / "data"
TRITON = "3.6.0"
H200 = Device("NVIDIA H200", tma=True)
QUANTS = ("none", "fp8_w8a8_channel", "fp8_w8a8_block", "mxfp4_w4a16")
TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
Row = dict[str, object]  # a row of a record
PAIR = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")

_INTRO = """# Tiles without a tuned file, on one H200

Without its tuned file, a layer uses the launches of the nearest other tuned layers ("neighbors").
If no tuned layer is near enough, it uses those of the heuristics ("heuristics"). Whole layers with
these tiles and with the layer's own tuned tiles were verified against float64 and timed
interleaved, with uniform routing and weights not in the cache (`tools/leave_one_out.py`). A case is
a layer with a number of tokens. A ratio is the time of a case divided by its time with the tuned
tiles. `within` counts the cases with a ratio of at most {bound:.2f}.
The tiles differ in {timed} of {cases} cases. Only these cases were timed; the others have a ratio
of 1. A ratio below 1 means that tiles other than the tuned ones are the fastest with the present
kernels. The heuristics were chosen from the results of all tuned layers, including the layers
measured here. Few layers are tuned for mxfp4, so the heuristics for mxfp4 depend on few results.
Measured {measured}.
Raw rows: `{record}`."""


@dataclass(frozen=True)
class TileCase:
    """A layer at one number of tokens, with its tiles from each source.

    tuned: tiles from the layer's file.
    neighbors: tiles from the files of the nearest layers.
    heuristics: tiles from the heuristics.
    origin: the layer that the neighbors' tiles come from; "heuristics" without a near layer.
    """

    layer: str
    problem: Problem
    tuned: MoEConfig
    neighbors: MoEConfig
    heuristics: MoEConfig
    origin: str

    @property
    def choices(self) -> list[MoEConfig]:
        """The distinct tiles."""
        return list(dict.fromkeys((self.tuned, self.neighbors, self.heuristics)))

    @property
    def differs(self) -> bool:
        return len(self.choices) > 1

    def record(self, seconds: Mapping[MoEConfig, float]) -> Row:
        """Return a row of the record. Its "us" has microseconds by source; {} if not timed."""
        kinds = ("tuned", "neighbors", "heuristics")
        times = {kind: seconds.get(getattr(self, kind)) for kind in kinds}
        us = {kind: round(s * 1e6, 2) for kind, s in times.items() if s is not None}
        problem = self.problem
        row = {
            "layer": self.layer,
            "quant": problem.quant,
            "tokens": problem.tokens,
            "origin": self.origin,
        }
        return {**row, "us": us}


def cases(
    layers: Iterable[str] = SHAPES,
    quants: Iterable[str] = QUANTS,
    tokens: Sequence[int] = TOKENS,
    configs: Path = CONFIGS,
) -> list[TileCase]:
    """Return every case of the layers that have a tuned file in `configs`."""
    layer_cases = []
    for quant in quants:
        for layer in layers:
            problem = Problem(tokens=max(tokens), quant=quant, **SHAPES[layer])
            layer_cases += _list_layer_cases(layer, problem, tokens, configs)
    return layer_cases


def _list_layer_cases(
    layer: str, problem: Problem, tokens: Sequence[int], configs: Path
) -> list[TileCase]:
    files = sorted((configs / triton_subfolder(TRITON)).glob("E=*.json"))
    key = ConfigKey.from_problem(problem, H200.name)
    other_files = [path for path in files if ConfigKey.parse(path.name) != key]
    if len(other_files) == len(files):
        return []
    all_sources = ConfigLookup(((PACKAGED, configs),), H200, TRITON).find_source(problem)
    with tempfile.TemporaryDirectory() as folder:
        subfolder = Path(folder) / triton_subfolder(TRITON)
        subfolder.mkdir()
        for path in other_files:
            (subfolder / path.name).symlink_to(path.resolve())
        other_sources = ConfigLookup(((PACKAGED, Path(folder)),), H200, TRITON).find_source(problem)
    heuristics, paths = (
        make_heuristic_steps(problem, H200),
        [p.name for p in ALL_PATHS if p.supports(problem, H200)],
    )
    layer_cases = []
    for count in tokens:
        origin = (
            other_sources.step_origins[other_sources.steps.find_step(count)]
            if other_sources.step_origins and not depends_on_skew(problem, count)
            else "heuristics"
        )
        tuned, neighbors = (
            source.launch_steps(problem, H200, paths).choose(count)
            for source in (all_sources, other_sources)
        )
        problem_with_tokens = problem.with_tokens(count)
        layer_cases.append(
            TileCase(layer, problem_with_tokens, tuned, neighbors, heuristics.choose(count), origin)
        )
    return layer_cases


def time_cases(
    cases_to_time: Sequence[TileCase], time_limit_s: float, write_rows: Callable[[list[Row]], None]
) -> int:
    """Time the cases with different tiles on this GPU. Returns how many cases have no result.

    A case has no result if some of its tiles compute wrong outputs, or if its layer was not started
    within the time limit.

    time_limit_s: number of seconds after which no layer is started.
    write_rows: called after each layer with all rows so far.
    """
    pair, rows, num_missing = TunedPair(*PAIR, this_machine()), list[Row](), 0
    deadline = time.monotonic() + time_limit_s
    with Compiler(max(1, (os.cpu_count() or 2) - 1)) as compiler:
        for case in cases_to_time:  # compile all layers in advance, in the order of timing
            if case.differs:
                compiler.submit(
                    pair, pair.make_search_space(case.problem), case.problem, case.choices
                )
        for _, group in groupby(cases_to_time, key=lambda case: (case.layer, case.problem.quant)):
            group_cases = list(group)
            is_late = time.monotonic() > deadline and any(case.differs for case in group_cases)
            timed = [] if is_late else _time_layer(group_cases, pair, compiler)
            num_missing += len(group_cases) - len(timed)
            rows += timed
            write_rows(rows)
    return num_missing


def _time_layer(layer_cases: Sequence[TileCase], pair: TunedPair, compiler: Compiler) -> list[Row]:
    """Return the rows of one layer's cases, without cases in which tiles compute wrong results."""
    rows = [case.record({}) for case in layer_cases if not case.differs]
    token_counts = [case.problem.tokens for case in layer_cases if case.differs]
    if not token_counts:
        return rows
    largest = layer_cases[0].problem.with_tokens(max(token_counts))
    benchmarker = DeviceBenchmarker(pair, largest, compiler, tokens=token_counts, target_ms=40.0)
    for case in (case for case in layer_cases if case.differs):
        times = benchmarker.compare(case.problem.tokens, case.choices)
        seconds = {
            tiles: seconds_or_error
            for tiles in case.choices
            if isinstance(seconds_or_error := times[tiles], float)
        }
        if len(seconds) == len(case.choices):
            rows.append(case.record(seconds))
        else:
            print(f"{case.layer}, {case.problem}: {times}", file=sys.stderr)
    return rows


@dataclass(frozen=True)
class TimedResult:
    """The neighbors' and the heuristics' time, divided by the tuned time."""

    layer: str
    quant: str
    tokens: int
    neighbors: float
    heuristics: float
    origin: str


def compute_results(rows: Iterable[Row]) -> list[TimedResult]:
    """Compute the ratios of a record's rows. Rows without times have equal tiles, so a ratio of 1.

    The results of a layer and scheme are adjacent, and sorted by number of tokens. Layers have the
    order of the record.
    """
    timed = []
    for row in rows:
        us = row["us"]
        assert isinstance(us, dict)
        ratios = {
            kind: us[kind] / us["tuned"] if us else 1.0 for kind in ("neighbors", "heuristics")
        }
        key = str(row["layer"]), str(row["quant"]), int(str(row["tokens"]))
        timed.append(
            TimedResult(*key, ratios["neighbors"], ratios["heuristics"], str(row["origin"]))
        )
    order = {(r.quant, r.layer): index for index, r in reversed(list(enumerate(timed)))}
    return sorted(timed, key=lambda r: (order[r.quant, r.layer], r.tokens))


def format_report(timed_results: Sequence[TimedResult], **intro_values: object) -> list[str]:
    """Return the lines of the Markdown report.

    intro_values: measured (date and versions), timed (number of cases with different tiles) and
        record (file name).
    """
    quants = list(dict.fromkeys(result.quant for result in timed_results))
    lines = [
        *_INTRO.format(bound=BOUND, cases=len(timed_results), **intro_values).splitlines(),
        "",
        "| scheme | cases | neighbors: within | mean | worst | heuristics: within | mean | worst |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for quant in [*quants, "all"]:
        matching = [r for r in timed_results if quant in ("all", r.quant)]
        summaries = (
            _format_summary([r.neighbors for r in matching]),
            _format_summary([r.heuristics for r in matching]),
        )
        lines.append(f"| {quant} | {len(matching)} | {summaries[0]} | {summaries[1]} |")
    return [*lines, "", *_format_table_by_tokens(timed_results), "", *_list_outliers(timed_results)]


def _format_summary(ratios: Sequence[float]) -> str:
    within = sum(ratio <= BOUND for ratio in ratios)
    fraction = f"{within} of {len(ratios)}, {within / len(ratios):.1%}"
    return f"{fraction} | {geometric_mean(ratios):.3f} | {max(ratios):.2f}"


def _format_table_by_tokens(timed_results: Sequence[TimedResult]) -> list[str]:
    """Return a table of the neighbors' ratios, by layer and scheme, and by number of tokens."""
    tokens = sorted({result.tokens for result in timed_results})
    lines = [
        "| layer | scheme | " + " | ".join(f"T={number}" for number in tokens) + " |",
        "|---|---|" + "---:|" * len(tokens),
    ]
    for (layer, quant), group in groupby(timed_results, key=lambda r: (r.layer, r.quant)):
        ratios = {result.tokens: f"{result.neighbors:.2f}" for result in group}
        values = " | ".join(ratios.get(number, "") for number in tokens)
        lines.append(f"| {layer} | {quant} | {values} |")
    return lines


def _list_outliers(timed_results: Sequence[TimedResult]) -> list[str]:
    outliers = sorted((r for r in timed_results if r.neighbors > BOUND), key=lambda r: -r.neighbors)
    return [
        f"- {r.layer} {r.quant}, {format_count(r.tokens, 'token')}: {r.neighbors:.2f} x, "
        f"tiles of {r.origin}"
        for r in outliers
    ]


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse_arguments(argv)
    if args.what == "report":
        record = json.loads(args.record.read_text(encoding="utf-8"))
        rows = record["rows"]
        timed = sum(bool(row["us"]) for row in rows)
        values = {"measured": record["measured"], "timed": timed, "record": args.record.name}
        print("\n".join(format_report(compute_results(rows), **values)))
        return 0
    versions = f"torch {torch.__version__} and triton {triton.__version__}"
    measured = f"{time.strftime('%Y-%m-%d')} with {versions}"

    def write_record(rows: list[Row]) -> None:
        record_content = {"gpu": torch.cuda.get_device_name(), "measured": measured, "rows": rows}
        args.record.write_text(json.dumps(record_content, indent=1), encoding="utf-8")

    all_cases = cases(args.layers.split(","), args.quant.split(","))
    num_missing = time_cases(all_cases, args.time_limit, write_record)
    if num_missing:
        print(f"{num_missing} of {len(all_cases)} cases have no time")
    return 1 if num_missing else 0


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("time", "report"))
    parser.add_argument("record", type=Path)
    parser.add_argument("--layers", default=",".join(SHAPES))
    parser.add_argument("--quant", default=",".join(QUANTS))
    parser.add_argument(
        "--time-limit", type=float, default=1e9, help="seconds after which no layer is started"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
