"""The router weight of a skipped pair is not used, even if it is NaN or infinite."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from modular_kernel.catalog import check_all, make_kernel, this_machine
from modular_kernel.errors import WeightsError
from modular_kernel.reference import float64_reference, rounded_reference
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.random_inputs import random_inputs

BASE = Problem(tokens=16, hidden=64, intermediate=32, experts=8, top_k=2, dtype=torch.float32)
WEIGHTED, UNWEIGHTED = {"combine": Combine.TOPK_WEIGHTED}, {"combine": Combine.TOPK_UNWEIGHTED}
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 1, "routed_scaling_factor": 2.5},
    {"apply_router_weight_on_input": True},
    WEIGHTED,
    UNWEIGHTED,
    {"expert_map": True, "local_experts": 5, "bias": True},
    {"expert_map": True, "local_experts": 5, "apply_router_weight_on_input": True},
    {"expert_map": True, "local_experts": 5, **WEIGHTED},
    {"quant": "fp8_w8a8_tensor", "dtype": torch.bfloat16},
    {"quant": "int8_w8a8_channel", "apply_router_weight_on_input": True},
    {"chunk_tokens": 5},
)
MACHINE = this_machine()
CASES = [
    (verdict.prepare_finalize, verdict.experts, changes)
    for changes in CHANGES
    for verdict in check_all(replace(BASE, **changes), MACHINE)
    if verdict.ok
]


def make_call_with_skips(
    problem: Problem,
) -> tuple[torch.Tensor, ExpertWeights, Routing, torch.Tensor]:
    """Return the arguments of a call, and the mask of its skipped pairs.

    A pair is skipped if its id is -1 or invalid, or if its expert is on another rank.
    """
    x_TH, weights, routing = random_inputs(problem, torch.device(MACHINE.device))
    ids = routing.topk_ids_TK
    ids[0], ids[3, 0], ids[5, -1], ids[8] = -1, -1, problem.experts, -7
    is_skipped = (ids < 0) | (ids >= problem.experts)
    if weights.expert_map is not None:
        is_skipped |= weights.expert_map[ids.clamp(0, problem.experts - 1).long()] < 0
    assert is_skipped.any()
    assert not is_skipped.all()
    return x_TH, weights, routing, is_skipped


@pytest.mark.parametrize(("pf", "experts", "changes"), CASES, ids=str)
def test_skipped_router_weight_has_no_effect_in_any_pairing(
    pf: str, experts: str, changes: dict[str, Any]
) -> None:
    problem = replace(BASE, **changes)
    x_TH, weights, routing, is_skipped = make_call_with_skips(problem)
    kernel = make_kernel(pf, experts, problem, machine=MACHINE)
    expected = kernel(x_TH, weights, routing)
    assert expected.isfinite().all()
    for value in (float("nan"), float("inf"), -float("inf")):
        weights_TK = routing.topk_weights_TK.masked_fill(is_skipped, value)
        actual = kernel(x_TH, weights, Routing(weights_TK, routing.topk_ids_TK))
        assert torch.equal(actual, expected), value


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("reference", [float64_reference, rounded_reference])
def test_skipped_router_weight_has_no_effect_in_the_reference(
    reference: Any, changes: dict[str, Any]
) -> None:
    problem = replace(BASE, **changes)
    x_TH, weights, routing, is_skipped = make_call_with_skips(problem)
    expected = reference(x_TH, weights, routing, problem)
    assert expected.isfinite().all()
    weights_TK = routing.topk_weights_TK.masked_fill(is_skipped, float("nan"))
    assert torch.equal(
        reference(x_TH, weights, Routing(weights_TK, routing.topk_ids_TK), problem), expected
    )
    # The weights of other pairs are used.
    weights_TK = routing.topk_weights_TK.masked_fill(~is_skipped, float("nan"))
    output = reference(x_TH, weights, Routing(weights_TK, routing.topk_ids_TK), problem)
    assert output.isnan().any() == (problem.combine is not Combine.TOPK_UNWEIGHTED)


def test_the_table_has_enough_cases() -> None:
    assert len({(pf, experts) for pf, experts, _ in CASES}) >= 2


# ------------------------------------------------------------------------------- the expert map

MAPPED = replace(BASE, expert_map=True, local_experts=5)
MAPPED_PAIRS = [
    (verdict.prepare_finalize, verdict.experts)
    for verdict in check_all(MAPPED, MACHINE)
    if verdict.ok
]


@pytest.mark.parametrize("value", [-2, -(2**31), 5, 2**31 - 1])
@pytest.mark.parametrize(("pf", "experts"), MAPPED_PAIRS, ids="+".join)
def test_invalid_map_entries_skip_pairs_or_are_refused(pf: str, experts: str, value: int) -> None:
    """Invalid entries of the expert map skip pairs, and checked kernels refuse such entries."""
    x_TH, weights, routing, _ = make_call_with_skips(MAPPED)
    assert weights.expert_map is not None
    valid_map, invalid_map = weights.expert_map.clone(), weights.expert_map.clone()
    valid_map[2], invalid_map[2] = -1, value
    valid_weights = replace(weights, expert_map=valid_map)
    invalid_weights = replace(weights, expert_map=invalid_map)
    kernel = make_kernel(pf, experts, MAPPED, machine=MACHINE)
    expected = kernel(x_TH, valid_weights, routing).clone()
    assert torch.equal(kernel(x_TH, invalid_weights, routing), expected)
    checked_kernel = make_kernel(pf, experts, MAPPED, machine=MACHINE, checked=True)
    valid_routing = Routing(routing.topk_weights_TK, routing.topk_ids_TK.clamp(-1, 7))
    checked_kernel(x_TH, valid_weights, valid_routing)
    for call in (checked_kernel, checked_kernel.plan()):
        with pytest.raises(WeightsError) as caught:
            call(x_TH, invalid_weights, valid_routing)
        assert caught.value.got == f"1 value, the first {value} at 2"
        assert caught.value.need == "-1 or 0 to 4"
