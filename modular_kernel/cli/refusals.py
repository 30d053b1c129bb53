"""Output of refused pairings: lists of pairings by reason, tables of rejections, and errors.

A pairing is often refused for a value that the user did not set, such as the default hidden size.
`add_default_hints` names the option that sets such a value.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from modular_kernel.cli.output import (
    EXIT_SOFTWARE,
    STDOUT,
    is_reporting_rank,
    print_error,
    print_json,
    print_line,
    print_result,
    print_table,
)
from modular_kernel.errors import IncompatibleError, InputError, ModularKernelError
from modular_kernel.text import format_count

if TYPE_CHECKING:
    from modular_kernel.cli.options import ProblemOptions
    from modular_kernel.compatibility.support import Rejection, Verdict

# Rule -> the field of ProblemOptions whose value the rule refuses. The rejections of other rules
# about sizes name the field, as in "hidden=64".
_FIELDS_BY_RULE = {
    "dtype": "dtype",
    "quant": "quant",
    "top_k": "top_k",
    "hidden": "hidden",
    "intermediate": "intermediate",
    "max_experts": "experts",
    "min_tokens": "tokens",
    "capacity": "tokens",
    "world_size": "world_size",
}
_RULES_WITH_FIELDS = frozenset({"quant_block", "packing", "placement"})
# Fields whose default is replaced by the value of --model.
_MODEL_FIELDS = frozenset({"dtype", "quant", "top_k", "hidden", "intermediate", "experts"})
_DEFAULT_HINT = " is the default; set "  # between the value and the option


def print_rejections(rejections: Sequence["Rejection"]) -> None:
    """Print a table of the violated rules, with a row per rejection."""
    rows = [(r.rule, " / ".join(r.parties), r.got, r.need, r.hint) for r in rejections]
    print_table(("rule", "parties", "got", "need", "hint"), rows)


def add_default_hints(
    rejections: "Iterable[Rejection]", options: "ProblemOptions"
) -> "tuple[Rejection, ...]":
    """Return the rejections, where those of default values have a hint that names the option."""
    return tuple(
        rejection
        if (field := _find_default_field(rejection, options)) is None
        else replace(
            rejection, hint=_join_hints(rejection.hint, _make_default_hint(rejection, field))
        )
        for rejection in rejections
    )


def describe_defaults(rejections: "Iterable[Rejection]") -> str:
    """Return a line with the options to set if all rejections are of default values, else "".

    rejections: the result of `add_default_hints`.
    """
    hints = [rejection.hint.rpartition(_DEFAULT_HINT) for rejection in rejections]
    options = dict.fromkeys(option for _, separator, option in hints if separator)
    if not options or not all(separator for _, separator, _ in hints):
        return ""
    return f"refused only because of default values; set {' and '.join(options)}"


def _find_default_field(rejection: "Rejection", options: "ProblemOptions") -> str | None:
    """Return the field whose default value is refused, or None if another value is refused."""
    name = _FIELDS_BY_RULE.get(rejection.rule)
    if rejection.rule in _RULES_WITH_FIELDS and "=" in rejection.got:
        name = rejection.got.partition("=")[0]
    if name is None or not hasattr(options, name) or getattr(options, name) is not None:
        return None
    return None if options.model is not None and name in _MODEL_FIELDS else name


def _make_default_hint(rejection: "Rejection", field: str) -> str:
    model = " or --model" if field in _MODEL_FIELDS else ""
    value = rejection.got.rpartition("=")[2]
    return f"{value}{_DEFAULT_HINT}--{field.replace('_', '-')}{model}"


def _join_hints(*hints: str) -> str:
    return "; ".join(filter(None, hints))


@contextmanager
def explain_defaults(options: "ProblemOptions") -> Iterator[None]:
    """Add hints about default values to an IncompatibleError that the context raises."""
    try:
        yield
    except IncompatibleError as error:
        raise IncompatibleError(
            error.pairing,
            add_default_hints(_get_rejections(error), options),
            verdicts=[
                replace(verdict, rejections=add_default_hints(verdict.rejections, options))
                for verdict in _get_verdicts(error)
            ],
        ) from error


def make_refusal(subject: str, verdicts: "Sequence[Verdict]") -> IncompatibleError:
    """Return the error for refused pairings, or for the pairing if there is only one.

    subject: the pairings, such as "every pairing with TritonExperts".
    """
    rejections = [rejection for verdict in verdicts for rejection in verdict.rejections]
    if len(verdicts) == 1:
        return IncompatibleError(verdicts[0].pairing, rejections)
    return IncompatibleError(subject, rejections, verdicts=verdicts)


def _get_rejections(error: IncompatibleError) -> "list[Rejection]":
    from modular_kernel.compatibility.support import Rejection

    return [r for r in error.rejections if isinstance(r, Rejection)]


def _get_verdicts(error: IncompatibleError) -> "list[Verdict]":
    from modular_kernel.compatibility.support import Verdict

    return [v for v in error.verdicts if isinstance(v, Verdict)]


def print_pairings(verdicts: "Sequence[Verdict]") -> None:
    """Print the valid and the refused pairings, and the first rejection by each violated rule.

    The refused pairings of a PrepareAndFinalize are grouped by the rules that they violate. If all
    of its pairings violate the same rule, they are not listed one by one.
    """
    verdicts_by_part: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        verdicts_by_part.setdefault(verdict.prepare_finalize, []).append(verdict)
    print_valid_pairings(verdicts)
    parts_by_rules: dict[str, list[str]] = {}
    parts_by_list: dict[tuple[str, ...], list[str]] = {}
    for part, part_verdicts in verdicts_by_part.items():
        if common := _find_common_rules(part_verdicts):
            parts_by_rules.setdefault(", ".join(common), []).append(part)
        elif lines := _list_refused_experts(part_verdicts):
            parts_by_list.setdefault(lines, []).append(part)
    for lines, parts in parts_by_list.items():
        print_line(f"{', '.join(parts)}: refused because of the rules:")
        for line in lines:
            print_line(f"  {line}")
    if parts_by_rules:
        experts = list(dict.fromkeys(verdict.experts for verdict in verdicts))
        if len(experts) == 1:
            print_line(f"refused with {experts[0]} because of the rules:")
        else:
            print_line("refused with every experts part, at least because of the rules:")
        for rules, parts in parts_by_rules.items():
            print_line(f"  {rules}: {', '.join(parts)}")
    print_reasons(verdicts)


def print_valid_pairings(verdicts: "Iterable[Verdict]") -> None:
    """Print a line with the experts parts of the valid pairings of each PrepareAndFinalize.

    Parts with the same experts parts share a line.
    """
    experts_by_part: dict[str, list[str]] = {}
    for verdict in verdicts:
        if verdict.ok:
            experts_by_part.setdefault(verdict.prepare_finalize, []).append(verdict.experts)
    parts_by_experts: dict[str, list[str]] = {}
    for part, experts in experts_by_part.items():
        parts_by_experts.setdefault(", ".join(experts), []).append(part)
    for experts_names, parts in parts_by_experts.items():
        print_line(f"valid: {', '.join(parts)} x {experts_names}")


def _find_common_rules(verdicts: "Sequence[Verdict]") -> list[str]:
    """Return the rules that every pairing violates, in the order of the first pairing's."""
    sets = [{rejection.rule for rejection in verdict.rejections} for verdict in verdicts]
    common = set.intersection(*sets)
    return [rule for rule in list_rules(verdicts[0]) if rule in common]


