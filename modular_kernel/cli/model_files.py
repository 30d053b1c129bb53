"""Layer sizes from a model's configuration file: Hugging Face's config.json, read as data alone.

Nothing of the file is run or followed. What describes no layer that this toolkit knows is a
ConfigurationError that names the file and the entry.
"""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from modular_kernel.errors import ConfigurationError

_MOST_BYTES = 1 << 20
_MOST = 1 << 20  # of any size
_DEEPEST = 2  # text_config, in a model of several kinds of input

# What families call the same thing; the first that is there counts.
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "experts_per_token", "moe_top_k", "moe_topk", "moe_k", "top_k")
_INTERMEDIATE = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_dim")
_HIDDEN = ("hidden_size", "d_model", "dim")
_SCALING = ("routed_scaling_factor",)
_INSIDE = ("text_config", "llm_config", "language_config", "thinker_config")
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "swiglu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}
_DTYPES = ("float32", "float16", "bfloat16")

Config = dict[str, Any]


def is_file(model: str) -> bool:
    """Whether `--model` means a file or a folder, not a name."""
    return os.sep in model or model.endswith(".json") or model in (".", "..")


def facts_of_file(model: str) -> dict[str, object]:
    """The problem fields that a config.json (or the one in a folder) settles."""
    path = Path(model)
    try:
        if path.is_dir():
            path = path / "config.json"
        content = _content(path)
    except ConfigurationError:
        raise
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigurationError("model", got=f"{model[:200]!r}: {why}", need="a file") from None
    try:
        config = json.loads(content.decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"no JSON: {str(error)[:100]}", "a config.json") from None
    return _facts(path, _of_layers(path, config))


def _content(path: Path) -> bytes:
    """Of a regular file of at most 1 MiB."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _bad(path, "no regular file", "a config.json")
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise _bad(path, f"more than {_MOST_BYTES} bytes", "a config.json")
    return content


def _of_layers(path: Path, config: Any) -> Config:
    """The object that has the experts: the whole, or that of the language model inside."""
    for _ in range(_DEEPEST):
        if not isinstance(config, dict):
            break
        if _first(config, _EXPERTS) is not None:
            return config
        config = next((config[name] for name in _INSIDE if name in config), None)
    need = f"an object with one of {', '.join(_EXPERTS)}"
    raise _bad(path, "no mixture of experts", need)


def _facts(path: Path, config: Config) -> dict[str, object]:
    found: dict[str, object] = {
        "experts": _size(path, config, _EXPERTS),
        "top_k": _size(path, config, _TOP_K),
        "hidden": _size(path, config, _HIDDEN),
        "intermediate": _size(path, config, _INTERMEDIATE),
        "bias": False,
    }
    if _size(path, config, _TOP_K) > _size(path, config, _EXPERTS):
        raise _bad(path, f"top_k {found['top_k']}", f"<= experts = {found['experts']}")
    found |= _activation(path, config)
    name = _first(config, _SCALING)
    if name is not None and config[name] is not None:
        found["routed_scaling_factor"] = _factor(path, name, config[name])
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if dtype not in _DTYPES:
        raise _bad(path, f"dtype {str(dtype)[:80]!r}", f"one of {', '.join(_DTYPES)}")
    found["dtype"] = dtype
    quant = _quant(path, config.get("quantization_config"))
    return found if quant is None else found | {"quant": quant}


def _size(path: Path, config: Config, names: tuple[str, ...]) -> int:
    name = _first(config, names)
    if name is None:
        raise _bad(path, "none of them", f"one of {', '.join(names)}")
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
        raise _bad(path, f"{name} = {str(value)[:80]}", f"a whole number from 1 to {_MOST}")
    return value


def _factor(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise _bad(path, f"{name} = {str(value)[:80]}", "a number > 0")
    return float(value)


def _activation(path: Path, config: Config) -> dict[str, object]:
    if config.get("model_type") == "gpt_oss":
        limit = _factor(path, "swiglu_limit", config.get("swiglu_limit", 7.0))
        return {"activation": f"swiglu_oai:limit={limit}", "bias": True}
    name = config.get("hidden_act", "silu")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        need = f"one of {', '.join(_ACTIVATIONS)}"
        raise _bad(path, f"hidden_act = {str(name)[:80]!r}", need)
    return {"activation": _ACTIVATIONS[name]}


def _quant(path: Path, config: Any) -> str | None:
    """The scheme of a quantization_config; None for an unquantised model."""
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else None
    if method == "fp8":
        block = config.get("weight_block_size")
        if block is None:
            return "fp8_w8a8_tensor"
        whole = isinstance(block, list) and len(block) == 2
        if not whole or not all(type(n) is int and 1 <= n <= _MOST for n in block):
            raise _bad(path, f"weight_block_size = {str(block)[:80]}", "two numbers")
        return f"fp8_w8a8_block:block={block[0]}x{block[1]}"
    if method == "mxfp4":
        return "mxfp4_w4a16"
    if method in ("gptq", "awq"):
        bits, group = config.get("bits", config.get("w_bit")), config.get("group_size", 128)
        if type(group) is int and 1 <= group <= _MOST and bits in (4, 8):
            shifted = method == "awq" or config.get("sym") is False
            points = ",zero_points=true" if shifted and bits == 4 else ""
            return f"int{bits}_w{bits}a16_group:group={group}{points}"
    got = re.sub(r"\s+", " ", str(config))[:120]
    need = "fp8, mxfp4, gptq or awq; say --quant with sizes given by hand otherwise"
    raise _bad(path, f"quantization_config {got}", need)


def _first(config: Config, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if config.get(name) is not None), None)


def _once(pairs: list[tuple[str, Any]]) -> Config:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name twice in one object")
    return made


def _bad(path: Path, got: str, need: str) -> ConfigurationError:
    return ConfigurationError(f"model {str(path)[:200]}", got=got, need=need)
