"""References of quantized layers: the float64 reference against hand-computed values and an
independent method, and the rounding rules of the rounded reference.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from modular_kernel import reference
from modular_kernel.ops.quantize import dequantize_rows, quantize_values
from modular_kernel.quant.quantized_weights import (
    ACTIVATION_SCHEMES,
    SCHEMES,
    dequantize_weights,
    quantize_weights,
)
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights, Routing

BASE = Problem(tokens=12, hidden=48, intermediate=40, experts=3, top_k=2, dtype=torch.float32)
WITH_ACTIVATIONS = (
    "fp8_w8a8_tensor",
    "fp8_w8a8_tensor:static=true",
    "fp8_w8a8_channel",
    "fp8_w8a8_block:block=32x16",
    "int8_w8a8_channel",
    "int8_w8a8_block:block=16x32",
)
WEIGHT_ONLY = (
    "fp8_w8a16_tensor",
    "fp8_w8a16_channel",
    "fp8_w8a16_block:block=32x16",
    "int8_w8a16_channel",
    "int8_w8a16_group:group=32",
    "int8_w8a16_group:group=32,zero_points=true",
    "int4_w4a16_group:group=32",
    "int4_w4a16_group:group=32,zero_points=true",
    "int4_w4a16_group:group=48",
    "int8_w8a16_act_order:group=32",
    "int4_w4a16_act_order:group=32,zero_points=true",
    "mxfp4_w4a16",
    "mxfp4_w4a16:repacked=true",
    "nvfp4_w4a16",
)
each_scheme = pytest.mark.parametrize("scheme_name", WITH_ACTIVATIONS + WEIGHT_ONLY)
each_scheme_with_activations = pytest.mark.parametrize("scheme_name", WITH_ACTIVATIONS)


def test_every_scheme_is_covered() -> None:
    names = {QuantScheme.parse(scheme_name).name for scheme_name in WITH_ACTIVATIONS}
    assert names == ACTIVATION_SCHEMES
    names |= {QuantScheme.parse(scheme_name).name for scheme_name in WEIGHT_ONLY}
    assert names == SCHEMES - {"none", "nvfp4_w4a4"}  # see test_nvfp4_activations


def make_layer(problem: Problem, seed: int = 0) -> tuple[torch.Tensor, ExpertWeights, Routing]:
    """Return x, quantized weights and routing, with values of about 1."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    e, h, i = problem.e, problem.hidden, problem.intermediate
    static = torch.tensor([0.02]) if problem.scheme.static else None
    weights = ExpertWeights(
        normal(e, problem.w1_rows, h) / h**0.5,
        2 * normal(e, h, i) / i**0.5,
        normal(e, problem.w1_rows) if problem.bias else None,
        normal(e, h) if problem.bias else None,
        a1_scale=static,
        a2_scale=None if static is None else 1.5 * static,
    )
    ids = torch.randint(-1, problem.experts, (problem.tokens, problem.top_k), generator=generator)
    routing = Routing(torch.rand(ids.shape, generator=generator) + 0.5, ids.int())
    x_TH = normal(problem.tokens, h).to(problem.dtype)
    return x_TH, quantize_weights(weights, problem), routing


def dequantize_layer(weights: ExpertWeights, problem: Problem) -> ExpertWeights:
    """Return unquantized weights with the same values, computed by modular_kernel.quant."""
    values = {name: dequantize_weights(weights, name, problem) for name in ("w1", "w2")}
    return ExpertWeights(values["w1"], values["w2"], weights.b1, weights.b2)


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


# ------------------------------------------------------------------------------ float64 reference


@each_scheme
@pytest.mark.parametrize("bias", [False, True])
def test_float64_reference_equals_the_reference_with_dequantized_weights(
    scheme_name: str, bias: bool
) -> None:
    """The weights are dequantized to float32 by code that is independent of the reference."""
    problem = replace(BASE, quant=scheme_name, bias=bias)
    x, weights, routing = make_layer(problem)
    actual = reference.float64_reference(x, weights, routing, problem)
    unquantized_problem = replace(problem, quant="none")
    expected = reference.float64_reference(
        x, dequantize_layer(weights, problem), routing, unquantized_problem
    )
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def make_one_token_problem(
    scheme_name: str, activation: str = "relu2"
) -> tuple[Problem, Routing, torch.Tensor]:
    problem = Problem(1, 2, 2, 1, 1, quant=scheme_name, activation=activation, dtype=torch.float32)
    routing = Routing(torch.tensor([[0.5]]), torch.tensor([[0]]))
    return problem, routing, torch.tensor([[1.0, 2.0]])


