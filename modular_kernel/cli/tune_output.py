"""Output of `mk tune`: a progress bar, a line for each number of tokens, tables, and JSON.

A choice consists of the launch configurations of all kernels of one call.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from modular_kernel.cli import output
from modular_kernel.text import format_count, format_counts

if TYPE_CHECKING:
    from modular_kernel.contracts import Choice, Tunable
    from modular_kernel.spec.problem import Problem
    from modular_kernel.tuning.compilation import TunedPair
    from modular_kernel.tuning.search import TuneResult


@dataclass(frozen=True)
class TunedLayer:
    """A layer to tune.

    name: name of the layer in the output.
    space: search space of the experts part.
    tokens: numbers of tokens to tune, in this order.
    folder: folder of the file with the results.
    """

    name: str
    problem: "Problem"
    pair: "TunedPair"
    space: "Tunable"
    tokens: tuple[int, ...]
    folder: Path

    @property
    def title(self) -> str:
        quant = self.problem.quant
        title = self.name if quant == "none" else f"{self.name} {quant}"
        return f"{title} prepared" if self.pair.prepared else title


class TuneProgress:
    """Context manager that shows a progress bar on stderr, and above it a line per token count.

    total: expected number of measurements.
    """

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        # Choices may contain brackets, which are not markup.
        console = Console(stderr=True, markup=False, soft_wrap=True)
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task("choices", total=total)

    def __enter__(self) -> "TuneProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self) -> None:
        self._bar.advance(self._task)

    def print_result(self, layer: TunedLayer, tuned: "TuneResult") -> None:
        self._bar.update(self._task, description=layer.title)
        self._bar.console.print(f"{layer.title}: {_format_summary(tuned)}")


class TuneRecorder:
    """Appends the times of all choices to a JSON Lines file, one line for each number of tokens.

    The fields of a line are:

    - "layer", "quant", "tokens", and the sizes of the layer
    - "prepared": whether weights were prepared
    - "best": the fastest choice, with "us" and "untuned_us"
    - "choices": each correct choice with the "us" of a call, and of each stage if there are several
    - "refused": the reason for each choice that was not timed

    path: path of the file. None writes nothing.
    """

    def __init__(self, layer: TunedLayer, path: Path | None) -> None:
        self._layer, self._path = layer, path

    def append(self, tuned: "TuneResult") -> None:
        if self._path is None or tuned.best is None:
            return
        problem, best = self._layer.problem, tuned.best

        def choice_fields(choice: "Choice") -> dict[str, object]:
            return dict(self._layer.space.as_json(choice))

        record = {
            "layer": self._layer.name,
            "experts": problem.experts,
            "top_k": problem.top_k,
            "hidden": problem.hidden,
            "intermediate": problem.intermediate,
            "quant": problem.quant,
            "prepared": self._layer.pair.prepared,
            "tokens": tuned.tokens,
            "best": {
                **choice_fields(best.choice),
                "us": _to_us(best.seconds),
                "untuned_us": best.untuned_seconds and _to_us(best.untuned_seconds),
            },
            "choices": [
                {
                    **choice_fields(choice),
                    "us": _to_us(timing.seconds),
                    "stages": {name: _to_us(seconds) for name, seconds in timing.stages.items()},
                }
                for choice, timing in tuned.times.items()
            ],
            "refused": {str(choice): r.reason for choice, r in tuned.refused.items()},
        }
        with (
            output.report_write_errors(self._path),
            self._path.open("a", encoding="utf-8") as stream,
        ):
            stream.write(json.dumps(record) + "\n")


def _to_us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _format_summary(tuned: "TuneResult") -> str:
    best = tuned.best
    if best is None:
        reasons = "; ".join(refusal.reason for refusal in tuned.refused.values())
        return f"{format_count(tuned.tokens, 'token')}: nothing ran: {reasons[:300]}"
    untuned = f", untuned {best.untuned_seconds * 1e6:.1f}" if best.untuned_seconds else ""
    wrong_count = f", {len(tuned.wrong_choices)} WRONG" if tuned.wrong_choices else ""
    counts = f"{len(tuned.times)} timed, {len(tuned.refused)} refused{wrong_count}"
    stopped = "" if tuned.finished else ", stopped by the budget"
    tokens = format_count(tuned.tokens, "token")
    return f"{tokens}: {best.seconds * 1e6:.1f} us{untuned} ({counts}{stopped})"


def make_record(
    layer: TunedLayer, results: "Sequence[TuneResult]", remaining: Sequence[int]
) -> dict[str, object]:
    """Return the JSON record of a layer. `remaining` has the token counts that were not tuned."""
    return {
        "layer": layer.name,
        "problem": layer.problem,
        "pairing": f"{layer.pair.prepare_finalize} x {layer.pair.experts}",
        "prepared": layer.pair.prepared,
        "file": str(results[-1].file) if results and results[-1].file else None,
        "left": list(remaining),
        "tuned": [
            {
                "tokens": tuned.tokens,
                "us": tuned.best and tuned.best.seconds * 1e6,
                "untuned_us": tuned.best
                and tuned.best.untuned_seconds
                and tuned.best.untuned_seconds * 1e6,
                "choice": tuned.best and str(tuned.best.choice),
                "tried": len(tuned.times),
                "finished": tuned.finished,
                "refused": {str(choice): r.reason for choice, r in tuned.refused.items()},
                "wrong": [str(choice) for choice in tuned.wrong_choices],
            }
            for tuned in results
        ],
    }


def print_text(
    layer: TunedLayer, results: "Sequence[TuneResult]", remaining: Sequence[int]
) -> None:
    """Print the results of a layer. `remaining` has the token counts that were not tuned."""
    columns = ("tokens", "untuned us", "us", "faster by", "timed", "refused", "choice")
    output.print_table(
        columns,
        [_format_row(tuned) for tuned in results],
        title=layer.title,
        optional=("untuned us", "timed", "refused"),
    )
    for tuned in results:
        for choice in tuned.wrong_choices:
            tokens, reason = format_count(tuned.tokens, "token"), tuned.refused[choice].reason
            output.print_line(f"WRONG, {tokens}: {choice}: {reason}")
    files = [tuned.file for tuned in results if tuned.file is not None]
    if files:
        output.print_line(f"saved in {files[-1]}")
    if remaining:
        numbers = format_counts(remaining, "token")
        output.print_line(
            f"budget exhausted; not tuned: {numbers}. Run the same command again to continue"
        )
    if not results and not remaining:
        output.print_line(f"{layer.title}: nothing left to do; --ignore-saved measures again")


def _format_row(tuned: "TuneResult") -> tuple[object, ...]:
    best, counts = tuned.best, (len(tuned.times), len(tuned.refused))
    if best is None:
        return (tuned.tokens, "-", "-", "-", *counts, "nothing ran")
    untuned_seconds = best.untuned_seconds
    gain = f"{untuned_seconds / best.seconds - 1:.1%}" if untuned_seconds else "-"
    return (
        tuned.tokens,
        f"{untuned_seconds * 1e6:.1f}" if untuned_seconds else "-",
        f"{best.seconds * 1e6:.1f}",
        gain,
        *counts,
        best.choice,
    )
