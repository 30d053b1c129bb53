"""nvfp4 bit by bit: every code with every scale, the quantizer compared with a search, and kernels
compared with both.
"""

import itertools
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from devices import DEVICE
from fused_experts_calls import move_tensors

import modular_kernel as mk
from experts.triton.configs.select import override_config
from experts.triton.launch_config import Device
from experts.triton.paths import BY_NAME
from modular_kernel import ExpertWeights, Problem
from modular_kernel.catalog import this_machine
from modular_kernel.errors import DtypeError, InputError, ShapeError, WeightsError
from modular_kernel.quant import nvfp4
from modular_kernel.quant.quantized_weights import (
    check_weights_quantized,
    dequantize_weights,
    quantize_weights,
    weight_specs,
)
from modular_kernel.spec.problem import Machine
from modular_kernel.tensors import Routing

DTYPES_16_BIT = (torch.bfloat16, torch.float16)
CPU, FP8 = torch.device("cpu"), torch.float8_e4m3fn
BASE = Problem(tokens=16, hidden=256, intermediate=256, experts=2, top_k=1, quant="nvfp4_w4a16")
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NAN = 127  # the byte of NaN in e4m3; NaN + 128, with the sign bit, is NaN, too
GLOBAL_SCALE = 1.1 * 2.0**-9


def decode_e4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if byte > 127 else value


def decode_e2m1(code: int) -> float:
    return MAGNITUDES[code % 8] * (-1 if code > 7 else 1)


