"""The quantization scheme of the experts, from a config.json's quantization_config.

Every value that determines the scheme must be present and known. Raises ConfigurationError for a
method, algorithm or layout that no scheme implements, for experts that are left unquantized, and
for unknown keys that could change values (`quantization_keys`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.models.quantization_keys import (
    Mismatch,
    is_empty,
    unknown_group_keys,
    unknown_keys,
)

_MOST = 1 << 20
_METHODS = ("fp8", "mxfp4", "gptq", "awq", "compressed-tensors", "modelopt")
_UNQUANTIZED_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
# Names of expert modules in the model families, used to test patterns. Layer 77777 exists in no
# model.
_BLOCKS = ("mlp", "block_sparse_moe", "feed_forward", "mixer", "moe", "ffn")
_LEAVES = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
_FUSED = ("gate_up_proj", "down_proj")
_MODELS = ("model", "model.language_model", "language_model.model")
_PREFIXES = tuple(f"{model}.layers.77777" for model in _MODELS)
# Patterns are matched only if they consist of these pieces, which bounds the matching time.
_PIECE = r"[\w\-/: ]|\\[.\-_]|\.\*|\.|\$|\^|\\d\+|\[0-9\]\+|\((?:\?:)?[\w\-]+(?:\|[\w\-]+)*\)"
_PATTERN, _MOST_STARS = re.compile(f"(?:{_PIECE})*", re.ASCII), 4

# compressed-tensors' `format` values of each scheme.
_WHOLE = ("float-quantized", "int-quantized", "naive-quantized")
_PACKINGS = {
    "fp8_w8a8_tensor": _WHOLE,
    "fp8_w8a8_channel": _WHOLE,
    "fp8_w8a8_block": _WHOLE,
    "fp8_w8a16_tensor": _WHOLE,
    "fp8_w8a16_channel": _WHOLE,
    "fp8_w8a16_block": _WHOLE,
    "int8_w8a8_channel": _WHOLE,
    "int8_w8a16_channel": ("pack-quantized",),
    "int8_w8a16_group": ("pack-quantized",),
    "int4_w4a16_group": ("pack-quantized",),
    "mxfp4_w4a16": ("mxfp4-pack-quantized",),
    "nvfp4_w4a16": ("nvfp4-pack-quantized",),
}

_GROUPS = ("group_size", "q_group_size")

Given = dict[str, Any]


def scheme_of(path: str, config: Given, *, depth: int | None = None) -> str | None:
    """Return the scheme of `config`, an object of a config.json; None for an unquantized model.

    path: of the file, for messages. depth: the maximum number of columns of a matrix, which a group
    size of -1 or a 4-bit channel spans. Raises ConfigurationError if no scheme implements it.
    """
    quantization = config.get("quantization_config", config.get("compression_config"))
    if quantization is None:
        if config.get("expert_dtype") is not None:
            raise _bad(path, f"expert_dtype = {_short(config['expert_dtype'])}", "no such key")
        return None
    if not isinstance(quantization, dict):
        raise _bad(path, _short(quantization), "an object")
    method = quantization.get("quant_method")
    if method not in (*_METHODS, "modelopt_fp4"):
        need = f"one of {', '.join(_METHODS)}; for other methods pass the sizes and --quant"
        raise _bad(path, f"quant_method = {_short(method)}", need)
    _check_unquantized(path, quantization)
    _raise_first(path, unknown_keys(method.removesuffix("_fp4"), quantization))
    _check_overrides(path, quantization)
    parse = {
        "fp8": _fp8,
        "mxfp4": lambda *_: "mxfp4_w4a16",
        "gptq": _gptq,
        "awq": _awq,
        "compressed-tensors": _compressed,
        "modelopt": _modelopt,
        "modelopt_fp4": _modelopt,
    }[method]
    quantization = {"expert_dtype": config.get("expert_dtype")} | quantization
    return parse(
        path, quantization if depth is None else _with_depth(quantization, depth + depth % 2)
    )


def _with_depth(given: Given, depth: int) -> Given:
    """Replace group sizes that span a row by `depth`, since a scheme has one size for all matrices.

    A scale covers the existing columns, so a size above a matrix's width also means one group.
    """

    def spelled(one: Any) -> Any:
        if not isinstance(one, dict):
            return one
        one = {k: depth if k in _GROUPS and _is_minus_one(v) else v for k, v in one.items()}
        if one.get("strategy") == "channel" and _is(one, num_bits=4, type="int"):
            return one | {"strategy": "group", "group_size": depth}
        return one

    with_sizes: Given = spelled(given)
    groups = given.get("config_groups")
    if isinstance(groups, dict):
        with_group_sizes = {
            name: one | {"weights": spelled(one.get("weights"))} if isinstance(one, dict) else one
            for name, one in groups.items()
        }
        with_sizes = with_sizes | {"config_groups": with_group_sizes}
    return with_sizes


def _is_minus_one(value: object) -> bool:
    return type(value) is int and value == -1


def quantizes_inputs(given: Mapping[str, Any]) -> bool:
    """Return whether a quantization_config accepted by `scheme_of` also rounds experts' inputs."""
    if given["quant_method"] != "compressed-tensors":
        return str(given.get("quant_algo")) == "NVFP4"
    groups = given["config_groups"].values()
    expert_groups = (one for one in groups if _targets_experts("config.json", one["targets"]))
    return any(one.get("input_activations") for one in expert_groups)


