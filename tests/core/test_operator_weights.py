"""The operator `experts_forward` caches its weights between calls until a tensor changes."""

from collections.abc import Callable

import pytest
import torch
from replayed_parts import SMALL, AddExperts, Prepare, assert_output, make_inputs

from modular_kernel.errors import InputError
from modular_kernel.operators.experts import EXPERTS_FORWARD
from modular_kernel.operators.pairing import Pairing, serialize_layer
from modular_kernel.operators.weights_cache import WeightsCache
from modular_kernel.tensors import ExpertWeights, Routing


def write(w1: torch.Tensor) -> None:
    w1.add_(1)


def move(w1: torch.Tensor) -> None:
    w1.data = w1 + 1


def swap(w1: torch.Tensor) -> None:
    w1.set_((w1 + 1).untyped_storage(), 0, w1.shape, w1.stride())


@torch.no_grad()
@pytest.mark.parametrize("change", [write, move, swap], ids=lambda change: change.__name__)
def test_the_next_call_uses_a_changed_weight(
    change: Callable[[torch.Tensor], None],
) -> None:
    pairing = Pairing(Prepare, AddExperts)
    x_TH, weights, routing = make_inputs(tokens=4)
    strings = "w1,w2", serialize_layer(SMALL), str(pairing)

    def call(routing: Routing) -> torch.Tensor:
        ids_TK, weights_TK = routing.topk_ids_TK, routing.topk_weights_TK
        params = [weights.w1, weights.w2]
        output: torch.Tensor = EXPERTS_FORWARD(x_TH, ids_TK, weights_TK, params, *strings)
        return output

    for _ in range(3):
        assert_output(call(routing), (x_TH, weights, routing))
    change(weights.w1)
    for _ in range(3):
        assert_output(call(routing), (x_TH, weights, routing))
    (kernel,) = pairing.kernels.values()
    assert kernel.counters()["recorded_calls"] == 1
    assert kernel.counters()["replayed_calls"] == 5
    weights.w2.transpose_(1, 2)
    with pytest.raises(InputError, match="w2"):  # the same memory with another shape
        call(routing)


@pytest.mark.parametrize(
    "change",
    [lambda w: w[:1], lambda w: w.transpose(1, 2), lambda w: w.view(torch.int32), torch.clone],
    ids=["shape", "strides", "dtype", "memory"],
)
def test_an_entry_is_not_found_after_an_assignment_to_data(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """An assignment to `data` does not increment the tensor's version."""
    cache, w1 = WeightsCache(), torch.ones(2, 4, 4)
    weights = cache.add((w1,), "key", ExpertWeights(w1.detach(), w1.detach()))
    w1.data = w1.data
    assert cache.find((w1,), "key") is weights
    version = w1._version
    w1.data = change(w1.data)
    assert w1._version == version
    assert cache.find((w1,), "key") is None


def test_entries_are_found_for_the_same_tensors_only() -> None:
    cache = WeightsCache()
    w1, w2 = torch.ones(2, 4, 3), torch.ones(2, 3, 4)
    weights = cache.add((w1, w2), "key", ExpertWeights(w1.detach(), w2.detach()))
    assert cache.find((w1, w2), "key") is weights
    assert cache.find((w1, w2), "other key") is None
    assert cache.find((w1,), "key") is None
    assert cache.find((w1, w2, w2), "key") is None
    assert cache.find((w1, w2.view_as(w2)), "key") is None
    assert cache.find((w2, w1), "key") is None
    w2.view(-1)[0] = 3
    assert cache.find((w1, w2), "key") is None
    with torch.inference_mode():
        w3 = torch.ones(2, 4, 3)
        cache.add((w3,), "key", weights)
        assert cache.find((w3,), "key") is not None
    del w1, w3
    assert not cache._entries
