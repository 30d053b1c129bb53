"""Tiny checkpoints with the names, layouts and config.json of published families, and their truth.

sample = write(folder, "mixtral", "awq")        # config.json, model.safetensors (or shards)
sample.truth(x_TH, weights_TK, ids_TK)          # float64: what the layer must give
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from modular_kernel.testing.checkpoints.formats import F64, Stored
from modular_kernel.testing.checkpoints.published_formats import FUSED, KINDS, ORDERED, Kind

Tensors = dict[str, torch.Tensor]
PROJ, W132 = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


@dataclass(frozen=True)
class Matrices:
    """Of one layer: gate, up and down of each expert; biases in the order of interleaved rows."""

    gate: list[Stored]
    up: list[Stored]
    down: list[Stored]
    b1: torch.Tensor | None = None
    b2: torch.Tensor | None = None

    def stacked(self, name: str, kind: str = "weight") -> torch.Tensor:
        """(E, N, K) of weights, or of another tensor; a number that is all experts' is (1,)."""
        tensors = [each.tensors[kind] for each in getattr(self, name)]
        found = torch.stack([t.reshape(()) if t.numel() == 1 else t for t in tensors])
        return found[:1] if found.dim() == 1 and bool((found == found[0]).all()) else found

    def both(self, kind: str = "weight") -> torch.Tensor:
        """(E, 2I, H), gate rows first."""
        gate, up = self.stacked("gate", kind), self.stacked("up", kind)
        return torch.cat([gate, up], 1) if gate.dim() > 1 else gate.maximum(up)

    def alternating(self, kind: str = "weight") -> torch.Tensor:
        """(E, 2I, H), gate and up rows in turns."""
        gate, up = self.stacked("gate", kind), self.stacked("up", kind)
        return torch.stack([gate, up], 2).flatten(1, 2) if gate.dim() > 1 else gate.maximum(up)

    def turned(self, *, interleaved: bool = False) -> Tensors:
        """Every tensor of a stack, its last two dimensions exchanged; numbers of all are ()."""
        found: Tensors = {}
        for kind in self.gate[0].tensors:
            first = self.alternating(kind) if interleaved else self.both(kind)
            for name, whole in (("gate_up_proj", first), ("down_proj", self.stacked("down", kind))):
                key = name if kind == "weight" else f"{name}_{kind}"
                found[key] = whole.mT.contiguous() if whole.dim() > 1 else whole.reshape(())
        return found


Names = Callable[[str, Matrices], Tensors]


def each(block: str, names: tuple[str, ...] = PROJ) -> Names:
    """One module for each projection of each expert."""

    def written(front: str, m: Matrices) -> Tensors:
        found: Tensors = {}
        projections = (m.gate, m.up, m.down) if len(names) == 3 else (m.up, m.down)
        for name, experts in zip(names, projections, strict=True):
            for e, stored in enumerate(experts):
                for kind, tensor in stored.tensors.items():
                    found[f"{front}{block}.{e}.{name}.{kind}"] = tensor
        return found

    return written


def fused(block: str, *, transposed: bool = False) -> Names:
    def written(front: str, m: Matrices) -> Tensors:
        plain = {"gate_up_proj": m.both(), "down_proj": m.stacked("down")}
        tensors = m.turned() if transposed else plain
        return {f"{front}{block}.{name}": tensor for name, tensor in tensors.items()}

    return written


def gpt_oss(front: str, m: Matrices) -> Tensors:
    """Fused in 16 bits and in mxfp4; other packers take the projections apart."""
    at = f"{front}mlp.experts"
    assert m.b1 is not None
    assert m.b2 is not None
    kinds = m.gate[0].tensors.keys()
    found = {f"{at}.gate_up_proj_bias": m.b1, f"{at}.down_proj_bias": m.b2}
    if kinds == {"weight"} or "input_scale" in kinds:  # ModelOpt keeps the layout
        return found | {f"{at}.{name}": t for name, t in m.turned(interleaved=True).items()}
    if kinds != {"blocks", "scales"}:
        biases = {"gate_proj": m.b1[:, 0::2], "up_proj": m.b1[:, 1::2], "down_proj": m.b2}
        own = {f"{at}.{e}.{name}.bias": bias[e].clone()
               for name, bias in biases.items() for e in range(len(bias))}  # fmt: skip
        return each("mlp.experts")(front, m) | own
    for kind in ("blocks", "scales"):
        gate = torch.stack([e.tensors[kind] for e in m.gate])
        up = torch.stack([e.tensors[kind] for e in m.up])
        found[f"{at}.gate_up_proj_{kind}"] = torch.stack([gate, up], 2).flatten(1, 2)
        found[f"{at}.down_proj_{kind}"] = torch.stack([e.tensors[kind] for e in m.down])
    return found


