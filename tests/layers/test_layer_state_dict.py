"""The state_dict of a layer loads into a new layer without repacking; batches of routing have the
shape of x.
"""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_layer_loading import E, H, I, K, layer_of
from torch import nn
from torch.nn.utils import parametrize

from modular_kernel.errors import ShapeError, StateError
from modular_kernel.layers.parallel import LayerParallel
from modular_kernel.layers.router import RouterSpec
from modular_kernel.quant.quantized_weights import quantize_weights
from modular_kernel.tensors import ExpertWeights
from modular_kernel.testing.checkpoints.samples import write

KINDS_OF_STATE = (
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
# Formats whose tensors on disk are what kernels take, so that a state alone does not say which.
ALIKE = ("compressed fp8 channel", "compressed int8")


@pytest.mark.parametrize("kind", KINDS_OF_STATE)
def test_the_state_of_a_ready_layer_makes_a_new_one_ready(kind, tmp_path) -> None:
    sample = write(tmp_path, "mixtral", kind, intermediate=I)
    x, weights, ids = sample.inputs(5)
    layer, fresh = layer_of(kind, LayerParallel()), layer_of(kind, LayerParallel())
    layer.load(tmp_path, 0)
    x_TH = x.to(layer.problem.dtype)
    want, outer = layer(x_TH, (weights, ids)), torch.nn.ModuleDict({"moe": fresh})
    state = torch.nn.ModuleDict({"moe": layer}).state_dict()
    outer.load_state_dict(state)
    assert torch.equal(fresh(x_TH, (weights, ids)), want)
    for name, tensor in state.items():
        assert tensor.data_ptr() != outer.state_dict()[name].data_ptr()
    if kind not in ALIKE:  # without what torch keeps beside tensors
        again = layer_of(kind, LayerParallel())
        again.load_state_dict({name: t.clone() for name, t in layer.state_dict().items()})
        assert torch.equal(again(x_TH, (weights, ids)), want)


@pytest.mark.parametrize("theirs", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scales_in_another_dtype_keep_their_values(
    own: torch.dtype, theirs: torch.dtype, tmp_path
) -> None:
    write(tmp_path, "mixtral", "gptq", intermediate=I)
    given, layer = layer_of("gptq", LayerParallel()), layer_of("gptq", LayerParallel())
    for each, dtype in ((given, theirs), (layer, own)):
        each.load(tmp_path, 0)
        weights = each.weights()
        scales = {name: getattr(weights, name).to(dtype) for name in ("w1_scale", "w2_scale")}
        each.set_weights(replace(weights, **scales))
    if theirs is not torch.float16:
        given.w2_weight_scale.data[0, 0, 0] = 2.0**20  # more than float16 has
    given.w2_weight_scale.data[0, 0, 1] = 1 + 2.0**-9
    layer.load_state_dict(given.state_dict())
    for name in ("w13_weight_scale", "w2_weight_scale"):
        assert torch.equal(getattr(layer, name).float(), getattr(given, name).float())
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict(given.state_dict() | {"w2_weight_scale": torch.ones(1).half()})
    assert torch.equal(layer.w2_weight_scale.float(), given.w2_weight_scale.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scales_of_a_new_layer_get_the_dtype_in_the_state(dtype: torch.dtype) -> None:
    """Kernels for 4-bit integers are faster with 16-bit scales than with float32 scales."""
    names = ("w13_weight_scale", "w2_weight_scale")
    options = {"quant_config": "int4_w4a16_group:group=16"}
    layers = [layer_of("gptq", LayerParallel(), **options) for _ in range(3)]
    given, fresh, loaded = layers
    for layer, scale_dtype in ((given, dtype), (loaded, torch.float32)):
        problem, generator = layer.problem, torch.Generator().manual_seed(0)
        plain = ExpertWeights(
            torch.randn(E, problem.w1_rows, H, generator=generator),
            torch.randn(E, H, I, generator=generator),
        )
        layer.set_weights(quantize_weights(plain, problem, scale_dtype=scale_dtype))
    pointers = [getattr(loaded, name).data_ptr() for name in names]
    for layer in (fresh, loaded):
        layer.load_state_dict(given.state_dict())
        for name in names:
            assert torch.equal(getattr(layer, name).float(), getattr(given, name).float())
    assert [getattr(fresh, name).dtype for name in names] == [dtype, dtype]
    # Captured graphs read the parameters of a loaded layer, so they are written in place.
    assert [getattr(loaded, name).data_ptr() for name in names] == pointers


def test_scales_stay_unloaded_if_loading_fails() -> None:
    layer = layer_of("gptq", LayerParallel(), quant_config="int4_w4a16_group:group=16")
    scale = torch.empty_like(layer.w13_weight_scale, dtype=torch.bfloat16, device="meta")
    with pytest.raises(RuntimeError, match="Cannot copy out of meta tensor"):
        layer.load_state_dict({"w13_weight_scale": scale}, strict=False)
    assert bool(layer.w13_weight_scale.isnan()[:, [0, -1], [0, -1]].all())


@pytest.mark.parametrize("kind", ["awq", *ALIKE])
def test_an_incomplete_state_does_not_make_a_layer_ready(kind) -> None:
    raw, fresh = layer_of(kind, LayerParallel()), layer_of(kind, LayerParallel())
    fresh.load_state_dict(raw.state_dict())
    with pytest.raises(StateError, match="in the checkpoint's layout"):
        fresh(torch.zeros(2, H, dtype=torch.bfloat16), (torch.ones(2, K), torch.zeros(2, K).int()))


def test_batches_of_routing_have_the_shape_of_x() -> None:
    layer = layer_of("fp32", LayerParallel())
    for parameter in layer.parameters():
        parameter.data.fill_(0.5)
    x, ids = torch.randn(5, 1, H), torch.randint(E, (5, 1, K), dtype=torch.int32)
    weights = torch.rand(5, 1, K)
    want = layer(x, (weights, ids))
    assert torch.equal(layer(x, (weights.view(5, K), ids.view(5, K))), want)
    need = r"got \(1, 5, 2\), need \(5, 1, K\) as x, or \(T, K\)"
    with pytest.raises(ShapeError, match=need):
        layer(x, (weights.view(1, 5, K), ids.view(1, 5, K)))
    routed = layer_of("fp32", LayerParallel(), top_k=None, router=RouterSpec(K))
    with pytest.raises(ShapeError, match=r"router logits: got \(1, 5, 4\), need \(5, 1, E\)"):
        routed(x, torch.randn(1, 5, E))


class Interrupted(BaseException):
    """Not an Exception, as KeyboardInterrupt."""


@pytest.mark.parametrize("kind", ["fp32", "awq"])
def test_an_interrupted_set_weights_leaves_the_former_weights_or_the_others(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "mixtral", kind, intermediate=I)
    layer, others = layer_of(kind, LayerParallel()), layer_of(kind, LayerParallel())
    for each in (layer, others):
        each.load(tmp_path, 0)
    former = dict(layer.named_parameters())
    original = nn.Parameter.__new__
    remaining = 0  # until the one that is interrupted

    def make(*arguments: object, **options: object) -> nn.Parameter:
        nonlocal remaining
        remaining -= 1
        if remaining == 0:
            raise Interrupted
        return original(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(nn.Parameter, "__new__", make)
    for count in range(1, len(former) + 1):
        remaining = count
        with pytest.raises(Interrupted):
            layer.set_weights(others.weights())
        now = dict(layer.named_parameters())
        assert now.keys() == former.keys()
        assert all(now[name] is former[name] for name in former)
    layer.set_weights(others.weights())
    assert all(layer.get_parameter(name) is not former[name] for name in former)


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2


def test_a_parametrized_layer_is_computed_and_copied(tmp_path: Path) -> None:
    sample = write(tmp_path, "mixtral", "fp32", intermediate=I)
    layer = layer_of("fp32", LayerParallel())
    layer.load(tmp_path, 0)
    x, weights, ids = sample.inputs(5)
    x_TH = x.float()
    want = layer(x_TH, (weights, ids)) * 2  # which also makes its kernels
    parametrize.register_parametrization(layer, "w2_weight", Doubled())
    for each in (layer, copy.deepcopy(layer)):
        torch.testing.assert_close(each(x_TH, (weights, ids)), want)


@pytest.mark.parametrize("value", [None, 3, "gone"])
def test_a_layer_without_a_parameter_refuses_a_call(value: object, tmp_path: Path) -> None:
    sample = write(tmp_path, "mixtral", "fp32", intermediate=I)
    layer = layer_of("fp32", LayerParallel())
    layer.load(tmp_path, 0)
    x, weights, ids = sample.inputs(5)
    del layer.w2_weight
    if value != "gone":
        layer.w2_weight = value
    with pytest.raises(StateError, match=r"^w2_weight: got (None|int), need a parameter"):
        layer(x.float(), (weights, ids))
