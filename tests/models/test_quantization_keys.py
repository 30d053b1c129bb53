"""Every key of a quantization_config that can change numbers is used, or refused by name."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_configs import FP8_QUANTIZATION_CONFIG, MIXTRAL, write_config
from run_mk import run_mk

import modular_kernel as mk
from modular_kernel.checkpoints.formats import format_of
from modular_kernel.errors import ConfigurationError
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.models.config_file import problem_fields_of_file
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.testing.checkpoints.published_formats import CHECKPOINT_FORMATS

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
MODELOPT_NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
HADAMARD_TRANSFORM = {
    "config_groups": {
        "u": {
            "type": "hadamard",
            "apply": [{"targets": ["re:.*down_proj$"], "location": "input", "ignore": []}],
        }
    }
}


def make_compressed_config(group: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Return a quantization_config with all keys that compressed-tensors writes."""
    weights = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 128,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": None,
        "strategy": "group",
        "symmetric": True,
        "type": "int",
        "zp_dtype": "torch.int8",
    }
    group_0 = {
        "format": "pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group_0 | (group or {})},
        "format": "pack-quantized",
        "global_compression_ratio": None,
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.15.1",
    } | more


def change_weights(**more: Any) -> dict[str, Any]:
    """Return a group for `make_compressed_config` whose weights have these keys."""
    weights: dict[str, Any] = make_compressed_config()["config_groups"]["group_0"]["weights"]
    return {"weights": weights | more}


REFUSED_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "a transform": (
        make_compressed_config(transform_config=HADAMARD_TRANSFORM),
        "transform_config",
    ),
    "a key of compressed-tensors": (make_compressed_config(smoothing={"alpha": 0.5}), "smoothing"),
    "quantized outputs": (
        make_compressed_config({"output_activations": {"num_bits": 8, "type": "float"}}),
        "config_groups.group_0.output_activations",
    ),
    "a key of a group": (
        make_compressed_config({"bias_shift": 3}),
        "config_groups.group_0.bias_shift",
    ),
    "a key of weights": (
        make_compressed_config(change_weights(codebook="nf4")),
        "config_groups.group_0.weights.codebook",
    ),
    "a key of activations": (
        make_compressed_config({"input_activations": {"num_bits": 8, "clip": 3.0}}),
        "config_groups.group_0.input_activations.clip",
    ),
    "weights quantized at run time": (
        make_compressed_config(change_weights(dynamic=True)),
        "dynamic",
    ),
    "asymmetric float8": (
        make_compressed_config(
            {
                "format": "float-quantized",
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "channel",
                    "symmetric": False,
                },
            }
        ),
        "symmetric",
    ),
    "compressed-tensors, dequantized": (make_compressed_config(dequantize=True), "dequantize"),
    "GPTQ rotated": (GPTQ | {"rotation": "hadamard"}, "rotation"),
    "GPTQ and an adapter": (GPTQ | {"adapter": {"name": "lora", "rank": 64}}, "adapter"),
    "GPTQ in Marlin's order": (GPTQ | {"is_marlin_format": True}, "is_marlin_format"),
    "GPTQ packed in int16": (GPTQ | {"pack_dtype": "int16"}, "pack_dtype"),
    "GPTQ in two versions": (GPTQ | {"format": "gptq_v2", "checkpoint_format": "gptq"}, "format"),
    "quantized inputs of GPTQ": (GPTQ | {"act_bits": 8}, "act_bits"),
    "double scales": (GPTQ | {"super_bits": 6, "super_group_size": 8}, "super_bits"),
    "a key of AWQ": (AWQ | {"smooth_inputs": True}, "smooth_inputs"),
    "AWQ packed by llm-awq": (AWQ | {"backend": "llm-awq"}, "backend"),
    "AWQ in the order of gemv": (AWQ | {"format": "gemv"}, "format"),
    "AWQ in act-order": (AWQ | {"desc_act": True}, "desc_act"),
    "a key of fp8": (FP8_QUANTIZATION_CONFIG | {"hadamard": True}, "hadamard"),
    "fp8, dequantized": (FP8_QUANTIZATION_CONFIG | {"dequantize": True}, "dequantize"),
    "fp8 by tensor and by block": (
        FP8_QUANTIZATION_CONFIG | {"weight_per_tensor": True},
        "weight_per_tensor",
    ),
    "a key of mxfp4": ({"quant_method": "mxfp4", "rotation": "random"}, "rotation"),
    "modelopt with scaled inputs": (MODELOPT_NVFP4 | {"pre_quant_scale": True}, "pre_quant_scale"),
    "modelopt in several formats": (
        MODELOPT_NVFP4 | {"quantized_layers": {"a": {"quant_algo": "FP8"}}},
        "quantized_layers",
    ),
    "a key of modelopt's weights": (
        MODELOPT_NVFP4 | {"weights": {"rotate": True}},
        "weights.rotate",
    ),
    "a key of modelopt's groups": (
        MODELOPT_NVFP4
        | {"config_groups": {"g": {"targets": ["Linear"], "weights": {"rotate": 1}}}},
        "config_groups.g.weights.rotate",
    ),
}


