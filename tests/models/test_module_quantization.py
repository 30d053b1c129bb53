"""The formats that a quantization_config gives to the experts of each layer."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from model_configs import (
    DEEPSEEK,
    FP8_QUANTIZATION_CONFIG,
    GPT_OSS,
    MIXTRAL,
    NEMOTRON,
    QWEN3,
    without,
    write_config,
)

from modular_kernel.checkpoints.quantization_map import QuantizationMap
from modular_kernel.errors import ConfigurationError
from modular_kernel.models.config_file import layers_of_file, problem_fields_of_file

Config = dict[str, Any]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
MODELOPT_BASE = {"quant_method": "modelopt"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
INT4_GROUP = {"weights": INT4, "input_activations": None, "format": "pack-quantized"}
FP8_GROUP = {"weights": CHANNEL, "input_activations": TOKEN, "format": "float-quantized"}
NVFP4_GROUP = {"weights": NVFP4, "input_activations": NVFP4, "format": "nvfp4-pack-quantized"}
G128, G64 = "int4_w4a16_group:group=128", "int4_w4a16_group:group=64"
G32, G128_ZERO_POINTS = "int4_w4a16_group:group=32", "int4_w4a16_group:group=128,zero_points=true"
FP8_BLOCK = "fp8_w8a8_block:block=128x128"
FP8_CHANNEL = "fp8_w8a8_channel"
FP8_STATIC = "fp8_w8a8_tensor:static=true"


def make_compressed_config(*entries: tuple[list[str], Config], **more: Any) -> Config:
    group_by_name = {
        f"group_{n}": group | {"targets": targets} for n, (targets, group) in enumerate(entries)
    }
    return {"quant_method": "compressed-tensors", "config_groups": group_by_name} | more


def make_qwen(layers: int = 4) -> Config:
    return QWEN3 | {"num_hidden_layers": layers}


def make_deepseek(layers: int = 6, dense: int = 3) -> Config:
    config = without(DEEPSEEK, "quantization_config")
    return config | {"num_hidden_layers": layers, "first_k_dense_replace": dense}


def list_module_names(layers: range, *modules: str) -> list[str]:
    return [f"model.layers.{layer}.{module}" for layer in layers for module in modules]


QWEN_FP8 = list_module_names(
    range(4), "input_layernorm", "mlp.gate", "self_attn.q_norm", "self_attn.k_norm"
)
QUANTIZED_EXPERTS = {
    f"backbone.layers.{layer}.mixer.experts.{e}.{name}": {"quant_algo": "NVFP4", "group_size": 16}
    for layer in (1, 3)
    for e in range(128)
    for name in ("up_proj", "down_proj")
}
# The config, the quantization_config, and the layers of each scheme, by the name of a repository.
# The quantization_configs were written from memory of the repositories' files, with lists of layers
# shortened to the layers of the test. "reconstructed" marks a quantization_config that a tool
# writes for such a model, not that of a repository.
MODELS: dict[str, tuple[Config, Config, dict[tuple[int, ...], str]]] = {
    # Whole models
    "deepseek-ai/DeepSeek-V3": (
        make_deepseek(),
        FP8_QUANTIZATION_CONFIG | {"activation_scheme": "dynamic", "fmt": "e4m3"},
        {(3, 4, 5): FP8_BLOCK},
    ),
    "deepseek-ai/DeepSeek-V3.1": (
        make_deepseek(),
        FP8_QUANTIZATION_CONFIG
        | {"activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0"},
        {(3, 4, 5): FP8_BLOCK},
    ),
    "Qwen/Qwen3-30B-A3B-FP8": (
        make_qwen(),
        FP8_QUANTIZATION_CONFIG
        | {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": ["lm_head", *QWEN_FP8],
        },
        {(0, 1, 2, 3): FP8_BLOCK},
    ),
    "Qwen/Qwen3-30B-A3B-GPTQ-Int4": (
        make_qwen(),
        GPTQ
        | {
            "checkpoint_format": "gptq",
            "damp_percent": 0.01,
            "lm_head": False,
            "static_groups": False,
            "sym": True,
            "true_sequential": True,
        },
        {(0, 1, 2, 3): G128},
    ),
    "Qwen/Qwen3-235B-A22B-Instruct AWQ by the community": (
        make_qwen(),
        AWQ | {"modules_to_not_convert": ["mlp.gate"]},
        {(0, 1, 2, 3): G128_ZERO_POINTS},
    ),
    "openai/gpt-oss-20b": (
        without(GPT_OSS, "quantization_config") | {"num_hidden_layers": 4},
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                *("model.layers.*.self_attn", "model.layers.*.mlp.router"),
                *("model.embed_tokens", "lm_head"),
            ],
        },
        {(0, 1, 2, 3): "mxfp4_w4a16"},
    ),
    "MiniMaxAI/MiniMax-M2": (
        MIXTRAL | {"model_type": "minimax_m2", "num_hidden_layers": 3},
        FP8_QUANTIZATION_CONFIG
        | {
            "activation_scheme": "dynamic",
            "fmt": "float8_e4m3fn",
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
        {(0, 1, 2): FP8_BLOCK},
    ),
    "moonshotai/Kimi-K2-Thinking": (
        make_deepseek(4, 1),
        make_compressed_config(
            (["Linear"], INT4_GROUP),
            format="pack-quantized",
            ignore=[
                *("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"),
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            ],
        ),
        {(1, 2, 3): G32},
    ),
    "nvidia/DeepSeek-R1-FP4": (
        make_deepseek(),
        MODELOPT_BASE
        | {
            "quant_algo": "NVFP4",
            "group_size": 16,
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head", *list_module_names(range(6), "self_attn*")],
        },
        {(3, 4, 5): "nvfp4_w4a16"},
    ),
    "nvidia/Qwen3-30B-A3B-NVFP4": (
        make_qwen(),
        MODELOPT_BASE
        | {
            "quant_algo": "NVFP4",
            "config_groups": {"group_0": NVFP4_GROUP | {"targets": ["Linear"]}},
            "ignore": ["lm_head", *list_module_names(range(4), "mlp.gate")],
        },
        {(0, 1, 2, 3): "nvfp4_w4a16"},
    ),
    "RedHatAI/Qwen3-30B-A3B-FP8-dynamic": (
        make_qwen(),
        make_compressed_config((["Linear"], FP8_GROUP), ignore=["lm_head", "re:.*mlp.gate$"]),
        {(0, 1, 2, 3): FP8_CHANNEL},
    ),
    "RedHatAI/Qwen3-30B-A3B-quantized.w4a16": (
        make_qwen(),
        make_compressed_config(
            (["Linear"], INT4_GROUP), ignore=["lm_head", *list_module_names(range(4), "mlp.gate")]
        ),
        {(0, 1, 2, 3): G32},
    ),
    "RedHatAI/Mixtral-8x7B-Instruct-v0.1-FP8": (
        MIXTRAL | {"num_hidden_layers": 3},
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": [*list_module_names(range(3), "block_sparse_moe.gate"), "lm_head"],
        },
        {(0, 1, 2): FP8_STATIC},
    ),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8": (
        NEMOTRON | {"num_hidden_layers": 4, "hybrid_override_pattern": "MEME"},
        MODELOPT_BASE
        | {"quant_algo": "FP8", "exclude_modules": ["lm_head", "backbone.layers.0.mixer.in_proj"]},
        {(1, 3): FP8_STATIC},
    ),
    # Excluded layers
    "QuantTrio AWQ with first layers in 16 bits": (
        make_qwen(),
        AWQ | {"modules_to_not_convert": ["model.layers.0.", "model.layers.1.", "visual"]},
        {(0, 1): "none", (2, 3): G128_ZERO_POINTS},
    ),
    "AWQ of a multimodal model, by the other prefix (reconstructed)": (
        make_qwen(),
        AWQ | {"modules_to_not_convert": ["model.language_model.layers.1", "visual"]},
        {(0, 2, 3): G128_ZERO_POINTS, (1,): "none"},
    ),
    "AWQ, one module of a layer by its name (reconstructed)": (
        make_qwen(),
        AWQ | {"modules_to_not_convert": ["model.layers.3.mlp"]},
        {(0, 1, 2): G128_ZERO_POINTS, (3,): "none"},
    ),
    "AWQ of twelve layers, layer 1 excluded (reconstructed)": (
        make_qwen(12),
        AWQ | {"modules_to_not_convert": ["model.layers.1"]},
        {(0, *range(2, 12)): G128_ZERO_POINTS, (1,): "none"},
    ),
    "fp8 with excluded experts (reconstructed)": (
        make_deepseek(),
        FP8_QUANTIZATION_CONFIG
        | {"modules_to_not_convert": ["model.layers.3.mlp.experts", "lm_head"]},
        {(3,): "none", (4, 5): FP8_BLOCK},
    ),
    "fp8 with a pattern, as transformers matches it (reconstructed)": (
        make_deepseek(),
        FP8_QUANTIZATION_CONFIG
        | {"modules_to_not_convert": [r"model\.layers\.[45]\.mlp\.experts"]},
        {(3,): FP8_BLOCK, (4, 5): "none"},
    ),
    "fp8 ignored_layers, every projection by name (reconstructed)": (
        make_deepseek(5),
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": [
                f"model.layers.3.mlp.experts.{e}.{p}"
                for e in range(256)
                for p in ("gate_proj", "up_proj", "down_proj")
            ],
        },
        {(3,): "none", (4,): FP8_STATIC},
    ),
    "Mixtral named as in transformers 5 (reconstructed)": (
        MIXTRAL | {"num_hidden_layers": 2},
        FP8_QUANTIZATION_CONFIG | {"modules_to_not_convert": ["model.layers.1.mlp.experts"]},
        {(0,): FP8_BLOCK, (1,): "none"},
    ),
    "compressed-tensors, layers in ignore (reconstructed)": (
        make_qwen(),
        make_compressed_config(
            (["Linear"], INT4_GROUP), ignore=["re:model\\.layers\\.(0|3)\\..*", "lm_head"]
        ),
        {(0, 3): "none", (1, 2): G32},
    ),
    "compressed-tensors of attention only (reconstructed)": (
        make_qwen(),
        make_compressed_config((["re:.*self_attn.*"], FP8_GROUP)),
        {(0, 1, 2, 3): "none"},
    ),
    "compressed-tensors, every Linear ignored (reconstructed)": (
        make_qwen(),
        make_compressed_config((["Linear"], FP8_GROUP), ignore=["Linear"]),
        {(0, 1, 2, 3): "none"},
    ),
    "modelopt, layers excluded by a wildcard": (
        make_deepseek(),
        MODELOPT_BASE | {"quant_algo": "NVFP4", "exclude_modules": ["model.layers.5*", "lm_head"]},
        {(3, 4): "nvfp4_w4a16", (5,): "none"},
    ),
    "mxfp4 with a layer in 16 bits (reconstructed)": (
        without(GPT_OSS, "quantization_config") | {"num_hidden_layers": 3},
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.2.mlp.experts"]},
        {(0, 1): "mxfp4_w4a16", (2,): "none"},
    ),
    # Several formats
    "llm-compressor's mixed precision: experts int4, the rest fp8": (
        make_qwen(),
        make_compressed_config(
            (["re:.*mlp\\.experts\\..*"], INT4_GROUP),
            (["re:.*self_attn\\.(q|k|v|o)_proj$"], FP8_GROUP),
            format="mixed-precision",
            ignore=["lm_head", "re:.*mlp.gate$"],
        ),
        {(0, 1, 2, 3): G32},
    ),
    "compressed-tensors by layer (reconstructed)": (
        make_qwen(),
        make_compressed_config(
            (["re:model\\.layers\\.[01]\\.mlp\\.experts.*"], INT4_GROUP),
            (["re:model\\.layers\\.[23]\\.mlp\\.experts.*"], FP8_GROUP),
        ),
        {(0, 1): G32, (2, 3): FP8_CHANNEL},
    ),
    "compressed-tensors: a name before a regex before a class (reconstructed)": (
        make_qwen(3),
        make_compressed_config(
            (["Linear"], FP8_GROUP),
            (["re:.*layers\\.[12]\\.mlp.*"], NVFP4_GROUP),
            (["model.layers.2.mlp.experts"], INT4_GROUP),
        ),
        {(0,): FP8_CHANNEL, (1,): "nvfp4_w4a16", (2,): G32},
    ),
    "ModelCloud GPTQModel, dynamic of attention": (
        make_qwen(),
        GPTQ
        | {
            "dynamic": {
                "-:.*attn.*": {},
                "-:.*mlp\\.gate$": {},
                "+:.*shared_expert.*": {"bits": 8},
            },
            "meta": {"quantizer": ["gptqmodel:5.0.0"]},
        },
        {(0, 1, 2, 3): G128},
    ),
    "GPTQ dynamic by layer (reconstructed)": (
        make_qwen(),
        GPTQ
        | {
            "dynamic": {
                r"+:.*\.1\.mlp\.experts\..*": {"bits": 8},
                r".*layers\.2\.mlp.*": {"group_size": 64, "desc_act": True},
                r"-:model\.layers\.3\..*": {},
            }
        },
        {
            (0,): G128,
            (1,): "int8_w8a16_group:group=128",
            (2,): "int4_w4a16_act_order:group=64",
            (3,): "none",
        },
    ),
    "GPTQ dynamic, the first match wins (reconstructed)": (
        make_qwen(2),
        GPTQ
        | {
            "dynamic": {
                r"+:model\.layers\.1\..*": {"group_size": 64},
                r"-:.*experts.*": {},
                r"+:.*": {"bits": 8},
            }
        },
        {(0,): "none", (1,): G64},
    ),
    "GPTQ dynamic, false means skipped (reconstructed)": (
        make_qwen(2),
        GPTQ | {"dynamic": {r"model\.layers\.0\.mlp.*": False}},
        {(0,): "none", (1,): G128},
    ),
    "GPTQ modules_in_block_to_quantize without experts (reconstructed)": (
        make_qwen(2),
        GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["self_attn.o_proj"]]},
        {(0, 1): "none"},
    ),
    "Intel auto-round with layers in 16 bits": (
        make_qwen(3),
        GPTQ
        | {
            "data_type": "int",
            "act_bits": 16,
            "extra_config": {
                "model.layers.0.mlp.experts": {"bits": 16, "data_type": "float"},
                r".*layers\.2\.mlp\.experts.*": {"bits": 8},
                "model.layers.1.mlp.gate": {"bits": 16},
            },
        },
        {(0,): "none", (1,): G128, (2,): "int8_w8a16_group:group=128"},
    ),
    "nvidia mixed precision, every module by name": (
        NEMOTRON | {"num_hidden_layers": 6, "hybrid_override_pattern": "MEMEME"},
        MODELOPT_BASE
        | {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": QUANTIZED_EXPERTS
            | {"backbone.layers.0.mixer.in_proj": {"quant_algo": "FP8"}},
            "ignore": ["lm_head"],
        },
        {(1, 3): "nvfp4_w4a16", (5,): "none"},
    ),
    "nvidia mixed precision, whole blocks": (
        make_deepseek(),
        MODELOPT_BASE
        | {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.language_model.layers.3.mlp.experts": {"quant_algo": "NVFP4"},
                "model.layers.4.mlp.experts": {"quant_algo": "w4a16_nvfp4", "group_size": 16},
                "model.layers.5.mlp.experts": {"quant_algo": "FP8"},
            },
        },
        {(3, 4): "nvfp4_w4a16", (5,): FP8_STATIC},
    ),
}


def test_table_has_at_least_30_models() -> None:
    assert len(MODELS) >= 30


@pytest.mark.parametrize("name", MODELS)
def test_layers_have_their_own_schemes(tmp_path: Path, name: str) -> None:
    config, quantization, expected = MODELS[name]
    path = write_config(tmp_path, config | {"quantization_config": quantization})
    fields, schemes = layers_of_file(path)
    assert {scheme.layers: scheme.scheme for scheme in schemes} == expected
    assert "quant" not in fields
    if len(expected) > 1:
        with pytest.raises(ConfigurationError, match=r"several schemes \(layers? .*--quant"):
            problem_fields_of_file(path)
        assert problem_fields_of_file(path, quant="none")["quant"] == "none"
    else:
        (scheme,) = expected.values()
        assert problem_fields_of_file(path).get("quant", "none") == scheme


# Configs whose experts differ within a layer, and incomplete or invalid configs.
REFUSED: dict[str, tuple[Config, Config, str]] = {
    "some experts": (
        make_deepseek(),
        AWQ | {"modules_to_not_convert": ["model.layers.4.mlp.experts.17"]},
        r"layer 4: got int4_\S+ of \S+\.0.gate_proj and none of \S+\.17.gate_proj \(modules.*need",
    ),
    "one projection": (
        make_qwen(),
        FP8_QUANTIZATION_CONFIG | {"ignored_layers": ["down_proj"]},
        r"got fp8_\S+ of \S+gate_proj and none of \S+down_proj \(ignored_layers has 'down_proj'\)",
    ),
    "projections of two formats": (
        make_qwen(),
        make_compressed_config(
            (["re:.*(gate|up)_proj"], INT4_GROUP), (["re:.*down_proj"], FP8_GROUP)
        ),
        r"int4_\S+ of \S+gate_proj \(config_groups.group_0\) and fp8_\S+ of \S+down_proj \(\S+1\)",
    ),
    "GPTQ with other bits for one expert": (
        make_qwen(),
        GPTQ | {"dynamic": {r"+:.*experts\.3\.up_proj": {"bits": 8}}},
        r"and int8_\S+ of \S+experts.3.up_proj \(dynamic has '\+:",
    ),
    "two groups for one module": (
        make_qwen(),
        make_compressed_config((["re:.*mlp.*"], INT4_GROUP), (["re:.*experts.*"], FP8_GROUP)),
        r"config_groups 'group_0' and 'group_1' that target model.layers.0.mlp.experts.0.gate_proj",
    ),
    "two groups by class": (
        make_qwen(),
        make_compressed_config((["Linear"], INT4_GROUP), (["Linear"], FP8_GROUP)),
        r"'group_0' and 'group_1' that target",
    ),
    "a group that matches no experts": (
        make_qwen(),
        make_compressed_config(
            (["re:.*mlp.expert\\d.*"], INT4_GROUP), (["re:.*self_attn.*"], FP8_GROUP)
        ),
        r"config_groups.group_0: targets \['re:.*'\], which match none",
    ),
    "an unknown scheme of one layer": (
        make_qwen(),
        GPTQ | {"dynamic": {r"+:model\.layers\.2\..*": {"bits": 3}}},
        "got bits = 3, need 4 or 8",
    ),
    "an unknown option of one layer": (
        make_qwen(),
        GPTQ | {"dynamic": {r"+:model\.layers\.2\..*": {"codebook": "nf4"}}},
        "got codebook = 'nf4', need no such key",
    ),
    "options that are not an object": (
        make_qwen(),
        GPTQ | {"dynamic": {".*": 8}},
        "an object of options",
    ),
    "dynamic is not an object": (make_qwen(), GPTQ | {"dynamic": [".*"]}, "dynamic = "),
    "a name that is not text": (
        make_qwen(),
        AWQ | {"modules_to_not_convert": [3]},
        "names of modules",
    ),
    "lookaround": (
        make_qwen(),
        make_compressed_config((["Linear"], INT4_GROUP), ignore=["re:^(?!.*experts)"]),
        r"ignore has .*, need a pattern of names with groups without lookaround",
    ),
    "no targets": (
        make_qwen(),
        make_compressed_config(([], INT4_GROUP)),
        r"group_0: targets \[\], need a list",
    ),
    "no number of layers": (
        without(make_qwen(), "num_hidden_layers"),
        AWQ | {"modules_to_not_convert": ["model.layers.0."]},
        "layers that differ .*no num_hidden_layers, need the number of layers",
    ),
    "number of layers is text": (
        make_qwen() | {"num_hidden_layers": "4"},
        AWQ,
        "num_hidden_layers = ",
    ),
    "mixed precision without layers": (
        make_qwen(),
        MODELOPT_BASE | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}},
        "quantized_layers that are not empty",
    ),
    "mixed precision with an unknown format": (
        make_qwen(),
        MODELOPT_BASE
        | {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"model.layers.1.mlp.experts": {"quant_algo": "W4A8_AWQ"}},
        },
        "got quant_algo = 'W4A8_AWQ'",
    ),
    "mixed precision without a format": (
        make_qwen(),
        MODELOPT_BASE | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"lm_head": {}}},
        "quantized_layers.lm_head = {}, need an object with a quant_algo",
    ),
    "one format and layers": (
        make_qwen(),
        MODELOPT_BASE
        | {"quant_algo": "FP8", "quantized_layers": {"lm_head": {"quant_algo": "FP8"}}},
        "got quantized_layers = ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inconsistent_configs_raise_typed_errors(tmp_path: Path, name: str) -> None:
    config, quantization, message = REFUSED[name]
    path = write_config(tmp_path, config | {"quantization_config": quantization})
    with pytest.raises(ConfigurationError, match=message) as caught:
        layers_of_file(path)
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({}, range(6)),
        ({"first_k_dense_replace": 2}, range(2, 6)),
        ({"mlp_layer_types": ["dense", *["sparse"] * 5]}, range(1, 6)),
        ({"mlp_only_layers": [0, 5]}, range(1, 5)),
        ({"decoder_sparse_step": 2}, range(1, 6, 2)),
        ({"interleave_moe_layer_step": 2}, range(1, 6, 2)),
        ({"interleave_moe_layer_step": 2, "moe_layers": [0, 3]}, (0, 3)),
        ({"moe_layer_interval": 3, "moe_layer_end_index": 4}, (2,)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": -1}, range(1, 6)),
        ({"expert_layer_period": 3, "expert_layer_offset": 1}, (1, 4)),
        ({"moe_layer_freq": 2, "first_k_dense_replace": 1}, (2, 4)),
        ({"moe_layer_freq": 1, "expert_layer_period": 1}, range(6)),
        ({"moe_layer_freq": [0, 1, 0, 1, 1, 1]}, (1, 3, 4, 5)),
        ({"moe_layers": [1, 3]}, (1, 3)),
        ({"layers_block_type": ["mamba", "moe"] * 3}, (1, 3, 5)),
        ({"num_nextn_predict_layers": 1}, range(6)),
    ],
)
def test_dense_layers_are_ignored(tmp_path: Path, keys: Config, layers: Any) -> None:
    config = make_qwen(6) | keys | {"quantization_config": FP8_QUANTIZATION_CONFIG}
    (scheme,) = layers_of_file(write_config(tmp_path, config))[1]
    assert scheme.layers == tuple(layers)


def test_modules_outside_the_experts_have_their_own_format() -> None:
    formats = QuantizationMap(
        make_compressed_config(
            (["re:.*mlp\\.experts.*"], INT4_GROUP),
            (["re:.*self_attn.*_proj"], FP8_GROUP),
            ignore=["lm_head"],
        )
    )
    assert str(formats.format_of("model.layers.0.mlp.experts.5.up_proj").scheme) == G32
    assert str(formats.format_of("model.layers.0.self_attn.q_proj").scheme) == FP8_CHANNEL
    for name in ("lm_head", "model.layers.0.mlp.gate", "model.norm"):
        assert formats.format_of(name) is None
    assert QuantizationMap(None).format_of("lm_head") is None


def test_all_experts_that_entries_distinguish_are_checked() -> None:
    for entry, number in (("experts.97", 128), (r"re:.*layers\.1\d\..*experts\.9.*", 128),
                          ("model.layers.12.mlp", 3), (r"re:.*w1\..*", 3)):  # fmt: skip
        formats = QuantizationMap(AWQ | {"modules_to_not_convert": [entry]})
        representatives = formats.representative_experts(128)
        assert len(representatives) == number, entry
        assert all(a < b for a, b in pairwise(representatives))


# Entries that distinguish layers by the number of digits, not by a layer number.
ENTRIES_BY_NUMBER_OF_DIGITS = (
    r"re:.*layers\.\d\.mlp.*",
    "model.layers.?.mlp",
    r"re:.*layers\.[^a-z]\..*",
)


@pytest.mark.parametrize("entry", ENTRIES_BY_NUMBER_OF_DIGITS)
def test_layers_are_distinguished_by_the_length_of_their_numbers(
    tmp_path: Path, entry: str
) -> None:
    quantization = AWQ | {"modules_to_not_convert": [entry]}
    path = write_config(tmp_path, make_qwen(12) | {"quantization_config": quantization})
    schemes = {scheme.layers: scheme.scheme for scheme in layers_of_file(path)[1]}
    assert schemes == {tuple(range(10)): "none", (10, 11): G128_ZERO_POINTS}


@pytest.mark.parametrize(
    "entry", [*ENTRIES_BY_NUMBER_OF_DIGITS, r"re:.*layers\.(?:[1-3][0-9])\..*"]
)
def test_layers_that_differ_are_detected_without_a_layer_number(tmp_path: Path, entry: str) -> None:
    quantization = AWQ | {"modules_to_not_convert": [entry]}
    config = without(make_qwen(), "num_hidden_layers") | {"quantization_config": quantization}
    with pytest.raises(ConfigurationError, match=r"layers that differ .* no num_hidden_layers"):
        layers_of_file(write_config(tmp_path, config))


def test_modelopt_file_describes_a_plain_config(tmp_path: Path) -> None:
    path = write_config(tmp_path, make_deepseek())
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["model.layers.5*"]}
    modelopt_file = tmp_path / "hf_quant_config.json"
    (tmp_path / "other").mkdir()

    def write_modelopt_file(content: object) -> None:
        Path(write_config(tmp_path / "other", content)).rename(modelopt_file)

    write_modelopt_file({"producer": {"name": "modelopt"}, "quantization": quantization})
    _, schemes = layers_of_file(path)
    assert [(s.layers, s.scheme) for s in schemes] == [((3, 4), "nvfp4_w4a16"), ((5,), "none")]
    # A quantization_config of config.json takes precedence, and the file describes no other config.
    write_config(tmp_path, make_deepseek() | {"quantization_config": FP8_QUANTIZATION_CONFIG})
    assert [s.scheme for s in layers_of_file(path)[1]] == [FP8_BLOCK]
    other_path = Path(write_config(tmp_path, make_deepseek())).rename(tmp_path / "plain.json")
    assert [s.scheme for s in layers_of_file(str(other_path))[1]] == ["none"]
    write_config(tmp_path, make_deepseek())
    write_modelopt_file({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}})
    assert [s.scheme for s in layers_of_file(path)[1]] == ["none"]
    for content in ([], {"quantization": "NVFP4"}, "{"):
        write_modelopt_file(content)
        with pytest.raises(ConfigurationError, match=r"hf_quant_config\.json"):
            layers_of_file(path)


def test_modelopt_file_describes_mixed_precision(tmp_path: Path) -> None:
    quantization = MODELOPT_BASE | {"quant_algo": "MIXED_PRECISION"}
    layers = {f"model.layers.{n}.mlp.experts": {"quant_algo": "FP8"} for n in (3, 4)}
    (tmp_path / "other").mkdir()
    content = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    Path(write_config(tmp_path / "other", content)).rename(tmp_path / "hf_quant_config.json")
    path = write_config(tmp_path, make_deepseek() | {"quantization_config": quantization})
    _, schemes = layers_of_file(path)
    assert [(s.layers, s.scheme) for s in schemes] == [((3, 4), FP8_STATIC), ((5,), "none")]


@pytest.mark.parametrize("experts", [0, 1, None])
def test_dense_models_are_refused(tmp_path: Path, experts: int | None) -> None:
    config = make_qwen() | {"num_experts": experts}
    if experts is None:
        del config["num_experts"]
    with pytest.raises(
        ConfigurationError, match=r"num_experts.*: a dense model, need a model with 2"
    ):
        layers_of_file(write_config(tmp_path, config))
