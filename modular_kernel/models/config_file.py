"""Reads the MoE layer that a Hugging Face config.json describes.

`families` lists the keys of each model_type. No code of the model is executed, and no value is
guessed. An unknown model_type, quantization method, key or value, or a missing size, raises
ConfigurationError with the file, the entry and its value.
"""

import difflib
import os
from pathlib import Path
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.models.families import FAMILIES, Family
from modular_kernel.models.gguf_config import config_of_gguf
from modular_kernel.models.gguf_header import find_model_file, is_gguf
from modular_kernel.models.layer_quantization import (
    UNQUANTIZED,
    LayerScheme,
    layer_schemes,
    quantization_of,
)
from modular_kernel.models.mistral_params import PARAMS_FILE, config_of_params
from modular_kernel.models.quantization_config import MIXED, config_error, shorten
from modular_kernel.utils import json_files

_MAX_BYTES = 1 << 24  # large, because modelopt may list every module of every expert
_HF_QUANT_CONFIG = "hf_quant_config.json"  # modelopt's file in the folder of config.json
# Files of older quantizers in the folder of config.json, and of Ascend's msmodelslim.
_GPTQ_FILE, _AWQ_FILE = "quantize_config.json", "quant_config.json"
_ASCEND_FILE = "quant_model_description.json"
_AWQ_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}  # in _AWQ_FILE
_MLX_KEYS = {"bits", "group_size"}
_MAX_SIZE = 1 << 20  # upper bound of any size
_MAX_NESTING = 3  # configs of multimodal models are nested

# Keys of the language model in the config of a multimodal model, which has at most one of them.
_NESTED_KEYS = ("text_config", "thinker_config", "language_config", "llm_config")
_INHERITED_KEYS = (
    "quantization_config", "compression_config", "quantization", "dtype", "torch_dtype"
)  # fmt: skip
# Name of an activation in transformers -> kind of ActivationSpec.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_UNGATED_ACTIVATIONS = {"relu2": "relu2"}
_DEFAULT_ALPHA = 1.702  # swiglu_alpha of gpt-oss, whose published files omit the key
_DTYPES = ("float32", "float16", "bfloat16")

Config = dict[str, Any]


def is_model_path(model: str) -> bool:
    """Return whether the value of the option `--model` is a path, not the name of a model."""
    return os.sep in model or model.endswith((".json", ".gguf")) or model in (".", "..")


def problem_fields_of_file(
    model: str, *, quant: str | None = None, activation: str | None = None
) -> dict[str, object]:
    """Return the fields of `Problem` that a config.json determines.

    These are experts, top_k, hidden, intermediate, activation, bias and
    apply_router_weight_on_input, and, if the file states them, routed_scaling_factor, dtype and
    quant.

    model: path of the config.json or of its folder.
    quant: the scheme to use if layers have different schemes.
    activation: the activation to use if layers have different activations.

    Raises ConfigurationError if the file cannot be read, if the layer is not supported, or if
    layers have different schemes or activations and none is selected.
    """
    fields, schemes = layers_of_file(model, activation)
    if len(schemes) == 1:
        scheme = schemes[0].scheme
        return fields if scheme == UNQUANTIZED else fields | {"quant": scheme}
    if quant is None:
        got = f"several schemes ({'; '.join(map(str, schemes[:4]))})"
        raise config_error(model, got, "one for all layers, or --quant to select one")
    return fields | {"quant": quant}


def layers_of_file(
    model: str, activation: str | None = None
) -> tuple[dict[str, Any], tuple[LayerScheme, ...]]:
    """Return the fields of `problem_fields_of_file` without quant, and the schemes of the layers.

    Raises the errors of `problem_fields_of_file`, but accepts several schemes.
    """
    path, config = config_of_file(model)
    fields = layer_fields_of_config(path, config, None if activation is None else 0)
    fields |= {} if activation is None else {"activation": activation}
    return fields, layer_schemes(path, config, fields)