def _fp8(path: str, given: Given) -> str:
    """Return the scheme of fp8: block or tensor scales, dynamic or static activation scales."""
    _one_of(path, given, "fmt", ("e4m3", "float8_e4m3fn", None))
    _one_of(path, given, "expert_dtype", ("fp8", None))
    _one_of(path, given, "scale_fmt", ("ue8m0", "float", None))
    activation_scheme = _one_of(path, given, "activation_scheme", ("dynamic", "static", None))
    block = given.get("weight_block_size")
    for key in ("weight_per_tensor", "act_per_tensor"):
        _one_of(path, given, key, (block is None, None))
    if block is None:
        _one_of(path, given, "activation_scheme", ("dynamic", "static"))
        return "fp8_w8a8_tensor:static=true" if activation_scheme == "static" else "fp8_w8a8_tensor"
    if activation_scheme == "static":
        raise _bad(path, "activation_scheme = 'static' and blocks", "dynamic, or no blocks")
    return _blocks(path, "weight_block_size", block)


def _blocks(path: str, name: str, block: Any, scheme: str = "fp8_w8a8_block") -> str:
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(type(n) is int and 1 <= n <= _MOST for n in block):
        raise _bad(path, f"{name} = {_short(block)}", "two whole numbers")
    return f"{scheme}:block={block[0]}x{block[1]}"


def _gptq(path: str, given: Given) -> str:
    gptq_version(path, given)
    symmetric = _one_of(path, given, "sym", (True, False))
    scheme = _integers(path, given, ("bits",), ("group_size",), zero_points=symmetric is False)
    act_order = _one_of(path, given, "desc_act", (False, True, None))
    return _act_order(scheme) if act_order else scheme


def gptq_version(path: str, given: Mapping[str, Any]) -> int:
    """Return 1 if zero points are stored minus one, 2 if they are stored unchanged.

    Newer quantizers write `format`, older ones `checkpoint_format`, and some both.
    """
    stated = {
        _one_of(path, dict(given), key, ("gptq", "gptq_v2", None))
        for key in ("checkpoint_format", "format")
    } - {None}
    if len(stated) > 1:
        raise _bad(path, "format and checkpoint_format that differ", "one, or the same twice")
    return 2 if "gptq_v2" in stated else 1


def _act_order(scheme: str) -> str:
    return scheme.replace("_group:", "_act_order:")


def _awq(path: str, given: Given) -> str:
    _one_of(path, given, "version", ("gemm", "GEMM", None))  # "gemv" packs along the other axis
    _one_of(path, given, "format", ("gemm", "GEMM", None))
    points = _one_of(path, given, "zero_point", (True, False))
    bits, group = ("bits", "w_bit"), ("group_size", "q_group_size")
    return _integers(path, given, bits, group, zero_points=points is True)


def _integers(
    path: str, given: Given, bits: Sequence[str], group: Sequence[str], *, zero_points: bool
) -> str:
    width = next((given[name] for name in bits if name in given), None)
    columns = next((given[name] for name in group if name in given), None)
    if type(width) is not int or width not in (4, 8):
        raise _bad(path, f"{bits[0]} = {_short(width)}", "4 or 8")
    return _grouped(path, width, columns, zero_points=zero_points)


def _grouped(path: str, bits: int, group: Any, *, zero_points: bool) -> str:
    if type(group) is not int or not 1 <= group <= _MOST or group % 2:
        need = "an even number of columns, or -1 where the layer's sizes are known"
        raise _bad(path, f"group_size = {_short(group)}", need)
    points = ",zero_points=true" if zero_points else ""
    return f"int{bits}_w{bits}a16_group:group={group}{points}"


