"""Quantization of weights: rounding to the nearest values, one scale per tile, and chunks of
experts.
"""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from quant_samples import each_scheme, make_problem, make_quantized, plain_weights, tensors_of

from modular_kernel.errors import ConfigurationError
from modular_kernel.quant import quantized_weights
from modular_kernel.quant.quantized_weights import dequantize, quantize_weights
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights

# Maximum error of a weight relative to its tile's maximum: half a quantization step.
MAX_RELATIVE_ERROR = {
    "float8_e4m3fn": 16 / 448,
    "int8": 0.5 / 127,
    "uint8": 0.5 / 127,
    "uint4": 0.5 / 7,
    "float4_e2m1": 1 / 3.5,  # a scale is a power of two, so half of the range may be unused
}


@each_scheme
def test_quantization_error_is_at_most_half_a_step(scheme_name: str) -> None:
    problem, weights = make_quantized(scheme_name)
    scheme = problem.scheme
    for name in ("w1", "w2"):
        unquantized = getattr(plain_weights(problem), name)
        error = (dequantize(*tensors_of(weights, name), scheme) - unquantized).abs()
        assert (
            0
            < float(error.max())
            <= 1.001 * MAX_RELATIVE_ERROR[scheme.weight] * float(unquantized.abs().max())
        )


