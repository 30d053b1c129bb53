"""Text output of `mk demo`."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

from modular_kernel.cli import output
from modular_kernel.text import format_count

if TYPE_CHECKING:
    from modular_kernel.compatibility.support import Verdict

_NEXT_COMMANDS = (
    ("mk check --model mixtral-8x7b", "which pairings support a model, and why others do not"),
    ("mk test --experts-type TorchExperts", "verify pairings against float64"),
    ("mk compose", "choose the fastest pairings"),
)


@dataclass(frozen=True)
class DemoRow:
    """Result of one model with one pairing.

    pairing: the pairing of the kernels that ran; "" if none did.
    difference: maximum absolute error of a logit.
    bound: maximum `difference` that is allowed.
    equal_tokens: number of decoded tokens that are the same as with the experts of transformers;
        None if no tokens were decoded.
    decoded_tokens: number of decoded tokens.
    """

    model: str
    dtype: str
    pairing: str
    difference: float
    bound: float
    equal_tokens: int | None
    decoded_tokens: int
    seconds: float

    @property
    def ok(self) -> bool:
        is_close = self.difference <= self.bound
        is_decoding_equal = self.equal_tokens in (None, self.decoded_tokens)
        return is_close and is_decoding_equal and self.pairing != ""


@dataclass(frozen=True)
class CheckpointRow:
    """Result of one quantized checkpoint with one pairing.

    model: model family.
    stored: format on disk.
    quant: scheme after loading.
    error: error of the layer relative to float64.
    bound: maximum `error` that is allowed.
    bytes_read: bytes of tensors read from disk.
    """

    model: str
    stored: str
    quant: str
    pairing: str
    error: float
    bound: float
    bytes_read: int
    seconds: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound


def print_demo(
    rows: Sequence[DemoRow],
    checkpoints: Sequence[CheckpointRow],
    seconds: float,
    rates: Mapping[str, float],
    verdicts: "Sequence[Verdict]",
    interpreted_parts: Sequence[str],
) -> None:
    """Print the results of the demo.

    rows: results of the models.
    checkpoints: results of the quantized checkpoints.
    seconds: total time of all runs.
    rates: tokens per second of one model, by experts implementation.
    interpreted_parts: experts parts that ran in Triton's interpreter.
    """
    models = tuple(dict.fromkeys(row.model for row in rows))
    pairings = dict.fromkeys(row.pairing or "no kernel ran" for row in rows)
    cells = [
        (pairing, *(_format_cell([r for r in rows if (r.pairing or "no kernel ran", r.model) == k])
                    for k in ((pairing, model) for model in models)))
        for pairing in pairings
    ]  # fmt: skip
    output.print_table(("logit error / bound", *models), cells)
    for row in rows:
        if not row.ok:
            tokens = f"{row.equal_tokens} of {row.decoded_tokens} tokens equal"
            error = f"logit error {row.difference:.2e}, bound {row.bound:.2e}"
            output.print_line(
                f"FAILED: {row.model} {row.dtype} on {row.pairing}: {error}; {tokens}"
            )
    _print_checkpoints(checkpoints)
    passed = sum(row.ok for row in rows)
    equal = sum(row.equal_tokens or 0 for row in rows)
    decoded = sum(row.decoded_tokens for row in rows)
    decoding = f"; {equal} of {decoded} greedily decoded tokens are equal" if decoded else ""
    output.print_line(
        f"{passed} of {len(rows)} runs agree with transformers' own experts, "
        f"in {seconds:.0f} s{decoding}"
    )
    correct = sum(row.ok for row in checkpoints)
    output.print_line(f"{correct} of {len(checkpoints)} quantized layers agree with float64")
    if rates:
        speeds = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
        output.print_line(f"tokens per second of a small mixtral: {speeds}")
    output.print_interpreted_layers(interpreted_parts)
    valid = sum(verdict.ok for verdict in verdicts)
    output.print_line(
        f"{valid} of {format_count(len(verdicts), 'pairing')} are valid on this machine for "
        "a small layer"
    )
    output.print_line(f"\nnext{_describe_script()}:")
    for command, description in _NEXT_COMMANDS:
        output.print_line(f"  {command:37} {description}")


def _describe_script() -> str:
    """Return the path of `mk` in parentheses if it is not on PATH, as in `make demo`."""
    script = Path(sys.executable).with_name("mk")
    return f" (mk is {script})" if which("mk") is None and script.exists() else ""


def _print_checkpoints(rows: Sequence[CheckpointRow]) -> None:
    """Print the table of checkpoints, with one column per experts part."""
    row_by_key = {(row.model, row.stored, row.pairing): row for row in rows}
    pairings = dict.fromkeys(row.pairing for row in rows)
    cells = []
    for model, stored in dict.fromkeys((row.model, row.stored) for row in rows):
        model_rows = [row_by_key.get((model, stored, pairing)) for pairing in pairings]
        ratios = [
            "-" if row is None else _format_ratio(row.ok, row.error, row.bound)
            for row in model_rows
        ]
        cells.append((f"{model} {stored.removeprefix(f'{model[:5]} ')}", *ratios))
    experts = (pairing.rpartition(" x ")[2] for pairing in pairings)
    output.print_table(("quantized checkpoint", *experts), cells)
    for row in rows:
        if not row.ok:
            error = f"relative error {row.error:.2e}, bound {row.bound:.2e}"
            output.print_line(f"FAILED: {row.model} {row.stored} on {row.pairing}: {error}")


def _format_ratio(ok: bool, error: float, bound: float) -> str:
    return f"ok {error / bound if bound else 0.0:.2f}" if ok else "FAILED"


def _format_cell(rows: Sequence[DemoRow]) -> str:
    """Return "ok" with the maximum ratio of error to bound, or "FAILED"."""
    if not rows:
        return "-"
    worst = max(rows, key=lambda row: row.difference / row.bound if row.bound else 0.0)
    return _format_ratio(all(row.ok for row in rows), worst.difference, worst.bound)
