"""Variants of checkpoint formats: mxfp8, the fp8 formats of FBGEMM, ModelOpt and Quark, AutoRound's
packings, and E8M0 scales.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mixed_samples import write_mixed
from safetensors.torch import load_file, save_file

import modular_kernel as mk
from modular_kernel.checkpoints.formats import format_of
from modular_kernel.checkpoints.inspection import inspect
from modular_kernel.checkpoints.quantization_map import QuantizationMap
from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError, WeightsError
from modular_kernel.models.quantization_aliases import REFUSED_ALGORITHMS, REFUSED_METHODS
from modular_kernel.quant.quantized_weights import dequantize_weights
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.testing.checkpoints.published_formats import CHECKPOINT_FORMATS
from modular_kernel.testing.checkpoints.samples import (
    FAMILIES,
    Tensors,
    per_expert_modules,
    write,
)

AUTO_ROUND = CHECKPOINT_FORMATS["auto-round"].config


def edit_checkpoint_tensors(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_fbgemm_scales_of_llama4_load_in_transformers_shapes(tmp_path: Path) -> None:
    """transformers stores the scales of gate_up as (e, 1, 2I) and those of down as (e, H, 1)."""

    def transpose_down_scales(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("down_proj_weight_scale")]:
            scale = tensors.pop(name)
            tensors[name.replace("_weight_scale", "_scale")] = scale.mT.contiguous()
        assert {t.shape for n, t in tensors.items() if n.endswith("scale")} == {
            torch.Size([4, 1, 512]),
            torch.Size([4, 128, 1]),
        }

    sample = write(tmp_path, "llama4_text", "fbgemm fp8, fused", change=transpose_down_scales)
    loaded = mk.load_experts(tmp_path, 0)
    for name, exact in (("w1", sample.w1), ("w2", sample.w2)):
        values = dequantize_weights(loaded.weights, name, loaded.problem(1)).double()
        torch.testing.assert_close(values, exact, rtol=1e-6, atol=1e-12)
    second_tp_rank = mk.load_experts(tmp_path, 0, tp=(1, 2))
    w1 = dequantize_weights(second_tp_rank.weights, "w1", second_tp_rank.problem(1)).double()
    exact = torch.cat([sample.w1[:, 128:256], sample.w1[:, 384:512]], 1)
    torch.testing.assert_close(w1, exact, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("kind", ["mxfp8", "modelopt mxfp8", "mxfp4, E8M0 dtype"])
def test_nan_e8m0_scale_is_refused(kind: str, tmp_path: Path) -> None:
    family = "gpt_oss" if kind == "mxfp4, E8M0 dtype" else "qwen3_moe"

    def set_scale_to_nan(tensors: Tensors) -> None:
        """Set a scale of expert 2 to 255, the code of NaN."""
        if family == "gpt_oss":  # one tensor has the scales of all experts
            name = next(name for name in tensors if name.endswith("gate_up_proj_scales"))
            tensors[name].view(torch.uint8)[2, 0, 0] = 255
        else:
            name = next(n for n in tensors if ".2." in n and "scale" in n and "up" in n)
            tensors[name].view(torch.uint8)[0, 0] = 255

    write(tmp_path, family, kind, change=set_scale_to_nan)
    with pytest.raises(WeightsError, match=r"scale: got (nan|255)"):
        mk.load_experts(tmp_path, 0)


def test_dimensions_of_size_1_are_squeezed_only_in_scales(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_moe", "modelopt fp8 block, weights")
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    edit_checkpoint_tensors(tmp_path, lambda t: t.update({name: t[name][:, None]}))
    with pytest.raises(ShapeError, match=rf"{name}: got \(256, 1, 128\)"):
        mk.load_experts(tmp_path, 0)
    write(tmp_path, "qwen3_moe", "modelopt fp8 block, weights")
    scale = f"{name}_scale"
    edit_checkpoint_tensors(tmp_path, lambda t: t.update({scale: t[scale].reshape(1, 2)}))
    with pytest.raises(ShapeError, match=rf"{scale}: got \(1, 2\), need \(2, 1\)"):
        mk.load_experts(tmp_path, 0)


def test_uint8_scales_are_accepted_only_for_mxfp8(tmp_path: Path) -> None:
    def make_uint8_scales(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("scale_inv")]:
            tensors[name] = torch.full(tensors[name].shape, 120, dtype=torch.uint8)

    write(tmp_path, "qwen3_moe", "qwen3 fp8", change=make_uint8_scales)
    with pytest.raises(DtypeError, match="weight_scale_inv: got uint8"):
        mk.load_experts(tmp_path, 0)


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        ({}, "int4_w4a16_group:group=64"),
        ({"packing_format": "auto_round:gptq", "bits": 8}, "int8_w8a16_group:group=64"),
        ({"packing_format": "auto_round:gptqmodel", "sym": False},
         "int4_w4a16_group:group=64,zero_points=true"),
        ({"packing_format": "auto_round:auto_awq"}, "int4_w4a16_group:group=64"),
        ({"packing_format": "auto_round:awq", "sym": False},
         "int4_w4a16_group:group=64,zero_points=true"),
    ],
)  # fmt: skip
def test_auto_round_packings_are_read(config: dict[str, Any], scheme: str) -> None:
    format = format_of(AUTO_ROUND | config)
    assert str(format.scheme) == scheme
    packing = config.get("packing_format", "auto_round:auto_gptq")
    assert format.method == ("awq" if "awq" in packing else "gptq")
    assert format.minus_one == ("gptqmodel" not in packing)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"packing_format": "auto_round:llm_compressor"}, "packing_format = .*llm_compressor"),
        ({"data_type": "mx_fp"}, "data_type = 'mx_fp'"),
        ({"act_bits": 8}, "act_bits = 8"),
        ({"bits": 3}, "bits = 3"),
    ],
)
def test_unsupported_auto_round_variants_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        format_of(AUTO_ROUND | config)


def test_auto_round_extra_config_sets_symmetry_in_awq_packing(tmp_path: Path) -> None:
    """AutoRound's extra_config names this option `sym`, and AWQ's config names it `zero_point`."""
    expert_options = {"model.layers.0.mlp.experts": {"sym": False}}
    config = AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "extra_config": expert_options}
    sample = write(tmp_path, "qwen3_moe", "auto-round, AWQ")
    model_config = sample.config | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(model_config))
    loaded = mk.load_experts(tmp_path, 0)
    assert str(loaded.format) == "int4_w4a16_group:group=64,zero_points=true (awq)"
    assert inspect(tmp_path).problem_fields["quant"] == loaded.problem_fields["quant"]


def quark_mxfp4_config(**changes: Any) -> dict[str, Any]:
    """Return Quark's config of mxfp4, with `changes` applied to the options of the weights."""
    config = json.loads(json.dumps(CHECKPOINT_FORMATS["quark mxfp4"].config))
    config["global_quant_config"]["weight"] |= changes
    return config


