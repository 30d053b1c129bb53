"""Quantised weights: what their tensors must be, what they stand for, and what is refused."""

import math
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from modular_kernel import quant
from modular_kernel.errors import (
    ConfigurationError,
    DtypeError,
    ShapeError,
    WeightsError,
)
from modular_kernel.quant import (
    SCHEMES,
    check_weights_quantised,
    dequantise,
    quantise_weights,
    weight_specs,
)
from modular_kernel.schemes import QuantScheme
from modular_kernel.tensors import ExpertWeights
from modular_kernel.types import Problem

CPU = torch.device("cpu")
# Ragged against every group and block below.
BASE = Problem(tokens=2, hidden=40, intermediate=24, experts=3, top_k=1)
FP8, HALF = torch.float8_e4m3fn, (torch.float32, torch.bfloat16)
FULL, BYTE = (torch.float32,), (torch.uint8,)

# Of w1 (3, 48, 40) and w2 (3, 40, 24): storage, scale and zero point, each with its dtypes.
# fmt: off
SPECS: dict[str, tuple[tuple[tuple[int, ...] | None, ...], tuple[Any, ...]]] = {
    "fp8_w8a8_tensor": (((3, 48, 40), (3,), None, (3, 40, 24), (3,), None), ((FP8,), FULL)),
    "fp8_w8a8_tensor:static=true": (
        ((3, 48, 40), (3,), None, (3, 40, 24), (3,), None), ((FP8,), FULL)),
    "fp8_w8a8_channel": (((3, 48, 40), (3, 48), None, (3, 40, 24), (3, 40), None), ((FP8,), FULL)),
    "fp8_w8a8_block:block=32x16": (
        ((3, 48, 40), (3, 2, 3), None, (3, 40, 24), (3, 2, 2), None), ((FP8,), FULL)),
    "fp8_w8a8_block": (
        ((3, 48, 40), (3, 1, 1), None, (3, 40, 24), (3, 1, 1), None), ((FP8,), FULL)),
    "fp8_w8a16_tensor": (((3, 48, 40), (3,), None, (3, 40, 24), (3,), None), ((FP8,), HALF)),
    "fp8_w8a16_channel": (((3, 48, 40), (3, 48), None, (3, 40, 24), (3, 40), None), ((FP8,), HALF)),
    "fp8_w8a16_block:block=32x16": (
        ((3, 48, 40), (3, 2, 3), None, (3, 40, 24), (3, 2, 2), None), ((FP8,), HALF)),
    "int8_w8a8_channel": (
        ((3, 48, 40), (3, 48), None, (3, 40, 24), (3, 40), None), ((torch.int8,), FULL)),
    "int8_w8a8_block:block=16x32": (
        ((3, 48, 40), (3, 3, 2), None, (3, 40, 24), (3, 3, 1), None), ((torch.int8,), FULL)),
    "int8_w8a16_channel": (
        ((3, 48, 40), (3, 48), None, (3, 40, 24), (3, 40), None), ((torch.int8,), HALF)),
    "int8_w8a16_group:group=16": (
        ((3, 48, 40), (3, 48, 3), None, (3, 40, 24), (3, 40, 2), None), (BYTE, HALF)),
    "int8_w8a16_group:group=16,zero_points=true": (
        ((3, 48, 40), (3, 48, 3), (3, 48, 3), (3, 40, 24), (3, 40, 2), (3, 40, 2)), (BYTE, HALF)),
    "int4_w4a16_group:group=16": (
        ((3, 48, 20), (3, 48, 3), None, (3, 40, 12), (3, 40, 2), None), (BYTE, HALF)),
    "int4_w4a16_group:group=16,zero_points=true": (
        ((3, 48, 20), (3, 48, 3), (3, 24, 3), (3, 40, 12), (3, 40, 2), (3, 20, 2)), (BYTE, HALF)),
    "int4_w4a16_group:group=40": (
        ((3, 48, 20), (3, 48, 1), None, (3, 40, 12), (3, 40, 1), None), (BYTE, HALF)),
    "mxfp4_w4a16": (((3, 48, 20), (3, 48, 2), None, (3, 40, 12), (3, 40, 1), None), (BYTE, BYTE)),
}
# fmt: on
# Those of test_nvfp4, test_nvfp4_activations and test_act_order.
ELSEWHERE = {"none", "nvfp4_w4a16", "nvfp4_w4a4", "int4_w4a16_act_order", "int8_w8a16_act_order"}
each_scheme = pytest.mark.parametrize("text", SPECS)


