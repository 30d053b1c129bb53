"""The table of tiles without a tuned file, from the times of a tuning."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from experts.tile_files import pair_as_json
from experts.tile_shapes import Tile, TilePair

FILE = Path(__file__).parents[1] / "tools" / "leave_one_out.py"
SIZES = {"one": (8, 2, 4096, 14336), "two": (8, 2, 4096, 7168), "far": (256, 8, 7168, 256)}
ONE, TWO = (Tile(16, n, 128, 1, 4, 4) for n in (64, 128))
ALIKE, MIXED = TilePair(ONE, ONE), TilePair(ONE, TWO)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("leave_one_out", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def line(layer: str, best: TilePair, *choices: TilePair, second: float = 30.0) -> str:
    """16 tokens: 10 us beside the products, 40 for GEMM 1, `second` for GEMM 2 by TWO."""
    experts, top_k, hidden, intermediate = SIZES[layer]

    def entry(pair: TilePair) -> dict[str, object]:
        gemm2 = second if pair.gemm2 == TWO else 50.0
        stages = {"mk::gemm1_activation": 40.0, "mk::gemm2": gemm2}
        return {**pair_as_json(pair), "us": 50.0 + gemm2, "stages": stages}

    sizes = {"experts": experts, "top_k": top_k, "hidden": hidden, "intermediate": intermediate}
    made = {"layer": layer, **sizes, "quant": "none", "tokens": 16, "best": entry(best)}
    return json.dumps({**made, "choices": [entry(pair) for pair in choices], "refused": {}})


def test_a_layer_left_out_takes_the_nearest_other_s_tiles(tool: ModuleType) -> None:
    lines = [
        line("one", ALIKE, ALIKE, MIXED),
        line("one", MIXED, ALIKE, MIXED),  # tuned again: this one counts
        line("two", ALIKE, ALIKE, MIXED, second=100.0),
        line("far", MIXED, MIXED),
    ]
    results = tool.left_out(tool.read(lines))
    assert [result.cell.layer for result in results] == ["one", "two", "far"]
    assert results[0].neighbours == pytest.approx(100 / 80)
    assert results[0].origin == "E=8, K=2, H=4096, I=7168, 16 tokens"
    assert results[1].neighbours == pytest.approx(150 / 100)
    assert results[2].origin == "regimes", "nothing is near"
    assert tool.left_out(tool.read(lines[:1]))[0].origin == "regimes"


def test_the_document(tool: ModuleType) -> None:
    lines = [line("one", MIXED, ALIKE, MIXED), line("two", ALIKE, ALIKE), line("far", ALIKE, ALIKE)]
    text = tool.report(tool.left_out(tool.read(lines)))
    assert text[0].startswith("# Tiles without a tuned file")
    total = next(row for row in text if row.startswith("| all |"))
    assert total.startswith("| all | 3 | 0 of 1, 0.0% | 1.250 |"), "the others' were not timed"
    assert "| one | none | 1.25 |" in text
    assert "| two | none | - |" in text
    assert text[-1].startswith("- one none, 16 tokens: 1.25 x with the tiles of E=8, K=2")
