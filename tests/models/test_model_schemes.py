"""`--model PATH` derives a scheme from the quantization_config, or raises a typed error."""

from pathlib import Path

import pytest
from model_configs import FP8_QUANTIZATION_CONFIG, MIXTRAL, write_config

from modular_kernel.cli.options import ProblemOptions
from modular_kernel.errors import ConfigurationError
from modular_kernel.models.config_file import problem_fields_of_file


def make_compressed_config(
    weights: dict, inputs: dict | None = None, **more: object
) -> dict[str, object]:
    """Return a quantization_config of compressed-tensors with one group."""
    group_0 = {"weights": weights, "input_activations": inputs, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group_0}} | more


F8 = {"num_bits": 8, "type": "float"}
I8 = {"num_bits": 8, "type": "int", "symmetric": True}
I4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
F4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MX4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
BY_TOKEN = {"strategy": "token", "dynamic": True}
F8_BLOCK = F8 | {"strategy": "block", "block_structure": [128, 128]}
KIMI_IGNORED = [
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
]
FP8_STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
MODELOPT_BASE = {"quant_method": "modelopt"}
# In the keys below, "ct" stands for compressed-tensors.
SCHEMES: dict[str, tuple[dict[str, object], str]] = {
    "fp8": (FP8_STATIC, "fp8_w8a8_tensor:static=true"),
    "fp8 dynamic": (FP8_STATIC | {"activation_scheme": "dynamic"}, "fp8_w8a8_tensor"),
    "fp8 ue8m0": (
        {"quant_method": "fp8", "weight_block_size": [64, 32], "scale_fmt": "ue8m0"},
        "fp8_w8a8_block:block=64x32",
    ),
    "fp8 with excluded modules": (
        {
            **FP8_QUANTIZATION_CONFIG,
            "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn", "mlp.gate", "gate"],
        },
        "fp8_w8a8_block",
    ),
    "8 bits with zero points": (
        {"quant_method": "gptq", "bits": 8, "group_size": 64, "sym": False},
        "int8_w8a16_group:group=64,zero_points=true",
    ),
    "bitsandbytes with 8 bits": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "int8_w8a16_channel",
    ),
    "awq with its own key names": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": False},
        "int4_w4a16_group:group=64",
    ),
    "gptq in act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": True},
        "int4_w4a16_act_order:group=64",
    ),
    "ct int4 in act-order": (
        make_compressed_config(I4 | {"symmetric": False, "actorder": "group"}),
        "int4_w4a16_act_order:group=32,zero_points=true",
    ),
    "ct int4": (
        make_compressed_config(I4 | {"symmetric": True}, ignore=KIMI_IGNORED),
        "int4_w4a16_group:group=32",
    ),
    "ct int4 asymmetric": (
        make_compressed_config(I4 | {"symmetric": False}),
        "int4_w4a16_group:group=32,zero_points=true",
    ),
    "ct fp8 tensor": (
        make_compressed_config(
            F8 | {"strategy": "tensor"}, F8 | {"strategy": "tensor", "dynamic": False}
        ),
        "fp8_w8a8_tensor:static=true",
    ),
    "ct fp8 channel": (
        make_compressed_config(F8 | {"strategy": "channel"}, F8 | BY_TOKEN),
        "fp8_w8a8_channel",
    ),
    "ct fp8 block": (
        make_compressed_config(
            F8_BLOCK, F8 | {"strategy": "group", "group_size": 128, "dynamic": True}
        ),
        "fp8_w8a8_block",
    ),
    "ct fp8 weights by tensor": (
        make_compressed_config(F8 | {"strategy": "tensor"}),
        "fp8_w8a16_tensor",
    ),
    "ct fp8 weights by channel": (
        make_compressed_config(F8 | {"strategy": "channel"}),
        "fp8_w8a16_channel",
    ),
    "ct fp8 weights by block": (make_compressed_config(F8_BLOCK), "fp8_w8a16_block"),
    "ct int8": (
        make_compressed_config(I8 | {"strategy": "channel"}, I8 | BY_TOKEN),
        "int8_w8a8_channel",
    ),
    "ct int4 by channel": (
        make_compressed_config(I4 | {"strategy": "channel", "symmetric": True}),
        "int4_w4a16_group:group=14336",
    ),
    "ct int8 with one group": (
        make_compressed_config(I8 | {"strategy": "group", "group_size": -1}),
        "int8_w8a16_group:group=14336",
    ),
    "gptq with one group": (
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True},
        "int4_w4a16_group:group=14336",
    ),
    "ct int8 weights": (make_compressed_config(I8 | {"strategy": "channel"}), "int8_w8a16_channel"),
    "ct nvfp4": (make_compressed_config(F4, F4 | {"dynamic": "local"}), "nvfp4_w4a16"),
    "ct nvfp4 weights only": (make_compressed_config(F4), "nvfp4_w4a16"),
    "ct int4 with int8 inputs": (
        make_compressed_config(I4 | {"symmetric": True}, I8 | BY_TOKEN),
        "int4_w4a16_group:group=32",
    ),
    "ct int4 by channel with int8 inputs": (
        make_compressed_config(I4 | {"strategy": "channel", "symmetric": True}, I8 | BY_TOKEN),
        "int4_w4a16_group:group=14336",
    ),
    "ct int4 with fp8 inputs": (
        make_compressed_config(I4 | {"symmetric": True}, F8 | BY_TOKEN),
        "int4_w4a16_group:group=32",
    ),
    "ct mxfp4": (make_compressed_config(MX4), "mxfp4_w4a16"),
    "ct mxfp4 with mxfp4 inputs": (
        make_compressed_config(MX4, MX4 | {"dynamic": True}),
        "mxfp4_w4a16",
    ),
    "ct mxfp4 with mxfp8 inputs": (
        make_compressed_config(MX4, MX4 | {"num_bits": 8, "dynamic": True}),
        "mxfp4_w4a16",
    ),
    "modelopt fp8": (MODELOPT_BASE | {"quant_algo": "FP8"}, "fp8_w8a8_tensor:static=true"),
    "modelopt nvfp4": (MODELOPT_BASE | {"quant_algo": "NVFP4", "group_size": 16}, "nvfp4_w4a16"),
}


