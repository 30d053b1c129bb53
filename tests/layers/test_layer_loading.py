"""FusedMoE and EPMoE are loaded from checkpoints in one call of `load`, and tensor by tensor as by
inference engines.
"""

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
EP_TP_SIZES = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (4, 4))
MAX_RELATIVE_ERROR = {"fp32": 1e-5, "bf16": 1e-2, "deepseek fp8": 8e-2, "awq": 1e-2, "gptq": 1e-2}


def make_layer(kind: str, parallel: LayerParallel, **options: Any) -> FusedMoE:
    sizes = {"num_experts": E, "hidden_size": H, "intermediate_size": I, "top_k": K}
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    format_options = {
        "quant_config": CHECKPOINT_FORMATS[kind].config,
        "params_dtype": dtype,
        "parallel": parallel,
    }
    return FusedMoE(**sizes | format_options | options)


def load_as_engine(layer: FusedMoE, tensors: dict[str, torch.Tensor]) -> None:
    """Load each tensor with the `weight_loader` of its parameter, as models of engines do."""
    parameters = {f"experts.{name}": p for name, p in layer.named_parameters()}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            continue
        for prefix, weight, expert, shard in layer.make_expert_params_mapping("w1", "w2", "w3", E):
            if weight in name:
                parameter_name = name[name.index("experts.") :].replace(weight, prefix)
                if parameter_name not in parameters:
                    parameter_name = parameter_name.replace("weight_scale_inv", "weight_scale")
                parameter = parameters[parameter_name]
                parameter.weight_loader(parameter, tensor, parameter_name, shard, expert)
    layer.process_weights_after_loading()


def measure_error_of_summed_outputs(
    kind: str, split: tuple[int, int], sample: Sample, load: Any
) -> float:
    """Return the relative error of the outputs summed over simulated ranks."""
    x, weights, ids = sample.inputs(T)
    total = torch.zeros(T, H, dtype=torch.float64)
    for ep, tp in product(range(split[0]), range(split[1])):
        layer = make_layer(kind, LayerParallel(ep=(ep, split[0]), tp=(tp, split[1])))
        load(layer)
        x_TH = x.to(layer.problem.dtype)
        total += layer(x_TH, (weights, ids)).double()
    expected = sample.expected_output(x, weights, ids)
    return float((total - expected).norm() / expected.norm())


@pytest.mark.parametrize("split", EP_TP_SIZES, ids=str)
@pytest.mark.parametrize("kind", ["fp32", "deepseek fp8"])
def test_layers_are_loaded_tensor_by_tensor(
    kind: str, split: tuple[int, int], tmp_path: Path
) -> None:
    sample = write(tmp_path, "mixtral", kind, intermediate=I)
    tensors = load_file(tmp_path / "model.safetensors")
    error = measure_error_of_summed_outputs(
        kind, split, sample, lambda layer: load_as_engine(layer, tensors)
    )
    assert error < MAX_RELATIVE_ERROR[kind]


@pytest.mark.parametrize("kind", ["fp32", "bf16", "deepseek fp8", "awq", "gptq"])
def test_layers_are_loaded_in_one_call(kind: str, tmp_path: Path) -> None:
    sample = write(tmp_path, "mixtral", kind, intermediate=I)
    for split in ((1, 1), (2, 2)):
        error = measure_error_of_summed_outputs(
            kind, split, sample, lambda layer: layer.load(tmp_path, 0)
        )
        assert error < MAX_RELATIVE_ERROR[kind]


@pytest.mark.parametrize("kind", ["bf16", "mxfp4"])
@pytest.mark.parametrize("split", [(1, 1), (2, 2)], ids=str)
def test_interleaved_rows_are_loaded_in_one_call_and_by_expert(kind, split, tmp_path) -> None:
    sample = write(tmp_path, "gpt_oss", kind, intermediate=I)
    tensors = load_file(tmp_path / "model.safetensors")
    x, weights, ids = sample.inputs(T)
    expected = sample.expected_output(x.bfloat16().double(), weights, ids)
    sums = [torch.zeros(T, H, dtype=torch.float64) for _ in range(2)]
    for ep, tp in product(range(split[0]), range(split[1])):
        parallel = LayerParallel(ep=(ep, split[0]), tp=(tp, split[1]))
        layers = [
            make_layer(kind, parallel, layer_id=0, activation="swiglu_oai", bias=True) for _ in sums
        ]
        layers[0].load(tmp_path)
        load_stacked_tensors(layers[1], tensors, transposed=kind == "bf16")
        for total, layer in zip(sums, layers, strict=True):
            total += layer(x.bfloat16(), (weights, ids)).double()
    for total in sums:
        assert float((total - expected).norm() / expected.norm()) < 1e-2
    with pytest.raises(ConfigurationError, match="shard_id: got 'w1', need one of w13, w2"):
        layers[1].weight_loader(layers[1].w13_bias, torch.zeros(I), "w13_bias", "w1", 0)


def load_stacked_tensors(
    layer: FusedMoE, tensors: dict[str, torch.Tensor], *, transposed: bool
) -> None:
    """Load gpt-oss tensors, each stacked over experts, expert by expert as engines do."""
    parameters = dict(layer.named_parameters())
    for name, stacked in tensors.items():
        for checkpoint_name, shard in (("gate_up_proj", "w13"), ("down_proj", "w2")):
            if checkpoint_name in name:
                kind = name.rpartition(checkpoint_name)[2].removeprefix("_") or "weight"
                parameter_name = f"{shard}_{kind}"
                for expert in range(E):
                    matrix = stacked[expert]
                    matrix = matrix.mT if kind == "weight" and transposed else matrix
                    layer.weight_loader(
                        parameters[parameter_name], matrix, parameter_name, shard, expert
                    )
    layer.process_weights_after_loading()


