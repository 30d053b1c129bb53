"""How good tiles are for a layer that has no tuned file: every tuned layer is left out in turn.

    mk tune --model all --times times.jsonl ...          # on a GPU
    python tools/leave_one_out.py times.jsonl "2026-11-20 with ..." > h200-leave-one-out.md

A layer that is left out takes the tiles that the nearest other layers were tuned to
(experts/tile_neighbours.py), and then those of the regimes alone (experts/tile_regimes.py). Both
are compared with its own tuned tiles, by the times of its own tuning: a pair of tiles takes what
its two products took there, and what a call takes beside them on its path and row block.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

sys.path.insert(0, str(Path(__file__).parents[1]))

from experts.tile_files import Recipe, TunedFor, pair_from_json
from experts.tile_neighbours import Known, borrow
from experts.tile_regimes import regimes
from experts.tile_search import Additive
from experts.tile_shapes import Device, TilePair
from modular_kernel.tunable import Took
from modular_kernel.types import Problem

BOUND = 1.20
_H200 = Device("NVIDIA H200", boxes=True)


@dataclass(frozen=True)
class Cell:
    """One number of tokens of one layer, as it was tuned. took: by pair of tiles."""

    layer: str
    problem: Problem
    best: TilePair
    took: Mapping[TilePair, Took]


@dataclass(frozen=True)
class Result:
    """Times over the tuned one; None where a tile was not timed. origin: whose tiles."""

    cell: Cell
    neighbours: float | None
    regimes: float | None
    origin: str


def read(lines: Iterable[str]) -> list[Cell]:
    """The cells of a record of `mk tune --times`; of a cell tuned twice the last."""
    cells = {}
    for line in lines:
        one = json.loads(line)
        sizes = (one[name] for name in ("tokens", "hidden", "intermediate", "experts", "top_k"))
        problem = Problem(*sizes, quant=one["quant"])
        took = {
            pair_from_json(choice, "choice"): Took(choice["us"], choice["stages"])
            for choice in one["choices"]
        }
        best = pair_from_json(one["best"], "best")
        cells[one["layer"], problem] = Cell(one["layer"], problem, best, took)
    return list(cells.values())


def left_out(cells: Sequence[Cell]) -> list[Result]:
    """Every cell with its layer left out."""
    layers: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        layers.setdefault((cell.layer, cell.problem.quant), []).append(cell)
    known = {key: _known(of) for key, of in layers.items()}
    results = []
    for key, of in layers.items():
        others = [k for other, k in known.items() if other[1] == key[1] and other[0] != key[0]]
        results += [_result(cell, others) for cell in of]
    return results


def _known(cells: Sequence[Cell]) -> Known:
    """What the layer's file says."""
    problem = cells[0].problem
    ordered = sorted(cells, key=lambda cell: cell.problem.tokens)
    pairs = [(cell.problem.tokens, cell.best) for cell in ordered]
    recipe = Recipe(
        origin=cells[0].layer,
        gemm1=tuple((tokens, pair.gemm1) for tokens, pair in pairs),
        gemm2=tuple((tokens, pair.gemm2) for tokens, pair in pairs),
        paths=tuple((tokens, pair.path) for tokens, pair in pairs),
        fused_columns=False,
        strict=True,
        tuned_for=TunedFor("TritonExperts", problem.hidden, problem.top_k),
    )
    return Known(problem.e, problem.top_k, problem.hidden, problem.intermediate, recipe)


def _result(cell: Cell, others: Sequence[Known]) -> Result:
    tokens, model = cell.problem.tokens, Additive(cell.took)
    tuned = model.seconds(cell.best)

    def over(pair: TilePair) -> float | None:
        try:
            return model.seconds(pair) / tuned
        except KeyError:
            return None

    alone = regimes(cell.problem, _H200)
    (lent,) = borrow(others, cell.problem, _H200, alone, [tokens])
    return Result(cell, over(lent.pair), over(alone.choose(tokens)), lent.origin)


def report(results: Sequence[Result], measured: str = "") -> list[str]:
    """A document in Markdown. measured: when, and with what."""
    quants = list(dict.fromkeys(result.cell.problem.quant for result in results))
    lines = [
        "# Tiles without a tuned file, on one H200",
        "",
        "Each layer is left out in turn, and takes the tiles that the nearest other layers were",
        "tuned to (where one is near), or those of the regimes alone. Times are over those of its",
        "own tuned tiles, by the times of its own tuning (`tools/leave_one_out.py`). `within`",
        f"counts cells (a layer and a number of tokens) within {BOUND:.2f} x, of those whose tiles",
        "were all timed.",
        *([f"Measured {measured}."] if measured else []),
        "",
        "| scheme | cells | neighbours: within | mean | worst | regimes: within | mean | worst |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for quant in [*quants, "all"]:
        of = [r for r in results if quant in ("all", r.cell.problem.quant)]
        cells = _summary([r.neighbours for r in of]), _summary([r.regimes for r in of])
        lines.append(f"| {quant} | {len(of)} | {cells[0]} | {cells[1]} |")
    lines += ["", *_by_tokens(results), "", *_far(results)]
    return lines


def _summary(ratios: Sequence[float | None]) -> str:
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return "- | - | -"
    within = sum(ratio <= BOUND for ratio in known)
    share = f"{within} of {len(known)}, {within / len(known):.1%}"
    return f"{share} | {geometric_mean(known):.3f} | {max(known):.2f}"


def _by_tokens(results: Sequence[Result]) -> list[str]:
    """Neighbours' times, a line for each layer and scheme, a column for each number of tokens."""
    tokens = sorted({result.cell.problem.tokens for result in results})
    lines = [
        "| layer | scheme | " + " | ".join(f"T={number}" for number in tokens) + " |",
        "|---|---|" + "---:|" * len(tokens),
    ]
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for result in results:
        problem = result.cell.problem
        text = "-" if result.neighbours is None else f"{result.neighbours:.2f}"
        rows.setdefault((result.cell.layer, problem.quant), {})[problem.tokens] = text
    for (layer, quant), cells in rows.items():
        values = " | ".join(cells.get(number, "") for number in tokens)
        lines.append(f"| {layer} | {quant} | {values} |")
    return lines


def _far(results: Sequence[Result]) -> list[str]:
    far = [r for r in results if r.neighbours is not None and r.neighbours > BOUND]
    far.sort(key=lambda result: -(result.neighbours or 0))
    return [
        f"- {r.cell.layer} {r.cell.problem.quant}, {r.cell.problem.tokens} tokens: "
        f"{r.neighbours:.2f} x with the tiles of {r.origin}"
        for r in far
    ]


if __name__ == "__main__":
    record = Path(sys.argv[1]).read_text(encoding="utf-8")
    print("\n".join(report(left_out(read(record.splitlines())), " ".join(sys.argv[2:]))))