@pytest.mark.parametrize(("config", "key"), REFUSED_CONFIGS.values(), ids=REFUSED_CONFIGS.keys())
def test_keys_that_could_change_numbers_are_refused(
    tmp_path: Path, config: dict[str, Any], key: str
) -> None:
    for read in (
        lambda: problem_fields_of_file(
            write_config(tmp_path, MIXTRAL | {"quantization_config": config})
        ),
        lambda: format_of(config),
    ):
        with pytest.raises(ConfigurationError, match=r"quantization_config: got") as caught:
            read()
        assert key in str(caught.value.got)
        assert caught.value.need


# Configs whose format differs between modules.
CONFIGS_BY_MODULE: dict[str, tuple[dict[str, Any], str]] = {
    "GPTQ with other experts": (GPTQ | {"dynamic": {"+:.*experts.*": {"bits": 8}}}, "dynamic"),
    "GPTQ with other experts of a layer": (
        GPTQ | {"dynamic": {r"model\.layers\.3\.mlp\..*": {"sym": False}}},
        "dynamic",
    ),
    "compressed-tensors with a group for some layers": (
        make_compressed_config()
        | {
            "config_groups": make_compressed_config()["config_groups"]
            | {
                "group_1": {
                    "targets": [r"re:.*layers\.[01]\.mlp\.experts\..*"],
                    "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                }
            }
        },
        "config_groups.group_1",
    ),
    "GPTQ with other layers with one digit": (
        GPTQ | {"dynamic": {r"+:model\.layers\.[0-3]\.mlp\..*": {"bits": 8}}},
        "dynamic",
    ),
    "GPTQ with other layers with two digits": (
        GPTQ | {"dynamic": {r"+:model\.layers\.\d{2}\.mlp\..*": {"bits": 8}}},
        "dynamic",
    ),
    "GPTQ without experts": (GPTQ | {"dynamic": {r"-:.*\.experts\..*": {}}}, "dynamic"),
    "GPTQ of a nested model": (
        GPTQ | {"dynamic": {r"model\.language_model\.layers\.0\.mlp\.experts.*": {"bits": 8}}},
        "dynamic",
    ),
    "auto-round, other experts": (
        GPTQ | {"extra_config": {"model.layers.0.mlp.experts.1.w1": {"bits": 8}}},
        "extra_config",
    ),
    "auto-round, a pattern": (
        GPTQ | {"extra_config": {r".*mlp\.experts.*": {"bits": 16}}},
        "extra_config",
    ),
}


@pytest.mark.parametrize(
    ("config", "key"), CONFIGS_BY_MODULE.values(), ids=CONFIGS_BY_MODULE.keys()
)
def test_formats_that_differ_between_modules_need_a_module_name(
    config: dict[str, Any], key: str
) -> None:
    """`format_of` has no argument for the module. `QuantizationMap.format_of` has one."""
    with pytest.raises(ConfigurationError, match=r"quantization_config: got") as caught:
        format_of(config)
    assert key in str(caught.value.got)


# Complete configs of published models and of quantization tools.
PUBLISHED_CONFIGS: dict[str, dict[str, Any]] = {
    "compressed-tensors": make_compressed_config(),
    "compressed-tensors, older": make_compressed_config(
        sparsity_config={"format": "dense", "global_sparsity": 0.14, "ignore": ["lm_head"]},
        transform_config=None,
        global_compression_ratio=1.88,
    ),
    "compressed-tensors, no transforms": make_compressed_config(
        transform_config={"config_groups": {}}
    ),
    "compressed-tensors, kv cache": make_compressed_config(
        kv_cache_scheme={"num_bits": 8, "type": "float"}
    ),
    "compressed nvfp4": make_compressed_config(
        {
            "format": "nvfp4-pack-quantized",
            "weights": {
                "actorder": "static",
                "dynamic": False,
                "group_size": 16,
                "num_bits": 4,
                "observer": "static_minmax",
                "observer_kwargs": {"averaging_constant": 0.01},
                "scale_dtype": "torch.float8_e4m3fn",
                "strategy": "tensor_group",
                "symmetric": True,
                "type": "float",
                "zp_dtype": "torch.float8_e4m3fn",
            },
            "input_activations": {
                "dynamic": "local",
                "group_size": 16,
                "num_bits": 4,
                "strategy": "tensor_group",
                "symmetric": True,
                "type": "float",
            },
        }
    ),
    "GPTQ of 2023": GPTQ
    | {
        "damp_percent": 0.01,
        "true_sequential": True,
        "model_name_or_path": None,
        "model_file_base_name": "model",
    },
    "GPTQModel": GPTQ
    | {
        "checkpoint_format": "gptq",
        "format": "gptq",
        "method": "gptq",
        "dynamic": {
            "-:.*attn.*": {},
            "-:.*shared_expert.*": {},
            "-:.*mlp.gate$": {},
            r"+:model\.layers\.3\.self_attn\..*": {"bits": 8},
            r"-:.*model\.layers\.0\.linear_attn\.in_proj_b.*": {},
        },
        "lm_head": False,
        "act_group_aware": True,
        "static_groups": False,
        "pack_dtype": "int32",
        "rotation": None,
        "adapter": None,
        "mse": 0.0,
        "meta": {"quantizer": ["gptqmodel:5.8.0"], "uri": "https://github.com"},
    },
    "auto-round as GPTQ": GPTQ
    | {
        "data_type": "int",
        "act_bits": 16,
        "act_dynamic": True,
        "autoround_version": "0.13.0",
        "enable_quanted_input": True,
        "iters": 200,
        "seqlen": 2048,
        "scale_dtype": "torch.float16",
        "block_name_to_quantize": "model.layers",
        "extra_config": {"model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"}},
    },
    "AutoAWQ": AWQ
    | {
        "modules_to_not_convert": ["mlp.gate"],
        "do_fuse": False,
        "fuse_max_seq_len": None,
        "modules_to_fuse": None,
        "exllama_config": None,
        "backend": "autoawq",
    },
    "AWQ and an ignore list": AWQ | {"ignore": [], "modules_to_not_convert": []},
    "deepseek": FP8_QUANTIZATION_CONFIG
    | {"activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0"},
    "qwen3.5 fp8": FP8_QUANTIZATION_CONFIG | {"weight_per_tensor": False, "act_per_tensor": False},
    "minimax fp8": FP8_QUANTIZATION_CONFIG
    | {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias"]},
    "mimo fp8": FP8_QUANTIZATION_CONFIG
    | {"packed_modules_mapping": {}, "ignored_layers": ["model.mtp"]},
    "mistral fp8": {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "dequantize": False,
        "weight_block_size": None,
        "modules_to_not_convert": ["vision_tower", "lm_head"],
    },
    "fp8 with a kv cache": {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "ignored_layers": ["lm_head"],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    },
    "gpt-oss": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    },
    "gpt-oss, dequantized": {"quant_method": "mxfp4", "dequantize": True},
    "nvidia nvfp4": MODELOPT_NVFP4
    | {
        "config_groups": {
            "group_0": {
                "input_activations": {
                    "dynamic": False,
                    "num_bits": 4,
                    "type": "float",
                    "group_size": 16,
                },
                "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                "targets": ["Linear"],
            }
        },
        "ignore": ["lm_head", "model.layers.0.self_attn*"],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.39.0"},
    },
    "nvfp4 with its arguments at the top": MODELOPT_NVFP4
    | {
        "weights": {"num_bits": 4, "type": "float", "group_size": 16},
        "input_activations": {"num_bits": 4, "type": "float", "group_size": 16},
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
        "has_zero_point": False,
        "pre_quant_scale": False,
    },
}


