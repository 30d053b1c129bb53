"""FusedMoE and EPMoE loaded from a checkpoint, at once and tensor by tensor as engines do."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from modular_kernel.errors import (
    ConfigurationError,
    ModularKernelError,
    StateError,
    UnsupportedError,
    WeightsError,
)
from modular_kernel.layers.ep_moe import EPMoE
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.parallel import LayerParallel
from modular_kernel.spec.problem import ActivationSpec
from modular_kernel.testing.checkpoints.published_formats import CHECKPOINT_FORMATS
from modular_kernel.testing.checkpoints.samples import Sample, write

E, H, I, K, T = 4, 128, 256, 2, 6  # noqa: E741 (intermediate)
SPLITS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (4, 4))
BOUND = {"fp32": 1e-5, "bf16": 1e-2, "deepseek fp8": 8e-2, "awq": 1e-2, "gptq": 1e-2}


def layer_of(kind: str, place: LayerParallel, **options: Any) -> FusedMoE:
    sizes = {"num_experts": E, "hidden_size": H, "intermediate_size": I, "top_k": K}
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    given = {
        "quant_config": CHECKPOINT_FORMATS[kind].config,
        "params_dtype": dtype,
        "parallel": place,
    }
    return FusedMoE(**sizes | given | options)


def engine_loads(layer: FusedMoE, tensors: dict[str, torch.Tensor]) -> None:
    """Load as a model's load_weights does: map names and find parameters by them."""
    parameters = {f"experts.{name}": p for name, p in layer.named_parameters()}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            continue
        for prefix, weight, expert, shard in layer.make_expert_params_mapping("w1", "w2", "w3", E):
            if weight in name:
                own = name[name.index("experts.") :].replace(weight, prefix)
                if own not in parameters:
                    own = own.replace("weight_scale_inv", "weight_scale")
                parameter = parameters[own]
                parameter.weight_loader(parameter, tensor, own, shard, expert)
    layer.process_weights_after_loading()


def sum_over(kind: str, split: tuple[int, int], sample: Sample, load: Any) -> float:
    """Return the largest relative error of the sum over simulated ranks."""
    x, weights, ids = sample.inputs(T)
    total = torch.zeros(T, H, dtype=torch.float64)
    for ep, tp in product(range(split[0]), range(split[1])):
        layer = layer_of(kind, LayerParallel(ep=(ep, split[0]), tp=(tp, split[1])))
        load(layer)
        x_TH = x.to(layer.problem.dtype)
        total += layer(x_TH, (weights, ids)).double()
    want = sample.expected_output(x, weights, ids)
    return float((total - want).norm() / want.norm())


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("kind", ["fp32", "deepseek fp8"])
def test_tensor_by_tensor(kind: str, split: tuple[int, int], tmp_path: Path) -> None:
    sample = write(tmp_path, "mixtral", kind, intermediate=I)
    tensors = load_file(tmp_path / "model.safetensors")
    error = sum_over(kind, split, sample, lambda layer: engine_loads(layer, tensors))
    assert error < BOUND[kind]


@pytest.mark.parametrize("kind", ["fp32", "bf16", "deepseek fp8", "awq", "gptq"])
def test_a_layer_at_once(kind: str, tmp_path: Path) -> None:
    sample = write(tmp_path, "mixtral", kind, intermediate=I)
    for split in ((1, 1), (2, 2)):
        error = sum_over(kind, split, sample, lambda layer: layer.load(tmp_path, 0))
        assert error < BOUND[kind]


