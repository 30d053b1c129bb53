"""The MoE layer of a Hugging Face config.json, read as data: nothing of it is run or followed.

What is read is what `families` says of the file's model_type; nothing is guessed. A type, a method,
a key or a value that is not known, and a size that is missing, is a ConfigurationError that names
the file, the entry, what it has and what is needed.
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
_MOST = 1 << 20  # of any size
_DEEPEST = 3  # an object in an object in the file, as a model of several kinds of input has them

# Where a model of several kinds of input keeps its language model, one of them in one object.
_INSIDE = ("text_config", "thinker_config", "language_config", "llm_config")
_INHERITED = ("quantization_config", "compression_config", "dtype", "torch_dtype")
# transformers' names of the functions that this toolkit has, and ours.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_UNGATED = {"relu2": "relu2"}
_ALPHA = 1.702  # gpt-oss's published files leave it out
_DTYPES = ("float32", "float16", "bfloat16")

Config = dict[str, Any]


def is_file(model: str) -> bool:
    """Tell whether `--model` means a file or a folder, not a name."""
    return os.sep in model or model.endswith(".json") or model in (".", "..")


def facts_of_file(model: str) -> dict[str, object]:
    """Read the fields of `Problem` that a config.json, or the one in the folder `model`, settles.

    experts, top_k, hidden, intermediate, activation, bias, apply_router_weight_on_input; also
    routed_scaling_factor, dtype and quant where the file states them. ConfigurationError if it
    cannot be read, or describes no layer of this toolkit.
    """
    return facts_of_config(*config_of_file(model))


def config_of_file(model: str) -> tuple[Path, Config]:
    """Read the object of a known model_type in a config.json, or in that of the folder `model`.

    It has its parents' quantization_config and dtype, unless it states its own. Returns the file
    too, for messages. ConfigurationError if it cannot be read, or holds no such object.
    """
    path = Path(model)
    try:
        if path.is_dir():
            path = path / "config.json"
        content = json_files.content(path, _MOST_BYTES)
    except OSError as error:
        got = f"{str(path)[:200]!r}: {error.strerror}"
        raise ConfigurationError("model", got=got, need="a file") from None
    except ValueError as error:
        raise _bad(path, str(error), "a config.json") from None
    try:
        config = json_files.parse(content, constants=True)  # Mamba's limits are infinite
    except ValueError as error:
        raise _bad(path, f"no JSON: {str(error)[:100]}", "a config.json") from None
    return path, _of_layers(path, config)


def _of_layers(path: Path, config: Any) -> Config:
    """Return the object of a known model_type: the whole, or that of the language model inside.

    One inside has its parents' quantization_config and dtype, unless it states its own.
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
    given = {name: above[name] for name in _INHERITED if above.get(name) is not None}
    own = {name: value for name, value in config.items() if value is not None}
    if any(name in own for name in ("dtype", "torch_dtype")):
        given = {k: v for k, v in given.items() if k not in ("dtype", "torch_dtype")}
    for name in ("quantization_config", "compression_config"):
        if name in given and name in own and given[name] != own[name]:
            raise _bad(path, f"two {name} that differ", "one, or the same twice")
    return given | own


def _unknown(path: Path, where: str, kind: Any, inside: list[str]) -> ConfigurationError:
    if len(inside) > 1:
        return _bad(path, f"{where}{' and '.join(inside)}", "one of them")
    got = f"{where}model_type = {str(kind)[:80]!r}" if kind is not None else f"no {where}model_type"
    near = difflib.get_close_matches(kind, FAMILIES, n=3) if isinstance(kind, str) else []
    known = f"such as {' or '.join(near)}" if near else f"one of {len(FAMILIES)}"
    return _bad(path, got, f"one with experts that is known here, {known} (mk models --types)")


def facts_of_config(path: Path, config: Config) -> dict[str, object]:
    """Return what the object of a known model_type says of its layer, as `facts_of_file` does."""
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
    found: dict[str, object] = {**sizes, "activation": _activation(path, inner, family)}
    found |= {"bias": family.bias, "apply_router_weight_on_input": family.on_input}
    if family.scaling:
        found["routed_scaling_factor"] = _scaling(path, config, family.scaling)
    found |= _dtype(path, config)
    depth = max(sizes["hidden"], sizes["intermediate"])
    quant = scheme_of(str(path), config, depth=depth)
    return found if quant is None else found | {"quant": quant}


