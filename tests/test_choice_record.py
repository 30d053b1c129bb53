"""Choices as data: buckets, the pairing of each, and where one pairing gives way to another."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modular_kernel.select.kernel import warm_tokens
from modular_kernel.select.record import (
    Bucket,
    Segment,
    TimedOutcome,
    bucket_tokens,
    chosen,
    crossover,
    in_halves,
    segments,
)
from modular_kernel.types import Problem

A, B, C = ("P", "A"), ("P", "B"), ("Q", "C")
ORDER = (A, B, C)


def bucket(tokens: int, **times: float | None) -> Bucket:
    pairs = {"a": A, "b": B, "c": C}
    return Bucket(
        tokens, tuple(TimedOutcome(pairs[n], us, why="" if us else "no") for n, us in times.items())
    )


def of(tokens: int, *buckets: Bucket, valid: dict[int, tuple] | None = None) -> tuple:
    problem = Problem(tokens, 8, 8, 2, 1)
    everywhere = dict.fromkeys(bucket_tokens(tokens), ORDER)
    return segments(problem, buckets, ORDER, valid=valid or everywhere)


def test_buckets_are_powers_of_two_and_the_most() -> None:
    assert bucket_tokens(1) == (1,)
    assert bucket_tokens(16) == (1, 2, 4, 8, 16)
    assert bucket_tokens(20) == (1, 2, 4, 8, 16, 20)
    assert bucket_tokens(0) == (1,)


@given(st.sets(st.integers(1, 10_000), min_size=1, max_size=40))
def test_halves_keep_every_number_and_begin_with_the_ends(numbers: set[int]) -> None:
    ordered = sorted(numbers)
    found = in_halves(ordered)
    assert sorted(found) == ordered
    assert found[0] == ordered[-1]
    assert set(found[:2]) == {ordered[0], ordered[-1]}


def test_the_fastest_is_chosen_and_ties_go_by_order() -> None:
    assert chosen([bucket(1, a=2.0, b=1.0)], ORDER) == {1: B}
    assert chosen([bucket(1, b=1.0, a=1.0)], ORDER) == {1: A}
    assert chosen([bucket(1, a=None)], ORDER) == {}


def test_a_pairing_stays_where_another_is_no_faster_than_noise() -> None:
    close = chosen([bucket(1, a=10.0, b=20.0), bucket(2, a=10.05, b=10.0)], ORDER)
    assert close == {1: A, 2: A}
    clear = chosen([bucket(1, a=10.0, b=20.0), bucket(2, a=10.2, b=10.0)], ORDER)
    assert clear == {1: A, 2: B}


def test_a_crossover_lies_where_the_lines_meet() -> None:
    # a: 10 at 100, 30 at 200; b: 20 at 100, 20 at 200. They meet at 150.
    low, high = (100, {A: 10.0, B: 20.0}), (200, {A: 30.0, B: 20.0})
    assert crossover(low, high, A, B) == 150
    assert crossover((100, {A: 19.9, B: 20.0}), high, A, B) == 100
    assert crossover(low, (200, {A: 20.01, B: 20.0}), A, B) == 199


def test_a_pairing_without_a_time_at_one_end_serves_what_lies_at_the_other() -> None:
    assert crossover((4, {A: 1.0}), (8, {A: 2.0, B: 1.0}), A, B) == 7
    assert crossover((4, {A: 1.0, B: 2.0}), (8, {B: 1.0}), A, B) == 4
    assert crossover((4, {A: 1.0}), (8, {B: 1.0}), A, B) == 4


def test_segments_join_at_crossovers() -> None:
    found = of(200, bucket(100, a=10.0, b=20.0), bucket(200, a=30.0, b=20.0))
    assert found == (Segment(0, 150, A), Segment(151, 200, B))


def test_without_any_time_the_first_valid_one_serves_all() -> None:
    assert of(16) == (Segment(0, 16, A, measured=False),)
    valid = {1: (B,), 8: (B, C), 16: (C,)}
    assert of(16, valid=valid) == (
        Segment(0, 8, B, measured=False),
        Segment(9, 16, C, measured=False),
    )


def test_above_what_was_measured_another_takes_over_where_the_last_is_not_valid() -> None:
    valid = {1: (A, B), 4: (A, B), 8: (A, B), 16: (B,), 32: (B,)}
    found = of(32, bucket(1, a=1.0, b=2.0), bucket(4, a=1.0, b=2.0), valid=valid)
    assert found == (Segment(0, 8, A), Segment(9, 32, B, measured=False))


TIMES = st.one_of(st.none(), st.floats(0.5, 50))


@given(st.dictionaries(st.sampled_from(bucket_tokens(64)), st.tuples(TIMES, TIMES, TIMES)))
def test_segments_have_no_gap_and_agree_with_every_bucket(table: dict[int, tuple]) -> None:
    buckets = [bucket(t, a=a, b=b, c=c) for t, (a, b, c) in table.items()]
    found = of(64, *buckets)
    assert (found[0].first, found[-1].last) == (0, 64)
    assert all(high.first == low.last + 1 for low, high in pairwise(found))
    assert all(segment.first <= segment.last for segment in found)
    for tokens, pair in chosen(buckets, ORDER).items():
        (serving,) = (s for s in found if s.first <= tokens <= s.last)
        assert serving.pair == pair


@pytest.mark.parametrize("most", [1, 2, 17, 4096])
def test_warm_up_reaches_both_ends_and_odd_numbers_at_every_scale(most: int) -> None:
    numbers = warm_tokens(most)
    assert (numbers[0], numbers[-1]) == (1, most)
    assert all(high <= 2 * low for low, high in pairwise(numbers))
    odd = [n for n in numbers if n % 16]
    assert all(high <= 2 * low + 1 for low, high in pairwise(odd))
