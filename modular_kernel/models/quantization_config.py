"""Reads the quantization scheme of the experts from a quantization_config.

`scheme_of` has a function for each quant_method. Every value that determines the scheme must be
present and known. A method, algorithm or layout without a scheme raises ConfigurationError. An
unknown key that could change values also raises ConfigurationError (`quantization_keys`).

Entries that exclude modules or override their options are refused if they apply to experts.
`module_quantization` resolves such entries, and calls this module with the options of one module.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.models import torchao_config
from modular_kernel.models.gguf_config import scheme_of_types
from modular_kernel.models.module_matcher import Entry, ModuleMatcher, PatternError, parse_entry
from modular_kernel.models.quantization_aliases import (
    REFUSED_ALGORITHMS,
    REFUSED_METHODS,
    to_canonical,
)
from modular_kernel.models.quantization_keys import (
    Mismatch,
    is_empty,
    unknown_group_keys,
    unknown_keys,
)
from modular_kernel.models.quark_config import (
    quark_scheme,
    unknown_quark_keys,
    unknown_quark_options,
)
from modular_kernel.models.torchao_config import TorchaoFormat, torchao_format

_MAX_SIZE = 1 << 20
_METHODS = (
    *("fp8", "mxfp8", "fbgemm_fp8", "mxfp4", "gptq", "awq", "auto-round"),
    *("compressed-tensors", "modelopt", "quark", "bitsandbytes", "torchao", "gguf"),
)
UNQUANTIZED_KEYS = (
    *("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "exclude"),
    "llm_int8_skip_modules",
)
# Components of the names of expert modules. Patterns are matched with names of modules in layer
# 77777. No model has this layer, so a pattern that matches does not depend on the layer.
_MOE_MODULE_NAMES = ("mlp", "block_sparse_moe", "feed_forward", "mixer", "moe", "ffn")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
_STACKED_PROJECTIONS = ("gate_up_proj", "down_proj")
_MODELS = ("model", "model.language_model", "language_model.model")
_PREFIXES = tuple(f"{model}.layers.77777" for model in _MODELS)
# Values of the key `format` in compressed-tensors, by scheme.
_UNPACKED = ("float-quantized", "int-quantized", "naive-quantized")
_PACKING_FORMATS = {
    "fp8_w8a8_tensor": _UNPACKED,
    "fp8_w8a8_channel": _UNPACKED,
    "fp8_w8a8_block": _UNPACKED,
    "fp8_w8a16_tensor": _UNPACKED,
    "fp8_w8a16_channel": _UNPACKED,
    "fp8_w8a16_block": (*_UNPACKED, "mxfp8-quantized"),
    "int8_w8a8_channel": _UNPACKED,
    "int8_w8a16_channel": ("pack-quantized",),
    "int8_w8a16_group": ("pack-quantized",),
    "int4_w4a16_group": ("pack-quantized",),
    "mxfp4_w4a16": ("mxfp4-pack-quantized",),
    "nvfp4_w4a16": ("nvfp4-pack-quantized",),
}

# FBGEMM clips the largest activation of a token to a bound before it computes the token's scale.
_DEFAULT_FBGEMM_BOUND = 1200
_MX_GROUP = 32  # columns per scale in mxfp8
_MXFP8 = "fp8_w8a16_block:block=1x32"
_GROUP_SIZES = {"FP8_PB_WO": 128, "FP8_BLOCK_SCALES": 128, "MXFP8": _MX_GROUP}
MIXED = "MIXED_PRECISION"  # modelopt's quant_algo if modules have different formats
_GROUP_SIZE_KEYS = ("group_size", "q_group_size")

Config = dict[str, Any]


def scheme_of(path: str, config: Config, *, depth: int | None = None) -> str | None:
    """Return the quantization scheme of the experts; None for an unquantized model.

    path: path of the config.json, for messages.
    config: the object of the config.json that has the quantization_config.
    depth: the maximum number of columns of a weight matrix. This is the group size if a group spans
        all columns (a group_size of -1, or 4-bit weights with per-channel scales).

    Raises ConfigurationError if there is no such scheme.
    """
    quantization = config.get("quantization_config", config.get("compression_config"))
    if quantization is None:
        if config.get("expert_dtype") is not None:
            got = f"expert_dtype = {shorten(config['expert_dtype'])}"
            raise config_error(path, got, "a quantization_config, or no expert_dtype")
        return None
    quantization = canonicalize_config(path, quantization)
    method = quantization["quant_method"]
    _check_unquantized(path, quantization)
    _check_overrides(path, quantization)
    parse = {
        "fp8": _parse_fp8,
        "mxfp8": _parse_mxfp8,
        "fbgemm_fp8": _parse_fbgemm_fp8,
        "mxfp4": lambda *_: "mxfp4_w4a16",
        "gptq": _parse_gptq,
        "awq": _parse_awq,
        "compressed-tensors": _parse_compressed_tensors,
        "modelopt": _parse_modelopt,
        "quark": _parse_quark,
        "bitsandbytes": _parse_bitsandbytes,
        "torchao": lambda path, config: torchao_format_of(path, config).scheme,
        "gguf": lambda path, config: scheme_of_types(path, config.get("types")),
        "modelopt_fp4": _parse_modelopt,
    }[method]
    quantization = {"expert_dtype": config.get("expert_dtype")} | quantization
    if depth is not None:
        quantization = _resolve_full_row_groups(quantization, depth + depth % 2)
    return parse(path, quantization)


def canonicalize_config(path: str, quantization: object) -> Config:
    """Replace the quant_method if it is an alias of another method (`quantization_aliases`).

    Raises ConfigurationError for an unknown method or key.
    """
    if not isinstance(quantization, dict):
        raise config_error(path, shorten(quantization), "an object")
    try:
        quantization = to_canonical(quantization)
    except ValueError as error:
        raise config_error(path, *error.args) from None
    method = quantization.get("quant_method")
    if isinstance(method, str) and method in REFUSED_METHODS:
        meaning, nearest = REFUSED_METHODS[method]
        raise config_error(path, f"quant_method = {method!r}, {meaning}", nearest)
    if method not in (*_METHODS, "modelopt_fp4"):
        need = f"one of {', '.join(_METHODS)}; for other methods pass the sizes and --quant"
        raise config_error(path, f"quant_method = {shorten(method)}", need)
    checked_config = dict(quantization)
    if str(checked_config.get("quant_algo")).upper() == MIXED:
        checked_config.pop("quantized_layers", None)
    _raise_first(path, unknown_keys(method.removesuffix("_fp4"), checked_config))
    return quantization


def _resolve_full_row_groups(config: Config, depth: int) -> Config:
    """Set the size of groups that span all columns to `depth`.

    w1 and w2 have different numbers of columns, but a scheme has a single group size. With the
    larger number of columns, both matrices have one group per row.
    """

    def with_depth(args: Any) -> Any:
        if not isinstance(args, dict):
            return args
        args = {
            key: depth if key in _GROUP_SIZE_KEYS and _is_minus_one(value) else value
            for key, value in args.items()
        }
        if args.get("strategy") == "channel" and _has_values(args, num_bits=4, type="int"):
            return args | {"strategy": "group", "group_size": depth}
        return args

    with_sizes: Config = with_depth(config)
    groups = config.get("config_groups")
    if isinstance(groups, dict):
        with_group_sizes = {
            name: group | {"weights": with_depth(group.get("weights"))}
            if isinstance(group, dict)
            else group
            for name, group in groups.items()
        }
        with_sizes = with_sizes | {"config_groups": with_group_sizes}
    return with_sizes


def _is_minus_one(value: object) -> bool:
    return type(value) is int and value == -1


def quantizes_inputs(config: Mapping[str, Any]) -> bool:
    """Return whether a quantization_config also quantizes the inputs of experts.

    config: a quantization_config that `scheme_of` accepts.
    """
    if config["quant_method"] != "compressed-tensors":
        return str(config.get("quant_algo")) == "NVFP4"
    groups = config["config_groups"].values()
    expert_groups = (group for group in groups if _targets_experts("config.json", group["targets"]))
    return any(group.get("input_activations") for group in expert_groups)


def _parse_fp8(path: str, config: Config) -> str:
    """Return the scheme of fp8, with scales per block or matrix."""
    _require_one_of(path, config, "fmt", ("e4m3", "float8_e4m3fn", None))
    expert_dtype = _require_one_of(path, config, "expert_dtype", ("fp8", "fp4", None))
    _require_one_of(path, config, "scale_fmt", ("ue8m0", "float", None))
    activation_scheme = _require_one_of(
        path, config, "activation_scheme", ("dynamic", "static", None)
    )
    if expert_dtype == "fp4":  # the other options apply to other modules
        _require_one_of(path, config, "activation_scheme", ("dynamic", None))
        return "mxfp4_w4a16"
    block = config.get("weight_block_size")
    for key in ("weight_per_tensor", "act_per_tensor"):
        _require_one_of(path, config, key, (block is None, None))
    if block is None:
        _require_one_of(path, config, "activation_scheme", ("dynamic", "static"))
        return "fp8_w8a8_tensor:static=true" if activation_scheme == "static" else "fp8_w8a8_tensor"
    if activation_scheme == "static":
        raise config_error(path, "activation_scheme = 'static' and blocks", "dynamic, or no blocks")
    return _make_block_scheme(path, "weight_block_size", block)


def _parse_mxfp8(path: str, config: Config) -> str:
    """Return the scheme of mxfp8 weights. Unlike in mxfp8, activations are not quantized."""
    _require_one_of(path, config, "fmt", ("e4m3", "float8_e4m3fn", None))
    _require_one_of(path, config, "activation_scheme", ("dynamic", None))
    _require_one_of(path, config, "scale_fmt", ("ue8m0", None))
    _require_one_of(path, config, "weight_block_size", ([1, _MX_GROUP], None))
    return _MXFP8


def _parse_quark(path: str, config: Config) -> str:
    _raise_first(path, unknown_quark_keys(config))
    options = config.get("global_quant_config")
    if not isinstance(options, dict):
        raise config_error(path, f"global_quant_config = {shorten(options)}", "an object")
    _raise_first(path, unknown_quark_options(options))
    scheme = quark_scheme(options)
    if scheme is None:
        weight, inputs = options.get("weight"), options.get("input_tensors")
        need = "fp8 per tensor, per channel and token, or per block of 128; mxfp8; mxfp4"
        raise config_error(path, f"weight {shorten(weight)}, input {shorten(inputs)}", need)
    return scheme


def torchao_format_of(path: str, config: Mapping[str, Any]) -> TorchaoFormat:
    """Return the storage format of a module that torchao quantized."""
    if torchao_config.OPTIONS_BY_NAME in config:
        need = "one format for all modules; a QuantizationMap looks up that of each one"
        raise config_error(path, "options by name (FqnToConfig)", need)
    try:
        return torchao_format(config)
    except ValueError as error:
        raise config_error(path, *error.args) from None


def _parse_bitsandbytes(path: str, config: Config) -> str:
    """Return the scheme of bitsandbytes. 4-bit weights are dequantized, which is "none".

    Unlike in LLM.int8(), activations are not quantized.
    """
    return "none" if bitsandbytes_kind(path, config) else "int8_w8a16_channel"


def bitsandbytes_kind(path: str, config: Mapping[str, Any]) -> str:
    """Return "nf4" or "fp4", or "" for 8 bits."""
    bits = [
        bits
        for bits in (4, 8)
        for key in (f"load_in_{bits}bit", f"_load_in_{bits}bit")
        if _require_one_of(path, dict(config), key, (True, False, None))
    ]
    if len(set(bits)) != 1:
        got = "load_in_4bit and load_in_8bit" if bits else "neither load_in_4bit nor load_in_8bit"
        raise config_error(path, got, "one of them true")
    if bits[0] == 8:
        return ""
    kind = _require_one_of(path, dict(config), "bnb_4bit_quant_type", ("nf4", "fp4", None))
    return str(kind or "fp4")


def _parse_fbgemm_fp8(path: str, config: Config) -> str:
    """Return the scheme of FBGEMM's float8, with one scale per row of weights and per token."""
    bound = config.get("activation_scale_ub")
    if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float)):
        raise config_error(path, f"activation_scale_ub = {shorten(bound)}", "a number")
    if bound is not None and not bound >= _DEFAULT_FBGEMM_BOUND:
        need = (
            f"{_DEFAULT_FBGEMM_BOUND} or more: a lower bound clips activations that are common, "
            "and scales of tokens are computed here without a bound"
        )
        raise config_error(path, f"activation_scale_ub = {shorten(bound)}", need)
    return "fp8_w8a8_channel"


