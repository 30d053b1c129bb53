"""Make the equivalent config.json of a GGUF file from its metadata and tensors.

    path, config = config_of_gguf(Path("model-Q4_0.gguf"))

The types of each layer's experts become a quantization_config, so that the formats of a GGUF file
and those of a config.json are determined in the same way.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.models.gguf_header import GgufHeader, read_header, tensor_types

METHOD = "gguf"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
FLOAT_TYPES = tuple(_DTYPES)
# Types that int8 codes with a scale for 32 columns represent exactly.
_FLOAT16_SCALES = ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "TQ1_0", "TQ2_0")
_PRODUCTS = ("IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_XXS", "IQ1_S")  # scales of float16 times integers
_INT8_TYPES = (*_FLOAT16_SCALES, *_PRODUCTS)
# Sums, and scales for 16 columns.
_SUMS = ("Q4_1", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_S", "IQ2_XS", "IQ1_M")
READ_TYPES = (*_INT8_TYPES, *_SUMS, "MXFP4", *FLOAT_TYPES)
# Types that are not read: what they are, and what to use instead.
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
    """What the code of llama.cpp determines for an architecture.

    model_type: the transformers model with the same experts and router. intermediate: key of the
    experts' size. fixed: entries of a config.json that the metadata does not have.
    """

    model_type: str
    intermediate: str = "expert_feed_forward_length"
    intermediate_key: str = "moe_intermediate_size"
    experts_key: str = "num_experts"
    fixed: Mapping[str, Any] = field(default_factory=dict)


_ROUTED = {"experts_key": "n_routed_experts"}
_LOCAL = {"experts_key": "num_local_experts", "intermediate_key": "intermediate_size"}
_SILU = {"hidden_act": "silu"}
_ARCHITECTURES: dict[str, _Architecture] = {
    "qwen2moe": _Architecture(model_type="qwen2_moe", fixed=_SILU | {"norm_topk_prob": False}),
    "qwen3moe": _Architecture(model_type="qwen3_moe", fixed=_SILU | {"norm_topk_prob": True}),
    "llama": _Architecture(
        model_type="mixtral", intermediate="feed_forward_length", **_LOCAL, fixed=_SILU
    ),
    "deepseek2": _Architecture(model_type="deepseek_v3", **_ROUTED, fixed=_SILU),
    "glm4moe": _Architecture(model_type="glm4_moe", **_ROUTED, fixed=_SILU),
    "gpt-oss": _Architecture(
        model_type="gpt_oss", **_LOCAL, fixed={"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    ),
}


def config_of_gguf(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the path and the equivalent config.json of a GGUF file with experts.

    Raises WeightsError for an invalid file; ConfigurationError for an architecture that is not
    known, and for metadata that is missing or has another type.
    """
    header = read_header(path)
    name = header.metadata.get("general.architecture")
    architecture = _ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        need = f"one of {', '.join(_ARCHITECTURES)}"
        raise _error(path, f"general.architecture = {str(name)[:80]!r}", need)
    read = _Metadata(path, header, str(name))
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "hidden_size": read.integer("embedding_length"),
        architecture.experts_key: read.integer("expert_count"),
        "num_experts_per_tok": read.integer("expert_used_count"),
        architecture.intermediate_key: read.integer(architecture.intermediate),
        "num_hidden_layers": read.layers(),
        "dtype": _dtype(header),
        **architecture.fixed,
    }
    if architecture.experts_key == "n_routed_experts":
        config |= _routing(read)
    quantization = quantization_of_tensors(header, range(read.layers(extra=True)))
    return path, config | ({} if quantization is None else {"quantization_config": quantization})


def _dtype(header: GgufHeader) -> str:
    """Return the dtype of the experts if all are floats of one type, else bfloat16."""
    layers = range(_MAX_LAYERS)
    types = {name for layer in layers for name in tensor_types(header, layer)}
    return _DTYPES.get(next(iter(types)), "bfloat16") if len(types) == 1 else "bfloat16"


