"""The router that a config.json describes equals the router module of transformers."""

import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from test_router_families import BASE, EPS, FAMILIES, SCALE, Family, make_router, scatter_weights

from modular_kernel.errors import ConfigurationError
from modular_kernel.machine import prefer_torch_reference
from modular_kernel.models import families
from modular_kernel.models.router_config import RULES, router_differences, router_of_config
from modular_kernel.ops.route import RouterTensors, route
from modular_kernel.spec.router import RouterSpec

transformers = pytest.importorskip("transformers")

E, K, H, T = 16, 4, 24, 9
CONFIG_PATH = Path("config.json")
# Values of keys for the types that read them.
TYPE_VALUES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"norm_topk_prob": False, "scoring_func": "softmax"},
    "deepseek_ocr2_text": {"norm_topk_prob": False, "scoring_func": "softmax"},
    "unlimited_ocr_text": {"norm_topk_prob": False, "scoring_func": "softmax"},
}
BASE_CONFIG = {name: value for name, value in BASE.items() if name not in ("scoring_func",)}
TYPES_WITH_BIAS_ARGUMENT = (
    "minimax_m2",
    "afmoe",
    "lfm2_moe",
)  # The bias is an argument of forward.
ROUTER_CLASSES = {  # of types whose folder has several router classes, or an unusual name
    "llama4_text": "Llama4Router",
    "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextTopKRouter",
    "qwen3_omni_moe_talker_text": "Qwen3OmniMoeTalkerTextTopKRouter",
}


def make_config(kind: str, **changes: Any) -> dict[str, Any]:
    config = BASE_CONFIG | {"model_type": kind} | TYPE_VALUES.get(kind, {}) | changes
    if RULES[kind].score == "sigmoid" and RULES[kind].groups is not None:
        config = {"topk_method": "noaux_tc"} | {
            k: v for k, v in config.items() if k != "topk_method"
        }
    return config


def find_router(kind: str) -> tuple[str, str]:
    """Return the folder of the model in transformers and the name of its router there."""
    folder = families.FAMILIES[kind].source.split()[0]
    if kind in ROUTER_CLASSES:
        return folder, ROUTER_CLASSES[kind]
    module = import_module(f"transformers.models.{folder}.modeling_{folder}")
    (name,) = (n for n in vars(module) if re.search(r"(Top[Kk]Router|V1Gate|ChoiceRouter)$", n))
    return folder, name


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in RULES if kind != "deepseek"])
def test_configs_route_like_their_models(kind: str, normalized: bool) -> None:
    folder, name = find_router(kind)
    is_v2 = RULES[kind].method_key != ""
    config = make_config(kind, norm_topk_prob=normalized and not is_v2)
    if kind == "cohere2_moe":
        config["expert_selection_fn"] = "sigmoid" if normalized else "softmax"
    if kind == "longcat_flash":  # test_router_families tests zero experts.
        config["zero_expert_num"] = 0
    spec = router_of_config(CONFIG_PATH, config, K)
    assert spec is not None
    family = Family(folder, name, spec, bias=kind in TYPES_WITH_BIAS_ARGUMENT, config=config)
    router, arguments = make_router(family)
    tensors: dict[str, torch.Tensor] = dict(router.named_parameters()) | dict(
        router.named_buffers()
    )
    weight = next(t for t in tensors.values() if t.dim() == 2 and t.is_floating_point())
    x_TH = torch.randn(T, H)
    with torch.no_grad(), prefer_torch_reference():
        outputs = router(x_TH[None] if folder == "afmoe" else x_TH, *arguments)
        logits = torch.nn.functional.linear(x_TH, weight, tensors.get("bias"))
        bias = arguments[0] if family.bias else None
        if spec.selection_bias and bias is None:
            bias = next(t for name, t in tensors.items() if "correction_bias" in name).flatten()
        routed = route(logits, spec, RouterTensors(bias)).routing
    if folder == "llama4":
        expected = torch.cat([outputs[0], torch.zeros(T, 1)], 1)
    else:
        expected = scatter_weights(*outputs[1:3])
    has_scaling_factor = re.search(
        "routed_scaling_factor|route_scale", inspect.getsource(type(router))
    )
    got = scatter_weights(routed.topk_weights_TK, routed.topk_ids_TK)
    torch.testing.assert_close(
        got, expected / (SCALE if has_scaling_factor else 1), rtol=2e-6, atol=1e-7
    )


@pytest.mark.parametrize("normalized", [True, False, None])
def test_deepseek_routes_like_its_own_code(normalized: bool | None) -> None:
    """The model's code selects the top K of a softmax over all experts. norm_topk_prob divides the
    weights by their sum. There is no scaling factor.
    """
    config = {"model_type": "deepseek", "scoring_func": "softmax", "norm_topk_prob": normalized}
    spec = router_of_config(CONFIG_PATH, config, K)
    assert spec is not None
    logits = torch.randn(T, E)
    routing = route(logits, spec, RouterTensors(None)).routing
    values, ids = logits.double().softmax(-1).topk(K)
    values = values / (values.sum(-1, keepdim=True) + 1e-20) if normalized else values
    got = scatter_weights(routing.topk_weights_TK, routing.topk_ids_TK)
    expected = scatter_weights(values.float(), ids)
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=1e-7)
    with pytest.raises(ConfigurationError, match="scoring_func = sigmoid"):
        router_of_config(CONFIG_PATH, config | {"scoring_func": "sigmoid"}, K)


