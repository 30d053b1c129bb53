"""Supported model types: the keys of their config.json, and properties that their code determines.

The keys of a config.json differ between model types, and some properties of the MoE layer, such as
a bias, are only in the code of the model. `FAMILIES` has one line for each model_type. Other types
are not supported.
"""

from dataclasses import dataclass
from typing import Literal

Gate = Literal["plain", "ungated", "oai", "clamp_before", "clamp_after"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """The keys and properties of the MoE layer of one model_type.

    source: the implementation of the layer in transformers: a folder of `transformers.models`, and
        the names of classes in it.
    experts, top_k, intermediate, hidden: keys of the four sizes. Keys that are separated by spaces
        are alternatives. A file has one or more of them, with equal values.
    latent: key of the experts' input and output size. It replaces `hidden` if the file has it.
    nested_in: key of the object that has the keys of experts, top_k, intermediate and activation.
    activation: key of the activation's name, or "=name" if the code determines the activation.
    default_activation: activation of files without this key; "" if the key is required.
    gate: how gate g and up u are combined: "plain" is act(g) * u; "ungated" is act(u), without a
        gate; "oai" is swiglu_oai with the keys swiglu_alpha and swiglu_limit; "clamp_before" and
        "clamp_after" are the swiglu_clamp kinds with the key swiglu_limit or swiglu_limits.
    interleaved: gate and up rows of w1 alternate.
    bias: both GEMMs have a bias.
    router_weight_on_input: the router weight multiplies the layer's input.
    scaling: key of the factor on the routed output; "" if there is none. With a trailing "?" the
        value may be null, which means 1.
    dense_key: key of the intermediate size of dense layers. In files with this key, the experts'
        intermediate size has the key "intermediate_size".
    required: (key, values). The layer is supported only if the file has one of these values for the
        key. None stands for a missing key.
    unsupported_reason: why the model_type is not supported; "" if it is supported.
    """

    source: str
    experts: str = ""
    top_k: str = "num_experts_per_tok"
    intermediate: str = "moe_intermediate_size"
    hidden: str = "hidden_size"
    latent: str = ""
    nested_in: str = ""
    activation: str = "hidden_act"
    default_activation: str = ""
    gate: Gate = "plain"
    interleaved: bool = False
    bias: bool = False
    router_weight_on_input: bool = False
    scaling: str = ""
    dense_key: str = ""
    required: tuple[str, tuple[object, ...]] | None = None
    unsupported_reason: str = ""


_NUM_EXPERTS, _NUM_LOCAL_EXPERTS, _N_ROUTED_EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
)
_NUM_OR_LOCAL = f"{_NUM_EXPERTS} {_NUM_LOCAL_EXPERTS}"
_ERNIE_EXPERTS_KEYS = "moe_num_experts num_experts"
_TOP_K_KEYS = "num_experts_per_token num_experts_per_tok"
_INTERMEDIATE, _SCALING_KEY = "intermediate_size", "routed_scaling_factor"
_GEMMA_TOP_K_KEY = "top_k_experts"
_GEMMA_ACTIVATION_KEY = "hidden_activation"


def _family(source: str, experts: str = "", scaling: str = "", **options: object) -> Family:
    return Family(source=source, experts=experts, scaling=scaling, **options)  # type: ignore[arg-type]


def _make_unsupported(source: str, reason: str) -> Family:
    return Family(source=source, unsupported_reason=reason)


