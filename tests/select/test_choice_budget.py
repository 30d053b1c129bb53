"""A step starts only if it is expected to finish within the time budget."""

from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modular_kernel.cli.compose import _BUDGET_S
from modular_kernel.select import autotune, search, timing
from modular_kernel.select import budget as budgets
from modular_kernel.select.autotune import MeasurementOptions, choose
from modular_kernel.select.budget import Budget, BudgetSpentError
from modular_kernel.select.process_group import SingleProcess
from modular_kernel.select.selection import TimedOutcome
from modular_kernel.select.timing import PairingTimer
from modular_kernel.spec.problem import Machine, Problem

TORCH = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
NAIVE = ("BatchedPrepareAndFinalize", "NaiveBatchedExperts")
CPU = Machine("cpu")
PROBLEM = Problem(8, 64, 32, 4, 2)


class Clock:
    """Replacement of the module `time`, whose clock the tests advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setenv("MK_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    fake_clock = Clock()
    monkeypatch.setattr(budgets, "time", fake_clock)
    return fake_clock


Log = list[tuple[int, tuple[str, str]]]


def set_pair_seconds(monkeypatch: pytest.MonkeyPatch, clock: Clock, seconds: float) -> Log:
    """Make each pairing take `seconds` to prepare, and NAIVE the fastest in timings.

    Return a log of (tokens, pairing), to which every started pairing is appended.
    """
    started_pairs: Log = []
    prepare = PairingTimer._prepare

    def prepare_slowly(self: PairingTimer, pair: tuple[str, str]):
        started_pairs.append((self.workload.problem.tokens, pair))
        clock.now += seconds
        return prepare(self, pair)

    monkeypatch.setattr(PairingTimer, "_prepare", prepare_slowly)
    monkeypatch.setattr(PairingTimer, "_time_once", lambda _, r: 1.0 if r.pair == TORCH else 0.5)
    return started_pairs


def test_step_starts_only_if_the_longest_one_would_finish(clock: Clock) -> None:
    budget = Budget(10, SingleProcess(), first_step_seconds=2)
    assert budget.allows(5)
    assert not budget.allows(6)
    with budget.step():
        clock.now += 1
    assert budget.allows(9)
    with budget.step():
        clock.now += 4
    assert (budget.remaining, budget.elapsed) == (5, 5)
    assert budget.allows(1)
    assert not budget.allows(2)
    with budget.step():
        clock.now += 0.5
    assert budget.allows(1)  # 4.5 s are left, and 4 s are needed
    clock.now += 1
    assert not budget.allows(1)
    assert not budget.is_over()
    clock.now += 10
    assert (budget.remaining, budget.is_over()) == (0, True)


def test_step_that_compiles_a_new_pairing_needs_the_estimated_time(clock: Clock) -> None:
    """The steps so far may have compiled nothing, such as the creation of the inputs."""
    budget = Budget(5, SingleProcess(), first_step_seconds=2)
    with budget.step():
        clock.now += 0.5
    assert budget.allows(9)
    assert budget.allows(2, new_pairs=2)
    assert budget.allows(3, new_pairs=2)
    assert not budget.allows(4, new_pairs=2)  # 4.5 s are left, and 5 s are needed
    clock.now += 3
    assert budget.allows()
    assert not budget.allows(new_pairs=1)


def test_time_that_is_over_is_an_error(clock: Clock) -> None:
    budget = Budget(5, SingleProcess(), first_step_seconds=2)
    budget.require_time()
    clock.now += 5
    with pytest.raises(BudgetSpentError):
        budget.require_time()


def test_kernels_are_not_compiled_after_the_deadline(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilations of other threads are not affected."""
    jit = pytest.importorskip("triton.runtime.jit").JITFunction
    compiled = []
    monkeypatch.setattr(jit, "_do_compile", lambda _self, name: compiled.append(name))
    original, budget = jit._do_compile, Budget(5, SingleProcess(), first_step_seconds=2)
    with budget.limit_compilation():
        jit._do_compile(None, "early")
        clock.now += 5
        with pytest.raises(BudgetSpentError):
            jit._do_compile(None, "late")
        thread = Thread(target=jit._do_compile, args=(None, "other thread"))
        thread.start()
        thread.join()
    assert jit._do_compile is original
    assert compiled == ["early", "other thread"]


