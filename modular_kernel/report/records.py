"""Reading of benchmark records, as `mk bench --json` and `make bench` write them, from a folder."""

from dataclasses import dataclass
from pathlib import Path

from modular_kernel.errors import ConfigurationError
from modular_kernel.measure.records import SCHEMA, Report
from modular_kernel.utils import json_files


@dataclass(frozen=True)
class BenchmarkRecord:
    """A record file. name: file name without suffix. report: None if the format is unknown."""

    name: str
    report: Report | None


def read_records(folder: Path) -> tuple[BenchmarkRecord, ...]:
    """Read every *.json in `folder`, sorted by name; () if there is no such folder.

    Raises ConfigurationError for a file that is not JSON.
    """
    return tuple(BenchmarkRecord(path.stem, _read(path)) for path in sorted(folder.glob("*.json")))


def _read(path: Path) -> Report | None:
    text = path.read_text(encoding="utf-8")
    try:
        record = json_files.parse(text, allow_constants=True)
    except ValueError as error:
        raise ConfigurationError(str(path), got=str(error), need="JSON") from error
    if isinstance(record, dict) and record.get("schema") == SCHEMA:
        return Report.from_json(text)
    try:
        if isinstance(record, dict):
            return _parse_layers(record)
        return _parse_schemes(record)
    except (KeyError, TypeError, AttributeError):  # an unknown format
        return None


def _parse_layers(record: dict[str, Any]) -> Report:
    """Read the `peer` format, with a row per layer and cell; our layers are named mk_*."""
    shapes = record.get("shapes", {})
    device = record["device"]
    environment = {**device, "device": device["name"], "date": record["date"]}
    rows = [_layer_row(row, shapes.get(row["shape"], {})) for row in record["rows"] if row["us"]]
    return Report(environment, {}, with_best_peer(rows))


def _layer_row(row: dict[str, Any], shape: dict[str, Any]) -> Row:
    sizes, name = {**shape, **row}, row["peer"]
    is_fp8 = _FP8 in row.get("dtype", name)
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
        layer=display_name(name),
        origin=OURS if name.startswith(_OUR_PREFIX) else PEER,
        quant="none",
        operands=_FP8 if is_fp8 else "bf16",
        status=OK,
        us=row["us"],
        floor_us=row["floor_us"],
        over_floor=row["us"] / row["floor_us"],
        mode=row["mode"],
    )


def display_name(name: str) -> str:
    """Expand a layer name: "vllm_triton_fp8ch" becomes "vLLM Triton fp8 by channel"."""
    end = next((end for end in _SCHEMES if name.endswith(end)), "")
    layer = name.removesuffix(end)
    return _LAYERS.get(layer, layer) + _SCHEMES.get(end, "")


def _parse_schemes(record: list[Any]) -> Report:
    """Read the list format, with a row per scheme and cell, all of our layers, without floors."""
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
        for cell in record
        for scheme, us in cell["us"].items()
    ]
    return Report({}, {}, tuple(rows))