def _make_block_scheme(path: str, name: str, block: Any, scheme: str = "fp8_w8a8_block") -> str:
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(type(n) is int and 1 <= n <= _MAX_SIZE for n in block):
        raise config_error(path, f"{name} = {shorten(block)}", "two integers")
    return f"{scheme}:block={block[0]}x{block[1]}"


def _parse_gptq(path: str, config: Config) -> str:
    gptq_version(path, config)
    symmetric = _require_one_of(path, config, "sym", (True, False))
    scheme = _make_integer_scheme(
        path, config, ("bits",), ("group_size",), zero_points=symmetric is False
    )
    act_order = _require_one_of(path, config, "desc_act", (False, True, None))
    return _add_act_order(scheme) if act_order else scheme


def gptq_version(path: str, config: Mapping[str, Any]) -> int:
    """Return 1 if zero points are stored minus one, or 2 if they are stored unchanged.

    The key of the version is `format`, or `checkpoint_format` in older files.
    """
    versions = {
        _require_one_of(path, dict(config), key, ("gptq", "gptq_v2", None))
        for key in ("checkpoint_format", "format")
    } - {None}
    if len(versions) > 1:
        raise config_error(
            path, "format and checkpoint_format that differ", "one of them, or equal values"
        )
    return 2 if "gptq_v2" in versions else 1