def problem_of(text: str, **changes: Any) -> Problem:
    return replace(BASE, quant=text, **changes)


def plain_weights(problem: Problem, seed: int = 0, std: float = 1.0) -> ExpertWeights:
    """Float32 weights, and static scales where the scheme has them."""
    generator = torch.Generator().manual_seed(seed)
    w1 = std * torch.randn(problem.e, problem.w1_rows, problem.hidden, generator=generator)
    w2 = std * torch.randn(problem.e, problem.hidden, problem.intermediate, generator=generator)
    static = torch.tensor([0.01]) if problem.scheme.static else None
    return ExpertWeights(w1, w2, a1_scale=static, a2_scale=static)


def made(text: str, **changes: Any) -> tuple[Problem, ExpertWeights]:
    problem = problem_of(text, **changes)
    return problem, quantise_weights(plain_weights(problem), problem)


def parts(weights: ExpertWeights, name: str) -> tuple[Any, Any, Any]:
    return tuple(getattr(weights, f"{name}{end}") for end in ("", "_scale", "_zero_point"))


# ------------------------------------------------------------------------------------- shapes


def test_every_scheme_is_here() -> None:
    assert {QuantScheme.parse(text).name for text in SPECS} == SCHEMES - ELSEWHERE


@each_scheme
def test_specs(text: str) -> None:
    shapes, (stored, scale) = SPECS[text]
    names = ("w1", "w1_scale", "w1_zero_point", "w2", "w2_scale", "w2_zero_point")
    dtypes = (stored, scale, BYTE) * 2
    want = {n: (s, d) for n, s, d in zip(names, shapes, dtypes, strict=True) if s is not None}
    if "static" in text:
        want |= {"a1_scale": ((1,), FULL), "a2_scale": ((1,), FULL)}
    specs = weight_specs(problem_of(text))
    assert {name: (spec.shape, spec.dtypes) for name, spec in specs.items()} == want


def test_specs_of_unquantised_and_ungated_weights() -> None:
    specs = weight_specs(replace(BASE, activation="relu2"))
    assert {name: (s.shape, s.dtypes) for name, s in specs.items()} == {
        "w1": ((3, 24, 40), (torch.bfloat16,)),
        "w2": ((3, 40, 24), (torch.bfloat16,)),
    }


def test_scales_of_a_float32_problem_are_float32() -> None:
    for text in ("int8_w8a16_channel", "int4_w4a16_group"):
        assert weight_specs(problem_of(text, dtype=torch.float32))["w1_scale"].dtypes == FULL


@each_scheme
def test_what_is_made_is_what_is_accepted(text: str) -> None:
    problem, weights = made(text)
    check_weights_quantised(weights, problem, CPU)
    local = replace(problem, local_experts=2, expert_map=True)
    with pytest.raises(ShapeError, match="w1: got"):
        check_weights_quantised(weights, local, CPU)


@pytest.mark.parametrize("name", ["hidden", "intermediate"])
@pytest.mark.parametrize("text", ["int4_w4a16_group", "mxfp4_w4a16"])
def test_odd_rows_cannot_be_packed(text: str, name: str) -> None:
    problem = problem_of(text, **{name: 33})
    assert quant.unpackable(problem) == (name,)
    with pytest.raises(ConfigurationError, match=f"{name}: got 33, need a multiple of 2: {text}"):
        weight_specs(problem)


def test_odd_rows_of_bytes_are_fine() -> None:
    problem, weights = made("int8_w8a16_group:group=16,zero_points=true", hidden=33)
    assert weights.w1_zero_point is not None
    assert weights.w1_zero_point.shape == (3, 48, 3)
    check_weights_quantised(weights, problem, CPU)