@pytest.mark.parametrize(("config", "scheme"), SCHEMES.values(), ids=SCHEMES.keys())
def test_scheme_of_each_quantization_config(
    tmp_path: Path, config: dict[str, object], scheme: str
) -> None:
    config_json = MIXTRAL | {"quantization_config": config}
    assert ProblemOptions(model=write_config(tmp_path, config_json)).problem().quant == scheme
    older_config = MIXTRAL | {"compression_config": config}
    assert problem_fields_of_file(write_config(tmp_path, older_config))["quant"] is not None


UNSUPPORTED_CONFIGS: dict[str, dict[str, object]] = {
    "no method": {"bits": 4},
    "another method": {"quant_method": "torchao", "quant_type": "int8_weight_only"},
    "bitsandbytes without bits": {"quant_method": "bitsandbytes"},
    "fp8 without blocks or activations": {"quant_method": "fp8"},
    "blocks and static": FP8_QUANTIZATION_CONFIG | {"activation_scheme": "static"},
    "unsupported fp8 format": FP8_QUANTIZATION_CONFIG | {"fmt": "e5m2"},
    "unsupported scale format": FP8_QUANTIZATION_CONFIG | {"scale_fmt": "e3m4"},
    "experts in 6 bits": FP8_QUANTIZATION_CONFIG | {"expert_dtype": "fp6"},
    "experts in 4 bits, and static": FP8_QUANTIZATION_CONFIG
    | {"expert_dtype": "fp4", "activation_scheme": "static"},
    "gptq without sym": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "gptq without a group": {"quant_method": "gptq", "bits": 4, "sym": True},
    "invalid group size": {"quant_method": "gptq", "bits": 4, "group_size": -2, "sym": True},
    "awq without zero_point": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "modelopt, mixed": MODELOPT_BASE | {"quant_algo": "MIXED_PRECISION"},
    "modelopt without an algorithm": MODELOPT_BASE,
    "nvfp4 by 32": MODELOPT_BASE | {"quant_algo": "NVFP4", "group_size": 32},
    "ct without groups": {"quant_method": "compressed-tensors"},
    "ct with two groups": {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "a": {"weights": F8 | {"strategy": "channel"}, "targets": ["Linear"]},
            "b": {"weights": F8 | {"strategy": "tensor"}, "targets": ["Linear"]},
        },
    },
    "ct with targets that match no experts": {
        "quant_method": "compressed-tensors",
        "config_groups": {"a": {"weights": F8, "targets": ["re:.*mlp.expert.*w1"]}},
    },
    "ct fp8 weights by group": make_compressed_config(
        F8 | {"strategy": "group", "group_size": 128}
    ),
    "ct fp8 static by token": make_compressed_config(
        F8 | {"strategy": "channel"}, F8 | BY_TOKEN | {"dynamic": False}
    ),
    "ct block with another group": make_compressed_config(
        F8_BLOCK, F8 | {"strategy": "group", "group_size": 64, "dynamic": True}
    ),
    "ct int4 with static int8 inputs": make_compressed_config(
        I4 | {"symmetric": True}, I8 | BY_TOKEN | {"dynamic": False}
    ),
    "ct int4 with int4 inputs": make_compressed_config(
        I4 | {"symmetric": True}, I8 | BY_TOKEN | {"num_bits": 4}
    ),
    "ct mxfp4 with nvfp4 inputs": make_compressed_config(MX4, F4 | {"dynamic": True}),
    "ct int4 without symmetric": make_compressed_config(I4),
    "ct fp8 in act-order": make_compressed_config(F8_BLOCK | {"actorder": "group"}),
    "ct nvfp4 with fp8 inputs": make_compressed_config(F4, F8 | BY_TOKEN),
    "ignore is not a list": FP8_QUANTIZATION_CONFIG | {"ignore": "lm_head"},
}


@pytest.mark.parametrize("config", UNSUPPORTED_CONFIGS.values(), ids=UNSUPPORTED_CONFIGS.keys())
def test_unsupported_schemes_raise_typed_errors(tmp_path: Path, config: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="quantization_config") as caught:
        problem_fields_of_file(write_config(tmp_path, MIXTRAL | {"quantization_config": config}))
    assert len(str(caught.value)) < 1000
