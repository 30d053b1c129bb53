"""List the formats of published checkpoints.

Each entry has the quantization_config of config.json, a function of `formats` that draws a matrix,
and the quantization scheme of this package in which the weights are loaded. `samples.write` writes
a checkpoint in one of the formats.
"""

from dataclasses import dataclass
from typing import Any

import torch

from modular_kernel.testing.checkpoints.formats import (
    Make,
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8_block,
    fp8_block_4d,
    fp8_channel,
    fp8_tensor,
    gptq,
    int8_channel,
    llm_int8,
    mxfp4,
    mxfp4_compressed,
    mxfp4_deepseek,
    mxfp4_quark,
    mxfp8,
    nvfp4,
    plain,
    with_act_order,
    with_e8m0_dtype,
)


@dataclass(frozen=True)
class CheckpointFormat:
    """One checkpoint format.

    config: its quantization_config.
    make: draws a matrix.
    scheme: the quantization scheme in which the weights are loaded.
    bound: maximum relative error of the outputs of a layer with these weights, compared with
        float64.
    """

    config: dict[str, Any] | None
    make: Make
    scheme: str
    bound: float = 1e-2


def _make_compressed_config(packing: str, weights: Any, inputs: Any = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": packing,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*"],
    }


def _make_int_args(bits: int, group: int | None, symmetric: bool = True) -> dict[str, Any]:
    strategy = "group" if group else "channel"
    config = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
    return config | {"group_size": group, "actorder": None, "dynamic": False}


def _make_float_args(strategy: str, dynamic: bool, **extra: Any) -> dict[str, Any]:
    config = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    return config | {"dynamic": dynamic, **extra}


_INT8_TOKEN = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}
_FP4 = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": 16,
}


def _make_quark_config(weight: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "global_quant_config": {
            "weight": weight,
            "input_tensors": inputs,
            "output_tensors": None,
            "bias": None,
        },
        "exclude": ["lm_head"],
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "algo_config": None,
        "quant_mode": "eager_mode",
        "export": {"weight_format": "real_quantized", "pack_method": "reorder"},
    }


def _make_quark_fp8_spec(qscheme: str, dynamic: bool) -> dict[str, Any]:
    spec = {"dtype": "fp8_e4m3", "qscheme": qscheme, "is_dynamic": dynamic, "symmetric": True}
    spec |= {"observer_cls": "PerTensorMinMaxObserver", "round_method": "half_even"}
    return spec | {"enable_buffer_reuse": False, "max_input_numel": 1 << 22}  # since 0.13


_QUARK_MXFP4 = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "group_size": 32,
    "scale_format": "e8m0",
    "ch_axis": -1,
    "is_scale_quant": False,
}
_MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
_MXFP8_SCHEME = "fp8_w8a16_block:block=1x32"
_AUTO_ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 64,
    "sym": True,
    "data_type": "int",
    "autoround_version": "0.9.0",
}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_FP8_BLOCK = _FP8 | {"weight_block_size": [128, 128]}
_BITSANDBYTES: dict[str, Any] = {
    "quant_method": "bitsandbytes",
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": False,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0,
}
_LLM_INT8 = {"_load_in_4bit": False, "load_in_4bit": False}
_LLM_INT8 |= {"_load_in_8bit": True, "load_in_8bit": True}
_DOUBLE_QUANT = {"bnb_4bit_use_double_quant": True}
_W8A8_BOUND = 8e-2