def config_of_file(model: str) -> tuple[Path, Config]:
    """Return the path of a config.json, and the object in the file that has a known model_type.

    The object inherits quantization_config and dtype from the objects that contain it. If it has no
    quantization_config, the one that `read_quantization_file` finds in the folder is used.

    model: path of a config.json, of a params.json (Mistral), of a GGUF file, or of a folder. In a
        folder, config.json comes first, then params.json, then the GGUF file. A params.json and a
        GGUF file are converted to the equivalent config.json.

    Raises ConfigurationError if the file cannot be read or has no such object.
    """
    path = Path(model)
    try:
        if is_gguf(path) and not path.is_dir():
            return config_of_gguf(path)
        if path.is_dir():
            has_config = any((path / name).exists() for name in ("config.json", PARAMS_FILE))
            gguf = None if has_config else find_model_file(path)
            if gguf is not None:
                return config_of_gguf(gguf)
            path = config_path(path)
    except OSError as error:  # for example, the name is too long
        raise _make_unreadable_error(path, error) from None
    if path.name == PARAMS_FILE:
        return path, config_of_params(path, _read_json(path, "a params.json"))
    config = _add_mlx_method(_find_model_config(path, _read_json(path, "a config.json")))
    if path.name == "config.json":
        config = _add_quantization_file(path, config)
    return path, config


def config_path(folder: Path) -> Path:
    """Return the path of a folder's config.json, or of params.json if only that file exists."""
    path = folder / "config.json"
    return folder / PARAMS_FILE if not path.exists() and (folder / PARAMS_FILE).exists() else path


def _make_unreadable_error(path: Path, error: OSError) -> ConfigurationError:
    got = f"{str(path)[:200]!r}: {error.strerror}"
    return ConfigurationError("model", got=got, need="a file")


def _read_json(path: Path, kind: str) -> Any:
    """Read a JSON file. Raises ConfigurationError if it is missing or invalid.

    kind: description of the file, for messages.
    """
    try:
        content = json_files.read_file(path, _MAX_BYTES)
    except OSError as error:
        raise _make_unreadable_error(path, error) from None
    except ValueError as error:
        raise _make_error(path, str(error), kind) from None
    try:
        # Infinity is allowed, because Mamba configs have infinite limits.
        return json_files.parse(content, allow_constants=True)
    except ValueError as error:
        raise _make_error(path, f"invalid JSON: {str(error)[:100]}", kind) from None


def read_hf_quant_config(folder: Path) -> Config | None:
    """Return the quantization_config in the hf_quant_config.json of a folder.

    Older versions of modelopt wrote this file instead of a quantization_config in config.json.
    Returns None if there is no such file, or if it quantizes only the KV cache. Raises
    ConfigurationError for an invalid file.
    """
    path = folder / _HF_QUANT_CONFIG
    if not path.exists():
        return None
    content = _read_json(path, "modelopt's description of the quantization")
    quantization = content.get("quantization") if isinstance(content, dict) else None
    if not isinstance(quantization, dict):
        raise config_error(str(path), f"quantization = {shorten(quantization)}", "an object")
    if quantization.get("quant_algo") is None:  # only the KV cache may be quantized
        return None
    return quantization | {"quant_method": "modelopt"}


def read_quantization_file(folder: Path) -> Config | None:
    """Return the quantization_config of a folder whose config.json has none.

    It is read from modelopt's hf_quant_config.json, from the quantize_config.json of AutoGPTQ, or
    from the quant_config.json of AutoAWQ. Returns None if the folder has none of these files.
    Raises ConfigurationError for an invalid file, and for files of Ascend's msmodelslim.
    """
    modelopt = read_hf_quant_config(folder)
    if modelopt is not None:
        return modelopt
    readers = ((_GPTQ_FILE, "gptq", dict[str, str]()), (_AWQ_FILE, "awq", _AWQ_NAMES))
    for name, method, names in readers:
        path = folder / name
        if path.exists():
            content = _read_json(path, f"the quantization_config of {method}")
            if not isinstance(content, dict):
                raise config_error(str(path), shorten(content), "an object")
            renamed = {str(names.get(key, key)): value for key, value in content.items()}
            return {"quant_method": method} | renamed
    path = folder / _ASCEND_FILE
    if path.exists():
        need = "unquantized files, with quantize= to quantize them while they are loaded"
        raise config_error(str(path), "the quantization of Ascend's msmodelslim", need)
    return None