@pytest.mark.parametrize(
    ("weight", "inputs", "scheme"),
    [
        ({"dtype": "fp4"}, None, "mxfp4_w4a16"),
        ({"dtype": "fp8_e4m3"}, None, "fp8_w8a16_block:block=1x32"),
        ({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, None, "fp8_w8a16_tensor"),
        ({"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 128]},
         {"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 128, "is_dynamic": True},
         "fp8_w8a8_block"),
    ],
)  # fmt: skip
def test_quark_specs_select_the_scheme(weight: Any, inputs: Any, scheme: str) -> None:
    config = quark_mxfp4_config(**weight)
    config["global_quant_config"]["input_tensors"] = inputs
    assert str(format_of(config).scheme) == scheme
    config["global_quant_config"]["weight"] = [config["global_quant_config"]["weight"]]
    assert str(format_of(config).scheme) == scheme


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (quark_mxfp4_config(dtype="int4"), "need fp8 per tensor"),
        (quark_mxfp4_config(group_size=64), "need fp8 per tensor"),
        (quark_mxfp4_config(is_dynamic=True), "need fp8 per tensor"),
        (quark_mxfp4_config(symmetric=False), "weight.symmetric = False"),
        (quark_mxfp4_config(is_scale_quant=True), "weight.is_scale_quant = True"),
        (quark_mxfp4_config(rotated=1), "weight.rotated = 1"),
        (quark_mxfp4_config() | {"algo_config": [{"name": "rotation"}]}, "algo_config: 'rotation'"),
        (quark_mxfp4_config()
         | {"layer_type_quant_config": {"Linear": {"weight": None}, "x": {"y": 1}}},
         "layer_type_quant_config"),
        (quark_mxfp4_config() | {"export": {"weight_format": "fake_quantized"}}, "weight_format"),
        (quark_mxfp4_config() | {"global_quant_config": None}, "global_quant_config = None"),
        (quark_mxfp4_config() | {"rotation": {"r1": 1}}, "rotation"),
    ],
)  # fmt: skip
def test_unsupported_quark_specs_are_refused(config: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        format_of(config)


QUARK_PTPC = CHECKPOINT_FORMATS["quark fp8, channels"].config


def quark_ptpc_config(weight_axis: int | None, input_axis: int | None) -> dict[str, Any]:
    """Return Quark's config of fp8 per token and channel (PTPC) with the given scale axes."""
    config = json.loads(json.dumps(QUARK_PTPC))
    for name, axis in (("weight", weight_axis), ("input_tensors", input_axis)):
        config["global_quant_config"][name]["ch_axis"] = axis
    return config


@pytest.mark.parametrize("axes", [(0, 1), (0, 0), (None, None)])
def test_quark_scale_axes_are_accepted(axes: tuple[int | None, int | None]) -> None:
    assert str(format_of(quark_ptpc_config(*axes)).scheme) == "fp8_w8a8_channel"
    assert str(format_of(quark_mxfp4_config(ch_axis=1)).scheme) == "mxfp4_w4a16"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (quark_ptpc_config(1, 1), "weight.ch_axis = 1, need 0$"),
        (quark_ptpc_config(-1, 1), "weight.ch_axis = -1, need 0$"),
        (quark_ptpc_config(0, -1), "input_tensors.ch_axis = -1, need 0 or 1$"),
        (quark_mxfp4_config(ch_axis=0), "weight.ch_axis = 0, need 1 or -1$"),
    ],
)
def test_quark_scales_along_another_axis_are_refused(config: Any, message: str) -> None:
    """If a matrix is square, the shape of its scales is the same for both axes."""
    with pytest.raises(ConfigurationError, match=message):
        format_of(config)


