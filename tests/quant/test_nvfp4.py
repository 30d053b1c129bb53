"""nvfp4 bit by bit: every code with every scale, the quantizer against a search, and kernels
against both.
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

HALVES = (torch.bfloat16, torch.float16)
CPU, FP8 = torch.device("cpu"), torch.float8_e4m3fn
BASE = Problem(tokens=16, hidden=256, intermediate=256, experts=2, top_k=1, quant="nvfp4_w4a16")
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NAN = 127  # and with the sign bit: the two bytes of e4m3 that are no number
G = 1.1 * 2.0**-9


def e4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if byte > 127 else value


def e2m1(code: int) -> float:
    return MAGNITUDES[code % 8] * (-1 if code > 7 else 1)


def every_pair() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes (256, 16), scales (256, 1) by their bytes, and float64 products computed by
    hand.
    """
    codes = torch.arange(16, dtype=torch.uint8).expand(256, 16).contiguous()
    scale = torch.arange(256, dtype=torch.uint8).view(FP8)[:, None]
    values = [[e2m1(code) * e4m3(byte) for code in range(16)] for byte in range(256)]
    return codes, scale, torch.tensor(values, dtype=torch.float64)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


# -------------------------------------------------------------------------------- from the bits


def test_every_code_with_every_scale() -> None:
    codes, scale, want = every_pair()
    numbers = (torch.arange(256) & 127) != NAN
    factor = torch.tensor(G)
    got = nvfp4.dequantize(codes, scale, factor)
    assert got.dtype == torch.float32
    assert got[~numbers].isnan().all()
    # The product of a code and its scale is a float32, so there is one rounding, by the factor.
    wanted = want.float() * factor
    assert torch.equal(want.float().double()[numbers], want[numbers])
    assert torch.equal(bits(got)[numbers], bits(wanted)[numbers])


@pytest.mark.parametrize("dtype", HALVES)
def test_a_code_times_its_scale_is_exact_in_16_bits(dtype: torch.dtype) -> None:
    _, _, values = every_pair()
    numbers = (torch.arange(256) & 127) != NAN
    assert torch.equal(values.to(dtype).double()[numbers], values[numbers])


_NO_EP = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")
_BATCHED = ("BatchedPrepareAndFinalize", "BatchedTritonExperts")


@pytest.mark.parametrize(
    ("pair", "path", "dtype"),
    [
        *((_NO_EP, "aligned", dtype) for dtype in (*HALVES, torch.float32)),
        *((_NO_EP, "aligned_w4", dtype) for dtype in HALVES),
        *((_BATCHED, "", dtype) for dtype in (*HALVES, torch.float32)),
    ],
)
def test_kernels_dequantize_every_code_with_every_scale(
    pair: tuple[str, str], path: str, dtype: torch.dtype
) -> None:
    """Token t is 1 in column t only, and w2 is the identity: y[t, n] = relu(w1[n, t])^2."""
    problem = replace(BASE, experts=1, dtype=dtype, activation="relu2")
    codes, scale, values = every_pair()
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
        w1_global_scale=torch.tensor([[G]]),
        w2_global_scale=torch.ones(1, 1),
    )
    x = torch.eye(16, 256, dtype=dtype)
    routing = Routing(torch.ones(16, 1), torch.zeros(16, 1, dtype=torch.int32))
    device = Device("NVIDIA H200")
    with override_config(BY_NAME[path].default_config(problem, 16, device) if path else None):
        kernel = mk.make_kernel(*pair, problem, machine=this_machine())
        got = kernel(
            x.to(DEVICE), move_tensors(weights, DEVICE), move_tensors(routing, DEVICE)
        ).cpu()
    want = (values.float() * torch.tensor(G)).clamp(min=0).square().T.to(dtype)
    assert torch.equal(bits(got), bits(want))


# -------------------------------------------------------------------------------- to the bits


def searched(value: float, choices: list[float]) -> int:
    """Return the exact index of the nearest candidate, and of two nearest ones the even index."""
    at = Fraction(value)
    return min(
        range(len(choices)), key=lambda place: (abs(Fraction(choices[place]) - at), place % 2)
    )


def test_the_quantizer_equals_a_search() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 40, generator=generator) * torch.exp2(torch.arange(40) - 20.0)[:, None]
    x[0] = 0
    x[1, :16] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2)  # ties, s = 1
    inverse = torch.rand(40, 1, generator=generator) * 1000
    inverse[1] = 1
    codes, scale = nvfp4.quantize(x, inverse)
    assert codes.shape == x.shape
    assert scale.shape == (40, 3)  # the last group has 8 columns
    places = [e4m3(byte) for byte in range(NAN)]
    for row, group in itertools.product(range(40), range(3)):
        own = x[row, group * 16 : group * 16 + 16]
        wanted = inverse[row, 0] * own.abs().amax() / torch.tensor(6.0)
        byte = searched(min(float(wanted), 448.0), places)
        assert int(scale.view(torch.uint8)[row, group]) == byte
        s = torch.tensor(places[byte])
        for place, value in enumerate(own):
            code = 0
            if s > 0:
                q = float(value * (inverse[row, 0] / s))
                code = searched(abs(q), list(MAGNITUDES)) + (8 if q < 0 else 0)
            assert int(codes[row, group * 16 + place]) == code


