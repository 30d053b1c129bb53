"""`--model PATH` reads a config.json, and refuses unknown content that could change the layer."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from model_configs import (
    DBRX,
    DEEPSEEK,
    FP8_QUANTIZATION_CONFIG,
    GPT_OSS,
    HUNYUAN,
    INKLING,
    KIMI_LINEAR,
    LLAMA4,
    MIXTRAL,
    NEMOTRON,
    QWEN3,
    without,
    write_config,
)

from modular_kernel.cli.options import ProblemOptions
from modular_kernel.cli.presets import load_problem_fields
from modular_kernel.cli.tune import _make_problems
from modular_kernel.errors import ConfigurationError
from modular_kernel.models.config_file import is_model_path, problem_fields_of_file

GPT_OSS_FIELDS = "activation=swiglu_oai:alpha=1.702,limit=7.0,interleaved=true-bias"
SUPPORTED_CONFIGS = {
    "mixtral": (MIXTRAL, "T16-H4096-I14336-E8-K2-bfloat16"),
    "qwen3": (QWEN3, "T16-H2048-I768-E128-K8-float16"),
    "deepseek": (
        DEEPSEEK,
        "T16-H7168-I2048-E256-K8-bfloat16-quant=fp8_w8a8_block-routed_scaling_factor=2.5",
    ),
    "gpt-oss": (GPT_OSS, f"T16-H2880-I2880-E128-K4-bfloat16-quant=mxfp4_w4a16-{GPT_OSS_FIELDS}"),
    "in text_config": (
        {"text_config": QWEN3, "vision_config": {}},
        "T16-H2048-I768-E128-K8-float16",
    ),
    "in text_config, with outer scheme and dtype": (
        {
            "model_type": "any",
            "text_config": without(QWEN3, "dtype"),
            "torch_dtype": "float16",
            "quantization_config": FP8_QUANTIZATION_CONFIG,
        },
        "T16-H2048-I768-E128-K8-float16-quant=fp8_w8a8_block",
    ),
    "in text_config, with its own dtype": (
        {
            "text_config": QWEN3 | {"quantization_config": FP8_QUANTIZATION_CONFIG},
            "torch_dtype": "float32",
        },
        "T16-H2048-I768-E128-K8-float16-quant=fp8_w8a8_block",
    ),
    "nested twice": (
        {
            "model_type": "qwen3_omni_moe",
            "quantization_config": FP8_QUANTIZATION_CONFIG,
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
    "one size per layer": (HUNYUAN, "T16-H4096-I3072-E64-K8-bfloat16"),
    "inkling": (INKLING, "T16-H64-I32-E8-K2-bfloat16-routed_scaling_factor=1.5"),
    "scaling factor is null": (
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


@pytest.mark.parametrize(
    ("config", "problem"), SUPPORTED_CONFIGS.values(), ids=SUPPORTED_CONFIGS.keys()
)
def test_problem_of_each_config(tmp_path: Path, config: dict, problem: str) -> None:
    path = write_config(tmp_path, config)
    assert str(ProblemOptions(model=path).problem()) == problem
    assert load_problem_fields(f"{tmp_path}{os.sep}") == load_problem_fields(
        path
    )  # a folder means its config.json
    assert ProblemOptions(model=path, hidden=64, quant="none").problem().hidden == 64


INVALID_CONFIGS: dict[str, Any] = {
    "not JSON": "{",
    "empty": "",
    "a list": "[]",
    "nested deeply": "[" * 100_000,
    "a duplicate key": '{"num_experts": 8, "num_experts": 4}',
    "dense": {"hidden_size": 4096, "intermediate_size": 11008},
    "no type": without(MIXTRAL, "model_type"),
    "unknown type": MIXTRAL | {"model_type": "mixtral2"},
    "a type that is a list": MIXTRAL | {"model_type": ["mixtral"]},
    "a type with experts of another kind": MIXTRAL | {"model_type": "doge"},
    "no activation": without(MIXTRAL, "hidden_act"),
    "unsupported activation": MIXTRAL | {"hidden_act": "quick_gelu"},
    "ungated with a gated activation": NEMOTRON | {"mlp_hidden_act": "silu"},
    "no scaling factor": without(DEEPSEEK, "routed_scaling_factor"),
    "no limit": without(GPT_OSS, "swiglu_limit"),
    "sizes that differ by layer": HUNYUAN | {"moe_topk": [8, 4]},
    "sizes that differ by name": HUNYUAN | {"num_experts_per_tok": 4},
    "an empty list of sizes": HUNYUAN | {"moe_topk": []},
    "no ffn_config": without(DBRX, "ffn_config"),
    "two language models": {"text_config": QWEN3, "thinker_config": QWEN3},
    "two schemes": {
        "text_config": QWEN3 | {"quantization_config": {"quant_method": "mxfp4"}},
        "quantization_config": FP8_QUANTIZATION_CONFIG,
    },
    "two dtypes": MIXTRAL | {"dtype": "float16"},
    "experts in an unknown dtype": DEEPSEEK | {"expert_dtype": "fp6"},
    "experts in a dtype without a scheme": MIXTRAL | {"expert_dtype": "fp4"},
    "text_config is null": {"text_config": None},
    "nested too deeply": {"text_config": {"text_config": {"text_config": QWEN3}}},
    "no hidden": {k: v for k, v in MIXTRAL.items() if k != "hidden_size"},
    "hidden is text": MIXTRAL | {"hidden_size": "4096"},
    "hidden is true": MIXTRAL | {"hidden_size": True},
    "hidden is huge": MIXTRAL | {"hidden_size": 10**30},
    "hidden is 0": MIXTRAL | {"hidden_size": 0},
    "hidden is a fraction": MIXTRAL | {"hidden_size": 4096.5},
    "intermediate is a list": MIXTRAL | {"intermediate_size": [1, 2]},
    "top_k above the experts": MIXTRAL | {"num_experts_per_tok": 9},
    "activation": MIXTRAL | {"hidden_act": "__import__('os')"},
    "activation is a number": MIXTRAL | {"hidden_act": 5},
    "activation is an object without its name": {
        "model_type": "step3p5",
        "hidden_act": {"kind": "gelu"},
        "moe_router_scaling_factor": 2.5,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 128,
        "hidden_size": 128,
    },
    "dtype": MIXTRAL | {"torch_dtype": "int8"},
    "dtype is a list": MIXTRAL | {"torch_dtype": ["bfloat16"]},
    "scaling": DEEPSEEK | {"routed_scaling_factor": -1},
    "scaling is nan": json.dumps(DEEPSEEK).replace("2.5", "NaN"),
    "quant": MIXTRAL | {"quantization_config": {"quant_method": "magic"}},
    "quant is a text": MIXTRAL | {"quantization_config": "fp8"},
    "block": DEEPSEEK | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1]}},
    "bits": MIXTRAL | {"quantization_config": {"quant_method": "gptq", "bits": 3}},
    "limit": GPT_OSS | {"swiglu_limit": "seven"},
    "file too large": " " * (1 << 20) + "{}",
}


@pytest.mark.parametrize("config", INVALID_CONFIGS.values(), ids=INVALID_CONFIGS.keys())
def test_unsupported_configs_raise_typed_errors(tmp_path: Path, config: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        problem_fields_of_file(write_config(tmp_path, config))
    assert caught.value.what.startswith("model ")
    assert len(str(caught.value)) < 1000


def test_errors_state_what_they_got_and_need(tmp_path: Path) -> None:
    for config, message in (
        (
            MIXTRAL | {"model_type": "mixtra"},
            "model_type = 'mixtra', need a supported MoE model_type",
        ),
        (MIXTRAL | {"model_type": "mixtra"}, "such as mixtral"),
        ({"text_config": {"model_type": "llama"}}, "got text_config.model_type = 'llama'"),
        (without(MIXTRAL, "num_local_experts"), "got no num_experts or num_local_experts"),
        (MIXTRAL | {"model_type": "doge"}, "'doge': its experts are embedding rows"),
        (HUNYUAN | {"num_experts_per_tok": 4}, "moe_topk = [8, 8, 8], num_experts_per_tok = 4"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            problem_fields_of_file(write_config(tmp_path, config))
        assert message in str(caught.value)


def test_tune_keeps_the_schemes_of_files(tmp_path: Path) -> None:
    path = write_config(tmp_path, DEEPSEEK)
    assert [(n, p.quant) for n, p in _make_problems(ProblemOptions(model=f"mixtral,{path}"))] == [
        ("mixtral", "none"),
        (tmp_path.name, "fp8_w8a8_block"),
    ]
    (_, problem), *other_problems = _make_problems(ProblemOptions(model=path, quant="none"))
    assert (problem.quant, other_problems) == ("none", [])


def test_options_override_the_file(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"text_config": LLAMA4})
    assert ProblemOptions(model=path).problem().apply_router_weight_on_input
    overridden = ProblemOptions(model=path, router_weight_on_input=False)
    assert not overridden.problem().apply_router_weight_on_input


def test_unreadable_files_raise_typed_errors(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path, tmp_path / "none.json", tmp_path / "pipe.json", "a\0b/c.json"):
        with pytest.raises(ConfigurationError, match="model"):
            problem_fields_of_file(str(path))
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="invalid JSON"):
        problem_fields_of_file(str(tmp_path))


def test_error_names_the_missing_config_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        problem_fields_of_file(str(tmp_path))
    assert f"{str(tmp_path / 'config.json')!r}: No such file" in str(caught.value)


def test_model_names_are_not_read_as_files() -> None:
    assert not is_model_path("mixtral-8x7b")
    assert is_model_path("./model")
    assert is_model_path("config.json")
    with pytest.raises(ConfigurationError, match=r"need mixtral-8x7b .*path of a config\.json"):
        load_problem_fields("mixtral-8x7")
