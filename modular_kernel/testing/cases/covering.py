"""Pairwise covering arrays: few rows in which every two values of two axes occur together.

A `Space` defines which rows are refused and why, which compute anything, and what a row costs. Rows
are drawn greedily: of several candidates, each built value by value, the one that covers the most
new pairs per cost is taken. Equal spaces give equal rows on every machine.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from operator import add
from typing import Any

Row = tuple[int, ...]  # the index of one value for each axis
Pair = tuple[int, int]  # value numbers of two axes, ascending (see Space.numbers)

_CANDIDATES = 8
_TRIES = 8  # further attempts before falling back to the row that is known to hold a pair
_STEPS = 6  # maximum number of changes to repair a refused row


@dataclass(frozen=True)
class Axis:
    """One property that varies.

    values: the default first. idle: values with which nothing is computed, so that a row with one
    covers only pairs that include it. dear: whether the values differ in cost.
    """

    name: str
    values: tuple[Any, ...]
    idle: frozenset[Any] = frozenset()
    dear: bool = False


@dataclass(frozen=True)
class Space:
    """Rows over `axes`.

    refused: returns every reason why a row is invalid; empty if it is valid. live: whether a valid
    row computes anything. cost: of running a row, positive, in any unit; also called on unfinished
    rows.
    """

    axes: tuple[Axis, ...]
    refused: Callable[[Row], Sequence[str]]
    live: Callable[[Row], bool]
    cost: Callable[[Sequence[int]], float]

    def numbers(self, row: Row) -> tuple[int, ...]:
        """Return the number of each value of `row`, counted over all axes."""
        return tuple(map(add, self.starts, row))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The number of each axis's first value."""
        starts, total = [], 0
        for axis in self.axes:
            starts.append(total)
            total += len(axis.values)
        return tuple(starts)

    @property
    def size(self) -> int:
        """The number of values of all axes."""
        return sum(len(axis.values) for axis in self.axes)

    @cached_property
    def idle(self) -> frozenset[int]:
        """The numbers of the values with which nothing is computed."""
        starts_and_axes = zip(self.starts, self.axes, strict=True)
        return frozenset(
            start + i
            for start, axis in starts_and_axes
            for i, value in enumerate(axis.values)
            if value in axis.idle
        )

    def words(self, number: int) -> str:
        """Return the value with a number as "axis=value"."""
        for axis, start in zip(self.axes, self.starts, strict=True):
            if start <= number < start + len(axis.values):
                return f"{axis.name}={axis.values[number - start]}"
        raise IndexError(number)

    def pairs(self) -> Iterator[Pair]:
        """Yield every two values of different axes."""
        bounds = [
            range(start, start + len(axis.values))
            for start, axis in zip(self.starts, self.axes, strict=True)
        ]
        for one, other in combinations(bounds, 2):
            yield from ((a, b) for a in one for b in other)

    def covered(self, row: Row) -> frozenset[Pair]:
        """Return the pairs that a valid row covers.

        A row that computes something covers all its pairs. Otherwise it covers only the pairs that
        include one of its idle values.
        """
        numbers = self.numbers(row)
        if self.live(row):
            return frozenset(combinations(numbers, 2))
        reasons = self.idle.intersection(numbers)
        return frozenset((a, b) if a < b else (b, a) for a in reasons for b in numbers if a != b)


@dataclass(frozen=True)
class Array:
    """Rows that cover every possible pair of a space; impossible pairs are listed with the reason.

    lifeless: pairs that occur in valid rows, none of which computes anything.
    """

    space: Space
    rows: tuple[Row, ...]
    impossible: Mapping[Pair, str]
    idle_pairs: frozenset[Pair]

    @cached_property
    def met(self) -> frozenset[Pair]:
        """The pairs that the rows cover."""
        return frozenset[Pair]().union(*(self.space.covered(row) for row in self.rows))

    def missing(self) -> tuple[Pair, ...]:
        """Return the possible pairs that no row covers."""
        out = self.met | self.impossible.keys() | self.idle_pairs
        return tuple(pair for pair in self.space.pairs() if pair not in out)


def has_row(space: Space) -> bool:
    """Return whether `covering_array` finds any row."""
    return _Builder(space, random.Random(0)).ordinary() is not None


