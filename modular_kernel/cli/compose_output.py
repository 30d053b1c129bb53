"""Text and JSON output of `mk compose`."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from modular_kernel.cli import output
from modular_kernel.cli.refusals import print_pairings
from modular_kernel.select.selection import Pair, pairing_name
from modular_kernel.text import format_count, format_span

if TYPE_CHECKING:
    from modular_kernel.compatibility.support import Verdict
    from modular_kernel.select.pairing_choice import PairingChoice
    from modular_kernel.select.selection import Bucket, Segment, TimedOutcome
    from modular_kernel.spec.problem import Machine, Problem

_MACHINE_RULES = {"device", "arch", "package"}  # rules that depend only on the machine


def make_progress_callback(problem: "Problem") -> "Callable[[Bucket], None]":
    """Return a callback that prints the three fastest times of a measured token count to stderr."""

    def print_times(bucket: "Bucket") -> None:
        times = sorted(bucket.us_by_pair.items(), key=lambda item: item[1])
        fastest = ", ".join(f"{us:.1f} us {pair[1]}" for pair, us in times[:3])
        output.print_note(
            f"{format_count(bucket.tokens, 'token')}: {fastest or 'no pairing could be timed'}"
        )

    return print_times


def print_text(choice: "PairingChoice") -> None:
    """Print the chosen pairings, a summary, and the pairings that could not be measured."""
    candidates = choice.candidates
    valid = len(candidates.order)
    total = valid + len(candidates.refused)
    heading = f"{choice.problem} on {choice.machine}: {valid} of {total} pairings are valid"
    output.print_line(f"{heading}{_describe_interpreter(choice)}")
    output.print_table(
        ("tokens", "pairing", "us (first .. last)", "x default", "source"),
        [_format_segment(choice, segment) for segment in choice.segments],
    )
    output.print_line(choice.summary)
    for reason in dict.fromkeys(candidates.untimeable.values()):
        output.print_line(
            f"{format_count(len(candidates.untimeable), 'pairing')} not measured: {reason}"
        )
    if missing := _describe_missing_requirements(choice):
        output.print_line(f"not measured: {missing} (--explain lists them)")
    for note in choice.notes:
        output.print_note(f"note: {note}")


def _describe_interpreter(choice: "PairingChoice") -> str:
    """Describe how many pairings would be valid with Triton's interpreter, which is not used here.

    Returns "" if the interpreter is enabled or cannot be used.
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
    with_interpreter = find_candidates(
        choice.problem, machine, tokens, replicated=choice.replicated
    )
    return f" without Triton's interpreter ({len(with_interpreter.order)} with it, untimed)"


def _describe_missing_requirements(choice: "PairingChoice") -> str:
    """Describe how many pairings are refused only because of the machine, by what they need."""
    counts = Counter(
        _describe_missing_requirement(verdict, choice.machine)
        for verdict in choice.candidates.refused
        if {rejection.rule for rejection in verdict.rejections} <= _MACHINE_RULES
    )
    return ", ".join(
        f"{format_count(count, 'pairing')} {'needs' if count == 1 else 'need'} {need}"
        for need, count in counts.items()
    )


def _describe_missing_requirement(verdict: "Verdict", machine: "Machine") -> str:
    first = verdict.rejections[0]
    return "a GPU" if machine.device == "cpu" and first.rule == "device" else first.need


def _format_segment(choice: "PairingChoice", segment: "Segment") -> tuple[object, ...]:
    buckets = [b for b in choice.buckets if segment.first <= b.tokens <= segment.last]
    timed = [
        o for b in buckets if (o := b.find_outcome(segment.pair)) is not None and o.us is not None
    ]
    times = _format_range([f"{o.us:.1f}" for o in timed])
    ratios = _format_range([f"{o.ratio:.2f}" for o in timed])
    selections = [
        p for t, p in choice.selected_by_tokens.items() if segment.first <= t <= segment.last
    ]
    source = ", ".join(dict.fromkeys(s.reason.value for s in selections)) or "default"
    tokens = format_span(segment.first, segment.last)
    return tokens, pairing_name(segment.pair), times or "not measured", ratios or "-", source


def _format_range(values: Sequence[str]) -> str:
    """Return "first .. last", or a single value if both are equal."""
    return " .. ".join(dict.fromkeys((*values[:1], *values[-1:])))


def print_explanation(choice: "PairingChoice") -> None:
    """Print the times of every pairing, or the reason why it was not timed or was refused."""
    selected_pairs = choice.pair_by_tokens
    rows = []
    for bucket in choice.buckets:
        for outcome in bucket.outcomes:
            mark = "chosen" if selected_pairs.get(bucket.tokens) == outcome.pair else ""
            ratio = "" if outcome.ratio is None else f"{outcome.ratio:.3f}"
            noise = f"{outcome.noise:.3f}" if outcome.noise else ""
            times = _format_time(outcome), ratio, noise, outcome.mode
            rows.append((bucket.tokens, pairing_name(outcome.pair), *times, mark))
    columns = ("tokens", "pairing", "us", "x default", "noise", "timed as", "")
    output.print_table(columns, rows, optional=("timed as", "noise"))
    if rows:
        output.print_line(
            "~ timed only twice, because it is far slower than the default; pairings without ~ "
            "were timed alternately with the default"
        )
    _print_untimed(choice)
    print_pairings(choice.candidates.refused)
    output.print_line("For all reasons of one pairing: mk check --pf-type X --experts-type Y")
    key = ", ".join(f"{name} {value}" for name, value in choice.key_fields.items())
    output.print_line(f"cached for: {key}")


def _print_untimed(choice: "PairingChoice") -> None:
    """Print the first reason of each pairing that was not timed at some token count."""
    reasons_by_pair: dict[Pair, list[str]] = {}
    for tokens in choice.selected_by_tokens:
        for outcome in choice.outcomes(tokens):
            if outcome.why.startswith("not timed: "):
                reasons_by_pair.setdefault(outcome.pair, []).append(outcome.why)
    for pair, pair_reasons in reasons_by_pair.items():
        num_others = len(set(pair_reasons)) - 1
        suffix = ""
        if num_others:
            suffix = f" (and {format_count(num_others, 'other reason')} at other token counts)"
        output.print_line(f"{pairing_name(pair)}: {pair_reasons[0]}{suffix}")


def _format_time(outcome: "TimedOutcome") -> str:
    if outcome.us is None:
        return f"none: {outcome.why}"
    return f"{'~' if outcome.rough else ''}{outcome.us:.1f}"


def make_record(choice: "PairingChoice") -> dict[str, object]:
    """Return the JSON record of a choice."""
    return {
        "problem": choice.problem,
        "machine": choice.machine,
        "facts": choice.key_fields,
        "summary": choice.summary,
        "segments": choice.segments,
        "picks": {
            str(tokens): {"pair": selection.pair, "by": selection.reason}
            for tokens, selection in choice.selected_by_tokens.items()
        },
        "buckets": [
            {"tokens": tokens, "outcomes": choice.outcomes(tokens)}
            for tokens in choice.selected_by_tokens
        ],
        "missing": choice.untimed_tokens,
        "left_out": [{"pair": pair, "tokens": tokens} for pair, tokens in choice.left_out.items()],
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
