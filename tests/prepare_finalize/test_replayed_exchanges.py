"""Replayed calls over ranks repeat the launches and collectives of exchanges of fixed capacity."""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from ep_layers import ALL2ALL, BATCHED, GATHERED, REPLICATED, Layer
from interpreted_replays import interpreted_replays
from replayed_exchanges import (
    SYMMETRIC,
    make_manager,
    make_replayed_plan,
    refuse_in_replay,
    replay_calls,
    replay_during_a_started_call,
)

from modular_kernel.errors import CommunicationError, UnsupportedError
from modular_kernel.spec.placement import Placement
from modular_kernel.testing.ranks.pool import RankPool
from prepare_finalize import TorchGroup

EXPERTS = {BATCHED: "BatchedTritonExperts"}
FIXED_CAPACITY_PARTS = (REPLICATED, GATHERED, ALL2ALL, BATCHED)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, grace=15) as ranks:
        yield ranks


def make_layer(part: str, seed: int = 0, **fields) -> Layer:
    tokens = (4, 4) if part == REPLICATED else (4, 3)
    experts = EXPERTS.get(part, "TritonExperts")
    return Layer(part, tokens, experts_part=experts, seed=seed, fields=fields)


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_channel"])
@pytest.mark.parametrize("part", [*FIXED_CAPACITY_PARTS, SYMMETRIC])
def test_replays_match_the_float64_reference(pool: RankPool, part: str, quant: str) -> None:
    dtype = torch.float32 if quant == "none" else torch.bfloat16
    layers = [make_layer(part, seed, quant=quant, dtype=dtype) for seed in range(5)]
    reports = pool.run(replay_calls, layers)
    for index, layer in enumerate(layers):
        comparison = layer.compare([outputs[index] for outputs, *_ in reports])
        assert comparison.ok, (index, comparison)
    for _, counters, invalid in reports:
        fallback_calls = {} if part == SYMMETRIC else {"first call of a layer over ranks": 1}
        assert counters["fallback_calls"] == fallback_calls
        assert counters["recorded_calls"] == 1
        assert counters["replayed_calls"] == 4 - len(fallback_calls)
        assert invalid == 0


def test_a_placement_with_copies_is_replayed(pool: RankPool) -> None:
    """The slots of experts with copies are computed by an additional launch."""
    fields = {"experts": 5, "top_k": 2}
    copies = Placement.linear(5, 2).with_copies({0: (1,), 4: (0,)})
    layers = [
        Layer(ALL2ALL, (4, 3), copies, "out_of_range", "TritonExperts", seed, fields=fields)
        for seed in range(4)
    ]
    reports = pool.run(replay_calls, layers)
    for index, layer in enumerate(layers):
        comparison = layer.compare([outputs[index] for outputs, *_ in reports])
        assert comparison.ok, (index, comparison)
    for rank, (_, counters, invalid) in enumerate(reports):
        assert counters["replayed_calls"] == 2
        assert invalid == sum(layer.count_invalid_ids(rank) for layer in layers)


def replay_calls_of_an_idle_rank(rank: int, world: int, group: object, layer: Layer):
    """Call a plan four times, on a layer in which a rank has no tokens. Return the last output."""
    with interpreted_replays():
        manager = make_manager(layer.part, group)
        plan, inputs = layer.kernel(rank, manager).plan(), layer.inputs_of(rank)
        for _ in range(4):
            out = plan(inputs.x_TH, inputs.weights, inputs.routing)
        plan.kernel.prepare_finalize.check()
        return out.clone(), plan.kernel.counters()


@pytest.mark.parametrize("part", [GATHERED, ALL2ALL, BATCHED, SYMMETRIC])
def test_calls_of_a_rank_without_tokens_are_replayed(pool: RankPool, part: str) -> None:
    """If they were not, all ranks would wait for the host code of the rank without tokens."""
    layer = replace(make_layer(part), tokens_W=(4, 0))
    reports = pool.run(replay_calls_of_an_idle_rank, layer)
    assert layer.compare([out for out, _ in reports]).ok
    for _, counters in reports:
        assert counters["replayed_calls"] == (3 if part == SYMMETRIC else 2)
        assert "no tokens" not in counters["fallback_calls"]