@pytest.mark.parametrize("config", PUBLISHED_CONFIGS.values(), ids=PUBLISHED_CONFIGS.keys())
def test_published_configs_are_read(tmp_path: Path, config: dict[str, Any]) -> None:
    problem_fields = problem_fields_of_file(
        write_config(tmp_path, MIXTRAL | {"quantization_config": config})
    )
    assert QuantScheme.parse(str(problem_fields["quant"])) == format_of(config).scheme


@pytest.mark.parametrize("kind", [name for name, kind in CHECKPOINT_FORMATS.items() if kind.config])
def test_formats_of_all_samples_are_read(kind: str) -> None:
    assert format_of(CHECKPOINT_FORMATS[kind].config, depth=256)


def test_configs_written_by_transformers_are_read() -> None:
    """The configs contain every option of a class with its default value."""
    from transformers import AwqConfig, FineGrainedFP8Config, GPTQConfig, Mxfp4Config

    for config in (
        FineGrainedFP8Config(weight_block_size=[128, 128]),
        Mxfp4Config(),
        GPTQConfig(bits=4),
        AwqConfig(),
    ):
        options = inspect.signature(type(config).__init__).parameters.values()
        defaults = {o.name: o.default for o in options if o.kind is o.POSITIONAL_OR_KEYWORD}
        del defaults["self"]
        content = json.loads(json.dumps(defaults | config.to_dict(), default=str))
        assert format_of(content)