def privacy_filter(front: str, m: Matrices) -> Tensors:
    assert m.b1 is not None
    assert m.b2 is not None
    in_halves = torch.cat([m.b1[:, 0::2], m.b1[:, 1::2]], 1)
    biases = {"gate_up_proj_bias": in_halves, "down_proj_bias": m.b2}
    found = fused("mlp.experts", transposed=True)(front, m)
    return found | {f"{front}mlp.experts.{name}": tensor for name, tensor in biases.items()}


def granite(front: str, m: Matrices) -> Tensors:
    at = f"{front}block_sparse_moe"
    return {f"{at}.input_linear.weight": m.both(), f"{at}.output_linear.weight": m.stacked("down")}


def jetmoe(front: str, m: Matrices) -> Tensors:
    own = {name.replace("block_sparse_moe", "mlp"): t for name, t in granite(front, m).items()}
    attention = f"{front}self_attention.experts.input_linear.weight"
    return own | {attention: torch.zeros(len(m.gate), 8, 8)}  # experts that are none of the layer's


def aria(front: str, m: Matrices) -> Tensors:
    at = f"{front}mlp.experts"
    return {
        f"{at}.fc1.weight": m.both().mT.contiguous(),
        f"{at}.fc2.weight": m.stacked("down").mT.contiguous(),
    }


def dbrx(front: str, m: Matrices) -> Tensors:
    at = f"{front}ffn.experts.mlp"
    return {
        f"{at}.w1": m.stacked("gate").flatten(0, 1),
        f"{at}.v1": m.stacked("up").flatten(0, 1),
        f"{at}.w2": m.stacked("down").mT.flatten(0, 1).contiguous(),
    }


def step(front: str, m: Matrices) -> Tensors:
    """Stacked modules; what is beside each weight is stacked too."""
    found: Tensors = {}
    for name, experts in (("gate_proj", m.gate), ("up_proj", m.up), ("down_proj", m.down)):
        for kind in experts[0].tensors:
            whole = torch.stack([one.tensors[kind] for one in experts])
            found[f"{front}moe.{name}.{kind}"] = whole
    return found


def inkling(front: str, m: Matrices) -> Tensors:
    at = f"{front}mlp.experts"
    return {f"{at}.w13_weight": m.alternating(), f"{at}.w2_weight": m.stacked("down")}


@dataclass(frozen=True)
class Published:
    """A family. sizes: keys of experts, top-k, intermediate and hidden size. front: of layers."""

    names: Names
    sizes: tuple[str, str, str, str] = (
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "hidden_size",
    )
    front: str = "model.layers."
    more: Mapping[str, Any] = field(default_factory=dict)
    inside: str = ""
    act: str = "silu"
    bias: bool = False

    def config(self, model_type: str, sizes: tuple[int, int, int, int]) -> dict[str, Any]:
        own = {"model_type": model_type, "hidden_act": "silu", **self.more}
        numbers = dict(zip(self.sizes, sizes, strict=True))
        if model_type == "dbrx":
            hidden = numbers.pop("d_model")
            return own | {"d_model": hidden, "ffn_config": numbers}
        own |= numbers
        return {"model_type": self.inside, "text_config": own} if self.inside else own