@each_scheme
def test_experts_are_quantized_in_chunks(scheme_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, at_once = make_quantized(scheme_name)
    quantize_rows = Mock(wraps=quantized_weights.quantize_rows)
    monkeypatch.setattr(quantized_weights, "quantize_rows", quantize_rows)
    monkeypatch.setattr(quantized_weights, "_MAX_WEIGHTS", 2 * 40 * 24)
    in_chunks = quantize_weights(plain_weights(problem), problem)
    chunk_sizes = [len(call.args[0]) for call in quantize_rows.call_args_list]
    assert chunk_sizes == [1, 1, 1, 2, 1]  # w1 has twice as many weights as w2
    for name, tensor in vars(at_once).items():
        chunked_tensor = getattr(in_chunks, name)
        assert (tensor is None) == (chunked_tensor is None), name
        assert tensor is None or torch.equal(
            tensor.view(torch.uint8), chunked_tensor.view(torch.uint8)
        ), name


@each_scheme
def test_quantizing_is_idempotent(scheme_name: str) -> None:
    problem, weights = make_quantized(scheme_name, dtype=torch.float32)
    values = {n: dequantize(*tensors_of(weights, n), problem.scheme) for n in ("w1", "w2")}
    quantized_again = quantize_weights(replace(plain_weights(problem), **values), problem)
    for name, first in values.items():
        second = dequantize(*tensors_of(quantized_again, name), problem.scheme)
        torch.testing.assert_close(second, first, rtol=1e-6, atol=1e-6)


@each_scheme
def test_each_tile_has_its_own_scale(scheme_name: str) -> None:
    """The first tile has weights of about 1e-3 and all others have weights of about 1, so they need
    different scales.
    """
    problem = make_problem(scheme_name)
    unquantized = plain_weights(problem)
    small = unquantized.w1.clone()
    granularity = problem.scheme.granularity
    bn, bk = {"channel": (1, 40), "block": problem.scheme.group, "tensor": (48, 40)}.get(
        granularity, (1, (*problem.scheme.group, 0)[0])
    )
    small[1, :bn, :bk] *= 1e-3  # exactly the first tile of expert 1
    weights = quantize_weights(replace(unquantized, w1=small), problem)
    actual = dequantize(*tensors_of(weights, "w1"), problem.scheme)
    first_tile, expected_tile = actual[1, :bn, :bk], small[1, :bn, :bk]
    assert float((first_tile - expected_tile).norm() / expected_tile.norm()) < 0.2
    unchanged = quantize_weights(unquantized, problem)
    expected = dequantize(*tensors_of(unchanged, "w1"), problem.scheme)
    expected[1, :bn, :bk] = first_tile
    assert torch.equal(actual, expected)


@each_scheme
@pytest.mark.parametrize("value", [0.0, 1e-20])
def test_tiles_of_zeros_stay_zero(scheme_name: str, value: float) -> None:
    problem = make_problem(scheme_name)
    unquantized = plain_weights(problem)
    constant = replace(unquantized, w1=torch.full_like(unquantized.w1, value))
    weights = quantize_weights(constant, problem)
    actual = dequantize(*tensors_of(weights, "w1"), problem.scheme)
    assert float(actual.abs().max()) <= 1e-10


def test_e2m1_rounds_ties_to_the_even_code() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    rounded_ties = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    row = torch.tensor([6.0, *ties, *(-t for t in ties), *([0.0] * 17)])
    problem = Problem(1, 32, 32, 1, 1, quant="mxfp4_w4a16", activation="relu2")
    w = row.expand(1, 32, 32)
    actual = dequantize(
        *tensors_of(quantize_weights(ExpertWeights(w, w), problem), "w1"), problem.scheme
    )
    assert actual[0, 0].tolist() == [6.0, *rounded_ties, *(-v for v in rounded_ties), *([0.0] * 17)]


def test_e8m0_is_the_smallest_sufficient_power_of_two() -> None:
    problem = Problem(1, 32, 32, 1, 1, quant="mxfp4_w4a16", activation="relu2")
    for max_value, byte in (
        (6.0, 127),
        (7.0, 127),
        (7.01, 128),
        (3.5, 126),
        (3.4, 126),
        (896.0, 134),
    ):
        w = torch.zeros(1, 32, 32)
        w[0, :, 5] = -max_value
        weights = quantize_weights(ExpertWeights(w, w), problem)
        assert weights.w1_scale is not None
        assert weights.w1_scale.unique().tolist() == [byte], max_value


def test_zero_points_cover_asymmetric_groups() -> None:
    """With zero points, weights in [0, 1] use all sixteen codes. A symmetric scheme would use only
    nine of them.
    """
    problem, symmetric = (
        make_problem(f"int4_w4a16_group:group=16{zeros}") for zeros in (",zero_points=true", "")
    )
    unquantized = plain_weights(problem)
    unquantized = replace(unquantized, w1=unquantized.w1.abs())
    errors = []
    for scheme_problem in (problem, symmetric):
        actual = dequantize(
            *tensors_of(quantize_weights(unquantized, scheme_problem), "w1"), scheme_problem.scheme
        )
        errors.append(float((actual - unquantized.w1).norm()))
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize("scheme_name", ["int8_w8a16_channel", "int4_w4a16_group:group=16"])
def test_scales_have_the_requested_dtype(scheme_name: str) -> None:
    problem = make_problem(scheme_name, dtype=torch.float16)
    weights = quantize_weights(plain_weights(problem), problem, scale_dtype=torch.float16)
    assert weights.w1_scale is not None
    assert weights.w1_scale.dtype == torch.float16
    actual = dequantize(*tensors_of(weights, "w1"), problem.scheme)
    max_error = MAX_RELATIVE_ERROR[problem.scheme.weight] * 1.01
    assert float((actual - plain_weights(problem).w1).abs().max()) <= max_error * float(
        plain_weights(problem).w1.abs().max()
    )
    with pytest.raises(ConfigurationError, match="scale_dtype: got float64, need float32 or"):
        quantize_weights(plain_weights(problem), problem, scale_dtype=torch.float64)


@pytest.mark.parametrize(
    ("scheme_name", "dtype", "default"),
    [
        ("int4_w4a16_group:group=16", torch.bfloat16, torch.bfloat16),
        ("int8_w8a16_channel", torch.bfloat16, torch.float32),
        ("int8_w8a16_group:group=16", torch.bfloat16, torch.float32),
        ("int4_w4a16_group:group=16", torch.float16, torch.float32),
        ("int4_w4a16_group:group=16", torch.float32, torch.float32),
        ("int8_w8a8_channel", torch.bfloat16, torch.float32),
        ("fp8_w8a16_channel", torch.bfloat16, torch.float32),
        ("mxfp4_w4a16", torch.bfloat16, torch.uint8),
        ("nvfp4_w4a16", torch.bfloat16, torch.float8_e4m3fn),
    ],
)
def test_default_dtype_of_scales(
    scheme_name: str, dtype: torch.dtype, default: torch.dtype
) -> None:
    problem = make_problem(scheme_name, dtype=dtype)
    weights = quantize_weights(plain_weights(problem), problem)
    assert weights.w1_scale is not None
    assert weights.w2_scale is not None
    assert weights.w1_scale.dtype is weights.w2_scale.dtype is default


def test_codes_are_rounded_with_the_default_scales() -> None:
    """Codes are rounded relative to the bf16 scales, so weights stay within half a step of them."""
    problem = make_problem("int4_w4a16_group:group=16", dtype=torch.bfloat16)
    unquantized = plain_weights(problem)
    weights = quantize_weights(unquantized, problem)
    assert weights.w1_scale is not None
    values = dequantize(*tensors_of(weights, "w1"), problem.scheme)
    columns = unquantized.w1.shape[2]
    step = weights.w1_scale.float().repeat_interleave(16, dim=2)[..., :columns]
    error = (values - unquantized.w1).abs() / step
    is_in_range = unquantized.w1.abs() <= 7 * step
    assert float(is_in_range.float().mean()) > 0.9
    assert float(error[is_in_range].max()) <= 0.5001
    assert float(error.max()) <= 0.54
