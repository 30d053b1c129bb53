"""Layer sizes and properties for `--model`, from published models, shapes and config files.

A shape is a plain SwiGLU layer with the sizes of a model, or of the shard of one of its ranks.
Shapes are used in benchmarks and tuning.
"""

import difflib
import re
from pathlib import Path

from modular_kernel.cli.file_options import exists, is_directory
from modular_kernel.errors import ConfigurationError
from modular_kernel.models.config_file import is_model_path, layers_of_file, problem_fields_of_file
from modular_kernel.models.layer_quantization import LayerScheme
from modular_kernel.models.registry import ALIASES, MODELS, find_model
from modular_kernel.text import escape_nonprintable

# Name of a published model -> the fields of its Problem.
MODEL_FIELDS: dict[str, dict[str, object]] = {
    name: model.problem_fields() for name, model in MODELS.items()
}


def format_model_name(model: str) -> str:
    """Return the name of a model for tables.

    The path of a config.json becomes the name of its folder. Another path becomes its file name
    without .json.
    """
    if not is_model_path(model):
        return model
    path = Path(model).absolute()
    if path.name == "config.json":
        path = path.parent
    return escape_nonprintable(path.name.removesuffix(".json"))


def load_problem_fields(
    model: str, *, quant: str | None = None, activation: str | None = None
) -> dict[str, object]:
    """Return the fields of a Problem that a model determines.

    model: a name, or the path of a config.json or of its folder.
    quant, activation: the scheme and the activation to use if the layers of a config.json differ in
        them.

    Raises ConfigurationError for an unknown name, and if the layers differ in a property whose
    argument is None.
    """
    if is_path(model):
        fields = problem_fields_of_file(model, quant=quant, activation=activation)
        return fields if "dtype" in fields else fields | _read_stored_dtype(model)
    model = _canonicalize_name(model)
    if model in SHAPES:
        return {**SHAPES[model], "activation": "silu", "bias": False}
    published = find_model(model)
    if published is None:
        raise make_unknown_model_error(model)
    return published.problem_fields()


def read_layer_schemes(model: str, activation: str | None = None) -> tuple[LayerScheme, ...]:
    """Return the quantization schemes of the layers of a config.json; () for a name."""
    return layers_of_file(model, activation)[1] if is_path(model) else ()


def is_path(model: str) -> bool:
    """Return whether `model` is a path. An existing file takes precedence over a hub id."""
    return is_model_path(model) and (exists(model) or not _is_hub_id(model))


def _read_stored_dtype(model: str) -> dict[str, object]:
    """Return {"dtype": dtype of the tensor files in a folder}, or {} if it is unknown."""
    from modular_kernel.checkpoints.inspection import read_expert_dtype

    dtype = read_expert_dtype(model) if is_directory(model) else None
    return {} if dtype is None else {"dtype": dtype}


def is_known_model(model: str) -> bool:
    """Return whether `model` is the name of a published model or a shape."""
    model = _canonicalize_name(model)
    return model in SHAPES or find_model(model) is not None


def _canonicalize_name(model: str) -> str:
    """Return the known name that equals `model` apart from case, "-", "_" and "."; else `model`."""
    if model in SHAPES or find_model(model) is not None:
        return model
    names = {_normalize(name): name for name in (*SHAPES, *ALIASES, *MODELS)}
    return names.get(_normalize(model), model)


def _normalize(name: str) -> str:
    return re.sub("[-_.]", "", name.lower())


def make_unknown_model_error(model: str, *extra_names: str) -> ConfigurationError:
    """Return the error for an unknown model name, which suggests similar names.

    extra_names: further valid names.
    """
    names = [*extra_names, *MODELS, *ALIASES, *SHAPES]
    lowered = model.lower()
    with_prefix = [name for name in names if lowered and name.startswith(lowered)]
    similar = [*with_prefix[:3], *difflib.get_close_matches(lowered, names, n=3)]
    similar = list(dict.fromkeys(similar))[:3]
    need = " or ".join([*similar, "another name"] if similar else ["a name"]) + " of `mk models`"
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


# Shape -> (experts, top_k, hidden, intermediate). tpN is the shard of one of N tensor-parallel
# ranks, with intermediate / N. epN is the shard of one of N expert-parallel ranks, with experts /
# N. In epN, all top-k experts of a token are on this rank. Files of tuned configurations are named
# by experts and intermediate (experts/triton/configs/files.py), so two shapes must differ in at
# least one of them.
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
# Shape -> published model with these sizes. "TP N" and "EP N" mean the sizes of one of N ranks.
MODEL_OF_SHAPE = {
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