def test_pairing_that_is_built_too_late_is_not_called(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building NAIVE takes 6 s, but the budget is 5 s, so NAIVE is not called and has no time."""
    make_kernel, call_times = timing.make_kernel, []
    run_for_check = PairingTimer._run_for_check

    def build(*arguments, **options):
        clock.now += 6 if arguments[:2] == NAIVE else 0
        return make_kernel(*arguments, **options)

    def run_and_record(self: PairingTimer, call):
        call_times.append(clock.now)
        return run_for_check(self, call)

    monkeypatch.setattr(timing, "make_kernel", build)
    monkeypatch.setattr(PairingTimer, "_run_for_check", run_and_record)
    choice = choose(PROBLEM, CPU, options=MeasurementOptions(tokens=(1, 2), budget=5))
    assert call_times == [0.0]  # TORCH
    assert choice.summary == "2 token counts: 2 default (budget of 5 s spent)"
    assert [o.why for o in choice.outcomes(1)] == ["", "not timed: budget of 5 s spent"]


def test_default_that_is_built_too_late_is_not_called(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_kernel = timing.make_kernel

    def build(*arguments, **options):
        clock.now += 6
        return make_kernel(*arguments, **options)

    calls: list[object] = []
    monkeypatch.setattr(timing, "make_kernel", build)
    monkeypatch.setattr(PairingTimer, "_run_for_check", lambda *_: calls.append(1))
    choice = choose(PROBLEM, CPU, options=MeasurementOptions(tokens=(1, 2), budget=5))
    assert calls == []
    assert choice.summary == "2 token counts: 2 default (budget of 5 s spent)"


def test_zero_budget_times_nothing(clock: Clock) -> None:
    budget = Budget(0, SingleProcess(), first_step_seconds=0)
    assert not budget.allows()
    assert budget.is_over()


def test_small_token_counts_come_first_and_others_use_the_default(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_pairs = set_pair_seconds(monkeypatch, clock, 2)
    choice = choose(PROBLEM, CPU, options=MeasurementOptions(budget=9))
    assert started_pairs == [(1, TORCH), (1, NAIVE), (2, TORCH), (2, NAIVE)]
    assert clock.now == 8
    assert choice.pair_by_tokens == {1: NAIVE, 2: NAIVE, 4: TORCH, 8: TORCH}
    assert choice.untimed_tokens == (4, 8)
    assert [(s.first, s.last, s.pair) for s in choice.segments] == [(0, 2, NAIVE), (3, 8, TORCH)]
    assert choice.summary == "4 token counts: 2 timed (8.0 s), 2 default (budget of 9 s spent)"
    continued = choose(PROBLEM, CPU, options=MeasurementOptions(budget=9))
    assert continued.summary == "4 token counts: 2 timed (8.0 s), 2 from the cache"
    assert continued.pair_by_tokens == dict.fromkeys((1, 2, 4, 8), NAIVE)


def test_times_measured_within_the_budget_are_kept(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default takes 1 s and NAIVE 6 s, so NAIVE starts only if 6 s remain."""
    started_pairs = set_pair_seconds(monkeypatch, clock, 1)
    prepare = PairingTimer._prepare

    def prepare_more_slowly(self: PairingTimer, pair: tuple[str, str]):
        clock.now += 5 if pair == NAIVE else 0
        return prepare(self, pair)

    monkeypatch.setattr(PairingTimer, "_prepare", prepare_more_slowly)
    buckets = []
    options = MeasurementOptions(tokens=(1, 2), budget=20, on_bucket=buckets.append)
    first = choose(PROBLEM, CPU, options=options)
    assert started_pairs == [(1, TORCH), (1, NAIVE), (2, TORCH), (2, NAIVE)]
    assert clock.now == 14
    assert [bucket.tokens for bucket in buckets] == [1, 2]
    continued = choose(PROBLEM, CPU, options=replace(options, ignore_saved=True, budget=7.5))
    assert started_pairs[4:] == [(1, TORCH), (1, NAIVE)]
    # ignore_saved=True ignores the saved times of bucket 2.
    assert continued.pair_by_tokens == {1: NAIVE, 2: TORCH}
    assert (
        choose(PROBLEM, CPU, options=replace(options, budget=0)).pair_by_tokens
        == first.pair_by_tokens
    )


def test_incomplete_bucket_is_continued(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparing the default takes 6 of 9 s, so no time remains for another pairing."""
    started_pairs = set_pair_seconds(monkeypatch, clock, 6)
    options = MeasurementOptions(tokens=(8,), budget=9)
    choice = choose(PROBLEM, CPU, options=options)
    assert started_pairs == [(8, TORCH)]
    assert choice.summary == "1 token count: 1 default (budget of 9 s spent)"
    assert "not timed: budget of 9 s spent" in [o.why for o in choice.outcomes(8)]
    complete = choose(PROBLEM, CPU, options=replace(options, budget=20))
    assert complete.pair_by_tokens == {8: NAIVE}
    assert started_pairs[1:] == [(8, TORCH), (8, NAIVE)]
    # This choice is incomplete, so the cache is kept.
    choose(PROBLEM, CPU, options=replace(options, ignore_saved=True))
    assert choose(PROBLEM, CPU, options=replace(options, budget=0)).pair_by_tokens == {8: NAIVE}


def test_creating_weights_counts_toward_the_budget(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_pairs = set_pair_seconds(monkeypatch, clock, 1)
    make_weights = search.make_weights

    def make_weights_slowly(*arguments):
        clock.now += 8.5
        return make_weights(*arguments)

    monkeypatch.setattr(search, "make_weights", make_weights_slowly)
    choice = choose(PROBLEM, CPU, options=MeasurementOptions(budget=10))
    assert started_pairs == [(1, TORCH)]  # 0.5 s are left, less than the 1 s that TORCH took
    assert choice.untimed_tokens == (1, 2, 4, 8)
    choice = choose(PROBLEM, CPU, options=MeasurementOptions(budget=5, ignore_saved=True))
    assert choice.summary == (
        "4 token counts: 4 default "
        "(budget of 5 s spent: weights of 0 of 4 experts were created in time)"
    )


def test_creating_inputs_counts_toward_the_budget(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_pairs = set_pair_seconds(monkeypatch, clock, 1)
    make_workload = search.make_workload

    def make_workload_slowly(*arguments, **options):
        clock.now += 3
        return make_workload(*arguments, **options)

    monkeypatch.setattr(search, "make_workload", make_workload_slowly)
    choice = choose(PROBLEM, CPU, options=MeasurementOptions(budget=8))
    # 5 s are left, less than two steps of 3 s.
    assert (started_pairs, clock.now, choice.num_timed) == ([], 3, 0)
    choice = choose(PROBLEM, CPU, options=MeasurementOptions(budget=9))
    assert (started_pairs, clock.now, choice.num_timed) == ([(1, TORCH), (1, NAIVE)], 8, 1)


@pytest.mark.parametrize("budget", [0.0, 20.0])
def test_no_weights_are_created_if_nothing_is_timed(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, budget: float
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("weights were made")

    monkeypatch.setattr(search, "make_weights", fail)
    if budget:
        monkeypatch.setattr(search.PairingOptions, "pairs_to_time", lambda *_: ())
    assert choose(PROBLEM, CPU, options=MeasurementOptions(budget=budget)).num_timed == 0


@given(budget=st.floats(0, 60), steps=st.lists(st.floats(0.01, 8), min_size=1, max_size=12))
@settings(max_examples=100)
def test_steps_of_decreasing_duration_never_exceed_the_budget(
    budget: float, steps: list[float]
) -> None:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budgets, "time", clock)
        time_budget = Budget(budget, SingleProcess(), first_step_seconds=8)
        for seconds in sorted(steps, reverse=True):
            if not time_budget.allows():
                break
            with time_budget.step():
                clock.now += seconds
        assert clock.now <= budget


def test_the_command_line_has_the_same_budget() -> None:
    assert _BUDGET_S == autotune.BUDGET_S == MeasurementOptions().budget == 20


def test_untimed_outcome_has_a_reason(clock: Clock) -> None:
    choice = choose(PROBLEM, CPU, options=MeasurementOptions(budget=0))
    reason = "not timed: budget of 0 s spent"
    assert choice.outcomes(1)[1] == TimedOutcome(NAIVE, why=reason)
