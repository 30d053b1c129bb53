"""What `mk compose` prints."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from modular_kernel.cli import output
from modular_kernel.select.record import Pair, named
from modular_kernel.text import counted

if TYPE_CHECKING:
    from modular_kernel.compatibility.support import Verdict
    from modular_kernel.select.choice import Choice
    from modular_kernel.select.record import Bucket, Segment, TimedOutcome
    from modular_kernel.spec.problem import Machine, Problem

_ELSEWHERE = {"device", "arch", "package"}  # rules about this machine: valid on another one


def teller(problem: "Problem") -> "Callable[[Bucket], None]":
    """Says on stderr what was measured, as it comes."""

    def tell(bucket: "Bucket") -> None:
        times = sorted(bucket.times.items(), key=lambda item: item[1])
        shown = ", ".join(f"{us:.1f} us {pair[1]}" for pair, us in times[:3])
        output.note(f"{counted(bucket.tokens, 'token')}: {shown or 'nothing could be timed'}")

    return tell


def print_text(choice: "Choice") -> None:
    """Print the choice, and everything about it that a reader should know."""
    candidates = choice.candidates
    valid = len(candidates.order)
    count = valid + len(candidates.refused)
    told = f"{choice.problem} on {choice.machine}: {valid} of {count} pairings are valid"
    output.line(f"{told}{_with_interpreter(choice)}")
    output.table(
        ("tokens", "pairing", "us (first .. last)", "x default", "by"),
        [_segment_row(choice, segment) for segment in choice.segments],
    )
    output.line(choice.summary)
    for why in dict.fromkeys(candidates.silent.values()):
        output.line(f"not measured: {len(candidates.silent)} pairings: {why}")
    elsewhere: dict[str, list[str]] = {}
    for verdict in candidates.refused:
        if {rejection.rule for rejection in verdict.rejections} <= _ELSEWHERE:
            elsewhere.setdefault(_needs(verdict, choice.machine), []).append(verdict.pairing)
    for need, pairings in elsewhere.items():
        output.line(f"not measured, they need {need}: {', '.join(pairings)}")
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
    inside = [b for b in choice.buckets if segment.first <= b.tokens <= segment.last]
    found = [o for b in inside if (o := b.outcome(segment.pair)) is not None and o.us is not None]
    times = _ends(f"{o.us:.1f}" for o in found)
    ratios = _ends(f"{o.ratio:.2f}" for o in found)
    picks = [p for t, p in choice.decided.items() if segment.first <= t <= segment.last]
    by = ", ".join(dict.fromkeys(pick.source.value for pick in picks)) or "default"
    tokens = f"{segment.first} to {segment.last}"
    return tokens, named(segment.pair), times or "not measured", ratios or "-", by


def _ends(shown: Iterable[str]) -> str:
    """Show the first and the last."""
    texts = list(shown)
    return " .. ".join(dict.fromkeys((*texts[:1], *texts[-1:])))


def explain_text(choice: "Choice") -> None:
    """Every pairing: what was timed, what was not and why, and the first reason of a refusal."""
    picks = choice.picks
    rows = []
    for bucket in choice.buckets:
        for outcome in bucket.outcomes:
            mark = "chosen" if picks.get(bucket.tokens) == outcome.pair else ""
            ratio = "" if outcome.ratio is None else f"{outcome.ratio:.3f}"
            noise = f"{outcome.noise:.3f}" if outcome.noise else ""
            times = _time(outcome), ratio, noise, outcome.mode
            rows.append((bucket.tokens, *outcome.pair, *times, mark))
    columns = ("tokens", "prepare_finalize", "experts", "us", "x default", "noise", "timed as", "")
    output.table(columns, rows, optional=("timed as", "noise"))
    if rows:
        output.line("~ timed twice only, far behind the default; the others by turns with it")
    _untimed_text(choice)
    output.table(
        ("refused", "first reason", "others"),
        [
            (verdict.pairing, verdict.rejections[0], len(verdict.rejections) - 1)
            for verdict in choice.candidates.refused
        ],
    )
    facts = ", ".join(f"{name} {value}" for name, value in choice.facts.items())
    output.line(f"kept for: {facts}")


def _untimed_text(choice: "Choice") -> None:
    """One line for each pairing that was not timed somewhere, and the first reason."""
    whys: dict[Pair, list[str]] = {}
    for tokens in choice.decided:
        for outcome in choice.outcomes(tokens):
            if outcome.why.startswith("not timed: "):
                whys.setdefault(outcome.pair, []).append(outcome.why)
    for pair, texts in whys.items():
        others = len(set(texts)) - 1
        more = f" (at {counted(others, 'other token count')} otherwise)" if others else ""
        output.line(f"{named(pair)}: {texts[0]}{more}")


def _time(outcome: "TimedOutcome") -> str:
    if outcome.us is None:
        return f"none: {outcome.why}"
    return f"{'~' if outcome.rough else ''}{outcome.us:.1f}"


def record(choice: "Choice") -> dict[str, object]:
    """For --json."""
    return {
        "problem": choice.problem,
        "machine": choice.machine,
        "facts": choice.facts,
        "summary": choice.summary,
        "segments": choice.segments,
        "picks": {
            str(tokens): {"pair": pick.pair, "by": pick.source}
            for tokens, pick in choice.decided.items()
        },
        "buckets": [
            {"tokens": tokens, "outcomes": choice.outcomes(tokens)} for tokens in choice.decided
        ],
        "missing": choice.missing,
        "timed_now": choice.timed,
        "seconds": round(choice.seconds, 3),
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