@pytest.mark.parametrize("part", FIXED_CAPACITY_PARTS)
def test_a_refusal_reaches_ranks_that_replay(pool: RankPool, part: str) -> None:
    message = "rank 1 refused its call 5 of layer 1 with DtypeError"
    for rank, errors in enumerate(pool.run(refuse_in_replay, make_layer(part), 5.0)):
        if rank == 1:
            assert errors[0].startswith("DtypeError")
        elif part == REPLICATED:  # On a CPU, this part raises before the all-reduce.
            errors.insert(0, errors[0])
        else:
            assert errors[0] == "NaN"
        assert message in errors[1]
        assert "a manager that failed before" in errors[2]


def interrupt_replay(rank: int, world: int, group: object, layer: Layer) -> tuple[str, float]:
    """Interrupt a replay on rank 1 between its launches and the combine."""
    with interpreted_replays():
        plan, arguments = make_replayed_plan(rank, group, layer, timeout_s=20.0)
        manager = plan.kernel.prepare_finalize.manager
        start = manager._start

        def start_unless_combine(launch, tensors, step, phase):
            if phase == "combine":
                raise KeyboardInterrupt
            return start(launch, tensors, step, phase)

        if rank == 1:
            manager._start = start_unless_combine
        start_time = time.monotonic()
        try:
            plan(*arguments)
        except (CommunicationError, KeyboardInterrupt) as error:
            return type(error).__name__, time.monotonic() - start_time
        return "", 0.0


@pytest.mark.parametrize("part", FIXED_CAPACITY_PARTS)
def test_an_interrupted_replay_is_reported_at_once(pool: RankPool, part: str) -> None:
    reports = pool.run(interrupt_replay, make_layer(part))
    assert [name for name, _ in reports] == ["CommunicationError", "KeyboardInterrupt"]
    assert all(seconds < 10 for _, seconds in reports)


def log_replays(rank: int, world: int, group: object, layer: Layer) -> tuple[list, list, str]:
    """Return the last exchanges of two replays, and the error of a call after `destroy`."""
    with interpreted_replays():
        plan, arguments = make_replayed_plan(rank, group, layer)
        manager = plan.kernel.prepare_finalize.manager
        step = manager.step
        for _ in range(2):
            plan(*arguments)
        records = [(r["step"] - step, r["phase"]) for r in manager.last_calls._records]
        states = [r["state"] for r in manager.last_calls._records]
        manager.destroy()
        try:
            plan(*arguments)
        except UnsupportedError as error:
            return records, states, str(error)
        return records, states, ""


@pytest.mark.parametrize("part", [*FIXED_CAPACITY_PARTS, SYMMETRIC])
def test_replays_are_logged_and_need_an_open_manager(pool: RankPool, part: str) -> None:
    for records, states, error in pool.run(log_replays, make_layer(part)):
        # On a CPU, ranks compare sizes before they exchange blocks.
        phases = ("dispatch", "combine") if part == SYMMETRIC else ("counts", "dispatch", "combine")
        expected = [(step, phase) for step in (1, 2) for phase in phases]
        assert records[-len(expected) :] == expected
        assert set(states[-len(expected) :]) == {"launched" if part == SYMMETRIC else "done"}
        assert "a destroyed manager" in error


def test_calls_are_not_replayed_if_their_slot_is_in_use(pool: RankPool) -> None:
    for outputs, replayed in pool.run(replay_during_a_started_call, make_layer(SYMMETRIC)):
        assert all(torch.equal(out, outputs[0]) for out in outputs)
        assert replayed == 3 + 2


def find_replayable(rank: int, world: int, group: object, layer: Layer):
    """Return whether kernels with counted rows and with a fixed capacity are replayable, and the
    capacities of their plans.
    """
    managers = TorchGroup(group), TorchGroup(group, checked=False)
    kernels = [layer.kernel(rank, manager) for manager in managers]
    return [kernel.replayable for kernel in kernels], [
        kernel._call_plans.capacities for kernel in kernels
    ]


@pytest.mark.parametrize("part", FIXED_CAPACITY_PARTS)
def test_calls_with_counted_rows_are_not_replayed(pool: RankPool, part: str) -> None:
    for replayable, capacities in pool.run(find_replayable, make_layer(part)):
        assert replayable == [False, True]
        assert capacities == [(), ()]
