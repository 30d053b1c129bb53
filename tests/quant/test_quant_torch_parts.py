"""The torch pairings with every quantized scheme, within the harness's own tolerance."""

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
from modular_kernel.tensors import ContiguousTokens, Dispatched, ExpertWeights, Routing
from modular_kernel.testing.cases.inputs import Inputs, make_inputs
from modular_kernel.testing.random_inputs import random_inputs
from modular_kernel.testing.verify.compare import Comparison, compare
from modular_kernel.workspace import Workspace
from prepare_finalize import BatchedPrepareAndFinalize, MoEPrepareAndFinalizeNoEP

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NO_EP = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
BATCHED = ("BatchedPrepareAndFinalize", "NaiveBatchedExperts")
# H and I ragged against every group and block below, and even, so that they can be packed.
BASE = Problem(tokens=19, hidden=42, intermediate=70, experts=5, top_k=2, dtype=torch.bfloat16)
TEXTS = (
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
FULL = tuple(text for text in TEXTS if QuantScheme.parse(text).dispatched_quantized)
each_scheme = pytest.mark.parametrize("text", TEXTS)
each_full = pytest.mark.parametrize("text", FULL)
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


def inputs_for(problem: Problem, kind: str, seed: int = 0) -> Inputs:
    """Return the harness's inputs, with weights quantized here."""
    plain = make_inputs(replace(problem, quant="none"), kind, DEVICE, seed=seed)
    weights = plain.weights
    if problem.scheme.static:
        scales = (static_scale(problem, most, DEVICE) for most in (4.5, 20.0))
        weights = replace(weights, **dict(zip(("a1_scale", "a2_scale"), scales, strict=True)))
    return replace(plain, weights=quantize_weights(weights, problem))


def run(pair: tuple[str, str], problem: Problem, inputs: Inputs, **options: Any) -> torch.Tensor:
    kernel = make_kernel(*pair, problem, machine=this_machine(), poison=True, **options)
    x = inputs.x_TH.clone() if problem.inplace else inputs.x_TH
    return kernel(x, inputs.weights, inputs.routing)


def judged(out: torch.Tensor, problem: Problem, inputs: Inputs) -> Comparison:
    arguments = (inputs.x_TH, inputs.weights, inputs.routing, problem)
    return compare(
        out,
        reference.float64_reference(*arguments),
        reference.rounded_reference(*arguments),
        problem,
    )


def test_every_scheme_is_covered_and_declared() -> None:
    assert {QuantScheme.parse(text).name for text in TEXTS} | {"none"} == SCHEMES
    for part in (TorchExperts, NaiveBatchedExperts):
        assert part.requires.schemes == SCHEMES
    for pf in (MoEPrepareAndFinalizeNoEP, BatchedPrepareAndFinalize):
        assert pf.requires.dispatch_schemes == ACTIVATION_SCHEMES


@pytest.mark.share(3)
@each_scheme
@each_pair
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join([*map(str, case[0]), case[1]]))
def test_within_tolerance(text: str, pair: tuple[str, str], case: tuple[Any, str]) -> None:
    changes, kind = case
    problem = replace(BASE, quant=text, **changes)
    inputs = inputs_for(problem, kind)
    found = judged(run(pair, problem, inputs), problem, inputs)
    assert found.ok, found.problems


@each_scheme
def test_both_pairings_agree(text: str) -> None:
    """They round the same values in the same places; only sums differ, and roundings of those."""
    problem = replace(BASE, quant=text, dtype=torch.float32)
    inputs = inputs_for(problem, "duplicates")
    one, other = (run(pair, problem, inputs) for pair in (NO_EP, BATCHED))
    assert float((one - other).norm() / one.norm()) < 3e-3


