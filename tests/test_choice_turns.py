"""What is chosen was timed by turns, whatever the machine does between two timings."""

from pathlib import Path

import pytest
import torch

from modular_kernel.select.choice import Choice
from modular_kernel.select.choosing import choose
from modular_kernel.select.timing import Stopwatch
from modular_kernel.types import Machine, Problem

PROBLEM = Problem(tokens=2, hidden=32, intermediate=32, experts=4, top_k=2, dtype=torch.float32)
Times = dict[int, tuple[float, float]]


@pytest.fixture(autouse=True)
def _of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MK_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "0")


def chosen(monkeypatch: pytest.MonkeyPatch, alone: Times, by_turns: Times) -> Choice:
    """Choose where both experts take so many microseconds: TorchExperts, NaiveBatchedExperts.

    By number of tokens.
    """

    def once(self: Stopwatch, ready) -> float:
        name = type(ready.kernel.experts).__name__
        known = any(experts == name for _, experts in self.outcomes)
        times = (by_turns if known else alone)[self.situation.problem.tokens]
        return times[name == "NaiveBatchedExperts"] * 1e-6

    monkeypatch.setattr(Stopwatch, "_once", once)
    return choose(PROBLEM, Machine("cpu"))


def test_the_fastest_is_timed_by_turns_although_it_came_far_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone 3 us to 1, but by turns, on a machine that became busy, 8 to 9."""
    choice = chosen(monkeypatch, dict.fromkeys((1, 2), (1, 3)), dict.fromkeys((1, 2), (9, 8)))
    assert choice.buckets
    for bucket in choice.buckets:
        assert [outcome.rough for outcome in bucket.outcomes] == [False, False]
        assert choice.picks[bucket.tokens][1] == "NaiveBatchedExperts"
        assert sorted(bucket.times.values()) == pytest.approx([8, 9])


def test_what_the_bucket_before_chose_is_timed_by_turns_before_it_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At 2 tokens the machine becomes busy: alone 9.05 us come within 1 % of 9, by turns they
    would be 81."""
    alone, by_turns = {1: (9, 8), 2: (1, 9.05)}, {1: (9, 8), 2: (9, 81)}
    choice = chosen(monkeypatch, alone, by_turns)
    assert choice.picks[1][1] == "NaiveBatchedExperts"
    assert choice.picks[2][1] == "TorchExperts"
