"""For every pair of option values, the router returns the reference's result, or a rule in REFUSALS
refuses it. AXES lists the options. eps and floor share an axis, because one formula uses both:
max(sum + eps, floor).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from covering_rows import CoveringRows, Refusal, Values, draw, name_of, one_of
from ops_fixtures import DEVICE, random_normal
from router_reference import disagreements

from modular_kernel.errors import ConfigurationError
from modular_kernel.ops import route as route_module
from modular_kernel.ops.route import Routed, RouterTensors, format_spec, route, route_op
from modular_kernel.spec.router import RouterSpec
from modular_kernel.tensors import Routing
from modular_kernel.testing.cases.covering import Axis

VOCABULARY = 19
AXES = (
    Axis("score", ("softmax", "sigmoid", "sqrtsoftplus")),
    Axis("order", ("score_first", "topk_first")),
    Axis("groups", ((1, 1), (4, 1), (4, 3), (3, 2), (12, 8), (24, 24), (2, 3))),
    Axis("group score", ("max", "top2")),
    Axis("bias", (None, torch.float32, torch.bfloat16)),
    Axis("bias values", ("plain", "nan", "never")),
    Axis("renormalize", (False, True)),
    Axis("eps, floor", ((0.0, 0.0), (1e-20, 0.0), (0.25, 0.0), (0.0, 0.5), (0.25, 0.5),
                        (2.0, 0.0))),
    Axis("table", (None, torch.int32, torch.int64)),
    Axis("zero experts", (0, 4)),
    Axis("top-k", (3, 1, 2, 8, 16)),
    Axis("experts", (24, 12, 33)),
    Axis("tokens", (7, 0, 1, 1027), varies_cost=True),  # With 1027, programs handle several tokens.
    Axis("logits", (torch.float32, torch.bfloat16, torch.float16)),
    Axis("values", ("plain", "ties", "nan", "infinite", "faint")),
    Axis("ids", (torch.int32, torch.int64)),
    Axis("spaced", (False, True)),
    Axis("call", ("kernel", "torch", "operator")),
)  # fmt: skip


def find_impossible(row: Values) -> list[str]:
    """Return the reasons why values of a row cannot be combined."""
    reasons = []
    if row["bias"] is None and row["bias values"] != "plain":
        reasons.append("bias values without a bias")
    if row["spaced"] and row["tokens"] == 0:
        reasons.append("spaced rows without tokens")
    return reasons


def _has_groups(row: Values) -> bool:
    return bool(row["groups"] != (1, 1))


def _num_columns(row: Values) -> int:
    return int(row["experts"] + row["zero experts"])


def _has_uneven_groups(row: Values) -> bool:
    size, remainder = divmod(row["experts"], row["groups"][0])
    return bool(remainder) or (row["group score"] == "top2" and size < 2)


def _has_too_few_experts(row: Values) -> bool:
    groups, topk_groups = row["groups"]
    return bool(row["experts"] // groups * topk_groups < row["top-k"])


def _has_even_groups(row: Values) -> bool:
    return not _has_uneven_groups(row)


def _make_refusal(name: str, message: str, *when: Callable[[Values], bool]) -> Refusal:
    return Refusal(name, ConfigurationError, message, when)


_has_table = one_of("table", torch.int32, torch.int64)
REFUSALS = (
    _make_refusal(
        "more selected groups than groups", "router topk_groups", one_of("groups", (2, 3))
    ),
    _make_refusal("eps beyond 1", "router eps", lambda row: row["eps, floor"][0] > 1),
    _make_refusal(
        "eps or floor without renormalization",
        r"router (eps|floor): got .* need renormalize=True",
        one_of("renormalize", False),
        lambda row: row["eps, floor"] not in ((0.0, 0.0), (2.0, 0.0)),
    ),
    _make_refusal(
        "a table with groups or a bias",
        "router table",
        _has_table,
        lambda row: _has_groups(row) or row["bias"] is not None,
    ),
    _make_refusal(
        "zero experts in groups", "router groups", one_of("zero experts", 4), _has_groups
    ),
    _make_refusal(
        "groups of unequal or too small size", "router experts", _has_groups, _has_uneven_groups
    ),
    _make_refusal(
        "too few experts in groups",
        "router groups",
        _has_groups,
        _has_even_groups,
        _has_too_few_experts,
    ),
    _make_refusal(
        "too few experts", "router experts", lambda row: _num_columns(row) < row["top-k"]
    ),
)


@cache
def draw_rows() -> CoveringRows:
    return draw(AXES, REFUSALS, find_impossible, lambda row: 20.0 if row["tokens"] > 100 else 1.0)


def make_spec(row: Values) -> RouterSpec:
    (groups, topk_groups), (eps, floor) = row["groups"], row["eps, floor"]
    return RouterSpec(
        row["top-k"], row["score"], row["order"], groups, topk_groups, row["group score"],
        selection_bias=row["bias"] is not None,
        renormalize=row["renormalize"],
        eps=eps,
        floor=floor,
        table=row["table"] is not None,
        zero_experts=row["zero experts"],
    )  # fmt: skip


def make_logits(row: Values) -> torch.Tensor:
    """Return logits (T, columns)."""
    tokens, columns = row["tokens"], _num_columns(row)
    values = random_normal(tokens, columns, seed=columns) * 2
    position = torch.arange(columns, device=DEVICE) + torch.arange(tokens, device=DEVICE)[:, None]
    if row["values"] == "ties":
        values = values.round()
    elif row["values"] == "nan":
        values = values.masked_fill(position % 3 == 0, torch.nan)
    elif row["values"] == "infinite":
        values = values.masked_fill(position % 4 == 0, -torch.inf)
        values = values.masked_fill(position % 13 == 5, torch.inf)
    elif row["values"] == "faint":
        values = values * 1e-2 - 4
    values = values.to(row["logits"])
    if not row["spaced"]:
        return values
    spaced = torch.full((tokens, columns + 5), torch.nan, dtype=row["logits"], device=DEVICE)
    spaced[:, :columns] = values
    return spaced[:, :columns]


def make_router_tensors(row: Values) -> tuple[RouterTensors, torch.Tensor | None]:
    """Return the bias and the table, and token ids for the table. Some token ids are invalid."""
    bias = table = token_ids = None
    columns = _num_columns(row)
    if row["bias"] is not None:
        bias = random_normal(columns, seed=7) * 0.3
        if row["bias values"] == "nan":
            bias[::3] = torch.nan
        elif row["bias values"] == "never":
            bias[2:] = -torch.inf
        bias = bias.to(row["bias"])
    if row["table"] is not None:
        g = torch.Generator().manual_seed(5)
        experts_by_token = [
            torch.randperm(columns, generator=g)[: row["top-k"]] for _ in range(VOCABULARY)
        ]
        table = torch.stack(experts_by_token).to(row["table"]).to(DEVICE)
        table[4, 0], table[5, -1] = -1, columns
        token_ids = (torch.arange(row["tokens"]) * 2 % (VOCABULARY + 1)).to(row["table"]).to(DEVICE)
    return RouterTensors(bias, table), token_ids


def call_route(
    row: Values, spec: RouterSpec, monkeypatch: pytest.MonkeyPatch
) -> tuple[Routed, Any]:
    """Return the routing, and the other arguments of `disagreements`."""
    logits, (tensors, token_ids) = make_logits(row), make_router_tensors(row)
    arguments = (logits, spec, tensors, token_ids)
    if row["call"] == "torch":
        monkeypatch.setattr(route_module, "use_triton", lambda tensor: False)
    if row["call"] != "operator":
        return route(logits, spec, tensors, token_ids_T=token_ids, ids_dtype=row["ids"]), arguments
    wide = row["ids"] is torch.int64
    weights, ids, zero_expert_weights = route_op(
        logits, tensors.bias_E, tensors.table_VK, token_ids, [], format_spec(spec), wide
    )
    return Routed(
        Routing(weights, ids), zero_expert_weights if spec.zero_experts else None
    ), arguments


def test_all_pairs_of_values_and_all_rules_are_covered() -> None:
    assert draw_rows().unmet() == []
    reasons = ("refused: ", "bias values without", "spaced rows without")
    assert all(reason.startswith(reasons) for reason in draw_rows().impossible().values())


@pytest.mark.share(2)
@pytest.mark.parametrize("row", draw_rows().accepted, ids=name_of)
def test_accepted_options_equal_the_reference(
    row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_row(row, monkeypatch)


@pytest.mark.parametrize("implementation", ["kernel", "torch"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_eps_is_added_once_if_there_is_a_floor(
    score: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If eps were added twice only when there is a floor, tests of one option would still pass."""
    defaults = {axis.name: axis.values[0] for axis in AXES}
    changes = {"eps, floor": (0.25, 0.5), "renormalize": True, "top-k": 1, "values": "faint"}
    check_row(defaults | changes | {"score": score, "call": implementation}, monkeypatch)


def check_row(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(row)
    assert spec.columns(row["experts"]) == _num_columns(row)
    routed, arguments = call_route(row, spec, monkeypatch)
    routing = routed.routing
    assert routing.topk_ids_TK.dtype is row["ids"]
    assert tuple(routing.topk_ids_TK.shape) == (row["tokens"], row["top-k"])
    assert disagreements(routed, *arguments) == []


@pytest.mark.parametrize(
    ("rule", "row"),
    [pytest.param(*refusal, id=name_of(refusal)) for refusal in draw_rows().refused],
)
def test_refused_options_raise_the_error_of_the_rule(
    rule: Refusal, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(rule.error, match=rule.message):
        call_route(row, make_spec(row), monkeypatch)