def _add_mlx_method(config: Config) -> Config:
    """Add the quant_method to a config of MLX, whose entry "quantization" does not have one."""
    quantization = quantization_of(config) or config.get("quantization")
    if not isinstance(quantization, dict) or "quant_method" in quantization:
        return config
    if not quantization.keys() >= _MLX_KEYS:
        return config
    return config | {"quantization_config": quantization | {"quant_method": "mlx"}}


def _add_quantization_file(path: Path, config: Config) -> Config:
    """Add entries of other files that are missing in config.json."""
    quantization = quantization_of(config)
    if quantization is None:
        from_file = read_quantization_file(path.parent)
        return config if from_file is None else config | {"quantization_config": from_file}
    if not isinstance(quantization, dict) or quantization.get("quantized_layers"):
        return config
    if str(quantization.get("quant_algo")).upper() != MIXED:
        return config
    layers = (read_hf_quant_config(path.parent) or {}).get("quantized_layers")
    return config | {"quantization_config": quantization | {"quantized_layers": layers}}


def _find_model_config(path: Path, config: Any) -> Config:
    """Return the object with a known model_type: the config, or the config of the language model.

    A nested object inherits quantization_config and dtype from the objects that contain it.
    """
    path_prefix, merged = "", Config()
    for _ in range(_MAX_NESTING):
        if not isinstance(config, dict):
            raise _make_error(
                path, f"{path_prefix or 'the file'} = {str(config)[:80]}", "an object"
            )
        merged = _inherit(path, config, merged)
        model_type = merged.get("model_type")
        if isinstance(model_type, str) and model_type in FAMILIES:
            return merged
        nested = [name for name in _NESTED_KEYS if name in merged]
        if len(nested) != 1:
            raise _make_unknown_type_error(path, path_prefix, model_type, nested)
        path_prefix, config = f"{path_prefix}{nested[0]}.", merged[nested[0]]
    need = f"a model_type at most {_MAX_NESTING} levels deep"
    raise _make_error(path, f"{path_prefix}: nested too deeply", need)


def _inherit(path: Path, config: Config, parent: Config) -> Config:
    inherited = {name: parent[name] for name in _INHERITED_KEYS if parent.get(name) is not None}
    present = {name: value for name, value in config.items() if value is not None}
    if any(name in present for name in ("dtype", "torch_dtype")):
        inherited = {k: v for k, v in inherited.items() if k not in ("dtype", "torch_dtype")}
    for name in ("quantization_config", "compression_config"):
        if name in inherited and name in present and inherited[name] != present[name]:
            raise _make_error(path, f"two {name} that differ", "one of them, or equal values")
    return inherited | present


def _make_unknown_type_error(
    path: Path, path_prefix: str, model_type: Any, nested: list[str]
) -> ConfigurationError:
    if len(nested) > 1:
        return _make_error(path, f"{path_prefix}{' and '.join(nested)}", "one of them")
    got = (
        f"{path_prefix}model_type = {str(model_type)[:80]!r}"
        if model_type is not None
        else f"no {path_prefix}model_type"
    )
    similar = (
        difflib.get_close_matches(model_type, FAMILIES, n=3) if isinstance(model_type, str) else []
    )
    suggestion = f"such as {' or '.join(similar)}" if similar else f"one of {len(FAMILIES)}"
    return _make_error(
        path, got, f"a supported MoE model_type, {suggestion} (see mk models --types)"
    )