def make_all_products() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes (256, 16), scales (256, 1) ordered by their bytes, and float64 products computed
    by hand.
    """
    codes = torch.arange(16, dtype=torch.uint8).expand(256, 16).contiguous()
    scale = torch.arange(256, dtype=torch.uint8).view(FP8)[:, None]
    values = [[decode_e2m1(code) * decode_e4m3(byte) for code in range(16)] for byte in range(256)]
    return codes, scale, torch.tensor(values, dtype=torch.float64)


def view_as_integers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


# --------------------------------------------------------------------------------- dequantize


def test_dequantize_decodes_every_code_with_every_scale() -> None:
    codes, scale, products = make_all_products()
    is_number = (torch.arange(256) & 127) != NAN
    factor = torch.tensor(GLOBAL_SCALE)
    actual = nvfp4.dequantize(codes, scale, factor)
    assert actual.dtype == torch.float32
    assert actual[~is_number].isnan().all()
    # The product of a code and its scale is exact in float32, so only the factor rounds.
    expected = products.float() * factor
    assert torch.equal(products.float().double()[is_number], products[is_number])
    assert torch.equal(view_as_integers(actual)[is_number], view_as_integers(expected)[is_number])


@pytest.mark.parametrize("dtype", DTYPES_16_BIT)
def test_the_product_of_code_and_scale_is_exact_in_16_bits(dtype: torch.dtype) -> None:
    _, _, values = make_all_products()
    is_number = (torch.arange(256) & 127) != NAN
    assert torch.equal(values.to(dtype).double()[is_number], values[is_number])


_NO_EP = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")
_BATCHED = ("BatchedPrepareAndFinalize", "BatchedTritonExperts")


@pytest.mark.parametrize(
    ("pair", "path", "dtype"),
    [
        *((_NO_EP, "aligned", dtype) for dtype in (*DTYPES_16_BIT, torch.float32)),
        *((_NO_EP, "aligned_w4", dtype) for dtype in DTYPES_16_BIT),
        *((_BATCHED, "", dtype) for dtype in (*DTYPES_16_BIT, torch.float32)),
    ],
)
def test_kernels_dequantize_every_code_with_every_scale(
    pair: tuple[str, str], path: str, dtype: torch.dtype
) -> None:
    """Token t is 1 only in column t, and w2 is the identity, so y[t, n] = relu(w1[n, t])^2."""
    problem = replace(BASE, experts=1, dtype=dtype, activation="relu2")
    codes, scale, values = make_all_products()
    scale, values = scale.clone(), values.clone()
    for byte in (NAN, NAN + 128):
        scale.view(torch.uint8)[byte], values[byte] = 0, 0
    w1 = torch.zeros(1, 256, 128, dtype=torch.uint8)
    w1[0, :, :8] = codes[:, 0::2] | codes[:, 1::2] << 4
    w1_scale = torch.zeros(1, 256, 16).to(FP8)
    w1_scale.view(torch.uint8)[0, :, 0] = scale.view(torch.uint8)[:, 0]
    n = torch.arange(256)
    w2 = torch.zeros(1, 256, 128, dtype=torch.uint8)
    w2[0, n, n // 2] = (2 << 4 * (n % 2)).to(torch.uint8)
    weights = ExpertWeights(
        w1,
        w2,
        w1_scale=w1_scale,
        w2_scale=torch.ones(1, 256, 16).to(FP8),
        w1_global_scale=torch.tensor([[GLOBAL_SCALE]]),
        w2_global_scale=torch.ones(1, 1),
    )
    x = torch.eye(16, 256, dtype=dtype)
    routing = Routing(torch.ones(16, 1), torch.zeros(16, 1, dtype=torch.int32))
    device = Device("NVIDIA H200")
    with override_config(BY_NAME[path].default_config(problem, 16, device) if path else None):
        kernel = mk.make_kernel(*pair, problem, machine=this_machine())
        actual = kernel(
            x.to(DEVICE), move_tensors(weights, DEVICE), move_tensors(routing, DEVICE)
        ).cpu()
    expected = (values.float() * torch.tensor(GLOBAL_SCALE)).clamp(min=0).square().T.to(dtype)
    assert torch.equal(view_as_integers(actual), view_as_integers(expected))


# ----------------------------------------------------------------------------------- quantize


def find_nearest(value: float, candidates: list[float]) -> int:
    """Return the index of the nearest candidate, computed exactly. Of two nearest candidates,
    return the even index.
    """
    target = Fraction(value)
    return min(
        range(len(candidates)),
        key=lambda index: (abs(Fraction(candidates[index]) - target), index % 2),
    )


def test_the_quantizer_equals_a_search() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 40, generator=generator) * torch.exp2(torch.arange(40) - 20.0)[:, None]
    x[0] = 0
    x[1, :16] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2)  # ties for scale 1
    inverse = torch.rand(40, 1, generator=generator) * 1000
    inverse[1] = 1
    codes, scale = nvfp4.quantize(x, inverse)
    assert codes.shape == x.shape
    assert scale.shape == (40, 3)  # the last group has 8 columns
    scale_values = [decode_e4m3(byte) for byte in range(NAN)]
    for row, group in itertools.product(range(40), range(3)):
        group_values = x[row, group * 16 : group * 16 + 16]
        expected = inverse[row, 0] * group_values.abs().amax() / torch.tensor(6.0)
        byte = find_nearest(min(float(expected), 448.0), scale_values)
        assert int(scale.view(torch.uint8)[row, group]) == byte
        scale_value = torch.tensor(scale_values[byte])
        for index, value in enumerate(group_values):
            code = 0
            if scale_value > 0:
                quotient = float(value * (inverse[row, 0] / scale_value))
                code = find_nearest(abs(quotient), list(MAGNITUDES)) + (8 if quotient < 0 else 0)
            assert int(codes[row, group * 16 + index]) == code


def test_codes_on_both_sides_of_every_midpoint() -> None:
    """Values are midpoints and their float32 neighbors. NaN gets the code of the maximum."""
    midpoints = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(MAGNITUDES)])
    around_midpoints = torch.stack(
        [(midpoints.view(torch.int32) + step).view(torch.float32) for step in (-1, 0, 1)]
    ).flatten()
    for magnitude in (*around_midpoints.tolist(), *MAGNITUDES, 1e-45, 5.9, 7.0, 3e38):
        code = find_nearest(magnitude, list(MAGNITUDES))
        actual = nvfp4.encode_e2m1(torch.tensor([magnitude, -magnitude])).tolist()
        assert actual == [code, code + 8 * (magnitude > 0)]
    special_values = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0])
    values_before = special_values.clone()
    assert nvfp4.encode_e2m1(special_values).tolist() == [7, 15, 7, 0]
    assert torch.equal(view_as_integers(special_values), view_as_integers(values_before))


def test_zeros_and_values_out_of_range() -> None:
    codes, scale = nvfp4.quantize(torch.zeros(1, 16), torch.ones(1, 1))
    assert not codes.any()
    assert not scale.view(torch.uint8).any()
    codes, scale = nvfp4.quantize(torch.full((1, 16), -1e6), torch.ones(1, 1))
    assert float(scale) == 448
    assert codes.unique().tolist() == [15]  # -6, because values out of range saturate


def test_gate_and_up_are_each_scaled_to_their_maximum() -> None:
    """They have separate scales, even if their rows are interleaved."""
    generator = torch.Generator().manual_seed(0)
    gate, up = torch.randn(2, 2, 32, 48, generator=generator)
    up *= 20
    small_problem = replace(BASE, hidden=48, intermediate=32)
    w2 = torch.randn(2, 48, 32, generator=generator)
    gate_and_up_by_activation = {}
    for activation, w1 in (
        ("silu", torch.cat([gate, up], 1)),
        ("silu:interleaved=true", torch.stack([gate, up], 2).flatten(1, 2)),
    ):
        problem = replace(small_problem, activation=activation)
        weights = quantize_weights(ExpertWeights(w1, w2), problem)
        maxima = torch.stack([gate, up], 1).abs().amax((2, 3))
        assert torch.equal(weights.w1_global_scale, maxima / 2688)
        values = dequantize_weights(weights, "w1", problem)
        error = (values - w1).abs().amax((1, 2))
        assert (error <= maxima.amax(1) / 6).all()
        gate_and_up = (
            (values[:, ::2], values[:, 1::2]) if "true" in activation else values.chunk(2, 1)
        )
        gate_and_up_by_activation[activation] = torch.stack(gate_and_up)
    assert torch.equal(*gate_and_up_by_activation.values())


# ------------------------------------------------------------------------------------ bad input


def make_weights(**changes: Any) -> tuple[ExpertWeights, Problem]:
    problem = replace(BASE, hidden=48, intermediate=32, **changes)
    unquantized = ExpertWeights(torch.randn(2, 64, 48), torch.randn(2, 48, 32))
    return quantize_weights(unquantized, problem), problem


@pytest.mark.parametrize(
    ("name", "value", "error", "need"),
    [
        ("w1_global_scale", None, WeightsError, r"w1_global_scale: got None, need \(e, 2\)"),
        ("w1_global_scale", torch.ones(2), ShapeError, r"need \(e, 2\) = \(2, 2\)"),
        ("w2_global_scale", torch.ones(2, 2), ShapeError, r"need \(e, 1\) = \(2, 1\)"),
        ("w2_global_scale", torch.ones(2, 1).half(), DtypeError, "float16, need float32"),
        ("w1_scale", torch.zeros(2, 64, 3).byte(), DtypeError, "uint8, need float8_e4m3fn"),
        ("w1_scale", torch.zeros(2, 64, 2).to(FP8), ShapeError, r"ceil\(H / 16\)"),
    ],
)
def test_errors_name_the_invalid_argument(
    name: str, value: torch.Tensor | None, error: type[InputError], need: str
) -> None:
    weights, problem = make_weights()
    check_weights_quantized(weights, problem, CPU)
    with pytest.raises(error, match=need):
        check_weights_quantized(replace(weights, **{name: value}), problem, CPU)


def test_other_schemes_have_no_scale_per_matrix() -> None:
    weights, problem = make_weights(quant="mxfp4_w4a16")
    with_matrix_scale = replace(weights, w1_global_scale=torch.ones(2, 2))
    with pytest.raises(WeightsError, match="w1_global_scale: got a tensor, need None"):
        check_weights_quantized(with_matrix_scale, problem, CPU)
    assert "w1_global_scale" not in weight_specs(problem)


@pytest.mark.parametrize("quant", ["nvfp4_w4a16", "fp8_w8a16_block"])
@pytest.mark.parametrize("pair", [_NO_EP, _BATCHED])
def test_a_gpu_without_float8_is_refused(pair: tuple[str, str], quant: str) -> None:
    problem = replace(BASE, quant=quant)
    for arch, rules in (((8, 0), ["arch"]), ((8, 9), []), ((9, 0), [])):
        machine = Machine("cuda", arch, frozenset({"triton"}))
        verdict = mk.check(*pair, problem, machine)
        assert [rejection.rule for rejection in verdict.rejections] == rules


@pytest.mark.parametrize("magnitude", [1e-35, 1e-38, 1e-40, 1e-42, 1e-45, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tiny_weights_stay_finite(magnitude: float, dtype: torch.dtype) -> None:
    """For subnormal weights, the global scale underflows to 0 or its inverse overflows."""
    problem = Problem(1, 32, 32, 2, 1, dtype=torch.float32, quant="nvfp4_w4a16")
    signs = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0)).sign()
    w1 = (signs * magnitude).to(dtype)
    w1[:, ::3, :16] = 0  # groups of zeros, whose scale would be 0 times infinity
    weights = quantize_weights(ExpertWeights(w1=w1, w2=w1[:, :32].clone()), problem)
    for name, exact in (("w1", w1), ("w2", w1[:, :32])):
        values = dequantize_weights(weights, name, problem)
        assert values.isfinite().all()
        torch.testing.assert_close(values.double(), exact.double(), rtol=0.2, atol=2.0**-126)
