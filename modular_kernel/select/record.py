"""What was measured and what follows from it, as data. Nothing here reads a clock or a file.

A bucket is a number of tokens that was measured. Between two buckets that chose different pairings
lies a crossover: the number of tokens where the lines through their times meet.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from modular_kernel.types import Problem

WORTH = 1.01  # times the best: a pairing this close stays, so that noise makes no crossovers
_FEWEST_TOKENS = 1

Pair = tuple[str, str]  # names of a PrepareAndFinalize and of an experts part


def named(pair: Pair) -> str:
    """Name a pairing as every verb prints it."""
    return f"{pair[0]} x {pair[1]}"


@dataclass(frozen=True)
class TimedOutcome:
    """What became of one valid pairing at one number of tokens.

    us: microseconds of a planned call, the slowest rank's; None if it has no time, and `why` says
    so. rough: far from the best, so timed only once or twice. mode: "graph" (replays of a CUDA
    graph), "eager" or "cpu".
    """

    pair: Pair
    us: float | None = None
    rough: bool = False
    mode: str = ""
    why: str = ""


@dataclass(frozen=True)
class Bucket:
    """All outcomes at one number of tokens."""

    tokens: int
    outcomes: tuple[TimedOutcome, ...]

    @property
    def times(self) -> dict[Pair, float]:
        """Microseconds of those that have a time."""
        return {o.pair: o.us for o in self.outcomes if o.us is not None}


@dataclass(frozen=True)
class Segment:
    """Calls of first to last tokens run on `pair`. measured: of a bucket in it or beside it."""

    first: int
    last: int
    pair: Pair
    measured: bool = True


def bucket_tokens(most: int) -> tuple[int, ...]:
    """Powers of two up to `most`, and `most`: where time changes its slope is not known."""
    powers = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return (*powers, max(most, _FEWEST_TOKENS))


def in_halves(tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the same numbers, ends first, then the middle of every gap.

    A budget that ends early then leaves no large gap.
    """
    order = [tokens[-1], tokens[0]]
    gaps = [(0, len(tokens) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        middle = (low + high) // 2
        if low < middle < high:
            order.append(tokens[middle])
            gaps += [(low, middle), (middle, high)]
    return tuple(dict.fromkeys(order))


def chosen(buckets: Sequence[Bucket], order: Sequence[Pair]) -> dict[int, Pair]:
    """Return the pairing of every bucket that has a time, ascending.

    It is the fastest; of equally fast ones the first of `order`. The next smaller bucket's stays
    where it is within WORTH of the fastest.
    """
    found: dict[int, Pair] = {}
    before: Pair | None = None
    for bucket in sorted(buckets, key=lambda b: b.tokens):
        times = bucket.times
        if not times:
            continue
        best = min(times, key=lambda pair: (times[pair], _place(pair, order)))
        if before is not None and times.get(before, math.inf) <= WORTH * times[best]:
            best = before
        found[bucket.tokens] = before = best
    return found


def _place(pair: Pair, order: Sequence[Pair]) -> int:
    return order.index(pair) if pair in order else len(order)


def segments(
    problem: Problem,
    buckets: Sequence[Bucket],
    order: Sequence[Pair],
    *,
    valid: Mapping[int, Sequence[Pair]],
) -> tuple[Segment, ...]:
    """Which pairing serves which numbers of tokens, from 0 to problem.tokens without a gap.

    order: all pairings, the one to take unmeasured first. valid: those that are valid at each
    number of tokens asked for. Without any time, the first valid one of `order` serves all. A
    number that was not measured goes with its neighbours.
    """
    picks = chosen(buckets, order)
    if not picks:
        return _unmeasured(valid, order)
    at = {bucket.tokens: bucket.times for bucket in buckets}
    found: list[Segment] = []
    first = 0
    for low, high in pairwise(picks):
        if picks[low] != picks[high]:
            last = crossover((low, at[low]), (high, at[high]), picks[low], picks[high])
            found.append(Segment(first, last, picks[low]))
            first = last + 1
    last_measured = max(picks)
    top = max(problem.tokens, first)
    found.append(Segment(first, top, picks[last_measured]))
    return tuple(_only_valid(found, valid, order))


def _unmeasured(valid: Mapping[int, Sequence[Pair]], order: Sequence[Pair]) -> tuple[Segment, ...]:
    """By `order` alone, each number of tokens by what is valid there."""
    found: list[Segment] = []
    first = 0
    for tokens in sorted(valid):
        if not valid[tokens]:
            continue
        pair = min(valid[tokens], key=lambda p: _place(p, order))
        if found and found[-1].pair == pair:
            found[-1] = Segment(found[-1].first, tokens, pair, measured=False)
        else:
            found.append(Segment(first, tokens, pair, measured=False))
        first = tokens + 1
    return tuple(found)


def _only_valid(
    found: Sequence[Segment], valid: Mapping[int, Sequence[Pair]], order: Sequence[Pair]
) -> list[Segment]:
    """Let valid pairings take over where the last segment's is not valid.

    That segment reaches past what was measured, where a part may have a capacity of its own.
    """
    *others, top = found
    beyond = {t: pairs for t, pairs in valid.items() if t > top.first}
    bad = sorted(t for t, pairs in beyond.items() if top.pair not in pairs)
    if not bad:
        return list(found)
    good = [t for t in beyond if t < bad[0]]
    last = max([top.first, *good])
    rest = _unmeasured({t: p for t, p in beyond.items() if t > last}, order)
    if not rest:
        return [*others, Segment(top.first, last, top.pair)]
    head = Segment(last + 1, rest[0].last, rest[0].pair, measured=False)
    return [*others, Segment(top.first, last, top.pair), head, *rest[1:]]


def crossover(
    low: tuple[int, Mapping[Pair, float]],
    high: tuple[int, Mapping[Pair, float]],
    before: Pair,
    after: Pair,
) -> int:
    """Return the most tokens that `before` still serves, low <= it < high.

    Both times as lines between the two buckets: they meet at a + (b - a) g / (g + l), where g is
    what `before` gains at a, and l what it loses at b. A pairing that has no time at one end serves
    only what lies at the other.
    """
    (a, at_a), (b, at_b) = low, high
    if after not in at_a:
        return b - 1 if before in at_b else a
    if before not in at_b:
        return a
    gain, loss = at_a[after] - at_a[before], at_b[before] - at_b[after]
    if gain + loss <= 0:
        return a
    return min(max(int(a + (b - a) * gain / (gain + loss)), a), b - 1)