def list_rules(verdict: "Verdict") -> list[str]:
    """Return the rules that a pairing violates, without repetition."""
    return list(dict.fromkeys(rejection.rule for rejection in verdict.rejections))


def _list_refused_experts(verdicts: "Sequence[Verdict]") -> tuple[str, ...]:
    """Return a line for each set of violated rules, with the experts parts that violate it."""
    experts_by_rules: dict[str, list[str]] = {}
    for verdict in verdicts:
        if not verdict.ok:
            experts_by_rules.setdefault(", ".join(list_rules(verdict)), []).append(verdict.experts)
    return tuple(f"{rules}: {', '.join(experts)}" for rules, experts in experts_by_rules.items())


def group_by_rule(verdicts: "Iterable[Verdict]") -> "dict[str, list[Rejection]]":
    """Return, for each violated rule, the first rejection of each pairing that violates it."""
    rejections_by_rule: dict[str, list[Rejection]] = {}
    for verdict in verdicts:
        first_by_rule: dict[str, Rejection] = {}
        for rejection in verdict.rejections:
            first_by_rule.setdefault(rejection.rule, rejection)
        for rule, rejection in first_by_rule.items():
            rejections_by_rule.setdefault(rule, []).append(rejection)
    return rejections_by_rule


def print_reasons(verdicts: "Sequence[Verdict]", letters: Mapping[str, str] | None = None) -> None:
    """Print a table of the violated rules with the first rejection by each of them.

    letters: letter of each rule in a matrix above the table. None prints no letters.
    """
    columns = ("rule", "pairings", "first rejection")
    rows = [
        (rule, str(len(rejections)), _format_reason(rejections[0]))
        for rule, rejections in group_by_rule(verdicts).items()
    ]
    if letters is None:
        print_table(columns, rows)
        return
    print_table(("", *columns), [(letters[row[0]], *row) for row in rows])


def _format_reason(rejection: "Rejection") -> str:
    hint = f" ({rejection.hint})" if rejection.hint else ""
    return f"got {rejection.got}, need {rejection.need}{hint}"


def report_error(error: ModularKernelError, json_path: str | None) -> int:
    """Print an error of a verb, and return the exit status.

    The status is 1 for an IncompatibleError, 2 for another InputError (bad usage), and 70
    (EXIT_SOFTWARE) for any other error, such as a rank that does not respond.

    json_path: the value of --json. With "-", an InputError is also printed as JSON.
    """
    if isinstance(error, IncompatibleError):
        _report_incompatible(error, json_path)
        return 1
    if isinstance(error, InputError) and json_path == STDOUT and is_reporting_rank():
        values = {"what": error.what, "got": error.got, "need": error.need}
        print_json({"error": {"type": type(error).__name__, **values}})
    print_error(str(error))
    return 2 if isinstance(error, InputError) else EXIT_SOFTWARE


def _report_incompatible(error: IncompatibleError, json_path: str | None) -> None:
    record = {"pairing": error.pairing, "ok": False, "rejections": error.rejections}
    print_result(record, json_path, lambda: _print_refusal(error))


def _print_refusal(error: IncompatibleError) -> None:
    verdicts, rejections = _get_verdicts(error), _get_rejections(error)
    if verdicts:
        print_line(f"{error.pairing}: refused, {format_count(len(verdicts), 'pairing')}")
        print_pairings(verdicts)
        return
    print_line(f"{error.pairing}: refused, {format_count(len(rejections), 'reason')}")
    print_rejections(rejections)
    if summary := describe_defaults(rejections):
        print_line(summary)
