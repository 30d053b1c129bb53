"""The MoE layer of a Hugging Face config.json, which is read as data: no code of it is executed.

`families` lists which keys are read for each model_type; nothing is guessed. An unknown type,
method, key or value, and a missing size, raises a ConfigurationError with the file, the entry, its
value, and what is needed.
"""

import difflib
import os
from pathlib import Path
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.models.families import FAMILIES, Family
from modular_kernel.models.quantization_config import scheme_of
from modular_kernel.utils import json_files

_MOST_BYTES = 1 << 20
_MOST = 1 << 20  # upper bound of any size
_DEEPEST = 3  # maximum nesting of configs, as in multimodal models

# Keys of a multimodal model's language model. A config has at most one of them.
_INSIDE = ("text_config", "thinker_config", "language_config", "llm_config")
_INHERITED = ("quantization_config", "compression_config", "dtype", "torch_dtype")
# Activations by transformers' name.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_UNGATED = {"relu2": "relu2"}
_ALPHA = 1.702  # default, since gpt-oss's published files omit it
_DTYPES = ("float32", "float16", "bfloat16")

Config = dict[str, Any]


def is_file(model: str) -> bool:
    """Return whether the value of `--model` is a path rather than a name."""
    return os.sep in model or model.endswith(".json") or model in (".", "..")


def problem_fields_of_file(model: str) -> dict[str, object]:
    """Return the fields of `Problem` that a config.json, or that of the folder `model`, determines.

    These are experts, top_k, hidden, intermediate, activation, bias and
    apply_router_weight_on_input, and, if the file states them, routed_scaling_factor, dtype and
    quant. Raises ConfigurationError if the file cannot be read, or describes a layer that is not
    supported.
    """
    return problem_fields_of_config(*config_of_file(model))


def config_of_file(model: str) -> tuple[Path, Config]:
    """Return the path of a config.json and its object with a known model_type.

    model: the file or its folder. The object inherits quantization_config and dtype from the
    objects that contain it. Raises ConfigurationError if the file cannot be read or has no such
    object.
    """
    path = Path(model)
    try:
        if path.is_dir():
            path = path / "config.json"
        content = json_files.read_file(path, _MOST_BYTES)
    except OSError as error:
        got = f"{str(path)[:200]!r}: {error.strerror}"
        raise ConfigurationError("model", got=got, need="a file") from None
    except ValueError as error:
        raise _bad(path, str(error), "a config.json") from None
    try:
        config = json_files.parse(content, constants=True)  # Mamba configs have infinite limits
    except ValueError as error:
        raise _bad(path, f"no JSON: {str(error)[:100]}", "a config.json") from None
    return path, _of_layers(path, config)


def _of_layers(path: Path, config: Any) -> Config:
    """Return the object with a known model_type: the whole file, or its language model.

    A nested object inherits quantization_config and dtype from the objects that contain it.
    """
    where, above = "", Config()
    for _ in range(_DEEPEST):
        if not isinstance(config, dict):
            raise _bad(path, f"{where or 'the file'} = {str(config)[:80]}", "an object")
        above = _inherited(path, config, above)
        kind = above.get("model_type")
        if isinstance(kind, str) and kind in FAMILIES:
            return above
        inside = [name for name in _INSIDE if name in above]
        if len(inside) != 1:
            raise _unknown(path, where, kind, inside)
        where, config = f"{where}{inside[0]}.", above[inside[0]]
    raise _bad(path, f"{where}: objects in objects", f"a model_type {_DEEPEST} deep at most")


def _inherited(path: Path, config: Config, above: Config) -> Config:
    inherited = {name: above[name] for name in _INHERITED if above.get(name) is not None}
    stated = {name: value for name, value in config.items() if value is not None}
    if any(name in stated for name in ("dtype", "torch_dtype")):
        inherited = {k: v for k, v in inherited.items() if k not in ("dtype", "torch_dtype")}
    for name in ("quantization_config", "compression_config"):
        if name in inherited and name in stated and inherited[name] != stated[name]:
            raise _bad(path, f"two {name} that differ", "one, or the same twice")
    return inherited | stated


def _unknown(path: Path, where: str, kind: Any, inside: list[str]) -> ConfigurationError:
    if len(inside) > 1:
        return _bad(path, f"{where}{' and '.join(inside)}", "one of them")
    got = f"{where}model_type = {str(kind)[:80]!r}" if kind is not None else f"no {where}model_type"
    similar = difflib.get_close_matches(kind, FAMILIES, n=3) if isinstance(kind, str) else []
    known = f"such as {' or '.join(similar)}" if similar else f"one of {len(FAMILIES)}"
    return _bad(path, got, f"one with experts that is known here, {known} (mk models --types)")


def problem_fields_of_config(path: Path, config: Config) -> dict[str, object]:
    """Return the fields of Problem for a known model_type; see `problem_fields_of_file`."""
    kind = config["model_type"]
    family = FAMILIES[kind]
    if family.refused:
        raise _bad(
            path, f"model_type = {kind!r}: {family.refused}", "a layer of gated or ReLU^2 MLPs"
        )
    if family.only is not None:
        _check_only(path, config, *family.only)
    inner = config
    if family.inside:
        inner = config.get(family.inside)  # type: ignore[assignment]
        if not isinstance(inner, dict):
            raise _bad(path, f"{family.inside} = {str(inner)[:80]}", "an object")
    sizes = {
        "experts": _size(path, inner, family.experts),
        "top_k": _size(path, inner, family.top_k),
        "hidden": _size(path, config, _hidden_key(config, family)),
        "intermediate": _size(path, inner, _intermediate_key(config, family)),
    }
    if sizes["top_k"] > sizes["experts"]:
        raise _bad(path, f"top_k {sizes['top_k']}", f"<= experts = {sizes['experts']}")
    fields: dict[str, object] = {**sizes, "activation": _activation(path, inner, family)}
    fields |= {"bias": family.bias, "apply_router_weight_on_input": family.on_input}
    if family.scaling:
        fields["routed_scaling_factor"] = _scaling(path, config, family.scaling)
    fields |= _dtype(path, config)
    depth = max(sizes["hidden"], sizes["intermediate"])
    quant = scheme_of(str(path), config, depth=depth)
    return fields if quant is None else fields | {"quant": quant}


