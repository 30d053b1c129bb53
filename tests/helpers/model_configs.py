"""Entries of config.json of published models, for tests of `--model`."""

import json
from pathlib import Path
from typing import Any

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
QWEN3 = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "hidden_act": "silu",
    "dtype": "float16",
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "quantization_config": {"quant_method": "mxfp4"},
}


def write_config(folder: Path, config: Any) -> str:
    """Write config.json and return its path. A string is written unchanged, others as JSON."""
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return str(path)


NEMOTRON = {
    "model_type": "nemotron_h",
    "hidden_size": 2688,
    "moe_intermediate_size": 1856,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "mlp_hidden_act": "relu2",
    "routed_scaling_factor": 2.5,
    "torch_dtype": "bfloat16",
}
LLAMA4 = {
    "model_type": "llama4_text",
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "hidden_act": "silu",
}
DBRX = {
    "model_type": "dbrx",
    "d_model": 6144,
    "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    "torch_dtype": "bfloat16",
}
KIMI_LINEAR = {
    "model_type": "kimi_linear",
    "hidden_size": 2304,
    "moe_intermediate_size": 1024,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "hidden_act": "silu",
    "routed_scaling_factor": 2.446,
}
HUNYUAN = {
    "model_type": "hunyuan_v1_moe",
    "hidden_size": 4096,
    "intermediate_size": 3072,
    "num_experts": 64,
    "moe_topk": [8, 8, 8],
    "hidden_act": "silu",
}
INKLING = {
    "model_type": "inkling_text",
    "hidden_size": 64,
    "intermediate_size": 32,
    "dense_intermediate_size": 96,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "route_scale": 1.5,
}
FP8_QUANTIZATION_CONFIG = DEEPSEEK["quantization_config"]


def without(config: dict, *names: str) -> dict:
    return {name: value for name, value in config.items() if name not in names}
