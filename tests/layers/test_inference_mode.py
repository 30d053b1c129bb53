"""Tensors created in inference mode that outlive it are normal tensors, which can be written
outside.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_layer_loading import engine_loads, layer_of

import modular_kernel as mk
from modular_kernel.layers.parallel import LayerParallel
from modular_kernel.layers.router import Router
from modular_kernel.spec.router import RouterSpec
from modular_kernel.testing.checkpoints.samples import write

CHECKPOINTS = pytest.mark.parametrize("kind", ["bf16", "deepseek fp8", "awq"])
ALONE = LayerParallel()


@pytest.fixture
def folder(kind: str, tmp_path: Path) -> Path:
    write(tmp_path, "mixtral", kind)
    return tmp_path


@CHECKPOINTS
@pytest.mark.parametrize("all_within", [False, True])
def test_a_layer_made_in_inference_mode_is_loaded_outside(
    kind: str, folder: Path, all_within: bool
) -> None:
    tensors, other = load_file(folder / "model.safetensors"), layer_of(kind, ALONE)
    engine_loads(other, tensors)
    state = other.state_dict()
    with torch.inference_mode():
        layer = layer_of(kind, ALONE)
        if all_within:
            engine_loads(layer, tensors)
    if not all_within:
        engine_loads(layer, tensors)
    assert not any(tensor.is_inference() for tensor in layer.state_dict().values())
    for parameter in layer.parameters():
        parameter.zero_()
    layer.load_state_dict(state)
    assert all(torch.equal(t, state[name]) for name, t in layer.state_dict().items())


@CHECKPOINTS
def test_weights_used_in_inference_mode_are_written_outside(kind: str, folder: Path) -> None:
    with torch.inference_mode():
        weights = mk.load_experts(folder, 0).weights
    for tensor in vars(weights).values():
        if tensor is not None:
            tensor.zero_()


def test_a_router_made_in_inference_mode_is_loaded_outside() -> None:
    spec = RouterSpec(2, "sigmoid", selection_bias=True)
    with torch.inference_mode():
        router = Router(spec, 32, 4, bias=True)
    state = {name: torch.ones_like(tensor) for name, tensor in router.state_dict().items()}
    router.load_state_dict(state)
    assert all(bool((tensor == 1).all()) for tensor in router.state_dict().values())
