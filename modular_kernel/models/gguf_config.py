"""Converts the metadata and tensor types of a GGUF file to the equivalent config.json.

    path, config = config_of_gguf(Path("model-Q4_0.gguf"))

Each tensor of a GGUF file has a type of ggml, such as Q4_0, which is its number format. The types
of the experts become a quantization_config with the method "gguf", so that the code that reads a
config.json also handles GGUF files.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.models.gguf_header import GgufHeader, expert_tensor_types, read_header

METHOD = "gguf"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
FLOAT_TYPES = tuple(_DTYPES)
# Types that are loaded without rounding as int8 codes with a scale for 32 columns. Scales are
# float16 values, or products of a float16 value and an integer, which need float32.
_FLOAT16_SCALES = ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "TQ1_0", "TQ2_0")
_FLOAT32_SCALES = ("IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_XXS", "IQ1_S")
_INT8_TYPES = (*_FLOAT16_SCALES, *_FLOAT32_SCALES)
# Types that are dequantized, because they have minima, or scales for 16 columns.
_DEQUANTIZED_TYPES = (
    *("Q4_1", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ2_S", "IQ2_XS", "IQ1_M"),
)
SUPPORTED_TYPES = (*_INT8_TYPES, *_DEQUANTIZED_TYPES, "MXFP4", *FLOAT_TYPES)
# Types that are not supported: (reason, the closest supported alternative).
_REFUSED = {
    "NVFP4": (
        "of which llama.cpp stores the scales of matrices in other tensors",
        "the model in safetensors, from modelopt or compressed-tensors",
    ),
    "Q8_1": ("which ggml computes for activations only", "Q8_0"),
    "Q8_K": ("which ggml computes for activations only", "Q8_0"),
}
_SOFTMAX, _SIGMOID = 1, 2  # values of expert_gating_func
_MAX_LAYERS = 4096


@dataclass(frozen=True, kw_only=True)
class _Architecture:
    """An architecture of llama.cpp.

    model_type: the model in transformers with the same experts and router.
    intermediate: key of the experts' intermediate size in the metadata.
    intermediate_key: key of the intermediate size in the config.json.
    experts_key: key of the number of experts in the config.json.
    fixed: entries of the config.json that the code of llama.cpp determines.
    """

    model_type: str
    intermediate: str = "expert_feed_forward_length"
    intermediate_key: str = "moe_intermediate_size"
    experts_key: str = "num_experts"
    fixed: Mapping[str, Any] = field(default_factory=dict)


_N_ROUTED_EXPERTS_KEY = {"experts_key": "n_routed_experts"}
_NUM_LOCAL_EXPERTS_KEYS = {
    "experts_key": "num_local_experts",
    "intermediate_key": "intermediate_size",
}
_SILU = {"hidden_act": "silu"}
_ARCHITECTURES: dict[str, _Architecture] = {
    "qwen2moe": _Architecture(model_type="qwen2_moe", fixed=_SILU | {"norm_topk_prob": False}),
    "qwen3moe": _Architecture(model_type="qwen3_moe", fixed=_SILU | {"norm_topk_prob": True}),
    "llama": _Architecture(
        model_type="mixtral",
        intermediate="feed_forward_length",
        **_NUM_LOCAL_EXPERTS_KEYS,
        fixed=_SILU,
    ),
    "deepseek2": _Architecture(model_type="deepseek_v3", **_N_ROUTED_EXPERTS_KEY, fixed=_SILU),
    "glm4moe": _Architecture(model_type="glm4_moe", **_N_ROUTED_EXPERTS_KEY, fixed=_SILU),
    "gpt-oss": _Architecture(
        model_type="gpt_oss",
        **_NUM_LOCAL_EXPERTS_KEYS,
        fixed={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    ),
}


def config_of_gguf(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the path and the equivalent config.json of a GGUF file with experts.

    Raises WeightsError for an invalid file, and ConfigurationError for an unknown architecture and
    for metadata that are missing or have another type.
    """
    header = read_header(path)
    name = header.metadata.get("general.architecture")
    architecture = _ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        need = f"one of {', '.join(_ARCHITECTURES)}"
        raise _make_error(path, f"general.architecture = {str(name)[:80]!r}", need)
    metadata = _Metadata(path, header, str(name))
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "hidden_size": metadata.get_integer("embedding_length"),
        architecture.experts_key: metadata.get_integer("expert_count"),
        "num_experts_per_tok": metadata.get_integer("expert_used_count"),
        architecture.intermediate_key: metadata.get_integer(architecture.intermediate),
        "num_hidden_layers": metadata.get_num_layers(),
        "dtype": _read_dtype(header),
        **architecture.fixed,
    }
    if architecture.experts_key == "n_routed_experts":
        config |= _make_router_entries(metadata)
    quantization = _make_quantization_config(header, range(metadata.get_num_layers(with_mtp=True)))
    return path, config | ({} if quantization is None else {"quantization_config": quantization})


def _read_dtype(header: GgufHeader) -> str:
    """Return the dtype of floating-point experts, or "bfloat16" for other or several types."""
    layers = range(_MAX_LAYERS)
    types = {name for layer in layers for name in expert_tensor_types(header, layer)}
    return _DTYPES.get(next(iter(types)), "bfloat16") if len(types) == 1 else "bfloat16"