def _check_only(path: Path, config: Config, key: str, allowed: tuple[object, ...]) -> None:
    value = config.get(key)
    if not any(value is one or (value == one and type(value) is type(one)) for one in allowed):
        need = " or ".join("none" if one is None else str(one).lower() for one in allowed)
        raise _bad(path, f"{key} = {str(value)[:80]}", f"{need}: other layers are not supported")


def _hidden_key(config: Config, family: Family) -> str:
    """Return the key of the experts' input width: the latent width, if the model has one."""
    return family.latent if config.get(family.latent) is not None else family.hidden


def _intermediate_key(config: Config, family: Family) -> str:
    swapped = family.dense and config.get(family.dense) is not None
    return "intermediate_size" if swapped else family.intermediate


def _size(path: Path, config: Config, names: str) -> int:
    """Return the integer under one of the keys `names`.

    A list, one number per layer, is accepted if all are equal.
    """
    present = [name for name in names.split() if config.get(name) is not None]
    if not present:
        raise _bad(path, f"no {names.replace(' ', ' or ')}", f"a whole number from 1 to {_MOST}")
    values = set[int]()
    for name in present:
        value = config[name]
        for one in value if isinstance(value, list) and value else [value]:
            if type(one) is not int or not 1 <= one <= _MOST:
                need = f"a whole number from 1 to {_MOST}"
                raise _bad(path, f"{name} = {str(value)[:80]}", need)
            values.add(one)
    if len(values) > 1:
        got = ", ".join(f"{name} = {str(config[name])[:60]}" for name in present)
        raise _bad(path, got, "one size for every layer")
    return values.pop()


def _number(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise _bad(path, f"{name} = {str(value)[:80]}", "a number > 0")
    return float(value)


def _scaling(path: Path, config: Config, key: str) -> float:
    name = key.removesuffix("?")
    if name != key and config.get(name) is None:
        return 1.0
    return _number(path, name, config.get(name))


def _activation(path: Path, config: Config, family: Family) -> str:
    """Return the activation, as for ActivationSpec.parse()."""
    if family.gate == "oai":
        alpha = _number(path, "swiglu_alpha", config.get("swiglu_alpha", _ALPHA))
        limit = _number(path, "swiglu_limit", config.get("swiglu_limit"))
        rows = str(family.interleaved).lower()
        return f"swiglu_oai:alpha={alpha},limit={limit},interleaved={rows}"
    kind = _activation_name(path, config, family)
    if family.gate in ("plain", "ungated"):
        return kind
    bound = _limit(path, config, family.gate)
    if bound is None:
        return kind
    if kind != "silu":
        raise _bad(path, f"{family.activation} = {kind!r} and a limit", "silu")
    return f"swiglu_{family.gate}:limit={bound}"


def _activation_name(path: Path, config: Config, family: Family) -> str:
    key, names = family.activation, _UNGATED if family.gate == "ungated" else _ACTIVATIONS
    if key.startswith("="):
        return key[1:]
    name = config.get(key)
    if isinstance(name, dict):
        name = name.get("name")
    if name is None and family.unsaid:
        return family.unsaid
    if not isinstance(name, str) or name not in names:
        got = f"{key} = {str(name)[:80]!r}" if key in config else f"no {key}"
        raise _bad(path, got, f"one of {', '.join(names)}")
    return names[name]


def _limit(path: Path, config: Config, gate: str) -> float | None:
    """Return the limit of gate and up values: one for the model, or a common one of all layers."""
    if gate == "clamp_before":
        return _number(path, "swiglu_limit", config.get("swiglu_limit"))
    limits = config.get("swiglu_limits") or [None]
    if not isinstance(limits, list):
        raise _bad(path, f"swiglu_limits = {str(limits)[:80]}", "a list")
    first = limits[0] or None  # 0 and null mean no limit
    if any((limit or None) != first for limit in limits):
        raise _bad(path, f"swiglu_limits = {str(limits)[:80]}", "one limit for every layer")
    return None if first is None else _number(path, "swiglu_limits", first)


def _dtype(path: Path, config: Config) -> dict[str, object]:
    """Return {"dtype": ...} of unquantized tensors, or {} if the file does not state it."""
    stated = [config[name] for name in ("dtype", "torch_dtype") if config.get(name) is not None]
    if not stated:
        return {}
    if stated[0] not in _DTYPES or stated[0] != stated[-1]:
        got = " and ".join(f"{str(one)[:60]!r}" for one in stated)
        raise _bad(path, f"dtype {got}", f"one of {', '.join(_DTYPES)}")
    return {"dtype": stated[0]}


def _bad(path: Path, got: str, need: str) -> ConfigurationError:
    return ConfigurationError(f"model {str(path)[:200]}", got=got, need=need)
