"""Layers, weights and routers that are created in inference mode can be written outside of it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_layer_loading import load_as_engine, make_layer

import modular_kernel as mk
from modular_kernel.layers.parallel import LayerParallel
from modular_kernel.layers.router import Router
from modular_kernel.spec.router import RouterSpec
from modular_kernel.testing.checkpoints.samples import write

EACH_CHECKPOINT_KIND = pytest.mark.parametrize("kind", ["bf16", "deepseek fp8", "awq"])
ONE_RANK = LayerParallel()


@pytest.fixture
def folder(kind: str, tmp_path: Path) -> Path:
    write(tmp_path, "mixtral", kind)
    return tmp_path


@EACH_CHECKPOINT_KIND
@pytest.mark.parametrize("load_within", [False, True])
def test_layers_made_in_inference_mode_can_be_loaded_outside(
    kind: str, folder: Path, load_within: bool
) -> None:
    tensors, expected_layer = load_file(folder / "model.safetensors"), make_layer(kind, ONE_RANK)
    load_as_engine(expected_layer, tensors)
    state = expected_layer.state_dict()
    with torch.inference_mode():
        layer = make_layer(kind, ONE_RANK)
        if load_within:
            load_as_engine(layer, tensors)
    if not load_within:
        load_as_engine(layer, tensors)
    assert not any(tensor.is_inference() for tensor in layer.state_dict().values())
    for parameter in layer.parameters():
        parameter.zero_()
    layer.load_state_dict(state)
    assert all(torch.equal(t, state[name]) for name, t in layer.state_dict().items())


@EACH_CHECKPOINT_KIND
def test_weights_loaded_in_inference_mode_can_be_written_outside(kind: str, folder: Path) -> None:
    with torch.inference_mode():
        weights = mk.load_experts(folder, 0).weights
    for tensor in vars(weights).values():
        if tensor is not None:
            tensor.zero_()


def test_routers_made_in_inference_mode_can_be_loaded_outside() -> None:
    spec = RouterSpec(2, "sigmoid", selection_bias=True)
    with torch.inference_mode():
        router = Router(spec, 32, 4, bias=True)
    state = {name: torch.ones_like(tensor) for name, tensor in router.state_dict().items()}
    router.load_state_dict(state)
    assert all(bool((tensor == 1).all()) for tensor in router.state_dict().values())
