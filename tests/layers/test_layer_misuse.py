"""Layers and loaders refuse invalid arguments, and can be loaded a second time."""

from types import SimpleNamespace

import pytest
import torch

from modular_kernel.checkpoints import format_of
from modular_kernel.errors import (
    ConfigurationError,
    DtypeError,
    InputError,
    ShapeError,
    StateError,
    WeightsError,
)
from modular_kernel.integrations.fused_moe import fused_moe
from modular_kernel.layers.balance import rebalance
from modular_kernel.layers.ep_moe import EPMoE
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.rank_share import Share
from modular_kernel.layers.router import Router, RouterSpec
from modular_kernel.layers.weight_loading import ExpertLoader

E, H, I = 4, 32, 64  # noqa: E741 (intermediate)
BIASED_ROUTER = RouterSpec(2, "sigmoid", selection_bias=True)
TABLE_ROUTER = RouterSpec(2, "sigmoid", table=True)
INVALID_ARGUMENTS = {
    "a selection bias with too many values": (
        lambda: FusedMoE(E, H, I, router=BIASED_ROUTER, selection_bias=torch.zeros(E + 1)),
        ShapeError,
        r"selection_bias: got \(5,\), need \(4,\)",
    ),
    "a selection bias that is a list": (
        lambda: FusedMoE(E, H, I, router=BIASED_ROUTER, selection_bias=[0.0] * E),
        DtypeError,
        "selection_bias: got list, need a tensor",
    ),
    "shared experts that cannot be called": (
        lambda: FusedMoE(E, H, I, top_k=2, shared_experts=3),
        ConfigurationError,
        "shared_experts: got 3",
    ),
    "token ids that are a list": (
        lambda: FusedMoE(E, H, I, router=Router(TABLE_ROUTER, H, E, vocabulary=9))(
            torch.zeros(1, H), token_ids=[1]
        ),
        DtypeError,
        "token_ids: got list, need a tensor",
    ),
    "logits for too many experts": (
        lambda: fused_moe(
            torch.zeros(2, H),
            torch.zeros(E, 2 * I, H),
            torch.zeros(E, H, I),
            torch.zeros(2, 2 * E),
            top_k=2,
        ),
        ShapeError,
        r"gating_output: got \(2, 8\), need .* E = 4",
    ),
}


@pytest.mark.parametrize("case", INVALID_ARGUMENTS)
def test_a_bad_argument_is_refused(case: str) -> None:
    call, error, match = INVALID_ARGUMENTS[case]
    with pytest.raises(error, match=match):
        call()


def test_scheme_follows_from_activation_scheme_and_block_size() -> None:
    def make_layer(**fields: object) -> EPMoE:
        config = SimpleNamespace(**fields)
        return EPMoE(E, 2, 64, 64, quant_config=config, experts="TorchExperts")

    layer = make_layer(activation_scheme="dynamic", weight_block_size=[32, 64])
    assert str(layer.problem.scheme) == "fp8_w8a8_block:block=32x64"
    assert str(make_layer(activation_scheme="dynamic").problem.scheme) == "fp8_w8a8_tensor"
    for scheme, block in (("static", [32, 64]), ("dynamic", [32]), ("dynamic", 32)):
        with pytest.raises(ConfigurationError, match="quantization_config"):
            make_layer(activation_scheme=scheme, weight_block_size=block)


def test_unloaded_mxfp4_weights_raise_or_compute_nan() -> None:
    layer = FusedMoE(E, H, I, top_k=1, params_dtype=torch.float32, quant_config="mxfp4_w4a16")
    call = (torch.ones(1, H), (torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32)))
    with pytest.raises(StateError, match="nothing loaded into w13_weight_scale, w2_weight_scale"):
        layer(*call)
    layer.mark_loaded()
    assert layer(*call).isnan().all()


def test_autocast_does_not_change_the_routing() -> None:
    generator = torch.Generator().manual_seed(0)
    router, x_TH = Router(RouterSpec(2), H, E), torch.randn(64, H, generator=generator)
    router.weight.copy_(torch.randn(E, H, generator=generator))
    with torch.autocast("cpu", torch.bfloat16):
        with_autocast = router(x_TH)
    for got, expected in zip(with_autocast, router(x_TH), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


# ------------------------------------------------------------------------------ loading again

STATIC_FP8 = format_of({"quant_method": "fp8", "activation_scheme": "static"})
INT4_WITH_ZERO_POINTS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 4,
                "symmetric": False,
            },
            "input_activations": None,
        }
    },
}


def load_expert(
    loader: ExpertLoader, module: torch.nn.Module, scale: float, up_scale: float
) -> None:
    """Load expert 0. Gate and down have the scale `scale`, and up has `up_scale`."""
    for shard, value in (("w1", scale), ("w3", up_scale), ("w2", scale)):
        matrix = "w2" if shard == "w2" else "w13"
        shape = (H, I) if shard == "w2" else (I, H)
        tensors = {"weight": torch.ones(shape).to(torch.float8_e4m3fn)}
        tensors |= dict.fromkeys(("weight_scale", "input_scale"), torch.tensor(value))
        for name, tensor in tensors.items():
            name = f"{matrix}_{name}"
            loader.weight_loader(getattr(module, name), tensor, name, shard, 0)


def test_scales_can_be_loaded_again() -> None:
    loader, module = ExpertLoader(Share(1, H, I), STATIC_FP8), torch.nn.Module()
    loader.create_weights(module, torch.bfloat16)
    for scale in (0.5, 0.25):
        load_expert(loader, module, scale, scale)
        weights = loader.expert_weights(module)
        for loaded in (weights.w1_scale, weights.w2_scale, weights.a1_scale, weights.a2_scale):
            assert loaded is not None
            assert loaded.tolist() == [scale]
    with pytest.raises(
        WeightsError, match=r"input_scale: got 0.5, need 0.125, the scale of the other projection"
    ):
        load_expert(loader, module, 0.125, 0.5)


def test_gate_and_up_rows_in_one_packed_word_are_refused() -> None:
    with pytest.raises(InputError, match="intermediate: got 12, need a multiple of 8"):
        ExpertLoader(Share(1, H, 12), format_of(INT4_WITH_ZERO_POINTS))
    ExpertLoader(Share(1, H, 12, gated=False), format_of(INT4_WITH_ZERO_POINTS))


def test_weights_of_a_layer_can_be_loaded_again() -> None:
    layer = FusedMoE(1, H, I, top_k=1, params_dtype=torch.float32)
    for value in (1.0, 2.0):
        for shard, shape in (("w1", (I, H)), ("w3", (I, H)), ("w2", (H, I))):
            name = "w2_weight" if shard == "w2" else "w13_weight"
            parameter = getattr(layer, name)
            parameter.weight_loader(parameter, torch.full(shape, value), name, shard, 0)
        layer.process_weights_after_loading()
        assert torch.equal(layer.w13_weight, torch.full((1, 2 * I, H), value))
        assert torch.equal(layer.weights().w2, torch.full((1, H, I), value))


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [((3, [1]), "load"), (([1.0], 3), "slots"), (([1.0], [1], "linear"), "old placement")],
)
def test_rebalance_refuses_arguments_of_wrong_types(
    arguments: tuple[object, ...], argument: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"^{argument}: got"):
        rebalance(*arguments)
