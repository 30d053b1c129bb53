"""`route` equals the router module of each model family of transformers."""

from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ops_fixtures import make_path_fixture

from modular_kernel.ops import route as route_module
from modular_kernel.ops.route import RouterTensors, route
from modular_kernel.spec.router import RouterSpec

pytest.importorskip("transformers")

path = make_path_fixture(route_module)

H, E, K, T, VOCABULARY = 24, 16, 4, 9, 30
SCALE = 2.5
BASE = {
    "hidden_size": H,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), E),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), K),
    **dict.fromkeys(("routed_scaling_factor", "route_scale", "router_scaling_factor"), SCALE),
    "norm_topk_prob": True,
    "n_group": 4,
    "topk_group": 2,
    "vocab_size": VOCABULARY,
    "moe_norm_min": 1e-12,
    "zero_expert_num": 3,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "group_limited_greedy",
    "use_expert_bias": True,
    "expert_selection_fn": "sigmoid",
    "moe_router_logit_softcapping": 0.0,
}
EPS = {"renormalize": True, "eps": 1e-20}
BIASED = {"selection_bias": True, **EPS}
GROUPED = {"groups": 4, "topk_groups": 2}


@dataclass(frozen=True)
class Family:
    """A router module of transformers, and its RouterSpec.

    Attributes:
        name: folder of the model in transformers.
        router: class of the router module.
        scaled: whether its weights include the routed scaling factor, a field of Problem here.
        bias: whether the selection bias is an argument of its forward.
        config: entries of the config that differ from BASE.
    """

    name: str
    router: str
    spec: RouterSpec
    scaled: bool = False
    bias: bool = False
    config: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} {self.spec.score}" if self.config else self.name


RENORMALIZED = RouterSpec(K, renormalize=True)
TOPK_FIRST = RouterSpec(K, order="topk_first")
DEEPSEEK = RouterSpec(K, "sigmoid", **GROUPED, **BIASED)
HASHED = RouterSpec(K, "sqrtsoftplus", table=True, **EPS)
FAMILIES = (
    Family("mixtral", "MixtralTopKRouter", RENORMALIZED),
    Family("qwen3_moe", "Qwen3MoeTopKRouter", RENORMALIZED),
    Family("olmoe", "OlmoeTopKRouter", RouterSpec(K), config={"norm_topk_prob": False}),
    Family("jamba", "JambaTopKRouter", RouterSpec(K)),
    Family("hunyuan_v1_moe", "HunYuanMoEV1Gate", RENORMALIZED),
    Family("gpt_oss", "GptOssTopKRouter", TOPK_FIRST),
    Family("granitemoe", "GraniteMoeTopKRouter", TOPK_FIRST),
    Family("aria", "AriaTextTopKRouter", TOPK_FIRST),
    Family("llama4", "Llama4Router", RouterSpec(K, "sigmoid", "topk_first")),
    Family("cohere2_moe", "Cohere2MoeTopKRouter",
           RouterSpec(K, "sigmoid", "topk_first", renormalize=True)),
    Family("cohere2_moe", "Cohere2MoeTopKRouter", TOPK_FIRST,
           config={"expert_selection_fn": "softmax"}),
    Family("deepseek_v2", "DeepseekV2TopkRouter",
           RouterSpec(K, group_score="max", **GROUPED), scaled=True),
    Family("deepseek_v3", "DeepseekV3TopkRouter", DEEPSEEK, scaled=True),
    Family("glm4_moe", "Glm4MoeTopkRouter", DEEPSEEK, scaled=True),
    Family("nemotron_h", "NemotronHTopkRouter", DEEPSEEK, scaled=True),
    Family("mistral4", "Mistral4TopkRouter", RouterSpec(K, **GROUPED, **EPS), scaled=True),
    Family("deepseek_v4", "DeepseekV4TopKRouter", RouterSpec(K, "sqrtsoftplus", **BIASED),
           scaled=True),
    Family("deepseek_v4", "DeepseekV4HashRouter", HASHED, scaled=True, config={"table": True}),
    Family("minimax_m2", "MiniMaxM2TopKRouter",
           RouterSpec(K, "sigmoid", selection_bias=True, renormalize=True), bias=True),
    Family("afmoe", "AfmoeTokenChoiceRouter", RouterSpec(K, "sigmoid", **BIASED), scaled=True,
           bias=True),
    Family("lfm2_moe", "Lfm2MoeTopKRouter",
           RouterSpec(K, "sigmoid", selection_bias=True, renormalize=True, eps=1e-6), scaled=True,
           bias=True),
    Family("laguna", "LagunaTopKRouter",
           RouterSpec(K, "sigmoid", selection_bias=True, renormalize=True)),
    Family("flint", "FlintTopKRouter", RouterSpec(K, "sigmoid", renormalize=True)),
    Family("kolibri1", "Kolibri1TopKRouter",
           RouterSpec(K, "sigmoid", "topk_first", selection_bias=True, renormalize=True)),
    Family("ernie4_5_moe", "Ernie4_5_MoeTopKRouter",
           RouterSpec(K, selection_bias=True, renormalize=True, floor=1e-12)),
    Family("longcat_flash", "LongcatFlashTopkRouter",
           RouterSpec(K, selection_bias=True, zero_experts=3), scaled=True),
)  # fmt: skip