@each_full
@each_pair
def test_dispatched_scales(text: str, pair: tuple[str, str]) -> None:
    """The scales that experts receive: the layout of `Dispatched`, and the values of x."""
    problem = replace(BASE, quant=text)
    inputs = inputs_for(problem, "uniform")
    kernel = make_kernel(*pair, problem, machine=this_machine(), poison=True)
    workspace = Workspace(kernel.workspace_specs(19), DEVICE, poison=True)
    counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    tokens, _ = kernel.prepare_finalize.prepare(
        inputs.x_TH, inputs.routing, weights=inputs.weights, call=CallState(workspace, counter)
    )
    workspace.check_red_zones()
    scheme, scale = problem.scheme, tokens.scale
    largest = float(inputs.x_TH.abs().max())
    groups = -(-42 // scheme.group[1]) if scheme.granularity == "block" else 1
    lead = (19,) if isinstance(tokens, ContiguousTokens) else (5, 19)
    one = scheme.activation_granularity == "tensor"
    assert scale is not None
    assert scale.shape == ((1,) if one else (*lead, groups))
    assert scale.dtype == torch.float32
    assert scale.is_contiguous()
    assert (scale is inputs.weights.a1_scale) == scheme.static
    for token in range(19):
        for row, row_scale in _rows_of(token, tokens, inputs.routing):
            wide = row_scale.repeat_interleave(-(-42 // groups) if one else _width(scheme))[:42]
            error = (row.float() * wide - inputs.x_TH[token].float()).abs().max()
            assert float(error) <= 0.05 * largest  # fp8's half step: a 28th of the largest value


def _width(scheme: QuantScheme) -> int:
    return scheme.group[1] if scheme.granularity == "block" else 42


def _rows_of(token: int, tokens: Dispatched, routing: Routing) -> list[tuple[Any, Any]]:
    """Return every row to which a token was dispatched, and its scales."""
    scale = tokens.scale
    assert scale is not None
    if isinstance(tokens, ContiguousTokens):
        return [(tokens.x_TH[token], scale if scale.dim() == 1 else scale[token])]
    found = []
    for expert in set(routing.topk_ids_TK[token].tolist()):
        earlier = (routing.topk_ids_TK[:token] == expert).any(1)
        place = int(earlier.sum())
        rows = scale if scale.dim() == 1 else scale[expert, place]
        found.append((tokens.x_eCH[expert, place], rows))
    return found


@each_full
def test_the_weight_of_a_skipped_token_does_not_change_scales(text: str) -> None:
    """With weights on the input, they multiply what is quantized; that of a skipped token is not
    used.
    """
    changes = {"apply_router_weight_on_input": True, "top_k": 1, "dtype": torch.float32}
    problem = replace(BASE, quant=text, **changes)
    inputs = inputs_for(problem, "uniform")
    ids, weights = inputs.routing.topk_ids_TK.clone(), inputs.routing.topk_weights_TK.clone()
    ids[[2, 5]] = -1
    tame = run(BATCHED, problem, replace(inputs, routing=Routing(weights.clone(), ids)))
    weights[2], weights[5] = float("nan"), 1e6
    wild = run(BATCHED, problem, replace(inputs, routing=Routing(weights, ids)))
    assert torch.equal(wild, tame)


@each_pair
def test_a_scale_per_tensor_of_h_is_common_to_all_experts(pair: tuple[str, str]) -> None:
    """Expert 1's h is so much smaller than expert 0's that it is quantized to zero."""
    changes = {"tokens": 2, "top_k": 1, "experts": 2, "dtype": torch.float32}
    problem = replace(BASE, quant="fp8_w8a8_tensor", activation="relu2", **changes)
    inputs = inputs_for(problem, "uniform")
    weights, x = inputs.weights, inputs.x_TH.clone()
    assert weights.w1_scale is not None
    x[1] = x[0]
    small = weights.w1_scale * torch.tensor([1.0, 1e-4], device=DEVICE)
    ids = torch.tensor([[0], [1]], dtype=torch.int32, device=DEVICE)
    routing = Routing(inputs.routing.topk_weights_TK, ids)
    inputs = Inputs(x, replace(weights, w1_scale=small), routing)
    together = run(pair, problem, inputs)
    assert together[0].any()
    assert not together[1].any()
    alone = replace(inputs, routing=Routing(routing.topk_weights_TK, ids.masked_fill(ids == 0, -1)))
    assert run(pair, problem, alone)[1].any()


@each_scheme
@pytest.mark.parametrize("tokens", [7, 8, 17])
def test_chunks(text: str, tokens: int) -> None:
    """A scale per tensor is common to all chunks; one per token is not."""
    problem = replace(BASE, quant=text, tokens=tokens, chunk_tokens=8)
    inputs = inputs_for(problem, "skips")
    found = judged(run(NO_EP, problem, inputs), problem, inputs)
    assert found.ok, found.problems


@pytest.mark.share(3)
@each_scheme
@each_pair
def test_plans_and_repeats_are_equal(text: str, pair: tuple[str, str]) -> None:
    problem = replace(BASE, quant=text)
    inputs, other = inputs_for(problem, "skips"), inputs_for(problem, "uniform", seed=1)
    kernel = make_kernel(*pair, problem, machine=this_machine(), poison=True)
    first = kernel(inputs.x_TH, inputs.weights, inputs.routing)
    plan = kernel.plan()
    plan(other.x_TH, other.weights, other.routing)
    assert torch.equal(plan(inputs.x_TH, inputs.weights, inputs.routing), first)
    assert torch.equal(kernel(inputs.x_TH, inputs.weights, inputs.routing), first)
    few = kernel(inputs.x_TH[:3], inputs.weights, _first(inputs.routing, 3))
    assert torch.equal(plan(inputs.x_TH[:3], inputs.weights, _first(inputs.routing, 3)), few)


def _first(routing: Routing, tokens: int) -> Routing:
    return Routing(routing.topk_weights_TK[:tokens], routing.topk_ids_TK[:tokens])


class Quantizers(TorchExperts):
    """Experts that receive unquantized activations and quantize them."""

    requires: ExpertsRequirements = replace(TorchExperts.requires, quantizes_input=True)

    def apply(self, tokens: Dispatched, *, weights: ExpertWeights, **arguments: Any) -> None:
        assert isinstance(tokens, ContiguousTokens)
        assert tokens.scale is None
        assert tokens.x_TH.dtype == self.problem.dtype
        x, scheme = tokens.x_TH.float(), self.problem.scheme
        q, scale = quantize_values(x, scheme, weights.a1_scale if scheme.static else None)
        tokens = replace(tokens, x_TH=q, scale=scale)
        super().apply(tokens, weights=weights, **arguments)


@each_full
def test_quantization_left_to_the_experts(text: str) -> None:
    problem = replace(BASE, quant=text)
    inputs = inputs_for(problem, "uniform")
    parts = MoEPrepareAndFinalizeNoEP(problem), Quantizers(problem)
    kernel = FusedMoEModularKernel(*parts, machine=this_machine())
    out = kernel(inputs.x_TH, inputs.weights, inputs.routing)
    found = judged(out, problem, inputs)
    assert found.ok, found.problems
    left_to_them = replace(NaiveBatchedExperts.requires, quantizes_input=True)
    batched = type("Batched", (NaiveBatchedExperts,), {"requires": left_to_them})
    verdict = check(BatchedPrepareAndFinalize, batched, problem)
    assert [r.rule for r in verdict.rejections] == ["dispatch_quant"]


@each_scheme
def test_random_inputs_are_quantized(text: str) -> None:
    problem = replace(BASE, quant=text)
    x, weights, routing = random_inputs(problem, DEVICE)
    out = run(NO_EP, problem, Inputs(x, weights, routing))
    assert judged(out, problem, Inputs(x, weights, routing)).ok


def test_odd_rows_are_refused_before_construction() -> None:
    problem = replace(BASE, quant="int4_w4a16_group", hidden=43)
    verdict = check(*NO_EP, problem)
    assert [r.rule for r in verdict.rejections] == ["packing"]


def test_weights_may_be_strided() -> None:
    problem = replace(BASE, quant="int4_w4a16_group:group=32")
    inputs = inputs_for(problem, "uniform")
    w: ExpertWeights = inputs.weights
    strided = replace(w, w1=w.w1.mT.contiguous().mT, w2=w.w2.mT.contiguous().mT)
    want = run(NO_EP, problem, inputs)
    assert torch.equal(run(NO_EP, problem, replace(inputs, weights=strided)), want)


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
def test_float8_needs_a_gpu_that_converts_to_it(
    part: Any, quant: str, arch: tuple[int, int], refused: bool
) -> None:
    problem = Problem(2, 64, 64, 2, 1, quant=quant)
    found = part.extra_rejections(problem, Machine("cuda", arch))
    assert [r.rule for r in found] == (["arch"] if refused else [])
    assert part.extra_rejections(problem, Machine("cpu")) == ()