def test_int4_layer_example() -> None:
    """The rows of w1 are (3, 4) / 2 and (-1, 0), so h = (5.5^2, 0). The rows of w2 are (1, 0) and 2
    (-2, 5).
    """
    problem, routing, x = make_one_token_problem("int4_w4a16_group:group=2")
    weights = ExpertWeights(
        w1=torch.tensor([[[0xCB], [0x87]]], dtype=torch.uint8),
        w2=torch.tensor([[[0x89], [0xD6]]], dtype=torch.uint8),
        w1_scale=torch.tensor([[[0.5], [1.0]]]),
        w2_scale=torch.tensor([[[1.0], [2.0]]]),
    )
    out = reference.float64_reference(x, weights, routing, problem)
    assert out.tolist() == [[0.5 * 30.25, 0.5 * -4 * 30.25]]
    # The zero points are 1 for row 0 (low nibble) and 6 for row 1 (high nibble), so w1 = 1/2 (10,
    # 11) and (1, 2).
    problem, *_ = make_one_token_problem("int4_w4a16_group:group=2,zero_points=true")
    zeros = torch.tensor([[[0x61]]], dtype=torch.uint8)
    weights = replace(weights, w1_zero_point=zeros, w2_zero_point=zeros)
    h_values = (5 + 11) ** 2, (1 + 4) ** 2
    rows = 8 * h_values[0] + 7 * h_values[1], 2 * (0 * h_values[0] + 7 * h_values[1])
    assert reference.float64_reference(x, weights, routing, problem).tolist() == [
        [v / 2 for v in rows]
    ]


def test_mxfp4_layer_example() -> None:
    """w1 has the codes 7 (6) and C (-2) with scale 2^-1, and 1 (0.5) and 2 (1) with scale 2^3. w2
    has the code 3 (1.5) with scale 2^0.
    """
    problem, routing, x = make_one_token_problem("mxfp4_w4a16")
    weights = ExpertWeights(
        w1=torch.tensor([[[0xC7], [0x21]]], dtype=torch.uint8),
        w2=torch.tensor([[[0x03], [0x30]]], dtype=torch.uint8),
        w1_scale=torch.tensor([[[126], [130]]], dtype=torch.uint8),
        w2_scale=torch.tensor([[[127], [127]]], dtype=torch.uint8),
    )
    h_values = (3.0 - 2.0) ** 2, (4.0 + 16.0) ** 2
    expected = [[0.5 * 1.5 * h_values[0], 0.5 * 1.5 * h_values[1]]]
    assert reference.float64_reference(x, weights, routing, problem).tolist() == expected


def test_fp8_block_layer_example() -> None:
    """The blocks have one row and one column, so every weight has its own scale."""
    problem, routing, x = make_one_token_problem("fp8_w8a8_block:block=1x1")
    ones = torch.ones(1, 2, 2)
    weights = ExpertWeights(
        ones.to(torch.float8_e4m3fn),
        (2 * ones).to(torch.float8_e4m3fn),
        w1_scale=torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]),
        w2_scale=torch.tensor([[[1.0, 0.5], [0.0, 1.0]]]),
    )
    h_values = 5.0**2, 11.0**2
    expected = [[0.5 * 2 * (h_values[0] + h_values[1] / 2), 0.5 * 2 * h_values[1]]]
    assert reference.float64_reference(x, weights, routing, problem).tolist() == expected


# ------------------------------------------------------------------------------ rounded reference


