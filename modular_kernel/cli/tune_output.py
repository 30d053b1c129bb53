"""What `mk tune` prints: a bar and a line for each number of tokens, a table, or JSON."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from modular_kernel.cli import output

if TYPE_CHECKING:
    from modular_kernel.tuning.compiled import Pair
    from modular_kernel.tuning.search import Tuned
    from modular_kernel.types import Problem


@dataclass(frozen=True)
class Layer:
    """One layer to tune: what it is called, its pair, for how many tokens, and where to."""

    name: str
    problem: "Problem"
    pair: "Pair"
    tokens: tuple[int, ...]
    folder: Path


@contextmanager
def progress(
    layer: Layer, total: int
) -> "Iterator[tuple[Callable[[], None], Callable[[Tuned], None]]]":
    """(after every measurement, after every number of tokens): a bar, and a line each, on stderr.

    total: about how many measurements there will be.
    """
    from rich.console import Console
    from rich.progress import Progress

    # No markup in lines: names of choices may hold brackets.
    with Progress(console=Console(stderr=True, markup=False), transient=True) as bar:
        task = bar.add_task(layer.name, total=total)

        def tell(tuned: "Tuned") -> None:
            bar.console.print(f"{layer.name}: {_line(tuned)}")

        yield lambda: bar.advance(task), tell


def _line(tuned: "Tuned") -> str:
    best = tuned.best
    if best is None:
        reasons = "; ".join(refusal.reason for refusal in tuned.refused.values())
        return f"{tuned.tokens} tokens: nothing ran: {reasons[:300]}"
    untuned = f", untuned {best.untuned_seconds * 1e6:.1f}" if best.untuned_seconds else ""
    wrong = f", {len(tuned.wrong)} WRONG" if tuned.wrong else ""
    counts = f"{tuned.tried} timed, {len(tuned.refused)} refused{wrong}"
    early = "" if tuned.finished else ", stopped by the budget"
    return f"{tuned.tokens} tokens: {best.seconds * 1e6:.1f} us{untuned} ({counts}{early})"


def record(layer: Layer, done: "Sequence[Tuned]", left: Sequence[int]) -> dict[str, object]:
    return {
        "layer": layer.name,
        "problem": layer.problem,
        "pairing": f"{layer.pair.prepare_finalize} x {layer.pair.experts}",
        "file": str(done[-1].file) if done and done[-1].file else None,
        "left": list(left),
        "tuned": [
            {
                "tokens": tuned.tokens,
                "us": tuned.best and tuned.best.seconds * 1e6,
                "untuned_us": tuned.best
                and tuned.best.untuned_seconds
                and tuned.best.untuned_seconds * 1e6,
                "choice": tuned.best and str(tuned.best.choice),
                "tried": tuned.tried,
                "finished": tuned.finished,
                "refused": {str(choice): r.reason for choice, r in tuned.refused.items()},
                "wrong": [str(choice) for choice in tuned.wrong],
            }
            for tuned in done
        ],
    }


def print_text(layer: Layer, done: "Sequence[Tuned]", left: Sequence[int]) -> None:
    columns = ("tokens", "untuned us", "us", "faster by", "timed", "refused", "choice")
    output.table(columns, [_row(tuned) for tuned in done], title=layer.name)
    for tuned in done:
        for choice in tuned.wrong:
            output.line(f"WRONG, {tuned.tokens} tokens: {choice}: {tuned.refused[choice].reason}")
    files = [tuned.file for tuned in done if tuned.file is not None]
    if files:
        output.line(f"saved in {files[-1]}")
    if left:
        numbers = ", ".join(map(str, left))
        output.line(f"the budget is spent; left: {numbers} tokens. The same command continues")
    if not done and not left:
        output.line(f"{layer.name}: nothing left to do; --fresh starts afresh")


def _row(tuned: "Tuned") -> tuple[object, ...]:
    best, counts = tuned.best, (tuned.tried, len(tuned.refused))
    if best is None:
        return (tuned.tokens, "-", "-", "-", *counts, "nothing ran")
    base = best.untuned_seconds
    gain = f"{base / best.seconds - 1:.1%}" if base else "-"
    return (
        tuned.tokens,
        f"{base * 1e6:.1f}" if base else "-",
        f"{best.seconds * 1e6:.1f}",
        gain,
        *counts,
        best.choice,
    )
