"""Make the equivalent config.json of a params.json, the description of Mistral's own format.

    config = config_of_params(path, params)   # Mistral-Large-3: an object of model_type "mistral4"

Its files (`consolidated*.safetensors`) have the names `layers.L.experts.E.w1`, `w3` and `w2` for
gate, up and down. In float8, `qscale_weight` is the scale of a matrix, and `qscale_act` that of its
input. Only models with experts in a `moe` that has their size are read, unlike Mixtral's.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.models.quantization_keys import is_empty

NAME = "params.json"
_MODEL_TYPE = "mistral4"
# Keys of a config.json, and where a params.json has their values.
_KEYS = {"hidden_size": "dim", "num_hidden_layers": "n_layers"}
_MOE_KEYS = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "expert_hidden_dim",
}
_MOE_DEFAULTS: dict[str, tuple[str, Any]] = {
    "routed_scaling_factor": ("routed_scale", 1.0),
    "first_k_dense_replace": ("first_k_dense_replace", 0),
}
# Keys that select another router, with the values of the one that is read. The weights of the top
# experts, by softmax, are divided by their sum.
_ALLOWED_MOE: dict[str, tuple[object, ...]] = {
    "route_every_n": (1,),
    "num_expert_groups": (1,),
    "num_expert_groups_per_tok": (1,),
    "renorm_strategy": ("WEIGHTS",),
    "use_load_balancing_bias": (False,),
}
_HARMLESS_MOE = ("num_shared_experts", "expert_parallel", "expert_model_parallel")
_ALLOWED_FP8: dict[str, tuple[object, ...]] = {
    "qformat_weight": ("fp8_e4m3",),
    "qscheme_act": ("TENSOR", "NO_SCALES"),
}


def config_of_params(path: Path, params: object) -> dict[str, Any]:
    """Return the equivalent config.json of the object in a params.json.

    Raises ConfigurationError for a model without experts, a missing size, and entries that could
    change the experts or their router and are not implemented.
    """
    if not isinstance(params, Mapping):
        raise _error(path, f"the file = {str(params)[:80]}", "an object")
    moe = params.get("moe")
    if not isinstance(moe, Mapping):
        got = "no moe: a dense model" if moe is None else f"moe = {str(moe)[:80]}"
        raise _error(path, got, "an object moe, as in a model with experts")
    sizes = {
        **{key: _required(path, params, name, "") for key, name in _KEYS.items()},
        **{key: _required(path, moe, name, "moe.") for key, name in _MOE_KEYS.items()},
    }
    _check_values(path, moe, _ALLOWED_MOE, "moe.")
    known = {*_ALLOWED_MOE, *_MOE_KEYS.values(), *_HARMLESS_MOE}
    _check_names(path, moe, known | {name for name, _ in _MOE_DEFAULTS.values()}, "moe.")
    defaults = {key: moe.get(name, default) for key, (name, default) in _MOE_DEFAULTS.items()}
    config = {"model_type": _MODEL_TYPE, **sizes, **defaults, "norm_topk_prob": True}
    config["hidden_act"] = params.get("activation", "silu")
    if params.get("dtype") is not None:
        config["dtype"] = params["dtype"]
    quantization = _quantization(path, params)
    return config if quantization is None else config | {"quantization_config": quantization}


def _quantization(path: Path, params: Mapping[str, Any]) -> Any:
    """Return the equivalent quantization_config, or None for an unquantized model."""
    given = [params[key] for key in ("quantization", "quantization_config") if params.get(key)]
    if not given:
        return None
    if given[0] != given[-1]:
        got = "quantization and quantization_config that differ"
        raise _error(path, got, "one of them, or equal values")
    quantization = given[0]
    if not isinstance(quantization, Mapping):
        raise _error(path, f"quantization = {str(quantization)[:80]}", "an object")
    method = str(quantization.get("quant_method", "")).lower().replace("_", "-")
    if method == "compressed-tensors":
        return {**quantization, "quant_method": method}
    if method:
        return dict(quantization)
    if quantization.get("qformat_weight") is None:
        got = f"quantization with {', '.join(sorted(map(str, quantization)))[:80]}"
        raise _error(path, got, "qformat_weight or quant_method")
    _check_values(path, quantization, _ALLOWED_FP8, "quantization.")
    _check_names(path, quantization, _ALLOWED_FP8, "quantization.")
    is_static = quantization.get("qscheme_act") != "NO_SCALES"
    return {"quant_method": "fp8", "activation_scheme": "static" if is_static else "dynamic"}


def _required(path: Path, entries: Mapping[str, Any], name: str, prefix: str) -> Any:
    if entries.get(name) is None:
        raise _error(path, f"no {prefix}{name}", "this entry, as in Mistral-Large-3")
    return entries[name]


def _check_values(
    path: Path, entries: Mapping[str, Any], allowed: Mapping[str, tuple[object, ...]], prefix: str
) -> None:
    for name, values in allowed.items():
        value = entries.get(name)
        if value is None or any(value == item and type(value) is type(item) for item in values):
            continue
        need = f"{' or '.join(map(str, values))}: other values are not supported"
        raise _error(path, f"{prefix}{name} = {str(value)[:80]}", need)


def _check_names(
    path: Path, entries: Mapping[str, Any], known: Collection[str], prefix: str
) -> None:
    for name, value in entries.items():
        if name not in known and not is_empty(value):
            need = "no such entry: it may change values, and it is not implemented"
            raise _error(path, f"{prefix}{name} = {str(value)[:80]}", need)


def _error(path: Path, got: str, need: str) -> ConfigurationError:
    return ConfigurationError(f"model {str(path)[:200]}", got=got, need=need)
