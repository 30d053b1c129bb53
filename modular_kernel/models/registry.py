"""Published MoE models by name, with the sizes of their layers.

Sizes and scaling factors describe the routed experts, without shared experts. The quantization
describes the original checkpoint. For other checkpoints of a model, use their config.json.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """The MoE layer of one published model.

    source: repository on the Hugging Face Hub whose config.json has these sizes.
    activation: activation in the syntax of `ActivationSpec.parse`.
    scaling: factor on the routed output.
    on_input: the router weight multiplies the layer's input.
    model_type: model_type of the text-only model in transformers; "" if there is not exactly one.
    quant: the scheme of the experts in `source`.
    """

    source: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: str = "silu"
    scaling: float = 1.0
    bias: bool = False
    on_input: bool = False
    model_type: str = ""
    quant: str = "none"

    def problem_fields(self) -> dict[str, object]:
        """Return the fields of `Problem` that the model determines."""
        fields: dict[str, object] = {
            "experts": self.experts,
            "top_k": self.top_k,
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "activation": self.activation,
            "bias": self.bias,
        }
        if self.scaling != 1.0:
            fields["routed_scaling_factor"] = self.scaling
        fields |= {"quant": self.quant} if self.quant != "none" else {}
        return fields | ({"apply_router_weight_on_input": True} if self.on_input else {})


def _make_gpt_oss(source: str, experts: int) -> Model:
    sizes = experts, 4, 2880, 2880
    options = {"bias": True, "model_type": "gpt_oss", "quant": "mxfp4_w4a16"}
    return Model(source, *sizes, "swiglu_oai", **options)  # type: ignore[arg-type]


_FP8, _INT4 = "fp8_w8a8_block", "int4_w4a16_group:group=32"


# fmt: off
MODELS: dict[str, Model] = {
    "mixtral-8x7b": Model("mistralai/Mixtral-8x7B-v0.1", 8, 2, 4096, 14336, model_type="mixtral"),
    "mixtral-8x22b": Model("mistralai/Mixtral-8x22B-v0.1", 8, 2, 6144, 16384, model_type="mixtral"),
    "qwen3-30b-a3b": Model("Qwen/Qwen3-30B-A3B", 128, 8, 2048, 768, model_type="qwen3_moe"),
    "qwen3-235b-a22b": Model("Qwen/Qwen3-235B-A22B", 128, 8, 4096, 1536, model_type="qwen3_moe"),
    "qwen3-coder-480b-a35b": Model("Qwen/Qwen3-Coder-480B-A35B-Instruct", 160, 8, 6144, 2560, model_type="qwen3_moe"),
    "qwen3-vl-30b-a3b": Model("Qwen/Qwen3-VL-30B-A3B-Instruct", 128, 8, 2048, 768),
    "qwen3-vl-235b-a22b": Model("Qwen/Qwen3-VL-235B-A22B-Instruct", 128, 8, 4096, 1536),
    "qwen3-next-80b-a3b": Model("Qwen/Qwen3-Next-80B-A3B-Instruct", 512, 10, 2048, 512, model_type="qwen3_next"),
    "qwen3.5-35b-a3b": Model("Qwen/Qwen3.5-35B-A3B", 256, 8, 2048, 512),
    "qwen3.5-122b-a10b": Model("Qwen/Qwen3.5-122B-A10B", 256, 8, 3072, 1024),
    "qwen3.5-397b-a17b": Model("Qwen/Qwen3.5-397B-A17B", 512, 10, 4096, 1024),
    "deepseek-v3": Model("deepseek-ai/DeepSeek-V3", 256, 8, 7168, 2048, scaling=2.5, model_type="deepseek_v3", quant=_FP8),
    "deepseek-r1": Model("deepseek-ai/DeepSeek-R1", 256, 8, 7168, 2048, scaling=2.5, model_type="deepseek_v3", quant=_FP8),
    "deepseek-v3.1": Model("deepseek-ai/DeepSeek-V3.1", 256, 8, 7168, 2048, scaling=2.5, model_type="deepseek_v3", quant=_FP8),
    "deepseek-v3.2": Model("deepseek-ai/DeepSeek-V3.2", 256, 8, 7168, 2048, scaling=2.5, quant=_FP8),
    "gpt-oss-120b": _make_gpt_oss("openai/gpt-oss-120b", 128),
    "gpt-oss-20b": _make_gpt_oss("openai/gpt-oss-20b", 32),
    "kimi-k2": Model("moonshotai/Kimi-K2-Instruct", 384, 8, 7168, 2048, scaling=2.827, model_type="deepseek_v3", quant=_FP8),
    "kimi-k2.5": Model("moonshotai/Kimi-K2.5", 384, 8, 7168, 2048, scaling=2.827, quant=_INT4),
    "kimi-k2.6": Model("moonshotai/Kimi-K2.6", 384, 8, 7168, 2048, scaling=2.827, quant=_INT4),
    "kimi-k2.7-code": Model("moonshotai/Kimi-K2.7-Code", 384, 8, 7168, 2048, scaling=2.827, quant=_INT4),
    "glm-4.5": Model("zai-org/GLM-4.5", 160, 8, 5120, 1536, scaling=2.5, model_type="glm4_moe"),
    "glm-5": Model("zai-org/GLM-5", 256, 8, 6144, 2048, scaling=2.5),
    "glm-5.1": Model("zai-org/GLM-5.1", 256, 8, 6144, 2048, scaling=2.5),
    "glm-5.2": Model("zai-org/GLM-5.2", 256, 8, 6144, 2048, scaling=2.5),
    "minimax-m2.5": Model("MiniMaxAI/MiniMax-M2.5", 256, 8, 3072, 1536, model_type="minimax_m2", quant=_FP8),
    "minimax-m2.7": Model("MiniMaxAI/MiniMax-M2.7", 256, 8, 3072, 1536, model_type="minimax_m2", quant=_FP8),
    "mimo-v2-flash": Model("XiaomiMiMo/MiMo-V2-Flash", 256, 8, 4096, 2048, quant=_FP8),
    "gemma-4-26b-a4b": Model("google/gemma-4-26B-A4B", 128, 8, 2816, 704, "gelu_tanh"),
    "olmoe-1b-7b": Model("allenai/OLMoE-1B-7B-0924", 64, 8, 2048, 1024, model_type="olmoe"),
    "granite-3.1-1b-a400m": Model("ibm-granite/granite-3.1-1b-a400m-base", 32, 8, 1024, 512, model_type="granitemoe"),
    "granite-3.1-3b-a800m": Model("ibm-granite/granite-3.1-3b-a800m-base", 40, 8, 1536, 512, model_type="granitemoe"),
    "llama-4-scout": Model("meta-llama/Llama-4-Scout-17B-16E-Instruct", 16, 1, 5120, 8192, on_input=True),
    "llama-4-maverick": Model("meta-llama/Llama-4-Maverick-17B-128E-Instruct", 128, 1, 5120, 8192, on_input=True),
    "nemotron-3-nano-30b-a3b": Model("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 128, 6, 2688, 1856, "relu2", 2.5),
    "nemotron-3-super-120b-a12b": Model("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", 512, 22, 1024, 2688, "relu2", 5.0),
    "nemotron-3-ultra-550b-a55b": Model("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", 512, 22, 2048, 5120, "relu2", 5.0),
}
# fmt: on
ALIASES = {
    "mixtral-8x7b-v0.1": "mixtral-8x7b",
    "kimi-k2-instruct": "kimi-k2",
    "qwen3-30b": "qwen3-30b-a3b",
    "qwen3-235b": "qwen3-235b-a22b",
    "nemotron-3-nano": "nemotron-3-nano-30b-a3b",
    "nemotron-3-super": "nemotron-3-super-120b-a12b",
    "nemotron-3-ultra": "nemotron-3-ultra-550b-a55b",
}


def find_model(name: str) -> Model | None:
    """Return the model with this name, alias or `source`, ignoring case; None if there is none."""
    key = name.lower()
    model_by_source = {model.source.lower(): model for model in MODELS.values()}
    return MODELS.get(ALIASES.get(key, key)) or model_by_source.get(key)
