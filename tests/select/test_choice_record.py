"""Selection from measurements: no pairing is selected that is known to be slower."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modular_kernel.select.composed_kernel import warm_up_token_counts
from modular_kernel.select.selection import (
    MAX_RATIO_TO_KEEP,
    Bucket,
    Estimate,
    Pair,
    PairingOptions,
    Pick,
    Segment,
    Source,
    TimedOutcome,
    bucket_tokens,
    default_pair,
    make_segments,
    select_pairs,
)

A, B, C = ("P", "A"), ("P", "B"), ("Q", "C")  # A is the default
ORDER = (A, B, C)
NAMES = {"a": A, "b": B, "c": C}


def outcome(pair: Pair, ratio: float | None, noise: float = 0.0, **more: object) -> TimedOutcome:
    """Return an outcome, where the default takes 100 us; a ratio of None means a failure."""
    if ratio is None:
        return TimedOutcome(pair, why="no")
    return TimedOutcome(pair, 100 * ratio, ratio, noise, **more)  # type: ignore[arg-type]


def bucket(tokens: int, *, default: Pair = A, **ratios: float | None) -> Bucket:
    return Bucket(tokens, default, tuple(outcome(NAMES[n], ratio) for n, ratio in ratios.items()))


def options(
    most: int,
    tokens: tuple[int, ...] | None = None,
    *,
    valid: dict[int, tuple[Pair, ...]] | None = None,
    estimates: dict[int, dict[Pair, Estimate]] | None = None,
    untimeable: tuple[Pair, ...] = (),
) -> PairingOptions:
    tokens = bucket_tokens(most) if tokens is None else tokens
    everywhere = dict.fromkeys((*tokens, most), ORDER)
    return PairingOptions(tokens, most, ORDER, valid or everywhere, untimeable, estimates or {})


def test_buckets_are_powers_of_two_and_the_maximum() -> None:
    assert bucket_tokens(1) == (1,)
    assert bucket_tokens(16) == (1, 2, 4, 8, 16)
    assert bucket_tokens(20) == (1, 2, 4, 8, 16, 20)
    assert bucket_tokens(0) == (1,)


@pytest.mark.parametrize(
    ("found", "faster"),
    [
        (outcome(B, 0.97), True),
        (outcome(B, 0.98), True),
        (outcome(B, 0.985), False),  # less than the least gain
        (outcome(B, 0.95, 0.02), True),
        (outcome(B, 0.95, 0.03), False),  # within twice the noise
        (outcome(B, 0.5, rough=True), False),  # timed twice only
        (outcome(B, None), False),
        (outcome(A, 1.0), False),
    ],
)
def test_faster_requires_a_gain_beyond_the_noise(found: TimedOutcome, faster: bool) -> None:
    assert found.is_faster is faster


DECISIONS = {
    "nothing is faster": (bucket(1, a=1.0, b=0.99, c=1.2), None, Pick(A, Source.TIMED)),
    "the fastest": (bucket(1, a=1.0, b=0.9, c=0.8), None, Pick(C, Source.TIMED)),
    "what served before, where it is alike": (
        bucket(1, a=1.0, b=0.9 * MAX_RATIO_TO_KEEP - 1e-6, c=0.9),
        B,
        Pick(B, Source.TIMED),
    ),
    "not what served before, where it is not": (
        bucket(1, a=1.0, b=0.92, c=0.9),
        B,
        Pick(C, Source.TIMED),
    ),
    "not what served before, where the default is as fast": (
        bucket(1, a=1.0, b=0.99, c=1.0),
        B,
        Pick(A, Source.TIMED),
    ),
    "the next of the order where the default fails": (
        bucket(1, default=B, a=None, b=1.0, c=1.0),
        None,
        Pick(B, Source.TIMED),
    ),
    "the default where not all were timed": (
        bucket(1, a=1.0, b=1.0),
        None,
        Pick(A, Source.DEFAULT),
    ),
    "a winner where not all were timed": (bucket(1, a=1.0, b=0.9), None, Pick(B, Source.TIMED)),
}


@pytest.mark.parametrize(("found", "before", "pick"), DECISIONS.values(), ids=DECISIONS.keys())
def test_pick_of_a_bucket(found: Bucket, before: Pair | None, pick: Pick) -> None:
    two = Bucket(2, found.default, found.outcomes)
    first = bucket(1, a=1.0, b=0.5, c=1.0) if before == B else bucket(1, a=1.0, b=1.0, c=1.0)
    assert select_pairs(options(2), [first, two])[2] == pick


def test_default_is_used_everywhere_without_times() -> None:
    assert make_segments(options(16), ()) == (Segment(0, 16, A),)
    assert select_pairs(options(2), ()) == dict.fromkeys((1, 2), Pick(A, Source.DEFAULT))
    valid = {1: (B,), 8: (C, B), 16: (C,)}
    found = options(16, (1, 8, 16), valid=valid)
    assert make_segments(found, ()) == (Segment(0, 8, B), Segment(9, 16, C))
    assert select_pairs(found, ())[16] == Pick(C, Source.ONLY)


def test_pairing_between_buckets_requires_both() -> None:
    won, lost = {"a": 1.0, "b": 0.8, "c": 2.0}, {"a": 1.0, "b": 1.5, "c": 2.0}
    both = [bucket(4, **won), bucket(8, **won), bucket(16, **lost), bucket(32, **won)]
    assert make_segments(options(64, (4, 8, 16, 32)), both) == (
        Segment(0, 3, A),  # below the smallest
        Segment(4, 8, B),
        Segment(9, 31, A),
        Segment(32, 32, B),
        Segment(33, 64, A),  # beyond the largest
    )


def test_zero_tokens_use_the_pairing_of_one_token() -> None:
    won = bucket(1, a=1.0, b=0.8, c=1.0)
    assert make_segments(options(2), [won]) == (Segment(0, 1, B), Segment(2, 2, A))


def test_one_faster_pairing_is_not_used_at_untimed_buckets() -> None:
    """As after a short budget, which ended at the largest number of tokens."""
    found = make_segments(options(4096), [bucket(4096, a=1.0, b=0.5, c=1.0)])
    assert found == (Segment(0, 4095, A), Segment(4096, 4096, B))


def test_failed_pairing_is_not_the_default_next_to_its_bucket() -> None:
    failed = bucket(8, default=B, a=None, b=1.0, c=1.0)
    found = options(32, (2, 8, 32))
    assert default_pair(found, 2, [failed]) == B
    assert make_segments(found, [failed]) == (Segment(0, 32, B),)
    working = [bucket(2, a=1.0, b=1.0, c=1.0), failed, bucket(32, a=1.0, b=1.0, c=1.0)]
    assert make_segments(found, working) == (
        Segment(0, 2, A),
        Segment(3, 31, B),
        Segment(32, 32, A),
    )


def test_challengers_are_promising_pairings_in_order() -> None:
    def of(b: Estimate | None, c: Estimate | None) -> tuple[Pair, ...]:
        known = {pair: e for pair, e in ((B, b), (C, c)) if e is not None}
        return options(1, estimates={1: known}).pairs_to_time(1)

    assert of(None, None) == (B, C)
    assert of(Estimate(0.97, 2.0), Estimate(0.9, 2.0)) == (C, B)
    assert of(None, Estimate(0.98, 2.0)) == (C, B)  # unknown ones last
    assert of(Estimate(0.981, 0.99), Estimate(1.3, 1.4)) == ()
    assert options(1, untimeable=(B,)).pairs_to_time(1) == (C,)


def test_record_that_excludes_all_challengers_decides() -> None:
    slow = {1: dict.fromkeys((B, C), Estimate(1.1, 1.2, True))}
    assert select_pairs(options(1, estimates=slow), ()) == {1: Pick(A, Source.RECORD)}
    assert select_pairs(options(1, estimates=slow, untimeable=ORDER), ()) == {
        1: Pick(A, Source.DEFAULT)
    }


def test_record_selects_untimed_pairings_only_if_unambiguous() -> None:
    def pick(estimate: Estimate, *buckets: Bucket) -> Pair:
        expected = {t: {B: estimate, C: Estimate(1.5, 1.6, True)} for t in (1, 2)}
        return select_pairs(options(2, estimates=expected), buckets)[2].pair

    assert pick(Estimate(0.8, 0.95, True)) == B
    assert pick(Estimate(0.8, 0.96, True)) == A
    assert pick(Estimate(0.8, 0.95, False)) == A  # of layers that are not alike
    assert pick(Estimate(0.8, 0.95, True), bucket(2, a=1.0, b=1.0)) == A  # what is timed counts
    assert pick(Estimate(0.8, 0.95, True), bucket(1, a=1.0, b=None)) == A  # it failed at 1
    assert pick(Estimate(0.8, 0.95, True), bucket(1, a=1.0, b=1.0)) == B


RATIOS = st.one_of(st.none(), st.floats(0.5, 2))
OUTCOMES = st.tuples(RATIOS, RATIOS, st.floats(0, 0.1), st.booleans())
ESTIMATES = st.builds(
    lambda low, more, trusted: Estimate(low, low + more, trusted),
    st.floats(0.7, 1.3),
    st.floats(0, 0.2),
    st.booleans(),
)


@st.composite
def situations(draw) -> tuple[PairingOptions, list[Bucket]]:
    """Draw buckets: some timed, some incomplete, some with a failed default."""
    most = draw(st.integers(1, 80))
    tokens = tuple(sorted(draw(st.sets(st.integers(1, most), min_size=1, max_size=8))))
    expected = {t: draw(st.dictionaries(st.sampled_from((B, C)), ESTIMATES)) for t in tokens}
    found = options(most, tokens, estimates=expected)
    buckets = []
    for t in draw(st.sets(st.sampled_from(tokens))):
        b, c, noise, fails = draw(OUTCOMES)
        outcomes = [outcome(A, None if fails else 1.0), outcome(B, 1.0 if fails else b, noise)]
        outcomes += [outcome(C, c, noise)] * draw(st.booleans())
        buckets.append(Bucket(t, B if fails else A, tuple(outcomes)))
    return found, buckets


@given(situations())
def test_no_segment_uses_a_pairing_that_may_be_slower(
    situation: tuple[PairingOptions, list[Bucket]],
) -> None:
    found, buckets = situation
    at = {b.tokens: b for b in buckets}

    def chosen(tokens: int, pair: Pair) -> bool:
        """Return whether the pairing was faster at the bucket, or the record is unambiguous."""
        own = at[tokens].find_outcome(pair) if tokens in at else None
        if own is not None and own.ratio is not None and pair != at[tokens].default:
            return own.ratio <= 1 - max(0.02, 2 * own.noise)
        estimate = found.estimates[tokens].get(pair)
        return (
            own is None
            and estimate is not None
            and estimate.trusted
            and (estimate.pessimistic <= 0.95)
        )

    runs = make_segments(found, buckets)
    assert (runs[0].first, runs[-1].last) == (0, found.max_tokens)
    assert all(high.first == low.last + 1 for low, high in pairwise(runs))
    assert all(run.first <= run.last for run in runs)
    assert all(low.pair != high.pair for low, high in pairwise(runs))
    for tokens in range(found.max_tokens + 1):
        (pair,) = (run.pair for run in runs if run.first <= tokens <= run.last)
        bucket_of = 1 if tokens == 0 and 1 in found.tokens else tokens
        if bucket_of in found.tokens:
            default = default_pair(found, bucket_of, buckets)
            assert pair == default or chosen(bucket_of, pair)
            continue
        below = max((t for t in found.tokens if t < tokens), default=None)
        above = min((t for t in found.tokens if t > tokens), default=None)
        default = default_pair(found, above or found.max_tokens, buckets, above=below)
        both = below is not None and above is not None
        assert pair == default or (both and chosen(below, pair) and chosen(above, pair))


@pytest.mark.parametrize("most", [1, 2, 17, 4096])
def test_warm_up_covers_both_ends_and_odd_numbers(most: int) -> None:
    numbers = warm_up_token_counts(most)
    assert (numbers[0], numbers[-1]) == (1, most)
    assert all(high <= 2 * low for low, high in pairwise(numbers))
    odd = [n for n in numbers if n % 16]
    assert all(high <= 2 * low + 1 for low, high in pairwise(odd))
