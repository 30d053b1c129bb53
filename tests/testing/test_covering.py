"""Covering arrays: every pair that a valid row can hold is in one, and the others say why not."""

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


def refused(row: Row) -> Sequence[str]:
    """Large ones are not green; flat ones have no lid, and none has feet unless it is round."""
    reasons = []
    if row[0] == 1 and row[1] > 3:
        reasons.append("[size] green ones are small")
    if row[2] == 2 and row[3]:
        reasons.append("[lid] flat ones have none")
    if row[2] != 0 and row[4]:
        reasons.append("[feet] round ones alone have any")
    return reasons


def free(_row: Row) -> Sequence[str]:
    return ()


def colored(row: Row) -> bool:
    return row[0] != 3


def alive(_row: Row) -> bool:
    return True


def even(_row: Row) -> float:
    return 1.0


CONSTRAINED = Space(AXES, refused, colored, even)


def all_rows(space: Space) -> list[Row]:
    rows = product(*(range(len(axis.values)) for axis in space.axes))
    return [row for row in rows if not space.rejections_of(row)]


def test_every_pair_that_a_valid_row_proves_is_in_a_row_drawn() -> None:
    array = covering_array(CONSTRAINED)
    provable = set().union(*(CONSTRAINED.covered(row) for row in all_rows(CONSTRAINED)))
    drawn = set().union(*(CONSTRAINED.covered(row) for row in array.rows))
    assert drawn == provable
    assert array.missing() == ()
    assert len(array.rows) < len(all_rows(CONSTRAINED)) / 4


def test_rows_drawn_are_valid() -> None:
    rows = covering_array(CONSTRAINED).rows
    assert [row for row in rows if refused(row)] == []
    assert len(rows) == len(set(rows))


def test_an_impossible_pair_has_its_reason() -> None:
    array = covering_array(CONSTRAINED)
    describe = CONSTRAINED.describe
    reasons = {(describe(a), describe(b)): reason for (a, b), reason in array.impossible.items()}
    assert reasons == {
        ("color=green", "size=4"): "[size] green ones are small",
        ("color=green", "size=5"): "[size] green ones are small",
        ("shape=flat", "lid=True"): "[lid] flat ones have none",
        **{
            (f"shape={shape}", f"feet={feet}"): "[feet] round ones alone have any"
            for shape in ("square", "flat")
            for feet in (3, 4)
        },
    }


def test_a_row_in_which_nothing_is_computed_proves_its_reason_alone() -> None:
    row = (3, 0, 0, 0, 0)
    none = CONSTRAINED.value_ids(row)[0]
    assert {none in pair for pair in CONSTRAINED.covered(row)} == {True}
    assert len(CONSTRAINED.covered(row)) == 4
    assert len(CONSTRAINED.covered((0, 0, 0, 0, 0))) == 10


def test_pairs_that_no_living_row_holds_are_told() -> None:
    """Nothing is computed where a lid meets three feet, though no value alone is the reason."""
    space = Space(AXES[1:], free, lambda row: not (row[2] == 1 and row[3] == 1), even)
    array = covering_array(space)
    lifeless = {(space.describe(a), space.describe(b)) for a, b in array.idle_pairs}
    assert lifeless == {("lid=True", "feet=3")}
    assert array.missing() == ()


def test_missing_pairs_are_noticed() -> None:
    array = covering_array(CONSTRAINED)
    for lost in range(len(array.rows)):
        rows = array.rows[:lost] + array.rows[lost + 1 :]
        assert type(array)(CONSTRAINED, rows, array.impossible, array.idle_pairs).missing() != ()


def test_equal_spaces_give_equal_rows() -> None:
    again = Space(AXES, refused, colored, even)
    assert covering_array(CONSTRAINED).rows == covering_array(again).rows


def test_the_ordinary_row_may_be_refused() -> None:
    def small_or_open(row: Row) -> Sequence[str]:
        return ["[size] 0"] * (row[1] == 0) + ["[lid] none"] * (row[3] == 0)

    space = Space(AXES, small_or_open, alive, even)
    array = covering_array(space)
    assert array.rows
    assert array.missing() == ()
    assert all(row[1] and row[3] for row in array.rows)


def test_a_space_without_a_valid_row_has_none() -> None:
    array = covering_array(Space(AXES, lambda _row: ("[never] no",), alive, even))
    assert array.rows == ()
    assert set(array.impossible.values()) == {"[never] no"}


@pytest.mark.parametrize("dear", [0, 5])
def test_what_is_dear_is_met_seldom(dear: int) -> None:
    """Rows that hold it are no more than its pairs need, and cost less than rows drawn blindly."""
    axes = (*AXES, Axis("weight", tuple(range(6))))

    def cost(row: Row) -> float:
        return (30.0 if row[1] == dear else 1.0) * (30.0 if row[5] == dear else 1.0)

    plain = covering_array(Space(axes, free, alive, even)).rows
    rows = covering_array(Space(axes, free, alive, cost)).rows
    assert sum(map(cost, rows)) <= sum(map(cost, plain))
    assert sum(row[1] == row[5] == dear for row in rows) == 1
