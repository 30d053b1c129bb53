"""Selection from measurements: no pairing is selected that is known to be slower."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modular_kernel.select.composed_kernel import list_warm_up_token_counts
from modular_kernel.select.selection import (
    MAX_RATIO_TO_KEEP,
    Bucket,
    Estimate,
    Pair,
    PairingOptions,
    Segment,
    SelectedPairing,
    SelectionReason,
    TimedOutcome,
    bucket_tokens,
    default_pair,
    make_segments,
    select_pairs,
)

A, B, C = ("P", "A"), ("P", "B"), ("Q", "C")  # A is the default
ORDER = (A, B, C)
NAMES = {"a": A, "b": B, "c": C}


def make_outcome(
    pair: Pair, ratio: float | None, noise: float = 0.0, **fields: object
) -> TimedOutcome:
    """Return an outcome for a default that takes 100 us. A ratio of None means a failure."""
    if ratio is None:
        return TimedOutcome(pair, why="no")
    return TimedOutcome(pair, 100 * ratio, ratio, noise, **fields)  # type: ignore[arg-type]


def make_bucket(tokens: int, *, default: Pair = A, **ratios: float | None) -> Bucket:
    return Bucket(
        tokens, default, tuple(make_outcome(NAMES[n], ratio) for n, ratio in ratios.items())
    )


def make_options(
    max_tokens: int,
    tokens: tuple[int, ...] | None = None,
    *,
    valid: dict[int, tuple[Pair, ...]] | None = None,
    estimates: dict[int, dict[Pair, Estimate]] | None = None,
    untimeable: tuple[Pair, ...] = (),
) -> PairingOptions:
    tokens = bucket_tokens(max_tokens) if tokens is None else tokens
    all_pairs_everywhere = dict.fromkeys((*tokens, max_tokens), ORDER)
    return PairingOptions(
        tokens, max_tokens, ORDER, valid or all_pairs_everywhere, untimeable, estimates or {}
    )


def test_buckets_are_powers_of_two_and_the_maximum() -> None:
    assert bucket_tokens(1) == (1,)
    assert bucket_tokens(16) == (1, 2, 4, 8, 16)
    assert bucket_tokens(20) == (1, 2, 4, 8, 16, 20)
    assert bucket_tokens(0) == (1,)


@pytest.mark.parametrize(
    ("timed", "is_faster"),
    [
        (make_outcome(B, 0.97), True),
        (make_outcome(B, 0.98), True),
        (make_outcome(B, 0.985), False),  # less than MIN_GAIN
        (make_outcome(B, 0.95, 0.02), True),
        (make_outcome(B, 0.95, 0.03), False),  # within twice the noise
        (make_outcome(B, 0.5, rough=True), False),  # timed in only two rounds
        (make_outcome(B, None), False),
        (make_outcome(A, 1.0), False),
    ],
)
def test_faster_requires_a_gain_beyond_the_noise(timed: TimedOutcome, is_faster: bool) -> None:
    assert timed.is_faster is is_faster


DECISIONS = {
    "nothing is faster": (
        make_bucket(1, a=1.0, b=0.99, c=1.2),
        None,
        SelectedPairing(A, SelectionReason.TIMED),
    ),
    "the fastest": (
        make_bucket(1, a=1.0, b=0.9, c=0.8),
        None,
        SelectedPairing(C, SelectionReason.TIMED),
    ),
    "the previous pairing if it is about as fast": (
        make_bucket(1, a=1.0, b=0.9 * MAX_RATIO_TO_KEEP - 1e-6, c=0.9),
        B,
        SelectedPairing(B, SelectionReason.TIMED),
    ),
    "not the previous pairing if it is slower": (
        make_bucket(1, a=1.0, b=0.92, c=0.9),
        B,
        SelectedPairing(C, SelectionReason.TIMED),
    ),
    "not the previous pairing if the default is as fast": (
        make_bucket(1, a=1.0, b=0.99, c=1.0),
        B,
        SelectedPairing(A, SelectionReason.TIMED),
    ),
    "the next pairing if the default fails": (
        make_bucket(1, default=B, a=None, b=1.0, c=1.0),
        None,
        SelectedPairing(B, SelectionReason.TIMED),
    ),
    "the default if not all were timed": (
        make_bucket(1, a=1.0, b=1.0),
        None,
        SelectedPairing(A, SelectionReason.DEFAULT),
    ),
    "a faster pairing if not all were timed": (
        make_bucket(1, a=1.0, b=0.9),
        None,
        SelectedPairing(B, SelectionReason.TIMED),
    ),
}


@pytest.mark.parametrize(
    ("timed", "previous", "expected"), DECISIONS.values(), ids=DECISIONS.keys()
)
def test_bucket_selects_the_expected_pairing(
    timed: Bucket, previous: Pair | None, expected: SelectedPairing
) -> None:
    second = Bucket(2, timed.default, timed.outcomes)
    first = (
        make_bucket(1, a=1.0, b=0.5, c=1.0)
        if previous == B
        else make_bucket(1, a=1.0, b=1.0, c=1.0)
    )
    assert select_pairs(make_options(2), [first, second])[2] == expected


def test_default_is_used_everywhere_without_times() -> None:
    assert make_segments(make_options(16), ()) == (Segment(0, 16, A),)
    assert select_pairs(make_options(2), ()) == dict.fromkeys(
        (1, 2), SelectedPairing(A, SelectionReason.DEFAULT)
    )
    valid = {1: (B,), 8: (C, B), 16: (C,)}
    pairing_options = make_options(16, (1, 8, 16), valid=valid)
    assert make_segments(pairing_options, ()) == (Segment(0, 8, B), Segment(9, 16, C))
    assert select_pairs(pairing_options, ())[16] == SelectedPairing(C, SelectionReason.ONLY)


def test_pairing_between_buckets_requires_both() -> None:
    b_faster, b_slower = {"a": 1.0, "b": 0.8, "c": 2.0}, {"a": 1.0, "b": 1.5, "c": 2.0}
    buckets = [
        make_bucket(4, **b_faster),
        make_bucket(8, **b_faster),
        make_bucket(16, **b_slower),
        make_bucket(32, **b_faster),
    ]
    assert make_segments(make_options(64, (4, 8, 16, 32)), buckets) == (
        Segment(0, 3, A),  # below the smallest bucket
        Segment(4, 8, B),
        Segment(9, 31, A),
        Segment(32, 32, B),
        Segment(33, 64, A),  # above the largest bucket
    )


def test_zero_tokens_use_the_pairing_of_one_token() -> None:
    b_faster = make_bucket(1, a=1.0, b=0.8, c=1.0)
    assert make_segments(make_options(2), [b_faster]) == (Segment(0, 1, B), Segment(2, 2, A))


def test_one_faster_pairing_is_not_used_at_untimed_buckets() -> None:
    """Only the largest bucket was timed."""
    segments = make_segments(make_options(4096), [make_bucket(4096, a=1.0, b=0.5, c=1.0)])
    assert segments == (Segment(0, 4095, A), Segment(4096, 4096, B))


def test_failed_pairing_is_not_the_default_next_to_its_bucket() -> None:
    failed = make_bucket(8, default=B, a=None, b=1.0, c=1.0)
    pairing_options = make_options(32, (2, 8, 32))
    assert default_pair(pairing_options, 2, [failed]) == B
    assert make_segments(pairing_options, [failed]) == (Segment(0, 32, B),)
    buckets = [make_bucket(2, a=1.0, b=1.0, c=1.0), failed, make_bucket(32, a=1.0, b=1.0, c=1.0)]
    assert make_segments(pairing_options, buckets) == (
        Segment(0, 2, A),
        Segment(3, 31, B),
        Segment(32, 32, A),
    )


def test_challengers_are_promising_pairings_in_order() -> None:
    def pairs_to_time(b: Estimate | None, c: Estimate | None) -> tuple[Pair, ...]:
        estimates = {pair: e for pair, e in ((B, b), (C, c)) if e is not None}
        return make_options(1, estimates={1: estimates}).pairs_to_time(1)

    assert pairs_to_time(None, None) == (B, C)
    assert pairs_to_time(Estimate(0.97, 2.0), Estimate(0.9, 2.0)) == (C, B)
    # Pairings without an estimate are last.
    assert pairs_to_time(None, Estimate(0.98, 2.0)) == (C, B)
    assert pairs_to_time(Estimate(0.981, 0.99), Estimate(1.3, 1.4)) == ()
    assert make_options(1, untimeable=(B,)).pairs_to_time(1) == (C,)


def test_record_that_excludes_all_challengers_decides() -> None:
    slow = {1: dict.fromkeys((B, C), Estimate(1.1, 1.2, True))}
    assert select_pairs(make_options(1, estimates=slow), ()) == {
        1: SelectedPairing(A, SelectionReason.RECORD)
    }
    assert select_pairs(make_options(1, estimates=slow, untimeable=ORDER), ()) == {
        1: SelectedPairing(A, SelectionReason.DEFAULT)
    }


def test_record_selects_untimed_pairings_only_if_unambiguous() -> None:
    def select_pair(estimate: Estimate, *buckets: Bucket) -> Pair:
        expected = {t: {B: estimate, C: Estimate(1.5, 1.6, True)} for t in (1, 2)}
        return select_pairs(make_options(2, estimates=expected), buckets)[2].pair

    assert select_pair(Estimate(0.8, 0.95, True)) == B
    assert select_pair(Estimate(0.8, 0.96, True)) == A
    assert select_pair(Estimate(0.8, 0.95, False)) == A  # from layers of another kind
    assert select_pair(Estimate(0.8, 0.95, True), make_bucket(2, a=1.0, b=1.0)) == A  # B was timed
    assert (
        select_pair(Estimate(0.8, 0.95, True), make_bucket(1, a=1.0, b=None)) == A
    )  # it failed at 1
    assert select_pair(Estimate(0.8, 0.95, True), make_bucket(1, a=1.0, b=1.0)) == B


RATIOS = st.one_of(st.none(), st.floats(0.5, 2))
OUTCOMES = st.tuples(RATIOS, RATIOS, st.floats(0, 0.1), st.booleans())
ESTIMATES = st.builds(
    lambda low, more, trusted: Estimate(low, low + more, trusted),
    st.floats(0.7, 1.3),
    st.floats(0, 0.2),
    st.booleans(),
)


@st.composite
def options_and_buckets(draw) -> tuple[PairingOptions, list[Bucket]]:
    """Draw buckets, of which some are timed, incomplete, or have a failed default."""
    max_tokens = draw(st.integers(1, 80))
    tokens = tuple(sorted(draw(st.sets(st.integers(1, max_tokens), min_size=1, max_size=8))))
    expected = {t: draw(st.dictionaries(st.sampled_from((B, C)), ESTIMATES)) for t in tokens}
    pairing_options = make_options(max_tokens, tokens, estimates=expected)
    buckets = []
    for t in draw(st.sets(st.sampled_from(tokens))):
        b, c, noise, fails = draw(OUTCOMES)
        outcomes = [
            make_outcome(A, None if fails else 1.0),
            make_outcome(B, 1.0 if fails else b, noise),
        ]
        outcomes += [make_outcome(C, c, noise)] * draw(st.booleans())
        buckets.append(Bucket(t, B if fails else A, tuple(outcomes)))
    return pairing_options, buckets


@given(options_and_buckets())
def test_no_segment_uses_a_pairing_that_may_be_slower(
    options_and_bucket_list: tuple[PairingOptions, list[Bucket]],
) -> None:
    options, buckets = options_and_bucket_list
    bucket_at = {b.tokens: b for b in buckets}

    def is_known_to_be_faster(tokens: int, pair: Pair) -> bool:
        """Return whether the times of the bucket, or the shipped record, show a gain."""
        timed = bucket_at[tokens].find_outcome(pair) if tokens in bucket_at else None
        if timed is not None and timed.ratio is not None and pair != bucket_at[tokens].default:
            return timed.ratio <= 1 - max(0.02, 2 * timed.noise)
        estimate = options.estimates[tokens].get(pair)
        return (
            timed is None
            and estimate is not None
            and estimate.trusted
            and (estimate.pessimistic <= 0.95)
        )

    ranges = make_segments(options, buckets)
    assert (ranges[0].first, ranges[-1].last) == (0, options.max_tokens)
    assert all(high.first == low.last + 1 for low, high in pairwise(ranges))
    assert all(r.first <= r.last for r in ranges)
    assert all(low.pair != high.pair for low, high in pairwise(ranges))
    for tokens in range(options.max_tokens + 1):
        (pair,) = (r.pair for r in ranges if r.first <= tokens <= r.last)
        tokens_like = 1 if tokens == 0 and 1 in options.tokens else tokens
        if tokens_like in options.tokens:
            default = default_pair(options, tokens_like, buckets)
            assert pair == default or is_known_to_be_faster(tokens_like, pair)
            continue
        below = max((t for t in options.tokens if t < tokens), default=None)
        above = min((t for t in options.tokens if t > tokens), default=None)
        default = default_pair(options, above or options.max_tokens, buckets, above=below)
        if pair != default:
            assert below is not None
            assert above is not None
            assert is_known_to_be_faster(below, pair)
            assert is_known_to_be_faster(above, pair)


@pytest.mark.parametrize("max_tokens", [1, 2, 17, 4096])
def test_warm_up_covers_both_ends_and_odd_numbers(max_tokens: int) -> None:
    numbers = list_warm_up_token_counts(max_tokens)
    assert (numbers[0], numbers[-1]) == (1, max_tokens)
    assert all(high <= 2 * low for low, high in pairwise(numbers))
    odd = [n for n in numbers if n % 16]
    assert all(high <= 2 * low + 1 for low, high in pairwise(odd))