def test_checkpoints_that_contradict_the_layer_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "mixtral", "fp32", intermediate=I)
    parallel = LayerParallel()
    for options, message in (
        ({"hidden_size": 64}, "hidden of the checkpoint: got 128, need 64"),
        ({"num_experts": 8}, "placement: got 8 experts, need experts = 4"),
        ({"top_k": 3}, "top_k of the checkpoint: got 2, need 3"),
        ({"activation": "gelu"}, "activation of the checkpoint: got silu, need gelu"),
        ({"quant_config": "fp8_w8a8_block"}, "quant of the checkpoint: got none, need fp8_w8a8"),
        ({"layer_id": 7}, "layer: got 7, need"),
    ):
        layer = make_layer("fp32", parallel, **{"layer_id": 0} | options)
        with pytest.raises(ModularKernelError, match=message):
            layer.load(tmp_path)
        assert bool(layer.w2_weight.float().isnan().any()) or layer.problem.scheme.quantized
    with pytest.raises(ConfigurationError, match="layer: got None, need the number of the layer"):
        make_layer("fp32", parallel).load(tmp_path)


def test_a_partly_loaded_layer_raises(tmp_path: Path) -> None:
    write(tmp_path, "mixtral", "deepseek fp8", intermediate=I)
    tensors = load_file(tmp_path / "model.safetensors")
    missing_name = next(name for name in tensors if ".experts.2.w3.weight" in name)
    layer = make_layer("deepseek fp8", LayerParallel())
    assert layer.w13_weight_scale_inv.quant_method == "block"
    with pytest.raises(WeightsError, match=r"no weight.* of w3, expert 2"):
        load_as_engine(layer, {name: t for name, t in tensors.items() if name != missing_name})
    x_TH, ids = torch.zeros(1, H, dtype=torch.bfloat16), torch.zeros(1, K, dtype=torch.int64)
    with pytest.raises(StateError, match="weights: got parameters in the checkpoint's layout"):
        layer(x_TH, (torch.ones(1, K), ids))
    unquantized_layer = make_layer("fp32", LayerParallel())
    with pytest.raises(StateError, match="nothing loaded into w13_weight, w2_weight"):
        unquantized_layer(x_TH.float(), (torch.ones(1, K), ids))


def test_errors_name_experts_that_were_not_loaded(tmp_path: Path) -> None:
    write(tmp_path, "mixtral", "fp32", intermediate=I)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = make_layer("fp32", LayerParallel())
    for name, tensor in tensors.items():  # `process_weights_after_loading` is not called
        mapping = [
            (w, p, e, s) for p, w, e, s in layer.make_expert_params_mapping("w1", "w2", "w3", E)
        ]
        for weight, prefix, expert, shard in mapping:
            if weight in name and ".experts.2.w3" not in name:
                parameter = getattr(layer, f"{prefix.removeprefix('experts.')}weight")
                parameter.weight_loader(parameter, tensor, "weight", shard, expert)
    call = (torch.zeros(1, H), (torch.ones(1, K), torch.zeros(1, K, dtype=torch.int32)))
    with pytest.raises(StateError, match=r"nothing loaded into w13_weight \(rows 2 of w13_weight"):
        layer(*call)


def test_a_layer_with_a_named_scheme_has_no_loader() -> None:
    layer = make_layer("fp32", LayerParallel(), quant_config="fp8_w8a8_block")
    with pytest.raises(UnsupportedError, match="weight_loader: got quant_config='fp8_w8a8_block'"):
        layer.weight_loader(layer.w2_weight, torch.zeros(H, I), "w2_weight", "w2", 0)
    with pytest.raises(UnsupportedError, match="process_weights_after_loading: got quant_config="):
        layer.process_weights_after_loading()


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_ep_moe_loads_float8_checkpoints(scheme: str, tmp_path: Path) -> None:
    """The scales of gate and up are merged, and static input scales become their maximum."""
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
        load_as_engine(layer, tensors)
        assert tuple(layer.w13_weight_scale.shape) == (2,)
        assert hasattr(layer, "w2_input_scale") == (scheme == "static")
        # EPMoE routes by logits, so pass logits whose softmax gives `weights`.
        logits = torch.full((T, E), -torch.inf).scatter(1, ids, weights.log())
        total += layer(x.bfloat16(), logits).double()
    expected = sample.expected_output(x, weights, ids)
    assert float((total - expected).norm() / expected.norm()) < 0.1


def test_input_scales_of_gate_and_up_must_be_equal(tmp_path: Path) -> None:
    write(tmp_path, "mixtral", "fp8 tensor, static", intermediate=I)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if ".experts.1.w3.input_scale" in name)
    tensors[name] = tensors[name.replace(".w3.", ".w1.")] * 1.01
    config = SimpleNamespace(activation_scheme="static")
    layer = EPMoE(E, K, H, I, torch.bfloat16, quant_config=config)
    with pytest.raises(ValueError, match=r"input_scale: got .* the scale of the other projection"):
        load_as_engine(layer, tensors)


def test_all_fields_of_an_activation_are_compared(tmp_path: Path) -> None:
    write(tmp_path, "gpt_oss", "bf16", intermediate=I)
    other_activation = ActivationSpec("swiglu_oai", 1.5, 7.0, interleaved=True)
    layer = make_layer("bf16", LayerParallel(), layer_id=0, activation=other_activation, bias=True)
    with pytest.raises(ConfigurationError, match="activation of the checkpoint: got swiglu_oai"):
        layer.load(tmp_path)
