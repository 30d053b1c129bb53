"""EPMoE, a layer with the interface of SGLang's EPMoE: the experts of a rank, routing modes, and
rank outputs that sum to the output of the whole layer.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devices import DEVICE
from fused_experts_calls import move_tensors
from small_layers import E, H, I, K, Sample, T, make_layer, rank_weights, relative_error

from experts.compat.ep_moe import GroupedGemmRunner
from modular_kernel.errors import (
    ConfigurationError,
    ModularKernelError,
    UnsupportedError,
    WeightsError,
)
from modular_kernel.layers.ep_moe import EPMoE
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.weight_loading import Fp8EPMoEMethod, UnquantizedEPMoEMethod
from modular_kernel.ops.route import RouterTensors, route
from modular_kernel.reference import float64_reference
from modular_kernel.spec.router import RouterSpec
from modular_kernel.testing.ranks.pool import RankPool

GROUPED = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}
BIAS = torch.linspace(-0.5, 0.5, E)
# The options of EPMoE and the router that they select, by name.
ROUTING_MODES: dict[str, tuple[dict[str, Any], RouterSpec]] = {
    "plain": ({"renormalize": False}, RouterSpec(K)),
    "renormalized": ({}, RouterSpec(K, renormalize=True)),
    "grouped": (GROUPED, RouterSpec(K, groups=4, topk_groups=2, group_score="max",
                                    renormalize=True)),
    "corrected": (GROUPED | {"correction_bias": BIAS},
                  RouterSpec(K, "sigmoid", groups=4, topk_groups=2, selection_bias=True,
                             renormalize=True)),
    "one group": (GROUPED | {"num_expert_group": 1, "topk_group": 1, "correction_bias": BIAS},
                  RouterSpec(K, "sigmoid", selection_bias=True, renormalize=True)),
}  # fmt: skip


def compute_rank_outputs(sample: Sample, world: int, options: dict[str, Any]) -> list[torch.Tensor]:
    outputs = []
    for rank in range(world):
        layer = EPMoE(
            E, K, H, I, sample.problem.dtype, tp_size=world, tp_rank=rank, device=DEVICE,
            quant_config=None if sample.problem.quant == "none" else sample.problem.quant,
            **options,
        )  # fmt: skip
        layer.set_weights(move_tensors(rank_weights(sample, (rank, world), (0, 1)), DEVICE))
        outputs.append(layer(sample.x_TH.to(DEVICE), sample.logits.to(DEVICE)).cpu())
    return outputs


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", ROUTING_MODES)
def test_rank_outputs_sum_to_the_reference(name: str, world: int) -> None:
    options, spec = ROUTING_MODES[name]
    assert EPMoE(E, K, H, I, **options).router == spec
    options_on_device = {
        k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in options.items()
    }
    sample = Sample(spec)
    total = sum(
        output.double() for output in compute_rank_outputs(sample, world, options_on_device)
    )
    bias = options.get("correction_bias")
    routing = route(sample.logits, spec, RouterTensors(bias)).routing
    expected = float64_reference(sample.x_TH, sample.plain, routing, sample.problem)
    assert relative_error(total, expected) < 1e-5


def test_tokens_without_local_experts_get_zeros() -> None:
    sample = Sample()
    first, second = compute_rank_outputs(sample, 2, {})
    ids = route(sample.logits, sample.router).routing.topk_ids_TK
    for token in range(T):
        assert bool((first[token] == 0).all()) == bool((ids[token] >= E // 2).all())
        assert bool((second[token] == 0).all()) == bool((ids[token] < E // 2).all())


def test_outputs_equal_tensor_parallel_fused_moe() -> None:
    sample = Sample(fields={"dtype": torch.bfloat16})
    expert_parallel = sum(output.double() for output in compute_rank_outputs(sample, 2, {}))
    tensor_parallel = sum(
        make_layer(sample, tp=(rank, 2))(sample.x_TH, sample.logits).double() for rank in range(2)
    )
    assert relative_error(expert_parallel, sample.expected_output()) < 1e-2
    assert relative_error(expert_parallel, tensor_parallel) < 1e-2


def test_float8_with_one_scale_per_expert() -> None:
    sample = Sample(fields={"quant": "fp8_w8a8_tensor"})
    total = sum(output.double() for output in compute_rank_outputs(sample, 2, {}))
    assert relative_error(total, sample.expected_output()) < 8e-2


def test_attributes_of_a_rank() -> None:
    layer = EPMoE(E, K, H, I, torch.bfloat16, tp_size=4, tp_rank=2, prefix="model.layers.1")
    assert layer.num_experts_per_partition == 2
    assert (layer.start_expert_id, layer.end_expert_id) == (4, 5)
    assert (layer.tp_size, layer.tp_rank, layer.prefix) == (4, 2, "model.layers.1")
    assert [layer.local_expert(expert) for expert in range(E)] == [-1] * 4 + [0, 1] + [-1] * 2
    assert tuple(layer.w13_weight.shape) == (2, 2 * I, H)
    assert not layer.reduce_results
    assert isinstance(layer, FusedMoE)


@pytest.mark.parametrize(
    ("config", "quant"),
    [
        (SimpleNamespace(activation_scheme="dynamic"), "fp8_w8a8_tensor"),
        (SimpleNamespace(activation_scheme="static"), "fp8_w8a8_tensor:static=true"),
        ("fp8_w8a8_block", "fp8_w8a8_block"),
        (None, "none"),
    ],
)
def test_quantization_by_config(config: object, quant: str) -> None:
    layer = EPMoE(E, K, H, I, torch.bfloat16, quant_config=config)
    assert layer.problem.quant == quant
    scales = {name for name, _ in layer.named_parameters() if "scale" in name}
    inputs = {"w13_input_scale", "w2_input_scale"} if "static" in quant else set()
    weights = {"w13_weight_scale", "w2_weight_scale"} if quant != "none" else set()
    assert scales == weights | inputs
    if quant == "none":
        assert type(layer.quant_method) is UnquantizedEPMoEMethod
        assert (layer.use_fp8_w8a8, layer.activation_scheme) == (False, None)
    else:
        assert type(layer.quant_method) is Fp8EPMoEMethod
        assert layer.quant_method.format.scheme == layer.problem.scheme
        assert layer.use_fp8_w8a8
        assert layer.activation_scheme == ("static" if "static" in quant else "dynamic")


def test_unsupported_schemes_have_no_quant_method() -> None:
    for quant in ("int8_w8a8_channel", "fp8_w8a8_channel"):
        layer = EPMoE(E, K, H, I, torch.bfloat16, quant_config=quant)
        assert layer.quant_method is None
        assert layer.use_fp8_w8a8 == quant.startswith("fp8")
        assert layer.activation_scheme == "dynamic"


def test_router_arguments_are_kept() -> None:
    layer = EPMoE(E, K, H, I, torch.float32, correction_bias=BIAS, **GROUPED)
    assert layer.use_grouped_topk
    assert (layer.num_expert_group, layer.topk_group) == (4, 2)
    assert torch.equal(layer.correction_bias, BIAS)
    default = EPMoE(E, K, H, I, torch.float32)
    assert not default.use_grouped_topk
    assert (default.num_expert_group, default.topk_group) == (None, None)
    assert default.correction_bias is None


def test_quant_method_processes_loaded_weights() -> None:
    """Engines load with `weight_loader`, then call `quant_method` of each module."""
    sample = Sample(RouterSpec(K, renormalize=True))
    layer = EPMoE(E, K, H, I, torch.float32, device=DEVICE)
    with pytest.raises(WeightsError):
        layer.quant_method.process_weights_after_loading(layer)
    w1, w2 = sample.plain.w1, sample.plain.w2
    shards = {"w1": w1[:, :I], "w3": w1[:, I:], "w2": w2}
    for prefix, _, expert, shard in EPMoE.make_expert_params_mapping("gate", "down", "up", E):
        name = f"{prefix}weight".removeprefix("experts.")
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, shards[shard][expert], name, shard, expert)
    for module in torch.nn.Sequential(layer).modules():
        if getattr(module, "quant_method", None) is not None:
            module.quant_method.process_weights_after_loading(module)
    expected_layer = EPMoE(E, K, H, I, torch.float32, device=DEVICE)
    expected_layer.set_weights(move_tensors(sample.plain, DEVICE))
    call = sample.x_TH.to(DEVICE), sample.logits.to(DEVICE)
    assert torch.equal(layer(*call), expected_layer(*call))
    with pytest.raises(UnsupportedError, match="got Linear, need an EPMoE"):
        layer.quant_method.process_weights_after_loading(torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_size": 3}, "num_experts: got 8, need a multiple of tp_size = 3"),
        ({"tp_size": 0}, "ep ranks: got 0"),
        ({"tp_size": 2, "tp_rank": 2}, "ep rank: got 2"),
        ({"use_grouped_topk": True}, r"topk_group: got \(None, None\), need two"),
        ({"use_grouped_topk": True, "topk_group": 2}, r"topk_group: got \(None, 2\), need two"),
        ({"num_expert_group": 4}, r"topk_group: got \(4, None\), need None, because"),
        ({"correction_bias": BIAS}, "correction_bias: got a tensor, need None, because"),
        ({"renormalize": None}, "renormalize: got None, need True or False"),
        ({"quant_config": 8}, "quant_config: got int, need a quantization_config"),
        ({"quant_config": SimpleNamespace(activation_scheme="some")},
         "quant_config: got activation_scheme='some'"),
        ({"experts": "NoSuchExperts"}, "experts part: got 'NoSuchExperts'"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModularKernelError, match=message):
        EPMoE(E, K, H, I, torch.float32, **options)


def find_local_experts(rank: int, world: int, group: Any) -> tuple[int, int]:
    layer = EPMoE(E, K, H, I, tp_group=group)
    with pytest.raises(ConfigurationError, match="tp_size: got 3, need 2, as in tp_group"):
        EPMoE(E, K, H, I, tp_group=group, tp_size=3)
    return layer.start_expert_id, layer.end_expert_id


def test_tp_group_determines_the_local_experts(rank_pool: Any) -> None:
    pool: RankPool = rank_pool(2)
    assert pool.run(find_local_experts) == [(0, 3), (4, 7)]


def test_grouped_gemm_runner_multiplies_segments() -> None:
    runner = GroupedGemmRunner(DEVICE)
    a, b = torch.randn(5, 32, device=DEVICE), torch.randn(3, 16, 32, device=DEVICE)
    c = torch.full((5, 16), torch.nan, device=DEVICE)
    segment_offsets = torch.tensor([0, 2, 2, 5], device=DEVICE)
    got = runner(a, b, c, 3, True, segment_offsets)
    assert got is c
    expected = torch.cat([a[:2] @ b[0].T, a[2:] @ b[2].T])
    assert torch.allclose(c, expected, atol=1e-4)
    with pytest.raises(UnsupportedError, match="use_flashinfer: got True, need False"):
        GroupedGemmRunner(DEVICE, use_flashinfer=True)