def _add_act_order(scheme: str) -> str:
    return scheme.replace("_group:", "_act_order:")


def _parse_awq(path: str, config: Config) -> str:
    # "gemv" packs along another axis.
    _require_one_of(path, config, "version", ("gemm", "GEMM", None))
    _require_one_of(path, config, "format", ("gemm", "GEMM", None))
    zero_points = _require_one_of(path, config, "zero_point", (True, False))
    bits, group = ("bits", "w_bit"), ("group_size", "q_group_size")
    return _make_integer_scheme(path, config, bits, group, zero_points=zero_points is True)


def _make_integer_scheme(
    path: str, config: Config, bits: Sequence[str], group: Sequence[str], *, zero_points: bool
) -> str:
    num_bits = next((config[name] for name in bits if name in config), None)
    group_size = next((config[name] for name in group if name in config), None)
    if type(num_bits) is not int or num_bits not in (4, 8):
        raise config_error(path, f"{bits[0]} = {shorten(num_bits)}", "4 or 8")
    return _make_group_scheme(path, num_bits, group_size, zero_points=zero_points)


def _make_group_scheme(path: str, bits: int, group: Any, *, zero_points: bool) -> str:
    if type(group) is not int or not 1 <= group <= _MAX_SIZE or group % 2:
        need = "an even number of columns, or -1 if the layer's sizes are known"
        raise config_error(path, f"group_size = {shorten(group)}", need)
    zero_points_option = ",zero_points=true" if zero_points else ""
    return f"int{bits}_w{bits}a16_group:group={group}{zero_points_option}"