def _make_router_entries(metadata: "_Metadata") -> dict[str, Any]:
    """Return the entries of a config.json for the routers of DeepSeek and GLM."""
    gating = metadata.get_optional("expert_gating_func", int, _SOFTMAX)
    entries = {
        "n_group": metadata.get_optional("expert_group_count", int, 1),
        "topk_group": metadata.get_optional("expert_group_used_count", int, 1),
        "norm_topk_prob": metadata.get_optional("expert_weights_norm", bool, False),
        "routed_scaling_factor": metadata.get_optional("expert_weights_scale", float, 1.0) or 1.0,
    }
    if gating == _SIGMOID:
        return entries | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    if gating != _SOFTMAX:
        raise _make_error(
            metadata.path, f"expert_gating_func = {gating}", "1 (softmax) or 2 (sigmoid)"
        )
    method = "greedy" if entries["n_group"] == 1 else "group_limited_greedy"
    return entries | {"model_type": "deepseek_v2", "scoring_func": "softmax", "topk_method": method}


@dataclass(frozen=True)
class _Metadata:
    """The entries of an architecture, "name.*", in the metadata of a GGUF file."""

    path: Path
    header: GgufHeader
    name: str

    def get_optional(self, key: str, kind: type, default: Any) -> Any:
        """Return the value of an entry of type `kind`, or the default."""
        value = self.header.metadata.get(f"{self.name}.{key}", default)
        if type(value) is not kind:
            raise _make_error(self.path, f"{self.name}.{key} = {str(value)[:80]}", kind.__name__)
        return value

    def get_integer(self, key: str) -> Any:
        """Return the value of a required entry: an integer, or a list of integers by layer."""
        value = self.header.metadata.get(f"{self.name}.{key}")
        if value is None:
            need = "this entry, as in a model with experts"
            raise _make_error(self.path, f"no {self.name}.{key}", need)
        values = value if isinstance(value, list | tuple) else [value]
        if not all(type(number) is int for number in values):
            raise _make_error(self.path, f"{self.name}.{key} = {str(value)[:80]}", "integers")
        return value

    def get_num_layers(self, *, with_mtp: bool = False) -> int:
        """Return the number of layers, with or without layers for multi-token prediction (MTP)."""
        count: int = self.get_optional("block_count", int, 0)
        num_mtp_layers: int = 0 if with_mtp else self.get_optional("nextn_predict_layers", int, 0)
        if not 0 <= num_mtp_layers < count <= _MAX_LAYERS:
            got = f"{self.name}.block_count = {count}, nextn_predict_layers = {num_mtp_layers}"
            raise _make_error(self.path, got, f"1 to {_MAX_LAYERS} layers")
        return count - num_mtp_layers


def _make_quantization_config(header: GgufHeader, layers: range) -> dict[str, Any] | None:
    """Return a quantization_config with the types of the experts; None if all are floating-point.

    `types` lists the types of most layers. Layers with other types are listed under `dynamic`, as
    in files of GPTQModel: {pattern of module names: {"types": ...}}, or False if unquantized.
    """
    layers_by_types = dict[tuple[str, ...], list[int]]()
    for layer in layers:
        types = tuple(sorted(set(expert_tensor_types(header, layer))))
        if types:
            key = () if set(types) <= set(FLOAT_TYPES) else types
            layers_by_types.setdefault(key, []).append(layer)
    quantized = sorted(
        filter(None, layers_by_types), key=lambda types: -len(layers_by_types[types])
    )
    if not quantized:
        return None
    dynamic = {
        r"(?:.*\.)?(?:layers|blk)\.(?:" + "|".join(map(str, layer_numbers)) + r")\..*": (
            {"types": list(types)} if types else False
        )
        for types, layer_numbers in layers_by_types.items()
        if types != quantized[0]
    }
    return {"quant_method": METHOD, "types": list(quantized[0]), "dynamic": dynamic}


def scheme_of_types(path: str, types: object) -> str:
    """Return the scheme that represents matrices of these types without rounding.

    If there is no such scheme, this is "none", and the matrices are dequantized.

    types: the types of a layer's matrices.

    Raises ConfigurationError for an unsupported type.
    """
    if not isinstance(types, list) or not types or not all(isinstance(t, str) for t in types):
        raise _make_error(Path(path), f"types = {str(types)[:80]}", "names of types")
    for name in types:
        if name in _REFUSED:
            meaning, need = _REFUSED[name]
            raise _make_error(Path(path), f"experts of type {name}, {meaning}", need)
        if name not in SUPPORTED_TYPES:
            raise _make_error(
                Path(path), f"experts of type {name[:80]}", " or ".join(SUPPORTED_TYPES)
            )
    if set(types) == {"Q4_0"}:
        return "int4_w4a16_group:group=32"
    if set(types) <= set(_INT8_TYPES):
        return "int8_w8a16_group:group=32"
    return "mxfp4_w4a16" if set(types) == {"MXFP4"} else "none"


def scale_dtype(types: Collection[str]) -> str:
    """Return the dtype that represents the scales of all these types without rounding."""
    return "float32" if {*types} & {*_FLOAT32_SCALES} else "float16"


def _make_error(path: Path, got: str, need: str) -> ConfigurationError:
    return ConfigurationError(f"model {str(path)[:200]}", got=got, need=need)
