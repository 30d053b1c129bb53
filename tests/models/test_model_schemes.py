"""`--model PATH`: a quantization_config names one of our schemes, or raises a typed error."""

from pathlib import Path

import pytest
from model_configs import FP8, MIXTRAL, written

from modular_kernel.cli.options import ProblemOptions
from modular_kernel.errors import ConfigurationError
from modular_kernel.models.config_file import problem_fields_of_file


def group(weights: dict, inputs: dict | None = None, **more: object) -> dict[str, object]:
    """A quantization_config of compressed-tensors with one group."""
    one = {"weights": weights, "input_activations": inputs, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": one}} | more


F8 = {"num_bits": 8, "type": "float"}
I8 = {"num_bits": 8, "type": "int", "symmetric": True}
I4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
F4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MX4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
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
        {
            **FP8,
            "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn", "mlp.gate", "gate"],
        },
        "fp8_w8a8_block",
    ),
    "8 bits with zero points": (
        {"quant_method": "gptq", "bits": 8, "group_size": 64, "sym": False},
        "int8_w8a16_group:group=64,zero_points=true",
    ),
    "bitsandbytes of 8 bits": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "int8_w8a16_channel",
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
    "ct int4 with int8 inputs": (
        group(I4 | {"symmetric": True}, I8 | TOKEN),
        "int4_w4a16_group:group=32",
    ),
    "ct int4 by channel with int8 inputs": (
        group(I4 | {"strategy": "channel", "symmetric": True}, I8 | TOKEN),
        "int4_w4a16_group:group=14336",
    ),
    "ct int4 with fp8 inputs": (
        group(I4 | {"symmetric": True}, F8 | TOKEN),
        "int4_w4a16_group:group=32",
    ),
    "ct mxfp4": (group(MX4), "mxfp4_w4a16"),
    "ct mxfp4 with mxfp4 inputs": (group(MX4, MX4 | {"dynamic": True}), "mxfp4_w4a16"),
    "ct mxfp4 with mxfp8 inputs": (
        group(MX4, MX4 | {"num_bits": 8, "dynamic": True}),
        "mxfp4_w4a16",
    ),
    "modelopt fp8": (OPT | {"quant_algo": "FP8"}, "fp8_w8a8_tensor:static=true"),
    "modelopt nvfp4": (OPT | {"quant_algo": "NVFP4", "group_size": 16}, "nvfp4_w4a16"),
}


@pytest.mark.parametrize(("config", "scheme"), SCHEMES.values(), ids=SCHEMES.keys())
def test_a_quantization_config_names_its_scheme(
    tmp_path: Path, config: dict[str, object], scheme: str
) -> None:
    given = MIXTRAL | {"quantization_config": config}
    assert ProblemOptions(model=written(tmp_path, given)).problem().quant == scheme
    older = MIXTRAL | {"compression_config": config}
    assert problem_fields_of_file(written(tmp_path, older))["quant"] is not None


UNKNOWN: dict[str, dict[str, object]] = {
    "no method": {"bits": 4},
    "another method": {"quant_method": "torchao", "quant_type": "int8_weight_only"},
    "bitsandbytes of no bits": {"quant_method": "bitsandbytes"},
    "no blocks, no word of activations": {"quant_method": "fp8"},
    "blocks and static": FP8 | {"activation_scheme": "static"},
    "another fp8": FP8 | {"fmt": "e5m2"},
    "another scale": FP8 | {"scale_fmt": "e3m4"},
    "experts in 6 bits": FP8 | {"expert_dtype": "fp6"},
    "experts in 4 bits, and static": FP8 | {"expert_dtype": "fp4", "activation_scheme": "static"},
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
        "config_groups": {
            "a": {"weights": F8 | {"strategy": "channel"}, "targets": ["Linear"]},
            "b": {"weights": F8 | {"strategy": "tensor"}, "targets": ["Linear"]},
        },
    },
    "ct of experts that are not there": {
        "quant_method": "compressed-tensors",
        "config_groups": {"a": {"weights": F8, "targets": ["re:.*mlp.expert.*w1"]}},
    },
    "ct fp8 weights by group": group(F8 | {"strategy": "group", "group_size": 128}),
    "ct fp8 static by token": group(F8 | {"strategy": "channel"}, F8 | TOKEN | {"dynamic": False}),
    "ct block by another group": group(
        BLOCK, F8 | {"strategy": "group", "group_size": 64, "dynamic": True}
    ),
    "ct int4 with static int8 inputs": group(
        I4 | {"symmetric": True}, I8 | TOKEN | {"dynamic": False}
    ),
    "ct int4 with int4 inputs": group(I4 | {"symmetric": True}, I8 | TOKEN | {"num_bits": 4}),
    "ct mxfp4 with nvfp4 inputs": group(MX4, F4 | {"dynamic": True}),
    "ct int4 without symmetric": group(I4),
    "ct fp8 in act-order": group(BLOCK | {"actorder": "group"}),
    "ct nvfp4 and 8 bits": group(F4, F8 | TOKEN),
    "left out, no list": FP8 | {"ignore": "lm_head"},
}


@pytest.mark.parametrize("config", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_an_unknown_scheme_is_a_typed_error(tmp_path: Path, config: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="quantization_config") as caught:
        problem_fields_of_file(written(tmp_path, MIXTRAL | {"quantization_config": config}))
    assert len(str(caught.value)) < 1000