def _parse_modelopt(path: str, config: Config) -> str:
    schemes = {
        "FP8": "fp8_w8a8_tensor:static=true",
        "FP8_PER_CHANNEL_PER_TOKEN": "fp8_w8a8_channel",
        "NVFP4": "nvfp4_w4a16",
        "W4A16_NVFP4": "nvfp4_w4a16",
        # Blocks of 128 x 128, without and with quantized inputs.
        "FP8_PB_WO": "fp8_w8a16_block:block=128x128",
        "FP8_BLOCK_SCALES": "fp8_w8a8_block:block=128x128",
        "MXFP8": _MXFP8,
    }
    refused = REFUSED_ALGORITHMS.get(str(config.get("quant_algo")))
    if refused is not None:
        raise config_error(path, f"quant_algo = {config['quant_algo']!r}, {refused[0]}", refused[1])
    algorithm = str(_require_one_of(path, config, "quant_algo", tuple(schemes)))
    if algorithm.endswith("NVFP4") and config.get("group_size") is not None:
        _require_one_of(path, config, "group_size", (16,))
    if algorithm in _GROUP_SIZES:
        _require_one_of(path, config, "group_size", (_GROUP_SIZES[algorithm], None))
    groups = config.get("config_groups") or {}
    if not isinstance(groups, dict):
        raise config_error(path, f"config_groups = {shorten(groups)}", "an object of objects")
    for name, group in groups.items():
        if isinstance(group, dict) and _targets_experts(path, group.get("targets", ["Linear"])):
            _raise_first(path, unknown_group_keys(name, group))
    return schemes[algorithm]