_TOP = "num_experts_per_tok"
_LOCAL = ("num_local_experts", _TOP, "intermediate_size", "hidden_size")
_OWN = ("num_experts", _TOP, "intermediate_size", "hidden_size")
_ROUTED = ("n_routed_experts", _TOP, "moe_intermediate_size", "hidden_size")
_GEMMA = ("num_experts", "top_k_experts", "moe_intermediate_size", "hidden_size")
_MLP, _SPARSE = "mlp.experts", "block_sparse_moe.experts"
_SCALED = {"routed_scaling_factor": 2.5}
_OAI = {"swiglu_limit": 7.0, "hidden_act": "silu"}

FAMILIES: dict[str, Published] = {
    "mixtral": Published(each(_SPARSE, W132), _LOCAL),
    "minimax_m2": Published(each(_SPARSE, W132), _LOCAL),
    "phimoe": Published(each(_SPARSE, W132), _LOCAL),
    "kimi_linear": Published(each(_SPARSE, W132), more=_SCALED),
    "qwen2_moe": Published(each(_MLP)),
    "qwen3_moe": Published(each(_MLP)),
    "olmoe": Published(each(_MLP), _OWN),
    "deepseek_v3": Published(each(_MLP), _ROUTED, more=_SCALED),
    "kimi_k2": Published(each(_MLP), _ROUTED, more=_SCALED),
    "glm4_moe": Published(each(_MLP), _ROUTED, more=_SCALED),
    "qwen3_5_moe_text": Published(
        each(_MLP), front="model.language_model.layers.", inside="qwen3_5_moe"
    ),
    "mistral4": Published(fused(_MLP), _ROUTED, more=_SCALED),
    "deepseek_v4": Published(
        each("ffn.experts", W132),
        _ROUTED,
        front="layers.",
        more=_SCALED | {"swiglu_limit": 1.5},
        act="clamped silu",
    ),
    "jamba": Published(each("feed_forward.experts"), _OWN),
    "lfm2_moe": Published(each("feed_forward.experts", W132), more=_SCALED),
    "nemotron_h": Published(
        each("mixer.experts", ("up_proj", "down_proj")),
        _ROUTED,
        front="backbone.layers.",
        more=_SCALED | {"mlp_hidden_act": "relu2"},
        act="relu2",
    ),
    "gpt_oss": Published(gpt_oss, _LOCAL, more=_OAI, act="oai", bias=True),
    "openai_privacy_filter": Published(privacy_filter, _LOCAL, more=_OAI, act="oai", bias=True),
    "llama4_text": Published(
        fused("feed_forward.experts", transposed=True),
        _LOCAL,
        front="language_model.model.layers.",
        inside="llama4",
    ),
    "qwen3_vl_moe_text": Published(
        fused(_MLP, transposed=True), front="model.language_model.layers.", inside="qwen3_vl_moe"
    ),
    "gemma4_text": Published(
        fused("experts"),
        _GEMMA,
        more={"enable_moe_block": True, "hidden_activation": "gelu_pytorch_tanh"},
        act="gelu_tanh",
    ),
    "granitemoe": Published(granite, _LOCAL),
    "granitemoe_swa": Published(fused(_SPARSE), _LOCAL),
    "jetmoe": Published(jetmoe, _LOCAL, more={"activation_function": "silu"}),
    "aria_text": Published(
        aria, ("moe_num_experts", "moe_topk", "intermediate_size", "hidden_size")
    ),
    "dbrx": Published(
        dbrx,
        ("moe_num_experts", "moe_top_k", "ffn_hidden_size", "d_model"),
        front="transformer.blocks.",
    ),
    "step3p5": Published(
        step,
        ("moe_num_experts", "moe_top_k", "moe_intermediate_size", "hidden_size"),
        more={"moe_router_scaling_factor": 2.5},
    ),
    "inkling_text": Published(
        inkling,
        ("n_routed_experts", _TOP, "intermediate_size", "hidden_size"),
        front="model.llm.layers.",
        more={"route_scale": 1.5, "dense_intermediate_size": 96},
    ),
}