def _check_only(path: Path, config: Config, key: str, allowed: tuple[object, ...]) -> None:
    value = config.get(key)
    if not any(value is one or (value == one and type(value) is type(one)) for one in allowed):
        need = " or ".join("none" if one is None else str(one).lower() for one in allowed)
        raise _bad(
            path, f"{key} = {str(value)[:80]}", f"{need}: its layer is none of ours otherwise"
        )


def _hidden_key(config: Config, family: Family) -> str:
    """Return the key of what experts read and write.

    It is that of a latent space's width, where the model has one.
    """
    return family.latent if config.get(family.latent) is not None else family.hidden


def _intermediate_key(config: Config, family: Family) -> str:
    swapped = family.dense and config.get(family.dense) is not None
    return "intermediate_size" if swapped else family.intermediate


def _size(path: Path, config: Config, names: str) -> int:
    """Return the whole number under one of `names`.

    A list, one number a layer, counts if all are one.
    """
    given = [name for name in names.split() if config.get(name) is not None]
    if not given:
        raise _bad(path, f"no {names.replace(' ', ' or ')}", f"a whole number from 1 to {_MOST}")
    values = set[int]()
    for name in given:
        value = config[name]
        for one in value if isinstance(value, list) and value else [value]:
            if type(one) is not int or not 1 <= one <= _MOST:
                need = f"a whole number from 1 to {_MOST}"
                raise _bad(path, f"{name} = {str(value)[:80]}", need)
            values.add(one)
    if len(values) > 1:
        got = ", ".join(f"{name} = {str(config[name])[:60]}" for name in given)
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
    """Return the activation as ActivationSpec.parse() takes it."""
    if family.gate == "oai":
        alpha = _number(path, "swiglu_alpha", config.get("swiglu_alpha", _ALPHA))
        limit = _number(path, "swiglu_limit", config.get("swiglu_limit"))
        rows = str(family.interleaved).lower()
        return f"swiglu_oai:alpha={alpha},limit={limit},interleaved={rows}"
    kind = _named(path, config, family)
    if family.gate in ("plain", "ungated"):
        return kind
    bound = _limit(path, config, family.gate)
    if bound is None:
        return kind
    if kind != "silu":
        raise _bad(path, f"{family.activation} = {kind!r} and a limit", "silu")
    return f"swiglu_{family.gate}:limit={bound}"


def _named(path: Path, config: Config, family: Family) -> str:
    key, known = family.activation, _UNGATED if family.gate == "ungated" else _ACTIVATIONS
    if key.startswith("="):
        return key[1:]
    name = config.get(key)
    if isinstance(name, dict):
        name = name.get("name")
    if name is None and family.unsaid:
        return family.unsaid
    if not isinstance(name, str) or name not in known:
        got = f"{key} = {str(name)[:80]!r}" if key in config else f"no {key}"
        raise _bad(path, got, f"one of {', '.join(known)}")
    return known[name]


def _limit(path: Path, config: Config, gate: str) -> float | None:
    """Return the bound of gate and up values: one for the model, or one that all layers share."""
    if gate == "clamp_before":
        return _number(path, "swiglu_limit", config.get("swiglu_limit"))
    limits = config.get("swiglu_limits") or [None]
    if not isinstance(limits, list):
        raise _bad(path, f"swiglu_limits = {str(limits)[:80]}", "a list")
    first = limits[0] or None  # 0 and null: none
    if any((limit or None) != first for limit in limits):
        raise _bad(path, f"swiglu_limits = {str(limits)[:80]}", "one limit for every layer")
    return None if first is None else _number(path, "swiglu_limits", first)


def _dtype(path: Path, config: Config) -> dict[str, object]:
    """Return the dtype of what is not quantized; nothing where the file does not say it."""
    given = [config[name] for name in ("dtype", "torch_dtype") if config.get(name) is not None]
    if not given:
        return {}
    if given[0] not in _DTYPES or given[0] != given[-1]:
        got = " and ".join(f"{str(one)[:60]!r}" for one in given)
        raise _bad(path, f"dtype {got}", f"one of {', '.join(_DTYPES)}")
    return {"dtype": given[0]}


def _bad(path: Path, got: str, need: str) -> ConfigurationError:
    return ConfigurationError(f"model {str(path)[:200]}", got=got, need=need)
