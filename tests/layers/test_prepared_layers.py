"""Layers that prepare their weights: the prepared tensors live as long as the parameters, and are
not copied.
"""

import copy
import gc
import pickle
import weakref
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from prepared_weights_samples import CPU, NO_GPU, make_launched_fixture, make_prepared_layer

from experts.triton.grouped_w4.grouped_w4_path import GroupedW4Path
from modular_kernel.errors import WeightsError
from modular_kernel.layers import fused_moe

pytestmark = NO_GPU
launched = make_launched_fixture()


def test_a_layer_keeps_prepared_weights_until_its_parameters_are_replaced(
    launched: list[int],
) -> None:
    layer, i = make_prepared_layer()
    layer.prepare_weights()
    assert layer.weights() is layer.weights()
    got = layer(i.x_TH, i.routing)
    assert launched == [64, 64]
    layer.set_weights(i.weights)
    assert layer.weights().w1_tiles is None
    plain = layer(i.x_TH, i.routing)
    assert len(launched) == 2
    assert float((got - plain).float().norm() / plain.float().norm()) < 0.01
    layer.prepare_weights()
    layer.get_parameter("w2_weight").data.view(-1)[0] += 1  # unseen by torch, so by us
    layer.get_parameter("w13_weight").view(-1)[0] += 1
    with pytest.raises(WeightsError, match="w1_tile"):
        layer(i.x_TH, i.routing)


@pytest.mark.parametrize("moved", ["to", "set_weights", "assign", "prepare_weights"])
def test_a_layer_frees_prepared_weights_with_its_parameters(moved: str) -> None:
    layer, i = make_prepared_layer()
    layer.prepare_weights()
    tiles = layer.weights().w1_tiles
    assert tiles is not None
    layer.to("cpu")
    assert layer.weights().w1_tiles is tiles  # nothing moved
    gone, alive = weakref.ref(tiles), []
    del tiles
    if moved == "to":
        layer.to("meta")
    elif moved == "set_weights":
        layer.set_weights(i.weights)
    elif moved == "assign":
        state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        layer.load_state_dict(state, assign=True)
    else:
        with pytest.MonkeyPatch.context() as patch:
            right = GroupedW4Path.prepare
            patch.setattr(GroupedW4Path, "prepare", lambda *a: (alive.append(gone()), right(*a))[1])
            layer.prepare_weights()
        assert alive == [None]
    gc.collect()
    assert gone() is None


def test_a_compiled_layer_uses_prepared_weights(launched: list[int]) -> None:
    layer, i = make_prepared_layer()

    def call(x_TH: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return layer(x_TH, (weights, ids))

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    given = (i.x_TH, i.routing.topk_weights_TK, i.routing.topk_ids_TK)
    with torch.no_grad():
        plain = compiled(*given)
        assert not launched
        assert torch.equal(plain, call(*given))
        layer.prepare_weights()
        got = compiled(*given)
        assert launched == [64, 64]
        assert torch.equal(got, call(*given))
        layer.set_weights(i.weights)  # lets them go
        del launched[:]
        assert torch.equal(compiled(*given), plain)
        assert not launched


def test_a_copy_of_a_layer_has_no_prepared_weights() -> None:
    layer, _ = make_prepared_layer()
    size = len(pickle.dumps(layer))
    layer.prepare_weights()
    assert len(pickle.dumps(layer)) == size
    assert copy.deepcopy(layer).weights().w1_tiles is None


def test_a_layer_prepares_on_the_device_of_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are launched on the GPU of the weights, even if another one is current."""
    right, current, inside = GroupedW4Path.prepare, MagicMock(), list[int]()
    manager = current.return_value

    def prepare(*given: Any) -> None:
        inside.append(manager.__enter__.call_count - manager.__exit__.call_count)
        right(*given)

    monkeypatch.setattr(fused_moe, "current_device", current)
    monkeypatch.setattr(GroupedW4Path, "prepare", prepare)
    make_prepared_layer()[0].prepare_weights()
    assert inside == [1]
    current.assert_called_once_with(CPU)
