"""Layer sizes of published models, for `--model NAME`."""

from modular_kernel.errors import ConfigurationError

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


def facts(model: str) -> dict[str, object]:
    """The problem fields that `model` settles; ConfigurationError if it is not known."""
    if model not in MODELS:
        raise ConfigurationError("model", got=repr(model), need=f"one of {', '.join(MODELS)}")
    return dict(MODELS[model])


# The shapes of docs/benchmarks, each a plain SwiGLU layer: experts, top_k, hidden, intermediate.
SHAPES: dict[str, dict[str, int]] = {
    name: dict(zip(("experts", "top_k", "hidden", "intermediate"), sizes, strict=True))
    for name, sizes in {
        "mixtral": (8, 2, 4096, 14336),
        "dsv3_ep8": (32, 8, 7168, 2048),  # one of 8 ranks
        "qwen3_30b": (128, 8, 2048, 768),
        "gptoss": (128, 4, 2880, 2880),  # without its biases
        "dsv3_256": (256, 8, 7168, 2048),
    }.items()
}
