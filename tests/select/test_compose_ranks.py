"""`compose` over ranks: all ranks select the same pairings, by the times of the slowest rank."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modular_kernel.errors import CapacityError, ConfigurationError
from modular_kernel.profiling import record
from modular_kernel.profiling.record import ProfileJob
from modular_kernel.select import search
from modular_kernel.select.autotune import MeasurementOptions, choose, compose
from modular_kernel.select.cache import Cache
from modular_kernel.select.inputs import TimingWorkload, make_weights, weight_bytes
from modular_kernel.select.selection import Bucket, TimedOutcome
from modular_kernel.select.timing import PairingTimer
from modular_kernel.spec.problem import Machine, Parallel, Problem
from modular_kernel.testing.random_inputs import random_inputs

PROBLEM = Problem(8, 64, 32, 4, 2)


def _compose_on_rank(rank: int, world: int, group: object, folder: Path, *more_options):
    problem = replace(PROBLEM, parallel=Parallel(world, rank=rank))
    machine = Machine("cpu")
    options = MeasurementOptions(tokens=(2,), folder=folder, **dict(more_options))
    kernel = compose(problem, machine, group=group, options=options)
    weights = make_weights(problem, torch.device("cpu"))
    plan = kernel.plan()
    calls = plan.warm_up(weights)
    if not options.replicated:  # Ranks may have different numbers of tokens.
        x_TH, _, routing = random_inputs(problem.with_tokens(8 if rank else 1), torch.device("cpu"))
        plan(x_TH, weights, routing)
        plan(x_TH, weights, routing, max_tokens=8)
    choice = kernel.choice
    kernel.destroy()
    return choice.buckets, choice.segments, choice.num_timed, calls


def test_ranks_make_the_same_choice(rank_pool, tmp_path: Path) -> None:
    pool = rank_pool(2)
    first, second = pool.run(_compose_on_rank, tmp_path)
    assert first == second
    assert first[2:] == (1, 8)
    names = {outcome.pair[0] for bucket in first[0] for outcome in bucket.outcomes}
    assert "ReplicatedEPPrepareAndFinalize" not in names
    assert names >= {"TorchAll2AllPrepareAndFinalize", "AllGatherReduceScatterPrepareAndFinalize"}
    second_call = pool.run(_compose_on_rank, tmp_path)
    assert second_call[0] == second_call[1] == (*first[:2], 0, 8)
    (replicated, _) = pool.run(_compose_on_rank, tmp_path, ("replicated", True))
    assert {segment.pair[0] for segment in replicated[1]} == {"ReplicatedEPPrepareAndFinalize"}


def _choose_with_failure(rank: int, world: int, group: object, folder: Path, failure: str):
    """Return the outcomes if one rank has a wrong output or fails during timing."""
    problem = replace(PROBLEM, parallel=Parallel(world, rank=rank))
    options = MeasurementOptions(tokens=(8,), folder=folder, ignore_saved=True)

    owner, name = {"wrong": (TimingWorkload, "find_error"), "run": (PairingTimer, "_run")}[failure]
    original = getattr(owner, name)

    def fail(*arguments: object) -> None:
        original(*arguments)  # Finish the exchange, for which the other rank waits.
        raise ArithmeticError("planted")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(owner, name, fail)
        choice = choose(problem, Machine("cpu"), group=group, options=options)
    return {outcome.why for outcome in choice.buckets[0].outcomes}


@pytest.mark.parametrize("failure", ["wrong", "run"])
def test_failure_on_one_rank_excludes_the_pairing_on_all(
    rank_pool, tmp_path: Path, failure: str
) -> None:
    pool = rank_pool(2)
    assert (
        pool.run(_choose_with_failure, tmp_path, failure, timeout=60) == [{"rank 1: planted"}] * 2
    )


def _measure_times(rank: int, world: int, group: object, folder: Path):
    """Return all times if each rank takes 1 s longer than the previous rank."""
    problem = replace(PROBLEM, parallel=Parallel(world, rank=rank))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PairingTimer, "_run", lambda *_: 1.0 + rank)
        options = MeasurementOptions(tokens=(8,), folder=folder)
        choice = choose(problem, Machine("cpu"), group=group, options=options)
    return set(choice.buckets[0].us_by_pair.values())


def test_times_are_those_of_the_slowest_rank(rank_pool, tmp_path: Path) -> None:
    assert rank_pool(2).run(_measure_times, tmp_path) == [{2e6}, {2e6}]


def _choose_with_unequal_budgets(rank: int, world: int, group: object, folder: Path):
    """Return the number of timed pairings if rank 1's budget ends before rank 0's."""
    problem = replace(PROBLEM, parallel=Parallel(world, rank=rank))
    options = MeasurementOptions(tokens=(8,), folder=folder, budget=0 if rank else 60)
    return choose(problem, Machine("cpu"), group=group, options=options).num_timed


def test_ranks_share_one_budget(rank_pool, tmp_path: Path) -> None:
    assert rank_pool(2).run(_choose_with_unequal_budgets, tmp_path, timeout=60) == [1, 1]


def _choose_with_other_arguments(
    rank: int, world: int, group: object, folder: Path, own: dict, tokens: int
) -> str:
    problem = replace(PROBLEM, parallel=Parallel(world, rank=rank))
    problem = problem.with_tokens(tokens) if rank else problem
    options = MeasurementOptions(**({"tokens": (2, 8), "folder": folder} | (own if rank else {})))
    with pytest.raises(ConfigurationError) as exc_info:
        choose(problem, Machine("cpu"), group=group, options=options)
    return str(exc_info.value)


@pytest.mark.parametrize(
    ("own", "tokens", "got", "need"),
    [
        ({"tokens": (2, 4, 8)}, 8, "{'tokens': '(2, 4, 8)'}", "{'tokens': '(2, 8)'}"),
        ({"tokens": (2, 4)}, 4, "{'tokens': '(2, 4)'}", "{'tokens': '(2, 8)'}"),
        ({"ignore_saved": True}, 8, "{'ignore_saved': 'True'}", "{'ignore_saved': 'False'}"),
    ],
)
def test_ranks_with_different_arguments_raise(
    rank_pool, tmp_path: Path, own: dict, tokens: int, got: str, need: str
) -> None:
    errors = rank_pool(2).run(_choose_with_other_arguments, tmp_path, own, tokens, timeout=60)
    assert errors == [f"rank 1's choice: got {got}, need {need}, as on rank 0"] * 2


def _save_buckets(rank: int, _world: int, _group: object, folder: Path) -> int:
    cache = Cache(folder, {"device": "D"}, {"torch": "1"})
    for number in range(40):
        cache.save(
            [Bucket(2 * number + 1 + rank, ("P", "E"), (TimedOutcome(("P", "E"), 1.0, 1.0),))]
        )
        assert cache.load().record is not None
    return 40


def test_concurrent_writers_lose_no_records(rank_pool, tmp_path: Path) -> None:
    assert rank_pool(2).run(_save_buckets, tmp_path) == [40, 40]
    record = Cache(tmp_path, {"device": "D"}, {"torch": "1"}).load().record
    assert record is not None
    assert [bucket.tokens for bucket in record.buckets] == list(range(1, 81))
    assert [path for path in (tmp_path / "choices").iterdir() if ".part" in path.name] == []


def _run_with_too_little_memory(
    rank: int, world: int, group: object, folder: Path
) -> tuple[str, str]:
    """Compose and profile with memory that suffices for the weights of one rank but not of all."""
    problem = replace(PROBLEM, parallel=Parallel(world, rank=rank))
    free_memory = int(1.5 * weight_bytes(problem))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "free_bytes", lambda _device: free_memory)
        options = MeasurementOptions(tokens=(2,), folder=folder)
        kernel = compose(problem, Machine("cpu"), group=group, options=options)
        summary = kernel.choice.summary
        kernel.destroy()
        patch.setattr(record, "free_bytes", lambda _device: free_memory)
        pairs = (("TorchAll2AllPrepareAndFinalize", "TorchExperts"),)
        job = ProfileJob(pairs, problem, Machine("cpu"), "uniform", 1, (folder / "trace",))
        with pytest.raises(CapacityError) as exc_info:
            record.record_rank(rank, world, group, job)
    return summary, str(exc_info.value)


def test_ranks_of_a_host_share_its_memory(rank_pool, tmp_path: Path) -> None:
    for summary, error in rank_pool(2).run(_run_with_too_little_memory, tmp_path):
        assert "weights of 2 ranks take" in summary
        assert re.match(r"weights of \d experts on each of 2 ranks: got 0.0 GB in \w+, need", error)
