"""Checkpoints whose layers have different formats: each layer is loaded in its own format."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mixed_samples import EXPERTS, MIXED, fuse_experts, write_mixed
from safetensors.torch import load_file, save_file

import modular_kernel as mk
from modular_kernel.catalog import this_machine
from modular_kernel.checkpoints.inspection import inspect
from modular_kernel.errors import ConfigurationError, DtypeError, InputError, WeightsError
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.testing.checkpoints.published_formats import CHECKPOINT_FORMATS
from modular_kernel.testing.checkpoints.samples import Sample

PAIR = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
AWQ = CHECKPOINT_FORMATS["awq"].config
LAYERS = [(name, layer) for name, (kinds, _) in MIXED.items() for layer in kinds]


def compute_relative_error(sample: Sample, layer_function: Any) -> float:
    """Return the relative error of `layer_function(x, routing)` compared with float64."""
    x, weights, ids = sample.inputs(24)
    y = layer_function(x.bfloat16(), mk.Routing(weights, ids))
    expected_output = sample.expected_output(x.bfloat16().double(), weights, ids)
    return float((y.double() - expected_output).norm() / expected_output.norm())


def bind_kernel(loaded: Any) -> Any:
    kernel = mk.make_kernel(*PAIR, loaded.problem(24), machine=this_machine(device="cpu"))
    return lambda x, routing: kernel(x, loaded.weights, routing)


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_each_layer_is_within_the_bound_of_its_format(
    name: str, layer: int, tmp_path: Path
) -> None:
    """`load_experts` loads all experts and the shares of ranks, and `FusedMoE` loads the layer."""
    kinds, quantization = MIXED[name]
    sample, kind = write_mixed(tmp_path, kinds, quantization)[layer], kinds[layer]
    loaded = mk.load_experts(tmp_path, layer)
    bound = CHECKPOINT_FORMATS[kind].bound
    scheme = str(QuantScheme.parse(loaded.problem_fields["quant"]))
    assert scheme == CHECKPOINT_FORMATS[kind].scheme
    assert compute_relative_error(sample, bind_kernel(loaded)) <= bound

    total = torch.zeros(24, 128, dtype=torch.float64)
    x, weights, ids = sample.inputs(24)
    for rank in range(2):
        share = mk.load_experts(tmp_path, layer, ep=(rank, 2))
        problem, rank_weights = share.partial(24)
        kernel = mk.make_kernel(*PAIR, problem, machine=this_machine(device="cpu"))
        total += kernel(x.bfloat16(), rank_weights, mk.Routing(weights, ids)).double()
    expected_output = sample.expected_output(x.bfloat16().double(), weights, ids)
    assert (total - expected_output).norm() / expected_output.norm() <= bound

    module = FusedMoE.from_config(tmp_path, layer, top_k=2, experts="TorchExperts")
    module.load(tmp_path)
    assert str(QuantScheme.parse(module.problem.quant)) == scheme
    assert (
        compute_relative_error(sample, lambda x, r: module(x, (r.topk_weights_TK, r.topk_ids_TK)))
        <= bound
    )


@pytest.mark.parametrize("name", MIXED)
def test_config_json_alone_determines_the_schemes(name: str, tmp_path: Path) -> None:
    kinds, quantization = MIXED[name]
    write_mixed(tmp_path, kinds, quantization)
    report = inspect(tmp_path)
    schemes_by_layer = {
        layer: str(QuantScheme.parse(group.problem_fields["quant"]))
        for group in report.groups
        for layer in group.layers
    }
    assert schemes_by_layer == {
        layer: CHECKPOINT_FORMATS[kind].scheme for layer, kind in kinds.items()
    }
    tensors = load_file(tmp_path / "model.safetensors")
    assert report.nbytes == sum(t.nbytes for n, t in tensors.items() if "experts" in n)
    assert report.layers == tuple(kinds)
    for layer, kind in kinds.items():
        module = FusedMoE.from_config(tmp_path / "config.json", layer, top_k=2)
        assert str(QuantScheme.parse(module.problem.quant)) == CHECKPOINT_FORMATS[kind].scheme
    with pytest.raises(
        ConfigurationError, match=r"layer: got None, and several schemes \(layers? 0"
    ):
        FusedMoE.from_config(tmp_path / "config.json", top_k=2)


@pytest.mark.parametrize("name", MIXED)
def test_layer_number_is_required_if_formats_differ(name: str, tmp_path: Path) -> None:
    kinds, quantization = MIXED[name]
    write_mixed(tmp_path, kinds, quantization)
    with pytest.raises(ConfigurationError, match=r"layer: got None, and several formats \(layer"):
        FusedMoE.from_config(tmp_path, top_k=2)


def test_layer_number_is_optional_if_formats_are_equal(tmp_path: Path) -> None:
    """Layer 0 has no experts, and the multi-token prediction (MTP) layer is unquantized."""
    write_mixed(tmp_path, {1: "awq", 2: "awq", 3: "bf16"}, AWQ, num_layers=3)
    module = FusedMoE.from_config(tmp_path, top_k=2)
    assert str(QuantScheme.parse(module.problem.quant)) == CHECKPOINT_FORMATS["awq"].scheme
    module.load(tmp_path, 2)
    with pytest.raises(ConfigurationError, match="quant of the checkpoint: got none"):
        module.load(tmp_path, 3)


FUSED_CASES = [("AWQ and bf16", 0), ("fp8, excluded layers", 1)]


@pytest.mark.parametrize(("name", "fused_layer"), FUSED_CASES)
def test_layers_may_have_different_layouts(name: str, fused_layer: int, tmp_path: Path) -> None:
    """transformers stores unquantized experts in one tensor, and quantized experts in modules."""
    kinds, quantization = MIXED[name]
    samples = write_mixed(tmp_path, kinds, quantization)
    fuse_experts(tmp_path, fused_layer)
    for layer, kind in kinds.items():
        bound = CHECKPOINT_FORMATS[kind].bound
        loaded = mk.load_experts(tmp_path, layer)
        assert compute_relative_error(samples[layer], bind_kernel(loaded)) <= bound
        module = FusedMoE.from_config(tmp_path, layer, top_k=2, experts="TorchExperts")
        module.load(tmp_path)
        error = compute_relative_error(
            samples[layer],
            lambda x, r, module=module: module(x, (r.topk_weights_TK, r.topk_ids_TK)),
        )
        assert error <= bound


def test_config_without_entries_of_some_layers_is_refused(tmp_path: Path) -> None:
    """Without their entries, layers 1 to 3 are loaded in the format of layer 0, which their tensors
    contradict.
    """
    kinds, quantization = MIXED["GPTQ, dynamic"]
    write_mixed(tmp_path, kinds, quantization)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]["dynamic"]
    (tmp_path / "plain.json").write_text(json.dumps(config))
    for layer, need in ((1, "qweight"), (2, "zero_point"), (3, "no .*qweight")):
        with pytest.raises(InputError, match=need):
            mk.load_experts(tmp_path, layer, config=tmp_path / "plain.json")
    assert mk.load_experts(tmp_path, 0, config=tmp_path / "plain.json")


def test_config_argument_replaces_config_json(tmp_path: Path) -> None:
    """`config=` makes it possible to load a layer that config.json describes wrongly."""
    sample = write_mixed(tmp_path, {0: "awq", 1: "bf16"}, AWQ)[1]
    with pytest.raises(WeightsError, match=r"no .*1.mlp.experts.0.gate_proj.qweight"):
        mk.load_experts(tmp_path, 1)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "plain.json").write_text(json.dumps(config))
    loaded = mk.load_experts(tmp_path, 1, config=tmp_path / "plain.json")
    assert compute_relative_error(sample, bind_kernel(loaded)) <= CHECKPOINT_FORMATS["bf16"].bound


def test_partly_quantized_experts_are_refused(tmp_path: Path) -> None:
    excluded = f"{EXPERTS.format(1)}.2.up_proj"
    write_mixed(tmp_path, {0: "awq", 1: "awq"}, AWQ | {"modules_to_not_convert": [excluded]})
    message = (
        rf"experts of layer 1: got int4\S+ \(awq\) of {EXPERTS.format(1)}.0.gate_proj and none of "
        rf"{excluded} \(modules_to_not_convert has '{excluded}'\), need one format"
    )
    for load in (
        lambda: mk.load_experts(tmp_path, 1),
        lambda: inspect(tmp_path),
        lambda: FusedMoE.from_config(tmp_path, 1, top_k=2),
    ):
        with pytest.raises(ConfigurationError, match=message):
            load()
    assert mk.load_experts(tmp_path, 0)


def test_files_that_contradict_the_config_are_refused(tmp_path: Path) -> None:
    kinds, quantization = MIXED["fp8, excluded layers"]
    write_mixed(tmp_path, kinds, quantization)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = f"{EXPERTS.format(1)}.3.down_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, path)
    with pytest.raises(DtypeError, match=rf"{name}: got float8_e4m3fn, need bfloat16"):
        mk.load_experts(tmp_path, 1)
    save_file(tensors | {f"{name}_scale_inv": torch.ones(1, 2)}, path)
    with pytest.raises(WeightsError, match=rf"{name}_scale_inv, need 4 unquantized experts"):
        mk.load_experts(tmp_path, 1)


def test_hf_quant_config_json_of_modelopt_is_read(tmp_path: Path) -> None:
    sample = write_mixed(tmp_path, {0: "modelopt nvfp4", 1: "bf16"}, None)[0]
    with pytest.raises(InputError):
        mk.load_experts(tmp_path, 0)
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["model.layers.1*"]}
    content = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    bound = CHECKPOINT_FORMATS["modelopt nvfp4"].bound
    assert compute_relative_error(sample, bind_kernel(mk.load_experts(tmp_path, 0))) <= bound
    assert mk.load_experts(tmp_path, 1).problem_fields["quant"] == "none"


# Multi-token prediction (MTP) layers, whose numbers follow those of the layers of the model


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "not listed"])
def test_unquantized_mtp_layer_is_loaded(listed: bool, tmp_path: Path) -> None:
    """Quantizers skip MTP layers, often without listing them."""
    exclusions = {"modules_to_not_convert": ["model.layers.2"]} if listed else {}
    samples = write_mixed(tmp_path, {0: "awq", 1: "awq", 2: "bf16"}, AWQ | exclusions, num_layers=2)
    report = inspect(tmp_path)
    assert report.layers == (0, 1)
    assert report.mtp_layers == ((2, "unquantized"),)
    assert str(report).endswith("bytes; MTP layer 2 unquantized")
    for layer, kind in ((1, "awq"), (2, "bf16")):
        loaded = mk.load_experts(tmp_path, layer)
        assert (
            compute_relative_error(samples[layer], bind_kernel(loaded))
            <= CHECKPOINT_FORMATS[kind].bound
        )
    # An unquantized layer of the model itself must be listed.
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if listed:
        assert mk.load_experts(tmp_path, 2)
    else:
        with pytest.raises(WeightsError, match=r"no .*2.mlp.experts.0.gate_proj.qweight"):
            mk.load_experts(tmp_path, 2)


def test_quantized_mtp_layer_is_loaded(tmp_path: Path) -> None:
    samples = write_mixed(tmp_path, {0: "awq", 1: "awq"}, AWQ, num_layers=1)
    assert inspect(tmp_path).mtp_layers == ((1, f"in {mk.load_experts(tmp_path, 0).format}"),)
    bound = CHECKPOINT_FORMATS["awq"].bound
    assert compute_relative_error(samples[1], bind_kernel(mk.load_experts(tmp_path, 1))) <= bound


def test_invalid_mtp_layer_is_reported(tmp_path: Path) -> None:
    write_mixed(tmp_path, {0: "awq", 1: "deepseek fp8"}, AWQ, num_layers=1)
    report = inspect(tmp_path)
    assert report.layers == (0,)
    ((layer, state),) = report.mtp_layers
    assert layer == 1
    assert state.startswith("cannot be loaded (")
    assert "1.mlp.experts.0.gate_proj.qweight" in state
    with pytest.raises(WeightsError, match=r"1.mlp.experts.0.gate_proj.qweight"):
        mk.load_experts(tmp_path, 1)


def test_dtype_of_the_files_is_used_without_one_in_the_config(tmp_path: Path) -> None:
    kinds, quantization = MIXED["AWQ and bf16"]
    write_mixed(tmp_path, kinds, quantization)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["torch_dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = inspect(tmp_path)
    assert report.is_dtype_from_files
    assert report.converted_dtypes == ()
    assert report.groups[0].problem_fields["dtype"] == "bfloat16"