@dataclass(frozen=True)
class Sample:
    """A checkpoint. w1: (E, 2I or I, H) float64, gate rows first; w2: (E, H, I)."""

    folder: Path
    config: dict[str, Any]
    kind: Kind
    published: Published
    w1: torch.Tensor
    w2: torch.Tensor
    b1: torch.Tensor | None
    b2: torch.Tensor | None
    top_k: int
    scaling: float

    def inputs(self, tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (T, H) float64, router weights (T, K) float32, ids (T, K)."""
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, self.w2.shape[1], generator=g, dtype=F64)
        scores = torch.randn(tokens, len(self.w1), generator=g).softmax(-1)
        weights, ids = scores.topk(self.top_k)
        return x, weights / weights.sum(-1, keepdim=True), ids

    def truth(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """(T, H) float64, pair by pair."""
        on_input = self.config.get("model_type") == "llama4"
        y = torch.zeros_like(x)
        for t in range(len(x)):
            for w, e in zip(weights[t].to(F64), ids[t].tolist(), strict=True):
                h = self.w1[e] @ (x[t] * w if on_input else x[t])
                h = self._activated(h if self.b1 is None else h + self.b1[e])
                out = self.w2[e] @ h
                out = out if self.b2 is None else out + self.b2[e]
                y[t] += out if on_input else w * out
        return y * self.scaling

    def _activated(self, h: torch.Tensor) -> torch.Tensor:
        kind = self.published.act
        if kind == "relu2":
            return h.clamp(min=0) ** 2
        gate, up = h.chunk(2)
        if kind == "oai":
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            return gate * torch.sigmoid(1.702 * gate) * (up + 1)
        if kind == "clamped silu":
            gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
        if kind == "gelu_tanh":
            return torch.nn.functional.gelu(gate, approximate="tanh") * up
        return torch.nn.functional.silu(gate) * up


def matrices(
    kind: Kind, published: Published, sizes: tuple[int, int, int], g: torch.Generator
) -> Matrices:
    experts, hidden, width = sizes
    gate = [kind.make(width, hidden, g, 1.0) for _ in range(experts)]
    up = [kind.make(width, hidden, g, 1.7) for _ in range(experts)]
    down = [kind.make(hidden, width, g, 1.0) for _ in range(experts)]
    if not published.bias:
        return Matrices(gate, up, down)
    b1, b2 = (torch.randn(experts, n, generator=g) / 2 for n in (2 * width, hidden))
    return Matrices(gate, up, down, b1.bfloat16(), b2.bfloat16())


def write(  # noqa: PLR0913 (each is one question)
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
    """Write one; what is returned is the truth of the last of `layers`.

    shards: files, of which more than one have an index. change: alters tensors before they are
    written, by their names.
    """
    published, of = FAMILIES[family], (KINDS | ORDERED | FUSED)[kind]
    g = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for layer in layers:
        m = matrices(of, published, (experts, hidden, intermediate), g)
        tensors |= published.names(f"{published.front}{layer}.", m)
        tensors[f"{published.front}{layer}.input_layernorm.weight"] = torch.ones(hidden)
    if change is not None:
        change(tensors)
    config = published.config(family, (experts, top_k, intermediate, hidden))
    dtypes = {"fp16": "float16", "fp32": "float32"}
    config["torch_dtype"] = dtypes.get(kind, "bfloat16")
    if of.config is not None:
        config["quantization_config"] = of.config
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save(folder, tensors, shards)
    gate, up, down = ([one.values for one in ones] for ones in (m.gate, m.up, m.down))
    ungated = published.act == "relu2"
    w1 = torch.stack(up if ungated else [torch.cat(two) for two in zip(gate, up, strict=True)])
    b1 = None if m.b1 is None else torch.cat([m.b1[:, 0::2], m.b1[:, 1::2]], 1).to(F64)
    b2 = None if m.b2 is None else m.b2.to(F64)
    scaling = next((v for k, v in published.more.items() if "scal" in k), 1.0)
    return Sample(folder, config, of, published, w1, torch.stack(down), b1, b2, top_k, scaling)


def save(folder: Path, tensors: Tensors, shards: int = 1) -> None:
    """One model.safetensors, or shards with an index; experts lie across shards as they come."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        some = {name: tensors[name] for name in names[shard::shards]}
        save_file(some, folder / file)
        weight_map |= dict.fromkeys(some, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