CHECKPOINT_FORMATS: dict[str, CheckpointFormat] = {
    "bf16": CheckpointFormat(None, plain(torch.bfloat16), "none"),
    "fp16": CheckpointFormat(None, plain(torch.float16), "none"),
    "fp32": CheckpointFormat(None, plain(torch.float32), "none"),
    "deepseek fp8": CheckpointFormat(
        _FP8_BLOCK, fp8_block(torch.float32), "fp8_w8a8_block", _W8A8_BOUND
    ),
    "deepseek fp8, UE8M0": CheckpointFormat(
        _FP8_BLOCK | {"scale_fmt": "ue8m0"},
        fp8_block(torch.float8_e8m0fnu),
        "fp8_w8a8_block",
        _W8A8_BOUND,
    ),
    "qwen3 fp8": CheckpointFormat(
        _FP8_BLOCK, fp8_block(torch.bfloat16), "fp8_w8a8_block", _W8A8_BOUND
    ),
    "fp8 tensor, dynamic": CheckpointFormat(
        _FP8, fp8_tensor(static=False), "fp8_w8a8_tensor", _W8A8_BOUND
    ),
    "fp8 tensor, static": CheckpointFormat(
        _FP8 | {"activation_scheme": "static"},
        fp8_tensor(static=True, shape=(1,)),
        "fp8_w8a8_tensor:static=true",
        _W8A8_BOUND,
    ),
    "modelopt fp8": CheckpointFormat(
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        fp8_tensor(static=True),
        "fp8_w8a8_tensor:static=true",
        _W8A8_BOUND,
    ),
    "compressed fp8 tensor": CheckpointFormat(
        _make_compressed_config(
            "float-quantized", _make_float_args("tensor", False), _make_float_args("tensor", False)
        ),
        fp8_tensor(static=True, shape=(1,)),
        "fp8_w8a8_tensor:static=true",
        _W8A8_BOUND,
    ),
    "compressed fp8 channel": CheckpointFormat(
        _make_compressed_config(
            "float-quantized", _make_float_args("channel", False), _make_float_args("token", True)
        ),
        fp8_channel(),
        "fp8_w8a8_channel",
        _W8A8_BOUND,
    ),
    "compressed fp8 block": CheckpointFormat(
        _make_compressed_config(
            "float-quantized",
            _make_float_args("block", False, block_structure=[128, 128]),
            _make_float_args("group", True, group_size=128),
        ),
        fp8_block(torch.bfloat16, "weight_scale"),
        "fp8_w8a8_block",
        _W8A8_BOUND,
    ),
    "compressed fp8 weights, tensor": CheckpointFormat(
        _make_compressed_config("float-quantized", _make_float_args("tensor", False)),
        fp8_tensor(static=False, shape=(1,)),
        "fp8_w8a16_channel",
    ),
    "compressed fp8 weights, channel": CheckpointFormat(
        _make_compressed_config("naive-quantized", _make_float_args("channel", False)),
        fp8_channel(),
        "fp8_w8a16_channel",
    ),
    "compressed fp8 weights, block": CheckpointFormat(
        _make_compressed_config(
            "float-quantized", _make_float_args("block", False, block_structure=[128, 128])
        ),
        fp8_block(torch.bfloat16, "weight_scale"),
        "fp8_w8a16_block",
    ),
    "compressed int8": CheckpointFormat(
        _make_compressed_config("int-quantized", _make_int_args(8, None), _INT8_TOKEN),
        int8_channel,
        "int8_w8a8_channel",
        _W8A8_BOUND,
    ),
    "compressed int8, weights": CheckpointFormat(
        _make_compressed_config("pack-quantized", _make_int_args(8, None)),
        compressed_tensors(8, None),
        "int8_w8a16_channel",
    ),
    "compressed int8, groups": CheckpointFormat(
        _make_compressed_config("pack-quantized", _make_int_args(8, 64)),
        compressed_tensors(8, 64),
        "int8_w8a16_group:group=64",
    ),
    "compressed int4": CheckpointFormat(
        _make_compressed_config("pack-quantized", _make_int_args(4, 32)),
        compressed_tensors(4, 32),
        "int4_w4a16_group:group=32",
    ),
    "compressed int4, zero points": CheckpointFormat(
        _make_compressed_config("pack-quantized", _make_int_args(4, 64, symmetric=False)),
        compressed_tensors(4, 64, symmetric=False),
        "int4_w4a16_group:group=64,zero_points=true",
    ),
    "compressed mxfp4": CheckpointFormat(
        _make_compressed_config(
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        ),
        mxfp4_compressed,
        "mxfp4_w4a16",
    ),
    "compressed nvfp4": CheckpointFormat(
        _make_compressed_config("nvfp4-pack-quantized", _FP4, _FP4 | {"dynamic": "local"}),
        nvfp4("weight_packed", "weight_global_scale", "input_global_scale", divides=True),
        "nvfp4_w4a16",
    ),
    "modelopt nvfp4": CheckpointFormat(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        nvfp4("weight", "weight_scale_2", "input_scale", divides=False),
        "nvfp4_w4a16",
    ),
    "awq": CheckpointFormat(_AWQ, awq(64), "int4_w4a16_group:group=64,zero_points=true"),
    "awq, symmetric": CheckpointFormat(
        _AWQ | {"zero_point": False}, awq(64, zero_point=False), "int4_w4a16_group:group=64"
    ),
    "gptq": CheckpointFormat(_GPTQ, gptq(4, 64), "int4_w4a16_group:group=64"),
    "gptq, zero points": CheckpointFormat(
        _GPTQ | {"sym": False},
        gptq(4, 64, symmetric=False),
        "int4_w4a16_group:group=64,zero_points=true",
    ),
    "gptq v2": CheckpointFormat(
        _GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
        gptq(4, 64, symmetric=False, zero_point_offset=0),
        "int4_w4a16_group:group=64,zero_points=true",
    ),
    "gptq int8": CheckpointFormat(_GPTQ | {"bits": 8}, gptq(8, 64), "int8_w8a16_group:group=64"),
    # One group per row. With the default sizes of samples.write, the larger depth is 256.
    "awq, one group": CheckpointFormat(
        _AWQ | {"group_size": -1}, awq(-1), "int4_w4a16_group:group=256,zero_points=true"
    ),
    "gptq, one group": CheckpointFormat(
        _GPTQ | {"group_size": -1}, gptq(4, -1), "int4_w4a16_group:group=256"
    ),
    "compressed int4, channels": CheckpointFormat(
        _make_compressed_config("pack-quantized", _make_int_args(4, None)),
        compressed_tensors(4, None),
        "int4_w4a16_group:group=256",
    ),
    "mxfp4": CheckpointFormat({"quant_method": "mxfp4"}, mxfp4, "mxfp4_w4a16"),
    "mxfp4, E8M0 dtype": CheckpointFormat(
        {"quant_method": "mxfp4"}, with_e8m0_dtype(mxfp4, "scales"), "mxfp4_w4a16"
    ),
    "compressed mxfp4, E8M0 dtype": CheckpointFormat(
        _make_compressed_config("mxfp4-pack-quantized", _MXFP4),
        with_e8m0_dtype(mxfp4_compressed, "weight_scale"),
        "mxfp4_w4a16",
    ),
    "deepseek fp4": CheckpointFormat(
        {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"},
        mxfp4_deepseek,
        "mxfp4_w4a16",
    ),
    "quark fp8": CheckpointFormat(
        _make_quark_config(
            _make_quark_fp8_spec("per_tensor", False), _make_quark_fp8_spec("per_tensor", False)
        ),
        fp8_tensor(static=True),
        "fp8_w8a8_tensor:static=true",
        _W8A8_BOUND,
    ),
    "quark fp8, channels": CheckpointFormat(
        _make_quark_config(
            _make_quark_fp8_spec("per_channel", False), _make_quark_fp8_spec("per_channel", True)
        ),
        fp8_channel(torch.float32),
        "fp8_w8a8_channel",
        _W8A8_BOUND,
    ),
    "quark mxfp4": CheckpointFormat(
        _make_quark_config(
            _QUARK_MXFP4 | {"is_dynamic": False}, _QUARK_MXFP4 | {"is_dynamic": True}
        ),
        mxfp4_quark,
        "mxfp4_w4a16",
    ),
    "modelopt fp8 block, weights": CheckpointFormat(
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, fp8_block_4d, "fp8_w8a16_block"
    ),
    "modelopt fp8 block": CheckpointFormat(
        {"quant_method": "modelopt", "quant_algo": "FP8_BLOCK_SCALES"},
        fp8_block(torch.float32, "weight_scale"),
        "fp8_w8a8_block",
        _W8A8_BOUND,
    ),
    "modelopt mxfp8": CheckpointFormat(
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 32},
        mxfp8("weight_scale", torch.uint8),
        _MXFP8_SCHEME,
    ),
    "mxfp8": CheckpointFormat(
        {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
        mxfp8("weight_scale_inv", torch.float8_e8m0fnu),
        _MXFP8_SCHEME,
    ),
    "compressed mxfp8": CheckpointFormat(
        _make_compressed_config(
            "mxfp8-quantized",
            _make_float_args("group", False, group_size=32, scale_dtype="torch.uint8"),
            _make_float_args("group", True, group_size=32),
        ),
        mxfp8("weight_scale", torch.uint8),
        _MXFP8_SCHEME,
    ),
    "fbgemm fp8": CheckpointFormat(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        fp8_channel(torch.float32),
        "fp8_w8a8_channel",
        _W8A8_BOUND,
    ),
    "bitsandbytes int8": CheckpointFormat(
        _BITSANDBYTES | _LLM_INT8, llm_int8, "int8_w8a16_channel"
    ),
    "auto-round": CheckpointFormat(_AUTO_ROUND, gptq(4, 64), "int4_w4a16_group:group=64"),
    "auto-round, zero points": CheckpointFormat(
        _AUTO_ROUND | {"sym": False, "packing_format": "auto_round"},
        gptq(4, 64, symmetric=False, zero_point_offset=0),
        "int4_w4a16_group:group=64,zero_points=true",
    ),
    "auto-round, AWQ": CheckpointFormat(
        _AUTO_ROUND | {"sym": False, "packing_format": "auto_round:auto_awq"},
        awq(64),
        "int4_w4a16_group:group=64,zero_points=true",
    ),
}

# Act order: columns are not sorted by group. Only `load_experts` supports it.
_INT4_ACT_ORDER = _make_compressed_config(
    "pack-quantized", _make_int_args(4, 32) | {"actorder": "group"}
)
ACT_ORDER_FORMATS: dict[str, CheckpointFormat] = {
    "gptq, act-order": CheckpointFormat(
        _GPTQ | {"desc_act": True},
        with_act_order(gptq(4, 64), "g_idx", 64, "qweight"),
        "int4_w4a16_act_order:group=64",
    ),
    "gptq, act-order, zero points": CheckpointFormat(
        _GPTQ | {"desc_act": True, "sym": False},
        with_act_order(gptq(4, 64, symmetric=False), "g_idx", 64, "qweight"),
        "int4_w4a16_act_order:group=64,zero_points=true",
    ),
    "gptq int8, act-order": CheckpointFormat(
        _GPTQ | {"bits": 8, "desc_act": True, "sym": False},
        with_act_order(gptq(8, 64, symmetric=False), "g_idx", 64, "qweight"),
        "int8_w8a16_act_order:group=64,zero_points=true",
    ),
    "compressed int4, act-order": CheckpointFormat(
        _INT4_ACT_ORDER,
        with_act_order(compressed_tensors(4, 32), "weight_g_idx", 32, "weight_packed"),
        "int4_w4a16_act_order:group=32",
    ),
}

# Formats whose blocks may span rows. Only `load_experts` and `merge` support them. Both read
# one matrix at a time.
BLOCK_FORMATS: dict[str, CheckpointFormat] = {
    "nf4": CheckpointFormat(_BITSANDBYTES, bitsandbytes("nf4"), "none"),
    "nf4, double": CheckpointFormat(
        _BITSANDBYTES | _DOUBLE_QUANT, bitsandbytes("nf4", double=True), "none"
    ),
    "nf4, double, stored as bf16": CheckpointFormat(
        _BITSANDBYTES | _DOUBLE_QUANT | {"bnb_4bit_quant_storage": "bfloat16"},
        bitsandbytes("nf4", double=True, storage=torch.bfloat16),
        "none",
    ),
    "fp4": CheckpointFormat(
        _BITSANDBYTES | {"bnb_4bit_quant_type": "fp4"}, bitsandbytes("fp4"), "none"
    ),
    "fp4, double, blocks of 128": CheckpointFormat(
        _BITSANDBYTES | _DOUBLE_QUANT | {"bnb_4bit_quant_type": "fp4"},
        bitsandbytes("fp4", block=128, double=True),
        "none",
    ),
}

# Formats of Llama 4 and gpt-oss, which store all experts in one tensor (E, K, N). In ModelOpt's
# formats, all experts have the same per-tensor scale.
FUSED_FORMATS: dict[str, CheckpointFormat] = {
    "fbgemm fp8, fused": CheckpointFormat(
        CHECKPOINT_FORMATS["fbgemm fp8"].config,
        fp8_channel(torch.float32),
        "fp8_w8a8_channel",
        _W8A8_BOUND,
    ),
    "modelopt fp8, fused": CheckpointFormat(
        CHECKPOINT_FORMATS["modelopt fp8"].config,
        fp8_tensor(static=True, shared_scale=True),
        "fp8_w8a8_tensor:static=true",
        _W8A8_BOUND,
    ),
    "modelopt nvfp4, fused": CheckpointFormat(
        CHECKPOINT_FORMATS["modelopt nvfp4"].config,
        nvfp4("weight", "weight_scale_2", "input_scale", divides=False, shared_scale=True),
        "nvfp4_w4a16",
    ),
}
