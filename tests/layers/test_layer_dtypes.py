"""Moving, casting, copying and saving a layer keeps its results up to rounding, or is refused."""

import pickle
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_layers import FAMILIES, E, H, I, K, Sample, make_layer, rank_weights, relative_error
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from modular_kernel.errors import (
    DtypeError,
    LayoutError,
    StateError,
    UnsupportedError,
)
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.parallel import LayerParallel
from modular_kernel.layers.parameters import PARAMETERS
from modular_kernel.layers.router import Router, RouterSpec
from modular_kernel.tensors import ExpertWeights

CASTS: dict[str, tuple[Callable[[torch.nn.Module], object], torch.dtype]] = {
    "half": (lambda layer: layer.half(), torch.float16),
    "bfloat16": (lambda layer: layer.bfloat16(), torch.bfloat16),
    "float": (lambda layer: layer.float(), torch.float32),
    "to": (lambda layer: layer.to(torch.bfloat16), torch.bfloat16),
    "to both": (lambda layer: layer.to("cpu", torch.float16), torch.float16),
    "parent module's to": (
        lambda layer: torch.nn.ModuleList([layer]).to(torch.float16),
        torch.float16,
    ),
}
QUANT_SCHEMES = (
    "int4_w4a16_group:group=8,zero_points=true",
    "int8_w8a16_channel",
    "fp8_w8a8_block:block=8x8",
    "fp8_w8a8_channel",
    "fp8_w8a16_channel",
    "mxfp4_w4a16",
    "nvfp4_w4a16",
)
# Bounds of the relative error of an unquantized layer whose tensors are rounded to the dtype.
MAX_CAST_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def copy_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8).clone()


# -------------------------------------------------------------------------------- moves and casts


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("bias", [False, True])
def test_an_unquantized_layer_computes_in_the_dtype_that_it_was_cast_to(
    cast: str, bias: bool
) -> None:
    sample = Sample(FAMILIES["biased"], fields={"bias": bias})
    layer, (apply, dtype) = make_layer(sample), CASTS[cast]
    before = layer(sample.x_TH, sample.logits)
    selection_bias_before = layer.selection_bias.clone()
    apply(layer)
    assert layer.problem.dtype is dtype
    assert {p.dtype for p in layer.parameters()} == {dtype}
    assert layer.selection_bias.dtype is torch.float32  # a rounded bias could select other experts
    assert torch.equal(layer.selection_bias, selection_bias_before)
    got = layer(sample.x_TH.to(dtype), sample.logits)
    assert got.dtype is dtype
    assert relative_error(got, before.double()) < MAX_CAST_ERROR[dtype]
    if dtype is not torch.float32:
        with pytest.raises(DtypeError, match=f"x: got float32, need {dtype}".replace("torch.", "")):
            layer(sample.x_TH, sample.logits)


@pytest.mark.parametrize("cast", ["half", "bfloat16", "float"])
@pytest.mark.parametrize("quant", QUANT_SCHEMES)
@pytest.mark.parametrize("initial", [torch.bfloat16, torch.float32], ids=str)
def test_quantized_tensors_are_not_cast(quant: str, cast: str, initial: torch.dtype) -> None:
    sample = Sample(fields={"quant": quant, "dtype": initial, "bias": True})
    layer, (apply, dtype) = make_layer(sample), CASTS[cast]
    before = {name: (p.dtype, copy_bytes(p)) for name, p in layer.named_parameters()}
    expected = layer(sample.x_TH, sample.logits)
    apply(layer)
    for name, parameter in layer.named_parameters():
        if name.endswith("_bias"):
            assert parameter.dtype is dtype
        elif parameter.dtype is before[name][0]:
            assert torch.equal(copy_bytes(parameter), before[name][1])
        else:  # Layers of the new dtype do not support the scale's dtype, so scales become float32.
            assert name.endswith("_scale")
            assert parameter.dtype is torch.float32
            old_scale = before[name][1].view(before[name][0]).float()
            assert torch.equal(parameter.flatten(), old_scale.flatten())
    assert layer.problem.dtype is dtype
    got = layer(sample.x_TH.to(dtype), sample.logits)
    assert relative_error(got, expected.double()) < 0.1
    cast_sample = replace(sample, fields=sample.fields | {"dtype": dtype})
    new_layer = make_unloaded_layer(cast_sample)
    new_layer.set_weights(layer.weights())  # accepts the weights that the cast converted
    x_TH = cast_sample.x_TH
    assert torch.equal(new_layer(x_TH, sample.logits), layer(x_TH, sample.logits))


def test_casts_keep_dtypes_of_parameters_in_the_checkpoint_layout() -> None:
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [8, 8]}
    layer = FusedMoE(E, H, I, top_k=K, quant_config=config, params_dtype=torch.float32, bias=True)
    before = {name: p.dtype for name, p in layer.named_parameters()}
    layer.half()
    after = {name: p.dtype for name, p in layer.named_parameters()}
    assert after == {n: torch.float16 if n.endswith("_bias") else d for n, d in before.items()}
    assert layer.problem.dtype is torch.float16