@pytest.mark.parametrize("kind", ["bf16", "mxfp4"])
@pytest.mark.parametrize("split", [(1, 1), (2, 2)], ids=str)
def test_interleaved_rows_load_at_once_and_expert_by_expert(kind, split, tmp_path) -> None:
    sample = write(tmp_path, "gpt_oss", kind, intermediate=I)
    tensors = load_file(tmp_path / "model.safetensors")
    x, weights, ids = sample.inputs(T)
    want = sample.expected_output(x.bfloat16().double(), weights, ids)
    sums = [torch.zeros(T, H, dtype=torch.float64) for _ in range(2)]
    for ep, tp in product(range(split[0]), range(split[1])):
        place = LayerParallel(ep=(ep, split[0]), tp=(tp, split[1]))
        layers = [
            layer_of(kind, place, layer_id=0, activation="swiglu_oai", bias=True) for _ in sums
        ]
        layers[0].load(tmp_path)
        experts_loaded(layers[1], tensors, transposed=kind == "bf16")
        for total, layer in zip(sums, layers, strict=True):
            total += layer(x.bfloat16(), (weights, ids)).double()
    for total in sums:
        assert float((total - want).norm() / want.norm()) < 1e-2
    with pytest.raises(ConfigurationError, match="shard_id: got 'w1', need one of w13, w2"):
        layers[1].weight_loader(layers[1].w13_bias, torch.zeros(I), "w13_bias", "w1", 0)


def experts_loaded(layer: FusedMoE, tensors: dict[str, torch.Tensor], *, transposed: bool) -> None:
    """Load as a loader of gpt-oss does: one stacked tensor at a time, expert by expert."""
    parameters = dict(layer.named_parameters())
    for name, stacked in tensors.items():
        for long, shard in (("gate_up_proj", "w13"), ("down_proj", "w2")):
            if long in name:
                kind = name.rpartition(long)[2].removeprefix("_") or "weight"
                own = f"{shard}_{kind}"
                for expert in range(E):
                    one = stacked[expert]
                    one = one.mT if kind == "weight" and transposed else one
                    layer.weight_loader(parameters[own], one, own, shard, expert)
    layer.process_weights_after_loading()


def test_a_checkpoint_of_another_layer_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "mixtral", "fp32", intermediate=I)
    place = LayerParallel()
    for options, message in (
        ({"hidden_size": 64}, "hidden of the checkpoint: got 128, need 64"),
        ({"num_experts": 8}, "placement: got 8 experts, need experts = 4"),
        ({"top_k": 3}, "top_k of the checkpoint: got 2, need 3"),
        ({"activation": "gelu"}, "activation of the checkpoint: got silu, need gelu"),
        ({"quant_config": "fp8_w8a8_block"}, "quant of the checkpoint: got none, need fp8_w8a8"),
        ({"layer_id": 7}, "layer: got 7, need"),
    ):
        layer = layer_of("fp32", place, **{"layer_id": 0} | options)
        with pytest.raises(ModularKernelError, match=message):
            layer.load(tmp_path)
        assert bool(layer.w2_weight.float().isnan().any()) or layer.problem.scheme.quantized
    with pytest.raises(ConfigurationError, match="layer: got None, need the number of the layer"):
        layer_of("fp32", place).load(tmp_path)


def test_a_partly_loaded_layer_raises(tmp_path: Path) -> None:
    write(tmp_path, "mixtral", "deepseek fp8", intermediate=I)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in tensors if ".experts.2.w3.weight" in name)
    layer = layer_of("deepseek fp8", LayerParallel())
    assert layer.w13_weight_scale_inv.quant_method == "block"
    with pytest.raises(WeightsError, match=r"no weight.* of w3, expert 2"):
        engine_loads(layer, {name: t for name, t in tensors.items() if name != lost})
    x_TH, ids = torch.zeros(1, H, dtype=torch.bfloat16), torch.zeros(1, K, dtype=torch.int64)
    with pytest.raises(StateError, match="weights: got parameters in the checkpoint's layout"):
        layer(x_TH, (torch.ones(1, K), ids))
    plain = layer_of("fp32", LayerParallel())
    with pytest.raises(StateError, match="nothing loaded into w13_weight, w2_weight"):
        plain(x_TH.float(), (torch.ones(1, K), ids))


