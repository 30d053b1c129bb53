"""Text and JSON output of `mk compose`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from modular_kernel.cli import output
from modular_kernel.select.selection import Pair, pairing_name
from modular_kernel.text import format_count

if TYPE_CHECKING:
    from modular_kernel.compatibility.support import Verdict
    from modular_kernel.select.choice import Choice
    from modular_kernel.select.selection import Bucket, Segment, TimedOutcome
    from modular_kernel.spec.problem import Machine, Problem

_MACHINE_RULES = {"device", "arch", "package"}  # rules that depend on the machine alone


def progress_notes(problem: "Problem") -> "Callable[[Bucket], None]":
    """Return a callback that prints the fastest times of each measured token count on stderr."""

    def note_times(bucket: "Bucket") -> None:
        times = sorted(bucket.us_by_pair.items(), key=lambda item: item[1])
        texts = ", ".join(f"{us:.1f} us {pair[1]}" for pair, us in times[:3])
        output.note(
            f"{format_count(bucket.tokens, 'token')}: {texts or 'no pairing could be timed'}"
        )

    return note_times


def print_text(choice: "Choice") -> None:
    """Print the chosen pairings, a summary, and the pairings that could not be measured."""
    candidates = choice.candidates
    valid = len(candidates.order)
    count = valid + len(candidates.refused)
    text = f"{choice.problem} on {choice.machine}: {valid} of {count} pairings are valid"
    output.line(f"{text}{_interpreter_note(choice)}")
    output.table(
        ("tokens", "pairing", "us (first .. last)", "x default", "source"),
        [_segment_row(choice, segment) for segment in choice.segments],
    )
    output.line(choice.summary)
    for reason in dict.fromkeys(candidates.untimeable.values()):
        output.line(f"{format_count(len(candidates.untimeable), 'pairing')} not measured: {reason}")
    other_machine: dict[str, list[str]] = {}
    for verdict in candidates.refused:
        if {rejection.rule for rejection in verdict.rejections} <= _MACHINE_RULES:
            other_machine.setdefault(_missing_requirement(verdict, choice.machine), []).append(
                verdict.pairing
            )
    for need, pairings in other_machine.items():
        output.line(f"not measured because they need {need}: {', '.join(pairings)}")
    for note in choice.notes:
        output.note(f"note: {note}")


def _interpreter_note(choice: "Choice") -> str:
    """Return a note on the number of pairings that would be valid with Triton's interpreter.

    Returns "" if the interpreter is on or cannot be used.
    """
    from modular_kernel.machine import find_importable
    from modular_kernel.select.candidates import find_candidates

    current, packages = choice.machine, ("triton", "ml_dtypes")
    if (
        current.device != "cpu"
        or current.interpreter
        or find_importable(packages) != frozenset(packages)
    ):
        return ""
    tokens, machine = (choice.problem.tokens,), replace(current, interpreter=True)
    more = find_candidates(choice.problem, machine, tokens, replicated=choice.replicated)
    return f" without Triton's interpreter ({len(more.order)} with it, untimed)"


def _missing_requirement(verdict: "Verdict", machine: "Machine") -> str:
    """Return what a machine needs for the pairing; "a GPU" if this one is a CPU."""
    first = verdict.rejections[0]
    return "a GPU" if machine.device == "cpu" and first.rule == "device" else first.need


def _segment_row(choice: "Choice", segment: "Segment") -> tuple[object, ...]:
    buckets = [b for b in choice.buckets if segment.first <= b.tokens <= segment.last]
    timed = [
        o for b in buckets if (o := b.find_outcome(segment.pair)) is not None and o.us is not None
    ]
    times = _first_to_last([f"{o.us:.1f}" for o in timed])
    ratios = _first_to_last([f"{o.ratio:.2f}" for o in timed])
    picks = [p for t, p in choice.pick_by_tokens.items() if segment.first <= t <= segment.last]
    source = ", ".join(dict.fromkeys(pick.source.value for pick in picks)) or "default"
    tokens = f"{segment.first} to {segment.last}"
    return tokens, pairing_name(segment.pair), times or "not measured", ratios or "-", source


def _first_to_last(texts: Sequence[str]) -> str:
    """Format as "first .. last", or as one text if the first equals the last."""
    return " .. ".join(dict.fromkeys((*texts[:1], *texts[-1:])))


def print_explanation(choice: "Choice") -> None:
    """Print the times of every pairing or why it has none, and the first reason of each refusal."""
    picks = choice.pair_by_tokens
    rows = []
    for bucket in choice.buckets:
        for outcome in bucket.outcomes:
            mark = "chosen" if picks.get(bucket.tokens) == outcome.pair else ""
            ratio = "" if outcome.ratio is None else f"{outcome.ratio:.3f}"
            noise = f"{outcome.noise:.3f}" if outcome.noise else ""
            times = _format_time(outcome), ratio, noise, outcome.mode
            rows.append((bucket.tokens, *outcome.pair, *times, mark))
    columns = ("tokens", "prepare_finalize", "experts", "us", "x default", "noise", "timed as", "")
    output.table(columns, rows, optional=("timed as", "noise"))
    if rows:
        output.line(
            "~ timed only twice because it is far slower than the default; others were timed "
            "interleaved with it"
        )
    _print_untimed(choice)
    output.table(
        ("refused", "first reason", "others"),
        [
            (verdict.pairing, verdict.rejections[0], len(verdict.rejections) - 1)
            for verdict in choice.candidates.refused
        ],
    )
    key = ", ".join(f"{name} {value}" for name, value in choice.key_fields.items())
    output.line(f"cached for: {key}")


def _print_untimed(choice: "Choice") -> None:
    """Print each pairing that was not timed at every token count, with the first reason."""
    reasons: dict[Pair, list[str]] = {}
    for tokens in choice.pick_by_tokens:
        for outcome in choice.outcomes(tokens):
            if outcome.why.startswith("not timed: "):
                reasons.setdefault(outcome.pair, []).append(outcome.why)
    for pair, texts in reasons.items():
        others = len(set(texts)) - 1
        more = f" (at {format_count(others, 'other token count')} otherwise)" if others else ""
        output.line(f"{pairing_name(pair)}: {texts[0]}{more}")


def _format_time(outcome: "TimedOutcome") -> str:
    if outcome.us is None:
        return f"none: {outcome.why}"
    return f"{'~' if outcome.rough else ''}{outcome.us:.1f}"


def record(choice: "Choice") -> dict[str, object]:
    """Return the record for --json."""
    return {
        "problem": choice.problem,
        "machine": choice.machine,
        "facts": choice.key_fields,
        "summary": choice.summary,
        "segments": choice.segments,
        "picks": {
            str(tokens): {"pair": pick.pair, "by": pick.source}
            for tokens, pick in choice.pick_by_tokens.items()
        },
        "buckets": [
            {"tokens": tokens, "outcomes": choice.outcomes(tokens)}
            for tokens in choice.pick_by_tokens
        ],
        "missing": choice.untimed_tokens,
        "timed_now": choice.num_timed,
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