def _routing(read: "_Metadata") -> dict[str, Any]:
    """Return the entries of routers of DeepSeek and GLM."""
    gating = read.optional("expert_gating_func", int, _SOFTMAX)
    groups = {
        "n_group": read.optional("expert_group_count", int, 1),
        "topk_group": read.optional("expert_group_used_count", int, 1),
        "norm_topk_prob": read.optional("expert_weights_norm", bool, False),
        "routed_scaling_factor": read.optional("expert_weights_scale", float, 1.0) or 1.0,
    }
    if gating == _SIGMOID:
        return groups | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    if gating != _SOFTMAX:
        raise _error(read.path, f"expert_gating_func = {gating}", "1 (softmax) or 2 (sigmoid)")
    method = "greedy" if groups["n_group"] == 1 else "group_limited_greedy"
    return groups | {"model_type": "deepseek_v2", "scoring_func": "softmax", "topk_method": method}


@dataclass(frozen=True)
class _Metadata:
    """Reader of the entries of an architecture."""

    path: Path
    header: GgufHeader
    name: str

    def optional(self, key: str, kind: type, default: Any) -> Any:
        value = self.header.metadata.get(f"{self.name}.{key}", default)
        if type(value) is not kind:
            raise _error(self.path, f"{self.name}.{key} = {str(value)[:80]}", kind.__name__)
        return value

    def integer(self, key: str) -> Any:
        """Return the value of a required entry: an integer, or a list with one for each layer."""
        value = self.header.metadata.get(f"{self.name}.{key}")
        if value is None:
            raise _error(
                self.path, f"no {self.name}.{key}", "this entry, as in a model with experts"
            )
        values = value if isinstance(value, list | tuple) else [value]
        if not all(type(number) is int for number in values):
            raise _error(self.path, f"{self.name}.{key} = {str(value)[:80]}", "integers")
        return value

    def layers(self, *, extra: bool = False) -> int:
        """Return the number of layers. extra: including those for multi-token prediction."""
        count: int = self.optional("block_count", int, 0)
        nextn: int = 0 if extra else self.optional("nextn_predict_layers", int, 0)
        if not 0 <= nextn < count <= _MAX_LAYERS:
            got = f"{self.name}.block_count = {count}, nextn_predict_layers = {nextn}"
            raise _error(self.path, got, f"1 to {_MAX_LAYERS} layers")
        return count - nextn


def quantization_of_tensors(header: GgufHeader, layers: range) -> dict[str, Any] | None:
    """Return the quantization_config of the types of each layer's experts; None for floats alone.

    Layers without experts are left out. The types that most layers have are those of the model;
    other layers are listed by name, as in GPTQModel's `dynamic`.
    """
    by_types = dict[tuple[str, ...], list[int]]()
    for layer in layers:
        types = tuple(sorted(set(tensor_types(header, layer))))
        if types:
            key = () if set(types) <= set(FLOAT_TYPES) else types
            by_types.setdefault(key, []).append(layer)
    quantized = sorted(filter(None, by_types), key=lambda types: -len(by_types[types]))
    if not quantized:
        return None
    dynamic = {
        r"(?:.*\.)?(?:layers|blk)\.(?:" + "|".join(map(str, found)) + r")\..*": (
            {"types": list(types)} if types else False
        )
        for types, found in by_types.items()
        if types != quantized[0]
    }
    return {"quant_method": METHOD, "types": list(quantized[0]), "dynamic": dynamic}


def scheme_of_types(path: str, types: object) -> str:
    """Return the scheme that holds the values of some types exactly, or "none" if there is none.

    types: names of the types of a layer's matrices. Raises ConfigurationError for a type that is
    not read.
    """
    if not isinstance(types, list) or not types or not all(isinstance(t, str) for t in types):
        raise _error(Path(path), f"types = {str(types)[:80]}", "names of types")
    for name in types:
        if name in _REFUSED:
            meaning, need = _REFUSED[name]
            raise _error(Path(path), f"experts of type {name}, {meaning}", need)
        if name not in READ_TYPES:
            raise _error(Path(path), f"experts of type {name[:80]}", " or ".join(READ_TYPES))
    found = set(types)
    if found == {"Q4_0"}:
        return "int4_w4a16_group:group=32"
    if found <= set(_INT8_TYPES):
        return "int8_w8a16_group:group=32"
    return "mxfp4_w4a16" if found == {"MXFP4"} else "none"


def scale_dtype(types: Collection[str]) -> str:
    """Return the dtype that has the scales of all of these types exactly."""
    return "float32" if {*types} & {*_PRODUCTS} else "float16"


def _error(path: Path, got: str, need: str) -> ConfigurationError:
    return ConfigurationError(f"model {str(path)[:200]}", got=got, need=need)