def make_router(family: Family) -> tuple[Any, list[torch.Tensor]]:
    """Return the module with random weights, and the arguments of its forward after x."""
    family_module = import_module(f"transformers.models.{family.name}.modeling_{family.name}")
    torch.manual_seed(5)
    router = getattr(family_module, family.router)(SimpleNamespace(**BASE | family.config))
    for name, tensor in [*router.named_parameters(), *router.named_buffers()]:
        if tensor.is_floating_point():
            tensor.data.normal_(0, 0.3 if "bias" in name else 0.6)
        else:  # a table of the experts of each token id
            tensor.copy_(torch.stack([torch.randperm(E)[:K] for _ in range(VOCABULARY)]))
    if family.spec.table:
        return router, [torch.randint(VOCABULARY, (T,))]
    return router, [torch.randn(E) * 0.3] if family.bias else []


def scatter_weights(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Scatter weights to (T, E + 1). The last column is for zero experts and skipped pairs."""
    column = torch.where((ids < 0) | (ids >= E), E, ids).long()
    return torch.zeros(len(ids), E + 1).scatter_add(1, column, weights.float())


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_route_equals_the_router_of_the_family(family: Family) -> None:
    router, arguments = make_router(family)
    tensors: dict[str, torch.Tensor] = dict(router.named_parameters()) | dict(
        router.named_buffers()
    )
    weight = next(t for t in tensors.values() if t.dim() == 2 and t.is_floating_point())
    x_TH = torch.randn(T, H)
    with torch.no_grad():
        outputs = router(x_TH[None] if family.name == "afmoe" else x_TH, *arguments)
        logits = torch.nn.functional.linear(x_TH, weight, tensors.get("bias"))
    if family.name == "llama4":
        expected = torch.cat([outputs[0], torch.zeros(T, 1)], 1)
    else:
        expected = scatter_weights(*outputs[1:3])
    bias = arguments[0] if family.bias else None
    if family.spec.selection_bias and bias is None:
        bias = next(t for name, t in tensors.items() if "correction_bias" in name).flatten()
    table, token_ids = (tensors["tid2eid"], arguments[0]) if family.spec.table else (None, None)
    routed = route(logits, family.spec, RouterTensors(bias, table), token_ids_T=token_ids)
    got = scatter_weights(routed.routing.topk_weights_TK, routed.routing.topk_ids_TK)
    if routed.identity_T is not None:
        got[:, E] = routed.identity_T
        assert bool((routed.identity_T > 0).any())
    torch.testing.assert_close(
        got, expected / (SCALE if family.scaled else 1.0), rtol=2e-6, atol=1e-7
    )


def test_table_has_at_least_12_families() -> None:
    assert len({family.name for family in FAMILIES}) >= 12
