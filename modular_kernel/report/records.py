"""Benchmark records as they lie in a folder, each read into one `bench.rows.Report`.

Three forms are known: what `mk bench --json` writes; rows of layers named by `peer`; and a list
of cells with the time of each scheme. A file of another form is kept by its name alone.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.measure.records import OK, OURS, PEER, SCHEMA, Report, Row, ranked
from modular_kernel.utils import json_files

_OUR_PREFIX = "mk_"
_NARROW = "fp8"
# What the layers of such rows are called by everybody else.
_LAYERS = {
    "mk_triton": "TritonExperts",
    "mk_batched_triton": "BatchedTritonExperts",
    "triton_kernels_kn": "triton_kernels",
    "vllm_triton": "vLLM Triton",
    "vllm_cutlass": "vLLM CUTLASS",
    "vllm_deepgemm": "vLLM DeepGEMM",
}
_SCHEMES = {"_bf16": "", "_fp8ch": " fp8 by channel", "_fp8blk": " fp8 by block"}


@dataclass(frozen=True)
class BenchmarkRecord:
    """name: of the file without suffix. report: None if its form is not known."""

    name: str
    report: Report | None


def read_records(folder: Path) -> tuple[BenchmarkRecord, ...]:
    """Every *.json in `folder`, by name; none if there is no such folder.

    ConfigurationError for a file that is no JSON.
    """
    return tuple(BenchmarkRecord(path.stem, _read(path)) for path in sorted(folder.glob("*.json")))


def _read(path: Path) -> Report | None:
    text = path.read_text(encoding="utf-8")
    try:
        found = json_files.parse(text, constants=True)
    except ValueError as error:
        raise ConfigurationError(str(path), got=str(error), need="JSON") from error
    if isinstance(found, dict) and found.get("schema") == SCHEMA:
        return Report.from_json(text)
    try:
        if isinstance(found, dict):
            return _of_layers(found)
        return _of_schemes(found)
    except (KeyError, TypeError, AttributeError):  # another form
        return None


def _of_layers(found: dict[str, Any]) -> Report:
    """Read a row for each layer in a cell; ours are named mk_*."""
    shapes = found.get("shapes", {})
    device = found["device"]
    environment = {**device, "device": device["name"], "date": found["date"]}
    rows = [_layer_row(row, shapes.get(row["shape"], {})) for row in found["rows"] if row["us"]]
    return Report(environment, {}, ranked(rows))


def _layer_row(row: dict[str, Any], shape: dict[str, Any]) -> Row:
    sizes, name = {**shape, **row}, row["peer"]
    narrow = _NARROW in row.get("dtype", name)
    return Row(
        shape=row["shape"],
        experts=sizes["E"],
        top_k=sizes["k"],
        hidden=sizes["H"],
        intermediate=sizes["I"],
        tokens=row["tokens"],
        dtype="bfloat16",
        problem="",
        routing=row.get("routing", "uniform"),
        layer=readable(name),
        origin=OURS if name.startswith(_OUR_PREFIX) else PEER,
        quant="none",
        operands=_NARROW if narrow else "bf16",
        status=OK,
        us=row["us"],
        floor_us=row["floor_us"],
        over_floor=row["us"] / row["floor_us"],
        mode=row["mode"],
    )


def readable(name: str) -> str:
    """Return a layer's name in words: "vllm_triton_fp8ch" is "vLLM Triton fp8 by channel"."""
    end = next((end for end in _SCHEMES if name.endswith(end)), "")
    layer = name.removesuffix(end)
    return _LAYERS.get(layer, layer) + _SCHEMES.get(end, "")


def _of_schemes(found: list[Any]) -> Report:
    """Read a row for each scheme in a cell, all of them ours, without a floor."""
    rows = [
        Row(
            shape=cell["shape"],
            experts=0,
            top_k=0,
            hidden=0,
            intermediate=0,
            tokens=cell["tokens"],
            dtype="bfloat16",
            problem="",
            routing="uniform",
            layer="bf16" if scheme == "none" else scheme,
            origin=OURS,
            quant="none",
            operands="by scheme",
            status=OK,
            us=us,
            mode="graph",
        )
        for cell in found
        for scheme, us in cell["us"].items()
    ]
    return Report({}, {}, tuple(rows))
