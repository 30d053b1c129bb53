"""Quantization methods that are aliases of supported methods, and unsupported methods.

Some quantizers, such as auto-round, store tensors in the format of another quantizer.
`to_canonical` converts their quantization_config to the quantization_config of this quantizer.
"""

from collections.abc import Mapping
from typing import Any

from modular_kernel.models import torchao_config

# GPTQ's checkpoint_format by auto-round's packing_format. In "gptq", zero points are stored minus
# one; in "gptq_v2", unchanged.
_GPTQ_VERSIONS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round": "gptq_v2",
}
_AWQ_PACKINGS = ("auto_round:auto_awq", "auto_round:awq")
_AUTO_ROUND = ("auto-round", "auto_round", "intel/auto-round")

_REQUANTIZE = "unquantized files, with quantize= to quantize them while they are loaded"
_INT4_FP8 = "int4 codes with scales for float8 activations, which no kernel here supports"
_INT4 = "int4 weights of GPTQ, AWQ or compressed-tensors, with 16-bit activations"
# Methods that are not supported: (contents of their files, the closest supported alternative).
REFUSED_METHODS: dict[str, tuple[str, str]] = {
    "hqq": ("half-quadratic codes with zero points of 16 bits along either axis", _REQUANTIZE),
    "aqlm": ("indices of codebooks with vectors of weights", _REQUANTIZE),
    "vptq": ("indices of codebooks with vectors of weights", _REQUANTIZE),
    "higgs": ("indices of grids, of weights rotated by a Hadamard transform", _REQUANTIZE),
    "fp_quant": (
        "fp4 codes of weights rotated by a Hadamard transform",
        f"nvfp4 files, or {_REQUANTIZE}",
    ),
    "spqr": ("codes of 3 bits and sparse outliers", _REQUANTIZE),
    "bitnet": ("ternary weights of linear layers", _REQUANTIZE),
    "eetq": (
        "int8 that is interleaved for one kernel",
        f"compressed-tensors int8, or {_REQUANTIZE}",
    ),
    "quanto": ("tensor subclasses of optimum-quanto", f"compressed-tensors, or {_REQUANTIZE}"),
    "sinq": ("codes with scales for rows and for columns", _REQUANTIZE),
    "mlx": ("codes of MLX with a scale and a bias for each group", _REQUANTIZE),
    "exl2": ("codes of several numbers of bits, of permuted columns", _REQUANTIZE),
    "exl3": ("trellis codes of weights rotated by a Hadamard transform", _REQUANTIZE),
    "blockwise_int8": (
        "int8 codes with scales for blocks",
        f"compressed-tensors int8, or {_REQUANTIZE}",
    ),
    "w8a8_int8": ("int8 codes with scales for rows", f"compressed-tensors int8, or {_REQUANTIZE}"),
    "metal": ("codes that are packed for Apple's kernels", _REQUANTIZE),
    "w4afp8": (_INT4_FP8, _INT4),
}
# Algorithms of modelopt that are not supported: (contents of their files, the closest supported
# alternative).
REFUSED_ALGORITHMS: dict[str, tuple[str, str]] = {
    "W4A8_AWQ": (_INT4_FP8, _INT4),
    "W4A16_AWQ": ("int4 codes in modelopt's packing, and factors on the inputs", _INT4),
    "NVFP4_AWQ": ("nvfp4 with factors on the inputs, which no kernel here applies", "NVFP4"),
    "W8A8_SQ_PER_CHANNEL": (
        "int8 codes with factors on the inputs, which no kernel here applies",
        "compressed-tensors int8",
    ),
}


def to_canonical(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the equivalent quantization_config of a method that is not an alias.

    Options of torchao by module name are expanded (`torchao_config.expand_options_by_name`).

    Raises ValueError(got, need) for an unsupported packing_format of auto-round, and for options of
    torchao that transformers would write differently.
    """
    config = dict(config)
    if config.get("quant_method") == torchao_config.METHOD:
        is_expanded = torchao_config.OPTIONS_BY_NAME in config
        return config if is_expanded else torchao_config.expand_options_by_name(config)
    if config.get("quant_method") not in _AUTO_ROUND:
        return config
    packing = config.pop("packing_format", "auto_round:auto_gptq")
    if packing in _AWQ_PACKINGS:
        extra = config.get("extra_config")
        if isinstance(extra, Mapping):
            extra = {name: _convert_awq_options(options) for name, options in extra.items()}
            config["extra_config"] = extra
        options: dict[str, Any] = _convert_awq_options({"sym": True} | config)
        return options | {"quant_method": "awq"}
    if packing not in _GPTQ_VERSIONS:
        need = f"one of {', '.join((*_GPTQ_VERSIONS, *_AWQ_PACKINGS))}"
        raise ValueError(f"packing_format = {str(packing)[:80]!r} of auto-round", need)
    version = _GPTQ_VERSIONS[packing]
    return {"sym": True} | config | {"quant_method": "gptq", "checkpoint_format": version}


def _convert_awq_options(options: Any) -> Any:
    """Replace auto-round's `sym` with AWQ's `zero_point`, which means the opposite."""
    if not isinstance(options, Mapping) or not isinstance(options.get("sym"), bool):
        return options
    remaining_options = {key: value for key, value in options.items() if key != "sym"}
    return remaining_options | {"zero_point": not options["sym"]}