def _modelopt(path: str, given: Given) -> str:
    schemes = {
        "FP8": "fp8_w8a8_tensor:static=true",
        "FP8_PER_CHANNEL_PER_TOKEN": "fp8_w8a8_channel",
        "NVFP4": "nvfp4_w4a16",
    }
    algorithm = str(_one_of(path, given, "quant_algo", tuple(schemes)))
    if algorithm == "NVFP4" and given.get("group_size") is not None:
        _one_of(path, given, "group_size", (16,))
    groups = given.get("config_groups") or {}
    if not isinstance(groups, dict):
        raise _bad(path, f"config_groups = {_short(groups)}", "an object of objects")
    for name, group in groups.items():
        if isinstance(group, dict) and _targets_experts(path, group.get("targets", ["Linear"])):
            _raise_first(path, unknown_group_keys(name, group))
    return schemes[algorithm]


def _compressed(path: str, given: Given) -> str:
    """Return the scheme of the only entry of config_groups that targets the experts."""
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(one, dict) for one in groups.values()):
        raise _bad(path, f"config_groups = {_short(groups)}", "an object of objects")
    names = [name for name, one in groups.items() if _targets_experts(path, one.get("targets"))]
    if len(names) != 1:
        raise _bad(path, f"config_groups: {len(names)} with the experts", "one of them")
    group = groups[names[0]]
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict) or not isinstance(inputs, dict | None):
        raise _bad(path, f"config_groups: {_short(group)}", "weights and input_activations")
    _raise_first(path, unknown_group_keys(names[0], group))
    parse = _float_scheme if weights.get("type") == "float" else _int_scheme
    scheme = parse(path, weights, inputs)
    if scheme is None:
        need = "fp8 by tensor, channel or block, int8, int4 by group, mxfp4 or nvfp4"
        raise _bad(path, f"weights {_short(weights)}, input_activations {_short(inputs)}", need)
    _check_packing(path, given, group, scheme)
    return _act_order(scheme) if weights.get("actorder") == "group" else scheme


def _check_packing(path: str, given: Given, group: Given, scheme: str) -> None:
    """Raise ConfigurationError if the layout in the files is not one of the scheme's."""
    stated = group if group.get("format") is not None else given
    name = scheme.partition(":")[0]
    _one_of(path, stated, "format", (*_PACKINGS[name], None))
    orders: tuple[object, ...] = ("static", "weight", False, None)  # columns keep their order
    if name in ("int4_w4a16_group", "int8_w8a16_group"):
        orders = ("group", *orders)
    _one_of(path, group["weights"], "actorder", orders)
    _one_of(path, group["weights"], "dynamic", (False, None))
    if group["weights"].get("type") == "float":
        for args in (group["weights"], group.get("input_activations") or {}):
            _one_of(path, args, "symmetric", (True, None))
    sparsity = given.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") in ("dense", None)):
        raise _bad(path, f"sparsity_config = {_short(sparsity)}", "dense weights")


def _is(given: Given | None, **wanted: object) -> bool:
    return given is not None and all(
        given.get(key) == value and type(given.get(key)) is type(value)
        for key, value in wanted.items()
    )


def _float_scheme(path: str, weights: Given, inputs: Given | None) -> str | None:
    if _is(weights, num_bits=4) and weights.get("strategy") in ("group", "tensor_group"):
        if _is(weights, group_size=32) and inputs is None:
            return "mxfp4_w4a16"
        inputs_known = inputs is None or _is(inputs, num_bits=4, type="float", group_size=16)
        return "nvfp4_w4a16" if _is(weights, group_size=16) and inputs_known else None
    if not _is(weights, num_bits=8):
        return None
    if inputs is None:
        return _weight_only_fp8(path, weights)
    if not _is(inputs, num_bits=8, type="float"):
        return None
    strategy = (weights.get("strategy"), inputs.get("strategy"))
    dynamic = inputs.get("dynamic")
    if strategy == ("tensor", "tensor") and isinstance(dynamic, bool):
        return "fp8_w8a8_tensor" if dynamic else "fp8_w8a8_tensor:static=true"
    if strategy == ("channel", "token") and dynamic is True:
        return "fp8_w8a8_channel"
    if strategy == ("block", "group") and dynamic is True:
        block = weights.get("block_structure")
        scheme = _blocks(path, "block_structure", block)
        return scheme if _is(inputs, group_size=block[1]) else None  # type: ignore[index]
    return None


def _weight_only_fp8(path: str, weights: Given) -> str | None:
    """Return the scheme of weight-only float8."""
    strategy = weights.get("strategy")
    if strategy == "block":
        block = weights.get("block_structure")
        return _blocks(path, "block_structure", block, "fp8_w8a16_block")
    return f"fp8_w8a16_{strategy}" if strategy in ("tensor", "channel") else None


def _int_scheme(path: str, weights: Given, inputs: Given | None) -> str | None:
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    symmetric = weights.get("symmetric")
    if weights.get("type") != "int" or type(bits) is not int or not isinstance(symmetric, bool):
        return None
    if inputs is None and strategy == "group" and bits in (4, 8):
        return _grouped(path, bits, weights.get("group_size"), zero_points=not symmetric)
    if bits != 8 or strategy != "channel" or not symmetric:
        return None
    if inputs is None:
        return "int8_w8a16_channel"
    token = _is(inputs, num_bits=8, type="int", strategy="token", dynamic=True, symmetric=True)
    return "int8_w8a8_channel" if token else None


