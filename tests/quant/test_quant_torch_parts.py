"""The torch pairings pass with every quantized scheme, within the tolerance of the test harness."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from experts import NaiveBatchedExperts, TorchExperts
from modular_kernel import reference
from modular_kernel.catalog import check, make_kernel, this_machine
from modular_kernel.compatibility.support import ExpertsRequirements
from modular_kernel.contracts import CallState
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.ops.quantize import quantize_values
from modular_kernel.quant.quantized_weights import (
    ACTIVATION_SCHEMES,
    SCHEMES,
    quantize_weights,
    static_scale,
)
from modular_kernel.spec.problem import Combine, Machine, Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import Dispatched, ExpertWeights, Routing, StandardTokens
from modular_kernel.testing.cases.inputs import Inputs, make_inputs
from modular_kernel.testing.random_inputs import random_inputs
from modular_kernel.testing.verify.compare import Comparison, compare
from modular_kernel.workspace import Workspace
from prepare_finalize import BatchedPrepareAndFinalize, MoEPrepareAndFinalizeNoEP

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NO_EP = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
BATCHED = ("BatchedPrepareAndFinalize", "NaiveBatchedExperts")
# H and I are not multiples of the groups and blocks below, but even, so that they can be packed.
BASE = Problem(tokens=19, hidden=42, intermediate=70, experts=5, top_k=2, dtype=torch.bfloat16)
SCHEME_NAMES = (
    "fp8_w8a8_tensor",
    "fp8_w8a8_tensor:static=true",
    "fp8_w8a8_channel",
    "fp8_w8a8_block:block=16x32",
    "int8_w8a8_channel",
    "int8_w8a8_block:block=32x16",
    "fp8_w8a16_tensor",
    "fp8_w8a16_channel",
    "fp8_w8a16_block:block=16x32",
    "int8_w8a16_channel",
    "int8_w8a16_group:group=32",
    "int8_w8a16_group:group=32,zero_points=true",
    "int4_w4a16_group:group=32",
    "int4_w4a16_group:group=32,zero_points=true",
    "int4_w4a16_group:group=70",
    "int8_w8a16_act_order:group=32",
    "int4_w4a16_act_order:group=32,zero_points=true",
    "mxfp4_w4a16",
    "nvfp4_w4a16",
    "nvfp4_w4a4",
)
WITH_DISPATCHED_SCALES = tuple(
    scheme_name
    for scheme_name in SCHEME_NAMES
    if QuantScheme.parse(scheme_name).dispatched_quantized
)
each_scheme = pytest.mark.parametrize("scheme_name", SCHEME_NAMES)
each_scheme_with_dispatched_scales = pytest.mark.parametrize("scheme_name", WITH_DISPATCHED_SCALES)
each_pair = pytest.mark.parametrize("pair", [NO_EP, BATCHED], ids=lambda pair: pair[1])

F32 = {"dtype": torch.float32}
CASES: tuple[tuple[Mapping[str, Any], str], ...] = (
    ({}, "uniform"),
    (F32, "skips"),
    ({"tokens": 0}, "uniform"),
    ({"tokens": 1, "top_k": 1, "bias": True, **F32}, "uniform"),
    ({"top_k": 8, "experts": 9, "bias": True}, "duplicates"),
    ({"hidden": 64, "intermediate": 96, "dtype": torch.float16}, "out_of_range"),
    ({"hidden": 130, "intermediate": 34, "activation": "swiglu_oai"}, "zipf"),
    ({"activation": "relu2", "expert_map": True, "local_experts": 3, **F32}, "empty_experts"),
    ({"combine": Combine.TOPK_WEIGHTED, "routed_scaling_factor": 2.5}, "skips"),
    ({"apply_router_weight_on_input": True, "top_k": 1, "bias": True, **F32}, "skips"),
    ({"inplace": True}, "all_skipped"),
)


def make_quantized_inputs(problem: Problem, kind: str, seed: int = 0) -> Inputs:
    """Return the harness's inputs, with weights quantized by `quantize_weights`."""
    unquantized = make_inputs(replace(problem, quant="none"), kind, DEVICE, seed=seed)
    weights = unquantized.weights
    if problem.scheme.static:
        scales = (static_scale(problem, max_value, DEVICE) for max_value in (4.5, 20.0))
        weights = replace(weights, **dict(zip(("a1_scale", "a2_scale"), scales, strict=True)))
    return replace(unquantized, weights=quantize_weights(weights, problem))