# fmt: off
FAMILIES: dict[str, Family] = {
    "afmoe": _family("afmoe AfmoeExperts AfmoeTokenChoiceRouter", _NUM_EXPERTS, "route_scale"),
    "aria_text": _family("aria AriaExperts AriaTextTopKRouter", "moe_num_experts", top_k="moe_topk", intermediate=_INTERMEDIATE, activation="=silu"),
    "axk1": _family("axk1 AXK1Experts AXK1TopkRouter", _N_ROUTED_EXPERTS, _SCALING_KEY),
    "axk2": _family("axk2 AXK2Experts AXK2TopkRouter", _N_ROUTED_EXPERTS, _SCALING_KEY),
    "bailing_hybrid": _family("bailing_hybrid BailingHybridExperts BailingHybridTopkRouter", _NUM_OR_LOCAL, _SCALING_KEY, top_k=_TOP_K_KEYS),
    "bailing_moe": _family("bailing_hybrid BailingHybridExperts", _NUM_OR_LOCAL, f"{_SCALING_KEY}?", top_k=_TOP_K_KEYS),  # as in the model code that Ling's checkpoints contain
    "bailing_moe_v2": _family("bailing_hybrid BailingHybridExperts", _NUM_OR_LOCAL, f"{_SCALING_KEY}?", top_k=_TOP_K_KEYS),  # as in the model code that Ming's checkpoints contain
    "beam": _family("beam BeamExperts BeamMoE", _NUM_EXPERTS, _SCALING_KEY),
    "cohere2_moe": _family("cohere2_moe Cohere2MoeExperts", _NUM_EXPERTS, intermediate=_INTERMEDIATE),
    "dbrx": _family("dbrx DbrxExpertGLU DbrxExperts", "moe_num_experts", top_k="moe_top_k", intermediate="ffn_hidden_size", hidden="d_model", nested_in="ffn_config", activation="ffn_act_fn", default_activation="silu"),
    "deepseek": _family("deepseek_v2 DeepseekV2Experts", _N_ROUTED_EXPERTS, f"{_SCALING_KEY}?"),  # as in the model code that DeepSeekMoE 16B's checkpoints contain
    "deepseek_ocr2_text": _family("deepseek_ocr2 DeepseekOcr2TextExperts DeepseekOcr2TextTopkRouter", _N_ROUTED_EXPERTS, _SCALING_KEY),
    "deepseek_v2": _family("deepseek_v2 DeepseekV2Experts DeepseekV2TopkRouter", _N_ROUTED_EXPERTS, _SCALING_KEY),
    "deepseek_v3": _family("deepseek_v3 DeepseekV3Experts DeepseekV3TopkRouter", _N_ROUTED_EXPERTS, _SCALING_KEY),
    "deepseek_v32": _family("deepseek_v32 DeepseekV32Experts DeepseekV32TopkRouter", _N_ROUTED_EXPERTS, _SCALING_KEY),
    "deepseek_v4": _family("deepseek_v4 DeepseekV4Experts DeepseekV4TopKRouter", _N_ROUTED_EXPERTS, _SCALING_KEY, gate="clamp_before"),
    "diffusion_gemma_text": _family("diffusion_gemma DiffusionGemmaTextExperts", _NUM_EXPERTS, top_k=_GEMMA_TOP_K_KEY, activation=_GEMMA_ACTIVATION_KEY),
    "doge": _make_unsupported("doge DogeCDMoE", "its experts are embedding rows, not MLPs"),
    "dots1": _family("dots1 Dots1Experts Dots1TopkRouter", _N_ROUTED_EXPERTS, _SCALING_KEY),
    "dots3_note_text": _family("dots3_note Dots3NoteExperts Dots3NoteTextTopkRouter", _N_ROUTED_EXPERTS, _SCALING_KEY),
    "dots3_note_vision_encoder": _make_unsupported("dots3_note Dots3NoteVisionMoE", "each layer has sizes of its own (per_layer_config)"),
    "ernie4_5_moe": _family("ernie4_5_moe Ernie4_5_MoeExperts", _ERNIE_EXPERTS_KEYS, top_k="moe_k num_experts_per_tok"),
    "ernie4_5_vl_moe_text": _make_unsupported("ernie4_5_vl_moe Ernie4_5_VLMoeMoeBlock", "it has separate text and vision experts of different sizes"),
    "exaone_moe": _family("exaone_moe ExaoneMoeExperts ExaoneMoeTopkRouter", _NUM_EXPERTS, _SCALING_KEY),
    "flex_olmo": _family("flex_olmo FlexOlmoExperts", _NUM_OR_LOCAL, intermediate=_INTERMEDIATE),
    "flint": _family("flint FlintExperts FlintSparseMoeBlock", _NUM_EXPERTS),
    "gemma4_text": _family("gemma4 Gemma4TextExperts", _NUM_EXPERTS, top_k=_GEMMA_TOP_K_KEY, activation=_GEMMA_ACTIVATION_KEY, required=("enable_moe_block", (True,))),
    "glm4_moe": _family("glm4_moe Glm4MoeExperts Glm4MoeTopkRouter", _N_ROUTED_EXPERTS, _SCALING_KEY),
    "glm4_moe_lite": _family("glm4_moe_lite Glm4MoeLiteExperts Glm4MoeLiteTopkRouter", _N_ROUTED_EXPERTS, _SCALING_KEY),
    "glm4v_moe_text": _family("glm4v_moe Glm4vMoeTextExperts Glm4vMoeTextTopkRouter", _N_ROUTED_EXPERTS, _SCALING_KEY),
    "glm5_next_text": _family("glm5_next Glm5NextTextExperts Glm5NextTextTopkRouter", _N_ROUTED_EXPERTS, _SCALING_KEY, activation="=silu", gate="clamp_before"),
    "glm_moe_dsa": _family("glm_moe_dsa GlmMoeDsaExperts GlmMoeDsaTopkRouter", _N_ROUTED_EXPERTS, _SCALING_KEY),
    "gpt_oss": _family("gpt_oss GptOssExperts", _NUM_LOCAL_EXPERTS, top_k="num_experts_per_tok experts_per_token", intermediate=_INTERMEDIATE, gate="oai", interleaved=True, bias=True),
    "granitemoe": _family("granitemoe GraniteMoeExperts", _NUM_LOCAL_EXPERTS, intermediate=_INTERMEDIATE),
    "granitemoe_swa": _family("granitemoe_swa GraniteMoeSWAExperts", _NUM_LOCAL_EXPERTS, intermediate=_INTERMEDIATE),
    "granitemoehybrid": _family("granitemoehybrid GraniteMoeHybridExperts", _NUM_LOCAL_EXPERTS, intermediate=_INTERMEDIATE),
    "granitemoeshared": _family("granitemoeshared GraniteMoeSharedExperts", _NUM_LOCAL_EXPERTS, intermediate=_INTERMEDIATE),
    "hunyuan_v1_moe": _family("hunyuan_v1_moe HunYuanMoEV1Experts HunYuanMoEV1Gate", _NUM_OR_LOCAL, top_k="moe_topk num_experts_per_tok", intermediate=_INTERMEDIATE),
    "hy_v3": _family("hy_v3 HYV3Experts HYV3TopKRouter", _NUM_OR_LOCAL, "router_scaling_factor"),
    "hy_v4": _family("hy_v4 HYV4Experts HYV4TopkRouter", _N_ROUTED_EXPERTS, _SCALING_KEY, activation="=silu", gate="clamp_before"),
    "hy_v4_vl_text": _family("hy_v4_vl HYV4VLExperts HYV4VLTopkRouter", _N_ROUTED_EXPERTS, _SCALING_KEY, activation="=silu", gate="clamp_before"),
    "inkling_text": _family("inkling InklingExperts InklingTopkRouter", _N_ROUTED_EXPERTS, "route_scale", dense_key="dense_intermediate_size"),
    "inkling2_text": _make_unsupported("inkling2 Inkling2SoftcappedSwiGLU", "its activation bounds gate and up by tanh"),
    "inkling2_loop_text": _make_unsupported("inkling2_loop Inkling2LoopSoftcappedSwiGLU", "its activation bounds gate and up by tanh"),
    "jamba": _family("jamba JambaExperts", _NUM_OR_LOCAL, intermediate=_INTERMEDIATE),
    "jetmoe": _family("jetmoe JetMoeMoE", _NUM_LOCAL_EXPERTS, intermediate=_INTERMEDIATE, activation="activation_function"),
    "kimi_k2": _family("deepseek_v3 DeepseekV3Experts DeepseekV3TopkRouter", _N_ROUTED_EXPERTS, _SCALING_KEY),  # kimi_k25 loads it as DeepseekV3
    "kimi_linear": _family("kimi_linear KimiLinearExperts KimiLinearTopkRouter", _NUM_OR_LOCAL, _SCALING_KEY, top_k=_TOP_K_KEYS, latent="routed_expert_hidden_size"),
    "kolibri1": _family("kolibri1 Kolibri1Experts Kolibri1TopKRouter", _NUM_OR_LOCAL),
    "laguna": _family("laguna LagunaExperts LagunaSparseMoeBlock", _NUM_EXPERTS, "moe_routed_scaling_factor", required=("moe_apply_router_weight_on_input", (False, None))),
    "lara_mini": _family("lara_mini LaraMiniExperts LaraMiniTopKRouter", _NUM_EXPERTS),
    "lfm2_moe": _family("lfm2_moe Lfm2MoeExperts Lfm2MoeTopKRouter", _NUM_EXPERTS, _SCALING_KEY, activation="=silu"),
    "llama4_text": _family("llama4 Llama4TextExperts Llama4TextMoe", _NUM_LOCAL_EXPERTS, intermediate=_INTERMEDIATE, router_weight_on_input=True),
    "longcat_flash": _family("longcat_flash LongcatFlashExperts LongcatFlashTopkRouter", _N_ROUTED_EXPERTS, _SCALING_KEY, top_k="moe_topk num_experts_per_tok", intermediate="expert_ffn_hidden_size", required=("zero_expert_type", ("identity", None))),
    "mellum": _family("mellum MellumExperts", _NUM_OR_LOCAL),
    "mimo_v2_flash": _family("mimo_v2_flash MiMoV2FlashExperts MiMoV2FlashTopkRouter", _N_ROUTED_EXPERTS, f"{_SCALING_KEY}?"),
    "minimax": _family("minimax MiniMaxExperts", _NUM_OR_LOCAL, intermediate=_INTERMEDIATE),
    "minimax_m2": _family("minimax_m2 MiniMaxM2Experts", _NUM_OR_LOCAL, intermediate=_INTERMEDIATE),
    "minimax_m3_vl_text": _family("minimax_m3_vl MiniMaxM3VLExperts MiniMaxM3VLSparseMoeBlock", _NUM_OR_LOCAL, _SCALING_KEY, intermediate=_INTERMEDIATE, gate="oai"),
    "mistral4": _family("mistral4 Mistral4Experts Mistral4TopkRouter", _N_ROUTED_EXPERTS, _SCALING_KEY),
    "mistral_large4_text": _family("mistral_large4 MistralLarge4TextExperts MistralLarge4TextTopkRouter", _N_ROUTED_EXPERTS, _SCALING_KEY),
    "mixtral": _family("mixtral MixtralExperts", _NUM_OR_LOCAL, intermediate=_INTERMEDIATE),
    "muse_spark_text": _make_unsupported("muse_spark MuseSparkExperts", "each expert's output is normalized before it is weighted"),
    "nemotron_h": _family("nemotron_h NemotronHExperts NemotronHTopkRouter", _N_ROUTED_EXPERTS, _SCALING_KEY, latent="moe_latent_size", activation="mlp_hidden_act", gate="ungated"),
    "nllb-moe": _make_unsupported("nllb_moe NllbMoeExperts", "its experts are ungated with ReLU, and have a capacity"),
    "olmoe": _family("olmoe OlmoeExperts", _NUM_OR_LOCAL, intermediate=_INTERMEDIATE),
    "openai_privacy_filter": _family("openai_privacy_filter OpenAIPrivacyFilterExperts", _NUM_LOCAL_EXPERTS, intermediate=_INTERMEDIATE, gate="oai", bias=True),
    "phimoe": _family("phimoe PhimoeExperts", _NUM_LOCAL_EXPERTS, intermediate=_INTERMEDIATE),
    "qwen2_moe": _family("qwen2_moe Qwen2MoeExperts", _NUM_EXPERTS),
    "qwen3_5_moe_text": _family("qwen3_5_moe Qwen3_5MoeExperts", _NUM_EXPERTS),
    "qwen3_moe": _family("qwen3_moe Qwen3MoeExperts", _NUM_OR_LOCAL),
    "qwen3_next": _family("qwen3_next Qwen3NextExperts", _NUM_EXPERTS),
    "qwen3_omni_moe_talker_text": _family("qwen3_omni_moe Qwen3OmniMoeTalkerTextExperts", _NUM_OR_LOCAL),
    "qwen3_omni_moe_text": _family("qwen3_omni_moe Qwen3OmniMoeThinkerTextExperts", _NUM_OR_LOCAL),
    "qwen3_vl_moe_text": _family("qwen3_vl_moe Qwen3VLMoeTextExperts", _NUM_OR_LOCAL),
    "qwen4_exp_text": _family("qwen4_exp Qwen4ExpTextExperts", _NUM_EXPERTS),
    "sarvam_mla": _family("deepseek_v3 DeepseekV3Experts DeepseekV3TopkRouter", f"{_N_ROUTED_EXPERTS} {_NUM_EXPERTS}", _SCALING_KEY),  # AutoModel maps it to DeepseekV3
    "sarvam_moe": _family("glm4_moe Glm4MoeExperts Glm4MoeTopkRouter", f"{_N_ROUTED_EXPERTS} {_NUM_EXPERTS}", _SCALING_KEY),
    "solar_open": _family("solar_open SolarOpenExperts SolarOpenTopkRouter", _N_ROUTED_EXPERTS, _SCALING_KEY),
    "step3_text": _family("step3p7 Step3p7Experts", "moe_num_experts", top_k="moe_top_k", activation="=silu"),  # as in the model code that Step-3's checkpoints contain
    "step3p5": _family("step3p7 Step3p7Experts Step3p7SparseMoeBlock", "n_routed_experts moe_num_experts", "moe_router_scaling_factor", top_k="num_experts_per_tok moe_top_k", gate="clamp_after", default_activation="silu"),
    "switch_transformers": _make_unsupported("switch_transformers SwitchTransformersExperts", "its experts are ungated with ReLU, and have a capacity"),
    "unlimited_ocr_text": _family("unlimited_ocr UnlimitedOcrTextExperts UnlimitedOcrTextTopkRouter", _N_ROUTED_EXPERTS, _SCALING_KEY),
    "vitpose_backbone": _make_unsupported("vitpose_backbone VitPoseBackboneMoeMLP", "its experts are chosen by data set, not by a router"),
    "zaya": _family("zaya ZayaExperts ZayaRouter", _NUM_EXPERTS),
}
# fmt: on
