"""`--model PATH`: a config.json is read as data, and nothing odd in it is half understood."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from modular_kernel.cli.model_files import facts_of_file, is_file
from modular_kernel.cli.options import ProblemOptions
from modular_kernel.cli.presets import facts
from modular_kernel.errors import ConfigurationError

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
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "hidden_act": "silu",
    "dtype": "float16",
}
DEEPSEEK = {
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
    "gptq": (
        MIXTRAL | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64}},
        "T16-H4096-I14336-E8-K2-bfloat16-quant=int4_w4a16_group:group=64",
    ),
    "awq": (
        MIXTRAL | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}},
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
    with pytest.raises(ConfigurationError, match=r"path of a config\.json"):
        facts("mixtral-8x7")