def test_an_expert_that_was_never_loaded_is_named(tmp_path: Path) -> None:
    write(tmp_path, "mixtral", "fp32", intermediate=I)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = layer_of("fp32", LayerParallel())
    for name, tensor in tensors.items():  # without `process_weights_after_loading`
        at = [(w, p, e, s) for p, w, e, s in layer.make_expert_params_mapping("w1", "w2", "w3", E)]
        for weight, prefix, expert, shard in at:
            if weight in name and ".experts.2.w3" not in name:
                parameter = getattr(layer, f"{prefix.removeprefix('experts.')}weight")
                parameter.weight_loader(parameter, tensor, "weight", shard, expert)
    call = (torch.zeros(1, H), (torch.ones(1, K), torch.zeros(1, K, dtype=torch.int32)))
    with pytest.raises(StateError, match=r"nothing loaded into w13_weight \(rows 2 of w13_weight"):
        layer(*call)  # the up rows of expert 2


def test_a_layer_with_a_named_scheme_has_no_loader() -> None:
    layer = layer_of("fp32", LayerParallel(), quant_config="fp8_w8a8_block")
    with pytest.raises(UnsupportedError, match="weight_loader: got quant_config='fp8_w8a8_block'"):
        layer.weight_loader(layer.w2_weight, torch.zeros(H, I), "w2_weight", "w2", 0)
    with pytest.raises(UnsupportedError, match="process_weights_after_loading: got quant_config="):
        layer.process_weights_after_loading()


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_ep_moe_in_float8(scheme: str, tmp_path: Path) -> None:
    """The scales of gate and up are merged into one, and the maximum of static input scales is
    used.
    """
    sample = write(tmp_path, "mixtral", f"fp8 tensor, {scheme}", intermediate=I)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if ".w3.input_scale" in name]:
        tensors[name] = tensors[name.replace(".w3.", ".w1.")].clone()
    x, weights, ids = sample.inputs(T)
    total = torch.zeros(T, H, dtype=torch.float64)
    for rank in range(2):
        layer = EPMoE(
            E, K, H, I, torch.bfloat16, tp_size=2, tp_rank=rank, experts="TorchExperts",
            quant_config=SimpleNamespace(activation_scheme=scheme),
        )  # fmt: skip
        assert tuple(layer.w13_weight_scale.shape) == (2, 2)
        engine_loads(layer, tensors)
        assert tuple(layer.w13_weight_scale.shape) == (2,)
        assert hasattr(layer, "w2_input_scale") == (scheme == "static")
        # The router of EPMoE takes logits: those whose softmax is the routing given.
        logits = torch.full((T, E), -torch.inf).scatter(1, ids, weights.log())
        total += layer(x.bfloat16(), logits).double()
    want = sample.expected_output(x, weights, ids)
    assert float((total - want).norm() / want.norm()) < 0.1


def test_input_scales_of_gate_and_up_must_be_equal(tmp_path: Path) -> None:
    write(tmp_path, "mixtral", "fp8 tensor, static", intermediate=I)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if ".experts.1.w3.input_scale" in name)
    tensors[name] = tensors[name.replace(".w3.", ".w1.")] * 1.01
    config = SimpleNamespace(activation_scheme="static")
    layer = EPMoE(E, K, H, I, torch.bfloat16, quant_config=config)
    with pytest.raises(ValueError, match=r"input_scale: got .* the scale of the other projection"):
        engine_loads(layer, tensors)


def test_all_fields_of_an_activation_are_compared(tmp_path: Path) -> None:
    write(tmp_path, "gpt_oss", "bf16", intermediate=I)
    other = ActivationSpec("swiglu_oai", 1.5, 7.0, interleaved=True)
    layer = layer_of("bf16", LayerParallel(), layer_id=0, activation=other, bias=True)
    with pytest.raises(ConfigurationError, match="activation of the checkpoint: got swiglu_oai"):
        layer.load(tmp_path)
