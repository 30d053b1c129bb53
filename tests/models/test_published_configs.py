"""Configs of published models, and the scheme of the experts in each layer.

The quantization_configs were written from memory of the repositories' files, except for the models
below "Read from copies". Lists of modules by layer follow the pattern of the repository's list.

`RECONSTRUCTED` names models whose quantization_config is what a quantization tool writes for the
recipe in the model card.
"""

from pathlib import Path
from typing import Any

import pytest
from model_configs import write_config

from modular_kernel.models.config_file import layers_of_file, problem_fields_of_file

Config = dict[str, Any]
SchemeByLayers = dict[tuple[int, ...], str]

FP8_BLOCK, FP8_CHANNEL = "fp8_w8a8_block:block=128x128", "fp8_w8a8_channel"
STATIC = "fp8_w8a8_tensor:static=true"
NVFP4, MXFP4 = "nvfp4_w4a16", "mxfp4_w4a16"
G128 = "int4_w4a16_group:group=128"
G32, G128_ZERO_POINTS = "int4_w4a16_group:group=32", f"{G128},zero_points=true"


def make_config(model_type: str, num_layers: int, dense: int = 0, **more: Any) -> Config:
    """Return the config.json of a model with this number of layers. `more` has the sizes."""
    config = {"model_type": model_type, "hidden_act": "silu", "torch_dtype": "bfloat16"}
    config |= {"num_hidden_layers": num_layers}
    return config | ({"first_k_dense_replace": dense} if dense else {}) | more


