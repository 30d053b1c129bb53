"""A covering array contains every pair of axis values that a valid row can have, and gives a reason
for each impossible pair.
"""

from collections.abc import Sequence
from itertools import product

import pytest

from modular_kernel.testing.cases.covering import Axis, Row, Space, covering_array

AXES = (
    Axis("color", ("red", "green", "blue", "none"), frozenset({"none"})),
    Axis("size", tuple(range(6))),
    Axis("shape", ("round", "square", "flat")),
    Axis("lid", (False, True)),
    Axis("feet", (0, 3, 4)),
)


def reject_invalid_rows(row: Row) -> Sequence[str]:
    """Reject rows that are green and large, flat with a lid, or not round with feet."""
    reasons = []
    if row[0] == 1 and row[1] > 3:
        reasons.append("[size] green needs a small size")
    if row[2] == 2 and row[3]:
        reasons.append("[lid] flat needs no lid")
    if row[2] != 0 and row[4]:
        reasons.append("[feet] feet need round")
    return reasons


def reject_nothing(_row: Row) -> Sequence[str]:
    return ()


def has_color(row: Row) -> bool:
    return row[0] != 3


def is_computed(_row: Row) -> bool:
    return True


def compute_unit_cost(_row: Row) -> float:
    return 1.0


CONSTRAINED = Space(AXES, reject_invalid_rows, has_color, compute_unit_cost)


def list_all_rows(space: Space) -> list[Row]:
    rows = product(*(range(len(axis.values)) for axis in space.axes))
    return [row for row in rows if not space.list_rejections(row)]


def test_every_possible_pair_is_covered() -> None:
    array = covering_array(CONSTRAINED)
    possible = set().union(
        *(CONSTRAINED.list_covered_pairs(row) for row in list_all_rows(CONSTRAINED))
    )
    covered = set().union(*(CONSTRAINED.list_covered_pairs(row) for row in array.rows))
    assert covered == possible
    assert array.missing_pairs() == ()
    assert len(array.rows) < len(list_all_rows(CONSTRAINED)) / 4


def test_rows_are_valid_and_distinct() -> None:
    rows = covering_array(CONSTRAINED).rows
    assert [row for row in rows if reject_invalid_rows(row)] == []
    assert len(rows) == len(set(rows))


def test_impossible_pairs_have_a_reason() -> None:
    array = covering_array(CONSTRAINED)
    describe = CONSTRAINED.describe
    reasons = {
        (describe(first), describe(second)): reason
        for (first, second), reason in array.impossible.items()
    }
    assert reasons == {
        ("color=green", "size=4"): "[size] green needs a small size",
        ("color=green", "size=5"): "[size] green needs a small size",
        ("shape=flat", "lid=True"): "[lid] flat needs no lid",
        **{
            (f"shape={shape}", f"feet={feet}"): "[feet] feet need round"
            for shape in ("square", "flat")
            for feet in (3, 4)
        },
    }


def test_idle_rows_cover_only_pairs_with_the_idle_value() -> None:
    row = (3, 0, 0, 0, 0)
    idle_value = CONSTRAINED.value_ids(row)[0]
    assert {idle_value in pair for pair in CONSTRAINED.list_covered_pairs(row)} == {True}
    assert len(CONSTRAINED.list_covered_pairs(row)) == 4
    assert len(CONSTRAINED.list_covered_pairs((0, 0, 0, 0, 0))) == 10


def test_pairs_that_occur_only_in_idle_rows_are_reported() -> None:
    """A row with both a lid and three feet is idle, but neither value alone makes a row idle."""
    space = Space(
        AXES[1:], reject_nothing, lambda row: not (row[2] == 1 and row[3] == 1), compute_unit_cost
    )
    array = covering_array(space)
    idle_pairs = {
        (space.describe(first), space.describe(second)) for first, second in array.idle_pairs
    }
    assert idle_pairs == {("lid=True", "feet=3")}
    assert array.missing_pairs() == ()


def test_missing_pairs_are_reported() -> None:
    array = covering_array(CONSTRAINED)
    for index in range(len(array.rows)):
        rows = array.rows[:index] + array.rows[index + 1 :]
        assert (
            type(array)(CONSTRAINED, rows, array.impossible, array.idle_pairs).missing_pairs() != ()
        )


def test_equal_spaces_give_equal_rows() -> None:
    equal_space = Space(AXES, reject_invalid_rows, has_color, compute_unit_cost)
    assert covering_array(CONSTRAINED).rows == covering_array(equal_space).rows


def test_the_default_row_may_be_invalid() -> None:
    def reject_small_or_open(row: Row) -> Sequence[str]:
        return ["[size] 0"] * (row[1] == 0) + ["[lid] none"] * (row[3] == 0)

    space = Space(AXES, reject_small_or_open, is_computed, compute_unit_cost)
    array = covering_array(space)
    assert array.rows
    assert array.missing_pairs() == ()
    assert all(row[1] and row[3] for row in array.rows)


def test_a_space_without_valid_rows_has_no_rows() -> None:
    array = covering_array(
        Space(AXES, lambda _row: ("[never] no",), is_computed, compute_unit_cost)
    )
    assert array.rows == ()
    assert set(array.impossible.values()) == {"[never] no"}


@pytest.mark.parametrize("expensive", [0, 5])
def test_expensive_values_are_in_as_few_rows_as_possible(expensive: int) -> None:
    axes = (*AXES, Axis("weight", tuple(range(6))))

    def compute_cost(row: Row) -> float:
        return (30.0 if row[1] == expensive else 1.0) * (30.0 if row[5] == expensive else 1.0)

    without_cost = covering_array(Space(axes, reject_nothing, is_computed, compute_unit_cost)).rows
    rows = covering_array(Space(axes, reject_nothing, is_computed, compute_cost)).rows
    assert sum(map(compute_cost, rows)) <= sum(map(compute_cost, without_cost))
    assert sum(row[1] == row[5] == expensive for row in rows) == 1
