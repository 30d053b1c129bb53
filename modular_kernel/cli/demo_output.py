"""Text output of `mk demo`: tables of models and pairings, a summary, speeds, and next steps."""

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
    ("mk check --model mixtral-8x7b", "which pairs serve a model, and why not"),
    ("mk test --experts-type TorchExperts", "verify pairs with a float64 oracle"),
    ("mk compose", "time the valid pairs, choose the fastest"),
)


@dataclass(frozen=True)
class DemoRow:
    """Result of one model with one pairing.

    pairing: the pairing of the kernels that ran; "" if none did. difference: maximum absolute error
    of a logit. bound: the maximum that is allowed. decoded_tokens: number of tokens decoded.
    equal_tokens: those equal to the tokens of transformers' experts; None if none were decoded.
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
        close = self.difference <= self.bound
        same = self.equal_tokens in (None, self.decoded_tokens)
        return close and same and self.pairing != ""


@dataclass(frozen=True)
class CheckpointRow:
    """Result of one quantized checkpoint with one pairing.

    model: model family. stored: format on disk. quant: scheme after loading. error: relative error
    of the layer compared with float64. bound: the maximum that is allowed. bytes_read: bytes of
    tensors read from disk.
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

    checkpoints: rows of the quantized checkpoints. seconds: total time of all rows. rates: tokens
    per second of one model, by experts implementation. interpreted_parts: experts parts that ran in
    Triton's interpreter.
    """
    models = tuple(dict.fromkeys(row.model for row in rows))
    pairings = dict.fromkeys(row.pairing or "no kernel ran" for row in rows)
    cells = [
        (pairing, *(_cell([r for r in rows if (r.pairing or "no kernel ran", r.model) == at])
                    for at in ((pairing, model) for model in models)))
        for pairing in pairings
    ]  # fmt: skip
    output.table(("logit error / bound", *models), cells)
    for row in rows:
        if not row.ok:
            tokens = f"{row.equal_tokens} of {row.decoded_tokens} tokens equal"
            error = f"logit error {row.difference:.2e}, bound {row.bound:.2e}"
            output.line(f"FAILED: {row.model} {row.dtype} on {row.pairing}: {error}; {tokens}")
    _print_checkpoints(checkpoints)
    passed = sum(row.ok for row in rows)
    equal = sum(row.equal_tokens or 0 for row in rows)
    decoded = sum(row.decoded_tokens for row in rows)
    text = f"; {equal} of {decoded} greedily decoded tokens are equal" if decoded else ""
    output.line(
        f"{passed} of {len(rows)} runs agree with transformers' own experts, "
        f"in {seconds:.0f} s{text}"
    )
    exact = sum(row.ok for row in checkpoints)
    output.line(f"{exact} of {len(checkpoints)} quantized layers agree with float64")
    if rates:
        speeds = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
        output.line(f"tokens per second of a small mixtral: {speeds}")
    output.note_interpreted(interpreted_parts)
    valid = sum(verdict.ok for verdict in verdicts)
    output.line(
        f"{valid} of {format_count(len(verdicts), 'pair')} are valid here for a small layer"
    )
    output.line(f"\nnext{_script_note()}:")
    for command, description in _NEXT_COMMANDS:
        output.line(f"  {command:37} {description}")


def _script_note() -> str:
    """Return a note with the path of `mk` if it is not on PATH, as in `make demo`."""
    script = Path(sys.executable).with_name("mk")
    return f" (mk is {script})" if which("mk") is None and script.exists() else ""


def _print_checkpoints(rows: Sequence[CheckpointRow]) -> None:
    """Print the table of checkpoints, with a column per experts part to fit narrow terminals."""
    by_key = {(row.model, row.stored, row.pairing): row for row in rows}
    pairings = dict.fromkeys(row.pairing for row in rows)
    cells = []
    for model, stored in dict.fromkeys((row.model, row.stored) for row in rows):
        group = [by_key.get((model, stored, pairing)) for pairing in pairings]
        shown = [
            "-" if row is None else _format_ratio(row.ok, row.error, row.bound) for row in group
        ]
        cells.append((f"{model} {stored.removeprefix(f'{model[:5]} ')}", *shown))
    experts = (pairing.rpartition(" x ")[2] for pairing in pairings)
    output.table(("quantized checkpoint", *experts), cells)
    for row in rows:
        if not row.ok:
            error = f"relative error {row.error:.2e}, bound {row.bound:.2e}"
            output.line(f"FAILED: {row.model} {row.stored} on {row.pairing}: {error}")


def _format_ratio(ok: bool, error: float, bound: float) -> str:
    return f"ok {error / bound if bound else 0.0:.2f}" if ok else "FAILED"


def _cell(rows: Sequence[DemoRow]) -> str:
    """Format rows as "ok" with the maximum ratio of error to bound, or as "FAILED"."""
    if not rows:
        return "-"
    worst = max(rows, key=lambda row: row.difference / row.bound if row.bound else 0.0)
    return _format_ratio(all(row.ok for row in rows), worst.difference, worst.bound)
