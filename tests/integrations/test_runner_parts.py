"""Parts composed of registered stages (pre-permute, core, post-permute), and comparison of fused
parts with their staged parts.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import toy_backend
from devices import DEVICE
from runner_stage_fixtures import NO_EP, PROBLEM, make_pools_fixture, make_stages_fixture
from test_runner_stages import REGISTER, Core, fused, post_permute, pre_permute
from toy_backend import FusedToyExperts, ToyExperts, ToyInput, ToyOutput

from experts import StagedTritonExperts, TritonExperts
from experts.staged import make_experts, make_fused_experts
from modular_kernel import runner
from modular_kernel.catalog import check, make_kernel, this_machine
from modular_kernel.errors import ConfigurationError, UnknownPartError
from modular_kernel.runner import (
    RunnerCall,
    register_core,
    register_fused_func,
    register_post_permute,
    register_pre_permute,
)
from modular_kernel.spec.problem import ActivationFormat, Combine, Reduce
from modular_kernel.testing import Case
from modular_kernel.testing.random_inputs import random_inputs
from modular_kernel.testing.verify.checks import check_staged_reference
from modular_kernel.testing.verify.one_process import prove
from modular_kernel.testing.verify.trial import Trial

pools, stages = make_pools_fixture(), make_stages_fixture(REGISTER)


INVALID_REQUIREMENTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"combine": 1}, "requires of X: got combine"),
    ({"activation_format": ActivationFormat.STANDARD}, "requires of X: got activation_format"),
    ({"top_k": 3}, "X.requires.top_k: got 3"),
    ({"reduce": Reduce.NAIVE_BATCHED}, "X.requires.reduce for standard tokens: got naive_batched"),
)


@pytest.mark.usefixtures("stages")
def test_requirements_are_checked_at_construction() -> None:
    for requires, message in INVALID_REQUIREMENTS:
        with pytest.raises(ConfigurationError, match=message):
            make_experts("X", "x", "standard", **requires)
    for name in ("a b", ""):
        with pytest.raises(ConfigurationError, match="name of a part"):
            make_experts(name, "x", "standard")
    with pytest.raises(UnknownPartError, match="pre-permute"):
        make_experts("X", "x", "deepep_ll")


@pytest.mark.usefixtures("stages")
def test_every_call_has_its_own_state() -> None:
    states = []

    def record_state(result: ToyOutput, call: RunnerCall[Any]) -> None:
        states.append(call.state)
        post_permute(result, call)

    register_pre_permute("deepep_normal", "x")(pre_permute)
    register_post_permute("x", "deepep_normal")(record_state)
    part = make_experts("X", "x", "deepep_normal")
    kernel = make_kernel(NO_EP, part, PROBLEM)
    x, weights, routing = random_inputs(PROBLEM, DEVICE)
    calls = (x, x.flip(0))
    expected = [kernel(call_x, weights, routing) for call_x in calls]
    first_call, second_call = (kernel.start(call_x, weights, routing) for call_x in calls)
    assert torch.equal(second_call.finish(), expected[1])
    assert torch.equal(first_call.finish(), expected[0])
    assert len({id(state) for state in states}) == 4
    assert all(isinstance(state, toy_backend.ToyState) for state in states)


class InputOfAnotherBackend(ToyInput):
    @property
    def runner_backend(self) -> str:
        return "toys"


@pytest.mark.usefixtures("pools")
@pytest.mark.parametrize("result_kind", ["toys", "none"])
def test_results_of_another_backend_are_refused_with_both_names(result_kind: str) -> None:
    def pre_permute_with_wrong_result(call: RunnerCall[Any]) -> Any:
        valid = pre_permute(call)
        return InputOfAnotherBackend(**vars(valid)) if result_kind == "toys" else valid.rows

    register_pre_permute("standard", "x")(pre_permute_with_wrong_result)
    register_post_permute("x", "standard")(post_permute)
    register_core("x")(Core)
    kernel = make_kernel(NO_EP, make_experts("X", "x", "standard"), PROBLEM)
    message = {
        "toys": "pre-permute of 'x': got a result of 'toys', need a result of 'x'",
        "none": "pre-permute of 'x': got Tensor, need RunnerInput",
    }
    with pytest.raises(ConfigurationError, match=message[result_kind]):
        kernel(*random_inputs(PROBLEM, DEVICE))


def test_a_fused_part_inherits_the_declarations_of_its_staged_part() -> None:
    assert FusedToyExperts.unfused is ToyExperts
    assert FusedToyExperts.requires == ToyExperts.requires
    problem_with_bias = replace(PROBLEM, bias=True)
    rules = [
        [rejection.rule for rejection in check(NO_EP, part, problem_with_bias).rejections]
        for part in (ToyExperts, FusedToyExperts)
    ]
    assert rules == [["bias"], ["bias"]]
    with pytest.raises(UnknownPartError, match="fused operation"):
        make_fused_experts("X", "none", "nobody")
    with pytest.raises(ConfigurationError, match="got the part TritonExperts, need a function"):
        make_fused_experts("X", "none", "triton")


def make_trial(part: type, **changes: Any) -> Trial:
    case = Case(NO_EP, part, replace(PROBLEM, **changes), "skips")  # type: ignore[arg-type]
    return Trial(case, this_machine())


@pytest.mark.usefixtures("stages")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_harness_compares_a_fused_part_with_its_staged_part(dtype: torch.dtype) -> None:
    staged = make_experts("X", "x", "standard")

    def fused_and_scaled(call: RunnerCall[Any]) -> None:
        fused(call)
        call.output.mul_(1.02)

    def fused_without_count(call: RunnerCall[Any]) -> None:
        fused(call)
        call.tokens.routing.invalid_ids.zero_()

    register_fused_func("right", "x", unfused=staged)(fused)
    register_fused_func("scaled", "x", unfused=staged)(fused_and_scaled)
    register_fused_func("uncounted", "x", unfused=staged)(fused_without_count)
    correct, scaled, uncounted = (
        make_fused_experts("F", name, "x") for name in ("right", "scaled", "uncounted")
    )
    # A staged part has no staged part to compare it with.
    assert list(check_staged_reference(make_trial(staged, dtype=dtype))) == []
    assert list(check_staged_reference(make_trial(correct, dtype=dtype))) == []
    assert [
        "relative difference" in failure
        for failure in check_staged_reference(make_trial(scaled, dtype=dtype))
    ] == [True]
    trial = Trial(
        Case(NO_EP, uncounted, replace(PROBLEM, dtype=dtype), "out_of_range"), this_machine()
    )  # type: ignore[arg-type]
    assert ["counted 0 invalid ids" in failure for failure in check_staged_reference(trial)] == [
        True
    ]


class ComparedTritonExperts(TritonExperts):
    """TritonExperts that the harness compares with StagedTritonExperts."""

    staged = StagedTritonExperts


def test_staged_triton_experts_have_the_requirements_of_triton_experts() -> None:
    op = runner.FUSED.find_fused_op("none", "triton")
    assert op is not None
    assert (op.implementation, op.unfused) == (TritonExperts, StagedTritonExperts)
    assert StagedTritonExperts.requires == TritonExperts.requires


CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"tokens": 1, "top_k": 1},
    {"tokens": 33, "top_k": 3, "routed_scaling_factor": 2.5},
    {"combine": Combine.TOPK_WEIGHTED, "bias": True},
    {"apply_router_weight_on_input": True},
    {"dtype": torch.bfloat16, "activation": "swiglu_oai:alpha=1.7,limit=7.0,interleaved=true"},
    {"quant": "fp8_w8a8_tensor"},
    {"quant": "fp8_w8a8_channel", "tokens": 1},
    {"quant": "fp8_w8a8_block:block=32x32", "dtype": torch.bfloat16},
    {"quant": "int8_w8a8_channel", "lora": "adapters=3,rank=16"},
    {"quant": "int8_w8a16_group:group=32,zero_points=true"},
    {"quant": "int4_w4a16_group:group=32", "dtype": torch.bfloat16},
)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_staged_triton_experts_equal_triton_experts(change: dict[str, Any]) -> None:
    """The staged part passes the checks of the harness, and equals the fused part."""
    problem = replace(PROBLEM, **change)
    assert prove(Case(NO_EP, StagedTritonExperts, problem, "skips")).failures == ()  # type: ignore[arg-type]
    assert (
        list(
            check_staged_reference(
                Trial(Case(NO_EP, ComparedTritonExperts, problem, "skips"), this_machine())
            )
        )
        == []
    )  # type: ignore[arg-type]