def covering_array(space: Space, seed: int = 0) -> Array:
    """Draw the rows. There are none if no valid row is found from the default values."""
    return _Builder(space, random.Random(seed)).draw()


class _Builder:
    """Builds one covering array. holds[pair]: a valid row that has both values."""

    def __init__(self, space: Space, dice: random.Random) -> None:
        self.space, self.dice = space, dice
        self.starts, self.count, self.idle = space.starts, len(space.axes), space.idle
        self.axis_of = [i for i, axis in enumerate(space.axes) for _ in axis.values]
        self.verdicts: dict[Row, Sequence[str]] = {}
        self.holds: dict[Pair, Row] = {}
        # Per value, bit sets of other values: compatible, incompatible, not yet covered with it.
        self.possible = [0] * space.size
        self.barred = [-1] * space.size
        self.open = [0] * space.size

    def draw(self) -> Array:
        space = self.space
        impossible = self._impossible()
        waiting = dict.fromkeys(self.holds)  # ordered, unlike a set
        for a, b in waiting:
            for one, other in ((a, b), (b, a)):
                self.possible[one] |= 1 << other
                self.open[one] |= 1 << other
        self.barred = [~bits for bits in self.possible]
        rows: list[Row] = []
        lifeless = set[Pair]()
        while waiting:
            row = self._best(next(iter(waiting)))
            met = [pair for pair in space.covered(row) if pair in waiting]
            if not met:  # the row contains the pair but computes nothing
                pair = next(iter(waiting))
                lifeless.add(pair)
                met = [pair]
            rows.append(row)
            for a, b in met:
                del waiting[a, b]
                self.open[a] &= ~(1 << b)
                self.open[b] &= ~(1 << a)
        return Array(space, tuple(self._needed(rows)), impossible, frozenset(lifeless))

    def _needed(self, rows: list[Row]) -> list[Row]:
        """Drop rows, costly ones first, whose pairs are all covered by other rows."""
        covered = {row: self.space.covered(row) for row in rows}
        times: dict[Pair, int] = {}
        for pairs in covered.values():
            for pair in pairs:
                times[pair] = times.get(pair, 0) + 1
        kept = dict.fromkeys(rows)
        for row in sorted(kept, key=self.space.cost, reverse=True):
            if covered[row] and all(times[pair] > 1 for pair in covered[row]):
                del kept[row]
                for pair in covered[row]:
                    times[pair] -= 1
        return list(kept)

    # ------------------------------------------------------------------------ what is possible

    def _impossible(self) -> dict[Pair, str]:
        """Find a row for each pair; return the impossible pairs with their reasons."""
        space = self.space
        ordinary = self.ordinary()
        if ordinary is None:
            return {pair: self._why((0,) * self.count) for pair in space.pairs()}
        homes = self._homes(ordinary)
        impossible = {}
        for pair in space.pairs():
            axes = [self.axis_of[number] for number in pair]
            values = [number - self.starts[axis] for number, axis in zip(pair, axes, strict=True)]
            single_rows = [homes.get(number) for number in pair]
            if None in single_rows:
                bad = single_rows.index(None)
                reason = self._why(_with(ordinary, axes[bad], values[bad]))
                impossible[pair] = reason
                continue
            row_with_pair = self._holding(ordinary, single_rows, axes, values)
            if row_with_pair is None:
                row = _with(_with(ordinary, axes[0], values[0]), axes[1], values[1])
                impossible[pair] = self._why(row)
            else:
                self.holds[pair] = row_with_pair
        return impossible

    def ordinary(self) -> Row | None:
        """Return a valid row with as many default values as possible, or None."""
        return self._mended((0,) * self.count, frozenset())

    def _homes(self, ordinary: Row) -> dict[int, Row]:
        """Return a valid row for each value that has one, as close to the default row as found."""
        homes = {}
        for axis, start in enumerate(self.starts):
            for value in range(len(self.space.axes[axis].values)):
                row = self._mended(_with(ordinary, axis, value), frozenset({axis}))
                if row is not None:
                    homes[start + value] = row
        return homes

    def _holding(
        self, ordinary: Row, homes: Sequence[Row | None], axes: list[int], values: list[int]
    ) -> Row | None:
        """Return a valid row with two values, preferably one that computes something."""
        idle_row = None
        for near in (ordinary, *homes):
            assert near is not None
            row = _with(_with(near, axes[0], values[0]), axes[1], values[1])
            if not self._refused(row):
                if self.space.live(row):
                    return row
                idle_row = idle_row or row
        if idle_row is not None:
            return idle_row
        for near in (ordinary, *homes):
            assert near is not None
            row = _with(_with(near, axes[0], values[0]), axes[1], values[1])
            mended = self._mended(row, frozenset(axes))
            if mended is not None:
                return mended
        return None

    def _mended(self, row: Row, fixed: frozenset[int]) -> Row | None:
        """Return `row`, or a valid row near it with the same `fixed` axes; None if none is found.

        Each step changes the value that leaves the fewest reasons against the row.
        """
        for _ in range(_STEPS):
            reasons = len(self._refused(row))
            if not reasons:
                return row
            best = row
            for axis in range(self.count):
                if axis in fixed:
                    continue
                for value in range(len(self.space.axes[axis].values)):
                    other = _with(row, axis, value)
                    if len(self._refused(other)) < reasons:
                        best, reasons = other, len(self._refused(other))
            if best == row:
                return None
            row = best
        return None if self._refused(row) else row

    def _refused(self, row: Row) -> Sequence[str]:
        verdict = self.verdicts.get(row)
        if verdict is None:
            verdict = self.verdicts[row] = self.space.refused(row)
        return verdict

    def _why(self, row: Row) -> str:
        return next(iter(self._refused(row)), "no valid row is known")

    # ------------------------------------------------------------------------------ drawing rows

    def _best(self, pair: Pair) -> Row:
        """Return the candidate with `pair` that covers most per cost, else a known row."""
        best, best_gain = self.holds[pair], 0.0
        num_found = 0
        for _ in range(_CANDIDATES + _TRIES):
            row = self._candidate(pair)
            gain = self._gain(row) / self.space.cost(row)
            if gain <= best_gain or self._refused(row) or not self._proves(row, pair):
                continue
            best, best_gain, num_found = row, gain, num_found + 1
            if num_found == _CANDIDATES:
                break
        return best

    def _proves(self, row: Row, pair: Pair) -> bool:
        return not self.idle.isdisjoint(pair) or self.space.live(row)

    def _gain(self, row: Row) -> int:
        """Return twice the number of new pairs that `row` covers if it computes something."""
        numbers = self.space.numbers(row)
        value_bits = _bits(numbers)
        counted = [n for n in numbers if n in self.idle] or numbers
        return sum((self.open[number] & value_bits).bit_count() for number in counted)

    def _candidate(self, pair: Pair) -> Row:
        """Build a row with `pair` from pairwise compatible values.

        For each other axis, in random order, take the value that covers the most new pairs, per
        cost where the values differ in cost.
        """
        row = [0] * self.count  # default values until one is chosen
        fixed = {self.axis_of[number]: number for number in pair}
        for axis, number in fixed.items():
            row[axis] = number - self.starts[axis]
        bits = _bits(pair)
        rest = [axis for axis in range(self.count) if axis not in fixed]
        self.dice.shuffle(rest)
        for axis in rest:
            row[axis], number = self._chosen(axis, row, bits)
            bits |= 1 << number
        return tuple(row)

    def _chosen(self, axis: int, row: list[int], bits: int) -> tuple[int, int]:
        """Choose a value of `axis` for a row with the values `bits`; return (index, number)."""
        start, dear = self.starts[axis], self.space.axes[axis].dear
        end = start + len(self.space.axes[axis].values)
        cost, random_tie, still_open = self.space.cost, self.dice.random, self.open
        best, best_score = start, -1.0
        for number, barred in enumerate(self.barred[start:end], start):
            if bits & barred:
                continue
            score = (still_open[number] & bits).bit_count() + random_tie()
            if dear:
                row[axis] = number - start
                score /= cost(row)
            if score > best_score:
                best, best_score = number, score
        return best - start, best


def _with(row: Row, axis: int, value: int) -> Row:
    return (*row[:axis], value, *row[axis + 1 :])


def _bits(numbers: Sequence[int]) -> int:
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits
