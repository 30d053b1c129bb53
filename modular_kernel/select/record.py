"""Measurements of pairings, and the rules that select one from them: data and pure functions.

A bucket is a number of tokens at which a pairing is selected independently. At a bucket, the
default pairing is selected, unless another one was measured to be faster by more than the noise, or
nothing was measured and the shipped record is unambiguous. Between two buckets, a pairing other
than the default is used only if both buckets selected it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

# Ratios are times relative to that of the default pairing. For optimistic and pessimistic ratios,
# see Estimate.
MAX_RATIO_TO_TIME = 0.98  # pairings with a larger optimistic ratio are not timed
MIN_GAIN = 0.02  # minimum of 1 - ratio to replace the default
MAX_RATIO_UNTIMED = 0.95  # maximum pessimistic ratio to replace the default without a timing
# The pairing of the next smaller bucket is kept if its ratio is at most this multiple of the best.
MAX_RATIO_TO_KEEP = 1.01
_MIN_GAIN_PER_NOISE = 2.0  # minimum of (1 - ratio) / noise to replace the default
_MIN_TOKENS = 1

Pair = tuple[str, str]  # names of a PrepareAndFinalize and of an experts part


def pairing_name(pair: Pair) -> str:
    """Return the name of a pairing, as the command line prints it."""
    return f"{pair[0]} x {pair[1]}"


@dataclass(frozen=True)
class Estimate:
    """The expected ratio of a pairing's time to the default's, from `optimistic` to `pessimistic`.

    trusted: whether the estimate comes from similar layers, so that the pairing may be selected
    without a timing.
    """

    optimistic: float
    pessimistic: float
    trusted: bool = False


@dataclass(frozen=True)
class TimedOutcome:
    """The result of building and timing one pairing at one number of tokens.

    us: microseconds of a planned call on the slowest rank; None if the pairing failed.
    ratio: time divided by the default's in the same round, median over rounds; 1 for the default.
    noise: uncertainty of that median.
    rough: whether the pairing is so slow that timing stopped after two rounds.
    mode: "graph" (replays of a CUDA graph), "eager" or "cpu".
    why: reason of a failure.
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
        """Whether the pairing is faster than the default by more than the noise."""
        gain = 1 - self.ratio if self.ratio is not None else 0.0
        return not self.rough and gain >= max(MIN_GAIN, _MIN_GAIN_PER_NOISE * self.noise)


@dataclass(frozen=True)
class Bucket:
    """The measurements at one number of tokens.

    default: the pairing that ratios refer to, which is the first one in Options.order that is valid
    and ran correctly. outcomes: include the default, and the failures of the pairings before it.
    """

    tokens: int
    default: Pair
    outcomes: tuple[TimedOutcome, ...]

    @property
    def times(self) -> dict[Pair, float]:
        """Microseconds of the pairings that have a time."""
        return {o.pair: o.us for o in self.outcomes if o.us is not None}

    @property
    def failed(self) -> frozenset[Pair]:
        """Pairings that were tried and failed."""
        return frozenset(o.pair for o in self.outcomes if o.us is None)

    def outcome(self, pair: Pair) -> TimedOutcome | None:
        """Return the outcome of a pairing, or None if it was not tried."""
        return next((o for o in self.outcomes if o.pair == pair), None)


class Source(Enum):
    """What decided on the pairing of a bucket.

    TIMED: timings. RECORD: the shipped record. ONLY: no other pairing is valid. DEFAULT: nothing,
    because a candidate that may be faster than the default was not timed.
    """

    TIMED = "timed"
    RECORD = "shipped record"
    ONLY = "only valid pairing"
    DEFAULT = "default"


@dataclass(frozen=True)
class Pick:
    """The pairing of a bucket, and its source."""

    pair: Pair
    source: Source


@dataclass(frozen=True)
class Segment:
    """A range of token counts, from `first` to `last` inclusive, and its pairing."""

    first: int
    last: int
    pair: Pair


@dataclass(frozen=True)
class Options:
    """The valid pairings, and what is known about them before timing.

    tokens: token counts of the buckets, ascending.
    max_tokens: maximum tokens of a call.
    order: all pairings that are valid for some number of tokens, the default first.
    valid: the pairings that are valid at each bucket and at `max_tokens`.
    untimeable: pairings whose times are not meaningful here.
    estimates: the shipped record's estimates at each bucket, relative to the first valid pairing of
        the order.
    """

    tokens: tuple[int, ...]
    max_tokens: int
    order: tuple[Pair, ...]
    valid: Mapping[int, Sequence[Pair]]
    untimeable: Collection[Pair] = ()
    estimates: Mapping[int, Mapping[Pair, Estimate]] = field(default_factory=dict)

    def ordered(self, tokens: int) -> tuple[Pair, ...]:
        """Return the pairings that are valid at `tokens`, the default first."""
        valid = self.valid.get(tokens, ())
        return tuple(pair for pair in self.order if pair in valid)

    def challengers(self, tokens: int) -> tuple[Pair, ...]:
        """Return the pairings to time against the default, the most promising first.

        They are those whose optimistic estimate is faster than the default, and then those without
        an estimate. Pairings that cannot be timed here are excluded.
        """
        estimates = self.estimates.get(tokens, {})
        timeable = [pair for pair in self.ordered(tokens)[1:] if pair not in self.untimeable]
        estimated = [pair for pair in timeable if pair in estimates]
        promising = [pair for pair in estimated if estimates[pair].optimistic <= MAX_RATIO_TO_TIME]
        unknown = [pair for pair in timeable if pair not in estimates]
        return (*sorted(promising, key=lambda pair: estimates[pair].optimistic), *unknown)

    def is_complete(self, bucket: Bucket) -> bool:
        """Return whether all candidates of a bucket were timed."""
        tried = {outcome.pair for outcome in bucket.outcomes}
        return tried >= {bucket.default, *self.challengers(bucket.tokens)}


