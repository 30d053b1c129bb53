"""Pairings are timed alternately with the default, so that drift affects both."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from modular_kernel.select import timing
from modular_kernel.select.autotune import MeasurementOptions, choose
from modular_kernel.select.budget import Budget
from modular_kernel.select.pairing_choice import PairingChoice
from modular_kernel.select.process_group import SingleProcess
from modular_kernel.select.selection import TimedOutcome
from modular_kernel.select.timing import PairingTimer
from modular_kernel.spec.problem import Machine, Problem

PROBLEM = Problem(tokens=2, hidden=32, intermediate=32, experts=4, top_k=2, dtype=torch.float32)
TORCH = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
NAIVE = ("BatchedPrepareAndFinalize", "NaiveBatchedExperts")
OPTIONS = MeasurementOptions(tokens=(2,))


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MK_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "0")


def choose_with_times(
    monkeypatch: pytest.MonkeyPatch, get_seconds: Callable[[str, int], float]
) -> PairingChoice:
    """Choose a pairing. A run takes `get_seconds(name of the experts part, index of the run)`."""
    runs = count()

    def time_once(_self: PairingTimer, prepared) -> float:
        return get_seconds(type(prepared.kernel.experts).__name__, next(runs))

    monkeypatch.setattr(PairingTimer, "_time_once", time_once)
    return choose(PROBLEM, Machine("cpu"), options=OPTIONS)


def find_outcome(choice: PairingChoice, pair: tuple[str, str]) -> TimedOutcome:
    (bucket,) = choice.buckets
    pair_outcome = bucket.find_outcome(pair)
    assert pair_outcome is not None
    return pair_outcome


def test_drift_does_not_change_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run takes longer than the previous one. The last run takes ten times as long."""

    def get_seconds(name: str, run: int) -> float:
        return (0.9 if name == "NaiveBatchedExperts" else 1.0) * 1e-6 * (1 + run / 4)

    choice = choose_with_times(monkeypatch, get_seconds)
    naive = find_outcome(choice, NAIVE)
    assert naive.ratio == pytest.approx(0.9, abs=0.02)
    assert choice.pair_by_tokens == {2: NAIVE}
    assert find_outcome(choice, TORCH).ratio == 1


def test_noisy_gain_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median is 5 % faster, but the ratios of single rounds vary between 0.475 and 1.425."""

    def get_seconds(name: str, run: int) -> float:
        scatter = (0.5, 1.0, 1.5)[run * 7 % 3]
        return (0.95 * scatter if name == "NaiveBatchedExperts" else 1.0) * 1e-3

    choice = choose_with_times(monkeypatch, get_seconds)
    naive = find_outcome(choice, NAIVE)
    assert naive.ratio == pytest.approx(0.95)
    assert naive.noise > 0.05
    assert choice.pair_by_tokens == {2: TORCH}


def test_much_slower_pairing_is_timed_only_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def get_seconds(name: str, _run: int) -> float:
        runs.append(name)
        return 3e-6 if name == "NaiveBatchedExperts" else 1e-6

    choice = choose_with_times(monkeypatch, get_seconds)
    assert runs.count("NaiveBatchedExperts") == 2
    assert find_outcome(choice, NAIVE) == TimedOutcome(
        NAIVE, pytest.approx(3), pytest.approx(3), rough=True, mode="cpu"
    )


def test_order_alternates_between_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []

    def get_seconds(name: str, _run: int) -> float:
        names.append(name)
        return 1e-3

    choose_with_times(monkeypatch, get_seconds)
    rounds = list(zip(names[2::2], names[3::2], strict=True))  # the default has already run twice
    assert all(
        set(names_of_round) == {"TorchExperts", "NaiveBatchedExperts"} for names_of_round in rounds
    )
    first_names = [names_of_round[0] for names_of_round in rounds]
    assert abs(first_names.count("TorchExperts") - first_names.count("NaiveBatchedExperts")) <= 1


@pytest.mark.parametrize("num_successes", [0, 5])
def test_next_pairing_replaces_a_failed_default(
    monkeypatch: pytest.MonkeyPatch, num_successes: int
) -> None:
    """The default fails when it is built, or in a later run."""
    runs = count()

    def run(_self: PairingTimer, prepared) -> float:
        if prepared.pair == TORCH and next(runs) >= num_successes:
            raise RuntimeError("failed")
        return 1e-3

    monkeypatch.setattr(PairingTimer, "_run", run)
    choice = choose(PROBLEM, Machine("cpu"), options=OPTIONS)
    assert find_outcome(choice, TORCH) == TimedOutcome(TORCH, why="RuntimeError: failed")
    assert find_outcome(choice, NAIVE).ratio == 1
    assert choice.pair_by_tokens == {2: NAIVE}
    cached_choice = choose(PROBLEM, Machine("cpu"), options=OPTIONS)
    assert cached_choice.pair_by_tokens == {2: NAIVE}


def test_ratios_to_a_failed_default_are_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fails while B is compared with it. C was compared before, and is compared with B again."""
    a, b, c, d = (("P", name) for name in "ABCD")
    seconds = {a: 4.0, b: 4.0, c: 2.0, d: 4.0}
    built = []

    def prepare(_self: PairingTimer, pair: tuple[str, str]):
        built.append(pair)
        kernel = SimpleNamespace(prepare_finalize=None)
        return timing._PreparedPair(pair, kernel, (), "cpu"), ""  # type: ignore[arg-type]

    def run(_self: PairingTimer, prepared) -> float:
        if prepared.pair == a and built[-1] == b:
            raise RuntimeError("failed")
        return seconds[prepared.pair]

    monkeypatch.setattr(PairingTimer, "_prepare", prepare)
    monkeypatch.setattr(PairingTimer, "_run", run)
    weights = SimpleNamespace(w1=torch.empty(0))
    workload = SimpleNamespace(weights=weights, flush=False, inputs=(1,), problem=PROBLEM)
    budget = Budget(60, SingleProcess(), first_step_seconds=0)
    timer = PairingTimer(
        workload, (a, b, c, d), frozenset(), Machine("cpu"), SingleProcess(), budget
    )  # type: ignore[arg-type]
    bucket = timer.time_bucket((c, b, d))
    assert bucket.default == b
    assert {o.pair: o.ratio for o in bucket.outcomes} == {a: None, b: 1.0, c: 0.5, d: 1.0}
    assert built == [a, c, b, b, c, d]  # d is not timed against a default that has failed
