"""Kernels of several ranks in forked children of a rank.

In the child, every call raises StateError. In the parent, kernels and plans keep working.
"""

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


def describe_error(function: Callable[[], Any]) -> str:
    """Return the type and message of the raised error."""
    try:
        function()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(("part", "experts"), PARTS)
def test_kernel_over_ranks_runs_only_in_its_own_process(
    pair: RankPool, part: str, experts: str
) -> None:
    layer = Layer(part, (3, 3), experts_part=experts)
    for messages, is_unchanged in pair.run(call_in_child_and_parent, layer):
        for name, message in messages.items():
            assert message.startswith(StateError.__name__), (name, message)
            assert "forked child" in message, (name, message)
        assert is_unchanged


def call_in_child_and_parent(
    rank: int, world: int, group: object, layer: Layer
) -> tuple[dict[str, str], bool]:
    inputs = layer.inputs_of(rank)
    arguments = inputs.x_TH, inputs.weights, inputs.routing
    # This list has the only references, so that the child can free the kernel.
    kernel_and_plan: list[Any] = [layer.kernel(rank, group)]
    kernel_and_plan.append(kernel_and_plan[0].plan())
    expected = kernel_and_plan[0](*arguments).clone()

    def call_and_free() -> dict[str, str]:
        messages = {
            "kernel": describe_error(lambda: kernel_and_plan[0](*arguments)),
            "plan": describe_error(lambda: kernel_and_plan[1](*arguments)),
            "destroy": describe_error(lambda: kernel_and_plan[0].prepare_finalize.destroy()),
        }
        # An invalid call must not be reported to other ranks by a forked child.
        describe_error(
            lambda: kernel_and_plan[0](inputs.x_TH[:, :-1], inputs.weights, inputs.routing)
        )
        kernel_ref = weakref.ref(kernel_and_plan[0])
        kernel_and_plan.clear()
        gc.collect()  # This must not wait for threads of the parent.
        assert kernel_ref() is None
        return messages

    messages = run_in_child(call_and_free)
    is_unchanged = all(torch.equal(call(*arguments), expected) for call in kernel_and_plan)
    if layer.part == SYMMETRIC:  # Its `destroy` needs no other rank.
        messages.pop("destroy")
    kernel_and_plan[0].prepare_finalize.destroy()
    return messages, is_unchanged


def test_layer_that_sums_over_ranks_runs_only_in_its_own_process(pair: RankPool) -> None:
    for message, is_unchanged in pair.run(call_layer_in_child_and_parent, None):
        assert message.startswith(StateError.__name__), message
        assert is_unchanged


def call_layer_in_child_and_parent(
    rank: int, world: int, group: object, _: None
) -> tuple[str, bool]:
    parallel = LayerParallel(tp_group=group)
    layer = FusedMoE(
        4, 32, 64, top_k=2, params_dtype=torch.float32, parallel=parallel, reduce_results=True
    )
    for parameter in layer.parameters():
        parameter.data.fill_(0.1)
    x_TH = torch.ones(3, 32)
    routing = (torch.ones(3, 2), torch.tensor([[0, 1]] * 3, dtype=torch.int32))
    expected = layer(x_TH, routing)
    message = run_in_child(lambda: describe_error(lambda: layer(x_TH, routing)))
    return message, torch.equal(layer(x_TH, routing), expected)