def test_number_of_zero_experts_of_longcat() -> None:
    config = {"model_type": "longcat_flash"}
    for count, expected in ((None, 0), (0, 0), (256, 256)):
        spec = router_of_config(CONFIG_PATH, config | {"zero_expert_num": count}, K)
        assert spec is not None
        assert spec.zero_experts == expected
    for count in (-1, True, "256"):
        with pytest.raises(ConfigurationError, match="zero_expert_num"):
            router_of_config(CONFIG_PATH, config | {"zero_expert_num": count}, K)


@pytest.mark.parametrize("kind", RULES)
def test_missing_keys_have_the_defaults_of_the_class(kind: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        pytest.skip("transformers has no class of this type")
    config_class = CONFIG_MAPPING[kind]
    keys = ("norm_topk_prob", "n_group", "topk_group", "topk_method", "use_expert_bias",
            "moe_norm_min", "expert_selection_fn", "moe_router_logit_softcapping")  # fmt: skip
    defaults = {key: getattr(config_class, key) for key in keys if hasattr(config_class, key)}
    expected = router_of_config(CONFIG_PATH, {"model_type": kind} | defaults, K)
    assert router_of_config(CONFIG_PATH, {"model_type": kind}, K) == expected


def test_model_types_with_an_unknown_router_have_none() -> None:
    assert router_of_config(CONFIG_PATH, {"model_type": "deepseek_v4"}, 4) is None
    assert RULES.keys() <= families.FAMILIES.keys()
    assert {family.name for family in FAMILIES} - {"aria", "llama4", "deepseek_v4"} <= {
        kind.removesuffix("_text") for kind in RULES
    }


@pytest.mark.parametrize(
    ("kind", "changes", "match"),
    [
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob = yes, need true or false"),
        ("deepseek_v3", {"n_group": 0}, "n_group = 0, need an integer"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = softmax, need sigmoid"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method = noaux_tc, need greedy or"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True, need False"),
        ("cohere2_moe", {"expert_selection_fn": "tanh"}, "need softmax or sigmoid"),
        ("ernie4_5_moe", {"moe_norm_min": 3}, "moe_norm_min = 3, need a number from 0 to 1"),
        ("ernie4_5_moe", {"moe_norm_min": -0.5}, "moe_norm_min = -0.5, need a number from 0 to 1"),
        ("ernie4_5_moe", {"moe_norm_min": True}, "moe_norm_min = True, need a number from 0 to 1"),
        ("laguna", {"moe_router_logit_softcapping": 1.5}, "softcapping = 1.5, need 0.0"),
    ],
)
def test_values_that_the_code_does_not_support_are_refused(kind: str, changes, match) -> None:
    with pytest.raises(ConfigurationError, match=match):
        router_of_config(CONFIG_PATH, {"model_type": kind} | changes, 4)


@pytest.mark.parametrize("floor", [0, 0.0, 0.5, 1, 1.0])
def test_floor_may_be_any_number_from_0_to_1(floor: float) -> None:
    config = {"model_type": "ernie4_5_moe", "moe_norm_min": floor}
    router = router_of_config(CONFIG_PATH, config, 4)
    assert router is not None
    assert router.floor == floor
    assert type(router.floor) is float


def test_only_differences_that_change_numbers_are_compared() -> None:
    renormalized = RouterSpec(K, renormalize=True)
    assert router_differences(renormalized, RouterSpec(K)) == ("renormalize",)
    assert router_differences(renormalized, RouterSpec(K, renormalize=True, eps=1e-20)) == ()
    assert router_differences(renormalized, RouterSpec(K, renormalize=True, eps=1e-6)) == ("eps",)
    topk_first = RouterSpec(K, order="topk_first")
    assert router_differences(topk_first, RouterSpec(K, order="topk_first", **EPS)) == ()
    all_groups = RouterSpec(K, groups=4, topk_groups=4, group_score="max")
    assert router_differences(all_groups, RouterSpec(K)) == ()
    assert router_differences(RouterSpec(K, groups=4, topk_groups=2), RouterSpec(K)) == (
        "groups",
        "topk_groups",
    )


def test_routers_are_read_from_json() -> None:
    json_text = json.dumps(make_config("deepseek_v3"))
    spec = router_of_config(CONFIG_PATH, json.loads(json_text), K)
    assert spec == RouterSpec(
        K, "sigmoid", groups=4, topk_groups=2, selection_bias=True, renormalize=True, eps=1e-20
    )