def test_int8_rounded_reference_example() -> None:
    """The scale of the token (1, 2) is 2/127, so 1 becomes 64 (63.5 rounds to even) and is read as
    128/127.
    """
    problem, routing, x = make_one_token_problem("int8_w8a8_channel")
    identity = torch.tensor([[[1, 0], [0, 1]]], dtype=torch.int8)
    ones = torch.ones(1, 2)
    weights = ExpertWeights(identity, identity, w1_scale=ones, w2_scale=ones)
    dequantized_x = torch.tensor([64 * 2 / 127, 2.0]).double()
    h = dequantized_x.square()
    # 32.25 and 127; with the unrounded h (1 and 4), it would be 31.75
    q = (h / (h.max() / 127)).round()
    assert q.tolist() == [32, 127]
    expected = 0.5 * q * float(h.max()) / 127
    actual = reference.rounded_reference(x, weights, routing, problem)
    torch.testing.assert_close(actual[0], expected, rtol=1e-6, atol=0)


def rounded_reference_error(scheme_name: str, dtype: torch.dtype) -> float:
    problem = replace(BASE, quant=scheme_name, tokens=64, dtype=dtype)
    x, weights, routing = make_layer(problem)
    exact = reference.float64_reference(x, weights, routing, problem)
    return relative_error(reference.rounded_reference(x, weights, routing, problem), exact)


@each_scheme
def test_error_of_the_rounded_reference_depends_on_the_activation_dtype(scheme_name: str) -> None:
    """fp8 has a mantissa of three bits, and int8 has seven bits relative to the maximum. Other
    schemes keep activations in the dtype of the problem.
    """
    scheme = QuantScheme.parse(scheme_name)
    low, high = {"float8_e4m3fn": (0.02, 0.06), "int8": (0.004, 0.02)}.get(
        scheme.activation, (2e-8, 5e-7)
    )
    assert low < rounded_reference_error(scheme_name, torch.float32) < high
    if not scheme.quantizes_activations:
        assert 2e-3 < rounded_reference_error(scheme_name, torch.bfloat16) < 9e-3


@pytest.mark.parametrize("scheme_name", WEIGHT_ONLY)
def test_dequantized_weights_are_rounded_to_the_dtype(scheme_name: str) -> None:
    problem = replace(BASE, quant=scheme_name, dtype=torch.bfloat16)
    x, weights, routing = make_layer(problem)
    values = dequantize_layer(weights, problem)
    rounded = replace(values, w1=values.w1.bfloat16(), w2=values.w2.bfloat16())
    expected = reference.rounded_reference(x, rounded, routing, replace(problem, quant="none"))
    actual = reference.rounded_reference(x, weights, routing, problem)
    assert relative_error(actual, expected) < 1e-3  # the order of float32 operations differs


def make_large_and_small_token(problem: Problem) -> tuple[torch.Tensor, ExpertWeights, Routing]:
    """Return two tokens for one expert. The second is 1e-5 times the first."""
    x, weights, _ = make_layer(problem)
    x[0] *= 1e3  # keeps the small token far above the minimum scale
    x[1] = 1e-5 * x[0]
    routing = Routing(torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int32))
    return x, weights, routing


@pytest.mark.parametrize("scheme_name", [name for name in WITH_ACTIVATIONS if "static" not in name])
def test_small_tokens_vanish_only_if_the_scale_is_shared(scheme_name: str) -> None:
    """With one scale per tensor, a small token next to a large one is rounded to zero. If the large
    token's pair is skipped, x still has a common scale, but h does not.
    """
    problem = replace(BASE, quant=scheme_name, tokens=2, top_k=1, activation="relu2")
    shared = problem.scheme.activation_granularity == "tensor"
    x, weights, routing_of_both = make_large_and_small_token(problem)
    routing_of_small = Routing(
        routing_of_both.topk_weights_TK, torch.tensor([[-1], [0]], dtype=torch.int32)
    )
    exact = reference.float64_reference(x, weights, routing_of_both, problem)[1]
    with_large_token = reference.rounded_reference(x, weights, routing_of_both, problem)[1]
    without_large_token = reference.rounded_reference(x, weights, routing_of_small, problem)[1]
    if not shared:
        assert relative_error(with_large_token, exact) < 0.06
        # Products of a different shape may be summed in a different order.
        assert relative_error(without_large_token, with_large_token) < 0.02
        return
    routing_of_one_token = Routing(
        routing_of_both.topk_weights_TK[1:], routing_of_both.topk_ids_TK[1:]
    )
    one_token = reference.rounded_reference(
        x[1:], weights, routing_of_one_token, replace(problem, tokens=1)
    )
    assert relative_error(one_token[0], exact) < 0.06 < relative_error(without_large_token, exact)
    assert (
        relative_error(without_large_token, exact) < 0.5 < relative_error(with_large_token, exact)
    )


