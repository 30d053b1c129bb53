"""The kernel and the torch code of `route` equal float64 for ordinary and extreme values."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from ops_fixtures import DEVICE, make_path_fixture, random_normal
from router_reference import disagreements
from torch.autograd import forward_ad

from modular_kernel.errors import (
    ConfigurationError,
    DeviceError,
    DtypeError,
    InputError,
    LayoutError,
    ShapeError,
    UnsupportedError,
)
from modular_kernel.ops import route as route_module
from modular_kernel.ops.route import INVALID_ID, Routed, RouterTensors, route
from modular_kernel.spec.router import RouterSpec

path = make_path_fixture(route_module)

DEEPSEEK = RouterSpec(
    4, "sigmoid", groups=4, topk_groups=2, selection_bias=True, renormalize=True, eps=1e-20
)
# The spec and the number of experts, by name. Every score, order and kind of selection occurs.
SPECS: dict[str, tuple[RouterSpec, int]] = {
    "softmax": (RouterSpec(2), 8),
    "renormalized": (RouterSpec(8, renormalize=True), 60),
    "topk_first": (RouterSpec(4, order="topk_first"), 32),
    "one": (RouterSpec(1, "sigmoid", "topk_first"), 16),
    "biased logits": (RouterSpec(3, "sigmoid", "topk_first", selection_bias=True), 12),
    "sigmoid": (RouterSpec(6, "sigmoid", selection_bias=True, renormalize=True), 37),
    "sqrtsoftplus": (RouterSpec(6, "sqrtsoftplus", renormalize=True, eps=1e-20), 24),
    "groups": (DEEPSEEK, 32),
    "groups of 5": (replace(DEEPSEEK, groups=3, topk_groups=2, selection_bias=False), 15),
    "groups by one": (RouterSpec(3, groups=4, topk_groups=1, group_score="max"), 20),
    "logits in groups": (RouterSpec(2, order="topk_first", groups=2, topk_groups=1), 8),
    "floor": (RouterSpec(4, selection_bias=True, renormalize=True, floor=1e-2), 16),
    "zero experts": (RouterSpec(5, selection_bias=True, zero_experts=5), 9),
    "all": (RouterSpec(16, "sqrtsoftplus", selection_bias=True), 16),
    "17": (RouterSpec(17, renormalize=True), 40),
    "22 of logits": (RouterSpec(22, order="topk_first"), 23),
    "Nemotron-3": (RouterSpec(22, "sigmoid", selection_bias=True, renormalize=True, eps=1e-20), 64),
    "32 in groups": (replace(DEEPSEEK, top_k=32, selection_bias=False), 128),
    "all 32": (RouterSpec(32, "sqrtsoftplus", selection_bias=True), 32),
}
LOGIT_KINDS = ("plain", "ties", "equal", "nan", "most nan", "all nan", "infinite", "faint", "huge")
BIAS_KINDS = ("plain", "negative", "ties", "nan", "never")


def make_logits(kind: str, columns: int, tokens: int = 7) -> torch.Tensor:
    """Return logits of one of LOGIT_KINDS, (tokens, columns)."""
    logits = random_normal(tokens, columns, seed=columns) * 2
    token = torch.arange(tokens, device=DEVICE)[:, None]
    column = torch.arange(columns, device=DEVICE)[None, :]
    if kind == "ties":
        return logits.round()
    if kind == "equal":
        return torch.full_like(logits, -0.5)
    if kind == "nan":
        return logits.masked_fill((column + token) % 3 == 0, torch.nan)
    if kind == "most nan":
        return logits.masked_fill(column != token % columns, torch.nan)
    if kind == "all nan":
        return torch.full_like(logits, torch.nan)
    if kind == "infinite":
        logits = logits.masked_fill((column + token) % 4 == 0, -torch.inf)
        logits[token[:, 0] % 5 == 1] = -torch.inf
        return logits.masked_fill((column == 3) & (token % 2 == 0), torch.inf)
    scales = {"plain": 1.0, "faint": 1e-3, "huge": 20.0}
    return logits * scales[kind] - (60 if kind == "faint" else 0)


def make_bias(kind: str, columns: int) -> torch.Tensor:
    bias = random_normal(columns, seed=7) * 0.3
    if kind == "negative":
        return bias - 5
    if kind == "ties":
        return torch.zeros_like(bias)
    if kind == "nan":
        bias[::3] = torch.nan
    if kind == "never":
        bias[1:] = -torch.inf
    return bias


def route_and_check(
    spec: RouterSpec, logits: torch.Tensor, tensors: RouterTensors, **options: Any
) -> Routed:
    routed = route(logits, spec, tensors, **options)
    assert disagreements(routed, logits, spec, tensors, options.get("token_ids_T")) == []
    return routed


@pytest.mark.share(2)
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("name", SPECS)
def test_route_equals_the_reference(name: str) -> None:
    spec, experts = SPECS[name]
    columns = spec.columns(experts)
    # Groups with saturated scores tie in float32, but not in float64.
    saturates = spec.groups > 1 and spec.group_score == "top2" and spec.order == "score_first"
    for logit_kind in LOGIT_KINDS[:-1] if saturates else LOGIT_KINDS:
        for bias_kind in BIAS_KINDS if spec.selection_bias else BIAS_KINDS[:1]:
            bias = make_bias(bias_kind, columns) if spec.selection_bias else None
            route_and_check(spec, make_logits(logit_kind, columns), RouterTensors(bias))


@pytest.mark.usefixtures("path")
def test_ties_select_the_lower_id() -> None:
    routed = route(torch.zeros(2, 8, device=DEVICE), RouterSpec(3, renormalize=True))
    assert routed.routing.topk_ids_TK.tolist() == [[0, 1, 2]] * 2
    assert routed.routing.topk_weights_TK.tolist() == [[pytest.approx(1 / 3)] * 3] * 2
    signed_zeros = torch.tensor([[0.0, -0.0, 1.0, 0.0, 1.0]], device=DEVICE)
    assert route(signed_zeros, RouterSpec(4)).routing.topk_ids_TK.tolist() == [[2, 4, 0, 1]]


@pytest.mark.usefixtures("path")
def test_nan_logits_are_never_selected() -> None:
    logits = torch.tensor([[torch.nan, 1.0, torch.nan, 2.0]], device=DEVICE)
    routed = route(logits, RouterSpec(3))
    assert routed.routing.topk_ids_TK.tolist() == [[3, 1, -1]]
    assert float(routed.routing.topk_weights_TK.sum()) == pytest.approx(1)
    routed = route(torch.full_like(logits, torch.nan), RouterSpec(2, renormalize=True))
    assert routed.routing.topk_ids_TK.tolist() == [[-1, -1]]
    assert routed.routing.topk_weights_TK.tolist() == [[0, 0]]


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("order", ["score_first", "topk_first"])
def test_softmax_ignores_nan_in_its_maximum(order: Any) -> None:
    """If NaN counted as a logit of 0, the exponentials of the other logits would underflow to 0."""
    logits = torch.tensor([[torch.nan, -200.0, -201.0]], device=DEVICE)
    routed = route_and_check(RouterSpec(2, order=order), logits, RouterTensors())
    assert routed.routing.topk_ids_TK.tolist() == [[1, 2]]
    assert float(routed.routing.topk_weights_TK.sum()) == pytest.approx(1)


@pytest.mark.usefixtures("path")
def test_experts_of_excluded_groups_are_not_selected_over_negative_scores() -> None:
    """If excluded experts had the score 0, they would be selected first."""
    spec = RouterSpec(2, "sigmoid", groups=2, topk_groups=1, selection_bias=True)
    bias = torch.tensor([-3.0, -3.0, -3.0, -4.0, -4.0, -4.0], device=DEVICE)
    routed = route(torch.zeros(1, 6, device=DEVICE), spec, RouterTensors(bias))
    assert routed.routing.topk_ids_TK.tolist() == [[0, 1]]
    assert routed.routing.topk_weights_TK.tolist() == [[0.5, 0.5]]


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_logit_and_id_dtypes(dtype: torch.dtype, ids_dtype: torch.dtype) -> None:
    spec = replace(DEEPSEEK, top_k=3)
    # The logits are a slice, so that they have gaps between rows.
    wide_logits = random_normal(5, 40, seed=2).to(dtype)
    routed = route_and_check(
        spec, wide_logits[:, :32], RouterTensors(random_normal(32).to(dtype)), ids_dtype=ids_dtype
    )
    assert routed.routing.topk_ids_TK.dtype == ids_dtype
    assert routed.routing.topk_weights_TK.dtype == torch.float32


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("order", ["score_first", "topk_first"])
def test_a_table_determines_the_experts(dtype: torch.dtype, order: Any) -> None:
    spec = RouterSpec(3, order=order, renormalize=order == "score_first", table=True)
    table = torch.stack([torch.randperm(8)[:3] for _ in range(11)])
    table[4, 1], table[5, 0], table[6, 2] = -1, 8, -7
    token_ids = torch.tensor([0, 10, 4, 5, 6, 11, -1, 2**31 - 1, 3])
    logits = make_logits("plain", 8, len(token_ids))
    logits[8, int(table[3, 1])] = torch.nan
    tensors = RouterTensors(table_VK=table.to(dtype).to(DEVICE))
    routed = route_and_check(spec, logits, tensors, token_ids_T=token_ids.to(dtype).to(DEVICE))
    ids = routed.routing.topk_ids_TK.tolist()
    assert ids[0] == table[0].tolist()
    assert (ids[2][1], ids[3][0], ids[4][2], ids[8][1]) == (-1, INVALID_ID, INVALID_ID, -1)
    assert ids[5:8] == [[INVALID_ID] * 3] * 3


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("top_k", [17, 22, 32])
def test_a_table_with_many_experts_per_token(top_k: int) -> None:
    table = torch.stack([torch.randperm(40)[:top_k] for _ in range(5)])
    token_ids = torch.tensor([4, 0, 2])
    tensors = RouterTensors(table_VK=table.to(DEVICE))
    spec = RouterSpec(top_k, "sigmoid", renormalize=True, table=True)
    routed = route_and_check(
        spec, make_logits("plain", 40, 3), tensors, token_ids_T=token_ids.to(DEVICE)
    )
    assert torch.equal(routed.routing.topk_ids_TK.long().cpu(), table[token_ids])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("top_k", "experts"), [(4, 6), (22, 36)])
def test_zero_experts_are_summed_and_skipped(top_k: int, experts: int) -> None:
    spec, logits = RouterSpec(top_k, zero_experts=4), make_logits("plain", experts + 4)
    routed = route_and_check(spec, logits, RouterTensors())
    without_zero_experts = route(logits, replace(spec, zero_experts=0)).routing
    is_zero_expert = without_zero_experts.topk_ids_TK >= experts
    assert is_zero_expert.any()
    assert torch.equal(
        routed.routing.topk_ids_TK, without_zero_experts.topk_ids_TK.masked_fill(is_zero_expert, -1)
    )
    expected = (without_zero_experts.topk_weights_TK * is_zero_expert).sum(1)
    assert torch.allclose(routed.identity_T, expected, rtol=1e-6)


@pytest.mark.usefixtures("path")
def test_zero_tokens_and_many_tokens() -> None:
    """With 1037 tokens, each program has several tokens and the last program is partial."""
    spec, experts = SPECS["groups of 5"]
    routed = route(torch.empty(0, experts, device=DEVICE), spec)
    assert routed.routing.topk_ids_TK.shape == routed.routing.topk_weights_TK.shape == (0, 4)
    logits = random_normal(1037, experts, seed=3)
    all_tokens = route(logits, spec).routing
    for start in (0, 512, 1024):
        few_tokens = route(logits[start : start + 13], spec).routing
        assert torch.equal(few_tokens.topk_ids_TK, all_tokens.topk_ids_TK[start : start + 13])
        # A GPU may choose tiles by the number of tokens, and so change the order of summation.
        expected = all_tokens.topk_weights_TK[start : start + 13]
        assert torch.allclose(few_tokens.topk_weights_TK, expected, rtol=1e-6, atol=0.0)


@pytest.mark.usefixtures("path")
def test_routers_at_the_size_limits() -> None:
    spec = RouterSpec(32, "sqrtsoftplus", selection_bias=True, renormalize=True, zero_experts=512)
    route_and_check(spec, make_logits("plain", 1024, 3), RouterTensors(make_bias("plain", 1024)))
    grouped = replace(DEEPSEEK, top_k=22, groups=8, topk_groups=4)
    route_and_check(
        grouped, make_logits("plain", 512, 3), RouterTensors(make_bias("negative", 512))
    )


# ------------------------------------------------------------------------------------ bad input

BAD_SPECS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"top_k": 0}, "router top_k: got 0, need an int >= 1 and <= 32"),
    ({"top_k": 33}, "router top_k: got 33"),
    ({"score": "tanh"}, "router score: got 'tanh', need softmax or sigmoid or sqrtsoftplus"),
    ({"order": "topk"}, "router order: got 'topk', need score_first or topk_first"),
    ({"groups": 4, "topk_groups": 5}, "router topk_groups: got 5, need 1 to groups = 4"),
    ({"topk_groups": 2}, "router topk_groups: got 2, need 1 to groups = 1"),
    ({"group_score": "sum"}, "router group_score: got 'sum'"),
    ({"renormalize": 1}, "router renormalize: got 1, need True or False"),
    ({"eps": 1e-20}, "router eps: got 1e-20, need renormalize=True"),
    ({"floor": 0.1}, "router floor: got 0.1, need renormalize=True"),
    (
        {"eps": -1.0, "renormalize": True},
        "router eps: got -1.0, need 0, or a float32 from 1.18",
    ),
    (
        {"eps": 1e300, "renormalize": True},
        "router eps: got 1e\\+300, need 0, or a float32 from 1.18",
    ),
    (
        {"floor": 1.5, "renormalize": True},
        "router floor: got 1.5, need 0, or a float32 from 1.18",
    ),
    (
        {"eps": 1e-60, "renormalize": True},
        "router eps: got 1e-60, need 0, or a float32 from 1.18",
    ),
    ({"floor": float("nan"), "renormalize": True}, "router floor: got nan"),
    ({"table": True, "groups": 2}, "router table: got a table and groups, need no groups"),
    ({"table": True, "selection_bias": True}, "router table: got a table and selection_bias"),
    ({"zero_experts": -1}, "router zero_experts: got -1"),
    ({"zero_experts": 2, "groups": 2}, "router groups: got 2, need groups = 1, because"),
)


@pytest.mark.parametrize(("fields", "message"), BAD_SPECS, ids=str)
def test_invalid_specs_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RouterSpec(**{"top_k": 2} | fields)


@pytest.mark.parametrize(
    ("fields", "experts", "message"),
    [
        ({}, 1, "router experts: got 1, need from top_k = 2 to 1024 columns"),
        ({}, 1025, "router experts: got 1025"),
        ({"zero_experts": 3}, 0, "router experts: got 0"),
        (
            {"groups": 3, "topk_groups": 2},
            8,
            "got 8, need groups = 3 of equal size",
        ),
        (
            {"groups": 4, "topk_groups": 2},
            4,
            "router experts: got 4, need .* with at least 2 experts each",
        ),
        (
            {"groups": 4, "top_k": 4},
            12,
            "router groups: got 4 groups of 3, need at least top_k = 4 experts",
        ),
    ],
)
def test_invalid_numbers_of_experts_are_refused(
    fields: dict[str, Any], experts: int, message: str
) -> None:
    spec = RouterSpec(**{"top_k": 2} | fields)
    with pytest.raises(ConfigurationError, match=message):
        route(torch.zeros(2, experts + spec.zero_experts), spec)


BIASED_SPEC, TABLED = RouterSpec(2, selection_bias=True), RouterSpec(2, table=True)
LOGITS, TABLE, IDS = torch.zeros(3, 4), torch.zeros(5, 2, dtype=torch.int64), torch.arange(3)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((LOGITS, {"top_k": 2}), {}, ConfigurationError, "router: got dict, need a RouterSpec"),
        ((LOGITS[0], RouterSpec(2)), {}, ShapeError, r"router logits: got \(4,\), need \(T, E\)"),
        ((None, RouterSpec(2)), {}, DtypeError, "router logits: got NoneType, need a tensor"),
        ((LOGITS.double(), RouterSpec(2)), {}, DtypeError, "router logits: got float64"),
        ((LOGITS.clone().requires_grad_(), RouterSpec(2)), {}, UnsupportedError,
         "gradients: got router logits that require grad, need torch.no_grad"),
        ((LOGITS.long(), RouterSpec(2)), {}, DtypeError, "router logits: got int64"),
        ((torch.zeros(4, 3).mT, RouterSpec(2)), {}, LayoutError, r"stride\(-1\) == 1"),
        ((LOGITS, RouterSpec(2)), {"ids_dtype": torch.int16}, DtypeError, "ids_dtype: got torch"),
        ((LOGITS, BIASED_SPEC), {}, DtypeError, "selection bias: got NoneType, need a tensor"),
        ((LOGITS, BIASED_SPEC, RouterTensors(torch.zeros(5))), {}, ShapeError,
         r"selection bias: got \(5,\), need \(4,\)"),
        ((LOGITS, BIASED_SPEC, RouterTensors(torch.zeros(4, dtype=torch.int32))), {}, DtypeError,
         "selection bias: got int32"),
        ((LOGITS, BIASED_SPEC, RouterTensors(torch.zeros(4, device="meta"))), {}, DeviceError,
         "selection bias: got meta"),
        ((LOGITS, BIASED_SPEC, RouterTensors(torch.zeros(8)[::2])), {}, LayoutError, "contiguous"),
        ((LOGITS, RouterSpec(2), RouterTensors(torch.zeros(4))), {}, ConfigurationError,
         "selection bias: got a tensor, need None"),
        ((LOGITS, TABLED, RouterTensors(None, TABLE)), {}, DtypeError, "token_ids: got NoneType"),
        ((LOGITS, TABLED), {"token_ids_T": IDS}, DtypeError, "router table: got NoneType"),
        ((LOGITS, TABLED, RouterTensors(None, TABLE[:, :1])), {"token_ids_T": IDS}, ShapeError,
         r"router table: got \(5, 1\), need \(5, 2\)"),
        ((LOGITS, TABLED, RouterTensors(None, TABLE[0])), {"token_ids_T": IDS}, ShapeError,
         "router table"),
        ((LOGITS, TABLED, RouterTensors(None, TABLE.float())), {"token_ids_T": IDS}, DtypeError,
         "router table: got float32"),
        ((LOGITS, TABLED, RouterTensors(None, TABLE)), {"token_ids_T": IDS[:2]}, ShapeError,
         r"token_ids: got \(2,\), need \(3,\)"),
        ((LOGITS, RouterSpec(2)), {"token_ids_T": IDS}, ConfigurationError, "token_ids: got a"),
    ],
)  # fmt: skip
def test_invalid_tensors_are_refused(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[InputError], message: str
) -> None:
    with pytest.raises(error, match=message):
        route(*arguments, **options)


def test_the_reference_detects_errors() -> None:
    spec, logits = RouterSpec(3, renormalize=True), make_logits("plain", 8)
    correct = route(logits, spec).routing
    weights, ids = correct.topk_weights_TK, correct.topk_ids_TK
    wrong_id = torch.where(ids[:, :1] == 7, 6, 7).to(ids.dtype)
    for bad_weights, bad_ids in (
        (weights * 1.001, ids),
        (weights.flip(1), ids),
        (weights, ids.flip(1)),
        (weights, ids[:, :1].expand_as(ids)),
        (weights, torch.cat([wrong_id, ids[:, 1:]], 1)),
        (weights.masked_fill(ids == 0, torch.nan), ids),
        (weights, ids.masked_fill(ids == int(ids[0, 2]), -1)),
    ):
        routing = replace(correct, topk_weights_TK=bad_weights, topk_ids_TK=bad_ids)
        assert disagreements(Routed(routing), logits, spec)


def test_gradients_and_tensors_without_memory_are_refused() -> None:
    spec = RouterSpec(2, "sigmoid", selection_bias=True)
    logits, bias = torch.randn(3, 8), torch.zeros(8)
    with torch.no_grad(), forward_ad.dual_level():
        for primal, is_logits in ((logits, True), (bias, False)):
            dual = forward_ad.make_dual(primal, torch.ones_like(primal))
            args = (dual, RouterTensors(bias)) if is_logits else (logits, RouterTensors(dual))
            with pytest.raises(UnsupportedError, match="with a forward gradient"):
                route(args[0], spec, args[1])
    with pytest.raises(LayoutError, match="made by vmap, grad or jvp"):
        torch.func.vmap(lambda t: route(t, spec, RouterTensors(bias)).routing.topk_weights_TK)(
            logits[None]
        )
    with pytest.raises(DeviceError, match="router logits: got meta, without memory"):
        route(logits.to("meta"), spec, RouterTensors(bias.to("meta")))
    bias.untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match="selection bias: got 0 bytes"):
        route(logits, spec, RouterTensors(bias))
    logits.untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match="router logits: got 0 bytes"):
        route(logits, RouterSpec(2))
