"""Tensors that quantized weights require, and weights that are refused."""

from dataclasses import replace

import pytest
import torch
from quant_samples import (
    BASE,
    BYTE,
    CPU,
    FLOAT32,
    FP8,
    SPECS,
    each_scheme,
    make_problem,
    make_quantized,
    plain_weights,
    tensors_of,
)

from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError, WeightsError
from modular_kernel.quant import quantized_weights
from modular_kernel.quant.quantized_weights import (
    SCHEMES,
    check_weights_quantized,
    dequantize,
    dequantize_weights,
    quantize_weights,
    weight_specs,
)
from modular_kernel.spec.quantization import QuantScheme

# Schemes covered by test_nvfp4, test_nvfp4_activations and test_act_order.
COVERED_ELSEWHERE = {
    "none",
    "nvfp4_w4a16",
    "nvfp4_w4a4",
    "int4_w4a16_act_order",
    "int8_w8a16_act_order",
}


def test_every_scheme_is_covered() -> None:
    assert {
        QuantScheme.parse(scheme_name).name for scheme_name in SPECS
    } == SCHEMES - COVERED_ELSEWHERE


@each_scheme
def test_weight_specs_have_the_expected_shapes_and_dtypes(scheme_name: str) -> None:
    shapes, (weight_dtypes, scale_dtypes) = SPECS[scheme_name]
    names = ("w1", "w1_scale", "w1_zero_point", "w2", "w2_scale", "w2_zero_point")
    dtypes = (weight_dtypes, scale_dtypes, BYTE) * 2
    expected_specs = {
        n: (s, d) for n, s, d in zip(names, shapes, dtypes, strict=True) if s is not None
    }
    if "static" in scheme_name:
        expected_specs |= {"a1_scale": ((1,), FLOAT32), "a2_scale": ((1,), FLOAT32)}
    specs = weight_specs(make_problem(scheme_name))
    assert {name: (spec.shape, spec.dtypes) for name, spec in specs.items()} == expected_specs


def test_weight_specs_of_unquantized_and_ungated_weights() -> None:
    specs = weight_specs(replace(BASE, activation="relu2"))
    assert {name: (s.shape, s.dtypes) for name, s in specs.items()} == {
        "w1": ((3, 24, 40), (torch.bfloat16,)),
        "w2": ((3, 40, 24), (torch.bfloat16,)),
    }


def test_scales_of_a_float32_problem_are_float32() -> None:
    for scheme_name in ("int8_w8a16_channel", "int4_w4a16_group"):
        assert (
            weight_specs(make_problem(scheme_name, dtype=torch.float32))["w1_scale"].dtypes
            == FLOAT32
        )


@each_scheme
def test_quantized_weights_are_accepted(scheme_name: str) -> None:
    problem, weights = make_quantized(scheme_name)
    check_weights_quantized(weights, problem, CPU)
    local_problem = replace(problem, local_experts=2, expert_map=True)
    with pytest.raises(ShapeError, match="w1: got"):
        check_weights_quantized(weights, local_problem, CPU)


@pytest.mark.parametrize("name", ["hidden", "intermediate"])
@pytest.mark.parametrize("scheme_name", ["int4_w4a16_group", "mxfp4_w4a16"])
def test_odd_row_lengths_cannot_be_packed(scheme_name: str, name: str) -> None:
    problem = make_problem(scheme_name, **{name: 33})
    assert quantized_weights.list_indivisible_sizes(problem) == (name,)
    with pytest.raises(
        ConfigurationError, match=f"{name}: got 33, need a multiple of 2: {scheme_name}"
    ):
        weight_specs(problem)


def test_odd_row_lengths_of_bytes_are_accepted() -> None:
    problem, weights = make_quantized("int8_w8a16_group:group=16,zero_points=true", hidden=33)
    assert weights.w1_zero_point is not None
    assert weights.w1_zero_point.shape == (3, 48, 3)
    check_weights_quantized(weights, problem, CPU)


def test_quantize_weights_keeps_other_fields() -> None:
    problem = make_problem("fp8_w8a8_tensor:static=true", bias=True, expert_map=True)
    unquantized = plain_weights(problem)
    b1, b2, expert_map = torch.ones(3, 48), torch.ones(3, 40), torch.arange(3, dtype=torch.int32)
    unquantized = replace(unquantized, b1=b1, b2=b2, expert_map=expert_map)
    weights = quantize_weights(unquantized, problem)
    assert (weights.b1, weights.b2, weights.expert_map) == (b1, b2, expert_map)
    assert weights.a1_scale is unquantized.a1_scale
    transposed = replace(
        unquantized, w1=unquantized.w1.mT.contiguous().mT, w2=unquantized.w2.mT.contiguous().mT
    )
    from_strided = quantize_weights(transposed, problem)
    assert torch.equal(from_strided.w1.view(torch.uint8), weights.w1.view(torch.uint8))


def test_quantize_weights_refuses_wrong_arguments() -> None:
    problem = make_problem("fp8_w8a8_tensor")
    unquantized = plain_weights(problem)
    with pytest.raises(ConfigurationError, match="quant: got none"):
        quantize_weights(unquantized, BASE)
    with pytest.raises(ShapeError, match="w2: got"):
        quantize_weights(replace(unquantized, w2=unquantized.w2.mT), problem)
    with pytest.raises(DtypeError, match="w1: got float8_e4m3fn, need unquantized"):
        quantize_weights(replace(unquantized, w1=unquantized.w1.to(FP8)), problem)
    with pytest.raises(WeightsError, match="a1_scale: got None, need"):
        quantize_weights(unquantized, make_problem("fp8_w8a8_tensor:static=true"))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@each_scheme
def test_quantized_nan_is_nan(scheme_name: str, value: float) -> None:
    """The first value of row 5 of expert 1 in w1 is NaN or infinite. Values with the same scale
    become NaN or infinite, and no other value changes.
    """
    problem = make_problem(scheme_name)
    unquantized = plain_weights(problem)
    expected = dequantize_weights(quantize_weights(unquantized, problem), "w1", problem)
    w1 = unquantized.w1.clone()
    w1[1, 5, 0] = value
    actual = dequantize_weights(
        quantize_weights(replace(unquantized, w1=w1), problem), "w1", problem
    )
    finite = actual.isfinite()
    assert not bool(finite[1, 5, 0])
    assert bool(finite[0].all())
    assert bool(finite[2].all())
    assert torch.equal(actual[finite], expected[finite])


def test_scales_out_of_the_range_of_float16_are_refused() -> None:
    problem = make_problem("int4_w4a16_group:group=16")
    unquantized = plain_weights(problem)
    large = replace(unquantized, w2=1e6 * unquantized.w2)
    assert quantize_weights(large, problem)
    assert quantize_weights(large, problem, scale_dtype=torch.bfloat16)
    assert quantize_weights(unquantized, problem, scale_dtype=torch.float16)
    with pytest.raises(ConfigurationError, match=r"scale_dtype: got float16, need .* w2 exceed"):
        quantize_weights(large, problem, scale_dtype=torch.float16)


def test_strided_weights_are_accepted() -> None:
    problem, weights = make_quantized("fp8_w8a8_block:block=32x16")
    strided = replace(weights, w1=weights.w1.mT.contiguous().mT)
    check_weights_quantized(strided, problem, CPU)
    assert torch.equal(
        dequantize(*tensors_of(strided, "w1"), problem.scheme),
        dequantize(*tensors_of(weights, "w1"), problem.scheme),
    )