def call_kernel(
    pair: tuple[str, str], problem: Problem, inputs: Inputs, **options: Any
) -> torch.Tensor:
    kernel = make_kernel(*pair, problem, machine=this_machine(), poison=True, **options)
    x = inputs.x_TH.clone() if problem.inplace else inputs.x_TH
    return kernel(x, inputs.weights, inputs.routing)


def compare_with_reference(out: torch.Tensor, problem: Problem, inputs: Inputs) -> Comparison:
    arguments = (inputs.x_TH, inputs.weights, inputs.routing, problem)
    return compare(
        out,
        reference.float64_reference(*arguments),
        reference.rounded_reference(*arguments),
        problem,
    )


def test_every_scheme_is_covered_and_declared() -> None:
    assert {QuantScheme.parse(scheme_name).name for scheme_name in SCHEME_NAMES} | {
        "none"
    } == SCHEMES
    for part in (TorchExperts, NaiveBatchedExperts):
        assert part.requires.schemes == SCHEMES
    for pf in (MoEPrepareAndFinalizeNoEP, BatchedPrepareAndFinalize):
        assert pf.requires.dispatch_schemes == ACTIVATION_SCHEMES


@pytest.mark.share(3)
@each_scheme
@each_pair
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join([*map(str, case[0]), case[1]]))
def test_outputs_are_within_tolerance(
    scheme_name: str, pair: tuple[str, str], case: tuple[Any, str]
) -> None:
    changes, kind = case
    problem = replace(BASE, quant=scheme_name, **changes)
    inputs = make_quantized_inputs(problem, kind)
    comparison = compare_with_reference(call_kernel(pair, problem, inputs), problem, inputs)
    assert comparison.ok, comparison.problems


@each_scheme
def test_outputs_of_both_pairings_agree(scheme_name: str) -> None:
    """Both pairings round the same values. Only the order of sums differs."""
    problem = replace(BASE, quant=scheme_name, dtype=torch.float32)
    inputs = make_quantized_inputs(problem, "duplicates")
    standard, batched = (call_kernel(pair, problem, inputs) for pair in (NO_EP, BATCHED))
    assert float((standard - batched).norm() / standard.norm()) < 3e-3