def _parse_compressed_tensors(path: str, config: Config) -> str:
    """Return the scheme of the only entry of config_groups that targets the experts."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not all(
        isinstance(group, dict) for group in groups.values()
    ):
        raise config_error(path, f"config_groups = {shorten(groups)}", "an object of objects")
    names = [name for name, group in groups.items() if _targets_experts(path, group.get("targets"))]
    if len(groups) > 1:
        _check_other_groups(path, groups, names)
    if len(names) != 1:
        raise config_error(
            path, f"config_groups: {len(names)} that target the experts", "exactly one"
        )
    group = groups[names[0]]
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict) or not isinstance(inputs, dict | None):
        raise config_error(
            path, f"config_groups: {shorten(group)}", "weights and input_activations"
        )
    _raise_first(path, unknown_group_keys(names[0], group))
    parse = _select_float_scheme if weights.get("type") == "float" else _select_int_scheme
    scheme = parse(path, weights, inputs)
    if scheme is None:
        need = "fp8 per tensor, channel or block; int8; int4 per group; mxfp4; nvfp4"
        raise config_error(
            path, f"weights {shorten(weights)}, input_activations {shorten(inputs)}", need
        )
    _check_packing(path, config, group, scheme)
    return _add_act_order(scheme) if weights.get("actorder") == "group" else scheme


def _check_other_groups(path: str, groups: Mapping[str, Config], names: Sequence[str]) -> None:
    """Raise ConfigurationError if another group targets the experts of some layer.

    names: the groups that target all experts.
    """
    for name, group in groups.items():
        if name not in names:
            for target in group["targets"]:
                if _matches_experts(path, _replace_numbers(target)):
                    need = "one group for all experts"
                    raise config_error(path, f"config_groups.{name} has {shorten(target)}", need)


def _check_packing(path: str, config: Config, group: Config, scheme: str) -> None:
    """Raise ConfigurationError unless the packing format is known for this scheme."""
    source = group if group.get("format") is not None else config
    name = scheme.partition(":")[0]
    _require_one_of(path, source, "format", (*_PACKING_FORMATS[name], None))
    orders: tuple[object, ...] = ("static", "weight", False, None)  # columns are not reordered
    if name in ("int4_w4a16_group", "int8_w8a16_group"):
        orders = ("group", *orders)
    _require_one_of(path, group["weights"], "actorder", orders)
    _require_one_of(path, group["weights"], "dynamic", (False, None))
    if group["weights"].get("type") == "float":
        for args in (group["weights"], group.get("input_activations") or {}):
            _require_one_of(path, args, "symmetric", (True, None))
    sparsity = config.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") in ("dense", None)):
        raise config_error(path, f"sparsity_config = {shorten(sparsity)}", "dense weights")


def _has_values(config: Config | None, **expected: object) -> bool:
    return config is not None and all(
        config.get(key) == value and type(config.get(key)) is type(value)
        for key, value in expected.items()
    )


def _select_float_scheme(path: str, weights: Config, inputs: Config | None) -> str | None:
    if _has_values(weights, num_bits=4) and weights.get("strategy") in ("group", "tensor_group"):
        inputs_are_mx = inputs is None or _has_values(inputs, type="float", group_size=_MX_GROUP)
        if _has_values(weights, group_size=_MX_GROUP) and inputs_are_mx:
            return "mxfp4_w4a16"
        inputs_are_nvfp4 = inputs is None or _has_values(
            inputs, num_bits=4, type="float", group_size=16
        )
        return "nvfp4_w4a16" if _has_values(weights, group_size=16) and inputs_are_nvfp4 else None
    if not _has_values(weights, num_bits=8):
        return None
    inputs_are_fp8 = inputs is None or _has_values(inputs, num_bits=8, type="float")
    if weights.get("strategy") == "group":
        inputs_are_mx = inputs is None or _has_values(inputs, group_size=_MX_GROUP)
        is_mxfp8 = _has_values(weights, group_size=_MX_GROUP) and inputs_are_fp8 and inputs_are_mx
        return _MXFP8 if is_mxfp8 else None
    if inputs is None:
        return _select_weight_only_fp8(path, weights)
    if not inputs_are_fp8:
        return None
    strategy = (weights.get("strategy"), inputs.get("strategy"))
    dynamic = inputs.get("dynamic")
    if strategy == ("tensor", "tensor") and isinstance(dynamic, bool):
        return "fp8_w8a8_tensor" if dynamic else "fp8_w8a8_tensor:static=true"
    if strategy == ("channel", "token") and dynamic is True:
        return "fp8_w8a8_channel"
    if strategy == ("block", "group") and dynamic is True:
        block = weights.get("block_structure")
        scheme = _make_block_scheme(path, "block_structure", block)
        return scheme if _has_values(inputs, group_size=block[1]) else None  # type: ignore[index]
    return None


def _select_weight_only_fp8(path: str, weights: Config) -> str | None:
    """Return the scheme of weight-only float8."""
    strategy = weights.get("strategy")
    if strategy == "block":
        block = weights.get("block_structure")
        return _make_block_scheme(path, "block_structure", block, "fp8_w8a16_block")
    return f"fp8_w8a16_{strategy}" if strategy in ("tensor", "channel") else None


def _select_int_scheme(path: str, weights: Config, inputs: Config | None) -> str | None:
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    symmetric = weights.get("symmetric")
    if weights.get("type") != "int" or type(bits) is not int or not isinstance(symmetric, bool):
        return None
    if strategy == "group" and bits in (4, 8) and (inputs is None or _are_8_bit_tokens(inputs)):
        return _make_group_scheme(path, bits, weights.get("group_size"), zero_points=not symmetric)
    if bits != 8 or strategy != "channel" or not symmetric:
        return None
    if inputs is None:
        return "int8_w8a16_channel"
    is_w8a8 = _has_values(inputs, type="int") and _are_8_bit_tokens(inputs)
    return "int8_w8a8_channel" if is_w8a8 else None


def _are_8_bit_tokens(inputs: Config) -> bool:
    """Return whether activations have 8 bits and a scale for each token, computed in the call.

    No scheme combines such activations with integer weights in groups. Such layers use 16-bit
    activations instead, which are more accurate.
    """
    return (
        inputs.get("type") in ("int", "float")
        and inputs.get("symmetric") in (True, None)
        and _has_values(inputs, num_bits=8, strategy="token", dynamic=True)
    )


def _targets_experts(path: str, targets: Any) -> bool:
    if not isinstance(targets, list):
        raise config_error(path, f"targets = {shorten(targets)}", "a list")
    return any(target == "Linear" or _matches_experts(path, target) for target in targets)


def _check_unquantized(path: str, config: Config) -> None:
    for key in UNQUANTIZED_KEYS:
        names = config.get(key)
        if not isinstance(names, list | None):
            raise config_error(path, f"{key} = {shorten(names)}", "a list")
        for name in names or []:
            if _matches_experts(path, name):
                need = "all experts quantized; otherwise pass the sizes and --quant"
                raise config_error(path, f"{key} has {shorten(name)}", need)


def _raise_first(path: str, mismatches: Iterator[Mismatch]) -> None:
    for got, need in mismatches:
        raise config_error(path, re.sub(r"\s+", " ", got)[:200], need)


def _check_overrides(path: str, config: Config) -> None:
    """Raise ConfigurationError for options by module that apply to the experts of some layer.

    GPTQModel's `dynamic` maps patterns to options. A pattern with the prefix "-:" excludes modules
    from quantization. Other patterns may have the prefix "+:". auto-round's `extra_config` and
    Quark's `layer_quant_config` map names of modules to options.
    """
    for key in ("dynamic", "extra_config", "layer_quant_config"):
        entries = config.get(key)
        if not isinstance(entries, dict | None):
            raise config_error(path, f"{key} = {shorten(entries)}", "an object")
        for name, options in (entries or {}).items():
            if not isinstance(name, str):
                raise config_error(path, f"{key} has {shorten(name)}", "names of modules")
            is_excluded = key == "dynamic" and name.startswith("-:")
            if key == "layer_quant_config":
                if options == config.get("global_quant_config"):
                    continue
            elif is_empty(options) and not is_excluded:
                continue
            pattern = name[2:] if key == "dynamic" and name[:2] in ("-:", "+:") else name
            is_regex = key == "extra_config" and (".*" in name or "\\" in name)
            is_pattern = key == "dynamic" or is_regex
            text = f"re:{pattern}" if is_pattern else pattern
            if _matches_experts(path, text if is_excluded else _replace_numbers(text)):
                need = "the same options for all experts; otherwise pass the sizes and --quant"
                raise config_error(path, f"{key} has {shorten(name)}", need)


def _replace_numbers(name: str) -> str:
    """Replace everything in a name or pattern that can match a digit with a wildcard.

    If the pattern matches experts in any layer, the result matches experts in layer 77777.
    """
    if name.startswith("re:"):
        return re.sub(_DIGITS_OF_REGEX, lambda match: match[1] or "[^.]+", name)
    return re.sub(r"\[!?\]?[^\]]*\]|\?|\d+", "*", name)


# Group 1 is an escaped character that does not match digits. It is kept.
_DIGITS_OF_REGEX = re.compile(
    r"(\\[^d])|(?:\\d|\[\^?\]?(?:\\.|[^\]])*\]|\d+)(?:\{[\d,]*\}|[*+?])?", re.ASCII
)


def _list_expert_modules() -> Iterator[str]:
    for prefix, block in product(_PREFIXES, _MOE_MODULE_NAMES):
        yield f"{prefix}.{block}.experts"
        yield from (f"{prefix}.{block}.experts.{projection}" for projection in _STACKED_PROJECTIONS)
        yield from (f"{prefix}.{block}.experts.77777.{projection}" for projection in _PROJECTIONS)


_EXPERT_MODULES = tuple(_list_expert_modules())


def _matches_experts(path: str, name: Any) -> bool:
    """Return whether an entry matches experts independently of the number of their layer."""
    if not isinstance(name, str):
        raise config_error(path, shorten(name), "names of modules")
    if not name.strip("."):
        return False
    entry: Entry = parse_entry(name)
    try:
        return ModuleMatcher([entry]).first_match(_EXPERT_MODULES) is not None
    except PatternError as error:
        raise config_error(path, shorten(name), f"a pattern of names with {error}") from None


def _require_one_of(path: str, config: Config, key: str, allowed: tuple[object, ...]) -> object:
    value = config.get(key)
    for item in allowed:
        if value is item or (value == item and type(value) is type(item)):
            return item
    need = f"one of {', '.join(str(item) for item in allowed if item is not None)}"
    raise config_error(
        path, f"{key} = {shorten(value)}" if value is not None else f"no {key}", need
    )


def shorten(value: Any) -> str:
    """Return the repr of a value in one line of at most 120 characters, for messages."""
    text = re.sub(r"\s+", " ", repr(value))
    return text if len(text) <= 120 else f"{text[:117]}..."


def config_error(path: str, got: str, need: str) -> ConfigurationError:
    """Return a ConfigurationError for a quantization_config."""
    return ConfigurationError(f"model {path[:200]}: quantization_config", got=got, need=need)
