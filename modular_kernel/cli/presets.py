"""Layer sizes of published models, for `--model NAME`."""

from pathlib import Path

from modular_kernel.errors import ConfigurationError
from modular_kernel.models.config_file import facts_of_file, is_file
from modular_kernel.printable import printable

# experts, top_k, hidden and intermediate as in the models' own configuration files.
MODELS: dict[str, dict[str, object]] = {
    "mixtral-8x7b": {
        "experts": 8,
        "top_k": 2,
        "hidden": 4096,
        "intermediate": 14336,
        "activation": "silu",
        "bias": False,
    },
    "qwen3-30b-a3b": {
        "experts": 128,
        "top_k": 8,
        "hidden": 2048,
        "intermediate": 768,
        "activation": "silu",
        "bias": False,
    },
    "deepseek-v3": {
        "experts": 256,
        "top_k": 8,
        "hidden": 7168,
        "intermediate": 2048,
        "activation": "silu",
        "bias": False,
        "routed_scaling_factor": 2.5,
    },
    "gpt-oss-120b": {
        "experts": 128,
        "top_k": 4,
        "hidden": 2880,
        "intermediate": 2880,
        "activation": "swiglu_oai",
        "bias": True,
    },
    "gpt-oss-20b": {
        "experts": 32,
        "top_k": 4,
        "hidden": 2880,
        "intermediate": 2880,
        "activation": "swiglu_oai",
        "bias": True,
    },
}


def shown(model: str) -> str:
    """Name a layer in a table: a file by its folder, or by itself where it has another name."""
    if not is_file(model):
        return model
    path = Path(model).absolute()
    if path.name == "config.json":
        path = path.parent
    return printable(path.name.removesuffix(".json"))


def facts(model: str) -> dict[str, object]:
    """Look up the problem fields that `model`, a name or a config.json, settles.

    ConfigurationError if it is not known.
    """
    if is_file(model):
        return facts_of_file(model)
    if model in SHAPES:
        return {**SHAPES[model], "activation": "silu", "bias": False}
    if model not in MODELS:
        need = f"one of {', '.join(MODELS)}, or the path of a config.json"
        raise ConfigurationError("model", got=repr(model[:200]), need=need)
    return dict(MODELS[model])


# Layers and shards as one GPU runs them, each a plain SwiGLU layer: experts, top_k, hidden and
# intermediate. tpN: one of N tensor-parallel ranks, intermediate / N; epN: one of N expert-parallel
# ranks, experts / N, as if every token's top-k were here. Experts and intermediate name a tuned
# file (experts/tile_names.py), so that no two shapes have both alike.
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
# Those of docs/benchmarks.
BASELINE_SHAPES = ("mixtral", "dsv3_ep8", "qwen3_30b", "gptoss", "dsv3_256")
