"""What was measured and what follows from it, as data. Nothing here reads a clock or a file.

A bucket is a number of tokens that is decided on its own. The default pairing serves it unless
another one was measured to be faster by more than the noise, or, where nothing was measured, the
shipped record leaves no doubt. Between two buckets another pairing than the default serves only
where both have chosen it. So no choice is known to be slower than the default anywhere.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

FASTER = 0.98  # of the default's time: what is not expected to be as fast is not timed
LEAST_GAIN = 0.02  # by which a pairing must be faster than the default
SURE = 0.95  # of the default's time, at worst: what the record may choose without any timing
ALIKE = 1.01  # times the best: the smaller bucket's pairing stays where it is so close
_NOISES = 2.0  # a gain must be larger than so many times its noise
_FEWEST_TOKENS = 1

Pair = tuple[str, str]  # names of a PrepareAndFinalize and of an experts part


def named(pair: Pair) -> str:
    """Name a pairing as every verb prints it."""
    return f"{pair[0]} x {pair[1]}"


@dataclass(frozen=True)
class Estimate:
    """The time expected of a pairing over the default's: the least and the most of it.

    trusted: from layers so much alike that the pairing may be chosen without timing it.
    """

    optimistic: float
    pessimistic: float
    trusted: bool = False


@dataclass(frozen=True)
class TimedOutcome:
    """What became of one pairing that was built and timed at one number of tokens.

    us: microseconds of a planned call, the slowest rank's; None if it has no time, and `why` says
    so. ratio: the median, over rounds, of its time over the default's in the same round; 1 for the
    default itself. noise: the uncertainty of that median. rough: so far behind that it was timed
    only once or twice. mode: "graph" (replays of a CUDA graph), "eager" or "cpu".
    """

    pair: Pair
    us: float | None = None
    ratio: float | None = None
    noise: float = 0.0
    rough: bool = False
    mode: str = ""
    why: str = ""

    @property
    def faster(self) -> bool:
        """Whether it is faster than the default by more than the noise."""
        gain = 1 - self.ratio if self.ratio is not None else 0.0
        return not self.rough and gain >= max(LEAST_GAIN, _NOISES * self.noise)


@dataclass(frozen=True)
class Bucket:
    """What was timed at one number of tokens. default: the pairing that ratios refer to.

    That is the first pairing of the order that is valid and gave right numbers; `outcomes` has
    it, and why each one before it failed.
    """

    tokens: int
    default: Pair
    outcomes: tuple[TimedOutcome, ...]

    @property
    def times(self) -> dict[Pair, float]:
        """Microseconds of those that have a time."""
        return {o.pair: o.us for o in self.outcomes if o.us is not None}

    @property
    def failed(self) -> frozenset[Pair]:
        """Pairings that were tried and have no time."""
        return frozenset(o.pair for o in self.outcomes if o.us is None)

    def outcome(self, pair: Pair) -> TimedOutcome | None:
        """Return what became of a pairing; None if it was not tried."""
        return next((o for o in self.outcomes if o.pair == pair), None)


class Source(Enum):
    """Why a bucket's pairing serves it.

    TIMED: everything that could be faster was timed. RECORD: by the shipped record. ONLY: no other
    pairing is valid. DEFAULT: something could be faster, and was not timed.
    """

    TIMED = "timed"
    RECORD = "shipped record"
    ONLY = "only valid pairing"
    DEFAULT = "default"


@dataclass(frozen=True)
class Pick:
    """The pairing that serves a bucket, and why."""

    pair: Pair
    source: Source


@dataclass(frozen=True)
class Segment:
    """Calls of first to last tokens run on `pair`."""

    first: int
    last: int
    pair: Pair


@dataclass(frozen=True)
class Options:
    """What can be chosen, and what is known of it before anything is timed.

    tokens: the buckets, ascending. most: the most tokens of a call. order: the pairings that are
    valid anywhere, the default first. valid: those valid at each bucket and at `most`. silent:
    pairings whose time would say nothing. expected: the shipped record's estimates at each bucket,
    over the time of the first valid pairing of the order.
    """

    tokens: tuple[int, ...]
    most: int
    order: tuple[Pair, ...]
    valid: Mapping[int, Sequence[Pair]]
    silent: Collection[Pair] = ()
    expected: Mapping[int, Mapping[Pair, Estimate]] = field(default_factory=dict)

    def ordered(self, tokens: int) -> tuple[Pair, ...]:
        """Return the valid pairings, the default first."""
        valid = self.valid.get(tokens, ())
        return tuple(pair for pair in self.order if pair in valid)

    def challengers(self, tokens: int) -> tuple[Pair, ...]:
        """Return what may be faster than the default: the most promising first, unknown ones last.

        What cannot be timed here is left out.
        """
        expected = self.expected.get(tokens, {})
        loud = [pair for pair in self.ordered(tokens)[1:] if pair not in self.silent]
        known = [pair for pair in loud if pair in expected]
        promising = [pair for pair in known if expected[pair].optimistic <= FASTER]
        unknown = [pair for pair in loud if pair not in expected]
        return (*sorted(promising, key=lambda pair: expected[pair].optimistic), *unknown)

    def whole(self, bucket: Bucket) -> bool:
        """Return whether everything was timed that may be faster."""
        tried = {outcome.pair for outcome in bucket.outcomes}
        return tried >= {bucket.default, *self.challengers(bucket.tokens)}


def bucket_tokens(most: int) -> tuple[int, ...]:
    """Powers of two up to `most`, and `most`: where time changes its slope is not known."""
    powers = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return (*powers, max(most, _FEWEST_TOKENS))


def picks(options: Options, buckets: Sequence[Bucket]) -> dict[int, Pick]:
    """Decide every bucket at which a pairing is valid, ascending. buckets: those with outcomes."""
    found: dict[int, Pick] = {}
    at = {bucket.tokens: bucket for bucket in buckets}
    before: Pair | None = None
    for tokens in options.tokens:
        if not options.ordered(tokens):
            continue
        bucket = at.get(tokens)
        pick = bucket and _timed(options, bucket, before)
        pick = pick or _recorded(options, tokens, buckets) or _untimed(options, tokens, buckets)
        found[tokens], before = pick, pick.pair
    return found


def _timed(options: Options, bucket: Bucket, before: Pair | None) -> Pick | None:
    """Return the fastest that is faster than the default; the default if all were timed.

    `before`, which serves the bucket before, stays where it is as fast.
    """
    ratios = {o.pair: o.ratio for o in bucket.outcomes if o.faster and o.ratio is not None}
    if ratios:
        best = min(ratios, key=ratios.__getitem__)
        if before in ratios and ratios[before] <= ALIKE * ratios[best]:
            best = before
        return Pick(best, Source.TIMED)
    return Pick(bucket.default, Source.TIMED) if options.whole(bucket) else None


def _recorded(options: Options, tokens: int, buckets: Sequence[Bucket]) -> Pick | None:
    """Return what the shipped record chooses where that is beyond doubt.

    What was tried here, or failed anywhere, is not chosen so.
    """
    tried = {o.pair for bucket in buckets if bucket.tokens == tokens for o in bucket.outcomes}
    tried.update(*(bucket.failed for bucket in buckets))
    sure = {
        pair: estimate.pessimistic
        for pair, estimate in options.expected.get(tokens, {}).items()
        if estimate.trusted and estimate.pessimistic <= SURE and pair not in tried
    }
    open_ones = [pair for pair in options.ordered(tokens)[1:] if pair in sure]
    if open_ones and default_at(options, tokens, buckets) == options.ordered(tokens)[0]:
        return Pick(min(open_ones, key=sure.__getitem__), Source.RECORD)
    return None


def _untimed(options: Options, tokens: int, buckets: Sequence[Bucket]) -> Pick:
    default, valid = default_at(options, tokens, buckets), options.ordered(tokens)
    if len(valid) == 1:
        return Pick(default, Source.ONLY)
    timeable = not any(pair in options.silent for pair in valid)
    ruled_out = default == valid[0] and timeable and not options.challengers(tokens)
    return Pick(default, Source.RECORD if ruled_out else Source.DEFAULT)


def default_at(
    options: Options, tokens: int, buckets: Sequence[Bucket], *, above: int | None = None
) -> Pair:
    """Return the default at `tokens` or, with `above`, between `above` and `tokens`.

    That is the first valid pairing of the order that has not failed in the nearest buckets; where
    all have, the first valid one. tokens: one of those that `options.valid` has.
    """
    low = tokens if above is None else above
    below = max((b for b in buckets if b.tokens <= low), key=lambda b: b.tokens, default=None)
    beyond = min((b for b in buckets if b.tokens >= tokens), key=lambda b: b.tokens, default=None)
    failed = {pair for bucket in (below, beyond) if bucket for pair in bucket.failed}
    valid = options.ordered(tokens)
    return next((pair for pair in valid if pair not in failed), valid[0])


def segments(options: Options, buckets: Sequence[Bucket]) -> tuple[Segment, ...]:
    """Which pairing serves which numbers of tokens, from 0 to options.most without a gap.

    () if no pairing is valid. Above the last number at which one is valid nothing is served.
    """
    chosen = picks(options, buckets)
    found: list[Segment] = []
    before: int | None = None
    for tokens in sorted({*options.tokens, options.most}):
        if not options.ordered(tokens):
            continue
        pick = chosen.get(tokens)
        here = pick.pair if pick else default_at(options, tokens, buckets)
        smallest = before is None and tokens <= _FEWEST_TOKENS
        if smallest or (found and found[-1].pair == here):  # no token at all runs as one does
            between = here
        else:
            between = default_at(options, tokens, buckets, above=before)
        first = 0 if before is None else before + 1
        _extend(found, first, tokens - 1, between)
        _extend(found, tokens, tokens, here)
        before = tokens
    return tuple(found)


def _extend(found: list[Segment], first: int, last: int, pair: Pair) -> None:
    if last < first:
        return
    if found and found[-1].pair == pair:
        found[-1] = Segment(found[-1].first, last, pair)
    else:
        found.append(Segment(first, last, pair))
