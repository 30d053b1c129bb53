"""The scheme that a config.json's quantization_config means for the experts' weights.

Every value that decides the scheme must be stated and known; a method, an algorithm or a layout
that no scheme of this toolkit is, is a ConfigurationError, and so are experts left unquantized and
keys that could change numbers and that nothing here reads (`quantization_keys`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.models.quantization_keys import (
    Mismatch,
    states_nothing,
    unknown_group_keys,
    unknown_keys,
)

_MOST = 1 << 20
_METHODS = ("fp8", "mxfp4", "gptq", "awq", "compressed-tensors", "modelopt")
_LEFT_OUT = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
# Modules that hold experts' weights in one family or another, of a layer far beyond any model.
_BLOCKS = ("mlp", "block_sparse_moe", "feed_forward", "mixer", "moe", "ffn")
_LEAVES = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
_FUSED = ("gate_up_proj", "down_proj")
_MODELS = ("model", "model.language_model", "language_model.model")
_PREFIXES = tuple(f"{model}.layers.77777" for model in _MODELS)
# Patterns in files are compared only if they are of these pieces: no pattern takes long then.
_PIECE = r"[\w\-/: ]|\\[.\-_]|\.\*|\.|\$|\^|\\d\+|\[0-9\]\+|\((?:\?:)?[\w\-]+(?:\|[\w\-]+)*\)"
_PATTERN, _MOST_STARS = re.compile(f"(?:{_PIECE})*", re.ASCII), 4

# compressed-tensors' names of how files hold what a scheme is.
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
    """Name the scheme of `config`, an object of a config.json; None for an unquantized model.

    path: of the file, for messages. depth: the most columns of a matrix, which a group of -1 or a
    channel of 4 bits spans. ConfigurationError if no scheme of this toolkit is meant.
    """
    given = config.get("quantization_config", config.get("compression_config"))
    if given is None:
        if config.get("expert_dtype") is not None:
            raise _bad(path, f"expert_dtype = {_short(config['expert_dtype'])}", "no such key")
        return None
    if not isinstance(given, dict):
        raise _bad(path, _short(given), "an object")
    method = given.get("quant_method")
    if method not in (*_METHODS, "modelopt_fp4"):
        need = f"one of {', '.join(_METHODS)}; for others give sizes and --quant by hand"
        raise _bad(path, f"quant_method = {_short(method)}", need)
    _check_left_out(path, given)
    _refuse_first(path, unknown_keys(method.removesuffix("_fp4"), given))
    _check_overrides(path, given)
    read = {
        "fp8": _fp8,
        "mxfp4": lambda *_: "mxfp4_w4a16",
        "gptq": _gptq,
        "awq": _awq,
        "compressed-tensors": _compressed,
        "modelopt": _modelopt,
        "modelopt_fp4": _modelopt,
    }[method]
    given = {"expert_dtype": config.get("expert_dtype")} | given
    return read(path, given if depth is None else _with_depth(given, depth + depth % 2))


def _with_depth(given: Given, depth: int) -> Given:
    """State the columns of groups that span a whole row: a scheme has one size for all matrices.

    A scale covers the columns there are, so a size above a matrix's own means one group too.
    """

    def spelled(one: Any) -> Any:
        if not isinstance(one, dict):
            return one
        one = {k: depth if k in _GROUPS and _is_minus_one(v) else v for k, v in one.items()}
        if one.get("strategy") == "channel" and _is(one, num_bits=4, type="int"):
            return one | {"strategy": "group", "group_size": depth}
        return one

    found: Given = spelled(given)
    groups = given.get("config_groups")
    if isinstance(groups, dict):
        whole = {
            name: one | {"weights": spelled(one.get("weights"))} if isinstance(one, dict) else one
            for name, one in groups.items()
        }
        found = found | {"config_groups": whole}
    return found


def _is_minus_one(value: object) -> bool:
    return type(value) is int and value == -1


def quantizes_inputs(given: Mapping[str, Any]) -> bool:
    """Tell whether a quantization_config that `scheme_of` knows rounds experts' inputs too."""
    if given["quant_method"] != "compressed-tensors":
        return str(given.get("quant_algo")) == "NVFP4"
    groups = given["config_groups"].values()
    mine = (one for one in groups if _targets_experts("config.json", one["targets"]))
    return any(one.get("input_activations") for one in mine)


def _fp8(path: str, given: Given) -> str:
    """Block or tensor scales; activations are scaled per call, or by stored scales of a tensor."""
    _one_of(path, given, "fmt", ("e4m3", "float8_e4m3fn", None))
    _one_of(path, given, "expert_dtype", ("fp8", None))
    _one_of(path, given, "scale_fmt", ("ue8m0", "float", None))
    how = _one_of(path, given, "activation_scheme", ("dynamic", "static", None))
    block = given.get("weight_block_size")
    for key in ("weight_per_tensor", "act_per_tensor"):
        _one_of(path, given, key, (block is None, None))
    if block is None:
        _one_of(path, given, "activation_scheme", ("dynamic", "static"))
        return "fp8_w8a8_tensor:static=true" if how == "static" else "fp8_w8a8_tensor"
    if how == "static":
        raise _bad(path, "activation_scheme = 'static' and blocks", "dynamic, or no blocks")
    return _blocks(path, "weight_block_size", block)


def _blocks(path: str, name: str, block: Any, scheme: str = "fp8_w8a8_block") -> str:
    whole = isinstance(block, list) and len(block) == 2
    if not whole or not all(type(n) is int and 1 <= n <= _MOST for n in block):
        raise _bad(path, f"{name} = {_short(block)}", "two whole numbers")
    return f"{scheme}:block={block[0]}x{block[1]}"