@pytest.mark.parametrize(
    "name",
    [
        "*.experts.*",
        "*down_proj",
        "model.layers.0.*",
        "model.layers.[0-3].mlp.experts.*",
        "model.layers.?.mlp.experts.*",
        "model.layers.1?.*",
        "*.experts.[!0].up_proj",
    ],
)
def test_quark_options_that_differ_between_experts_need_module_names(name: str) -> None:
    """`format_of` returns one format for all experts, so it cannot represent options that differ
    between experts. `QuantizationMap` returns the format of each module.
    """
    options = QUARK_PTPC["global_quant_config"]  # type: ignore[index]
    config = quark_mxfp4_config() | {"layer_quant_config": {name: options}}
    message = re.escape(f"layer_quant_config has {name!r}, need the same options for all experts")
    with pytest.raises(ConfigurationError, match=message):
        format_of(config)
    global_options = quark_mxfp4_config()
    assert format_of(
        global_options | {"layer_quant_config": {name: global_options["global_quant_config"]}}
    )
    options_of_other_modules = {
        "*self_attn*": options,
        "model.layers.?.mlp.shared_expert.*": options,
    }
    assert (
        str(
            format_of(
                quark_mxfp4_config() | {"layer_quant_config": options_of_other_modules}
            ).scheme
        )
        == "mxfp4_w4a16"
    )
    config["layer_quant_config"] = {name.replace("down_proj", "up_proj"): options}
    formats = QuantizationMap(config)
    assert str(formats.format_of("model.layers.0.mlp.experts.0.down_proj")) in (
        "mxfp4_w4a16 (quark)",
        "fp8_w8a8_channel (quark)",
    )


def test_quark_layers_may_have_different_formats(tmp_path: Path) -> None:
    """One layer is excluded from quantization, one is in fp8, and one has the global options."""
    fp8 = CHECKPOINT_FORMATS["quark fp8, channels"].config["global_quant_config"]  # type: ignore[index]
    config = quark_mxfp4_config() | {
        "exclude": ["lm_head", "*.1.mlp.*"],
        "layer_quant_config": {"model.layers.2.*": fp8},
    }
    kinds = {0: "quark mxfp4", 1: "bf16", 2: "quark fp8, channels"}
    samples = write_mixed(tmp_path, kinds, config)
    for layer, kind in kinds.items():
        loaded = mk.load_experts(tmp_path, layer)
        quant = str(loaded.problem_fields["quant"])
        assert quant == CHECKPOINT_FORMATS[kind].scheme
        if quant != "none":
            w1 = dequantize_weights(loaded.weights, "w1", loaded.problem(1)).double()
            torch.testing.assert_close(w1, samples[layer].w1, rtol=1e-6, atol=1e-12)


def test_expert_dtype_applies_only_to_experts(tmp_path: Path) -> None:
    """`expert_dtype` is a key of config.json or of its quantization_config. Modules that are not
    experts are in block-scaled fp8.
    """
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for in_quantization_config, in_config in ((None, "fp4"), ("fp4", None)):
        config = quantization | (
            {} if in_quantization_config is None else {"expert_dtype": in_quantization_config}
        )
        formats = QuantizationMap(config, expert_dtype=in_config)
        expert_format = formats.format_of("layers.0.ffn.experts.3.w1")
        assert str(expert_format) == "mxfp4_w4a16 (fp8)"
        for module in ("layers.0.attn.wq_a", "layers.0.ffn.shared_experts.w1"):
            assert str(formats.format_of(module)) == "fp8_w8a8_block (fp8)"
    write(tmp_path, "deepseek_v4", "deepseek fp4")
    model_config = json.loads((tmp_path / "config.json").read_text())
    del model_config["quantization_config"]["expert_dtype"]
    (tmp_path / "config.json").write_text(json.dumps(model_config | {"expert_dtype": "fp4"}))
    assert mk.load_experts(tmp_path, 0).problem_fields["quant"] == "mxfp4_w4a16"
    (tmp_path / "config.json").write_text(json.dumps(model_config))
    with pytest.raises(ShapeError, match=r"w1.weight: got \(256, 64\), need \(256, 128\)"):
        mk.load_experts(tmp_path, 0)


