"""The record of layer times that ships with the package, as a benchmark report.

`mk report` plots it if there are no other records, as in an installed wheel.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modular_kernel.measure.records import OK, OURS, PEER, Report, Row
from modular_kernel.utils import json_files

_FILE = Path(__file__).parents[1] / "perf_model" / "data" / "h200-layers.json"
_MAX_BYTES = 1 << 24
RECORD_NAME = _FILE.stem


@dataclass(frozen=True)
class _Layer:
    """A layer of the record.

    name: its name in plots.
    origin: see measure.records.Row.
    """

    name: str
    quant: str
    origin: str


_VLLM, _OURS = "vLLM Triton", "TritonExperts"
_LAYERS = {
    "mk_triton": _Layer(_OURS, "none", OURS),
    "mk_triton_fp8ch": _Layer(_OURS, "fp8_w8a8_channel", OURS),
    "mk_triton_fp8blk": _Layer(_OURS, "fp8_w8a8_block", OURS),
    "vllm_triton_bf16": _Layer(_VLLM, "none", PEER),
    "vllm_triton_fp8ch": _Layer(_VLLM, "fp8_w8a8_channel", PEER),
    "vllm_triton_fp8blk": _Layer(_VLLM, "fp8_w8a8_block", PEER),
    "triton_kernels_kn": _Layer("triton_kernels", "none", PEER),
}


def load_shipped_report() -> Report:
    """Return the times of layers on one H200, all measured in one run."""
    record = json_files.parse(json_files.read_file(_FILE, _MAX_BYTES))
    rows = [_make_row(row, record["shapes"][row["shape"]]) for row in record["rows"]]
    device = record["device"]
    environment = {
        "device": device["name"],
        "date": record["date"],
        "torch": device["torch"],
        "triton": device["triton"],
    }
    return Report(environment, record["peaks"], tuple(rows))


def _make_row(row: Any, shape: Any) -> Row:
    layer = _LAYERS[row["peer"]]
    return Row(
        shape=row["shape"],
        experts=shape["E"],
        top_k=shape["k"],
        hidden=shape["H"],
        intermediate=shape["I"],
        tokens=row["tokens"],
        dtype="bfloat16",
        problem="",
        routing="uniform",
        layer=layer.name,
        origin=layer.origin,
        quant=layer.quant,
        operands="bf16" if layer.quant == "none" else "fp8",
        status=OK,
        us=row["us"],
        mode=row["mode"],
        floor_us=row["floor_us"],
    )
