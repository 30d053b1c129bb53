"""Layers with prepared weights, which are repacked for a kernel: the prepared tensors live as long
as the parameters, and copies of a layer do not include them.
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
    layer, inputs = make_prepared_layer()
    layer.prepare_weights()
    assert layer.weights() is layer.weights()
    got = layer(inputs.x_TH, inputs.routing)
    assert launched == [64, 64]
    layer.set_weights(inputs.weights)
    assert layer.weights().w1_tiles is None
    unprepared_output = layer(inputs.x_TH, inputs.routing)
    assert len(launched) == 2
    assert float((got - unprepared_output).float().norm() / unprepared_output.float().norm()) < 0.01
    layer.prepare_weights()
    layer.get_parameter("w2_weight").data.view(-1)[0] += 1  # A write through .data is undetected.
    layer.get_parameter("w13_weight").view(-1)[0] += 1
    with pytest.raises(WeightsError, match="w1_tile"):
        layer(inputs.x_TH, inputs.routing)


@pytest.mark.parametrize("change", ["to", "set_weights", "assign", "prepare_weights"])
def test_a_layer_frees_prepared_weights_with_its_parameters(change: str) -> None:
    layer, inputs = make_prepared_layer()
    layer.prepare_weights()
    tiles = layer.weights().w1_tiles
    assert tiles is not None
    layer.to("cpu")
    assert layer.weights().w1_tiles is tiles  # The layer was on the CPU already.
    tiles_ref, tiles_during_prepare = weakref.ref(tiles), []
    del tiles
    if change == "to":
        layer.to("meta")
    elif change == "set_weights":
        layer.set_weights(inputs.weights)
    elif change == "assign":
        state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        layer.load_state_dict(state, assign=True)
    else:
        with pytest.MonkeyPatch.context() as patch:
            prepare = GroupedW4Path.prepare
            patch.setattr(
                GroupedW4Path,
                "prepare",
                lambda *a: (tiles_during_prepare.append(tiles_ref()), prepare(*a))[1],
            )
            layer.prepare_weights()
        assert tiles_during_prepare == [None]
    gc.collect()
    assert tiles_ref() is None


def test_a_compiled_layer_uses_prepared_weights(launched: list[int]) -> None:
    layer, inputs = make_prepared_layer()

    def call(x_TH: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return layer(x_TH, (weights, ids))

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    call_inputs = (inputs.x_TH, inputs.routing.topk_weights_TK, inputs.routing.topk_ids_TK)
    with torch.no_grad():
        unprepared_output = compiled(*call_inputs)
        assert not launched
        assert torch.equal(unprepared_output, call(*call_inputs))
        layer.prepare_weights()
        got = compiled(*call_inputs)
        assert launched == [64, 64]
        assert torch.equal(got, call(*call_inputs))
        layer.set_weights(inputs.weights)  # frees the prepared weights
        del launched[:]
        assert torch.equal(compiled(*call_inputs), unprepared_output)
        assert not launched


def test_copies_of_a_layer_have_no_prepared_weights() -> None:
    layer, _ = make_prepared_layer()
    unprepared_size = len(pickle.dumps(layer))
    layer.prepare_weights()
    tiles = layer.weights().w1_tiles
    assert tiles is not None
    pickled = pickle.dumps(layer)
    # The size of the other data varies slightly.
    assert len(pickled) < unprepared_size + tiles.nbytes // 2
    for duplicate in (pickle.loads(pickled), copy.deepcopy(layer)):
        assert duplicate.weights().w1_tiles is None


def test_a_layer_prepares_on_the_device_of_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are launched on the GPU of the weights, even if another GPU is current."""
    upstream_prepare, current_device, depths = GroupedW4Path.prepare, MagicMock(), list[int]()
    context = current_device.return_value

    def prepare(*call_inputs: Any) -> None:
        depths.append(context.__enter__.call_count - context.__exit__.call_count)
        upstream_prepare(*call_inputs)

    monkeypatch.setattr(fused_moe, "current_device", current_device)
    monkeypatch.setattr(GroupedW4Path, "prepare", prepare)
    make_prepared_layer()[0].prepare_weights()
    assert depths == [1]
    current_device.assert_called_once_with(CPU)