def bucket_tokens(max_tokens: int) -> tuple[int, ...]:
    """Return the powers of two below `max_tokens`, and `max_tokens`."""
    powers = [1 << power for power in range(max_tokens.bit_length()) if 1 << power < max_tokens]
    return (*powers, max(max_tokens, _MIN_TOKENS))


def picks(options: Options, buckets: Sequence[Bucket]) -> dict[int, Pick]:
    """Select a pairing at each of options.tokens at which any is valid.

    buckets: the measurements.
    """
    picked: dict[int, Pick] = {}
    by_tokens = {bucket.tokens: bucket for bucket in buckets}
    previous: Pair | None = None
    for tokens in options.tokens:
        if not options.ordered(tokens):
            continue
        bucket = by_tokens.get(tokens)
        pick = bucket and _pick_timed(options, bucket, previous)
        pick = (
            pick
            or _pick_recorded(options, tokens, buckets)
            or _pick_untimed(options, tokens, buckets)
        )
        picked[tokens], previous = pick, pick.pair
    return picked


def _pick_timed(options: Options, bucket: Bucket, previous: Pair | None) -> Pick | None:
    """Return the fastest pairing, or None if that is the default and not all candidates were timed.

    `previous`, the pairing of the previous bucket, is kept if it is about as fast as the fastest.
    """
    ratios = {o.pair: o.ratio for o in bucket.outcomes if o.faster and o.ratio is not None}
    if ratios:
        best = min(ratios, key=ratios.__getitem__)
        if previous in ratios and ratios[previous] <= MAX_RATIO_TO_KEEP * ratios[best]:
            best = previous
        return Pick(best, Source.TIMED)
    return Pick(bucket.default, Source.TIMED) if options.is_complete(bucket) else None


def _pick_recorded(options: Options, tokens: int, buckets: Sequence[Bucket]) -> Pick | None:
    """Return the pairing that the shipped record selects, if it is unambiguous.

    A pairing that was tried here, or failed anywhere, is not selected.
    """
    tried = {o.pair for bucket in buckets if bucket.tokens == tokens for o in bucket.outcomes}
    tried.update(*(bucket.failed for bucket in buckets))
    trusted_ratios = {
        pair: estimate.pessimistic
        for pair, estimate in options.estimates.get(tokens, {}).items()
        if estimate.trusted and estimate.pessimistic <= MAX_RATIO_UNTIMED and pair not in tried
    }
    eligible = [pair for pair in options.ordered(tokens)[1:] if pair in trusted_ratios]
    if eligible and default_at(options, tokens, buckets) == options.ordered(tokens)[0]:
        return Pick(min(eligible, key=trusted_ratios.__getitem__), Source.RECORD)
    return None


def _pick_untimed(options: Options, tokens: int, buckets: Sequence[Bucket]) -> Pick:
    """Return the default, with the reason why it was not compared with other pairings."""
    default, valid = default_at(options, tokens, buckets), options.ordered(tokens)
    if len(valid) == 1:
        return Pick(default, Source.ONLY)
    timeable = not any(pair in options.untimeable for pair in valid)
    ruled_out = default == valid[0] and timeable and not options.challengers(tokens)
    return Pick(default, Source.RECORD if ruled_out else Source.DEFAULT)


def default_at(
    options: Options, tokens: int, buckets: Sequence[Bucket], *, above: int | None = None
) -> Pair:
    """Return the default at `tokens`, or between `above` and `tokens`.

    It is the first valid pairing of options.order that has not failed in the nearest measured
    buckets, or the first valid one if all have failed. tokens: a key of options.valid.
    """
    lower = tokens if above is None else above
    below_bucket = max(
        (b for b in buckets if b.tokens <= lower), key=lambda b: b.tokens, default=None
    )
    above_bucket = min(
        (b for b in buckets if b.tokens >= tokens), key=lambda b: b.tokens, default=None
    )
    failed = {pair for bucket in (below_bucket, above_bucket) if bucket for pair in bucket.failed}
    valid = options.ordered(tokens)
    return next((pair for pair in valid if pair not in failed), valid[0])


def segments(options: Options, buckets: Sequence[Bucket]) -> tuple[Segment, ...]:
    """Return the pairing of each range of tokens. The ranges start at 0 and have no gaps.

    The last range ends at options.max_tokens, or at the largest token count for which a pairing is
    valid. The result is () if no pairing is valid.
    """
    chosen = picks(options, buckets)
    ranges: list[Segment] = []
    previous: int | None = None
    for tokens in sorted({*options.tokens, options.max_tokens}):
        if not options.ordered(tokens):
            continue
        pick = chosen.get(tokens)
        pair = pick.pair if pick else default_at(options, tokens, buckets)
        is_first = previous is None and tokens <= _MIN_TOKENS  # 0 tokens are run like 1
        if is_first or (ranges and ranges[-1].pair == pair):
            between = pair
        else:
            between = default_at(options, tokens, buckets, above=previous)
        first = 0 if previous is None else previous + 1
        _append_range(ranges, first, tokens - 1, between)
        _append_range(ranges, tokens, tokens, pair)
        previous = tokens
    return tuple(ranges)


def _append_range(ranges: list[Segment], first: int, last: int, pair: Pair) -> None:
    if last < first:
        return
    if ranges and ranges[-1].pair == pair:
        ranges[-1] = Segment(ranges[-1].first, last, pair)
    else:
        ranges.append(Segment(first, last, pair))