@each_scheme_with_activations
@pytest.mark.parametrize("width", [48, 41])
def test_activations_are_rounded_as_in_the_operations(scheme_name: str, width: int) -> None:
    """One group of each row is much larger than the next. The reference and the operations compute
    the division in different ways.
    """
    scheme = QuantScheme.parse(scheme_name)
    rows = torch.randn(50, width, generator=torch.Generator().manual_seed(0))
    rows[:, 16:32] *= 1e3
    rows[7] = 0.0
    static_scale = torch.tensor([0.05]) if scheme.static else None
    expected = dequantize_rows(*quantize_values(rows, scheme, static_scale), scheme)
    actual = reference._round_to_scheme(rows, scheme, static_scale)
    is_equal = (actual - expected).abs() <= 1e-6 * expected.abs()
    assert float(is_equal.float().mean()) > 0.999


def test_given_static_scales_are_used() -> None:
    """If a scale is much too small, every value saturates."""
    problem = replace(BASE, quant="fp8_w8a8_tensor:static=true")
    x, weights, routing = make_layer(problem)
    assert weights.a1_scale is not None
    assert weights.a2_scale is not None
    unchanged_output = reference.rounded_reference(x, weights, routing, problem)
    for name in ("a1_scale", "a2_scale"):
        with_small_scale = replace(weights, **{name: torch.tensor([1e-4])})
        assert (
            relative_error(
                reference.rounded_reference(x, with_small_scale, routing, problem), unchanged_output
            )
            > 0.5
        )


@each_scheme_with_activations
def test_router_weight_on_input_multiplies_the_product(scheme_name: str) -> None:
    problem = replace(
        BASE, quant=scheme_name, apply_router_weight_on_input=True, top_k=1, bias=True
    )
    x, weights, routing = make_layer(problem)
    exact = reference.float64_reference(x, weights, routing, problem)
    assert relative_error(reference.rounded_reference(x, weights, routing, problem), exact) < 0.08
    ones = Routing(torch.ones_like(routing.topk_weights_TK), routing.topk_ids_TK)
    unweighted = reference.float64_reference(x, weights, ones, problem)
    assert relative_error(unweighted, exact) > 0.2


@each_scheme
def test_no_tokens_skipped_pairs_and_zeros_give_zeros(scheme_name: str) -> None:
    problem = replace(BASE, quant=scheme_name)
    x, weights, routing = make_layer(problem)
    for compute_reference in (reference.float64_reference, reference.rounded_reference):
        no_tokens = Routing(routing.topk_weights_TK[:0], routing.topk_ids_TK[:0])
        assert compute_reference(x[:0], weights, no_tokens, problem).shape == (0, 48)
        all_skipped = Routing(routing.topk_weights_TK, torch.full_like(routing.topk_ids_TK, -1))
        assert not compute_reference(x, weights, all_skipped, problem).any()
        assert not compute_reference(torch.zeros_like(x), weights, routing, problem).any()


def test_the_reference_does_not_change_inputs() -> None:
    problem = replace(BASE, quant="fp8_w8a8_channel")
    x, weights, routing = make_layer(problem)
    inputs_before: list[Any] = [
        t.clone() for t in (x, weights.w1.float(), weights.w1_scale) if t is not None
    ]
    reference.rounded_reference(x, weights, routing, problem)
    inputs_after = (x, weights.w1.float(), weights.w1_scale)
    assert all(torch.equal(a, b) for a, b in zip(inputs_before, inputs_after, strict=True))
    assert math.isfinite(float(x.sum()))