@pytest.mark.parametrize(("family", "block"), [
    ("granitemoe", "block_sparse_moe.experts"),
    ("step3p5", "moe.experts"),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["bf16", "compressed fp8 channel", "compressed int4"])
def test_stacked_families_may_be_stored_per_expert(
    family: str, block: str, kind: str, tmp_path: Path
) -> None:
    """llm-compressor stores one module per expert, although transformers stacks the experts of
    these families.
    """
    names = replace(FAMILIES[family], names=per_expert_modules(block))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, family, names)
        sample = write(tmp_path, family, kind)
    assert f"model.layers.0.{block}.3.down_proj." in " ".join(
        load_file(tmp_path / "model.safetensors")
    )
    second_ep_rank = mk.load_experts(tmp_path, 0, ep=(1, 2))
    for loaded, first_expert in ((mk.load_experts(tmp_path, 0), 0), (second_ep_rank, 2)):
        quant = str(loaded.problem_fields["quant"])
        assert str(QuantScheme.parse(quant)) == CHECKPOINT_FORMATS[kind].scheme
        for name, exact in (("w1", sample.w1), ("w2", sample.w2)):
            stored = getattr(loaded.weights, name)
            if quant != "none":
                stored = dequantize_weights(loaded.weights, name, loaded.problem(1))
            torch.testing.assert_close(stored.double(), exact[first_expert:], rtol=1e-6, atol=1e-12)
    assert inspect(tmp_path).layers == (0,)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "mxfp8", "weight_block_size": [128, 128]}, "weight_block_size"),
        ({"quant_method": "mxfp8", "fmt": "e5m2"}, "fmt = 'e5m2'"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 16}, "group_size = 16"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "group_size": 64}, "group_size"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": "big"}, "activation_scale_ub"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 448.0}, "448.0, need 1200 or more"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": float("nan")}, "nan, need 1200"),
        ({"quant_method": "fbgemm_fp8", "transposed": True}, "transposed"),
    ],
)
def test_unsupported_variants_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        format_of(config)


REFUSED_CASES = [
    *(({"quant_method": name}, *explanation) for name, explanation in REFUSED_METHODS.items()),
    *(
        ({"quant_method": "modelopt", "quant_algo": name}, *explanation)
        for name, explanation in REFUSED_ALGORITHMS.items()
    ),
]


@pytest.mark.parametrize(("config", "meaning", "alternative"), REFUSED_CASES)
def test_errors_of_refused_methods_explain_them_and_name_an_alternative(
    config: dict[str, str], meaning: str, alternative: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        format_of(config)
    assert list(config.values())[-1] in str(caught.value.got)
    assert meaning in str(caught.value.got)
    assert str(caught.value.need) == alternative


@pytest.mark.parametrize("inputs", ["int", "float"])
def test_int4_weights_with_8_bit_activations_are_loaded_as_weight_only(inputs: str) -> None:
    weight_only = CHECKPOINT_FORMATS["compressed int4"].config
    config = json.loads(json.dumps(weight_only))
    activations = {"num_bits": 8, "type": inputs, "strategy": "token", "dynamic": True}
    config["config_groups"]["group_0"]["input_activations"] = activations
    format, expected = format_of(config), format_of(weight_only)
    assert format.scheme == expected.scheme
    assert format.stored_tensors == expected.stored_tensors
    assert "activations stay in 16 bits" in str(format)
    assert "activations stay in 16 bits" not in str(expected)
    with pytest.raises(ConfigurationError, match="need nvfp4 files"):
        format.with_inputs()


@pytest.mark.parametrize("changed", [{"dynamic": False}, {"strategy": "tensor"}, {"num_bits": 4}])
def test_int4_weights_with_other_activations_are_refused(changed: dict[str, object]) -> None:
    config = json.loads(json.dumps(CHECKPOINT_FORMATS["compressed int4"].config))
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True} | changed
    config["config_groups"]["group_0"]["input_activations"] = activations
    message = r"weights \{'num_bits': 4.*input_activations \{'num_bits': .*need .*int4 per group"
    with pytest.raises(ConfigurationError, match=message):
        format_of(config)
