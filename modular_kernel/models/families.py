"""MoE configuration keys by `model_type`, and the properties that only the model's code determines.

One line per type. `source` names where transformers implements the layer: a folder of its `models`,
and the classes in it that the line describes. Other types are refused.
"""

from dataclasses import dataclass
from typing import Literal

Gate = Literal["plain", "ungated", "oai", "clamp_before", "clamp_after"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Keys and properties of the MoE layer in the config.json of one model_type.

    experts, top_k, intermediate, hidden: keys of the four sizes. Several keys, separated by spaces,
        are alternative names; a file has one or more of them, with equal values.
    latent: key of a size that replaces `hidden` if the file has it.
    inside: key of the object that holds experts, top_k, intermediate and activation.
    activation: key of the activation's name, or "=name" if the code fixes it.
    unsaid: activation of a file without that key, if published files omit it.
    gate: combination of gate g and up u. plain: act(g) * u. ungated: act(v). oai: gpt-oss's, with
        swiglu_alpha and swiglu_limit. clamp_before, clamp_after: with swiglu_limit or
        swiglu_limits.
    interleaved: gate and up rows of w1 alternate.
    bias: both GEMMs have a bias.
    on_input: the router weight multiplies the layer's input.
    scaling: key of the factor on the routed output; "" if there is none. With a trailing "?" the
        value may be null, which means 1.
    dense: if a file has this key, `intermediate_size` is the size of the experts.
    only: a key, and its values for which the layer is supported.
    refused: the reason why no layer of this type is supported; "" if it is.
    """

    source: str
    experts: str = ""
    top_k: str = "num_experts_per_tok"
    intermediate: str = "moe_intermediate_size"
    hidden: str = "hidden_size"
    latent: str = ""
    inside: str = ""
    activation: str = "hidden_act"
    unsaid: str = ""
    gate: Gate = "plain"
    interleaved: bool = False
    bias: bool = False
    on_input: bool = False
    scaling: str = ""
    dense: str = ""
    only: tuple[str, tuple[object, ...]] | None = None
    refused: str = ""


_NUM, _LOCAL, _ROUTED = "num_experts", "num_local_experts", "n_routed_experts"
_EITHER = f"{_NUM} {_LOCAL}"
_ERNIE = "moe_num_experts num_experts"
_PER_TOKEN = "num_experts_per_token num_experts_per_tok"
_OWN, _SCALED, _GEMMA_K = "intermediate_size", "routed_scaling_factor", "top_k_experts"
_GEMMA = "hidden_activation"


def _f(source: str, experts: str = "", scaling: str = "", **more: object) -> Family:
    return Family(source=source, experts=experts, scaling=scaling, **more)  # type: ignore[arg-type]


def _no(source: str, why: str) -> Family:
    return Family(source=source, refused=why)


# fmt: off
FAMILIES: dict[str, Family] = {
    "afmoe": _f("afmoe AfmoeExperts AfmoeTokenChoiceRouter", _NUM, "route_scale"),
    "aria_text": _f("aria AriaExperts AriaTextTopKRouter", "moe_num_experts", top_k="moe_topk", intermediate=_OWN, activation="=silu"),
    "axk1": _f("axk1 AXK1Experts AXK1TopkRouter", _ROUTED, _SCALED),
    "axk2": _f("axk2 AXK2Experts AXK2TopkRouter", _ROUTED, _SCALED),
    "bailing_hybrid": _f("bailing_hybrid BailingHybridExperts BailingHybridTopkRouter", _EITHER, _SCALED, top_k=_PER_TOKEN),
    "beam": _f("beam BeamExperts BeamMoE", _NUM, _SCALED),
    "cohere2_moe": _f("cohere2_moe Cohere2MoeExperts", _NUM, intermediate=_OWN),
    "dbrx": _f("dbrx DbrxExpertGLU DbrxExperts", "moe_num_experts", top_k="moe_top_k", intermediate="ffn_hidden_size", hidden="d_model", inside="ffn_config", activation="ffn_act_fn", unsaid="silu"),
    "deepseek_ocr2_text": _f("deepseek_ocr2 DeepseekOcr2TextExperts DeepseekOcr2TextTopkRouter", _ROUTED, _SCALED),
    "deepseek_v2": _f("deepseek_v2 DeepseekV2Experts DeepseekV2TopkRouter", _ROUTED, _SCALED),
    "deepseek_v3": _f("deepseek_v3 DeepseekV3Experts DeepseekV3TopkRouter", _ROUTED, _SCALED),
    "deepseek_v32": _f("deepseek_v32 DeepseekV32Experts DeepseekV32TopkRouter", _ROUTED, _SCALED),
    "deepseek_v4": _f("deepseek_v4 DeepseekV4Experts DeepseekV4TopKRouter", _ROUTED, _SCALED, gate="clamp_before"),
    "diffusion_gemma_text": _f("diffusion_gemma DiffusionGemmaTextExperts", _NUM, top_k=_GEMMA_K, activation=_GEMMA),
    "doge": _no("doge DogeCDMoE", "its experts are rows of an embedding, no products of matrices"),
    "dots1": _f("dots1 Dots1Experts Dots1TopkRouter", _ROUTED, _SCALED),
    "dots3_note_text": _f("dots3_note Dots3NoteExperts Dots3NoteTextTopkRouter", _ROUTED, _SCALED),
    "dots3_note_vision_encoder": _no("dots3_note Dots3NoteVisionMoE", "each layer has sizes of its own (per_layer_config)"),
    "ernie4_5_moe": _f("ernie4_5_moe Ernie4_5_MoeExperts", _ERNIE, top_k="moe_k num_experts_per_tok"),
    "ernie4_5_vl_moe_text": _no("ernie4_5_vl_moe Ernie4_5_VLMoeMoeBlock", "text and vision have experts of their own, of two sizes"),
    "exaone_moe": _f("exaone_moe ExaoneMoeExperts ExaoneMoeTopkRouter", _NUM, _SCALED),
    "flex_olmo": _f("flex_olmo FlexOlmoExperts", _EITHER, intermediate=_OWN),
    "flint": _f("flint FlintExperts FlintSparseMoeBlock", _NUM),
    "gemma4_text": _f("gemma4 Gemma4TextExperts", _NUM, top_k=_GEMMA_K, activation=_GEMMA, only=("enable_moe_block", (True,))),
    "glm4_moe": _f("glm4_moe Glm4MoeExperts Glm4MoeTopkRouter", _ROUTED, _SCALED),
    "glm4_moe_lite": _f("glm4_moe_lite Glm4MoeLiteExperts Glm4MoeLiteTopkRouter", _ROUTED, _SCALED),
    "glm4v_moe_text": _f("glm4v_moe Glm4vMoeTextExperts Glm4vMoeTextTopkRouter", _ROUTED, _SCALED),
    "glm5_next_text": _f("glm5_next Glm5NextTextExperts Glm5NextTextTopkRouter", _ROUTED, _SCALED, activation="=silu", gate="clamp_before"),
    "glm_moe_dsa": _f("glm_moe_dsa GlmMoeDsaExperts GlmMoeDsaTopkRouter", _ROUTED, _SCALED),
    "gpt_oss": _f("gpt_oss GptOssExperts", _LOCAL, top_k="num_experts_per_tok experts_per_token", intermediate=_OWN, gate="oai", interleaved=True, bias=True),
    "granitemoe": _f("granitemoe GraniteMoeExperts", _LOCAL, intermediate=_OWN),
    "granitemoe_swa": _f("granitemoe_swa GraniteMoeSWAExperts", _LOCAL, intermediate=_OWN),
    "granitemoehybrid": _f("granitemoehybrid GraniteMoeHybridExperts", _LOCAL, intermediate=_OWN),
    "granitemoeshared": _f("granitemoeshared GraniteMoeSharedExperts", _LOCAL, intermediate=_OWN),
    "hunyuan_v1_moe": _f("hunyuan_v1_moe HunYuanMoEV1Experts HunYuanMoEV1Gate", _EITHER, top_k="moe_topk num_experts_per_tok", intermediate=_OWN),
    "hy_v3": _f("hy_v3 HYV3Experts HYV3TopKRouter", _EITHER, "router_scaling_factor"),
    "hy_v4": _f("hy_v4 HYV4Experts HYV4TopkRouter", _ROUTED, _SCALED, activation="=silu", gate="clamp_before"),
    "hy_v4_vl_text": _f("hy_v4_vl HYV4VLExperts HYV4VLTopkRouter", _ROUTED, _SCALED, activation="=silu", gate="clamp_before"),
    "inkling_text": _f("inkling InklingExperts InklingTopkRouter", _ROUTED, "route_scale", dense="dense_intermediate_size"),
    "inkling2_text": _no("inkling2 Inkling2SoftcappedSwiGLU", "its activation bounds gate and up by tanh"),
    "inkling2_loop_text": _no("inkling2_loop Inkling2LoopSoftcappedSwiGLU", "its activation bounds gate and up by tanh"),
    "jamba": _f("jamba JambaExperts", _EITHER, intermediate=_OWN),
    "jetmoe": _f("jetmoe JetMoeMoE", _LOCAL, intermediate=_OWN, activation="activation_function"),
    "kimi_k2": _f("deepseek_v3 DeepseekV3Experts DeepseekV3TopkRouter", _ROUTED, _SCALED),  # as kimi_k25 reads it
    "kimi_linear": _f("kimi_linear KimiLinearExperts KimiLinearTopkRouter", _EITHER, _SCALED, top_k=_PER_TOKEN),
    "kolibri1": _f("kolibri1 Kolibri1Experts Kolibri1TopKRouter", _EITHER),
    "laguna": _f("laguna LagunaExperts LagunaSparseMoeBlock", _NUM, "moe_routed_scaling_factor", only=("moe_apply_router_weight_on_input", (False, None))),
    "lara_mini": _f("lara_mini LaraMiniExperts LaraMiniTopKRouter", _NUM),
    "lfm2_moe": _f("lfm2_moe Lfm2MoeExperts Lfm2MoeTopKRouter", _NUM, _SCALED, activation="=silu"),
    "llama4_text": _f("llama4 Llama4TextExperts Llama4TextMoe", _LOCAL, intermediate=_OWN, on_input=True),
    "longcat_flash": _f("longcat_flash LongcatFlashExperts LongcatFlashTopkRouter", _ROUTED, _SCALED, top_k="moe_topk num_experts_per_tok", intermediate="expert_ffn_hidden_size", only=("zero_expert_num", (0, None))),
    "mellum": _f("mellum MellumExperts", _EITHER),
    "mimo_v2_flash": _f("mimo_v2_flash MiMoV2FlashExperts MiMoV2FlashTopkRouter", _ROUTED, f"{_SCALED}?"),
    "minimax": _f("minimax MiniMaxExperts", _EITHER, intermediate=_OWN),
    "minimax_m2": _f("minimax_m2 MiniMaxM2Experts", _EITHER, intermediate=_OWN),
    "minimax_m3_vl_text": _f("minimax_m3_vl MiniMaxM3VLExperts MiniMaxM3VLSparseMoeBlock", _EITHER, _SCALED, intermediate=_OWN, gate="oai"),
    "mistral4": _f("mistral4 Mistral4Experts Mistral4TopkRouter", _ROUTED, _SCALED),
    "mistral_large4_text": _f("mistral_large4 MistralLarge4TextExperts MistralLarge4TextTopkRouter", _ROUTED, _SCALED),
    "mixtral": _f("mixtral MixtralExperts", _EITHER, intermediate=_OWN),
    "muse_spark_text": _no("muse_spark MuseSparkExperts", "each expert's output is normalized before it is weighted"),
    "nemotron_h": _f("nemotron_h NemotronHExperts NemotronHTopkRouter", _ROUTED, _SCALED, latent="moe_latent_size", activation="mlp_hidden_act", gate="ungated"),
    "nllb-moe": _no("nllb_moe NllbMoeExperts", "its experts are ungated with ReLU, and have a capacity"),
    "olmoe": _f("olmoe OlmoeExperts", _EITHER, intermediate=_OWN),
    "openai_privacy_filter": _f("openai_privacy_filter OpenAIPrivacyFilterExperts", _LOCAL, intermediate=_OWN, gate="oai", bias=True),
    "phimoe": _f("phimoe PhimoeExperts", _LOCAL, intermediate=_OWN),
    "qwen2_moe": _f("qwen2_moe Qwen2MoeExperts", _NUM),
    "qwen3_5_moe_text": _f("qwen3_5_moe Qwen3_5MoeExperts", _NUM),
    "qwen3_moe": _f("qwen3_moe Qwen3MoeExperts", _EITHER),
    "qwen3_next": _f("qwen3_next Qwen3NextExperts", _NUM),
    "qwen3_omni_moe_talker_text": _f("qwen3_omni_moe Qwen3OmniMoeTalkerTextExperts", _EITHER),
    "qwen3_omni_moe_text": _f("qwen3_omni_moe Qwen3OmniMoeThinkerTextExperts", _EITHER),
    "qwen3_vl_moe_text": _f("qwen3_vl_moe Qwen3VLMoeTextExperts", _EITHER),
    "qwen4_exp_text": _f("qwen4_exp Qwen4ExpTextExperts", _NUM),
    "sarvam_mla": _f("deepseek_v3 DeepseekV3Experts DeepseekV3TopkRouter", f"{_ROUTED} {_NUM}", _SCALED),  # auto classes name that model
    "sarvam_moe": _f("glm4_moe Glm4MoeExperts Glm4MoeTopkRouter", f"{_ROUTED} {_NUM}", _SCALED),
    "solar_open": _f("solar_open SolarOpenExperts SolarOpenTopkRouter", _ROUTED, _SCALED),
    "step3p5": _f("step3p7 Step3p7Experts Step3p7SparseMoeBlock", "n_routed_experts moe_num_experts", "moe_router_scaling_factor", top_k="num_experts_per_tok moe_top_k", gate="clamp_after"),
    "switch_transformers": _no("switch_transformers SwitchTransformersExperts", "its experts are ungated with ReLU, and have a capacity"),
    "unlimited_ocr_text": _f("unlimited_ocr UnlimitedOcrTextExperts UnlimitedOcrTextTopkRouter", _ROUTED, _SCALED),
    "vitpose_backbone": _no("vitpose_backbone VitPoseBackboneMoeMLP", "its experts are chosen by data set, not by a router"),
    "zaya": _f("zaya ZayaExperts ZayaRouter", _NUM),
}
# fmt: on
