"""The small models of `mk demo`, with random weights; nothing is downloaded."""

from functools import partial
from importlib import import_module
from typing import Any

Model = Any  # a transformers model; transformers is an optional dependency
EAGER = "eager"

_SHARED_FIELDS: dict[str, object] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
} | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
_FEW_EXPERTS_FIELDS: dict[str, object] = {"num_local_experts": 8, "num_experts_per_tok": 2}
_MANY_EXPERTS_FIELDS: dict[str, object] = {"moe_intermediate_size": 48, "num_experts_per_tok": 3}
_MLA_FIELDS: dict[str, object] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
}
_GROUPED_ROUTING_FIELDS: dict[str, object] = {
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
# Name -> (configuration class of transformers, fields that differ from _SHARED_FIELDS).
SMALL_MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "mixtral": ("MixtralConfig", {**_FEW_EXPERTS_FIELDS, "intermediate_size": 96}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_MANY_EXPERTS_FIELDS, "num_experts": 12, "norm_topk_prob": True},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_MANY_EXPERTS_FIELDS,
            **_MLA_FIELDS,
            **_GROUPED_ROUTING_FIELDS,
            "num_key_value_heads": 4,
            "head_dim": 8,
        }
        | {"v_head_dim": 16, "intermediate_size": 96},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {**_FEW_EXPERTS_FIELDS, "intermediate_size": 80, "sliding_window": 16},
    ),
}


def import_transformers() -> Any:
    return import_module("transformers")


def build_small_model(
    name: str, dtype: str, device: str, *, seed: int = 0, **changes: object
) -> Model:
    """Build a model of SMALL_MODELS with random weights that are the same on every machine.

    Weights are scaled so that every layer affects the result: hidden states, the outputs of the
    experts, and logits have a standard deviation of about 1.

    changes: configuration fields that override those of the model.
    """
    import torch

    from modular_kernel.spec.problem import parse_dtype

    transformers = import_transformers()
    config_class, overrides = SMALL_MODELS[name]
    config = getattr(transformers, config_class)(**(_SHARED_FIELDS | overrides | changes))
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation=EAGER
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            _initialize(module, partial(torch.randn, generator=generator))
    return model.to(device, parse_dtype(dtype)).eval()


def _initialize(module: Any, randn: Any) -> None:
    """Initialize the direct parameters of a module, and its bias buffers, in place.

    randn: function from a shape to standard normal values.
    """
    biases = ((n, b) for n, b in module.named_buffers(recurse=False) if n.endswith("bias"))
    for name, tensor in (*module.named_parameters(recurse=False), *biases):
        if tensor.dim() == 1 and name == "weight":  # the weight of a norm
            tensor.copy_(1 + 0.1 * randn(tensor.shape))
        elif name.endswith("bias") or tensor.dim() == 1:
            tensor.copy_(0.3 * randn(tensor.shape))
        else:
            fan_in = tensor.shape[-2 if getattr(module, "is_transposed", False) else -1]
            if type(module).__name__ == "Embedding":
                fan_in = 1
            # The activation roughly halves the input of down_proj. The larger gain compensates for
            # that, and keeps the scores of a router from being nearly equal.
            gain = 2.0 if name == "down_proj" or "Router" in type(module).__name__ else 1.0
            tensor.copy_(gain * fan_in**-0.5 * randn(tensor.shape))