def test_unsupported_dtypes_are_refused_before_anything_changes() -> None:
    for quant in (None, "int8_w8a16_channel"):
        sample = Sample(fields={} if quant is None else {"quant": quant})
        layer = make_layer(sample)
        before = {name: p.dtype for name, p in layer.named_parameters()}
        with pytest.raises(DtypeError, match="cast of a layer: got float64, need float32 or"):
            layer.double()
        with pytest.raises(DtypeError, match="cast of a layer: got float64, need float32 or"):
            layer.to(torch.float64)
        assert {name: p.dtype for name, p in layer.named_parameters()} == before
        assert layer.problem.dtype is torch.float32
        layer(sample.x_TH, sample.logits)


def test_casting_a_layer_with_an_exchange_is_refused() -> None:
    layer = make_layer(Sample())
    layer._exchange_kernel = object()
    with pytest.raises(
        UnsupportedError,
        match="got float16 for a layer that exchanges tokens between ranks, need float32",
    ):
        layer.half()
    assert layer.w2_weight.dtype is torch.float32


def test_the_selection_bias_of_a_router_is_not_cast() -> None:
    router = Router(RouterSpec(K, selection_bias=True), H, E)
    router.half()
    assert router.weight.dtype is torch.float16
    assert router.e_score_correction_bias.dtype is torch.float32


def test_moved_parameters_keep_their_weight_loader() -> None:
    layer = FusedMoE(E, H, I, top_k=K)
    moves: tuple[Callable[[], torch.nn.Module], ...] = (
        layer.half,
        lambda: layer.to("meta"),
        lambda: layer.to_empty(device="cpu"),
    )
    for move in moves:
        assert all(p.weight_loader == layer.weight_loader for p in move().parameters())


# -------------------------------------------------------------------------------------- unloaded


def make_unloaded_layer(sample: Sample, **options: Any) -> FusedMoE:
    problem = sample.problem
    return FusedMoE(
        E, H, I, params_dtype=problem.dtype, bias=problem.bias, router=sample.router,
        quant_config=None if problem.quant == "none" else problem.quant, **options,
    )  # fmt: skip


@pytest.mark.parametrize("quant", ["none", *QUANT_SCHEMES])
@pytest.mark.parametrize(
    "load_method", ["set_weights", "state_dict", "assign", "copy_", "data.copy_", "data"]
)
def test_a_layer_raises_until_it_is_loaded(quant: str, load_method: str) -> None:
    sample = Sample(fields={"quant": quant, "bias": True})
    loaded, layer = make_layer(sample), make_unloaded_layer(sample)
    expected = loaded(sample.x_TH, sample.logits)
    for _ in range(2):
        with pytest.raises(
            StateError, match=r"weights: got nothing loaded into w.*or call mark_loaded"
        ):
            layer(sample.x_TH, sample.logits)
    state = loaded.state_dict()
    if load_method == "set_weights":
        layer.set_weights(loaded.weights())
    elif load_method in ("state_dict", "assign"):
        layer.load_state_dict(state, assign=load_method == "assign")
        assert not layer._must_check_loaded
    for name, parameter in layer.named_parameters():
        if load_method == "copy_":
            parameter.copy_(state[name])
        elif load_method == "data.copy_":
            parameter.data.copy_(state[name])
        elif load_method == "data":
            parameter.data = state[name].clone()
    assert torch.equal(layer(sample.x_TH, sample.logits), expected)


def test_missing_tensors_are_named() -> None:
    sample = Sample(fields={"bias": True})
    layer, weights = make_unloaded_layer(sample), sample.plain
    layer.w13_weight.data.copy_(weights.w1)
    layer.w2_weight.data[1:].copy_(weights.w2[1:])
    layer.w13_bias.data.copy_(weights.b1)
    got = r"nothing loaded into w2_weight, w2_bias \(rows 0 of w2_weight\)"
    with pytest.raises(StateError, match=got):
        layer(sample.x_TH, sample.logits)
    with pytest.raises(StateError, match="w2_bias"):
        layer.prepare_weights()


def test_loading_the_state_of_an_unloaded_layer_leaves_it_unloaded() -> None:
    sample = Sample()
    layer = make_unloaded_layer(sample)
    layer.load_state_dict(make_unloaded_layer(sample).state_dict())
    with pytest.raises(StateError, match="nothing loaded"):
        layer(sample.x_TH, sample.logits)


def test_weights_with_nan_can_be_marked_as_loaded() -> None:
    sample = Sample()
    layer, weights = make_unloaded_layer(sample), sample.plain
    layer.w13_weight.data.copy_(weights.w1)
    layer.w2_weight.data.copy_(weights.w2)
    layer.w2_weight.data[:, 0, 0] = torch.nan
    with pytest.raises(StateError, match="w2_weight"):
        layer(sample.x_TH, sample.logits)
    layer.mark_loaded()
    assert bool(layer(sample.x_TH, sample.logits).isnan().any())
    # `set_weights` marks the layer as loaded, so it accepts NaN.
    layer = make_unloaded_layer(sample)
    layer.set_weights(ExpertWeights(weights.w1, weights.w2 * torch.nan))
    assert bool(layer(sample.x_TH, sample.logits).isnan().all())


