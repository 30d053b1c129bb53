"""What `mk compose` prints."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from modular_kernel.cli import output
from modular_kernel.printable import all_counted, counted

if TYPE_CHECKING:
    from modular_kernel.select.choice import Choice
    from modular_kernel.select.record import Bucket, Segment, TimedOutcome
    from modular_kernel.support import Verdict
    from modular_kernel.types import Machine, Problem

_ELSEWHERE = {"device", "arch", "package"}  # rules about this machine: valid on another one


def teller(problem: "Problem") -> "Callable[[Bucket], None]":
    """Says on stderr what was measured, as it comes."""

    def tell(bucket: "Bucket") -> None:
        times = sorted(bucket.times.items(), key=lambda item: item[1])
        shown = ", ".join(f"{us:.1f} us {pair[1]}" for pair, us in times[:3])
        output.note(f"{counted(bucket.tokens, 'token')}: {shown or 'nothing could be timed'}")

    return tell


def print_text(choice: "Choice", took: float) -> None:
    """Print the choice, and everything about it that a reader should know."""
    candidates = choice.candidates
    valid = len(candidates.order)
    count = valid + len(candidates.refused)
    told = f"{choice.problem} on {choice.machine}: {valid} of {count} pairings are valid"
    output.line(f"{told}{_with_interpreter(choice)}")
    output.table(
        ("tokens", "pairing", "us (first .. last)", "next best"),
        [_segment_row(choice, segment) for segment in choice.segments],
    )
    reused = len(choice.buckets) - choice.timed
    output.line(
        f"timed {counted(choice.timed, 'token count')} in {took:.1f} s, {reused} from the cache"
    )
    for why in dict.fromkeys(candidates.silent.values()):
        output.line(f"not measured: {len(candidates.silent)} pairings: {why}")
    elsewhere: dict[str, list[str]] = {}
    for verdict in candidates.refused:
        if {rejection.rule for rejection in verdict.rejections} <= _ELSEWHERE:
            elsewhere.setdefault(_needs(verdict, choice.machine), []).append(verdict.pairing)
    for need, pairings in elsewhere.items():
        output.line(f"not measured, they need {need}: {', '.join(pairings)}")
    if choice.missing and choice.measured:
        numbers = all_counted(choice.missing, "token")
        output.line(f"not measured: {numbers}: as beside them")
    if not choice.measured:
        output.line("no pairing has a time here: the first valid one is taken, in the parts' order")
    for note in choice.notes:
        output.note(f"note: {note}")


def _with_interpreter(choice: "Choice") -> str:
    """Say how many more are valid where Triton's interpreter, which is not timed, may run them."""
    from modular_kernel.machine import importable
    from modular_kernel.select.candidates import find

    here, wanted = choice.machine, ("triton", "ml_dtypes")
    if here.device != "cpu" or here.interpreter or importable(wanted) != frozenset(wanted):
        return ""
    tokens, machine = (choice.problem.tokens,), replace(here, interpreter=True)
    more = find(choice.problem, machine, tokens, replicated=choice.replicated)
    return f" without Triton's interpreter ({len(more.order)} with it, untimed)"


def _needs(verdict: "Verdict", machine: "Machine") -> str:
    """Say what a pair lacks here; interpreted kernels are not timed, so that it may be a GPU."""
    first = verdict.rejections[0]
    return "a GPU" if machine.device == "cpu" and first.rule == "device" else first.need


def _segment_row(choice: "Choice", segment: "Segment") -> tuple[object, ...]:
    name = f"{segment.pair[0]} x {segment.pair[1]}"
    inside = [b for b in choice.buckets if segment.first <= b.tokens <= segment.last]
    ends = [b.times[segment.pair] for b in inside if segment.pair in b.times]
    shown = " .. ".join(f"{us:.1f}" for us in dict.fromkeys((*ends[:1], *ends[-1:])))
    behind = [us / b.times[segment.pair] for b in inside for us in _others(b, segment)]
    least = f"{min(behind):.2f} x" if behind else "-"
    return f"{segment.first} to {segment.last}", name, shown or "not measured", least


def _others(bucket: "Bucket", segment: "Segment") -> list[float]:
    times = bucket.times
    if segment.pair not in times:
        return []
    return [us for pair, us in times.items() if pair != segment.pair]


def explain_text(choice: "Choice") -> None:
    """Every candidate: a column of times, or every reason it was refused."""
    picks = choice.picks
    rows = []
    for bucket in choice.buckets:
        for outcome in bucket.outcomes:
            mark = "chosen" if picks.get(bucket.tokens) == outcome.pair else ""
            rows.append((bucket.tokens, *outcome.pair, _time(outcome), outcome.mode, mark))
    columns = ("tokens", "prepare_finalize", "experts", "us", "timed as", "")
    output.table(columns, rows, optional=("timed as",))
    rough = "~ timed a few times only, far from the fastest or at the budget's end"
    output.line(f"{rough}; the others by turns")
    for verdict in choice.candidates.refused:
        output.line(str(verdict))
    facts = ", ".join(f"{name} {value}" for name, value in choice.facts.items())
    output.line(f"kept for: {facts}")


def _time(outcome: "TimedOutcome") -> str:
    if outcome.us is None:
        return f"none: {outcome.why}"
    return f"{'~' if outcome.rough else ''}{outcome.us:.1f}"


def record(choice: "Choice", took: float) -> dict[str, object]:
    """For --json."""
    return {
        "problem": choice.problem,
        "machine": choice.machine,
        "facts": choice.facts,
        "segments": choice.segments,
        "picks": {str(tokens): pair for tokens, pair in choice.picks.items()},
        "buckets": choice.buckets,
        "missing": choice.missing,
        "timed_now": choice.timed,
        "seconds": round(took, 3),
        "notes": choice.notes,
        "refused": [
            {
                "prepare_finalize": verdict.prepare_finalize,
                "experts": verdict.experts,
                "rejections": verdict.rejections,
            }
            for verdict in choice.candidates.refused
        ],
    }
