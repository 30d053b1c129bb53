"""Write tiny checkpoints with the tensor names and config.json of published model families.

    sample = write(folder, "mixtral", "awq")           # config.json, model.safetensors (or shards)
    sample.expected_output(x_TH, weights_TK, ids_TK)   # float64

Tests load the checkpoints with `modular_kernel.checkpoints` and compare the outputs.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from modular_kernel.testing.checkpoints.formats import F64, StoredMatrix
from modular_kernel.testing.checkpoints.published_formats import (
    ACT_ORDER_FORMATS,
    BLOCK_FORMATS,
    CHECKPOINT_FORMATS,
    FUSED_FORMATS,
    CheckpointFormat,
)
from modular_kernel.testing.checkpoints.torchao import TORCHAO_FORMATS, metadata_of

Tensors = dict[str, torch.Tensor]
PROJECTIONS, W132 = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


@dataclass(frozen=True)
class LayerMatrices:
    """The matrices of one layer.

    Attributes:
        gate, up, down: one matrix per expert.
        b1: (E, 2I), with interleaved gate and up values; None without biases.
        b2: (E, H); None without biases.
    """

    gate: list[StoredMatrix]
    up: list[StoredMatrix]
    down: list[StoredMatrix]
    b1: torch.Tensor | None = None
    b2: torch.Tensor | None = None

    def stack_experts(self, name: str, kind: str = "weight") -> torch.Tensor:
        """Stack a tensor of all experts: (E, N, K) for weights. Equal scalars are merged into (1,).

        name: "gate", "up" or "down".
        kind: suffix of the tensor's name.
        """
        tensors = [matrix.tensors[kind] for matrix in getattr(self, name)]
        stack = torch.stack([t.reshape(()) if t.numel() == 1 else t for t in tensors])
        return stack[:1] if stack.dim() == 1 and bool((stack == stack[0]).all()) else stack

    def gate_up(self, kind: str = "weight") -> torch.Tensor:
        """Return gate and up as (E, 2I, H), gate rows first."""
        gate, up = self.stack_experts("gate", kind), self.stack_experts("up", kind)
        return torch.cat([gate, up], 1) if gate.dim() > 1 else gate.maximum(up)

    def interleaved_gate_up(self, kind: str = "weight") -> torch.Tensor:
        """Return gate and up as (E, 2I, H), with interleaved rows."""
        gate, up = self.stack_experts("gate", kind), self.stack_experts("up", kind)
        return torch.stack([gate, up], 2).flatten(1, 2) if gate.dim() > 1 else gate.maximum(up)

    def transpose_experts(self, *, interleaved: bool = False) -> Tensors:
        """Return all stacked tensors with the last two dimensions swapped; scalars as ()."""
        tensors: Tensors = {}
        for kind in self.gate[0].tensors:
            gate_up = self.interleaved_gate_up(kind) if interleaved else self.gate_up(kind)
            for name, stacked in (
                ("gate_up_proj", gate_up),
                ("down_proj", self.stack_experts("down", kind)),
            ):
                key = name if kind == "weight" else f"{name}_{kind}"
                tensors[key] = stacked.mT.contiguous() if stacked.dim() > 1 else stacked.reshape(())
        return tensors


# Maps (prefix of the layer, its matrices) to the tensors by their names in the checkpoint.
NameTensors = Callable[[str, LayerMatrices], Tensors]


def per_expert_modules(block: str, names: tuple[str, ...] = PROJECTIONS) -> NameTensors:
    """Make a function that names one module for each projection of each expert.

    block: name of the module that contains the experts.
    names: names of gate, up and down, or of up and down only.
    """

    def name_tensors(layer_prefix: str, matrices: LayerMatrices) -> Tensors:
        tensors: Tensors = {}
        projections = [matrices.gate, matrices.up, matrices.down][-len(names) :]
        for name, experts in zip(names, projections, strict=True):
            for e, stored in enumerate(experts):
                for kind, tensor in stored.tensors.items():
                    tensors[f"{layer_prefix}{block}.{e}.{name}.{kind}"] = tensor
        return tensors

    return name_tensors


def name_fused(block: str, *, transposed: bool = False) -> NameTensors:
    """Make a function that names two tensors of all experts: one for gate and up, one for down."""

    def name_tensors(layer_prefix: str, m: LayerMatrices) -> Tensors:
        tensors_by_name = {"gate_up_proj": m.gate_up(), "down_proj": m.stack_experts("down")}
        tensors = m.transpose_experts() if transposed else tensors_by_name
        return {f"{layer_prefix}{block}.{name}": tensor for name, tensor in tensors.items()}

    return name_tensors


def gpt_oss(layer_prefix: str, m: LayerMatrices) -> Tensors:
    """Name the tensors of gpt-oss.

    Unquantized weights, mxfp4 and ModelOpt's formats have fused tensors of all experts. Other
    formats have one module for each projection of each expert.
    """
    prefix = f"{layer_prefix}mlp.experts"
    assert m.b1 is not None
    assert m.b2 is not None
    kinds = m.gate[0].tensors.keys()
    tensors = {f"{prefix}.gate_up_proj_bias": m.b1, f"{prefix}.down_proj_bias": m.b2}
    if kinds == {"weight"} or "input_scale" in kinds:  # ModelOpt keeps the layout
        return tensors | {
            f"{prefix}.{name}": t for name, t in m.transpose_experts(interleaved=True).items()
        }
    if kinds != {"blocks", "scales"}:
        biases = {"gate_proj": m.b1[:, 0::2], "up_proj": m.b1[:, 1::2], "down_proj": m.b2}
        split_biases = {
            f"{prefix}.{e}.{name}.bias": bias[e].clone()
            for name, bias in biases.items()
            for e in range(len(bias))
        }
        return per_expert_modules("mlp.experts")(layer_prefix, m) | split_biases
    for kind in ("blocks", "scales"):
        gate = torch.stack([e.tensors[kind] for e in m.gate])
        up = torch.stack([e.tensors[kind] for e in m.up])
        tensors[f"{prefix}.gate_up_proj_{kind}"] = torch.stack([gate, up], 2).flatten(1, 2)
        tensors[f"{prefix}.down_proj_{kind}"] = torch.stack([e.tensors[kind] for e in m.down])
    return tensors


def privacy_filter(layer_prefix: str, m: LayerMatrices) -> Tensors:
    assert m.b1 is not None
    assert m.b2 is not None
    b1 = torch.cat([m.b1[:, 0::2], m.b1[:, 1::2]], 1)
    biases = {"gate_up_proj_bias": b1, "down_proj_bias": m.b2}
    tensors = name_fused("mlp.experts", transposed=True)(layer_prefix, m)
    return tensors | {
        f"{layer_prefix}mlp.experts.{name}": tensor for name, tensor in biases.items()
    }


def granite(layer_prefix: str, m: LayerMatrices) -> Tensors:
    prefix = f"{layer_prefix}block_sparse_moe"
    return {
        f"{prefix}.input_linear.weight": m.gate_up(),
        f"{prefix}.output_linear.weight": m.stack_experts("down"),
    }


def jetmoe(layer_prefix: str, m: LayerMatrices) -> Tensors:
    experts = {
        name.replace("block_sparse_moe", "mlp"): t for name, t in granite(layer_prefix, m).items()
    }
    attention = f"{layer_prefix}self_attention.experts.input_linear.weight"
    return experts | {attention: torch.zeros(len(m.gate), 8, 8)}  # not part of the MoE layer


def aria(layer_prefix: str, m: LayerMatrices) -> Tensors:
    prefix = f"{layer_prefix}mlp.experts"
    return {
        f"{prefix}.fc1.weight": m.gate_up().mT.contiguous(),
        f"{prefix}.fc2.weight": m.stack_experts("down").mT.contiguous(),
    }


def dbrx(layer_prefix: str, m: LayerMatrices) -> Tensors:
    prefix = f"{layer_prefix}ffn.experts.mlp"
    return {
        f"{prefix}.w1": m.stack_experts("gate").flatten(0, 1),
        f"{prefix}.v1": m.stack_experts("up").flatten(0, 1),
        f"{prefix}.w2": m.stack_experts("down").mT.flatten(0, 1).contiguous(),
    }


def step_modules(layer_prefix: str, m: LayerMatrices) -> Tensors:
    """Name one tensor per projection and kind (weights or scales), which stacks all experts."""
    tensors: Tensors = {}
    for name, experts in (("gate_proj", m.gate), ("up_proj", m.up), ("down_proj", m.down)):
        for kind in experts[0].tensors:
            stacked = torch.stack([matrix.tensors[kind] for matrix in experts])
            tensors[f"{layer_prefix}moe.{name}.{kind}"] = stacked
    return tensors


def inkling(layer_prefix: str, m: LayerMatrices) -> Tensors:
    prefix = f"{layer_prefix}mlp.experts"
    return {
        f"{prefix}.w13_weight": m.interleaved_gate_up(),
        f"{prefix}.w2_weight": m.stack_experts("down"),
    }


@dataclass(frozen=True)
class ModelFamily:
    """A published model family.

    Attributes:
        names: names the tensors of a layer.
        sizes: config keys of the number of experts, top-k, intermediate and hidden size.
        layer_prefix: prefix of the names of layers.
        extra_config: further config entries.
        wrapper_type: model type of an outer config whose text_config contains this config, or "".
        act: the activation that `Sample.expected_output` applies.
        bias: whether the experts have biases.
    """

    names: NameTensors
    sizes: tuple[str, str, str, str] = (
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "hidden_size",
    )
    layer_prefix: str = "model.layers."
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    wrapper_type: str = ""
    act: str = "silu"
    bias: bool = False

    def config(self, model_type: str, sizes: tuple[int, int, int, int]) -> dict[str, Any]:
        config = {"model_type": model_type, "hidden_act": "silu", **self.extra_config}
        size_values = dict(zip(self.sizes, sizes, strict=True))
        if model_type == "dbrx":
            hidden = size_values.pop("d_model")
            return config | {"d_model": hidden, "ffn_config": size_values}
        config |= size_values
        if self.wrapper_type:
            return {"model_type": self.wrapper_type, "text_config": config}
        return config


_TOP_K = "num_experts_per_tok"
_LOCAL_EXPERT_KEYS = ("num_local_experts", _TOP_K, "intermediate_size", "hidden_size")
_DENSE_SIZE_KEYS = ("num_experts", _TOP_K, "intermediate_size", "hidden_size")
_ROUTED_EXPERT_KEYS = ("n_routed_experts", _TOP_K, "moe_intermediate_size", "hidden_size")
_GEMMA_KEYS = ("num_experts", "top_k_experts", "moe_intermediate_size", "hidden_size")
_MLP, _SPARSE = "mlp.experts", "block_sparse_moe.experts"
_SCALED = {"routed_scaling_factor": 2.5}
_OAI = {"swiglu_limit": 7.0, "hidden_act": "silu"}

FAMILIES: dict[str, ModelFamily] = {
    "mixtral": ModelFamily(per_expert_modules(_SPARSE, W132), _LOCAL_EXPERT_KEYS),
    "minimax_m2": ModelFamily(per_expert_modules(_SPARSE, W132), _LOCAL_EXPERT_KEYS),
    "phimoe": ModelFamily(per_expert_modules(_SPARSE, W132), _LOCAL_EXPERT_KEYS),
    "kimi_linear": ModelFamily(per_expert_modules(_SPARSE, W132), extra_config=_SCALED),
    "qwen2_moe": ModelFamily(per_expert_modules(_MLP)),
    "qwen3_moe": ModelFamily(per_expert_modules(_MLP)),
    "olmoe": ModelFamily(per_expert_modules(_MLP), _DENSE_SIZE_KEYS),
    "deepseek_v3": ModelFamily(per_expert_modules(_MLP), _ROUTED_EXPERT_KEYS, extra_config=_SCALED),
    "kimi_k2": ModelFamily(per_expert_modules(_MLP), _ROUTED_EXPERT_KEYS, extra_config=_SCALED),
    "glm4_moe": ModelFamily(per_expert_modules(_MLP), _ROUTED_EXPERT_KEYS, extra_config=_SCALED),
    "qwen3_5_moe_text": ModelFamily(
        per_expert_modules(_MLP),
        layer_prefix="model.language_model.layers.",
        wrapper_type="qwen3_5_moe",
    ),
    "mistral4": ModelFamily(name_fused(_MLP), _ROUTED_EXPERT_KEYS, extra_config=_SCALED),
    "deepseek_v4": ModelFamily(
        per_expert_modules("ffn.experts", W132),
        _ROUTED_EXPERT_KEYS,
        layer_prefix="layers.",
        extra_config=_SCALED | {"swiglu_limit": 1.5},
        act="clamped silu",
    ),
    "jamba": ModelFamily(per_expert_modules("feed_forward.experts"), _DENSE_SIZE_KEYS),
    "lfm2_moe": ModelFamily(per_expert_modules("feed_forward.experts", W132), extra_config=_SCALED),
    "nemotron_h": ModelFamily(
        per_expert_modules("mixer.experts", ("up_proj", "down_proj")),
        _ROUTED_EXPERT_KEYS,
        layer_prefix="backbone.layers.",
        extra_config=_SCALED | {"mlp_hidden_act": "relu2"},
        act="relu2",
    ),
    "gpt_oss": ModelFamily(gpt_oss, _LOCAL_EXPERT_KEYS, extra_config=_OAI, act="oai", bias=True),
    "openai_privacy_filter": ModelFamily(
        privacy_filter, _LOCAL_EXPERT_KEYS, extra_config=_OAI, act="oai", bias=True
    ),
    "llama4_text": ModelFamily(
        name_fused("feed_forward.experts", transposed=True),
        _LOCAL_EXPERT_KEYS,
        layer_prefix="language_model.model.layers.",
        wrapper_type="llama4",
    ),
    "qwen3_vl_moe_text": ModelFamily(
        name_fused(_MLP, transposed=True),
        layer_prefix="model.language_model.layers.",
        wrapper_type="qwen3_vl_moe",
    ),
    "gemma4_text": ModelFamily(
        name_fused("experts"),
        _GEMMA_KEYS,
        extra_config={"enable_moe_block": True, "hidden_activation": "gelu_pytorch_tanh"},
        act="gelu_tanh",
    ),
    "granitemoe": ModelFamily(granite, _LOCAL_EXPERT_KEYS),
    "granitemoe_swa": ModelFamily(name_fused(_SPARSE), _LOCAL_EXPERT_KEYS),
    "jetmoe": ModelFamily(jetmoe, _LOCAL_EXPERT_KEYS, extra_config={"activation_function": "silu"}),
    "aria_text": ModelFamily(
        aria, ("moe_num_experts", "moe_topk", "intermediate_size", "hidden_size")
    ),
    "dbrx": ModelFamily(
        dbrx,
        ("moe_num_experts", "moe_top_k", "ffn_hidden_size", "d_model"),
        layer_prefix="transformer.blocks.",
    ),
    "step3p5": ModelFamily(
        step_modules,
        ("moe_num_experts", "moe_top_k", "moe_intermediate_size", "hidden_size"),
        extra_config={"moe_router_scaling_factor": 2.5},
    ),
    "inkling_text": ModelFamily(
        inkling,
        ("n_routed_experts", _TOP_K, "intermediate_size", "hidden_size"),
        layer_prefix="model.llm.layers.",
        extra_config={"route_scale": 1.5, "dense_intermediate_size": 96},
    ),
}


@dataclass(frozen=True)
class Sample:
    """A written checkpoint, with the exact weights of its last layer.

    Attributes:
        folder: the folder with the files, or the path passed to `write_gguf`.
        config: the contents of config.json.
        kind: the format.
        family: the model family.
        w1: (E, 2I or I, H) float64, gate rows first.
        w2: (E, H, I) float64.
        b1: (E, 2I) float64, gate values first; None without biases.
        b2: (E, H) float64; None without biases.
        top_k: number of experts per token.
        scaling: the routed scaling factor.
    """

    folder: Path
    config: dict[str, Any]
    kind: CheckpointFormat
    family: ModelFamily
    w1: torch.Tensor
    w2: torch.Tensor
    b1: torch.Tensor | None
    b2: torch.Tensor | None
    top_k: int
    scaling: float

    def inputs(self, tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draw x (T, H) float64, router weights (T, K) float32 and ids (T, K)."""
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, self.w2.shape[1], generator=g, dtype=F64)
        scores = torch.randn(tokens, len(self.w1), generator=g).softmax(-1)
        weights, ids = scores.topk(self.top_k)
        return x, weights / weights.sum(-1, keepdim=True), ids

    def expected_output(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Compute the output (T, H) of the layer in float64, expert by expert for each token."""
        on_input = self.config.get("model_type") == "llama4"
        y = torch.zeros_like(x)
        for t in range(len(x)):
            for w, e in zip(weights[t].to(F64), ids[t].tolist(), strict=True):
                h = self.w1[e] @ (x[t] * w if on_input else x[t])
                h = self._activate(h if self.b1 is None else h + self.b1[e])
                out = self.w2[e] @ h
                out = out if self.b2 is None else out + self.b2[e]
                y[t] += out if on_input else w * out
        return y * self.scaling

    def _activate(self, h: torch.Tensor) -> torch.Tensor:
        activation = self.family.act
        if activation == "relu2":
            return h.clamp(min=0) ** 2
        gate, up = h.chunk(2)
        if activation == "oai":
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            return gate * torch.sigmoid(1.702 * gate) * (up + 1)
        if activation == "clamped silu":
            gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
        if activation == "gelu_tanh":
            return torch.nn.functional.gelu(gate, approximate="tanh") * up
        return torch.nn.functional.silu(gate) * up


def matrices(
    checkpoint_format: CheckpointFormat,
    model_family: ModelFamily,
    sizes: tuple[int, int, int],
    g: torch.Generator,
) -> LayerMatrices:
    experts, hidden, intermediate = sizes
    gate = [checkpoint_format.make(intermediate, hidden, g, 1.0) for _ in range(experts)]
    up = [checkpoint_format.make(intermediate, hidden, g, 1.7) for _ in range(experts)]
    down = [checkpoint_format.make(hidden, intermediate, g, 1.0) for _ in range(experts)]
    if not model_family.bias:
        return LayerMatrices(gate, up, down)
    b1, b2 = (torch.randn(experts, n, generator=g) / 2 for n in (2 * intermediate, hidden))
    return LayerMatrices(gate, up, down, b1.bfloat16(), b2.bfloat16())


def write(  # noqa: PLR0913 (independent options)
    folder: Path,
    family: str = "mixtral",
    kind: str = "bf16",
    *,
    experts: int = 4,
    hidden: int = 128,
    intermediate: int = 256,
    top_k: int = 2,
    layers: tuple[int, ...] = (0,),
    shards: int = 1,
    seed: int = 0,
    change: Callable[[Tensors], None] | None = None,
) -> Sample:
    """Write a checkpoint; return it with the exact weights of the last of `layers`.

    family: a key of FAMILIES.
    kind: a key of CHECKPOINT_FORMATS, ACT_ORDER_FORMATS, BLOCK_FORMATS, FUSED_FORMATS or
        TORCHAO_FORMATS.
    shards: number of files. If it is larger than 1, an index is also written.
    change: modifies the dictionary from names to tensors before the tensors are written.
    """
    model_family = FAMILIES[family]
    all_formats = CHECKPOINT_FORMATS | ACT_ORDER_FORMATS | BLOCK_FORMATS | FUSED_FORMATS
    all_formats |= TORCHAO_FORMATS
    checkpoint_format = all_formats[kind]
    g = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for layer in layers:
        m = matrices(checkpoint_format, model_family, (experts, hidden, intermediate), g)
        tensors |= model_family.names(f"{model_family.layer_prefix}{layer}.", m)
        tensors[f"{model_family.layer_prefix}{layer}.input_layernorm.weight"] = torch.ones(hidden)
    if change is not None:
        change(tensors)
    config = model_family.config(family, (experts, top_k, intermediate, hidden))
    dtypes = {"fp16": "float16", "fp32": "float32"}
    config["torch_dtype"] = dtypes.get(kind, "bfloat16")
    if checkpoint_format.config is not None:
        config["quantization_config"] = checkpoint_format.config
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    is_torchao = kind in TORCHAO_FORMATS and checkpoint_format.config is not None
    metadata = metadata_of(checkpoint_format.config or {}, tensors) if is_torchao else None
    save(folder, tensors, shards, metadata)
    gate, up, down = ([matrix.values for matrix in stored] for stored in (m.gate, m.up, m.down))
    is_ungated = model_family.act == "relu2"
    w1 = torch.stack(
        up if is_ungated else [torch.cat(gate_up) for gate_up in zip(gate, up, strict=True)]
    )
    b1 = None if m.b1 is None else torch.cat([m.b1[:, 0::2], m.b1[:, 1::2]], 1).to(F64)
    b2 = None if m.b2 is None else m.b2.to(F64)
    scaling = next((v for k, v in model_family.extra_config.items() if "scal" in k), 1.0)
    return Sample(
        folder,
        config,
        checkpoint_format,
        model_family,
        w1,
        torch.stack(down),
        b1,
        b2,
        top_k,
        scaling,
    )


def save(
    folder: Path, tensors: Tensors, shards: int = 1, metadata: dict[str, str] | None = None
) -> None:
    """Write one model.safetensors, or an index and shards to which tensors are assigned in turn.

    metadata: the metadata of each file.
    """
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata)
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        shard_tensors = {name: tensors[name] for name in names[shard::shards]}
        save_file(shard_tensors, folder / file, metadata)
        weight_map |= dict.fromkeys(shard_tensors, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
