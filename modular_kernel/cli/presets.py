"""Layer sizes and properties of published models, for `--model NAME`."""

import difflib
import re
from pathlib import Path

from modular_kernel.cli.file_options import exists, is_directory
from modular_kernel.errors import ConfigurationError
from modular_kernel.models.config_file import is_file, layers_of_file, problem_fields_of_file
from modular_kernel.models.layer_quantization import LayerScheme
from modular_kernel.models.registry import ALIASES, model_named
from modular_kernel.models.registry import MODELS as PUBLISHED
from modular_kernel.text import escape_nonprintable

# Problem fields of each published model.
MODELS: dict[str, dict[str, object]] = {
    name: model.problem_fields() for name, model in PUBLISHED.items()
}


def display_name(model: str) -> str:
    """Return the name of a model for tables.

    For a config.json this is the name of its folder; for another file, the file name without .json.
    """
    if not is_file(model):
        return model
    path = Path(model).absolute()
    if path.name == "config.json":
        path = path.parent
    return escape_nonprintable(path.name.removesuffix(".json"))


def problem_fields(
    model: str, *, quant: str | None = None, activation: str | None = None
) -> dict[str, object]:
    """Return the fields of a Problem that `model`, a name or the path of a config.json, determines.

    quant, activation: the ones to use if the layers of a config.json have several. Raises
    ConfigurationError for an unknown name, and if there are several of them but None is given.
    """
    if reads_file(model):
        fields = problem_fields_of_file(model, quant=quant, activation=activation)
        return fields if "dtype" in fields else fields | _stored_dtype(model)
    model = _canonical_name(model)
    if model in SHAPES:
        return {**SHAPES[model], "activation": "silu", "bias": False}
    published = model_named(model)
    if published is None:
        raise unknown_model_error(model)
    return published.problem_fields()


def layer_groups(model: str, activation: str | None = None) -> tuple[LayerScheme, ...]:
    """Return the schemes of a config.json's layers; () for a name, whose layers do not differ."""
    return layers_of_file(model, activation)[1] if reads_file(model) else ()


def reads_file(model: str) -> bool:
    """Return whether `model` is read as a file. An existing file takes precedence over a hub id."""
    return is_file(model) and (exists(model) or not _is_hub_id(model))


def _stored_dtype(model: str) -> dict[str, object]:
    """Return the dtype of the tensor files in a model's folder; {} if it cannot be determined."""
    from modular_kernel.checkpoints.inspection import dtype_of_files

    dtype = dtype_of_files(model) if is_directory(model) else None
    return {} if dtype is None else {"dtype": dtype}


def is_known(model: str) -> bool:
    """Return whether `model` is a known name, without reading a file."""
    model = _canonical_name(model)
    return model in SHAPES or model_named(model) is not None


def _canonical_name(model: str) -> str:
    """Return the known name that equals `model`, ignoring case, "-", "_" and "."; else `model`."""
    if model in SHAPES or model_named(model) is not None:
        return model
    names = {_normalize(name): name for name in (*SHAPES, *ALIASES, *PUBLISHED)}
    return names.get(_normalize(model), model)


def _normalize(name: str) -> str:
    return re.sub("[-_.]", "", name.lower())


def unknown_model_error(model: str, *extra_names: str) -> ConfigurationError:
    """Return the error for an unknown model name, with suggestions.

    extra_names: further valid names.
    """
    names = [*extra_names, *PUBLISHED, *ALIASES, *SHAPES]
    lowered = model.lower()
    with_prefix = [name for name in names if lowered and name.startswith(lowered)]
    close = [*with_prefix[:3], *difflib.get_close_matches(lowered, names, n=3)]
    close = list(dict.fromkeys(close))[:3]
    need = " or ".join([*close, "another name"] if close else ["a name"]) + " of `mk models`"
    if _is_hub_id(model):
        need = f"its config.json (hf download {model[:200]} config.json)"
    if model and is_directory(model):
        need = f"./{model} for the folder of that name"
    need = f"{need}, or the path of a config.json"
    return ConfigurationError("model", got=repr(model[:200]), need=need)


def _is_hub_id(model: str) -> bool:
    """Return whether `model` has the form `organization/name` of a hub id, without ".json"."""
    organization, _, name = model.partition("/")
    return bool(organization.strip(".") and name) and "/" not in name and name[-5:] != ".json"


# Plain SwiGLU layers, or one GPU's shard of them: experts, top_k, hidden and intermediate. tpN: the
# shard of one of N tensor-parallel ranks, with intermediate / N; epN: that of one of N
# expert-parallel ranks, with experts / N, as if all of every token's top-k were on this rank. Tuned
# files are named by experts and intermediate (experts/triton/configs/files.py), so no two shapes
# may have both in common.
_SIZES: dict[str, tuple[int, int, int, int]] = {
    "mixtral": (8, 2, 4096, 14336),
    "dsv3_ep8": (32, 8, 7168, 2048),
    "qwen3_30b": (128, 8, 2048, 768),
    "gptoss": (128, 4, 2880, 2880),  # without its biases
    "dsv3_256": (256, 8, 7168, 2048),
    "mixtral_tp2": (8, 2, 4096, 7168),
    "mixtral_tp4": (8, 2, 4096, 3584),
    "mixtral_tp8": (8, 2, 4096, 1792),
    "mixtral_8x22b": (8, 2, 6144, 16384),
    "qwen3_30b_tp2": (128, 8, 2048, 384),
    "qwen3_235b": (128, 8, 4096, 1536),
    "qwen3_235b_tp8": (128, 8, 4096, 192),
    "dsv3_tp8": (256, 8, 7168, 256),
    "deepseek_v2_lite": (64, 6, 2048, 1408),
    "gptoss_20b": (32, 4, 2880, 2880),  # without its biases
    "glm_4_5_air": (128, 8, 4096, 1408),
    "llama4_scout": (16, 1, 5120, 8192),
    "kimi_k2_ep8": (48, 8, 7168, 2048),
    "phi_3_5_moe": (16, 2, 4096, 6400),
}
SHAPES: dict[str, dict[str, int]] = {
    name: dict(zip(("experts", "top_k", "hidden", "intermediate"), sizes, strict=True))
    for name, sizes in _SIZES.items()
}
# Shape -> the published model with these sizes; "TP N" or "EP N": those of one of N ranks.
SHAPE_OF = {
    "mixtral": "mixtral-8x7b",
    "dsv3_ep8": "deepseek-v3, EP 8",
    "qwen3_30b": "qwen3-30b-a3b",
    "gptoss": "gpt-oss-120b",
    "dsv3_256": "deepseek-v3",
    "mixtral_tp2": "mixtral-8x7b, TP 2",
    "mixtral_tp4": "mixtral-8x7b, TP 4",
    "mixtral_tp8": "mixtral-8x7b, TP 8",
    "mixtral_8x22b": "mixtral-8x22b",
    "qwen3_30b_tp2": "qwen3-30b-a3b, TP 2",
    "qwen3_235b": "qwen3-235b-a22b",
    "qwen3_235b_tp8": "qwen3-235b-a22b, TP 8",
    "dsv3_tp8": "deepseek-v3, TP 8",
    "gptoss_20b": "gpt-oss-20b",
    "llama4_scout": "llama-4-scout",
    "kimi_k2_ep8": "kimi-k2, EP 8",
}
# The shapes of `mk bench --model baseline`.
BASELINE_SHAPES = ("mixtral", "dsv3_ep8", "qwen3_30b", "gptoss", "dsv3_256")
