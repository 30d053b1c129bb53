"""Converts Mistral's params.json to the equivalent config.json.

    config = config_of_params(path, params)  # {"model_type": "mistral4", ...} for Mistral-Large-3

Mistral publishes some models in its own format: a params.json with other keys than a config.json,
and `consolidated*.safetensors`, in which gate, up and down are `layers.L.experts.E.w1`, `w3` and
`w2`. In float8 files, `qscale_weight` is the scale of a matrix, and `qscale_act` is the scale of
its input.

The object `moe` must have the size of the experts. Mixtral's files do not have it, and are not
supported.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.models.quantization_keys import is_empty

PARAMS_FILE = "params.json"
_MODEL_TYPE = "mistral4"
# Key of a config.json -> key of a params.json.
_KEYS = {"hidden_size": "dim", "num_hidden_layers": "n_layers"}
# Key of a config.json -> key of `moe` in a params.json.
_MOE_KEYS = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "expert_hidden_dim",
}
# Key of a config.json -> (optional key of `moe` in a params.json, default value).
_MOE_DEFAULTS: dict[str, tuple[str, Any]] = {
    "routed_scaling_factor": ("routed_scale", 1.0),
    "first_k_dense_replace": ("first_k_dense_replace", 0),
}
# Keys that select the router, with the supported values. The supported router computes a softmax
# over all experts, and divides the weights of the top-k experts by their sum.
_ALLOWED_MOE_VALUES: dict[str, tuple[object, ...]] = {
    "route_every_n": (1,),
    "num_expert_groups": (1,),
    "num_expert_groups_per_tok": (1,),
    "renorm_strategy": ("WEIGHTS",),
    "use_load_balancing_bias": (False,),
}
_IGNORED_MOE_KEYS = ("num_shared_experts", "expert_parallel", "expert_model_parallel")
_ALLOWED_FP8_VALUES: dict[str, tuple[object, ...]] = {
    "qformat_weight": ("fp8_e4m3",),
    "qscheme_act": ("TENSOR", "NO_SCALES"),
}


def config_of_params(path: Path, params: object) -> dict[str, Any]:
    """Convert the object in a params.json to the object of the equivalent config.json.

    path: path of the params.json, for messages.

    Raises ConfigurationError for a model without experts, a missing size, and unknown entries that
    could change the experts or their router.
    """
    if not isinstance(params, Mapping):
        raise _make_error(path, f"the file = {str(params)[:80]}", "an object")
    moe = params.get("moe")
    if not isinstance(moe, Mapping):
        got = "no moe: a dense model" if moe is None else f"moe = {str(moe)[:80]}"
        raise _make_error(path, got, "an object moe, as in a model with experts")
    sizes = {
        **{key: _get_required(path, params, name, "") for key, name in _KEYS.items()},
        **{key: _get_required(path, moe, name, "moe.") for key, name in _MOE_KEYS.items()},
    }
    _check_values(path, moe, _ALLOWED_MOE_VALUES, "moe.")
    known_keys = {*_ALLOWED_MOE_VALUES, *_MOE_KEYS.values(), *_IGNORED_MOE_KEYS}
    _check_names(path, moe, known_keys | {name for name, _ in _MOE_DEFAULTS.values()}, "moe.")
    defaults = {key: moe.get(name, default) for key, (name, default) in _MOE_DEFAULTS.items()}
    config = {"model_type": _MODEL_TYPE, **sizes, **defaults, "norm_topk_prob": True}
    config["hidden_act"] = params.get("activation", "silu")
    if params.get("dtype") is not None:
        config["dtype"] = params["dtype"]
    quantization = _convert_quantization(path, params)
    return config if quantization is None else config | {"quantization_config": quantization}


def _convert_quantization(path: Path, params: Mapping[str, Any]) -> Any:
    """Return the equivalent quantization_config, or None for an unquantized model."""
    keys = ("quantization", "quantization_config")
    candidates = [params[key] for key in keys if params.get(key)]
    if not candidates:
        return None
    if candidates[0] != candidates[-1]:
        got = "quantization and quantization_config that differ"
        raise _make_error(path, got, "one of them, or equal values")
    quantization = candidates[0]
    if not isinstance(quantization, Mapping):
        raise _make_error(path, f"quantization = {str(quantization)[:80]}", "an object")
    method = str(quantization.get("quant_method", "")).lower().replace("_", "-")
    if method == "compressed-tensors":
        return {**quantization, "quant_method": method}
    if method:
        return dict(quantization)
    if quantization.get("qformat_weight") is None:
        got = f"quantization with {', '.join(sorted(map(str, quantization)))[:80]}"
        raise _make_error(path, got, "qformat_weight or quant_method")
    _check_values(path, quantization, _ALLOWED_FP8_VALUES, "quantization.")
    _check_names(path, quantization, _ALLOWED_FP8_VALUES, "quantization.")
    is_static = quantization.get("qscheme_act") != "NO_SCALES"
    return {"quant_method": "fp8", "activation_scheme": "static" if is_static else "dynamic"}


def _get_required(path: Path, entries: Mapping[str, Any], name: str, prefix: str) -> Any:
    if entries.get(name) is None:
        raise _make_error(path, f"no {prefix}{name}", "this entry, as in Mistral-Large-3")
    return entries[name]


def _check_values(
    path: Path, entries: Mapping[str, Any], allowed: Mapping[str, tuple[object, ...]], prefix: str
) -> None:
    for name, values in allowed.items():
        value = entries.get(name)
        if value is None or any(value == item and type(value) is type(item) for item in values):
            continue
        need = f"{' or '.join(map(str, values))}: other values are not supported"
        raise _make_error(path, f"{prefix}{name} = {str(value)[:80]}", need)


def _check_names(
    path: Path, entries: Mapping[str, Any], known_names: Collection[str], prefix: str
) -> None:
    for name, value in entries.items():
        if name not in known_names and not is_empty(value):
            need = "no such entry: it may change values, and it is not implemented"
            raise _make_error(path, f"{prefix}{name} = {str(value)[:80]}", need)


def _make_error(path: Path, got: str, need: str) -> ConfigurationError:
    return ConfigurationError(f"model {str(path)[:200]}", got=got, need=need)
