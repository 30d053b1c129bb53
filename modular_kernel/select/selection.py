"""Data types and rules by which a pairing is selected for each number of tokens.

A pairing consists of a PrepareAndFinalize and an experts class. Pairings are compared at a few
token counts, called buckets. In a bucket, the default pairing is selected unless

- another pairing was measured to be faster by more than the noise, or
- nothing was measured, and another pairing is faster in the shipped record (times that are part of
  this package).

Token counts between two buckets use the default pairing, unless both buckets have selected the same
other pairing. `select.search` measures times, and `select.shipped_record` estimates ratios.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

# A ratio is the time of a pairing divided by the time of the default pairing. Lower is faster.
MAX_RATIO_TO_TIME = 0.98  # pairings with a larger optimistic estimate are not timed
MIN_GAIN = 0.02  # minimum of 1 - ratio to replace the default
MAX_RATIO_UNTIMED = 0.95  # maximum pessimistic estimate to replace the default without a timing
# The pairing of the previous bucket is kept if its ratio is at most this multiple of the minimum.
MAX_RATIO_TO_KEEP = 1.01
_MIN_GAIN_PER_NOISE = 2.0  # minimum of (1 - ratio) / noise to replace the default
_MIN_TOKENS = 1

Pair = tuple[str, str]  # class names of a PrepareAndFinalize and of an experts part


def pairing_name(pair: Pair) -> str:
    """Return the name of a pairing, as the command line prints it."""
    return f"{pair[0]} x {pair[1]}"


@dataclass(frozen=True)
class Estimate:
    """Estimate of the ratio of a pairing, from the shipped record.

    optimistic: lower bound of the ratio.
    pessimistic: upper bound of the ratio.
    trusted: whether the estimate comes from similar layers. The pairing may then be selected
        without being timed.
    """

    optimistic: float
    pessimistic: float
    trusted: bool = False


@dataclass(frozen=True)
class TimedOutcome:
    """The result of building and timing one pairing at one number of tokens.

    us: microseconds per call of a plan, on the slowest rank; None if the pairing has no time.
    ratio: median over rounds of the time of the pairing divided by the time of the default in the
        same round; 1 for the default.
    noise: interquartile range of the ratios of all rounds divided by the square root of the number
        of rounds. This estimates the standard error of the median.
    rough: whether timing stopped after two rounds, because the pairing is much slower than the
        default.
    mode: "graph" (replays of a CUDA graph), "eager" or "cpu".
    why: why the pairing has no time, or "".
    """

    pair: Pair
    us: float | None = None
    ratio: float | None = None
    noise: float = 0.0
    rough: bool = False
    mode: str = ""
    why: str = ""

    @property
    def is_faster(self) -> bool:
        """Whether the pairing is faster than the default by more than the noise."""
        gain = 1 - self.ratio if self.ratio is not None else 0.0
        return not self.rough and gain >= max(MIN_GAIN, _MIN_GAIN_PER_NOISE * self.noise)


@dataclass(frozen=True)
class Bucket:
    """The measurements at one number of tokens.

    default: the pairing that ratios refer to, which is the first pairing of PairingOptions.order
        that is valid and ran correctly.
    outcomes: the outcome of each pairing that was tried, including the default.
    """

    tokens: int
    default: Pair
    outcomes: tuple[TimedOutcome, ...]

    @property
    def us_by_pair(self) -> dict[Pair, float]:
        """Microseconds per call of the pairings that have a time."""
        return {o.pair: o.us for o in self.outcomes if o.us is not None}

    @property
    def failed_pairs(self) -> frozenset[Pair]:
        """Pairings that raised an error or computed wrong results."""
        return frozenset(o.pair for o in self.outcomes if o.us is None)

    def find_outcome(self, pair: Pair) -> TimedOutcome | None:
        """Return the outcome of a pairing, or None if it was not tried."""
        return next((o for o in self.outcomes if o.pair == pair), None)


class SelectionReason(Enum):
    """Why the pairing of a bucket was selected.

    TIMED: because of times measured on this machine.
    RECORD: because of the shipped record.
    ONLY: because no other pairing is valid.
    DEFAULT: because it is the default. Other pairings may be faster, but were not timed.
    """

    TIMED = "timed"
    RECORD = "shipped record"
    ONLY = "only valid pairing"
    DEFAULT = "default"


@dataclass(frozen=True)
class SelectedPairing:
    """The selected pairing of a bucket, and why it was selected."""

    pair: Pair
    reason: SelectionReason


@dataclass(frozen=True)
class Segment:
    """A range of token counts, from `first` to `last` inclusive, and its pairing."""

    first: int
    last: int
    pair: Pair


@dataclass(frozen=True)
class PairingOptions:
    """The valid pairings and their estimated times, before anything is timed.

    tokens: token counts of the buckets, ascending.
    max_tokens: maximum number of tokens of a call.
    order: all pairings that are valid for some number of tokens, with the default first.
    valid: valid pairings by number of tokens, for each bucket and for `max_tokens`.
    untimeable: pairings whose times would be meaningless on this machine.
    estimates: estimates of the shipped record by number of tokens. Their ratios refer to the first
        pairing of `valid_pairs`.
    """

    tokens: tuple[int, ...]
    max_tokens: int
    order: tuple[Pair, ...]
    valid: Mapping[int, Sequence[Pair]]
    untimeable: Collection[Pair] = ()
    estimates: Mapping[int, Mapping[Pair, Estimate]] = field(default_factory=dict)

    def valid_pairs(self, tokens: int) -> tuple[Pair, ...]:
        """Return the pairings that are valid at `tokens`, with the default first."""
        valid = self.valid.get(tokens, ())
        return tuple(pair for pair in self.order if pair in valid)

    def pairs_to_time(self, tokens: int) -> tuple[Pair, ...]:
        """Return the pairings to time, because they may be faster than the default.

        Pairings whose optimistic estimate is low enough come first, in ascending order of the
        estimate. Pairings without an estimate follow.
        """
        estimates = self.estimates.get(tokens, {})
        timeable = [pair for pair in self.valid_pairs(tokens)[1:] if pair not in self.untimeable]
        estimated = [pair for pair in timeable if pair in estimates]
        promising = [pair for pair in estimated if estimates[pair].optimistic <= MAX_RATIO_TO_TIME]
        unestimated = [pair for pair in timeable if pair not in estimates]
        return (*sorted(promising, key=lambda pair: estimates[pair].optimistic), *unestimated)

    def is_complete(self, bucket: Bucket) -> bool:
        """Return whether the default and all of `pairs_to_time` were tried."""
        tried = {outcome.pair for outcome in bucket.outcomes}
        return tried >= {bucket.default, *self.pairs_to_time(bucket.tokens)}


def bucket_tokens(max_tokens: int) -> tuple[int, ...]:
    """Return the default buckets: the powers of two below `max_tokens`, and `max_tokens`."""
    powers = [1 << power for power in range(max_tokens.bit_length()) if 1 << power < max_tokens]
    return (*powers, max(max_tokens, _MIN_TOKENS))


def select_pairs(options: PairingOptions, buckets: Sequence[Bucket]) -> dict[int, SelectedPairing]:
    """Return the selected pairing of each bucket, by number of tokens.

    Token counts without a valid pairing are omitted.

    buckets: the measurements.
    """
    selected_by_tokens: dict[int, SelectedPairing] = {}
    bucket_by_tokens = {bucket.tokens: bucket for bucket in buckets}
    previous: Pair | None = None
    for tokens in options.tokens:
        if not options.valid_pairs(tokens):
            continue
        bucket = bucket_by_tokens.get(tokens)
        selected = bucket and _pick_by_times(options, bucket, previous)
        selected = (
            selected
            or _pick_by_estimates(options, tokens, buckets)
            or _pick_default(options, tokens, buckets)
        )
        selected_by_tokens[tokens], previous = selected, selected.pair
    return selected_by_tokens


def _pick_by_times(
    options: PairingOptions, bucket: Bucket, previous: Pair | None
) -> SelectedPairing | None:
    """Return the fastest pairing. Returns None if it is the default, and not all were timed.

    previous: the pairing of the previous bucket, which is kept if it is about as fast as the
        fastest pairing (MAX_RATIO_TO_KEEP).
    """
    ratios = {o.pair: o.ratio for o in bucket.outcomes if o.is_faster and o.ratio is not None}
    if ratios:
        best = min(ratios, key=ratios.__getitem__)
        if previous in ratios and ratios[previous] <= MAX_RATIO_TO_KEEP * ratios[best]:
            best = previous
        return SelectedPairing(best, SelectionReason.TIMED)
    return (
        SelectedPairing(bucket.default, SelectionReason.TIMED)
        if options.is_complete(bucket)
        else None
    )


def _pick_by_estimates(
    options: PairingOptions, tokens: int, buckets: Sequence[Bucket]
) -> SelectedPairing | None:
    """Return a pairing that is faster than the default in the shipped record, or None.

    Pairings that were tried in this bucket, or that failed in any bucket, are excluded.
    """
    tried = {o.pair for bucket in buckets if bucket.tokens == tokens for o in bucket.outcomes}
    tried.update(*(bucket.failed_pairs for bucket in buckets))
    trusted_ratios = {
        pair: estimate.pessimistic
        for pair, estimate in options.estimates.get(tokens, {}).items()
        if estimate.trusted and estimate.pessimistic <= MAX_RATIO_UNTIMED and pair not in tried
    }
    eligible = [pair for pair in options.valid_pairs(tokens)[1:] if pair in trusted_ratios]
    if eligible and default_pair(options, tokens, buckets) == options.valid_pairs(tokens)[0]:
        return SelectedPairing(
            min(eligible, key=trusted_ratios.__getitem__), SelectionReason.RECORD
        )
    return None


def _pick_default(
    options: PairingOptions, tokens: int, buckets: Sequence[Bucket]
) -> SelectedPairing:
    """Return the default, and why it was not compared with other pairings."""
    default, valid = default_pair(options, tokens, buckets), options.valid_pairs(tokens)
    if len(valid) == 1:
        return SelectedPairing(default, SelectionReason.ONLY)
    is_timeable = not any(pair in options.untimeable for pair in valid)
    no_other_is_faster = default == valid[0] and is_timeable and not options.pairs_to_time(tokens)
    return SelectedPairing(
        default, SelectionReason.RECORD if no_other_is_faster else SelectionReason.DEFAULT
    )


def default_pair(
    options: PairingOptions, tokens: int, buckets: Sequence[Bucket], *, above: int | None = None
) -> Pair:
    """Return the default at `tokens`, or for all token counts between `above` and `tokens`.

    The default is the first valid pairing of options.order that has not failed in the nearest
    measured bucket on either side. If all pairings have failed, it is the first valid pairing.

    tokens: a key of options.valid.
    """
    lower = tokens if above is None else above
    smaller = max((b for b in buckets if b.tokens <= lower), key=lambda b: b.tokens, default=None)
    larger = min((b for b in buckets if b.tokens >= tokens), key=lambda b: b.tokens, default=None)
    failed = {pair for bucket in (smaller, larger) if bucket for pair in bucket.failed_pairs}
    valid = options.valid_pairs(tokens)
    return next((pair for pair in valid if pair not in failed), valid[0])


def make_segments(options: PairingOptions, buckets: Sequence[Bucket]) -> tuple[Segment, ...]:
    """Return the pairing of each range of token counts.

    The ranges start at 0 and have no gaps. The last range ends at options.max_tokens, or at the
    largest token count for which a pairing is valid. The result is () if no pairing is valid.
    """
    selected_by_tokens = select_pairs(options, buckets)
    ranges: list[Segment] = []
    previous: int | None = None
    for tokens in sorted({*options.tokens, options.max_tokens}):
        if not options.valid_pairs(tokens):
            continue
        selected = selected_by_tokens.get(tokens)
        pair = selected.pair if selected else default_pair(options, tokens, buckets)
        is_smallest = previous is None and tokens <= _MIN_TOKENS  # calls with 0 tokens run like 1
        if is_smallest or (ranges and ranges[-1].pair == pair):
            pair_between = pair
        else:
            pair_between = default_pair(options, tokens, buckets, above=previous)
        first = 0 if previous is None else previous + 1
        _append_range(ranges, first, tokens - 1, pair_between)
        _append_range(ranges, tokens, tokens, pair)
        previous = tokens
    return tuple(ranges)


def _append_range(ranges: list[Segment], first: int, last: int, pair: Pair) -> None:
    """Append a range, or extend the last range if it has the same pairing. Drop an empty range."""
    if last < first:
        return
    if ranges and ranges[-1].pair == pair:
        ranges[-1] = Segment(ranges[-1].first, last, pair)
    else:
        ranges.append(Segment(first, last, pair))