# ------------------------------------------------------------------------------------ meanings


def test_int4_by_hand() -> None:
    """Two rows of four weights: 0x21 holds 1 at k = 0 and 2 at k = 1."""
    w = torch.tensor([[[0x21, 0x43], [0x08, 0xF7]]], dtype=torch.uint8)
    scale = torch.tensor([[[0.5, 2.0], [1.0, 10.0]]])
    scheme = QuantScheme.parse("int4_w4a16_group:group=2")
    rows = [[-3.5, -3.0, -10.0, -8.0], [0.0, -8.0, -10.0, 70.0]]
    assert dequantise(w, scale, None, scheme).tolist() == [rows]
    # Zero points of row 0 in the low nibbles: 1 and 3; of row 1 in the high ones: 2 and 4.
    zeros = torch.tensor([[[0x21, 0x43]]], dtype=torch.uint8)
    scheme = QuantScheme.parse("int4_w4a16_group:group=2,zero_points=true")
    rows = [[0.0, 0.5, 0.0, 2.0], [6.0, -2.0, 30.0, 110.0]]
    assert dequantise(w, scale, zeros, scheme).tolist() == [rows]


def test_mxfp4_by_hand() -> None:
    """All sixteen codes, two a byte; then scales of 2, 1/2, the least and none."""
    codes = torch.tensor([[[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]], dtype=torch.uint8)
    scheme = QuantScheme.parse("mxfp4_w4a16")
    half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = torch.tensor([half + [-v for v in half]])
    for byte, factor in ((127, 1.0), (128, 2.0), (126, 0.5), (0, 2.0**-127), (254, 2.0**127)):
        scale = torch.tensor([[[byte]]], dtype=torch.uint8)
        assert torch.equal(dequantise(codes, scale, None, scheme)[0], values * factor)
    nothing = torch.tensor([[[255]]], dtype=torch.uint8)
    assert dequantise(codes, nothing, None, scheme).isnan().all()


def e4m3(byte: int) -> float:
    """The value of a float8_e4m3fn, from its bits."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    value = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def value_of(weights: ExpertWeights, name: str, at: tuple[int, int, int], text: str) -> float:
    """One weight, straight from the table in modular_kernel.quant."""
    (w, scale, zero), (e, n, k) = parts(weights, name), at
    scheme = QuantScheme.parse(text)
    width = scheme.group[-1] if scheme.group else 0
    where = {
        "tensor": (e,),
        "channel": (e, n),
        "block": (e, n // scheme.group[0] if scheme.group else 0, k // width if width else 0),
        "group": (e, n, k // width if width else 0),
    }[scheme.granularity]
    s = scale[where].item()
    if scheme.weight == "float8_e4m3fn":
        return e4m3(int(w.view(torch.uint8)[at])) * s
    if scheme.weight == "int8":
        return int(w[at]) * s
    if scheme.weight == "uint8":
        return (int(w[at]) - (128 if zero is None else int(zero[where]))) * s
    nibble = int(w[e, n, k // 2]) >> (4 if k % 2 else 0) & 15
    if scheme.weight == "uint4":
        if zero is None:
            return (nibble - 8) * s
        packed = int(zero[e, n // 2, k // width])
        return (nibble - (packed >> 4 if n % 2 else packed & 15)) * s
    magnitude = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[nibble % 8]
    return math.copysign(magnitude, -1 if nibble > 7 else 1) * 2.0 ** (s - 127)


@each_scheme
def test_dequantise_is_the_table(text: str) -> None:
    problem, weights = made(text)
    for name in ("w1", "w2"):
        got = dequantise(*parts(weights, name), problem.scheme)
        e, rows, depth = getattr(plain_weights(problem), name).shape
        assert got.shape == (e, rows, depth)
        assert got.dtype == torch.float32
        want = [
            [[value_of(weights, name, (x, n, k), text) for k in range(depth)] for n in range(rows)]
            for x in range(e)
        ]
        torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64))


# ------------------------------------------------------------------------------------ rounding

# Largest error of a weight relative to its tile's largest weight: half a step.
STEPS = {
    "float8_e4m3fn": 16 / 448,
    "int8": 0.5 / 127,
    "uint8": 0.5 / 127,
    "uint4": 0.5 / 7,
    "float4_e2m1": 1 / 3.5,  # a scale is a power of two, so half of the range may be unused
}


@each_scheme
def test_round_trip_is_the_nearest_value(text: str) -> None:
    problem, weights = made(text)
    scheme = problem.scheme
    for name in ("w1", "w2"):
        plain = getattr(plain_weights(problem), name)
        error = (dequantise(*parts(weights, name), scheme) - plain).abs()
        assert 0 < float(error.max()) <= 1.001 * STEPS[scheme.weight] * float(plain.abs().max())


@each_scheme
def test_experts_are_quantised_in_pieces(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, whole = made(text)
    some = Mock(wraps=quant._quantise)
    monkeypatch.setattr(quant, "_quantise", some)
    monkeypatch.setattr(quant, "_WEIGHTS_AT_ONCE", 2 * 40 * 24)
    pieces = quantise_weights(plain_weights(problem), problem)
    taken = [len(call.args[0]) for call in some.call_args_list]
    assert taken == [1, 1, 1, 2, 1]  # w1 has twice as many weights as w2
    for name, one in vars(whole).items():
        other = getattr(pieces, name)
        assert (one is None) == (other is None), name
        assert one is None or torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name


@each_scheme
def test_what_was_rounded_once_stays(text: str) -> None:
    problem, weights = made(text, dtype=torch.float32)
    values = {n: dequantise(*parts(weights, n), problem.scheme) for n in ("w1", "w2")}
    again = quantise_weights(replace(plain_weights(problem), **values), problem)
    for name, first in values.items():
        second = dequantise(*parts(again, name), problem.scheme)
        torch.testing.assert_close(second, first, rtol=1e-6, atol=1e-6)


@each_scheme
def test_each_tile_has_a_scale_of_its_own(text: str) -> None:
    """Weights of a thousandth beside those of one: no tile's scale may serve another's."""
    problem = problem_of(text)
    plain = plain_weights(problem)
    small = plain.w1.clone()
    granularity = problem.scheme.granularity
    bn, bk = {"channel": (1, 40), "block": problem.scheme.group, "tensor": (48, 40)}.get(
        granularity, (1, (*problem.scheme.group, 0)[0])
    )
    small[1, :bn, :bk] *= 1e-3  # exactly the first tile of expert 1
    weights = quantise_weights(replace(plain, w1=small), problem)
    got = dequantise(*parts(weights, "w1"), problem.scheme)
    tile, want = got[1, :bn, :bk], small[1, :bn, :bk]
    assert float((tile - want).norm() / want.norm()) < 0.2
    other = quantise_weights(plain, problem)
    rest = dequantise(*parts(other, "w1"), problem.scheme)
    rest[1, :bn, :bk] = tile
    assert torch.equal(got, rest)


@each_scheme
@pytest.mark.parametrize("value", [0.0, 1e-20])
def test_nothing_is_divided_by_zero(text: str, value: float) -> None:
    problem = problem_of(text)
    plain = plain_weights(problem)
    flat = replace(plain, w1=torch.full_like(plain.w1, value))
    weights = quantise_weights(flat, problem)
    got = dequantise(*parts(weights, "w1"), problem.scheme)
    assert float(got.abs().max()) <= 1e-10


def test_e2m1_rounds_ties_to_the_even_code() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    want = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    row = torch.tensor([6.0, *ties, *(-t for t in ties), *([0.0] * 17)])
    problem = Problem(1, 32, 32, 1, 1, quant="mxfp4_w4a16", activation="relu2")
    w = row.expand(1, 32, 32)
    got = dequantise(*parts(quantise_weights(ExpertWeights(w, w), problem), "w1"), problem.scheme)
    assert got[0, 0].tolist() == [6.0, *want, *(-v for v in want), *([0.0] * 17)]


def test_e8m0_is_the_least_power_of_two_that_reaches() -> None:
    problem = Problem(1, 32, 32, 1, 1, quant="mxfp4_w4a16", activation="relu2")
    for largest, byte in (
        (6.0, 127),
        (7.0, 127),
        (7.01, 128),
        (3.5, 126),
        (3.4, 126),
        (896.0, 134),
    ):
        w = torch.zeros(1, 32, 32)
        w[0, :, 5] = -largest
        weights = quantise_weights(ExpertWeights(w, w), problem)
        assert weights.w1_scale is not None
        assert weights.w1_scale.unique().tolist() == [byte], largest


def test_zero_points_cover_lopsided_groups() -> None:
    """Weights in [0, 1] use all sixteen values; a symmetric scheme would use nine of them."""
    problem, symmetric = (
        problem_of(f"int4_w4a16_group:group=16{zeros}") for zeros in (",zero_points=true", "")
    )
    plain = plain_weights(problem)
    plain = replace(plain, w1=plain.w1.abs())
    errors = []
    for each in (problem, symmetric):
        got = dequantise(*parts(quantise_weights(plain, each), "w1"), each.scheme)
        errors.append(float((got - plain.w1).norm()))
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize("text", ["int8_w8a16_channel", "int4_w4a16_group:group=16"])
def test_scales_of_the_problems_dtype(text: str) -> None:
    problem = problem_of(text, dtype=torch.float16)
    weights = quantise_weights(plain_weights(problem), problem, scale_dtype=torch.float16)
    assert weights.w1_scale is not None
    assert weights.w1_scale.dtype == torch.float16
    got = dequantise(*parts(weights, "w1"), problem.scheme)
    step = STEPS[problem.scheme.weight] * 1.01
    assert float((got - plain_weights(problem).w1).abs().max()) <= step * float(
        plain_weights(problem).w1.abs().max()
    )
    with pytest.raises(ConfigurationError, match="scale_dtype: got bfloat16, need float32 or"):
        quantise_weights(plain_weights(problem), problem, scale_dtype=torch.bfloat16)


def test_quantise_weights_keeps_what_is_not_quantised() -> None:
    problem = problem_of("fp8_w8a8_tensor:static=true", bias=True, expert_map=True)
    plain = plain_weights(problem)
    b1, b2, where = torch.ones(3, 48), torch.ones(3, 40), torch.arange(3, dtype=torch.int32)
    plain = replace(plain, b1=b1, b2=b2, expert_map=where)
    weights = quantise_weights(plain, problem)
    assert (weights.b1, weights.b2, weights.expert_map) == (b1, b2, where)
    assert weights.a1_scale is plain.a1_scale
    transposed = replace(plain, w1=plain.w1.mT.contiguous().mT, w2=plain.w2.mT.contiguous().mT)
    again = quantise_weights(transposed, problem)
    assert torch.equal(again.w1.view(torch.uint8), weights.w1.view(torch.uint8))


def test_quantise_weights_refuses() -> None:
    problem = problem_of("fp8_w8a8_tensor")
    plain = plain_weights(problem)
    with pytest.raises(ConfigurationError, match="quant: got none"):
        quantise_weights(plain, BASE)
    with pytest.raises(ShapeError, match="w2: got"):
        quantise_weights(replace(plain, w2=plain.w2.mT), problem)
    with pytest.raises(DtypeError, match="w1: got float8_e4m3fn, need unquantised"):
        quantise_weights(replace(plain, w1=plain.w1.to(FP8)), problem)
    with pytest.raises(WeightsError, match="a1_scale: got None, need"):
        quantise_weights(plain, problem_of("fp8_w8a8_tensor:static=true"))


def test_strided_weights_are_accepted() -> None:
    problem, weights = made("fp8_w8a8_block:block=32x16")
    strided = replace(weights, w1=weights.w1.mT.contiguous().mT)
    check_weights_quantised(strided, problem, CPU)
    assert torch.equal(
        dequantise(*parts(strided, "w1"), problem.scheme),
        dequantise(*parts(weights, "w1"), problem.scheme),
    )
