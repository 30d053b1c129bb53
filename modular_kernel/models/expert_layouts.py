"""Names and storage layouts of the experts in checkpoints, by model_type.

`LAYOUTS` lists the module of the experts, relative to the layer, and how its projections are
stored: as modules of each expert, or as stacks of all experts. A model_type has several layouts if
quantizers save a model in a different way from its publisher. The names and shapes in a checkpoint then
select the layout.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """The names and storage layout of a layer's experts in files.

    experts_module: module of the experts, relative to the layer; "" if projections are modules of
        the layer.
    gate, up, down: names of the projections. `up` is "" if `gate` has gate and up rows. `gate` is
        "" for ungated experts.
    stacked: a projection is one tensor (E, ...) for all experts. If False, the projections of
        expert e are the modules `experts_module.e.name`.
    is_parameter: projections are parameters (`gate_up_proj`, `gate_up_proj_scale_inv`). If False,
        projections are modules (`gate_proj.weight`).
    transposed: names of the projections that are stored as (in_features, out_features) instead of
        (out_features, in_features).
    interleaved: gate and up rows alternate.
    flat: stacked tensors have the shape (E * rows, ...) instead of (E, rows, ...).
    """

    experts_module: str
    gate: str
    up: str
    down: str
    stacked: bool = False
    is_parameter: bool = False
    transposed: tuple[str, ...] = ()
    interleaved: bool = False
    flat: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the projections: gate and up (both in w1), then down (w2)."""
        return tuple(name for name in (self.gate, self.up, self.down) if name)

    @property
    def prefix(self) -> str:
        """The prefix of the projections' names, relative to the layer."""
        return f"{self.experts_module}." if self.experts_module else ""

    def projection_names(self, layer: str, experts: Iterable[int]) -> Iterator[str]:
        """Yield the names of the projections.

        layer: name of the layer, with a trailing dot.
        experts: indices of the experts; unused if projections are stacked.
        """
        if self.stacked:
            yield from (f"{layer}{self.prefix}{name}" for name in self.names)
            return
        for expert in experts:
            yield from (f"{layer}{self.experts_module}.{expert}.{name}" for name in self.names)


def _per_expert(experts_module: str, names: str = "gate_proj up_proj down_proj") -> ExpertLayout:
    gate, up, down = names.split(" ")
    return ExpertLayout(experts_module=experts_module, gate=gate, up=up, down=down)


def _stacked_parameters(
    experts_module: str, *, transposed: bool = False, interleaved: bool = False
) -> ExpertLayout:
    names = ("gate_up_proj", "down_proj")
    return ExpertLayout(
        experts_module=experts_module,
        gate=names[0],
        up="",
        down=names[1],
        stacked=True,
        is_parameter=True,
        transposed=names if transposed else (),
        interleaved=interleaved,
    )


def _stacked_modules(
    experts_module: str, gate: str, up: str, down: str, *, transposed: bool = False
) -> ExpertLayout:
    names = (gate, down) if transposed else ()
    return ExpertLayout(
        experts_module=experts_module, gate=gate, up=up, down=down, stacked=True, transposed=names
    )


_MLP_EXPERTS, _W1_W3_W2 = "mlp.experts", "w1 w3 w2"
_STANDARD = (_per_expert(_MLP_EXPERTS), _stacked_parameters(_MLP_EXPERTS))
_MIXTRAL = (_per_expert("block_sparse_moe.experts", _W1_W3_W2),)
# The second layout of _GRANITE and of _STEP is that of llm-compressor, which splits stacked experts
# into one module per expert.
_GRANITE = (
    _stacked_modules("block_sparse_moe", "input_linear", "", "output_linear"),
    _per_expert("block_sparse_moe.experts"),
)
_STEP = (_stacked_modules("moe", "gate_proj", "up_proj", "down_proj"), _per_expert("moe.experts"))
_ANY_ORIENTATION = (_stacked_parameters(_MLP_EXPERTS, transposed=True), *_STANDARD)
_GEMMA = (_stacked_parameters("experts"), _per_expert("experts"))
MISTRAL = (_per_expert("experts", _W1_W3_W2),)  # Mistral's own format (consolidated*.safetensors)

# fmt: off
LAYOUTS: dict[str, tuple[ExpertLayout, ...]] = {
    **dict.fromkeys((
        "afmoe", "axk1", "axk2", "bailing_hybrid", "bailing_moe", "bailing_moe_v2", "beam", "cohere2_moe", "deepseek", "deepseek_ocr2_text",
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "dots3_note_text", "ernie4_5_moe",
        "exaone_moe", "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text",
        "glm5_next_text", "glm_moe_dsa", "hunyuan_v1_moe", "hy_v3", "hy_v4", "hy_v4_vl_text", "kimi_k2", "kolibri1",
        "laguna", "lara_mini", "longcat_flash", "mellum", "mimo_v2_flash", "mistral4", "olmoe", "qwen2_moe",
        "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen3_omni_moe_talker_text",
        "qwen3_omni_moe_text", "qwen4_exp_text", "sarvam_mla", "sarvam_moe", "solar_open",
        "unlimited_ocr_text", "zaya",
    ), _STANDARD),
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2", "minimax_m3_vl_text", "phimoe", "kimi_linear"), _MIXTRAL),
    **dict.fromkeys(("granitemoe", "granitemoehybrid", "granitemoeshared"), _GRANITE),
    **dict.fromkeys(("gemma4_text", "diffusion_gemma_text"), _GEMMA),
    "aria_text": (_stacked_modules(_MLP_EXPERTS, "fc1", "", "fc2", transposed=True),),
    "dbrx": (ExpertLayout(experts_module="ffn.experts.mlp", gate="w1", up="v1", down="w2", stacked=True, is_parameter=True, transposed=("w2",), flat=True),),
    "deepseek_v4": (_per_expert("ffn.experts", _W1_W3_W2),),
    "gpt_oss": (_stacked_parameters(_MLP_EXPERTS, transposed=True, interleaved=True), _stacked_parameters(_MLP_EXPERTS, interleaved=True), _per_expert(_MLP_EXPERTS), _per_expert(f"{_MLP_EXPERTS}.experts")),
    "granitemoe_swa": (_stacked_parameters("block_sparse_moe.experts"),),
    "inkling_text": (ExpertLayout(experts_module=_MLP_EXPERTS, gate="w13_weight", up="", down="w2_weight", stacked=True, is_parameter=True, interleaved=True),),
    "jamba": (_per_expert("feed_forward.experts"),),
    "jetmoe": (_stacked_modules("mlp", "input_linear", "", "output_linear"),),
    "lfm2_moe": (_per_expert("feed_forward.experts", _W1_W3_W2),),
    "llama4_text": (_stacked_parameters("feed_forward.experts", transposed=True), _per_expert("feed_forward.experts")),
    "mistral_large4_text": MISTRAL,
    "nemotron_h": (ExpertLayout(experts_module="mixer.experts", gate="", up="up_proj", down="down_proj"),),
    "openai_privacy_filter": (_stacked_parameters(_MLP_EXPERTS, transposed=True),),
    "qwen3_vl_moe_text": _ANY_ORIENTATION,
    **dict.fromkeys(("step3_text", "step3p5"), _STEP),
}
# fmt: on