def make_deepseek(**more: Any) -> Config:
    sizes = {"hidden_size": 7168, "moe_intermediate_size": 2048, "n_routed_experts": 256}
    sizes |= {"num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1}
    return make_config("deepseek_v3", 61, 3, **sizes) | more


def make_kimi() -> Config:
    more = {"model_type": "kimi_k2", "n_routed_experts": 384, "first_k_dense_replace": 1}
    return make_deepseek(**more, routed_scaling_factor=2.827, num_nextn_predict_layers=0)


def make_qwen(num_layers: int = 48, experts: int = 128, **more: Any) -> Config:
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": experts}
    sizes |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts_per_tok": 8}
    return make_config("qwen3_moe", num_layers, **{**sizes, **more})


def make_qwen_235b() -> Config:
    return make_qwen(94, hidden_size=4096, moe_intermediate_size=1536)


def make_qwen_480b() -> Config:
    return make_qwen(62, 160, hidden_size=6144, moe_intermediate_size=2560)


def make_qwen2(num_layers: int, experts: int, top_k: int, hidden: int, width: int) -> Config:
    sizes = {"hidden_size": hidden, "moe_intermediate_size": width, "num_experts": experts}
    return make_config(
        "qwen2_moe", num_layers, num_experts_per_tok=top_k, decoder_sparse_step=1, **sizes
    )


def make_qwen_vl(num_layers: int, **sizes: int) -> Config:
    text_config = make_qwen(num_layers, **sizes) | {"model_type": "qwen3_vl_moe_text"}
    return {
        "model_type": "qwen3_vl_moe",
        "text_config": text_config,
        "vision_config": {"depth": 27},
    }


def make_glm(num_layers: int, dense: int, **sizes: Any) -> Config:
    more = {"hidden_size": 5120, "moe_intermediate_size": 1536, "n_routed_experts": 160}
    more |= {"num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1}
    return make_config("glm4_moe", num_layers, dense, **{**more, **sizes})


def make_glm_air() -> Config:
    return make_glm(46, 1, hidden_size=4096, moe_intermediate_size=1408, n_routed_experts=128)


def make_mixtral(num_layers: int = 32, **sizes: int) -> Config:
    more = {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8}
    return make_config("mixtral", num_layers, **{**more, "num_experts_per_tok": 2, **sizes})


def make_gpt_oss(num_layers: int, experts: int) -> Config:
    sizes = {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": experts}
    return make_config("gpt_oss", num_layers, num_experts_per_tok=4, swiglu_limit=7.0, **sizes)


def make_llama4(experts: int, step: int) -> Config:
    text_config = {"hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384}
    text_config |= {"num_local_experts": experts, "num_experts_per_tok": 1, "hidden_act": "silu"}
    text_config |= {"model_type": "llama4_text", "num_hidden_layers": 48, "torch_dtype": "bfloat16"}
    return {
        "model_type": "llama4",
        "text_config": text_config | {"interleave_moe_layer_step": step},
    }


def make_glm_dsa() -> Config:
    sizes = {"hidden_size": 6144, "moe_intermediate_size": 2048, "n_routed_experts": 256}
    return make_glm(78, 3, moe_layer_freq=1, **sizes) | {"model_type": "glm_moe_dsa"}


def make_kimi_vl() -> Config:
    return {
        "model_type": "kimi_k25",
        "text_config": make_kimi(),
        "vision_config": {"patch_size": 14},
    }


def make_kimi_k3() -> Config:
    text_config = {"hidden_size": 7168, "moe_intermediate_size": 3072, "num_experts": 896}
    text_config |= {
        "num_experts_per_token": 16,
        "routed_expert_hidden_size": 3584,
        "hidden_act": "situ",
    }
    text_config |= {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
    text_config |= {
        "routed_scaling_factor": 1.0,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
    }
    text_config = make_config("kimi_linear", 93, 1) | text_config
    return {
        "model_type": "kimi_k3",
        "text_config": text_config,
        "vision_config": {"patch_size": 14},
    }


def make_gemma4() -> Config:
    text_config = {"hidden_size": 2816, "moe_intermediate_size": 704, "num_experts": 128}
    text_config |= {"top_k_experts": 8, "enable_moe_block": True}
    text_config = (
        make_config("gemma4_text", 30) | text_config | {"hidden_activation": "gelu_pytorch_tanh"}
    )
    return {"model_type": "gemma4", "text_config": text_config, "vision_config": {"num_layers": 27}}


def make_qwen_3_5(num_layers: int, experts: int, top_k: int, **sizes: int) -> Config:
    text_config = make_qwen(num_layers, experts, **sizes, num_experts_per_tok=top_k)
    text_config |= {"model_type": "qwen3_5_moe_text", "mtp_num_hidden_layers": 1}
    return {"model_type": "qwen3_5_moe", "text_config": text_config, "vision_config": {"depth": 27}}


def make_nemotron_ultra() -> Config:
    """Return a config.json that has the number of layers only as the length of a list."""
    kinds = {"M": "mamba", "E": "moe", "*": "attention"}
    sizes = {"hidden_size": 8192, "moe_intermediate_size": 5120, "n_routed_experts": 512}
    sizes |= {"num_experts_per_tok": 22, "moe_latent_size": 2048, "routed_scaling_factor": 5.0}
    config = {"model_type": "nemotron_h", "mlp_hidden_act": "relu2", "dtype": "bfloat16"}
    return config | sizes | {"layers_block_type": [kinds[letter] for letter in NEMOTRON_ULTRA]}


def list_layer_modules(layers: range, *modules: str, prefix: str = "model.layers") -> list[str]:
    return [f"{prefix}.{layer}.{module}" for layer in layers for module in modules]


# ------------------------------------------------------------------- quantization_config


def make_fp8(**more: Any) -> Config:
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return config | {"weight_block_size": [128, 128], **more}


def make_qwen_fp8(num_layers: int, prefix: str = "model.layers", *others: str) -> Config:
    norms = ("input_layernorm", "mlp.gate", "post_attention_layernorm")
    attention = ("self_attn.k_norm", "self_attn.q_norm")
    skipped = list_layer_modules(range(num_layers), *norms, *attention, prefix=prefix)
    return make_fp8(modules_to_not_convert=["lm_head", *others, *skipped])


def make_gptq(**more: Any) -> Config:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    config |= {"desc_act": False, "damp_percent": 0.01, "static_groups": False}
    return config | {"true_sequential": True, **more}


def make_awq(**more: Any) -> Config:
    config = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    return config | {"version": "gemm", **more}


def make_compressed(
    weights: Config, inputs: Config | None, format: str, ignore: list[str]
) -> Config:
    group = {"input_activations": inputs, "output_activations": None, "targets": ["Linear"]}
    group |= {"weights": {"observer": "minmax", "observer_kwargs": {}, **weights}}
    config = {"quant_method": "compressed-tensors", "format": format, "ignore": ignore}
    config |= {"kv_cache_scheme": None, "quantization_status": "compressed"}
    return config | {"config_groups": {"group_0": group}}


def make_compressed_fp8(*ignore: str) -> Config:
    base = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None}
    weights = base | {"strategy": "channel", "dynamic": False}
    inputs = base | {"strategy": "token", "dynamic": True, "observer": None}
    return make_compressed(weights, inputs, "float-quantized", list(ignore))


def make_compressed_int4(group: int, *ignore: str) -> Config:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    weights |= {"group_size": group, "actorder": None, "block_structure": None, "dynamic": False}
    return make_compressed(weights, None, "pack-quantized", list(ignore))


def make_compressed_nvfp4(*ignore: str) -> Config:
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group"}
    weights |= {"group_size": 16, "dynamic": False}
    return make_compressed(
        weights, weights | {"dynamic": "local"}, "nvfp4-pack-quantized", list(ignore)
    )


def make_modelopt(algorithm: str, *ignore: str) -> Config:
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": list(ignore)}
    config |= {"producer": {"name": "modelopt", "version": "0.29.0"}}
    config |= {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}
    return config | ({"group_size": 16} if algorithm == "NVFP4" else {})


def make_modelopt_groups(*ignore: str) -> Config:
    """Return an NVFP4 config of newer releases of modelopt, which have config_groups."""
    spec = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    groups = {"group_0": {"input_activations": spec, "weights": spec, "targets": ["Linear"]}}
    config = make_modelopt("NVFP4", *ignore) | {"config_groups": groups}
    del config["group_size"]
    return config


def make_quark(weights: Config, inputs: Config | None, *exclude: str) -> Config:
    layer = {"weight": weights, "input_tensors": inputs, "output_tensors": None, "bias": None}
    export = {"kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": "reorder"}
    export |= {"weight_format": "real_quantized", "weight_merge_groups": None}
    config = {"quant_method": "quark", "global_quant_config": layer, "exclude": list(exclude)}
    config |= {"layer_quant_config": {}, "layer_type_quant_config": {}, "export": export}
    return config | {"algo_config": None, "quant_mode": "eager_mode", "softmax_quant_spec": None}


def make_quark_fp8(*exclude: str) -> Config:
    spec = {"dtype": "fp8_e4m3", "is_dynamic": False, "qscheme": "per_tensor", "group_size": None}
    spec |= {"ch_axis": None, "symmetric": None, "round_method": None, "scale_type": None}
    return make_quark(spec, spec, *exclude)


def make_quark_mxfp4(*exclude: str) -> Config:
    spec = {"dtype": "fp4", "is_dynamic": False, "qscheme": "per_group", "group_size": 32}
    spec |= {"ch_axis": -1, "scale_format": "e8m0", "scale_calculation_mode": "even"}
    return make_quark(spec, spec | {"is_dynamic": True}, *exclude)


def make_mxfp4(*modules: str) -> Config:
    return {"quant_method": "mxfp4", "modules_to_not_convert": list(modules)}


def list_layers(*ranges: tuple[int, int]) -> tuple[int, ...]:
    return tuple(layer for first, last in ranges for layer in range(first, last))


GPT_OSS_EXCLUDED = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens")
GPT_OSS_EXCLUDED += ("lm_head",)
GLM_EXCLUDED = (*list_layer_modules(range(93), "mlp.gate"), "lm_head", "model.embed_tokens")
DEEPSEEK_NVFP4 = make_modelopt("NVFP4", "lm_head", *list_layer_modules(range(61), "self_attn*"))
DEEPSEEK_NVFP4 |= {"exclude_modules": [*DEEPSEEK_NVFP4.pop("ignore"), "model.layers.61*"]}
LLAMA4_EXCLUDED = ("*router*", "*lm_head*", "vision_model*", "multi_modal_projector*")
KIMI_INT4 = make_compressed_int4(
    *(32, "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"),
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
)
REDHAT_LLAMA4 = ("re:.*lm_head", "re:.*self_attn", "re:.*router", "re:.*vision_model")
REDHAT_LLAMA4 += ("re:.*multi_modal_projector", "re:.*shared_expert")
NEMOTRON_ULTRA = (
    "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEME"
    "MEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
)
NEMOTRON_ULTRA_LAYERS = tuple(i for i, kind in enumerate(NEMOTRON_ULTRA) if kind == "E")
DEEPSEEK_LAYERS, KIMI_LAYERS = list_layers((3, 61)), list_layers((1, 61))
MODELS: dict[str, tuple[Config, Config | None, SchemeByLayers]] = {
    # fp8 by block
    "deepseek-ai/DeepSeek-R1": (make_deepseek(), make_fp8(), {DEEPSEEK_LAYERS: FP8_BLOCK}),
    "deepseek-ai/DeepSeek-V3-0324": (make_deepseek(), make_fp8(), {DEEPSEEK_LAYERS: FP8_BLOCK}),
    "deepseek-ai/DeepSeek-R1-0528": (make_deepseek(), make_fp8(), {DEEPSEEK_LAYERS: FP8_BLOCK}),
    "deepseek-ai/DeepSeek-V3.1-Terminus": (
        make_deepseek(),
        make_fp8(scale_fmt="ue8m0"),
        {DEEPSEEK_LAYERS: FP8_BLOCK},
    ),
    "deepseek-ai/DeepSeek-V3.2-Exp": (
        make_deepseek(model_type="deepseek_v32"),
        make_fp8(scale_fmt="ue8m0"),
        {DEEPSEEK_LAYERS: FP8_BLOCK},
    ),
    "moonshotai/Kimi-K2-Instruct": (make_kimi(), make_fp8(), {KIMI_LAYERS: FP8_BLOCK}),
    "moonshotai/Kimi-K2-Instruct-0905": (make_kimi(), make_fp8(), {KIMI_LAYERS: FP8_BLOCK}),
    "Qwen/Qwen3-235B-A22B-FP8": (
        make_qwen_235b(),
        make_qwen_fp8(94),
        {list_layers((0, 94)): FP8_BLOCK},
    ),
    "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8": (
        make_qwen_235b(),
        make_qwen_fp8(94),
        {list_layers((0, 94)): FP8_BLOCK},
    ),
    "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8": (
        make_qwen(),
        make_qwen_fp8(48),
        {list_layers((0, 48)): FP8_BLOCK},
    ),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8": (
        make_qwen(),
        make_qwen_fp8(48),
        {list_layers((0, 48)): FP8_BLOCK},
    ),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8": (
        make_qwen_480b(),
        make_qwen_fp8(62),
        {list_layers((0, 62)): FP8_BLOCK},
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct-FP8": (
        make_qwen(48, 512) | {"model_type": "qwen3_next", "num_experts_per_tok": 10},
        make_fp8(
            modules_to_not_convert=[
                *("lm_head", "model.embed_tokens"),
                *list_layer_modules(
                    range(48), "mlp.gate", "mlp.shared_expert_gate", "linear_attn.conv1d"
                ),
                *list_layer_modules(range(48), "linear_attn.in_proj_ba"),
            ]
        ),
        {list_layers((0, 48)): FP8_BLOCK},
    ),
    "Qwen/Qwen3-VL-30B-A3B-Instruct-FP8": (
        make_qwen_vl(48),
        make_qwen_fp8(48, "model.language_model.layers", "model.visual.merger.linear_fc1"),
        {list_layers((0, 48)): FP8_BLOCK},
    ),
    "Qwen/Qwen3-VL-235B-A22B-Instruct-FP8": (
        make_qwen_vl(94, hidden_size=4096, moe_intermediate_size=1536),
        make_qwen_fp8(94, "model.language_model.layers", "model.visual.merger.linear_fc1"),
        {list_layers((0, 94)): FP8_BLOCK},
    ),
    "MiniMaxAI/MiniMax-M2.1": (
        make_config(
            "minimax_m2", 62, hidden_size=3072, intermediate_size=1536, num_local_experts=256
        )
        | {"num_experts_per_tok": 8},
        make_fp8(
            fmt="float8_e4m3fn",
            modules_to_not_convert=["gate", "e_score_correction_bias", "lm_head"],
        ),
        {list_layers((0, 62)): FP8_BLOCK},
    ),
    "tencent/Hunyuan-A13B-Instruct-FP8": (
        make_config("hunyuan_v1_moe", 32, hidden_size=4096, intermediate_size=3072, num_experts=64)
        | {"moe_topk": [8] * 32, "moe_intermediate_size": [3072] * 32},
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": [
                "lm_head",
                "model.embed_tokens",
                *list_layer_modules(range(32), "mlp.gate"),
            ],
        },
        {list_layers((0, 32)): STATIC},
    ),
    # fp8 by channel and by tensor
    "zai-org/GLM-4.5-FP8": (
        make_glm(92, 3),
        make_compressed_fp8(*GLM_EXCLUDED),
        {list_layers((3, 92)): FP8_CHANNEL},
    ),
    "zai-org/GLM-4.5-Air-FP8": (
        make_glm_air(),
        make_compressed_fp8(*GLM_EXCLUDED),
        {list_layers((1, 46)): FP8_CHANNEL},
    ),
    "zai-org/GLM-4.6-FP8": (
        make_glm(92, 3),
        make_compressed_fp8(*GLM_EXCLUDED),
        {list_layers((3, 92)): FP8_CHANNEL},
    ),
    "RedHatAI/Qwen3-235B-A22B-FP8-dynamic": (
        make_qwen_235b(),
        make_compressed_fp8("lm_head", *list_layer_modules(range(94), "mlp.gate")),
        {list_layers((0, 94)): FP8_CHANNEL},
    ),
    "RedHatAI/Mixtral-8x22B-Instruct-v0.1-FP8": (
        make_mixtral(56, hidden_size=6144, intermediate_size=16384),
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": [*list_layer_modules(range(56), "block_sparse_moe.gate"), "lm_head"],
        },
        {list_layers((0, 56)): STATIC},
    ),
    "amd/Mixtral-8x7B-Instruct-v0.1-FP8-KV": (
        make_mixtral(),
        make_quark_fp8("lm_head", *list_layer_modules(range(32), "block_sparse_moe.gate")),
        {list_layers((0, 32)): STATIC},
    ),
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8": (
        make_llama4(128, 2),
        {
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": 1200.0,
            "modules_to_not_convert": [
                *list_layer_modules(
                    range(48), "self_attn", "feed_forward.router", prefix="model.layers"
                ),
                *list_layer_modules(range(48), "feed_forward.shared_expert", prefix="model.layers"),
                *("lm_head", "vision_model", "multi_modal_projector"),
            ],
        },
        {tuple(range(1, 48, 2)): FP8_CHANNEL},
    ),
    "nvidia/Llama-4-Scout-17B-16E-Instruct-FP8": (
        make_llama4(16, 1),
        make_modelopt("FP8", *LLAMA4_EXCLUDED),
        {list_layers((0, 48)): STATIC},
    ),
    "nvidia/Qwen3-235B-A22B-FP8": (
        make_qwen_235b(),
        make_modelopt("FP8", "lm_head", *list_layer_modules(range(94), "mlp.gate")),
        {list_layers((0, 94)): STATIC},
    ),
    # Four-bit floats
    "openai/gpt-oss-120b": (
        make_gpt_oss(36, 128),
        make_mxfp4(*GPT_OSS_EXCLUDED),
        {list_layers((0, 36)): MXFP4},
    ),
    "nvidia/DeepSeek-V3-0324-FP4": (make_deepseek(), DEEPSEEK_NVFP4, {DEEPSEEK_LAYERS: NVFP4}),
    "nvidia/DeepSeek-R1-0528-FP4": (make_deepseek(), DEEPSEEK_NVFP4, {DEEPSEEK_LAYERS: NVFP4}),
    "nvidia/Qwen3-235B-A22B-NVFP4": (
        make_qwen_235b(),
        make_modelopt("NVFP4", "lm_head", *list_layer_modules(range(94), "mlp.gate")),
        {list_layers((0, 94)): NVFP4},
    ),
    "nvidia/Kimi-K2-Thinking-NVFP4": (
        make_kimi(),
        make_modelopt(
            "NVFP4", "lm_head", *list_layer_modules(range(61), "self_attn*", "mlp.shared_experts*")
        ),
        {KIMI_LAYERS: NVFP4},
    ),
    "nvidia/Llama-4-Scout-17B-16E-Instruct-FP4": (
        make_llama4(16, 1),
        make_modelopt("NVFP4", *LLAMA4_EXCLUDED),
        {list_layers((0, 48)): NVFP4},
    ),
    "RedHatAI/Qwen3-30B-A3B-NVFP4": (
        make_qwen(),
        make_compressed_nvfp4("lm_head", *list_layer_modules(range(48), "mlp.gate")),
        {list_layers((0, 48)): NVFP4},
    ),
    "amd/DeepSeek-R1-0528-MXFP4": (
        make_deepseek(),
        make_quark_mxfp4("lm_head", *list_layer_modules(range(61), "self_attn*", "mlp.gate")),
        {DEEPSEEK_LAYERS: MXFP4},
    ),
    # Integers
    "moonshotai/Kimi-K2-Thinking": (make_kimi(), KIMI_INT4, {KIMI_LAYERS: G32}),
    "Qwen/Qwen3-235B-A22B-GPTQ-Int4": (make_qwen_235b(), make_gptq(), {list_layers((0, 94)): G128}),
    "Qwen/Qwen1.5-MoE-A2.7B-Chat-GPTQ-Int4": (
        make_qwen2(24, 60, 4, 2048, 1408),
        make_gptq(model_name_or_path=None, model_file_base_name="model"),
        {list_layers((0, 24)): G128},
    ),
    "Qwen/Qwen2-57B-A14B-Instruct-GPTQ-Int4": (
        make_qwen2(28, 64, 8, 3584, 2560),
        make_gptq(model_name_or_path=None, model_file_base_name="model"),
        {list_layers((0, 28)): G128},
    ),
    "TheBloke/Mixtral-8x7B-Instruct-v0.1-AWQ": (
        make_mixtral(),
        make_awq(modules_to_not_convert=["gate"]),
        {list_layers((0, 32)): G128_ZERO_POINTS},
    ),
    "cognitivecomputations/DeepSeek-R1-AWQ": (
        make_deepseek(),
        make_awq(modules_to_not_convert=None),
        {DEEPSEEK_LAYERS: G128_ZERO_POINTS},
    ),
    "QuantTrio/GLM-4.5-Air-AWQ-FP16Mix": (
        make_glm_air(),
        make_awq(modules_to_not_convert=["model.layers.0.", "shared_experts", "mlp.gate"]),
        {list_layers((1, 46)): G128_ZERO_POINTS},
    ),
    "cyankiwi/Qwen3-Coder-30B-A3B-Instruct-AWQ-4bit": (
        make_qwen(),
        make_compressed_int4(32, *list_layer_modules(range(48), "mlp.gate"), "lm_head"),
        {list_layers((0, 48)): G32},
    ),
    "Intel/Qwen3-30B-A3B-Instruct-2507-int4-AutoRound": (
        make_qwen(),
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "data_type": "int",
            "autoround_version": "0.6.1",
            "block_name_to_quantize": "model.layers",
            "extra_config": {
                name: {"bits": 16, "data_type": "float"}
                for name in list_layer_modules(range(48), "mlp.gate")
            },
        },
        {list_layers((0, 48)): G128},
    ),
    "unsloth/Qwen3-30B-A3B-bnb-4bit": (
        make_qwen(),
        {
            "quant_method": "bitsandbytes",
            "_load_in_4bit": True,
            "_load_in_8bit": False,
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_skip_modules": None,
            "llm_int8_threshold": 6.0,
        },
        {list_layers((0, 48)): "none"},
    ),
    # Read from copies of the files (ai-dynamo/aiconfigurator), with their entries about experts
    "XiaomiMiMo/MiMo-V2-Flash": (
        make_config(
            "mimo_v2_flash",
            48,
            hidden_size=4096,
            moe_intermediate_size=2048,
            n_routed_experts=256,
            num_experts_per_tok=8,
            moe_layer_freq=[0] + [1] * 47,
        ),
        make_fp8(),
        {list_layers((1, 48)): FP8_BLOCK},
    ),
    "zai-org/GLM-5-FP8": (
        make_glm_dsa(),
        make_fp8(
            modules_to_not_convert=[
                "lm_head",
                "model.embed_tokens",
                *list_layer_modules(range(79), "input_layernorm", "self_attn.indexers_proj"),
                *list_layer_modules(range(3, 79), "mlp.gate", "mlp.gate.e_score_correction_bias"),
            ]
        ),
        {list_layers((3, 78)): FP8_BLOCK},
    ),
    "nvidia/GLM-5.1-NVFP4": (
        make_glm_dsa(),
        make_modelopt_groups(
            *("lm_head", "model.layers.0*", "model.layers.1.*", "model.layers.2.*"),
            *list_layer_modules(range(3, 78), "mlp.shared_experts*", "self_attn*"),
            "model.layers.78*",
        ),
        {list_layers((3, 78)): NVFP4},
    ),
    "nvidia/Kimi-K2.6-NVFP4": (
        make_kimi_vl(),
        make_modelopt_groups(
            *("language_model.lm_head", "language_model.model.layers.0*"),
            *list_layer_modules(
                *(range(1, 61), "mlp.shared_experts*", "self_attn*"),
                prefix="language_model.model.layers",
            ),
            *("mm_projector*", "vision_tower*"),
        ),
        {KIMI_LAYERS: NVFP4},
    ),
    "moonshotai/Kimi-K2.5": (make_kimi_vl(), KIMI_INT4, {KIMI_LAYERS: G32}),
    "moonshotai/Kimi-K3": (
        make_kimi_k3(),
        make_compressed(
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
            | {"symmetric": True, "dynamic": False, "actorder": None, "scale_dtype": "torch.uint8"},
            *(None, "mxfp4-pack-quantized"),
            [
                *("re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*"),
                *("re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "re:.*vision_tower.*"),
            ],
        ),
        {list_layers((1, 93)): MXFP4},
    ),
    "nvidia/Gemma-4-26B-A4B-NVFP4": (
        make_gemma4(),
        make_modelopt_groups(
            *("lm_head", "model.embed_vision*", "model.vision_tower*"),
            *list_layer_modules(
                *(range(30), "mlp*", "router*", "self_attn*"), prefix="model.language_model.layers"
            ),
        ),
        {list_layers((0, 30)): NVFP4},
    ),
    "nvidia/MiniMax-M2.7-NVFP4": (
        make_config(
            "minimax_m2",
            62,
            hidden_size=3072,
            intermediate_size=1536,
            num_local_experts=256,
            num_experts_per_tok=8,
        ),
        make_modelopt_groups(
            "lm_head", *list_layer_modules(range(62), "block_sparse_moe.gate", "self_attn*")
        ),
        {list_layers((0, 62)): NVFP4},
    ),
    "nvidia/Qwen3.5-397B-A17B-NVFP4": (
        make_qwen_3_5(60, 512, 10, hidden_size=4096, moe_intermediate_size=1024),
        make_modelopt_groups(
            *("lm_head", "*.mlp.shared_expert.*", "model.visual*", "mtp.layers.0*"),
            *list_layer_modules(
                *(range(60), "mlp.shared_expert*", "mlp.shared_expert_gate", "self_attn*"),
                prefix="model.language_model.layers",
            ),
        ),
        {list_layers((0, 60)): NVFP4},
    ),
    "nvidia/Qwen3.6-35B-A3B-NVFP4": (
        make_qwen_3_5(40, 256, 8, hidden_size=2048, moe_intermediate_size=512),
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                f"model.language_model.layers.{layer}.{module}": options
                for layer in range(40)
                for module, options in (
                    ("self_attn.q_proj", {"quant_algo": "FP8"}),
                    ("mlp.experts", {"quant_algo": "W4A16_NVFP4", "group_size": 16}),
                    ("mlp.shared_expert.up_proj", {"quant_algo": "W4A16_NVFP4", "group_size": 16}),
                )
            },
            "exclude_modules": ["mtp.layers.0*", "mtp*"],
        },
        {list_layers((0, 40)): NVFP4},
    ),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4": (
        make_nemotron_ultra(),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
        {NEMOTRON_ULTRA_LAYERS: NVFP4},
    ),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8": (
        make_nemotron_ultra(),
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        {NEMOTRON_ULTRA_LAYERS: STATIC},
    ),
    "deepseek-ai/DeepSeek-V4-Flash": (
        make_config(
            "deepseek_v4",
            43,
            hidden_size=4096,
            moe_intermediate_size=2048,
            n_routed_experts=256,
            num_experts_per_tok=6,
            routed_scaling_factor=1.5,
            expert_dtype="fp4",
            num_hash_layers=3,
            num_nextn_predict_layers=1,
            swiglu_limit=10.0,
        ),
        make_fp8(scale_fmt="ue8m0"),
        {list_layers((0, 43)): MXFP4},
    ),
    # Not taken from the file of a repository
    "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": (
        make_llama4(16, 1),
        make_compressed_fp8(*REDHAT_LLAMA4),
        {list_layers((0, 48)): FP8_CHANNEL},
    ),
    "RedHatAI/Llama-4-Scout-17B-16E-Instruct-quantized.w4a16": (
        make_llama4(16, 1),
        make_compressed_int4(128, *REDHAT_LLAMA4),
        {list_layers((0, 48)): G128},
    ),
    "RedHatAI/Llama-4-Scout-17B-16E-Instruct-NVFP4": (
        make_llama4(16, 1),
        make_compressed_nvfp4(*REDHAT_LLAMA4),
        {list_layers((0, 48)): NVFP4},
    ),
}
RECONSTRUCTED = {
    "cyankiwi/Qwen3-Coder-30B-A3B-Instruct-AWQ-4bit",
    "amd/DeepSeek-R1-0528-MXFP4",
    "nvidia/Kimi-K2-Thinking-NVFP4",
    "QuantTrio/GLM-4.5-Air-AWQ-FP16Mix",
    "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic",
    "RedHatAI/Llama-4-Scout-17B-16E-Instruct-quantized.w4a16",
    "RedHatAI/Llama-4-Scout-17B-16E-Instruct-NVFP4",
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_have_the_schemes_of_their_configs(tmp_path: Path, name: str) -> None:
    config, quantization, expected = MODELS[name]
    if quantization is not None:
        config = config | {"quantization_config": quantization}
    path = write_config(tmp_path, config)
    _, schemes = layers_of_file(path)
    assert {run.layers: run.scheme for run in schemes} == expected
    (scheme,) = expected.values()
    assert problem_fields_of_file(path).get("quant", "none") == scheme


def test_reconstructed_models_are_named() -> None:
    assert set(MODELS) >= RECONSTRUCTED
    assert len(MODELS) - len(RECONSTRUCTED) >= 40
