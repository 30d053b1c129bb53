"""Reads the router that a Hugging Face config.json describes, as a RouterSpec.

A config.json has only some properties of a router. Other properties, such as the score function,
are in the code of the model. `RULES` lists them for each supported model_type.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.router import RouterSpec

Config = dict[str, Any]
_DEFAULT_FLOOR = 1e-12  # if the code reads a floor from the file, and the file has none
_FLOAT_TOLERANCE = 1e-9  # smaller differences of eps and floor do not change router weights


@dataclass(frozen=True, kw_only=True)
class RoutingRule:
    """The router in the code of one model_type.

    score, order, group_score, eps: fields of RouterSpec.
    bias: selection_bias of RouterSpec.
    score_key, bias_key, floor_key: keys of score, bias and floor in the file, whose values take
        precedence; "" if the code does not read such a key. The floor is the smallest number by
        which top-k weights are divided when they are renormalized.
    renormalize: top-k weights are divided by their sum. None reads norm_topk_prob from the file.
    renormalize_default: value of norm_topk_prob if it is missing in the file.
    groups: default (n_group, topk_group); None if the code has no groups.
    zero_key: key of the number of zero experts, which return their input.
    method_key: key of the method, "greedy" (no groups, the default) or "group_limited_greedy".
    required_values: (key, value) pairs. A file with another value is not supported. The key may be
        missing.
    """

    score: str = "softmax"
    order: str = "score_first"
    group_score: str = "top2"
    bias: bool = False
    eps: float = 0.0
    renormalize: bool | None = None
    renormalize_default: bool = True
    groups: tuple[int, int] | None = None
    score_key: str = ""
    bias_key: str = ""
    floor_key: str = ""
    zero_key: str = ""
    method_key: str = ""
    required_values: tuple[tuple[str, object], ...] = ()


_REQUIRES_SOFTMAX = (("scoring_func", "softmax"),)
_REQUIRES_SIGMOID = (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"))


def _make_norm_topk_prob_rule(*, renormalize_default: bool) -> RoutingRule:
    return RoutingRule(renormalize_default=renormalize_default)


def _make_deepseek_v3_rule(
    groups: tuple[int, int] = (1, 1), *, renormalize_default: bool = True
) -> RoutingRule:
    return RoutingRule(
        score="sigmoid",
        bias=True,
        eps=1e-20,
        renormalize_default=renormalize_default,
        groups=groups,
        required_values=_REQUIRES_SIGMOID,
    )


_RENORMALIZED, _NOT_RENORMALIZED = RoutingRule(renormalize=True), RoutingRule(renormalize=False)
_TOPK_FIRST = RoutingRule(order="topk_first", renormalize=False)
_BIASED_SIGMOID = RoutingRule(score="sigmoid", bias=True, renormalize=True)
_DEEPSEEK_V2 = RoutingRule(
    group_score="max",
    renormalize=False,
    groups=(1, 1),
    method_key="topk_method",
    required_values=(("norm_topk_prob", False), *_REQUIRES_SOFTMAX),
)

RULES: dict[str, RoutingRule] = {
    "afmoe": replace(_BIASED_SIGMOID, eps=1e-20),
    "aria_text": _TOPK_FIRST,
    "axk1": _make_deepseek_v3_rule((8, 4)),
    "cohere2_moe": RoutingRule(order="topk_first", score_key="expert_selection_fn"),
    "deepseek": RoutingRule(
        eps=1e-20, renormalize_default=False, required_values=_REQUIRES_SOFTMAX
    ),
    "deepseek_ocr2_text": _DEEPSEEK_V2,
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v3": _make_deepseek_v3_rule((8, 4)),
    "deepseek_v32": _make_deepseek_v3_rule((8, 4)),
    "dots1": _make_deepseek_v3_rule(renormalize_default=False),
    "ernie4_5_moe": RoutingRule(bias=True, renormalize=True, floor_key="moe_norm_min"),
    "exaone_moe": _make_deepseek_v3_rule(),
    "flex_olmo": _make_norm_topk_prob_rule(renormalize_default=False),
    "flint": RoutingRule(score="sigmoid"),
    "glm4_moe": _make_deepseek_v3_rule(),
    "glm4_moe_lite": _make_deepseek_v3_rule(),
    "glm4v_moe_text": _make_deepseek_v3_rule(),
    "glm_moe_dsa": _make_deepseek_v3_rule(),
    "gpt_oss": _TOPK_FIRST,
    "granitemoe": _TOPK_FIRST,
    "granitemoe_swa": _TOPK_FIRST,
    "granitemoehybrid": _TOPK_FIRST,
    "granitemoeshared": _TOPK_FIRST,
    "hunyuan_v1_moe": _RENORMALIZED,
    "jamba": _NOT_RENORMALIZED,
    "kimi_k2": _make_deepseek_v3_rule((8, 4)),
    "kolibri1": RoutingRule(
        score="sigmoid", order="topk_first", bias=True, renormalize_default=False
    ),
    "laguna": replace(_BIASED_SIGMOID, required_values=(("moe_router_logit_softcapping", 0.0),)),
    "lfm2_moe": RoutingRule(score="sigmoid", bias=True, bias_key="use_expert_bias", eps=1e-6),
    "llama4_text": RoutingRule(score="sigmoid", order="topk_first", renormalize=False),
    "longcat_flash": RoutingRule(bias=True, renormalize=False, zero_key="zero_expert_num"),
    "mellum": _make_norm_topk_prob_rule(renormalize_default=True),
    "mimo_v2_flash": _make_deepseek_v3_rule(),
    "minimax": _RENORMALIZED,
    "minimax_m2": _BIASED_SIGMOID,
    "mistral4": RoutingRule(eps=1e-20, groups=(1, 1)),
    "mixtral": _RENORMALIZED,
    "nemotron_h": _make_deepseek_v3_rule(),
    "olmoe": _make_norm_topk_prob_rule(renormalize_default=False),
    "qwen2_moe": _make_norm_topk_prob_rule(renormalize_default=False),
    "qwen3_5_moe_text": _RENORMALIZED,
    "qwen3_moe": _make_norm_topk_prob_rule(renormalize_default=False),
    "qwen3_next": _make_norm_topk_prob_rule(renormalize_default=True),
    "qwen3_omni_moe_talker_text": _make_norm_topk_prob_rule(renormalize_default=False),
    "qwen3_omni_moe_text": _make_norm_topk_prob_rule(renormalize_default=True),
    "qwen3_vl_moe_text": _RENORMALIZED,
    "qwen4_exp_text": _make_norm_topk_prob_rule(renormalize_default=True),
    "sarvam_mla": _make_deepseek_v3_rule((8, 4)),
    "sarvam_moe": _make_deepseek_v3_rule(),
    "solar_open": _make_deepseek_v3_rule(),
    "unlimited_ocr_text": _DEEPSEEK_V2,
}


def router_of_config(path: Path, config: Config, top_k: int) -> RouterSpec | None:
    """Return the router of a config.json, or None if its model_type is not in RULES.

    config: the object with the model_type, from `config_file.config_of_file`.
    top_k: number of experts per token.

    Raises ConfigurationError for a value that the model's code or RouterSpec does not support.
    """
    rule = RULES.get(config["model_type"])
    if rule is None:
        return None
    for key, value in rule.required_values:
        actual = config.get(key)
        if actual is not None and actual != value:
            raise _make_config_error(path, key, actual, f"{value}: other routers are not supported")
    bias = rule.bias
    if rule.bias_key:
        bias = _read_flag(path, config, rule.bias_key, default=rule.bias)
    score = _read_score(path, config, rule)
    renormalize = rule.renormalize
    if renormalize is None:
        renormalize = _read_flag(path, config, "norm_topk_prob", default=rule.renormalize_default)
    if score == "softmax" and rule.order == "topk_first":
        renormalize = False  # a softmax over the top-k already sums to 1
    groups, topk_groups = _read_groups(path, config, rule)
    return RouterSpec(
        top_k,
        score=score,  # type: ignore[arg-type]
        order=rule.order,  # type: ignore[arg-type]
        groups=groups,
        topk_groups=topk_groups,
        group_score=rule.group_score if groups > 1 else "top2",  # type: ignore[arg-type]
        selection_bias=bias,
        renormalize=renormalize,
        eps=rule.eps if renormalize else 0.0,
        floor=_read_floor(path, config, rule),
        zero_experts=_read_zero_experts(path, config, rule),
    )


def _read_score(path: Path, config: Config, rule: RoutingRule) -> str:
    score = config.get(rule.score_key) if rule.score_key else None
    if score is None:
        return rule.score
    if score not in ("softmax", "sigmoid"):
        raise _make_config_error(path, rule.score_key, score, "softmax or sigmoid")
    return str(score)


def _read_floor(path: Path, config: Config, rule: RoutingRule) -> float:
    if not rule.floor_key:
        return 0.0
    floor = config.get(rule.floor_key, _DEFAULT_FLOOR)
    if type(floor) not in (int, float) or not 0 <= floor <= 1:
        raise _make_config_error(path, rule.floor_key, floor, "a number from 0 to 1")
    return float(floor)


def _read_zero_experts(path: Path, config: Config, rule: RoutingRule) -> int:
    count = config.get(rule.zero_key) if rule.zero_key else None
    if count is None:
        return 0
    if type(count) is not int or count < 0:
        raise _make_config_error(path, rule.zero_key, count, "an integer >= 0")
    return count


def _read_groups(path: Path, config: Config, rule: RoutingRule) -> tuple[int, int]:
    if rule.groups is None:
        return 1, 1
    if rule.method_key:
        method = config.get(rule.method_key)
        if method in (None, "greedy"):
            return 1, 1
        if method != "group_limited_greedy":
            raise _make_config_error(
                path, rule.method_key, method, "greedy or group_limited_greedy"
            )
    sizes = []
    for key, default in zip(("n_group", "topk_group"), rule.groups, strict=True):
        value = config.get(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise _make_config_error(path, key, value, "an integer >= 1")
        sizes.append(value)
    return sizes[0], sizes[1]


def _read_flag(path: Path, config: Config, key: str, *, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _make_config_error(path, key, value, "true or false")
    return value


def router_differences(spec: RouterSpec, other: RouterSpec) -> tuple[str, ...]:
    """Return the names of the fields whose difference changes the routing."""
    fields, other_fields = vars(_normalize(spec)), vars(_normalize(other))
    return tuple(n for n, value in fields.items() if not _is_same(value, other_fields[n]))


def _normalize(spec: RouterSpec) -> RouterSpec:
    """Return an equivalent spec with unused fields at their defaults."""
    if spec.groups == spec.topk_groups:
        spec = replace(spec, groups=1, topk_groups=1, group_score="top2")
    if spec.order == "topk_first" and spec.score == "softmax":
        spec = replace(spec, renormalize=False, eps=0.0, floor=0.0)
    return spec


def _is_same(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= _FLOAT_TOLERANCE
    return a == b


def _make_config_error(path: Path, key: str, got: object, need: str) -> ConfigurationError:
    return ConfigurationError(f"model {str(path)[:200]}", got=f"{key} = {str(got)[:80]}", need=need)