def _targets_experts(path: str, targets: Any) -> bool:
    if not isinstance(targets, list):
        raise _bad(path, f"targets = {_short(targets)}", "a list")
    return any(one == "Linear" or _names_experts(path, one) for one in targets)


def _check_unquantized(path: str, given: Given) -> None:
    for key in _UNQUANTIZED_KEYS:
        names = given.get(key)
        if not isinstance(names, list | None):
            raise _bad(path, f"{key} = {_short(names)}", "a list")
        for name in names or []:
            if _names_experts(path, name):
                need = "all experts quantized; otherwise pass the sizes and --quant"
                raise _bad(path, f"{key} has {_short(name)}", need)


def _raise_first(path: str, mismatches: Iterator[Mismatch]) -> None:
    for got, need in mismatches:
        raise _bad(path, re.sub(r"\s+", " ", got)[:200], need)


def _check_overrides(path: str, given: Given) -> None:
    """Raise ConfigurationError for per-module options that apply to experts of some layer.

    GPTQModel's `dynamic` maps patterns to options: with prefix "-:" the modules are not quantized,
    with "+:" or none they have other options. auto-round's `extra_config` maps module names.
    """
    for key in ("dynamic", "extra_config"):
        entries = given.get(key)
        if not isinstance(entries, dict | None):
            raise _bad(path, f"{key} = {_short(entries)}", "an object")
        for name, options in (entries or {}).items():
            if not isinstance(name, str):
                raise _bad(path, f"{key} has {_short(name)}", "names of modules")
            left_out = key == "dynamic" and name.startswith("-:")
            if is_empty(options) and not left_out:
                continue
            pattern = name[2:] if key == "dynamic" and name[:2] in ("-:", "+:") else name
            is_pattern = key == "dynamic" or ".*" in name or "\\" in name
            text = f"re:{pattern}" if is_pattern else pattern
            if _names_experts(path, text if left_out else _with_any_number(text)):
                need = "the same options for all experts; otherwise pass the sizes and --quant"
                raise _bad(path, f"{key} has {_short(name)}", need)


def _with_any_number(name: str) -> str:
    """Return the name or pattern with every number replaced by a wildcard."""
    if name.startswith("re:"):
        return re.sub(r"\[0-9\]\+|\d+", r"\\d+", name)
    return re.sub(r"\d+", "*", name)


def _expert_modules() -> Iterator[str]:
    for prefix, block in product(_PREFIXES, _BLOCKS):
        yield f"{prefix}.{block}.experts"
        yield from (f"{prefix}.{block}.experts.{leaf}" for leaf in _FUSED)
        yield from (f"{prefix}.{block}.experts.77777.{leaf}" for leaf in _LEAVES)


_EXPERT_MODULES = tuple(_expert_modules())


def _names_experts(path: str, name: Any) -> bool:
    """Return whether an entry refers to expert modules in every layer.

    A regular expression ("re:...") is matched from the start of a name. Any other entry matches
    whole parts of a name between dots, with `*` for any text.
    """
    if not isinstance(name, str) or len(name) > 500:
        raise _bad(path, _short(name), "names of modules")
    if name.startswith("re:"):
        pattern = name[3:]
        if not _PATTERN.fullmatch(pattern) or pattern.count("*") > _MOST_STARS:
            raise _bad(path, _short(name), "a pattern of names, dots and .*")
        return any(re.match(pattern, one) for one in _EXPERT_MODULES)
    inside = name.strip(".").removesuffix(".*")
    if inside.count("*") > _MOST_STARS:
        raise _bad(path, _short(name), f"{_MOST_STARS} stars at most")
    glob = f"*.{inside.replace('[', '[[]')}.*"
    return bool(inside) and any(fnmatchcase(f".{one}.", glob) for one in _EXPERT_MODULES)


def _one_of(path: str, given: Given, key: str, allowed: tuple[object, ...]) -> object:
    value = given.get(key)
    for one in allowed:
        if value is one or (value == one and type(value) is type(one)):
            return one
    need = f"one of {', '.join(str(one) for one in allowed if one is not None)}"
    raise _bad(path, f"{key} = {_short(value)}" if value is not None else f"no {key}", need)


def _short(value: Any) -> str:
    return re.sub(r"\s+", " ", repr(value))[:120]


def _bad(path: str, got: str, need: str) -> ConfigurationError:
    return ConfigurationError(f"model {path[:200]}: quantization_config", got=got, need=need)