def layer_fields_of_config(path: Path, config: Config, layer: int | None = None) -> dict[str, Any]:
    """Return the fields of Problem except quant.

    config: an object with a known model_type, from `config_of_file`.
    layer: number of the layer; None for all layers.

    Raises ConfigurationError for a model without experts, for a layer that is not supported, and,
    if `layer` is None, for layers that differ in other fields than quant.
    """
    model_type = config["model_type"]
    family = FAMILIES[model_type]
    if family.unsupported_reason:
        got = f"model_type = {model_type!r}: {family.unsupported_reason}"
        raise _make_error(path, got, "a layer of gated or ReLU^2 MLPs")
    if family.required is not None:
        _check_allowed(path, config, *family.required)
    moe_config = config
    if family.nested_in:
        moe_config = config.get(family.nested_in)  # type: ignore[assignment]
        if not isinstance(moe_config, dict):
            raise _make_error(path, f"{family.nested_in} = {str(moe_config)[:80]}", "an object")
    _check_has_experts(path, moe_config, family.experts)
    sizes = {
        "experts": _read_size(path, moe_config, family.experts),
        "top_k": _read_size(path, moe_config, family.top_k),
        "hidden": _read_size(path, config, _get_hidden_key(config, family)),
        "intermediate": _read_size(path, moe_config, _get_intermediate_key(config, family)),
    }
    if sizes["top_k"] > sizes["experts"]:
        raise _make_error(path, f"top_k {sizes['top_k']}", f"<= experts = {sizes['experts']}")
    fields: dict[str, Any] = {
        **sizes,
        "activation": _read_activation(path, moe_config, family, layer),
    }
    fields |= {"bias": family.bias, "apply_router_weight_on_input": family.router_weight_on_input}
    if family.scaling:
        fields["routed_scaling_factor"] = _read_scaling(path, config, family.scaling)
    return fields | _read_dtype(path, config)


def _check_has_experts(path: Path, config: Config, names: str) -> None:
    """Raise ConfigurationError for a dense model of a model_type that may have experts.

    names: keys of the number of experts, separated by spaces.
    """
    counts = {name: config[name] for name in names.split() if config.get(name) is not None}
    if counts and all(type(count) is int and count in (0, 1) for count in counts.values()):
        got = f"{', '.join(f'{name} = {count}' for name, count in counts.items())}: a dense model"
        raise _make_error(path, got, "a model with 2 or more experts")
    if not counts:
        got = f"no {names.replace(' ', ' or ')}: a dense model"
        raise _make_error(path, got, f"a model with 2 to {_MAX_SIZE} experts")


def _check_allowed(path: Path, config: Config, key: str, allowed: tuple[object, ...]) -> None:
    value = config.get(key)
    if not any(value is item or (value == item and type(value) is type(item)) for item in allowed):
        need = " or ".join("none" if item is None else str(item).lower() for item in allowed)
        raise _make_error(
            path, f"{key} = {str(value)[:80]}", f"{need}: other values are not supported"
        )


def _get_hidden_key(config: Config, family: Family) -> str:
    """Return the key of the experts' input size, which is the latent size if there is one."""
    return family.latent if config.get(family.latent) is not None else family.hidden


def _get_intermediate_key(config: Config, family: Family) -> str:
    has_dense_key = family.dense_key and config.get(family.dense_key) is not None
    return "intermediate_size" if has_dense_key else family.intermediate


def _read_size(path: Path, config: Config, keys: str) -> int:
    """Return a size. All values must be equal.

    keys: alternative keys, separated by spaces. A value may be a list with a number for each
        layer.
    """
    present_keys = [key for key in keys.split() if config.get(key) is not None]
    if not present_keys:
        raise _make_error(
            path, f"no {keys.replace(' ', ' or ')}", f"an integer from 1 to {_MAX_SIZE}"
        )
    values = set[int]()
    for key in present_keys:
        value = config[key]
        for item in value if isinstance(value, list) and value else [value]:
            if type(item) is not int or not 1 <= item <= _MAX_SIZE:
                need = f"an integer from 1 to {_MAX_SIZE}"
                raise _make_error(path, f"{key} = {str(value)[:80]}", need)
            values.add(item)
    if len(values) > 1:
        got = ", ".join(f"{key} = {str(config[key])[:60]}" for key in present_keys)
        raise _make_error(path, got, "one size for every layer")
    return values.pop()


