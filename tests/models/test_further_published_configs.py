"""Configs of further published models: the scheme of each layer, or a refusal by name.

As in test_published_configs.py, the entries were written from memory of the repositories' files.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from model_configs import write_config

from modular_kernel.errors import ConfigurationError
from modular_kernel.models.config_file import layers_of_file

Config = dict[str, Any]

BASE = {"torch_dtype": "bfloat16", "hidden_act": "silu"}
FP8_BLOCK, FP8_CHANNEL = "fp8_w8a8_block:block=128x128", "fp8_w8a8_channel"
G128, G64_ZERO_POINTS = "int4_w4a16_group:group=128", "int4_w4a16_group:group=64,zero_points=true"


def make_qwen(**more: Any) -> Config:
    sizes: Config = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128}
    sizes |= {"num_experts_per_tok": 8, "num_hidden_layers": 48, "decoder_sparse_step": 1}
    return {"model_type": "qwen3_moe", "mlp_only_layers": [], **BASE, **sizes, **more}


def make_deepseek(**more: Any) -> Config:
    sizes: Config = {"hidden_size": 7168, "moe_intermediate_size": 2048, "n_routed_experts": 256}
    sizes |= {"num_experts_per_tok": 8, "num_hidden_layers": 61, "first_k_dense_replace": 3}
    sizes |= {"num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5}
    return {"model_type": "deepseek_v3", **BASE, **sizes, **more}


def make_glm(layers: int = 92, dense: int = 3, **more: Any) -> Config:
    sizes: Config = {"hidden_size": 5120, "moe_intermediate_size": 1536, "n_routed_experts": 160}
    sizes |= {"num_experts_per_tok": 8, "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5}
    sizes |= {"num_hidden_layers": layers, "first_k_dense_replace": dense}
    return {"model_type": "glm4_moe", **BASE, **sizes, **more}


def make_mixtral(**more: Any) -> Config:
    sizes: Config = {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8}
    return {"model_type": "mixtral", **BASE, **sizes, "num_experts_per_tok": 2,
            "num_hidden_layers": 32, **more}  # fmt: skip


def make_gpt_oss(**more: Any) -> Config:
    sizes: Config = {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32}
    sizes |= {"num_experts_per_tok": 4, "num_hidden_layers": 24}
    return {"model_type": "gpt_oss", "swiglu_limit": 7.0, **BASE, **sizes, **more}


def make_nemotron(**more: Any) -> Config:
    sizes: Config = {"hidden_size": 2688, "intermediate_size": 1856, "moe_intermediate_size": 1856}
    sizes |= {"n_routed_experts": 128, "num_experts_per_tok": 6, "num_hidden_layers": 8}
    pattern = {"hybrid_override_pattern": "MEMEM*EM", "mlp_hidden_act": "relu2"}
    return {"model_type": "nemotron_h", "torch_dtype": "bfloat16", "routed_scaling_factor": 2.5,
            **sizes, **pattern, **more}  # fmt: skip


def make_fp8(**more: Any) -> Config:
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [128, 128], **more}  # fmt: skip


def make_gptq(**more: Any) -> Config:
    options = {"bits": 4, "group_size": 128, "sym": True, "desc_act": False, "damp_percent": 0.01}
    options |= {"static_groups": False, "true_sequential": True, "lm_head": False}
    return {"quant_method": "gptq", "checkpoint_format": "gptq", **options, **more}


def make_awq(**more: Any) -> Config:
    options = {"bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    return {"quant_method": "awq", "modules_to_not_convert": None, **options, **more}


def make_compressed(format: str, *groups: Config, ignore: tuple[str, ...] = ("lm_head",)) -> Config:
    group_by_name = {f"group_{number}": group for number, group in enumerate(groups)}
    more = {"kv_cache_scheme": None, "global_compression_ratio": None, "version": "0.12.2"}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": group_by_name,
            "ignore": list(ignore), "quantization_status": "compressed", **more,
            "transform_config": {}, "sparsity_config": {}}  # fmt: skip


def make_group(targets: str, inputs: Config | None, **weights: Any) -> Config:
    options = {"dynamic": False, "symmetric": True, "actorder": None, "observer": "minmax"}
    return {"targets": [targets], "output_activations": None, "input_activations": inputs,
            "weights": {**options, "block_structure": None, **weights}}  # fmt: skip


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}
FP8_INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
FP8_INPUTS |= {"symmetric": True, "group_size": None}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
FP4_INPUTS = FP4 | {"dynamic": "local", "symmetric": True}


def make_quark_mxfp4(inputs: Config, *exclude: str) -> Config:
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1}
    weight |= {"scale_format": "e8m0", "is_dynamic": False, "scale_type": "float"}
    return {
        "quant_method": "quark", "exclude": ["lm_head", *exclude], "layer_quant_config": {},
        "global_quant_config": {"weight": weight, "input_tensors": {**weight, **inputs},
                                "output_tensors": None, "bias": None},
        "export": {"kv_cache_group": [], "pack_method": "reorder", "min_kv_scale": 0.0,
                   "weight_format": "real_quantized", "weight_merge_groups": None},
        "layer_type_quant_config": {}, "algo_config": None, "version": "0.10",
    }  # fmt: skip


def make_modelopt_nvfp4(*ignore: str) -> Config:
    options = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group_0 = {"weights": options, "input_activations": options, "targets": ["Linear"]}
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": list(ignore),
            "config_groups": {"group_0": group_0},
            "producer": {"name": "modelopt", "version": "0.39.0"}}  # fmt: skip


AUTO_ROUND = {"autoround_version": "0.4.3", "backend": "auto_round:gptq:exllamav2", "iters": 200}
AUTO_ROUND |= {"data_type": "int", "scale_dtype": "torch.float16", "nsamples": 512, "amp": True}
MIXED_AUTO_ROUND = {
    "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int",
    "packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers",
    "extra_config": {f"model.layers.{n}.mlp.gate": {"bits": 16, "data_type": "fp"}
                     for n in range(48)},
}  # fmt: skip
HUNYUAN = {
    "model_type": "hunyuan_v1_moe", **BASE, "hidden_size": 4096, "intermediate_size": 3072,
    "moe_intermediate_size": [3072] * 32, "num_experts": 64, "moe_topk": [8] * 32,
    "num_shared_expert": [1] * 32, "num_hidden_layers": 32, "use_mixed_mlp_moe": True,
}  # fmt: skip
LONGCAT = {
    "model_type": "longcat_flash", **BASE, "hidden_size": 6144, "ffn_hidden_size": 12288,
    "expert_ffn_hidden_size": 2048, "n_routed_experts": 512, "zero_expert_num": 256,
    "zero_expert_type": "identity", "moe_topk": 12, "num_layers": 28, "routed_scaling_factor": 6.0,
}  # fmt: skip
LING = {
    "model_type": "bailing_moe_v2", **BASE, "hidden_size": 8192, "moe_intermediate_size": 2048,
    "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 80,
    "first_k_dense_replace": 4, "routed_scaling_factor": 2.5,
}  # fmt: skip
TRINITY = {
    "model_type": "afmoe", **BASE, "hidden_size": 2048, "moe_intermediate_size": 1024,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 32, "num_dense_layers": 2,
    "route_scale": 2.826,
}  # fmt: skip
GRANITE = {
    "model_type": "granitemoehybrid", **BASE, "hidden_size": 4096, "intermediate_size": 768,
    "num_local_experts": 72, "num_experts_per_tok": 10, "num_hidden_layers": 40,
}  # fmt: skip
KIMI_LINEAR = {
    "model_type": "kimi_linear", **BASE, "hidden_size": 2304, "moe_intermediate_size": 1024,
    "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "routed_scaling_factor": 2.446,
}  # fmt: skip
LFM2 = {
    "model_type": "lfm2_moe", "dtype": "bfloat16", "hidden_size": 2048, "num_experts": 32,
    "moe_intermediate_size": 1792, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_dense_layers": 2, "routed_scaling_factor": 1.0,
}  # fmt: skip
ERNIE = {
    "model_type": "ernie4_5_moe", **BASE, "hidden_size": 2560, "moe_intermediate_size": 1536,
    "moe_num_experts": 64, "moe_k": 6, "num_hidden_layers": 28, "moe_layer_start_index": 1,
    "moe_layer_end_index": 27, "moe_layer_interval": 1,
}  # fmt: skip
INT8_LAYERS = make_group(r"re:.*layers\.[0-9]\..*", None, **{**INT4, "num_bits": 8})
ATTENTION = make_group("re:.*self_attn.*", FP8_INPUTS, **FP8_WEIGHTS)
EXPERTS = make_group("re:.*mlp.experts.*", FP4_INPUTS, **FP4)
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
ROUTERS = tuple(f"model.layers.{n}.mlp.gate" for n in range(3, 92))

SCHEMES_BY_MODEL: dict[str, tuple[Config, Config | None, str]] = {
    "casperhansen/mixtral-instruct-awq": (
        make_mixtral(),
        make_awq(modules_to_not_convert=["gate"]),
        "layers 0 to 31: int4_w4a16_group:group=128,zero_points=true",
    ),
    "tencent/Hunyuan-A13B-Instruct-GPTQ-Int4": (
        HUNYUAN,
        make_gptq(dynamic={"-:.*mlp.gate.wg": {}}),
        f"layers 0 to 31: {G128}",
    ),
    "meituan-longcat/LongCat-Flash-Chat-FP8": (LONGCAT, make_fp8(), f"layers 0 to 27: {FP8_BLOCK}"),
    "zai-org/GLM-4.7-FP8": (
        make_glm(),
        make_compressed(
            "float-quantized",
            make_group("Linear", FP8_INPUTS, **FP8_WEIGHTS),
            ignore=("lm_head", *ROUTERS, "model.layers.92.eh_proj"),
        ),
        f"layers 3 to 91: {FP8_CHANNEL}",
    ),
    "PrimeIntellect/INTELLECT-3-FP8": (
        make_glm(46, 1),
        make_compressed("float-quantized", make_group("Linear", FP8_INPUTS, **FP8_WEIGHTS)),
        f"layers 1 to 45: {FP8_CHANNEL}",
    ),
    "zai-org/GLM-4.5V-FP8": (
        {
            "model_type": "glm4v_moe",
            "text_config": make_glm(46, 1) | {"model_type": "glm4v_moe_text"},
        },
        make_compressed(
            "float-quantized",
            make_group("Linear", FP8_INPUTS, **FP8_WEIGHTS),
            ignore=("lm_head", "re:model.visual.*"),
        ),
        f"layers 1 to 45: {FP8_CHANNEL}",
    ),
    "OPEA/DeepSeek-R1-int4-sym-awq": (
        make_deepseek(),
        make_awq(zero_point=False, modules_to_not_convert=["lm_head"]),
        f"layers 3 to 60: {G128}",
    ),
    "OPEA/DeepSeek-V3-int4-sym-gptq": (
        make_deepseek(),
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "desc_act": False,
            **AUTO_ROUND,
        },
        f"layers 3 to 60: {G128}",
    ),
    "Intel/Qwen3-30B-A3B-int4-mixed-AutoRound": (
        make_qwen(),
        MIXED_AUTO_ROUND,
        f"layers 0 to 47: {G128}",
    ),
    "unsloth/gpt-oss-20b-unsloth-bnb-4bit": (
        make_gpt_oss(),
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "bfloat16",
            "llm_int8_skip_modules": ["router", "lm_head"],
        },
        "layers 0 to 23: none",
    ),
    "RedHatAI/DeepSeek-R1-0528-quantized.w4a16": (
        make_deepseek(),
        make_compressed(
            "pack-quantized",
            make_group("Linear", None, **INT4),
            ignore=("re:.*self_attn.*", "lm_head", "re:.*mlp.gate$", "re:.*shared_experts.*"),
        ),
        f"layers 3 to 60: {G128}",
    ),
    "RedHatAI/Kimi-K2-Instruct-quantized.w4a16": (
        make_deepseek(
            model_type="kimi_k2",
            n_routed_experts=384,
            first_k_dense_replace=1,
            num_nextn_predict_layers=0,
        ),
        make_compressed(
            "pack-quantized",
            make_group("Linear", None, **INT4),
            ignore=("re:.*lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"),
        ),
        f"layers 1 to 60: {G128}",
    ),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": (
        make_nemotron(),
        make_modelopt_nvfp4("backbone.layers.*.mixer.q_proj", "lm_head"),
        "layers 1, 3, 6: nvfp4_w4a16",
    ),
    "TechxGenus/DeepSeek-V2-Lite-Chat-AWQ": (
        make_deepseek(
            model_type="deepseek_v2",
            hidden_size=2048,
            moe_intermediate_size=1408,
            n_routed_experts=64,
            num_experts_per_tok=6,
            num_hidden_layers=27,
            first_k_dense_replace=1,
            num_nextn_predict_layers=0,
        ),
        make_awq(group_size=64, modules_to_not_convert=["mlp.gate"]),
        f"layers 1 to 26: {G64_ZERO_POINTS}",
    ),
    "microsoft/Phi-3.5-MoE-instruct": (
        make_mixtral()
        | {"model_type": "phimoe", "intermediate_size": 6400, "num_local_experts": 16},
        None,
        "every layer: none",
    ),
    "ibm-granite/granite-4.0-h-small-FP8": (
        GRANITE,
        make_compressed(
            "float-quantized",
            make_group("Linear", FP8_INPUTS, **FP8_WEIGHTS),
            ignore=("lm_head", "re:.*block_sparse_moe.router"),
        ),
        f"layers 0 to 39: {FP8_CHANNEL}",
    ),
    "LiquidAI/LFM2-8B-A1B": (LFM2, None, "every layer: none"),
    "baidu/ERNIE-4.5-21B-A3B-PT": (ERNIE, None, "every layer: none"),
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": (KIMI_LINEAR, None, "every layer: none"),
    "inclusionAI/Ling-1T-FP8": (LING, make_fp8(), f"layers 4 to 79: {FP8_BLOCK}"),
    "QuantTrio/DeepSeek-V3.1-AWQ": (
        make_deepseek(),
        make_awq(
            group_size=64,
            modules_to_not_convert=[
                "model.layers.0.",
                "model.layers.1.",
                "model.layers.2.",
                "self_attn",
                "shared_experts",
                "mlp.gate",
            ],
        ),
        f"layers 3 to 60: {G64_ZERO_POINTS}",
    ),
    "QuantTrio/Qwen3-30B-A3B-GPTQ-Int8": (
        make_qwen(),
        make_gptq(bits=8, pack_dtype="int32", dynamic=None),
        "layers 0 to 47: int8_w8a16_group:group=128",
    ),
    "amd/gpt-oss-120b-w-mxfp4-a-fp8": (
        make_gpt_oss(num_local_experts=128),
        make_quark_mxfp4(
            {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "group_size": None},
            "model.layers.0.self_attn.q_proj",
        ),
        "layers 0 to 23: mxfp4_w4a16",
    ),
    "amd/Qwen3-235B-A22B-Instruct-2507-MXFP4": (
        make_qwen(num_hidden_layers=94),
        make_quark_mxfp4({"is_dynamic": True}, *ROUTERS),
        "layers 0 to 93: mxfp4_w4a16",
    ),
    "Firworks/GLM-4.6-nvfp4": (
        make_glm(),
        make_compressed(
            "nvfp4-pack-quantized",
            make_group("Linear", FP4_INPUTS, **FP4),
            ignore=("lm_head", *ROUTERS),
        ),
        "layers 3 to 91: nvfp4_w4a16",
    ),
    "arcee-ai/Trinity-Mini-FP8-Block": (
        TRINITY,
        make_compressed(
            "float-quantized",
            make_group("Linear", {**FP8_INPUTS, "strategy": "group", "group_size": 128}, **BLOCKS),
            ignore=("re:.*router.*", "lm_head"),
        ),
        f"layers 2 to 31: {FP8_BLOCK}",
    ),
    "nvidia/Qwen3-Next-80B-A3B-Thinking-NVFP4": (
        make_qwen(
            model_type="qwen3_next",
            num_experts=512,
            num_experts_per_tok=10,
            moe_intermediate_size=512,
        ),
        make_modelopt_nvfp4("lm_head", "model.layers.0.mlp.gate", "mtp*"),
        "layers 0 to 47: nvfp4_w4a16",
    ),
    "groups with formats of their own": (
        make_qwen(),
        make_compressed(
            "mixed-precision",
            {**ATTENTION, "format": "float-quantized"},
            {**EXPERTS, "format": "nvfp4-pack-quantized"},
        ),
        "layers 0 to 47: nvfp4_w4a16",
    ),
    "int8 in some layers": (
        make_qwen(),
        make_compressed("pack-quantized", INT8_LAYERS, make_group("Linear", None, **INT4)),
        f"layers 0 to 9: int8_w8a16_group:group=128; layers 10 to 47: {G128}",
    ),
}

MLX = {"group_size": 64, "bits": 4}
REFUSED_CONFIGS: dict[str, tuple[Config, str]] = {
    "mlx-community/Qwen3-30B-A3B-4bit": (
        make_qwen(quantization=MLX, quantization_config=MLX),
        "codes of MLX with a scale and a bias",
    ),
    "mlx-community/Mixtral-8x7B-Instruct-v0.1": (make_mixtral(quantization=MLX), "codes of MLX"),
    "MLX within a multimodal model": (
        {
            "model_type": "qwen3_vl_moe",
            "quantization": MLX,
            "text_config": make_qwen(model_type="qwen3_vl_moe_text"),
        },
        "codes of MLX",
    ),
    "baidu/ERNIE-4.5-300B-A47B-2Bits-Paddle": (
        ERNIE | {"quantization_config": {"moe_quant_type": "w4w2", "is_quantized": True}},
        "got quant_method = None",
    ),
    "xai-org/grok-2": (make_mixtral(model_type="git"), "got model_type = 'git'"),
    "meituan/DeepSeek-R1-Block-INT8": (
        make_deepseek(
            quantization_config={"quant_method": "blockwise_int8", "weight_block_size": [128, 128]}
        ),
        "scales for blocks",
    ),
    "meituan/DeepSeek-R1-Channel-INT8": (
        make_deepseek(quantization_config={"quant_method": "w8a8_int8"}),
        "scales for rows",
    ),
    "tencent/DeepSeek-V3.1-Terminus-W4AFP8": (
        make_deepseek(quantization_config=make_fp8(quant_method="w4afp8")),
        "scales for float8 activations",
    ),
    "turboderp/Qwen3-30B-A3B-exl3": (
        make_qwen(quantization_config={"quant_method": "exl3", "bits": 3.0}),
        "trellis codes",
    ),
    "3 bits of GPTQ": (
        make_qwen(quantization_config=make_gptq(bits=3)),
        "got bits = 3, need 4 or 8",
    ),
    "Marlin's layout": (
        make_qwen(quantization_config=make_gptq(is_marlin_format=True)),
        "is_marlin_format = True",
    ),
}


@pytest.mark.parametrize("name", SCHEMES_BY_MODEL)
def test_layers_have_the_schemes_of_their_configs(tmp_path: Path, name: str) -> None:
    config, quantization, expected = SCHEMES_BY_MODEL[name]
    if quantization is not None:
        config = config | {"quantization_config": quantization}
    _, schemes = layers_of_file(write_config(tmp_path, config))
    assert "; ".join(map(str, schemes)) == expected


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_unsupported_formats_are_refused_by_name(tmp_path: Path, name: str) -> None:
    config, message = REFUSED_CONFIGS[name]
    with pytest.raises(ConfigurationError) as error:
        layers_of_file(write_config(tmp_path, config))
    assert message in str(error.value)


GPTQ_FILE = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True, "damp_percent": 0.1}
AWQ_FILE = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}


@pytest.mark.parametrize(
    ("file", "content", "scheme"),
    [("quantize_config.json", GPTQ_FILE, G128), ("quant_config.json", AWQ_FILE, G64_ZERO_POINTS)],
)
def test_files_of_older_quantizers_describe_a_plain_config(
    tmp_path: Path, file: str, content: Config, scheme: str
) -> None:
    path = write_config(tmp_path, make_qwen())
    (tmp_path / file).write_text(json.dumps(content))
    _, schemes = layers_of_file(path)
    assert [layers.scheme for layers in schemes] == [scheme]
    write_config(
        tmp_path, make_qwen(quantization_config=make_fp8())
    )  # takes precedence over the file
    assert [layers.scheme for layers in layers_of_file(path)[1]] == [FP8_BLOCK]
    write_config(tmp_path, make_qwen())
    (tmp_path / file).write_text("[]")
    with pytest.raises(ConfigurationError, match="need an object"):
        layers_of_file(path)


def test_the_description_of_msmodelslim_is_refused(tmp_path: Path) -> None:
    path = write_config(tmp_path, make_qwen())
    (tmp_path / "quant_model_description.json").write_text('{"model_quant_type": "W8A8"}')
    with pytest.raises(ConfigurationError, match="Ascend's msmodelslim"):
        layers_of_file(path)