def test_codes_on_both_sides_of_every_midpoint() -> None:
    """Each midpoint and its neighbors in float32; NaN becomes the largest code."""
    midpoints = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(MAGNITUDES)])
    near = torch.stack(
        [(midpoints.view(torch.int32) + step).view(torch.float32) for step in (-1, 0, 1)]
    ).flatten()
    for size in (*near.tolist(), *MAGNITUDES, 1e-45, 5.9, 7.0, 3e38):
        code = searched(size, list(MAGNITUDES))
        got = nvfp4.encode_e2m1(torch.tensor([size, -size])).tolist()
        assert got == [code, code + 8 * (size > 0)]
    others = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0])
    before = others.clone()
    assert nvfp4.encode_e2m1(others).tolist() == [7, 15, 7, 0]
    assert torch.equal(bits(others), bits(before))


def test_zeros_and_values_out_of_range() -> None:
    codes, scale = nvfp4.quantize(torch.zeros(1, 16), torch.ones(1, 1))
    assert not codes.any()
    assert not scale.view(torch.uint8).any()
    codes, scale = nvfp4.quantize(torch.full((1, 16), -1e6), torch.ones(1, 1))
    assert float(scale) == 448
    assert codes.unique().tolist() == [15]  # -6: what does not fit saturates


def test_each_matrix_is_scaled_to_its_maximum() -> None:
    """Gate and up have separate scales, wherever their rows are."""
    generator = torch.Generator().manual_seed(0)
    gate, up = torch.randn(2, 2, 32, 48, generator=generator)
    up *= 20
    small = replace(BASE, hidden=48, intermediate=32)
    w2 = torch.randn(2, 48, 32, generator=generator)
    found = {}
    for text, w1 in (
        ("silu", torch.cat([gate, up], 1)),
        ("silu:interleaved=true", torch.stack([gate, up], 2).flatten(1, 2)),
    ):
        problem = replace(small, activation=text)
        weights = quantize_weights(ExpertWeights(w1, w2), problem)
        largest = torch.stack([gate, up], 1).abs().amax((2, 3))
        assert torch.equal(weights.w1_global_scale, largest / 2688)
        values = dequantize_weights(weights, "w1", problem)
        error = (values - w1).abs().amax((1, 2))
        assert (error <= largest.amax(1) / 6).all()
        halves = (values[:, ::2], values[:, 1::2]) if "true" in text else values.chunk(2, 1)
        found[text] = torch.stack(halves)
    assert torch.equal(*found.values())


# ------------------------------------------------------------------------------------ bad input


def made(**changes: Any) -> tuple[ExpertWeights, Problem]:
    problem = replace(BASE, hidden=48, intermediate=32, **changes)
    plain = ExpertWeights(torch.randn(2, 64, 48), torch.randn(2, 48, 32))
    return quantize_weights(plain, problem), problem


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
def test_wrong_arguments_are_refused_by_name(
    name: str, value: torch.Tensor | None, error: type[InputError], need: str
) -> None:
    weights, problem = made()
    check_weights_quantized(weights, problem, CPU)
    with pytest.raises(error, match=need):
        check_weights_quantized(replace(weights, **{name: value}), problem, CPU)


def test_other_schemes_have_no_scale_per_matrix() -> None:
    weights, problem = made(quant="mxfp4_w4a16")
    given = replace(weights, w1_global_scale=torch.ones(2, 2))
    with pytest.raises(WeightsError, match="w1_global_scale: got a tensor, need None"):
        check_weights_quantized(given, problem, CPU)
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
    """The global scale of subnormal weights underflows to 0, or its inverse overflows."""
    problem = Problem(1, 32, 32, 2, 1, dtype=torch.float32, quant="nvfp4_w4a16")
    signs = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0)).sign()
    w1 = (signs * magnitude).to(dtype)
    w1[:, ::3, :16] = 0  # whole groups, whose scale would be 0 times infinity
    weights = quantize_weights(ExpertWeights(w1=w1, w2=w1[:, :32].clone()), problem)
    for name, exact in (("w1", w1), ("w2", w1[:, :32])):
        values = dequantize_weights(weights, name, problem)
        assert values.isfinite().all()
        torch.testing.assert_close(values.double(), exact.double(), rtol=0.2, atol=2.0**-126)