@pytest.mark.parametrize("key", ["format", "checkpoint_format"])
def test_both_names_of_the_zero_point_version_are_read(key: str) -> None:
    assert not format_of(GPTQ | {"sym": False, key: "gptq_v2"}).minus_one
    assert format_of(GPTQ | {"sym": False, key: "gptq"}).minus_one


def test_all_readers_refuse_transforms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from modular_kernel.integrations.transformers import from_pretrained, register
    from modular_kernel.testing.checkpoints.samples import write

    register()
    folder = tmp_path / "sample"
    write(folder, "mixtral", "compressed int4")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["transform_config"] = HADAMARD_TRANSFORM
    (folder / "config.json").write_text(json.dumps(config))
    layer = FusedMoE(
        num_experts=4,
        top_k=2,
        hidden_size=128,
        intermediate_size=256,
        params_dtype=torch.bfloat16,
        quant_config="int4_w4a16_group:group=32",
    )
    for read in (
        lambda: mk.load_experts(folder, layer=0),
        lambda: layer.load(folder, layer=0),
        lambda: from_pretrained(folder),
    ):
        with pytest.raises(ConfigurationError, match=r"got transform_config = .*need no such key"):
            read()
    for command in ("check", "plan", "compose"):
        result = run_mk(capsys, command, "--model", str(folder))
        assert result.code == 2
        assert "transform_config" in result.err