def _gptq(path: str, given: Given) -> str:
    gptq_version(path, given)
    symmetric = _one_of(path, given, "sym", (True, False))
    found = _integers(path, given, ("bits",), ("group_size",), zero_points=symmetric is False)
    act_order = _one_of(path, given, "desc_act", (False, True, None))
    return _act_order(found) if act_order else found


def gptq_version(path: str, given: Mapping[str, Any]) -> int:
    """Return 2 where zero points are stored as they are, 1 where they are stored less one.

    Newer packers name it `format`, older ones `checkpoint_format`, and some write both.
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
    _one_of(path, given, "version", ("gemm", "GEMM", None))  # "gemv" packs along the other side
    _one_of(path, given, "format", ("gemm", "GEMM", None))
    points = _one_of(path, given, "zero_point", (True, False))
    bits, group = ("bits", "w_bit"), ("group_size", "q_group_size")
    return _integers(path, given, bits, group, zero_points=points is True)


def _integers(
    path: str, given: Given, bits: Sequence[str], group: Sequence[str], *, zero_points: bool
) -> str:
    wide = next((given[name] for name in bits if name in given), None)
    columns = next((given[name] for name in group if name in given), None)
    if type(wide) is not int or wide not in (4, 8):
        raise _bad(path, f"{bits[0]} = {_short(wide)}", "4 or 8")
    return _grouped(path, wide, columns, zero_points=zero_points)


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
            _refuse_first(path, unknown_group_keys(name, group))
    return schemes[algorithm]


def _compressed(path: str, given: Given) -> str:
    """Return the scheme that the one group of config_groups with the experts states."""
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(one, dict) for one in groups.values()):
        raise _bad(path, f"config_groups = {_short(groups)}", "an object of objects")
    names = [name for name, one in groups.items() if _targets_experts(path, one.get("targets"))]
    if len(names) != 1:
        raise _bad(path, f"config_groups: {len(names)} with the experts", "one of them")
    mine = groups[names[0]]
    weights, inputs = mine.get("weights"), mine.get("input_activations")
    if not isinstance(weights, dict) or not isinstance(inputs, dict | None):
        raise _bad(path, f"config_groups: {_short(mine)}", "weights and input_activations")
    _refuse_first(path, unknown_group_keys(names[0], mine))
    known = _float_scheme if weights.get("type") == "float" else _int_scheme
    found = known(path, weights, inputs)
    if found is None:
        need = "fp8 by tensor, channel or block, int8, int4 by group, mxfp4 or nvfp4"
        raise _bad(path, f"weights {_short(weights)}, input_activations {_short(inputs)}", need)
    _check_packing(path, given, mine, found)
    return _act_order(found) if weights.get("actorder") == "group" else found


def _check_packing(path: str, given: Given, group: Given, scheme: str) -> None:
    """Raise the error of a layout in files that is none of the scheme's."""
    stated = group if group.get("format") is not None else given
    name = scheme.partition(":")[0]
    _one_of(path, stated, "format", (*_PACKINGS[name], None))
    orders: tuple[object, ...] = ("static", "weight", False, None)  # columns lie in their order
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
        known = inputs is None or _is(inputs, num_bits=4, type="float", group_size=16)
        return "nvfp4_w4a16" if _is(weights, group_size=16) and known else None
    if not _is(weights, num_bits=8):
        return None
    if inputs is None:
        return _fp8_alone(path, weights)
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


def _fp8_alone(path: str, weights: Given) -> str | None:
    """Return the scheme of float8 weights whose activations stay as they are."""
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


def _check_left_out(path: str, given: Given) -> None:
    for key in _LEFT_OUT:
        names = given.get(key)
        if not isinstance(names, list | None):
            raise _bad(path, f"{key} = {_short(names)}", "a list")
        for name in names or []:
            if _names_experts(path, name):
                need = "experts that are all quantized; otherwise give sizes and --quant by hand"
                raise _bad(path, f"{key} has {_short(name)}", need)


def _refuse_first(path: str, mismatches: Iterator[Mismatch]) -> None:
    for got, need in mismatches:
        raise _bad(path, re.sub(r"\s+", " ", got)[:200], need)


def _check_overrides(path: str, given: Given) -> None:
    """Raise the error of options of single modules that are experts of some layer.

    GPTQModel's `dynamic` has patterns: "-:" before those that are not quantized, "+:" or nothing
    before those with other options. auto-round's `extra_config` has names of modules.
    """
    for key in ("dynamic", "extra_config"):
        entries = given.get(key)
        if not isinstance(entries, dict | None):
            raise _bad(path, f"{key} = {_short(entries)}", "an object")
        for name, options in (entries or {}).items():
            if not isinstance(name, str):
                raise _bad(path, f"{key} has {_short(name)}", "names of modules")
            left_out = key == "dynamic" and name.startswith("-:")
            if states_nothing(options) and not left_out:
                continue
            pattern = name[2:] if key == "dynamic" and name[:2] in ("-:", "+:") else name
            is_pattern = key == "dynamic" or ".*" in name or "\\" in name
            text = f"re:{pattern}" if is_pattern else pattern
            if _names_experts(path, text if left_out else _of_any_layer(text)):
                need = "the same options for all experts; otherwise give sizes and --quant by hand"
                raise _bad(path, f"{key} has {_short(name)}", need)


def _of_any_layer(name: str) -> str:
    """Return the name or pattern with any number in the place of each that it has."""
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
    """Whether an entry means modules with experts' weights in every layer.

    A regular expression ("re:...") meets a name from its start; anything else is whole parts of a
    name between dots, `*` standing for any text.
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
