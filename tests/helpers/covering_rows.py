"""Covering arrays over features, with rules that state which combinations are refused.

A `Refusal` is a rule that states under which conditions an error is raised. `draw` returns accepted
rows with every possible pair of values, and, for each rule, refused rows with every value to which
the rule can apply. A refused row differs from an accepted row in one value, and only one rule
applies to it, so the expected error is known.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modular_kernel.errors import ModularKernelError
from modular_kernel.testing.cases.covering import Axis, CoveringArray, Row, Space, covering_array

Values = Mapping[str, Any]  # {axis: value}
Condition = Callable[[Values], bool]


@dataclass(frozen=True)
class Refusal:
    """A rule: if all conditions in `when` hold, `error` is raised.

    message: a regular expression that the error's message matches.
    """

    name: str
    error: type[ModularKernelError]
    message: str
    when: tuple[Condition, ...]

    def applies(self, values: Values) -> bool:
        return all(condition(values) for condition in self.when)


@dataclass(frozen=True)
class CoveringRows:
    """The rows of `draw`. refused: pairs of a rule and a row that it refuses."""

    array: CoveringArray
    accepted: tuple[dict[str, Any], ...]
    refused: tuple[tuple[Refusal, dict[str, Any]], ...]
    refusals: tuple[Refusal, ...]

    def unmet(self) -> list[str]:
        """Return the pairs of values that no row has, and the rules that apply to no row."""
        describe = self.array.space.describe
        applied = {refusal.name for refusal, _ in self.refused}
        missing = [f"{describe(a)}, {describe(b)}" for a, b in self.array.missing_pairs()]
        return missing + [rule.name for rule in self.refusals if rule.name not in applied]

    def impossible(self) -> dict[tuple[str, str], str]:
        """Return the pairs of values that no accepted row can have, each with its reason."""
        describe = self.array.space.describe
        return {
            (describe(a), describe(b)): reason for (a, b), reason in self.array.impossible.items()
        }


def draw(
    axes: Sequence[Axis],
    refusals: Sequence[Refusal] = (),
    list_conflicts: Callable[[Values], Sequence[str]] = lambda _values: (),
    cost: Callable[[Values], float] = lambda _values: 1.0,
) -> CoveringRows:
    """Draw accepted and refused rows.

    list_conflicts: returns the reasons why values cannot be combined, such as an option that a
    format does not have. Rows with conflicts are neither accepted nor refused. cost: returns the
    cost of a row, in any unit. Axes on which the cost depends must set `varies_cost`.
    """

    def list_rejections(row: Row) -> Sequence[str]:
        values = _values_of(axes, row)
        applying = [f"refused: {rule.name}" for rule in refusals if rule.applies(values)]
        return [*list_conflicts(values), *applying]

    def cost_of(row: Sequence[int]) -> float:
        return cost(_values_of(axes, row))

    space = Space(tuple(axes), list_rejections, lambda _row: True, cost_of)
    array = covering_array(space)
    accepted = tuple(_values_of(axes, row) for row in array.rows)
    candidates = list(_neighbors(axes, accepted, list_conflicts)) if refusals else []
    refused = tuple(
        (rule, values) for rule in refusals for values in _rows_of_rule(rule, refusals, candidates)
    )
    return CoveringRows(array, accepted, refused, tuple(refusals))


def _neighbors(
    axes: Sequence[Axis],
    accepted: Sequence[dict[str, Any]],
    list_conflicts: Callable[[Values], Sequence[str]],
) -> Iterator[dict[str, Any]]:
    """Yield the rows that differ from an accepted row in one value."""
    for values in accepted:
        for axis in axes:
            for value in axis.values:
                neighbor = values | {axis.name: value}
                if value != values[axis.name] and not list_conflicts(neighbor):
                    yield neighbor


def _rows_of_rule(
    rule: Refusal, refusals: Sequence[Refusal], candidates: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield candidates that only this rule refuses, until each of their values is in a row."""
    only_this_rule = [
        values
        for values in candidates
        if rule.applies(values)
        and not any(other_rule.applies(values) for other_rule in refusals if other_rule is not rule)
    ]
    uncovered = {item for values in only_this_rule for item in values.items()}
    while uncovered:
        best = max(only_this_rule, key=lambda values: len(uncovered & set(values.items())))
        uncovered -= set(best.items())
        yield best


def _values_of(axes: Sequence[Axis], row: Sequence[int]) -> dict[str, Any]:
    return {axis.name: axis.values[i] for axis, i in zip(axes, row, strict=True)}


def one_of(axis: str, *values: object) -> Condition:
    """Return the condition that an axis has one of these values."""
    return lambda row: row[axis] in values


def name_of(row: Any) -> str:
    """Return the name of a row for pytest: its values in the order of the axes."""
    if isinstance(row, tuple):
        return f"{row[0].name}-{name_of(row[1])}"
    return "-".join(str(value) for value in row.values())
