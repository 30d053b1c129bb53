"""The tuner: which choices it selects, refuses and saves, and when it stops."""

import pytest
from simulated_tuning import FOLDER, TIMES, FakeBenchmark, Space, make_job, tune_one

from modular_kernel.contracts import Choice, StageTimes, TunedChoice
from modular_kernel.tuning.search import Refusal, remaining_token_counts, tune

# ----------------------------------------------------------------------------- selected choices


def test_fastest_correct_choice_wins() -> None:
    space = Space()
    bench = FakeBenchmark(TIMES)
    tuned = tune_one(space, bench)
    assert tuned.best == TunedChoice(2, 5.0, 10.0)
    assert (len(tuned.times), tuned.finished, tuned.refused) == (4, True, {})
    assert tuned.file == FOLDER / "file"
    assert space.kept == {64: tuned.best}
    assert bench.compared == [2, 1, 0], "the finalists and the untuned choice"


def test_wrong_choices_never_win_and_are_reported() -> None:
    bench = FakeBenchmark({**TIMES, 2: Refusal("error 3e-1 > 1e-2", is_wrong=True)})
    tuned = tune_one(Space(), bench)
    assert tuned.best == TunedChoice(1, 8.0, 10.0)
    assert tuned.wrong_choices == (2,)
    assert 2 not in bench.compared


def test_choice_that_fails_in_the_comparison_does_not_win() -> None:
    tuned = tune_one(Space(), FakeBenchmark(TIMES, {**TIMES, 2: Refusal("wrong", is_wrong=True)}))
    assert tuned.best is not None
    assert tuned.best.choice == 1
    assert tuned.wrong_choices == (2,)


def test_refused_choices_are_not_launched_except_the_untuned_one() -> None:
    bench = FakeBenchmark(TIMES, spilled=(0, 2))
    tuned = tune_one(Space(), bench)
    assert tuned.best == TunedChoice(1, 8.0, 10.0)
    assert (64, 2) not in bench.timed
    assert tuned.refused[2].reason == "spills"


def test_comparison_overrides_screening() -> None:
    tuned = tune_one(Space(), FakeBenchmark({**TIMES, 3: 1.0}, {**TIMES, 3: 7.0}))
    assert tuned.best is not None
    assert tuned.best.choice == 2


def test_gain_below_one_percent_is_noise() -> None:
    assert tune_one(Space(), FakeBenchmark({**TIMES, 2: 9.95, 1: 10.2, 3: 11})).best == TunedChoice(
        0, 10.0, 10.0
    )
    best = tune_one(Space(), FakeBenchmark({**TIMES, 2: 9.85, 1: 10.2, 3: 11})).best
    assert best is not None
    assert best.choice == 2


def test_failed_untuned_choice_is_not_a_baseline() -> None:
    tuned = tune_one(Space(), FakeBenchmark({**TIMES, 0: Refusal("out of memory")}))
    assert tuned.best == TunedChoice(2, 5.0, None)


def test_nothing_is_saved_if_no_choice_runs() -> None:
    space = Space()
    tuned = tune_one(space, FakeBenchmark(dict.fromkeys(TIMES, Refusal("no"))))
    assert tuned.best is None
    assert tuned.file is None
    assert space.saves == []


def test_finalists_are_selected_by_measured_times() -> None:
    space = Space()
    tune_one(space, FakeBenchmark(TIMES, spilled=(1,)))
    assert space.screened == [{choice: StageTimes(TIMES[choice]) for choice in (0, 2, 3)}]


# -------------------------------------------------------------------------------- budget and resume


def test_results_are_saved_after_each_number_of_tokens() -> None:
    space = Space()

    def times(tokens: int, choice: Choice) -> float:
        if tokens == 3:
            raise KeyboardInterrupt
        return TIMES[choice]  # type: ignore[index]

    with pytest.raises(KeyboardInterrupt):
        list(tune(make_job(space, FakeBenchmark(times), 1, 2, 3)))
    assert space.saves == [[1], [1, 2]]
    bench = FakeBenchmark(TIMES)
    assert remaining_token_counts(space, (1, 2, 3, 4, 4), FOLDER, ignore_saved=False) == [3, 4]
    assert [tuned.tokens for tuned in tune(make_job(space, bench, 1, 2, 3, 4))] == [3, 4]
    assert {tokens for tokens, _ in bench.timed} == {3, 4}
    assert sorted(space.kept) == [1, 2, 3, 4]


def test_ignore_saved_measures_again() -> None:
    space = Space()
    space.kept = {1: TunedChoice(3, 1.0, 1.0), 7: TunedChoice(3, 1.0, 1.0)}
    assert remaining_token_counts(space, (1, 7), FOLDER, ignore_saved=True) == [1, 7]
    (tuned,) = tune(make_job(space, FakeBenchmark(TIMES), 1, ignore_saved=True))
    assert tuned.best is not None
    assert list(space.kept) == [1]


def test_budget_is_shared_and_unused_time_is_passed_on() -> None:
    space = Space(tuple(range(1, 100)))
    bench = FakeBenchmark(lambda tokens, choice: 5.0)
    results = list(tune(make_job(space, bench, 1, 2, 3, 4, budget=80.0)))
    assert [tuned.finished for tuned in results] == [False] * 4
    num_timed = [len(tuned.times) for tuned in results]
    assert all(8 <= count <= 20 for count in num_timed), num_timed
    small_space = Space((1,))
    bench = FakeBenchmark(lambda tokens, choice: 5.0)
    results = list(tune(make_job(small_space, bench, *range(1, 9), budget=60.0)))
    assert [tuned.finished for tuned in results] == [True] * 8


def test_next_run_continues_after_a_spent_budget() -> None:
    space = Space()
    results = list(tune(make_job(space, FakeBenchmark(TIMES, cost=100.0), 1, 2, 3, budget=90.0)))
    assert [tuned.tokens for tuned in results] == [1]
    assert results[0].best is not None, "the best choice so far is saved"
    assert [t.tokens for t in tune(make_job(space, FakeBenchmark(TIMES), 1, 2, 3))] == [2, 3]


def test_the_next_number_of_tokens_is_compiled_ahead() -> None:
    bench = FakeBenchmark(TIMES)
    list(tune(make_job(Space(), bench, 1, 2, 3)))
    for current, following in ((1, 2), (2, 3)):
        assert bench.events.index(("compile", following)) < bench.events.index(("time", current))


def test_each_measurement_calls_on_measurement() -> None:
    bench, ticks = FakeBenchmark(TIMES), list[int]()
    tune_one(Space(), bench, on_measurement=lambda: ticks.append(1))
    assert len(ticks) == len(bench.timed) + 1, "the comparison is one measurement"
