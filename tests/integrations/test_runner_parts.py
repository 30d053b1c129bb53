"""Parts composed of registered stages, and fused operations compared with their staged
equivalents."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import toy_backend
from devices import DEVICE
from runner_stage_fixtures import NO_EP, PROBLEM, make_pools_fixture, make_stages_fixture
from test_runner_stages import REGISTER, Core, fused, post, pre
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


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"combine": 1}, "requires of X: got combine"),
    ({"activation_format": ActivationFormat.STANDARD}, "requires of X: got activation_format"),
    ({"top_k": 3}, "X.requires.top_k: got 3"),
    ({"reduce": Reduce.NAIVE_BATCHED}, "X.requires.reduce for standard tokens: got naive_batched"),
)


@pytest.mark.usefixtures("stages")
def test_requirements_are_checked_at_construction() -> None:
    for requires, words in WRONG:
        with pytest.raises(ConfigurationError, match=words):
            make_experts("X", "x", "standard", **requires)
    for name in ("a b", ""):
        with pytest.raises(ConfigurationError, match="name of a part"):
            make_experts(name, "x", "standard")
    with pytest.raises(UnknownPartError, match="pre-permute"):
        make_experts("X", "x", "deepep_ll")


@pytest.mark.usefixtures("stages")
def test_every_call_has_its_own_state() -> None:
    states = []

    def watching(result: ToyOutput, call: RunnerCall[Any]) -> None:
        states.append(call.state)
        post(result, call)

    register_pre_permute("deepep_normal", "x")(pre)
    register_post_permute("x", "deepep_normal")(watching)
    part = make_experts("X", "x", "deepep_normal")
    kernel = make_kernel(NO_EP, part, PROBLEM)
    (x, weights, routing), expected = random_inputs(PROBLEM, DEVICE), []
    calls = (x, x.flip(0))
    expected = [kernel(each, weights, routing) for each in calls]
    one, two = (kernel.start(each, weights, routing) for each in calls)
    assert torch.equal(two.finish(), expected[1])
    assert torch.equal(one.finish(), expected[0])
    assert len({id(state) for state in states}) == 4
    assert all(isinstance(state, toy_backend.ToyState) for state in states)


class TritonObject(ToyInput):
    @property
    def runner_backend(self) -> str:
        return "toys"


@pytest.mark.usefixtures("pools")
@pytest.mark.parametrize("made", ["toys", "none"])
def test_an_input_of_another_backend_is_refused_with_both_names(made: str) -> None:
    def wrong(call: RunnerCall[Any]) -> Any:
        good = pre(call)
        return TritonObject(**vars(good)) if made == "toys" else good.rows

    register_pre_permute("standard", "x")(wrong)
    register_post_permute("x", "standard")(post)
    register_core("x")(Core)
    kernel = make_kernel(NO_EP, make_experts("X", "x", "standard"), PROBLEM)
    words = {
        "toys": "pre-permute of 'x': got a result of 'toys', need a result of 'x'",
        "none": "pre-permute of 'x': got Tensor, need RunnerInput",
    }
    with pytest.raises(ConfigurationError, match=words[made]):
        kernel(*random_inputs(PROBLEM, DEVICE))


def test_a_fused_part_inherits_the_declarations_of_its_staged_part() -> None:
    assert FusedToyExperts.unfused is ToyExperts
    assert FusedToyExperts.requires == ToyExperts.requires
    gelu = replace(PROBLEM, bias=True)
    rules = [
        [rejection.rule for rejection in check(NO_EP, part, gelu).rejections]
        for part in (ToyExperts, FusedToyExperts)
    ]
    assert rules == [["bias"], ["bias"]]
    with pytest.raises(UnknownPartError, match="fused operation"):
        make_fused_experts("X", "none", "nobody")
    with pytest.raises(ConfigurationError, match="got the part TritonExperts, need a function"):
        make_fused_experts("X", "none", "triton")


def trial_of(part: type, **changes: Any) -> Trial:
    case = Case(NO_EP, part, replace(PROBLEM, **changes), "skips")  # type: ignore[arg-type]
    return Trial(case, this_machine())


@pytest.mark.usefixtures("stages")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_harness_compares_a_fused_part_with_its_staged_part(dtype: torch.dtype) -> None:
    staged = make_experts("X", "x", "standard")

    def scaled(call: RunnerCall[Any]) -> None:
        fused(call)
        call.output.mul_(1.02)

    def uncounted(call: RunnerCall[Any]) -> None:
        fused(call)
        call.tokens.routing.invalid_ids.zero_()

    register_fused_func("right", "x", unfused=staged)(fused)
    register_fused_func("scaled", "x", unfused=staged)(scaled)
    register_fused_func("uncounted", "x", unfused=staged)(uncounted)
    right, wrong, silent = (
        make_fused_experts("F", name, "x") for name in ("right", "scaled", "uncounted")
    )
    assert list(check_staged_reference(trial_of(staged, dtype=dtype))) == []  # it has none
    assert list(check_staged_reference(trial_of(right, dtype=dtype))) == []
    assert [
        "relative difference" in found
        for found in check_staged_reference(trial_of(wrong, dtype=dtype))
    ] == [True]
    trial = Trial(
        Case(NO_EP, silent, replace(PROBLEM, dtype=dtype), "out_of_range"), this_machine()
    )  # type: ignore[arg-type]
    assert ["counted 0 invalid ids" in found for found in check_staged_reference(trial)] == [True]


class Fused(TritonExperts):
    staged = StagedTritonExperts


def test_our_staged_part_has_the_declarations_of_triton_experts() -> None:
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
def test_our_staged_part_equals_the_fused_one(change: dict[str, Any]) -> None:
    """Every check of the harness on the staged part, with the fused one in comparison."""
    problem = replace(PROBLEM, **change)
    assert prove(Case(NO_EP, StagedTritonExperts, problem, "skips")).failures == ()  # type: ignore[arg-type]
    assert (
        list(check_staged_reference(Trial(Case(NO_EP, Fused, problem, "skips"), this_machine())))
        == []
    )  # type: ignore[arg-type]
