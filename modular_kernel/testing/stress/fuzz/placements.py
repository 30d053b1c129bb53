"""Fuzz target: call functions that make or read expert placements with junk arguments.

A placement maps experts to slots of ranks. The functions may only raise errors of this package.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st

from modular_kernel.spec.placement import Placement, pairs_to_slots, rank_tiers
from modular_kernel.testing.stress.fuzz.junk import junk, shorten
from modular_kernel.testing.stress.fuzz.outcome import (
    CORRECT,
    INVALID_ACCEPTED,
    FuzzOutcome,
    run_or_classify,
)
from modular_kernel.testing.stress.fuzz.target import Target, import_object

_PLACEMENT = Placement.linear(6, 3).with_copies({0: (1,), 1: (2,)})
_TABLES = _PLACEMENT.tables()
_IDS = torch.tensor([[0, 1], [5, -1]])


def _call_balance(name: str, *arguments: Any, **options: Any) -> Any:
    return import_object(f"modular_kernel.layers.balance:{name}")(*arguments, **options)


def _rebalance_by_hosts(hosts: Any, groups: Any) -> Any:
    return _call_balance("rebalance", [1] * 6, [3] * 3, hosts=hosts, groups=groups)


_CALLS: tuple[tuple[str, Callable[..., Any], int], ...] = (
    ("Placement", Placement, 1),
    ("linear", Placement.linear, 2),
    ("round_robin", Placement.round_robin, 2),
    ("of_table", Placement.of_table, 2),
    ("from_eplb", Placement.from_eplb, 2),
    ("without", _PLACEMENT.without, 1),
    ("with_copies", _PLACEMENT.with_copies, 1),
    ("expert_map", _PLACEMENT.expert_map, 1),
    ("tables", lambda tiers: _PLACEMENT.tables(tiers=tiers), 1),
    ("near_ranks", rank_tiers, 2),
    (
        "rank_loads",
        lambda load, hosts: _call_balance("rank_loads", load, _PLACEMENT, ranks_per_host=hosts),
        2,
    ),
    ("rank_loads of", lambda placement: _call_balance("rank_loads", [1.0] * 6, placement), 1),
    ("rebalance", partial(_call_balance, "rebalance"), 2),
    ("rebalance by hosts", _rebalance_by_hosts, 2),
    ("moves", partial(_call_balance, "moves"), 2),
    ("pairs_to_slots", lambda ids: pairs_to_slots(ids, _TABLES), 1),
    ("pairs_to_slots by", lambda tables: pairs_to_slots(_IDS, tables), 1),
    ("pairs_to_slots from", lambda first: pairs_to_slots(_IDS, _TABLES, first_token=first), 1),
)


_CALLS_BY_NAME = {name: (call, count) for name, call, count in _CALLS}
_LOAD_FUNCTIONS = ("rank_loads", "rebalance")  # their first argument, the loads, may be floats


@st.composite
def _arguments(draw: st.DrawFn) -> Any:
    """Draw junk, a plausible number, or a list, tuple, nested list or dict with such values."""
    value = draw(st.one_of(st.integers(-1, 6), junk))
    values = draw(st.lists(st.one_of(st.integers(0, 2), st.just(value)), max_size=3))
    kinds = (value, value, values, tuple(values), [values], (tuple(values),))
    return draw(st.sampled_from((*kinds, {draw(st.integers(0, 5)): values})))


@st.composite
def _calls(draw: st.DrawFn) -> tuple[str, list[Any]]:
    name = draw(st.sampled_from(sorted(_CALLS_BY_NAME)))
    return name, [draw(_arguments()) for _ in range(_CALLS_BY_NAME[name][1])]


def check_placement_call(case: tuple[str, list[Any]]) -> FuzzOutcome:
    """Call a function that makes or reads a placement. Errors must be typed."""
    name, arguments = case
    call, _ = _CALLS_BY_NAME[name]
    description = f"{name}({', '.join(map(_format_junk, arguments))})"
    result = run_or_classify(description, lambda: call(*arguments))
    if isinstance(result, FuzzOutcome):
        return result
    if any(_contains_invalid_id(value) for value in arguments[name in _LOAD_FUNCTIONS :]):
        return FuzzOutcome(INVALID_ACCEPTED, description)
    return FuzzOutcome(CORRECT, description)


def _format_junk(value: Any) -> str:
    if isinstance(value, list | tuple) and len(value) < 5:
        return f"[{', '.join(map(_format_junk, value))}]"
    return shorten(value)


def _contains_invalid_id(value: Any) -> bool:
    """Return whether `value` contains a bool, float or text, which cannot be a rank or expert."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        return any(map(_contains_invalid_id, value))
    return isinstance(value, bool | float | complex | str | bytes)


TARGETS: tuple[Target[Any], ...] = (Target("placements", 1, _calls(), check_placement_call),)
