"""Children forked by a rank: parts over ranks refuse to run there, and the ranks stay usable."""

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ep_layers import ALL2ALL, BATCHED, GATHERED, REPLICATED, Layer
from forked_child import run_in_child
from rank_fixtures import make_ranks_fixture

from modular_kernel.errors import StateError
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.parallel import LayerParallel
from modular_kernel.testing.ranks.pool import RankPool

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork"),
]
HOSTS = "HostThenRankPrepareAndFinalize"
SYMMETRIC = "SymmMemPrepareAndFinalize"
PARTS = [
    (REPLICATED, "TorchExperts"),
    (GATHERED, "TorchExperts"),
    (ALL2ALL, "TorchExperts"),
    (BATCHED, "NaiveBatchedExperts"),
    (HOSTS, "TorchExperts"),
    (SYMMETRIC, "TorchExperts"),
]

pair = make_ranks_fixture(2)


def raised(function: Callable[[], Any]) -> str:
    """Return the type and message of the raised error."""
    try:
        function()
    except Exception as error:  # noqa: BLE001  its type is what is asked
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(("part", "experts"), PARTS)
def test_a_part_over_ranks_runs_only_in_its_own_process(
    pair: RankPool, part: str, experts: str
) -> None:
    layer = Layer(part, (3, 3), experts_part=experts)
    for told, same in pair.run(in_and_out, layer):
        for name, words in told.items():
            assert words.startswith(StateError.__name__), (name, words)
            assert "forked child" in words, (name, words)
        assert same


def in_and_out(rank: int, world: int, group: object, layer: Layer) -> tuple[dict[str, str], bool]:
    given = layer.inputs_of(rank)
    arguments = given.x_TH, given.weights, given.routing
    held: list[Any] = [layer.kernel(rank, group)]  # by nobody else, so that the child frees it
    held.append(held[0].plan())
    want = held[0](*arguments).clone()

    def child() -> dict[str, str]:
        told = {
            "kernel": raised(lambda: held[0](*arguments)),
            "plan": raised(lambda: held[1](*arguments)),
            "destroy": raised(lambda: held[0].prepare_finalize.destroy()),
        }
        # What the caller did wrong would otherwise be told to other ranks.
        raised(lambda: held[0](given.x_TH[:, :-1], given.weights, given.routing))
        freed = weakref.ref(held[0])
        held.clear()
        gc.collect()  # no thread of the parent's group is waited for
        assert freed() is None
        return told

    told = run_in_child(child)
    same = all(torch.equal(call(*arguments), want) for call in held)
    if layer.part == SYMMETRIC:  # its destroy is this rank's affair alone
        told.pop("destroy")
    held[0].prepare_finalize.destroy()
    return told, same


def test_a_layer_that_sums_over_ranks_runs_only_in_its_own_process(pair: RankPool) -> None:
    for words, same in pair.run(summed, None):
        assert words.startswith(StateError.__name__), words
        assert same


def summed(rank: int, world: int, group: object, _: None) -> tuple[str, bool]:
    parallel = LayerParallel(tp_group=group)
    layer = FusedMoE(
        4, 32, 64, top_k=2, params_dtype=torch.float32, parallel=parallel, reduce_results=True
    )
    for parameter in layer.parameters():
        parameter.data.fill_(0.1)
    x_TH = torch.ones(3, 32)
    routing = (torch.ones(3, 2), torch.tensor([[0, 1]] * 3, dtype=torch.int32))
    want = layer(x_TH, routing)
    words = run_in_child(lambda: raised(lambda: layer(x_TH, routing)))
    return words, torch.equal(layer(x_TH, routing), want)
