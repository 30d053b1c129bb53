"""`covering_rows.draw` covers every valid pair of axis values and every rule that refuses a row."""

from itertools import combinations, product

from covering_rows import Refusal, Values, draw, one_of

from modular_kernel.errors import ConfigurationError, ShapeError
from modular_kernel.testing.cases.covering import Axis

AXES = (
    Axis("kind", ("plain", "packed", "flat")),
    Axis("ranks", (1, 2, 3)),
    Axis("bias", (False, True)),
    Axis("size", (6, 4, 8)),
)
UNEVEN = Refusal(
    "uneven",
    ConfigurationError,
    "size",
    (lambda v: v["ranks"] > 1, lambda v: v["size"] % v["ranks"] != 0),
)
FLAT_OVER_RANKS = Refusal(
    "cut", ShapeError, "kind", (one_of("kind", "flat"), one_of("ranks", 2, 3))
)


def list_impossible(values: Values) -> tuple[str, ...]:
    return ("flat has no bias",) if values["kind"] == "flat" and values["bias"] else ()


COVERING_ROWS = draw(AXES, (UNEVEN, FLAT_OVER_RANKS), list_impossible)


def list_all_values() -> list[Values]:
    names = [axis.name for axis in AXES]
    rows = product(*(axis.values for axis in AXES))
    return [dict(zip(names, row, strict=True)) for row in rows]


def list_pairs(values: Values) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    return set(combinations(values.items(), 2))


def test_accepted_rows_cover_every_valid_pair() -> None:
    valid = [
        v
        for v in list_all_values()
        if not (UNEVEN.applies(v) or FLAT_OVER_RANKS.applies(v) or list_impossible(v))
    ]
    possible = set().union(*map(list_pairs, valid))
    assert set().union(*map(list_pairs, COVERING_ROWS.accepted)) == possible
    assert all(values in valid for values in COVERING_ROWS.accepted)
    assert COVERING_ROWS.unmet() == []


def test_each_refused_row_breaks_one_rule() -> None:
    for rule, other_rule in ((UNEVEN, FLAT_OVER_RANKS), (FLAT_OVER_RANKS, UNEVEN)):
        only_this_rule = [
            v
            for v in list_all_values()
            if rule.applies(v) and not other_rule.applies(v) and not list_impossible(v)
        ]
        refused_values = [values for refusal, values in COVERING_ROWS.refused if refusal is rule]
        assert all(values in only_this_rule for values in refused_values)
        covered = {item for values in refused_values for item in values.items()}
        assert covered == {item for values in only_this_rule for item in values.items()}


def test_a_rule_without_rows_is_reported() -> None:
    never = Refusal(
        "never", ConfigurationError, "", (one_of("kind", "plain"), one_of("kind", "flat"))
    )
    assert draw(AXES, (UNEVEN, never), list_impossible).unmet() == ["never"]


def test_impossible_pairs_have_their_reason() -> None:
    assert COVERING_ROWS.impossible() == {
        ("kind=flat", "ranks=2"): "refused: cut",
        ("kind=flat", "ranks=3"): "refused: cut",
        ("kind=flat", "bias=True"): "flat has no bias",
        ("ranks=3", "size=4"): "refused: uneven",
        ("ranks=3", "size=8"): "refused: uneven",
    }


def test_rows_without_a_rule_are_a_covering_array() -> None:
    rows = draw(AXES, ())
    assert set().union(*map(list_pairs, rows.accepted)) == set().union(
        *map(list_pairs, list_all_values())
    )
    assert rows.refused == ()
