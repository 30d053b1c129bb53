"""State dicts of FusedMoE layers, interrupted loading, and the batch shape of a routing."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_layer_loading import E, H, I, K, make_layer
from torch import nn
from torch.nn.utils import parametrize

from modular_kernel.errors import ShapeError, StateError
from modular_kernel.layers.parallel import LayerParallel
from modular_kernel.layers.router import RouterSpec
from modular_kernel.quant.quantized_weights import quantize_weights
from modular_kernel.tensors import ExpertWeights
from modular_kernel.testing.checkpoints.samples import write

CHECKPOINT_KINDS = (
    "fp32",
    "awq",
    "gptq",
    "compressed int4",
    "compressed mxfp4",
    "mxfp4",
    "deepseek fp8",
    "compressed fp8 channel",
    "compressed int8",
    "fp8 tensor, static",
)
# Formats whose checkpoint tensors have the layout of the kernels. The tensors alone do not show
# whether a layer is ready.
SAME_LAYOUT_ON_DISK = ("compressed fp8 channel", "compressed int8")


@pytest.mark.parametrize("kind", CHECKPOINT_KINDS)
def test_loading_the_state_of_a_ready_layer_makes_a_new_layer_ready(kind, tmp_path) -> None:
    sample = write(tmp_path, "mixtral", kind, intermediate=I)
    x, weights, ids = sample.inputs(5)
    layer, new_layer = make_layer(kind, LayerParallel()), make_layer(kind, LayerParallel())
    layer.load(tmp_path, 0)
    x_TH = x.to(layer.problem.dtype)
    expected, new_model = layer(x_TH, (weights, ids)), torch.nn.ModuleDict({"moe": new_layer})
    state = torch.nn.ModuleDict({"moe": layer}).state_dict()
    new_model.load_state_dict(state)
    assert torch.equal(new_layer(x_TH, (weights, ids)), expected)
    for name, tensor in state.items():
        assert tensor.data_ptr() != new_model.state_dict()[name].data_ptr()
    # Copies of the tensors lack the metadata of the state dict.
    if kind not in SAME_LAYOUT_ON_DISK:
        copied_layer = make_layer(kind, LayerParallel())
        copied_layer.load_state_dict({name: t.clone() for name, t in layer.state_dict().items()})
        assert torch.equal(copied_layer(x_TH, (weights, ids)), expected)


@pytest.mark.parametrize("source_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scales_in_another_dtype_keep_their_values(
    target_dtype: torch.dtype, source_dtype: torch.dtype, tmp_path
) -> None:
    write(tmp_path, "mixtral", "gptq", intermediate=I)
    source, layer = make_layer("gptq", LayerParallel()), make_layer("gptq", LayerParallel())
    for loaded, dtype in ((source, source_dtype), (layer, target_dtype)):
        loaded.load(tmp_path, 0)
        weights = loaded.weights()
        scales = {name: getattr(weights, name).to(dtype) for name in ("w1_scale", "w2_scale")}
        loaded.set_weights(replace(weights, **scales))
    if source_dtype is not torch.float16:
        source.w2_weight_scale.data[0, 0, 0] = 2.0**20  # beyond the range of float16
    source.w2_weight_scale.data[0, 0, 1] = 1 + 2.0**-9
    layer.load_state_dict(source.state_dict())
    for name in ("w13_weight_scale", "w2_weight_scale"):
        assert torch.equal(getattr(layer, name).float(), getattr(source, name).float())
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict(source.state_dict() | {"w2_weight_scale": torch.ones(1).half()})
    assert torch.equal(layer.w2_weight_scale.float(), source.w2_weight_scale.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scales_of_a_new_layer_get_the_dtype_of_the_state(dtype: torch.dtype) -> None:
    """Kernels for 4-bit integers are faster with 16-bit scales than with float32 scales."""
    names = ("w13_weight_scale", "w2_weight_scale")
    options = {"quant_config": "int4_w4a16_group:group=16"}
    layers = [make_layer("gptq", LayerParallel(), **options) for _ in range(3)]
    source, new_layer, loaded = layers
    for layer, scale_dtype in ((source, dtype), (loaded, torch.float32)):
        problem, generator = layer.problem, torch.Generator().manual_seed(0)
        unquantized_weights = ExpertWeights(
            torch.randn(E, problem.w1_rows, H, generator=generator),
            torch.randn(E, H, I, generator=generator),
        )
        layer.set_weights(quantize_weights(unquantized_weights, problem, scale_dtype=scale_dtype))
    pointers = [getattr(loaded, name).data_ptr() for name in names]
    for layer in (new_layer, loaded):
        layer.load_state_dict(source.state_dict())
        for name in names:
            assert torch.equal(getattr(layer, name).float(), getattr(source, name).float())
    assert [getattr(new_layer, name).dtype for name in names] == [dtype, dtype]
    # Captured graphs read the parameters of a loaded layer, so loading must write them in place.
    assert [getattr(loaded, name).data_ptr() for name in names] == pointers


def test_scales_stay_unloaded_if_loading_fails() -> None:
    layer = make_layer("gptq", LayerParallel(), quant_config="int4_w4a16_group:group=16")
    scale = torch.empty_like(layer.w13_weight_scale, dtype=torch.bfloat16, device="meta")
    with pytest.raises(RuntimeError, match="Cannot copy out of meta tensor"):
        layer.load_state_dict({"w13_weight_scale": scale}, strict=False)
    assert bool(layer.w13_weight_scale.isnan()[:, [0, -1], [0, -1]].all())


@pytest.mark.parametrize("kind", ["awq", *SAME_LAYOUT_ON_DISK])
def test_an_incomplete_state_does_not_make_a_layer_ready(kind) -> None:
    unprocessed, new_layer = make_layer(kind, LayerParallel()), make_layer(kind, LayerParallel())
    new_layer.load_state_dict(unprocessed.state_dict())
    with pytest.raises(StateError, match="in the checkpoint's layout"):
        new_layer(
            torch.zeros(2, H, dtype=torch.bfloat16), (torch.ones(2, K), torch.zeros(2, K).int())
        )


def test_routing_must_have_the_batch_shape_of_x() -> None:
    layer = make_layer("fp32", LayerParallel())
    for parameter in layer.parameters():
        parameter.data.fill_(0.5)
    x, ids = torch.randn(5, 1, H), torch.randint(E, (5, 1, K), dtype=torch.int32)
    weights = torch.rand(5, 1, K)
    expected = layer(x, (weights, ids))
    assert torch.equal(layer(x, (weights.view(5, K), ids.view(5, K))), expected)
    need = r"got \(1, 5, 2\), need \(5, 1, K\) like x, or \(T, K\)"
    with pytest.raises(ShapeError, match=need):
        layer(x, (weights.view(1, 5, K), ids.view(1, 5, K)))
    layer_with_router = make_layer("fp32", LayerParallel(), top_k=None, router=RouterSpec(K))
    with pytest.raises(ShapeError, match=r"router logits: got \(1, 5, 4\), need \(5, 1, E\)"):
        layer_with_router(x, torch.randn(1, 5, E))


class Interrupted(BaseException):
    """An interrupt like KeyboardInterrupt, which `except Exception` does not catch."""


@pytest.mark.parametrize("kind", ["fp32", "awq"])
def test_an_interrupted_set_weights_keeps_all_previous_weights(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "mixtral", kind, intermediate=I)
    layer, source = make_layer(kind, LayerParallel()), make_layer(kind, LayerParallel())
    for loaded in (layer, source):
        loaded.load(tmp_path, 0)
    previous = dict(layer.named_parameters())
    create_parameter = nn.Parameter.__new__
    remaining = 0  # parameters to create until the interrupt

    def interrupt_last(*arguments: object, **options: object) -> nn.Parameter:
        nonlocal remaining
        remaining -= 1
        if remaining == 0:
            raise Interrupted
        return create_parameter(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(nn.Parameter, "__new__", interrupt_last)
    for count in range(1, len(previous) + 1):
        remaining = count
        with pytest.raises(Interrupted):
            layer.set_weights(source.weights())
        current = dict(layer.named_parameters())
        assert current.keys() == previous.keys()
        assert all(current[name] is previous[name] for name in previous)
    layer.set_weights(source.weights())
    assert all(layer.get_parameter(name) is not previous[name] for name in previous)


class DoublingParametrization(nn.Module):
    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2


def test_parametrized_layers_can_be_called_and_copied(tmp_path: Path) -> None:
    sample = write(tmp_path, "mixtral", "fp32", intermediate=I)
    layer = make_layer("fp32", LayerParallel())
    layer.load(tmp_path, 0)
    x, weights, ids = sample.inputs(5)
    x_TH = x.float()
    expected = layer(x_TH, (weights, ids)) * 2  # also creates the kernels
    parametrize.register_parametrization(layer, "w2_weight", DoublingParametrization())
    for module in (layer, copy.deepcopy(layer)):
        torch.testing.assert_close(module(x_TH, (weights, ids)), expected)


@pytest.mark.parametrize("value", [None, 3, "gone"])
def test_a_layer_without_a_parameter_refuses_a_call(value: object, tmp_path: Path) -> None:
    sample = write(tmp_path, "mixtral", "fp32", intermediate=I)
    layer = make_layer("fp32", LayerParallel())
    layer.load(tmp_path, 0)
    x, weights, ids = sample.inputs(5)
    del layer.w2_weight
    if value != "gone":
        layer.w2_weight = value
    with pytest.raises(StateError, match=r"^w2_weight: got (None|int), need a parameter"):
        layer(x.float(), (weights, ids))
