"""Build the timing record that ships with `compose` from records of tools/check_choice.py.

    python tools/build_prior.py

Writes modular_kernel/select/prior.json, whose format modular_kernel/select/shipped_record.py
describes. For the same layer, scheme and number of tokens, ratios of newer records replace older
ones. --check writes nothing, and exits with 1 if the file is out of date.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from modular_kernel.cli.presets import SHAPES
from modular_kernel.select.shipped_record import FILE, SCHEMA, parse

RECORDS = ("h200-choice", "h200-choice-vendors", "h200-choice-schemes")  # oldest first
DEFAULTS = tuple(
    f"MoEPrepareAndFinalizeNoEP x {name}" for name in ("TritonExperts", "TorchExperts")
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = build()
    parse(text)
    if parser.parse_args().check:
        return int(FILE.read_text(encoding="ascii") != text)
    FILE.write_text(text, encoding="ascii")
    return 0


def build() -> str:
    """Return the contents of prior.json."""
    ratios_by_key: dict[tuple, dict[str, float]] = {}
    for name in RECORDS:
        record = json.loads((FILE.with_name("data") / f"{name}.json").read_text())
        for cell in record["cells"]:
            ratios_by_key.setdefault(_make_key(cell), {}).update(_compute_ratios(cell))
    pairs = list(dict.fromkeys(pair for ratios in ratios_by_key.values() for pair in ratios))
    rows = [
        json.dumps([*key, [ratios.get(pair) for pair in pairs]])
        for (*key, _), ratios in sorted(ratios_by_key.items())
    ]
    header = json.dumps({"schema": SCHEMA, "device": "NVIDIA H200", "arch": [9, 0]})
    names = _join_lines(json.dumps(pair.split(" x ")) for pair in pairs)
    measurements = _join_lines(rows)
    return f'{header[:-1]},\n "pairs": [\n{names}\n ],\n "measurements": [\n{measurements}\n ]}}\n'


def _join_lines(values) -> str:
    return ",\n".join(f"  {value}" for value in values)


def _make_key(cell) -> tuple[str, float, int, str]:
    shape = SHAPES[cell["shape"]]
    rows = cell["tokens"] * shape["top_k"] / shape["experts"]
    return cell["quant"], rows, shape["hidden"] * shape["intermediate"], cell["shape"]


def _compute_ratios(cell) -> dict[str, float]:
    """Return the times of a cell's pairings, divided by the time of the default pairing."""
    times = {pair: us for pair, us, *_ in cell["outcomes"] if us}
    default = next(times[pair] for pair in DEFAULTS if pair in times)
    return {pair: round(us / default, 3) for pair, us in times.items()}


if __name__ == "__main__":
    sys.exit(main())