def test_a_layer_moved_from_meta_raises_until_it_is_loaded() -> None:
    """`to_empty` leaves all memory uninitialized, including that of the expert map."""
    sample = Sample(FAMILIES["biased"], fields={"bias": True})
    loaded = make_layer(sample, (1, 2), (1, 2))
    options = {"router": sample.router, "bias": True, "params_dtype": torch.float32}
    layer = FusedMoE(
        E, H, I, device="meta", selection_bias=torch.zeros(E, device="meta"),
        parallel=LayerParallel(ep=(1, 2), tp=(1, 2)), **options,
    )  # fmt: skip
    layer.to_empty(device="cpu")
    with pytest.raises(StateError, match="nothing loaded into selection_bias"):
        layer(sample.x_TH, sample.logits)
    layer.selection_bias.copy_(loaded.selection_bias)
    with pytest.raises(StateError, match="nothing loaded into w13_weight"):
        layer(sample.x_TH, sample.logits)
    layer.load_state_dict(loaded.state_dict())
    assert torch.equal(layer(sample.x_TH, sample.logits), loaded(sample.x_TH, sample.logits))


@pytest.mark.parametrize("hash_routing", [False, True])
def test_a_router_raises_until_it_is_loaded(hash_routing: bool) -> None:
    spec = RouterSpec(K, table=hash_routing, selection_bias=not hash_routing)
    router = Router(spec, H, E, vocabulary=4 if hash_routing else None)
    x_TH = torch.randn(3, H)
    token_ids = torch.zeros(3, dtype=torch.int64) if hash_routing else None
    router.weight.data.normal_()
    missing = "tid2eid" if hash_routing else "e_score_correction_bias"
    with pytest.raises(StateError, match=f"nothing loaded into {missing}"):
        router(x_TH, token_ids)
    loaded = Router(spec, H, E, vocabulary=4 if hash_routing else None)
    loaded.weight.data.normal_()
    if hash_routing:
        loaded.tid2eid.copy_(torch.arange(4 * K).view(4, K) % E)
    else:
        loaded.e_score_correction_bias.data.zero_()
    router.load_state_dict(loaded.state_dict())
    assert not router._must_check_loaded
    for got, expected in zip(router(x_TH, token_ids), loaded(x_TH, token_ids), strict=True):
        assert torch.equal(got, expected)


# ------------------------------------------------------------------------------- DTensors, copies


@pytest.fixture
def mesh(tmp_path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_dtensors_are_refused_by_name(placement, mesh) -> None:
    sample = Sample()
    layer = make_layer(sample)
    x = distribute_tensor(sample.x_TH, mesh, [placement])
    logits = distribute_tensor(sample.logits, mesh, [placement])
    need = r"got a DTensor, need a plain tensor: \.to_local\(\)"
    with pytest.raises(LayoutError, match=f"^x: {need}"):
        layer(x, sample.logits)
    with pytest.raises(LayoutError, match=f"^router logits: {need}"):
        layer(sample.x_TH, logits)
    expected = layer(sample.x_TH, sample.logits)
    local_weight = layer.w2_weight.data
    layer.w2_weight = torch.nn.Parameter(distribute_tensor(local_weight, mesh, [placement]), False)
    with pytest.raises(LayoutError, match=f"w2_weight: {need}"):
        layer(sample.x_TH, sample.logits)
    torch.compiler.reset()
    with torch.no_grad(), pytest.raises(LayoutError, match=f"w2_weight: {need}"):
        torch.compile(layer, backend="eager")(sample.x_TH, sample.logits)
    layer.w2_weight = torch.nn.Parameter(layer.w2_weight.to_local(), False)
    assert torch.equal(layer(sample.x_TH, sample.logits), expected)


def test_layers_with_process_groups_cannot_be_pickled(mesh) -> None:
    layer = make_layer(Sample(), parallel=LayerParallel(ep_group=dist.group.WORLD))
    for copy in (deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match=r"torch\.save or copy of a layer: got ep_group"):
            copy(layer)
    new_layer = make_layer(Sample())
    new_layer.load_state_dict(layer.state_dict())
    assert torch.equal(
        deepcopy(new_layer)(Sample().x_TH, Sample().logits), layer(Sample().x_TH, Sample().logits)
    )


def test_every_parameter_is_known_to_these_tests() -> None:
    """If this test fails, decide whether casts of the layer should convert the new parameter."""
    assert set(PARAMETERS.values()) - {"w13_weight", "w2_weight", "w13_bias", "w2_bias"} == {
        f"{matrix}_{kind}"
        for matrix in ("w13", "w2")
        for kind in ("weight_scale", "weight_zero_point", "weight_global_scale", "input_scale")
    } | {"w13_weight_order"}
    assert rank_weights(Sample(), (0, 1), (0, 1)).w1.shape == (E, 2 * I, H)
