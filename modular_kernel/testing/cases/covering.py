"""Pairwise covering arrays: few rows that contain every pair of values of two axes.

A `Space` defines which rows are invalid and why, which rows compute anything, and what a row costs.
Rows are chosen greedily: several candidates are built value by value, and the candidate that covers
the most new pairs per unit of cost is taken. The random choices are seeded, so equal spaces give
equal rows on every machine.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from operator import add
from typing import Any

Row = tuple[int, ...]  # for each axis, the index of one of its values
Pair = tuple[int, int]  # value ids (see Space.value_ids) of two axes, ascending

_NUM_CANDIDATES = 8
_NUM_EXTRA_CANDIDATES = 8  # drawn if some of the first _NUM_CANDIDATES are invalid
_MAX_REPAIRS = 6  # maximum number of values that are changed to make an invalid row valid


@dataclass(frozen=True)
class Axis:
    """One property that varies.

    Attributes:
        values: the values, with the default first.
        idle: values with which a row computes nothing, such as tokens=0. A row with an idle value
            covers only the pairs that include this value.
        varies_cost: whether the values differ in cost.
    """

    name: str
    values: tuple[Any, ...]
    idle: frozenset[Any] = frozenset()
    varies_cost: bool = False


@dataclass(frozen=True)
class Space:
    """The rows over `axes`, with the reasons why rows are invalid, and the cost of running them.

    Attributes:
        axes: the axes.
        list_rejections: returns every reason why a row is invalid; empty if it is valid.
        computes: returns whether a valid row computes anything.
        cost: returns the positive cost of running a row, in any unit. Also called with rows
            in which some values are not chosen yet and have their defaults.
    """

    axes: tuple[Axis, ...]
    list_rejections: Callable[[Row], Sequence[str]]
    computes: Callable[[Row], bool]
    cost: Callable[[Sequence[int]], float]

    def value_ids(self, row: Row) -> tuple[int, ...]:
        """Return a unique id for each value in `row`.

        The values of all axes are numbered consecutively.
        """
        return tuple(map(add, self.first_value_ids, row))

    @cached_property
    def first_value_ids(self) -> tuple[int, ...]:
        """The id of the first value of each axis."""
        first_value_ids, total = [], 0
        for axis in self.axes:
            first_value_ids.append(total)
            total += len(axis.values)
        return tuple(first_value_ids)

    @property
    def num_values(self) -> int:
        """The total number of values of all axes."""
        return sum(len(axis.values) for axis in self.axes)

    @cached_property
    def idle(self) -> frozenset[int]:
        """The ids of all idle values."""
        starts_and_axes = zip(self.first_value_ids, self.axes, strict=True)
        return frozenset(
            start + i
            for start, axis in starts_and_axes
            for i, value in enumerate(axis.values)
            if value in axis.idle
        )

    def describe(self, value_id: int) -> str:
        """Format a value as "axis=value"."""
        for axis, start in zip(self.axes, self.first_value_ids, strict=True):
            if start <= value_id < start + len(axis.values):
                return f"{axis.name}={axis.values[value_id - start]}"
        raise IndexError(value_id)

    def pairs(self) -> Iterator[Pair]:
        """Yield every pair of values of different axes."""
        bounds = [
            range(start, start + len(axis.values))
            for start, axis in zip(self.first_value_ids, self.axes, strict=True)
        ]
        for first, second in combinations(bounds, 2):
            yield from ((a, b) for a in first for b in second)

    def list_covered_pairs(self, row: Row) -> frozenset[Pair]:
        """Return the pairs that a valid row covers.

        These are all of its pairs if the row computes something, and the pairs with an idle value
        otherwise.
        """
        ids = self.value_ids(row)
        if self.computes(row):
            return frozenset(combinations(ids, 2))
        idle_ids = self.idle.intersection(ids)
        return frozenset((a, b) if a < b else (b, a) for a in idle_ids for b in ids if a != b)


@dataclass(frozen=True)
class CoveringArray:
    """Rows that cover every possible pair of a space.

    Attributes:
        space: the space.
        rows: the rows.
        impossible: maps each pair that no valid row contains to the reason.
        idle_pairs: pairs that occur in valid rows, but in no row that computes anything.
    """

    space: Space
    rows: tuple[Row, ...]
    impossible: Mapping[Pair, str]
    idle_pairs: frozenset[Pair]

    @cached_property
    def covered_pairs(self) -> frozenset[Pair]:
        """The pairs that the rows cover."""
        return frozenset[Pair]().union(*(self.space.list_covered_pairs(row) for row in self.rows))

    def missing_pairs(self) -> tuple[Pair, ...]:
        """Return the possible pairs that no row covers."""
        excluded = self.covered_pairs | self.impossible.keys() | self.idle_pairs
        return tuple(pair for pair in self.space.pairs() if pair not in excluded)


def has_valid_row(space: Space) -> bool:
    """Return whether `covering_array` finds any row."""
    return _Builder(space, random.Random(0)).find_default_row() is not None


def covering_array(space: Space, seed: int = 0) -> CoveringArray:
    """Draw the rows of a covering array.

    The array has no rows if no valid row can be reached from the default values.
    """
    return _Builder(space, random.Random(seed)).draw()


class _Builder:
    """Builds one covering array.

    Attributes:
        rejections_by_row: cache of `Space.list_rejections`.
        rows_by_pair: a valid row for each possible pair.
    """

    def __init__(self, space: Space, rng: random.Random) -> None:
        self.space, self.rng = space, rng
        self.first_value_ids, self.num_axes, self.idle = (
            space.first_value_ids,
            len(space.axes),
            space.idle,
        )
        self.axis_by_value_id = [i for i, axis in enumerate(space.axes) for _ in axis.values]
        self.rejections_by_row: dict[Row, Sequence[str]] = {}
        self.rows_by_pair: dict[Pair, Row] = {}
        # Bit sets by value id: the ids that are compatible with the value, the ids that are
        # incompatible, and the ids whose pair with the value is not covered yet.
        self.compatible = [0] * space.num_values
        self.incompatible = [-1] * space.num_values
        self.uncovered = [0] * space.num_values

    def draw(self) -> CoveringArray:
        space = self.space
        impossible = self._find_impossible()
        remaining = dict.fromkeys(self.rows_by_pair)  # ordered, unlike a set
        for a, b in remaining:
            for first, second in ((a, b), (b, a)):
                self.compatible[first] |= 1 << second
                self.uncovered[first] |= 1 << second
        self.incompatible = [~bits for bits in self.compatible]
        rows: list[Row] = []
        idle_pairs = set[Pair]()
        while remaining:
            row = self._find_best_row(next(iter(remaining)))
            newly_covered = [pair for pair in space.list_covered_pairs(row) if pair in remaining]
            if not newly_covered:  # the row contains the pair but computes nothing
                pair = next(iter(remaining))
                idle_pairs.add(pair)
                newly_covered = [pair]
            rows.append(row)
            for a, b in newly_covered:
                del remaining[a, b]
                self.uncovered[a] &= ~(1 << b)
                self.uncovered[b] &= ~(1 << a)
        return CoveringArray(
            space, tuple(self._drop_redundant(rows)), impossible, frozenset(idle_pairs)
        )

    def _drop_redundant(self, rows: list[Row]) -> list[Row]:
        """Drop rows whose pairs are all covered by other rows, the most costly rows first."""
        covered = {row: self.space.list_covered_pairs(row) for row in rows}
        cover_counts: dict[Pair, int] = {}
        for pairs in covered.values():
            for pair in pairs:
                cover_counts[pair] = cover_counts.get(pair, 0) + 1
        necessary_rows = dict.fromkeys(rows)
        for row in sorted(necessary_rows, key=self.space.cost, reverse=True):
            if covered[row] and all(cover_counts[pair] > 1 for pair in covered[row]):
                del necessary_rows[row]
                for pair in covered[row]:
                    cover_counts[pair] -= 1
        return list(necessary_rows)

    # ------------------------------------------------------------------------ impossible pairs

    def _find_impossible(self) -> dict[Pair, str]:
        """Fill `rows_by_pair`; return the pairs that no valid row contains, and why."""
        space = self.space
        default_row = self.find_default_row()
        if default_row is None:
            return {pair: self._find_reason((0,) * self.num_axes) for pair in space.pairs()}
        rows_by_value = self._find_rows_by_value(default_row)
        impossible = {}
        for pair in space.pairs():
            axes = [self.axis_by_value_id[value_id] for value_id in pair]
            values = [
                value_id - self.first_value_ids[axis]
                for value_id, axis in zip(pair, axes, strict=True)
            ]
            single_rows = [rows_by_value.get(value_id) for value_id in pair]
            if None in single_rows:
                missing = single_rows.index(None)
                reason = self._find_reason(
                    _replace_value(default_row, axes[missing], values[missing])
                )
                impossible[pair] = reason
                continue
            row_with_pair = self._find_row_with(default_row, single_rows, axes, values)
            if row_with_pair is None:
                row = _replace_value(
                    _replace_value(default_row, axes[0], values[0]), axes[1], values[1]
                )
                impossible[pair] = self._find_reason(row)
            else:
                self.rows_by_pair[pair] = row_with_pair
        return impossible

    def find_default_row(self) -> Row | None:
        """Return a valid row with as many default values as possible, or None."""
        return self._repair((0,) * self.num_axes, frozenset())

    def _find_rows_by_value(self, default_row: Row) -> dict[int, Row]:
        """Return a valid row for each value that has one, close to the default row."""
        rows = {}
        for axis, start in enumerate(self.first_value_ids):
            for value in range(len(self.space.axes[axis].values)):
                row = self._repair(_replace_value(default_row, axis, value), frozenset({axis}))
                if row is not None:
                    rows[start + value] = row
        return rows

    def _find_row_with(
        self, default_row: Row, value_rows: Sequence[Row | None], axes: list[int], values: list[int]
    ) -> Row | None:
        """Return a valid row with the given values of two axes, or None.

        Rows that compute something are preferred.

        value_rows: for each of the two values, a valid row that contains it.
        """
        idle_row = None
        for initial_row in (default_row, *value_rows):
            assert initial_row is not None
            row = _replace_value(
                _replace_value(initial_row, axes[0], values[0]), axes[1], values[1]
            )
            if not self._get_rejections(row):
                if self.space.computes(row):
                    return row
                idle_row = idle_row or row
        if idle_row is not None:
            return idle_row
        for initial_row in (default_row, *value_rows):
            assert initial_row is not None
            row = _replace_value(
                _replace_value(initial_row, axes[0], values[0]), axes[1], values[1]
            )
            repaired = self._repair(row, frozenset(axes))
            if repaired is not None:
                return repaired
        return None

    def _repair(self, row: Row, fixed: frozenset[int]) -> Row | None:
        """Return `row`, or a similar valid row with the same values of the `fixed` axes, or None.

        Each step makes the single change that leaves the fewest rejections.
        """
        for _ in range(_MAX_REPAIRS):
            num_rejections = len(self._get_rejections(row))
            if not num_rejections:
                return row
            best_row = row
            for axis in range(self.num_axes):
                if axis in fixed:
                    continue
                for value in range(len(self.space.axes[axis].values)):
                    candidate = _replace_value(row, axis, value)
                    if len(self._get_rejections(candidate)) < num_rejections:
                        best_row, num_rejections = candidate, len(self._get_rejections(candidate))
            if best_row == row:
                return None
            row = best_row
        return None if self._get_rejections(row) else row

    def _get_rejections(self, row: Row) -> Sequence[str]:
        rejections = self.rejections_by_row.get(row)
        if rejections is None:
            rejections = self.rejections_by_row[row] = self.space.list_rejections(row)
        return rejections

    def _find_reason(self, row: Row) -> str:
        return next(iter(self._get_rejections(row)), "no valid row is known")

    # ------------------------------------------------------------------------------ drawing rows

    def _find_best_row(self, pair: Pair) -> Row:
        """Return the valid candidate with `pair` that covers the most new pairs per unit of cost.

        Returns the row in `rows_by_pair` if no candidate is valid.
        """
        best, best_gain = self.rows_by_pair[pair], 0.0
        num_candidates = 0
        for _ in range(_NUM_CANDIDATES + _NUM_EXTRA_CANDIDATES):
            row = self._build_candidate(pair)
            gain = self._count_new_pairs(row) / self.space.cost(row)
            if gain <= best_gain or self._get_rejections(row) or not self._covers(row, pair):
                continue
            best, best_gain, num_candidates = row, gain, num_candidates + 1
            if num_candidates == _NUM_CANDIDATES:
                break
        return best

    def _covers(self, row: Row, pair: Pair) -> bool:
        return not self.idle.isdisjoint(pair) or self.space.computes(row)

    def _count_new_pairs(self, row: Row) -> int:
        """Return twice the number of uncovered pairs that `row` covers.

        Each pair is counted from both of its values. If the row has idle values, only their pairs
        count.
        """
        value_ids = self.space.value_ids(row)
        value_bits = _make_bit_set(value_ids)
        counted_ids = [i for i in value_ids if i in self.idle] or value_ids
        return sum((self.uncovered[value_id] & value_bits).bit_count() for value_id in counted_ids)

    def _build_candidate(self, pair: Pair) -> Row:
        """Build a row with `pair` from pairwise compatible values.

        Axes are filled in random order, each with the value that covers the most new pairs, or the
        most new pairs per unit of cost if the values of the axis differ in cost.
        """
        row = [0] * self.num_axes  # the default values, until others are chosen
        fixed = {self.axis_by_value_id[value_id]: value_id for value_id in pair}
        for axis, value_id in fixed.items():
            row[axis] = value_id - self.first_value_ids[axis]
        bits = _make_bit_set(pair)
        remaining_axes = [axis for axis in range(self.num_axes) if axis not in fixed]
        self.rng.shuffle(remaining_axes)
        for axis in remaining_axes:
            row[axis], value_id = self._choose_value(axis, row, bits)
            bits |= 1 << value_id
        return tuple(row)

    def _choose_value(self, axis: int, row: list[int], bits: int) -> tuple[int, int]:
        """Choose a value of `axis` for a row with the values `bits`; return (index, id)."""
        start, varies_cost = self.first_value_ids[axis], self.space.axes[axis].varies_cost
        end = start + len(self.space.axes[axis].values)
        cost, draw_tie_breaker, uncovered = self.space.cost, self.rng.random, self.uncovered
        best, best_score = start, -1.0
        for value_id, incompatible in enumerate(self.incompatible[start:end], start):
            if bits & incompatible:
                continue
            score = (uncovered[value_id] & bits).bit_count() + draw_tie_breaker()
            if varies_cost:
                row[axis] = value_id - start
                score /= cost(row)
            if score > best_score:
                best, best_score = value_id, score
        return best - start, best


def _replace_value(row: Row, axis: int, value: int) -> Row:
    return (*row[:axis], value, *row[axis + 1 :])


def _make_bit_set(value_ids: Sequence[int]) -> int:
    bits = 0
    for value_id in value_ids:
        bits |= 1 << value_id
    return bits
