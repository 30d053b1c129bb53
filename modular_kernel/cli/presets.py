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