@each_scheme_with_dispatched_scales
@each_pair
def test_dispatched_rows_have_scales(scheme_name: str, pair: tuple[str, str]) -> None:
    """Scales have the layout that experts require, and rows times scales equal x."""
    problem = replace(BASE, quant=scheme_name)
    inputs = make_quantized_inputs(problem, "uniform")
    kernel = make_kernel(*pair, problem, machine=this_machine(), poison=True)
    workspace = Workspace(kernel.workspace_specs(19), DEVICE, poison=True)
    counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    tokens, _ = kernel.prepare_finalize.prepare(
        inputs.x_TH, inputs.routing, weights=inputs.weights, call=CallState(workspace, counter)
    )
    workspace.check_red_zones()
    scheme, scale = problem.scheme, tokens.scale
    max_x = float(inputs.x_TH.abs().max())
    groups = -(-42 // scheme.group[1]) if scheme.granularity == "block" else 1
    leading_shape = (19,) if isinstance(tokens, StandardTokens) else (5, 19)
    has_single_scale = scheme.activation_granularity == "tensor"
    assert scale is not None
    assert scale.shape == ((1,) if has_single_scale else (*leading_shape, groups))
    assert scale.dtype == torch.float32
    assert scale.is_contiguous()
    assert (scale is inputs.weights.a1_scale) == scheme.static
    for token in range(19):
        for row, row_scale in _find_dispatched_rows(token, tokens, inputs.routing):
            scale_per_column = row_scale.repeat_interleave(
                -(-42 // groups) if has_single_scale else _get_group_width(scheme)
            )[:42]
            error = (row.float() * scale_per_column - inputs.x_TH[token].float()).abs().max()
            assert float(error) <= 0.05 * max_x  # half a step of fp8 is a 28th of the maximum


def _get_group_width(scheme: QuantScheme) -> int:
    return scheme.group[1] if scheme.granularity == "block" else 42


def _find_dispatched_rows(
    token: int, tokens: Dispatched, routing: Routing
) -> list[tuple[Any, Any]]:
    """Return every row to which a token was dispatched, with its scale."""
    scale = tokens.scale
    assert scale is not None
    if isinstance(tokens, StandardTokens):
        return [(tokens.x_TH[token], scale if scale.dim() == 1 else scale[token])]
    rows_and_scales = []
    for expert in set(routing.topk_ids_TK[token].tolist()):
        earlier = (routing.topk_ids_TK[:token] == expert).any(1)
        slot = int(earlier.sum())
        row_scale = scale if scale.dim() == 1 else scale[expert, slot]
        rows_and_scales.append((tokens.x_eCH[expert, slot], row_scale))
    return rows_and_scales


@each_scheme_with_dispatched_scales
def test_weights_of_skipped_tokens_do_not_change_scales(scheme_name: str) -> None:
    """Router weights on the input multiply the values that are quantized."""
    changes = {"apply_router_weight_on_input": True, "top_k": 1, "dtype": torch.float32}
    problem = replace(BASE, quant=scheme_name, **changes)
    inputs = make_quantized_inputs(problem, "uniform")
    ids, weights = inputs.routing.topk_ids_TK.clone(), inputs.routing.topk_weights_TK.clone()
    ids[[2, 5]] = -1
    with_normal_weights = call_kernel(
        BATCHED, problem, replace(inputs, routing=Routing(weights.clone(), ids))
    )
    weights[2], weights[5] = float("nan"), 1e6
    with_extreme_weights = call_kernel(
        BATCHED, problem, replace(inputs, routing=Routing(weights, ids))
    )
    assert torch.equal(with_extreme_weights, with_normal_weights)


@each_pair
def test_per_tensor_scale_of_h_is_common_to_all_experts(pair: tuple[str, str]) -> None:
    """The h of expert 1 is so much smaller than that of expert 0 that it is quantized to zero."""
    changes = {"tokens": 2, "top_k": 1, "experts": 2, "dtype": torch.float32}
    problem = replace(BASE, quant="fp8_w8a8_tensor", activation="relu2", **changes)
    inputs = make_quantized_inputs(problem, "uniform")
    weights, x = inputs.weights, inputs.x_TH.clone()
    assert weights.w1_scale is not None
    x[1] = x[0]
    w1_scale = weights.w1_scale * torch.tensor([1.0, 1e-4], device=DEVICE)
    ids = torch.tensor([[0], [1]], dtype=torch.int32, device=DEVICE)
    routing = Routing(inputs.routing.topk_weights_TK, ids)
    inputs = Inputs(x, replace(weights, w1_scale=w1_scale), routing)
    outputs_of_both = call_kernel(pair, problem, inputs)
    assert outputs_of_both[0].any()
    assert not outputs_of_both[1].any()
    only_expert_1 = replace(
        inputs, routing=Routing(routing.topk_weights_TK, ids.masked_fill(ids == 0, -1))
    )
    assert call_kernel(pair, problem, only_expert_1)[1].any()


@each_scheme
@pytest.mark.parametrize("tokens", [7, 8, 17])
def test_chunked_calls_are_within_tolerance(scheme_name: str, tokens: int) -> None:
    """All chunks share a per-tensor scale, but not per-token scales."""
    problem = replace(BASE, quant=scheme_name, tokens=tokens, chunk_tokens=8)
    inputs = make_quantized_inputs(problem, "skips")
    comparison = compare_with_reference(call_kernel(NO_EP, problem, inputs), problem, inputs)
    assert comparison.ok, comparison.problems


@pytest.mark.share(3)
@each_scheme
@each_pair
def test_plans_and_repeated_calls_are_equal(scheme_name: str, pair: tuple[str, str]) -> None:
    problem = replace(BASE, quant=scheme_name)
    inputs, other_inputs = (
        make_quantized_inputs(problem, "skips"),
        make_quantized_inputs(problem, "uniform", seed=1),
    )
    kernel = make_kernel(*pair, problem, machine=this_machine(), poison=True)
    first = kernel(inputs.x_TH, inputs.weights, inputs.routing)
    plan = kernel.plan()
    plan(other_inputs.x_TH, other_inputs.weights, other_inputs.routing)
    assert torch.equal(plan(inputs.x_TH, inputs.weights, inputs.routing), first)
    assert torch.equal(kernel(inputs.x_TH, inputs.weights, inputs.routing), first)
    few = kernel(inputs.x_TH[:3], inputs.weights, _take_first_tokens(inputs.routing, 3))
    assert torch.equal(
        plan(inputs.x_TH[:3], inputs.weights, _take_first_tokens(inputs.routing, 3)), few
    )


def _take_first_tokens(routing: Routing, tokens: int) -> Routing:
    return Routing(routing.topk_weights_TK[:tokens], routing.topk_ids_TK[:tokens])


class QuantizingExperts(TorchExperts):
    """TorchExperts that receive unquantized activations and quantize them."""

    requires: ExpertsRequirements = replace(TorchExperts.requires, quantizes_input=True)

    def apply(self, tokens: Dispatched, *, weights: ExpertWeights, **arguments: Any) -> None:
        assert isinstance(tokens, StandardTokens)
        assert tokens.scale is None
        assert tokens.x_TH.dtype == self.problem.dtype
        x, scheme = tokens.x_TH.float(), self.problem.scheme
        q, scale = quantize_values(x, scheme, weights.a1_scale if scheme.static else None)
        tokens = replace(tokens, x_TH=q, scale=scale)
        super().apply(tokens, weights=weights, **arguments)


@each_scheme_with_dispatched_scales
def test_experts_may_quantize_activations(scheme_name: str) -> None:
    problem = replace(BASE, quant=scheme_name)
    inputs = make_quantized_inputs(problem, "uniform")
    parts = MoEPrepareAndFinalizeNoEP(problem), QuantizingExperts(problem)
    kernel = FusedMoEModularKernel(*parts, machine=this_machine())
    out = kernel(inputs.x_TH, inputs.weights, inputs.routing)
    comparison = compare_with_reference(out, problem, inputs)
    assert comparison.ok, comparison.problems
    quantizes_input = replace(NaiveBatchedExperts.requires, quantizes_input=True)
    batched = type("Batched", (NaiveBatchedExperts,), {"requires": quantizes_input})
    verdict = check(BatchedPrepareAndFinalize, batched, problem)
    assert [r.rule for r in verdict.rejections] == ["dispatch_quant"]


@each_scheme
def test_random_inputs_are_quantized(scheme_name: str) -> None:
    problem = replace(BASE, quant=scheme_name)
    x, weights, routing = random_inputs(problem, DEVICE)
    out = call_kernel(NO_EP, problem, Inputs(x, weights, routing))
    assert compare_with_reference(out, problem, Inputs(x, weights, routing)).ok


def test_odd_rows_are_refused_before_construction() -> None:
    problem = replace(BASE, quant="int4_w4a16_group", hidden=43)
    verdict = check(*NO_EP, problem)
    assert [r.rule for r in verdict.rejections] == ["packing"]


def test_strided_weights_give_equal_outputs() -> None:
    problem = replace(BASE, quant="int4_w4a16_group:group=32")
    inputs = make_quantized_inputs(problem, "uniform")
    weights: ExpertWeights = inputs.weights
    strided = replace(weights, w1=weights.w1.mT.contiguous().mT, w2=weights.w2.mT.contiguous().mT)
    expected = call_kernel(NO_EP, problem, inputs)
    assert torch.equal(call_kernel(NO_EP, problem, replace(inputs, weights=strided)), expected)


@pytest.mark.parametrize("part", [MoEPrepareAndFinalizeNoEP, BatchedPrepareAndFinalize])
@pytest.mark.parametrize(
    ("quant", "arch", "refused"),
    [
        ("fp8_w8a8_channel", (8, 6), True),
        ("fp8_w8a8_channel", (8, 9), False),
        ("int8_w8a8_channel", (8, 0), False),
        ("none", (8, 0), False),
    ],
)
def test_float8_requires_a_gpu_that_supports_it(
    part: Any, quant: str, arch: tuple[int, int], refused: bool
) -> None:
    problem = Problem(2, 64, 64, 2, 1, quant=quant)
    rejections = part.extra_rejections(problem, Machine("cuda", arch))
    assert [r.rule for r in rejections] == (["arch"] if refused else [])
    assert part.extra_rejections(problem, Machine("cpu")) == ()
