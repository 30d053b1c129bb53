"""`--model PATH`: a config.json is read as data, and nothing odd in it is half understood."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from modular_kernel.cli.options import ProblemOptions
from modular_kernel.cli.presets import facts
from modular_kernel.cli.tune import _problems
from modular_kernel.errors import ConfigurationError
from modular_kernel.models.config_file import facts_of_file, is_file

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


def written(folder: Path, config: Any) -> str:
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
FP8 = DEEPSEEK["quantization_config"]


def without(config: dict, *names: str) -> dict:
    return {name: value for name, value in config.items() if name not in names}


OAI = "activation=swiglu_oai:alpha=1.702,limit=7.0,interleaved=true-bias"
KNOWN = {
    "mixtral": (MIXTRAL, "T16-H4096-I14336-E8-K2-bfloat16"),
    "qwen3": (QWEN3, "T16-H2048-I768-E128-K8-float16"),
    "deepseek": (
        DEEPSEEK,
        "T16-H7168-I2048-E256-K8-bfloat16-quant=fp8_w8a8_block-routed_scaling_factor=2.5",
    ),
    "gpt-oss": (GPT_OSS, f"T16-H2880-I2880-E128-K4-bfloat16-quant=mxfp4_w4a16-{OAI}"),
    "inside": ({"text_config": QWEN3, "vision_config": {}}, "T16-H2048-I768-E128-K8-float16"),
    "inside, with its parent's scheme and dtype": (
        {
            "model_type": "any",
            "text_config": without(QWEN3, "dtype"),
            "torch_dtype": "float16",
            "quantization_config": FP8,
        },
        "T16-H2048-I768-E128-K8-float16-quant=fp8_w8a8_block",
    ),
    "inside, with a dtype of its own": (
        {"text_config": QWEN3 | {"quantization_config": FP8}, "torch_dtype": "float32"},
        "T16-H2048-I768-E128-K8-float16-quant=fp8_w8a8_block",
    ),
    "two deep": (
        {
            "model_type": "qwen3_omni_moe",
            "quantization_config": FP8,
            "thinker_config": {"dtype": "float16", "text_config": without(QWEN3, "dtype")},
            "talker_config": {"text_config": QWEN3 | {"moe_intermediate_size": 384}},
        },
        "T16-H2048-I768-E128-K8-float16-quant=fp8_w8a8_block",
    ),
    "nemotron": (
        NEMOTRON,
        "T16-H2688-I1856-E128-K6-bfloat16-activation=relu2-routed_scaling_factor=2.5",
    ),
    "nemotron in a latent space": (
        NEMOTRON | {"moe_latent_size": 1024},
        "T16-H1024-I1856-E128-K6-bfloat16-activation=relu2-routed_scaling_factor=2.5",
    ),
    "llama-4": (
        {"model_type": "llama4", "text_config": LLAMA4},
        "T16-H5120-I8192-E16-K1-bfloat16-apply_router_weight_on_input",
    ),
    "dbrx": (DBRX, "T16-H6144-I10752-E16-K4-bfloat16"),
    "kimi-linear": (KIMI_LINEAR, "T16-H2304-I1024-E256-K8-bfloat16-routed_scaling_factor=2.446"),
    "one number a layer": (HUNYUAN, "T16-H4096-I3072-E64-K8-bfloat16"),
    "inkling": (INKLING, "T16-H64-I32-E8-K2-bfloat16-routed_scaling_factor=1.5"),
    "a factor of null": (
        without(DEEPSEEK, "routed_scaling_factor", "quantization_config")
        | {"model_type": "mimo_v2_flash", "routed_scaling_factor": None},
        "T16-H7168-I2048-E256-K8-bfloat16",
    ),
    "kimi-k2": (
        {"text_config": without(DEEPSEEK, "quantization_config") | {"model_type": "kimi_k2"}},
        "T16-H7168-I2048-E256-K8-bfloat16-routed_scaling_factor=2.5",
    ),
    "gptq": (
        MIXTRAL
        | {
            "quantization_config": {
                "quant_method": "gptq",
                "bits": 4,
                "group_size": 64,
                "sym": True,
            }
        },
        "T16-H4096-I14336-E8-K2-bfloat16-quant=int4_w4a16_group:group=64",
    ),
    "awq": (
        MIXTRAL
        | {
            "quantization_config": {
                "quant_method": "awq",
                "bits": 4,
                "group_size": 128,
                "zero_point": True,
            }
        },
        "T16-H4096-I14336-E8-K2-bfloat16-quant=int4_w4a16_group:zero_points=true",
    ),
}


@pytest.mark.parametrize(("config", "problem"), KNOWN.values(), ids=KNOWN.keys())
def test_a_config_makes_its_problem(tmp_path: Path, config: dict, problem: str) -> None:
    path = written(tmp_path, config)
    assert str(ProblemOptions(model=path).problem()) == problem
    assert facts(f"{tmp_path}{os.sep}") == facts(path)  # the folder stands for its config.json
    assert ProblemOptions(model=path, hidden=64, quant="none").problem().hidden == 64


HOSTILE: dict[str, Any] = {
    "no json": "{",
    "nothing": "",
    "a list": "[]",
    "deep": "[" * 100_000,
    "a name twice": '{"num_experts": 8, "num_experts": 4}',
    "dense": {"hidden_size": 4096, "intermediate_size": 11008},
    "no type": without(MIXTRAL, "model_type"),
    "another type": MIXTRAL | {"model_type": "mixtral2"},
    "a type that is a list": MIXTRAL | {"model_type": ["mixtral"]},
    "a type with experts of another kind": MIXTRAL | {"model_type": "doge"},
    "no activation": without(MIXTRAL, "hidden_act"),
    "an activation of another function": MIXTRAL | {"hidden_act": "quick_gelu"},
    "ungated with a gated one's": NEMOTRON | {"mlp_hidden_act": "silu"},
    "no factor": without(DEEPSEEK, "routed_scaling_factor"),
    "no limit": without(GPT_OSS, "swiglu_limit"),
    "sizes that differ by layer": HUNYUAN | {"moe_topk": [8, 4]},
    "sizes that differ by name": HUNYUAN | {"num_experts_per_tok": 4},
    "an empty list of sizes": HUNYUAN | {"moe_topk": []},
    "no ffn_config": without(DBRX, "ffn_config"),
    "two language models": {"text_config": QWEN3, "thinker_config": QWEN3},
    "two schemes": {
        "text_config": QWEN3 | {"quantization_config": {"quant_method": "mxfp4"}},
        "quantization_config": FP8,
    },
    "two dtypes": MIXTRAL | {"dtype": "float16"},
    "experts in a dtype of their own": DEEPSEEK | {"expert_dtype": "fp4"},
    "experts in a dtype without a scheme": MIXTRAL | {"expert_dtype": "fp4"},
    "inside nothing": {"text_config": None},
    "inside itself, again": {"text_config": {"text_config": {"text_config": QWEN3}}},
    "no hidden": {k: v for k, v in MIXTRAL.items() if k != "hidden_size"},
    "hidden is text": MIXTRAL | {"hidden_size": "4096"},
    "hidden is true": MIXTRAL | {"hidden_size": True},
    "hidden is huge": MIXTRAL | {"hidden_size": 10**30},
    "hidden is 0": MIXTRAL | {"hidden_size": 0},
    "hidden is half": MIXTRAL | {"hidden_size": 4096.5},
    "intermediate is a list": MIXTRAL | {"intermediate_size": [1, 2]},
    "more than all": MIXTRAL | {"num_experts_per_tok": 9},
    "activation": MIXTRAL | {"hidden_act": "__import__('os')"},
    "activation is a number": MIXTRAL | {"hidden_act": 5},
    "dtype": MIXTRAL | {"torch_dtype": "int8"},
    "dtype is a list": MIXTRAL | {"torch_dtype": ["bfloat16"]},
    "scaling": DEEPSEEK | {"routed_scaling_factor": -1},
    "scaling is nan": json.dumps(DEEPSEEK).replace("2.5", "NaN"),
    "quant": MIXTRAL | {"quantization_config": {"quant_method": "magic"}},
    "quant is a text": MIXTRAL | {"quantization_config": "fp8"},
    "block": DEEPSEEK | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1]}},
    "bits": MIXTRAL | {"quantization_config": {"quant_method": "gptq", "bits": 3}},
    "limit": GPT_OSS | {"swiglu_limit": "seven"},
    "large": " " * (1 << 20) + "{}",
}


@pytest.mark.parametrize("config", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_no_layer_is_a_typed_error(tmp_path: Path, config: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        facts_of_file(written(tmp_path, config))
    assert caught.value.what.startswith("model ")
    assert len(str(caught.value)) < 1000


def group(weights: dict, inputs: dict | None = None, **more: object) -> dict[str, object]:
    """A quantization_config of compressed-tensors with one group."""
    one = {"weights": weights, "input_activations": inputs, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": one}} | more


F8 = {"num_bits": 8, "type": "float"}
I8 = {"num_bits": 8, "type": "int", "symmetric": True}
I4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
F4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
TOKEN = {"strategy": "token", "dynamic": True}
BLOCK = F8 | {"strategy": "block", "block_structure": [128, 128]}
KIMI_LEFT = [
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
]
FP8_STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
OPT = {"quant_method": "modelopt"}
SCHEMES: dict[str, tuple[dict[str, object], str]] = {
    "fp8": (FP8_STATIC, "fp8_w8a8_tensor:static=true"),
    "fp8 dynamic": (FP8_STATIC | {"activation_scheme": "dynamic"}, "fp8_w8a8_tensor"),
    "fp8 ue8m0": (
        {"quant_method": "fp8", "weight_block_size": [64, 32], "scale_fmt": "ue8m0"},
        "fp8_w8a8_block:block=64x32",
    ),
    "fp8 but for others": (
        {**FP8, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp", "mlp.gate", "gate"]},
        "fp8_w8a8_block",
    ),
    "8 bits with zero points": (
        {"quant_method": "gptq", "bits": 8, "group_size": 64, "sym": False},
        "int8_w8a16_group:group=64,zero_points=true",
    ),
    "awq, as it names things": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": False},
        "int4_w4a16_group:group=64",
    ),
    "gptq in act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": True},
        "int4_w4a16_act_order:group=64",
    ),
    "ct int4 in act-order": (
        group(I4 | {"symmetric": False, "actorder": "group"}),
        "int4_w4a16_act_order:group=32,zero_points=true",
    ),
    "ct int4": (
        group(I4 | {"symmetric": True}, ignore=KIMI_LEFT),
        "int4_w4a16_group:group=32",
    ),
    "ct int4 asymmetric": (
        group(I4 | {"symmetric": False}),
        "int4_w4a16_group:group=32,zero_points=true",
    ),
    "ct fp8 tensor": (
        group(F8 | {"strategy": "tensor"}, F8 | {"strategy": "tensor", "dynamic": False}),
        "fp8_w8a8_tensor:static=true",
    ),
    "ct fp8 channel": (group(F8 | {"strategy": "channel"}, F8 | TOKEN), "fp8_w8a8_channel"),
    "ct fp8 block": (
        group(BLOCK, F8 | {"strategy": "group", "group_size": 128, "dynamic": True}),
        "fp8_w8a8_block",
    ),
    "ct fp8 weights by tensor": (group(F8 | {"strategy": "tensor"}), "fp8_w8a16_tensor"),
    "ct fp8 weights by channel": (group(F8 | {"strategy": "channel"}), "fp8_w8a16_channel"),
    "ct fp8 weights by block": (group(BLOCK), "fp8_w8a16_block"),
    "ct int8": (
        group(I8 | {"strategy": "channel"}, I8 | TOKEN),
        "int8_w8a8_channel",
    ),
    "ct int4 by channel": (
        group(I4 | {"strategy": "channel", "symmetric": True}),
        "int4_w4a16_group:group=14336",
    ),
    "ct int8 of one group": (
        group(I8 | {"strategy": "group", "group_size": -1}),
        "int8_w8a16_group:group=14336",
    ),
    "gptq of one group": (
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True},
        "int4_w4a16_group:group=14336",
    ),
    "ct int8 weights": (group(I8 | {"strategy": "channel"}), "int8_w8a16_channel"),
    "ct nvfp4": (group(F4, F4 | {"dynamic": "local"}), "nvfp4_w4a16"),
    "ct nvfp4 weights alone": (group(F4), "nvfp4_w4a16"),
    "ct mxfp4": (group(F4 | {"strategy": "group", "group_size": 32}), "mxfp4_w4a16"),
    "modelopt fp8": (OPT | {"quant_algo": "FP8"}, "fp8_w8a8_tensor:static=true"),
    "modelopt nvfp4": (OPT | {"quant_algo": "NVFP4", "group_size": 16}, "nvfp4_w4a16"),
}


@pytest.mark.parametrize(("config", "scheme"), SCHEMES.values(), ids=SCHEMES.keys())
def test_a_quantization_config_means_its_scheme(
    tmp_path: Path, config: dict[str, object], scheme: str
) -> None:
    given = MIXTRAL | {"quantization_config": config}
    assert ProblemOptions(model=written(tmp_path, given)).problem().quant == scheme
    older = MIXTRAL | {"compression_config": config}
    assert facts_of_file(written(tmp_path, older))["quant"] is not None


UNKNOWN: dict[str, dict[str, object]] = {
    "no method": {"bits": 4},
    "another method": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "no blocks, no word of activations": {"quant_method": "fp8"},
    "blocks and static": FP8 | {"activation_scheme": "static"},
    "another fp8": FP8 | {"fmt": "e5m2"},
    "another scale": FP8 | {"scale_fmt": "e3m4"},
    "experts in 4 bits": FP8 | {"expert_dtype": "fp4"},
    "gptq without sym": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "gptq without a group": {"quant_method": "gptq", "bits": 4, "sym": True},
    "groups of none": {"quant_method": "gptq", "bits": 4, "group_size": -2, "sym": True},
    "awq without zero_point": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "modelopt, mixed": OPT | {"quant_algo": "MIXED_PRECISION"},
    "modelopt without an algorithm": OPT,
    "nvfp4 by 32": OPT | {"quant_algo": "NVFP4", "group_size": 32},
    "ct without groups": {"quant_method": "compressed-tensors"},
    "ct with two": {
        "quant_method": "compressed-tensors",
        "config_groups": dict.fromkeys("ab", group(BLOCK)["config_groups"]["group_0"]),  # type: ignore[index]
    },
    "ct of other modules": {
        "quant_method": "compressed-tensors",
        "config_groups": {"a": {"weights": F8, "targets": ["re:.*self_attn.*"]}},
    },
    "ct fp8 weights by group": group(F8 | {"strategy": "group", "group_size": 128}),
    "ct fp8 static by token": group(F8 | {"strategy": "channel"}, F8 | TOKEN | {"dynamic": False}),
    "ct block by another group": group(
        BLOCK, F8 | {"strategy": "group", "group_size": 64, "dynamic": True}
    ),
    "ct int4 by channel w4a8": group(I4 | {"strategy": "channel", "symmetric": True}, I8 | TOKEN),
    "ct int4 w4a8": group(I4 | {"symmetric": True}, I8 | TOKEN),
    "ct int4 without symmetric": group(I4),
    "ct fp8 in act-order": group(BLOCK | {"actorder": "group"}),
    "ct nvfp4 and 8 bits": group(F4, F8 | TOKEN),
    "experts left out": FP8 | {"modules_to_not_convert": ["lm_head", "mlp.experts"]},
    "every mlp left out": FP8 | {"ignored_layers": ["mlp"]},
    "experts left out by a star": FP8 | {"modules_to_not_convert": ["model.layers.*.mlp.experts*"]},
    "experts left out by a pattern": group(I4 | {"symmetric": True}, ignore=["re:.*experts.*"]),
    "a pattern that could take ages": group(I4 | {"symmetric": True}, ignore=["re:(a+)+$"]),
    "left out, no list": FP8 | {"ignore": "lm_head"},
}


@pytest.mark.parametrize("config", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_an_unknown_scheme_is_a_typed_error(tmp_path: Path, config: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="quantization_config") as caught:
        facts_of_file(written(tmp_path, MIXTRAL | {"quantization_config": config}))
    assert len(str(caught.value)) < 1000


def test_errors_name_what_there_is_and_what_is_needed(tmp_path: Path) -> None:
    for config, message in (
        (
            MIXTRAL | {"model_type": "mixtra"},
            "model_type = 'mixtra', need one with experts that is",
        ),
        (MIXTRAL | {"model_type": "mixtra"}, "such as mixtral"),
        ({"text_config": {"model_type": "llama"}}, "got text_config.model_type = 'llama'"),
        (without(MIXTRAL, "num_local_experts"), "got no num_experts or num_local_experts"),
        (MIXTRAL | {"model_type": "doge"}, "'doge': its experts are rows of an embedding"),
        (HUNYUAN | {"num_experts_per_tok": 4}, "moe_topk = [8, 8, 8], num_experts_per_tok = 4"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            facts_of_file(written(tmp_path, config))
        assert message in str(caught.value)


def test_tune_keeps_the_schemes_of_files(tmp_path: Path) -> None:
    path = written(tmp_path, DEEPSEEK)
    assert [(n, p.quant) for n, p in _problems(ProblemOptions(model=f"mixtral,{path}"))] == [
        ("mixtral", "none"),
        (tmp_path.name, "fp8_w8a8_block"),
    ]
    (_, problem), *more = _problems(ProblemOptions(model=path, quant="none"))
    assert (problem.quant, more) == ("none", [])


def test_an_option_overrides_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, {"text_config": LLAMA4})
    assert ProblemOptions(model=path).problem().apply_router_weight_on_input
    given = ProblemOptions(model=path, router_weight_on_input=False)
    assert not given.problem().apply_router_weight_on_input


def test_what_is_no_file_is_a_typed_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path, tmp_path / "none.json", tmp_path / "pipe.json", "a\0b/c.json"):
        with pytest.raises(ConfigurationError, match="model"):
            facts_of_file(str(path))
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="no JSON"):
        facts_of_file(str(tmp_path))


def test_names_are_no_files() -> None:
    assert not is_file("mixtral-8x7b")
    assert is_file("./model")
    assert is_file("config.json")
    with pytest.raises(ConfigurationError, match=r"need mixtral-8x7b .*path of a config\.json"):
        facts("mixtral-8x7")
