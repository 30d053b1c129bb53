"""FusedMoE over gloo ranks: EP x TP process groups, with and without an exchange of tokens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_layers import (
    FAMILIES,
    SPLITS,
    E,
    H,
    K,
    Sample,
    T,
    make_layer,
    rank_weights,
    relative_error,
)

from modular_kernel.errors import ConfigurationError
from modular_kernel.layers.balance import count, rank_loads, rebalance
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.parallel import LayerParallel
from modular_kernel.machine import prefer_torch_reference
from modular_kernel.ops.route import route
from modular_kernel.spec.placement import Placement
from modular_kernel.tensors import ExpertWeights
from modular_kernel.testing.ranks.pool import RankPool

Pool = Callable[[int], RankPool]
REPLICATED = "ReplicatedEPPrepareAndFinalize"
ALL2ALL = "TorchAll2AllPrepareAndFinalize"
GATHERED = "AllGatherReduceScatterPrepareAndFinalize"
SAMPLE = Sample(FAMILIES["zero experts"], fields={"bias": True, "routed_scaling_factor": 1.5})


@contextmanager
def make_groups(rank: int, ep: int, tp: int) -> Iterator[tuple[Any, Any]]:
    """Yield the EP and TP groups of this rank, where rank = ep_rank * tp + tp_rank.

    All ranks must call this function. The groups are destroyed afterwards, because the thread of
    each gloo group polls 100 times per second.
    """
    groups = [None, None]
    for tp_rank in range(tp):
        ranks = [ep_rank * tp + tp_rank for ep_rank in range(ep)]
        group = dist.new_group(ranks)
        groups[0] = group if rank in ranks else groups[0]
    for ep_rank in range(ep):
        ranks = [ep_rank * tp + tp_rank for tp_rank in range(tp)]
        group = dist.new_group(ranks)
        groups[1] = group if rank in ranks else groups[1]
    yield groups[0], groups[1]
    for group in groups:
        dist.destroy_process_group(group)


def measure_error_of_sums(
    rank: int, world: int, group: Any, split: tuple[int, int], is_partial: bool
) -> float:
    """Return the largest relative error of two calls of a layer that sums over ranks.

    A third call without tokens must return no rows.
    """
    ep, tp = split
    with make_groups(rank, ep, tp) as (ep_group, tp_group):

        def shared(x_TH: torch.Tensor) -> torch.Tensor:
            return SAMPLE.shared(x_TH) / (world if is_partial else 1)

        for world_group in (group, None):
            parallel = LayerParallel(ep_group=ep_group, tp_group=tp_group, group=world_group)
            assert parallel.ep == (rank // tp, ep)
            assert parallel.tp == (rank % tp, tp)
            layer = make_layer(
                SAMPLE,
                parallel=parallel,
                reduce_results=True,
                shared_experts=shared,
                shared_partial=is_partial,
            )
            with prefer_torch_reference():
                got = [layer(SAMPLE.x_TH, SAMPLE.logits) for _ in range(2)]
                assert layer(SAMPLE.x_TH[:0], SAMPLE.logits[:0]).shape == (0, H)
        return max(relative_error(output, SAMPLE.expected_output(shared=True)) for output in got)


@pytest.mark.parametrize("is_partial", [False, True])
@pytest.mark.parametrize("split", SPLITS[1:], ids=str)
def test_sums_over_groups_equal_the_reference(
    rank_pool: Pool, split: tuple[int, int], is_partial: bool
) -> None:
    errors = rank_pool(split[0] * split[1]).run(measure_error_of_sums, split, is_partial)
    assert max(errors) < 1e-5


def measure_error_of_exchange(
    rank: int, world: int, group: Any, part: str, split: tuple[int, int]
) -> float:
    """Return the relative error of a layer with an exchange of tokens.

    The TP ranks of an EP rank have the same tokens. Unless the part takes replicated tokens, EP
    ranks have different tokens.
    """
    ep, tp = split
    with make_groups(rank, ep, tp) as (ep_group, tp_group):
        parallel = LayerParallel(ep_group=ep_group, tp_group=tp_group)
        shared_expert_calls = []

        def shared(x_TH: torch.Tensor) -> torch.Tensor:
            shared_expert_calls.append(len(x_TH))
            return SAMPLE.shared(x_TH)

        layer = make_layer(
            SAMPLE,
            parallel=parallel,
            reduce_results=True,
            shared_experts=shared,
            prepare_finalize=part,
            max_tokens=T,
        )
        tokens = slice(0, T) if part == REPLICATED else slice(rank // tp * 2, T - rank // tp)
        with prefer_torch_reference():
            got = layer(SAMPLE.x_TH[tokens], SAMPLE.logits[tokens])
        assert shared_expert_calls == [len(got)]
        error = relative_error(got, SAMPLE.expected_output(shared=True)[tokens])
        layer.destroy()
        return error


@pytest.mark.parametrize("split", [(2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("part", [REPLICATED, ALL2ALL, GATHERED])
def test_exchanges_equal_the_reference(rank_pool: Pool, part: str, split: tuple[int, int]) -> None:
    errors = rank_pool(split[0] * split[1]).run(measure_error_of_exchange, part, split)
    assert max(errors) < 1e-5


def run_with_expert_copies(rank: int, world: int, group: Any) -> tuple[float, list[int]]:
    """Call a layer four times with one token and all experts on every rank.

    Return the largest relative error and the number of pairs (token, expert) that this rank
    computed in each call.
    """
    placement = rebalance([1.0] * E, [E] * world)
    sample = Sample(tokens=1)
    layer = FusedMoE(
        E, H, sample.problem.intermediate, router=sample.router, params_dtype=torch.float32,
        parallel=LayerParallel(ep_group=group), prepare_finalize=REPLICATED,
        placement=placement, max_tokens=1,
    )  # fmt: skip
    local_experts = list(placement.slots[rank])
    weights = sample.plain
    layer.set_weights(ExpertWeights(weights.w1[local_experts], weights.w2[local_experts]))
    part = layer._exchange_kernel.prepare_finalize
    pair_counts, local_tokens = [], part.local_tokens

    def count_pairs(call: Any, x: Any, scale: Any, slots_RK: torch.Tensor, weights: Any) -> Any:
        pair_counts.append(int((slots_RK >= 0).sum()))
        return local_tokens(call, x, scale, slots_RK, weights)

    part.local_tokens = count_pairs
    with prefer_torch_reference():
        got = [layer(sample.x_TH, sample.logits) for _ in range(4)]
    layer.destroy()
    return max(relative_error(output, sample.expected_output()) for output in got), pair_counts


def test_pairs_of_one_token_are_distributed_over_copies(rank_pool: Pool) -> None:
    """The ranks take turns to compute two of the three pairs."""
    results = rank_pool(2).run(run_with_expert_copies)
    assert max(error for error, _ in results) < 1e-5
    first, second = (pair_counts for _, pair_counts in results)
    assert [a + b for a, b in zip(first, second, strict=True)] == [K] * 4
    assert sorted(first) == [1, 1, 2, 2]
    assert first[:2] == first[2:]


def collect_parallel_errors(rank: int, world: int, group: Any) -> list[str]:
    messages = []
    for fields in (
        {"ep": (1 - rank, 2), "ep_group": group},
        {"group": group},
        {"ep": (0, 3), "group": group},
    ):
        try:
            LayerParallel(**fields)
        except ConfigurationError as error:
            messages.append(str(error))
    return messages


def test_ranks_that_contradict_their_groups_are_refused(rank_pool: Pool) -> None:
    first, second = rank_pool(2).run(collect_parallel_errors)
    assert first[0] == "ep: got (1, 2), need (0, 2), this rank's position in ep_group"
    assert second[0] == "ep: got (0, 2), need (1, 2), this rank's position in ep_group"
    assert first[1:] == [
        "size of group: got 2, need 1, the number of EP ranks times the number of TP ranks",
        "size of group: got 2, need 3, the number of EP ranks times the number of TP ranks",
    ]


def test_a_rebalanced_layer_has_the_same_output() -> None:
    sample = Sample(tokens=40)
    routing = route(sample.logits, sample.router).routing
    load = [float(n) for n in count(routing.topk_ids_TK, E)]
    placement = rebalance(load, [4, 4])
    assert max(rank_loads(load, placement)) <= max(rank_loads(load, Placement.linear(E, 2)))
    total = torch.zeros(40, H, dtype=torch.float64)
    for rank in range(2):
        layer = make_layer(sample, (rank, 2), placement=placement)
        local_experts = list(placement.slots[rank])
        weights = sample.plain
        layer.set_weights(ExpertWeights(weights.w1[local_experts], weights.w2[local_experts]))
        total += layer(sample.x_TH, sample.logits).double()
    assert relative_error(total, sample.expected_output()) < 1e-5
    assert rank_weights(sample, (0, 2), (0, 1)).w1.shape[0] == 4