def _check_number(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise _make_error(path, f"{name} = {str(value)[:80]}", "a number > 0")
    return float(value)


def _read_scaling(path: Path, config: Config, key: str) -> float:
    name = key.removesuffix("?")
    if name != key and config.get(name) is None:
        return 1.0
    return _check_number(path, name, config.get(name))


def _read_activation(path: Path, config: Config, family: Family, layer: int | None) -> str:
    """Return the activation in the syntax of `ActivationSpec.parse`."""
    if family.gate == "oai":
        alpha = _check_number(path, "swiglu_alpha", config.get("swiglu_alpha", _DEFAULT_ALPHA))
        limit = _check_number(path, "swiglu_limit", config.get("swiglu_limit"))
        rows = str(family.interleaved).lower()
        return f"swiglu_oai:alpha={alpha},limit={limit},interleaved={rows}"
    if family.gate == "plain" and config.get(family.activation) == "situ":  # Kimi-K3
        beta, linear_beta = "activation_situ_beta", "activation_situ_linear_beta"
        parts = [f"alpha={_check_number(path, beta, config.get(beta))}"]
        if config.get(linear_beta) is not None:
            parts.append(f"limit={_check_number(path, linear_beta, config[linear_beta])}")
        return f"situ:{','.join(parts)}"
    kind = _read_activation_name(path, config, family)
    if family.gate in ("plain", "ungated"):
        return kind
    clamp_limit = _read_limit(path, config, family.gate, layer)
    if clamp_limit is None:
        return kind
    if kind != "silu":
        raise _make_error(path, f"{family.activation} = {kind!r} and a limit", "silu")
    return f"swiglu_{family.gate}:limit={clamp_limit}"


def _read_activation_name(path: Path, config: Config, family: Family) -> str:
    key = family.activation
    names = _UNGATED_ACTIVATIONS if family.gate == "ungated" else _ACTIVATIONS
    if key.startswith("="):
        return key[1:]
    value = config.get(key)
    if value in (None, {}) and family.default_activation:
        return family.default_activation
    name = value.get("name") if isinstance(value, dict) else value
    if not isinstance(name, str) or name not in names:
        got = f"{key} = {str(value)[:80]!r}" if key in config else f"no {key}"
        raise _make_error(path, got, f"one of {', '.join(names)}")
    return names[name]


def _read_limit(path: Path, config: Config, gate: str, layer: int | None) -> float | None:
    """Return the limit to which gate and up values are clamped; None if there is none.

    Layers beyond the end of a list of limits have no limit.

    layer: number of the layer; None for all layers, which must have the same limit.
    """
    if gate == "clamp_before":
        return _check_number(path, "swiglu_limit", config.get("swiglu_limit"))
    limits = config.get("swiglu_limits") or [None]
    if not isinstance(limits, list):
        raise _make_error(path, f"swiglu_limits = {str(limits)[:80]}", "a list")
    limit_by_layer = [limit or None for limit in limits]  # 0 and null mean no limit
    for limit in limit_by_layer:
        if limit is not None:
            _check_number(path, "swiglu_limits", limit)
    if layer is not None:
        return limit_by_layer[layer] if layer < len(limit_by_layer) else None
    if any(limit != limit_by_layer[0] for limit in limit_by_layer):
        need = "one limit for every layer; otherwise select a layer, or pass --activation"
        raise _make_error(path, f"swiglu_limits = {str(limits)[:80]}", need)
    return limit_by_layer[0]


def _read_dtype(path: Path, config: Config) -> dict[str, object]:
    """Return {"dtype": dtype of unquantized tensors}, or {} if the file does not state it."""
    dtypes = [config[name] for name in ("dtype", "torch_dtype") if config.get(name) is not None]
    if not dtypes:
        return {}
    if dtypes[0] not in _DTYPES or dtypes[0] != dtypes[-1]:
        got = " and ".join(f"{str(dtype)[:60]!r}" for dtype in dtypes)
        raise _make_error(path, f"dtype {got}", f"one of {', '.join(_DTYPES)}")
    return {"dtype": dtypes[0]}


def _make_error(path: Path, got: str, need: str) -> ConfigurationError:
    return ConfigurationError(f"model {str(path)[:200]}", got=got, need=need)
