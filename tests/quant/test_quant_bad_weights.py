"""Quantized weights that do not match their problem raise typed errors that state the value found
and the value needed.

Each entry of `INVALID_WEIGHTS` changes one field of valid weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from modular_kernel.catalog import make_kernel
from modular_kernel.errors import (
    DeviceError,
    DtypeError,
    InputError,
    LayoutError,
    ShapeError,
    WeightsError,
)
from modular_kernel.quant.quantized_weights import check_weights_quantized, quantize_weights
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.tensors import ExpertWeights, Routing

CPU = torch.device("cpu")
# The sizes are not multiples of the groups and blocks below.
BASE = Problem(tokens=2, hidden=40, intermediate=24, experts=3, top_k=1)


def make_weights(scheme_name: str) -> tuple[Problem, ExpertWeights]:
    """Return a problem with three experts and valid weights."""
    problem = replace(BASE, quant=scheme_name)
    static = torch.ones(1) if problem.scheme.static else None
    unquantized = ExpertWeights(
        torch.randn(3, 48, 40), torch.randn(3, 40, 24), a1_scale=static, a2_scale=static
    )
    return problem, quantize_weights(unquantized, problem)


Change = Callable[[ExpertWeights], Any]


@dataclass(frozen=True)
class InvalidField:
    """A field changed by `change`, and the expected error."""

    scheme_name: str
    name: str
    change: Change
    error: type[InputError]
    got: str
    need: str

    def __str__(self) -> str:
        return f"{self.scheme_name}-{self.name}-{self.error.__name__}"


def narrow_by_one(name: str, dim: int) -> Change:
    """Return a change that removes the last element along `dim`."""
    return lambda w: getattr(w, name).narrow(dim, 0, getattr(w, name).shape[dim] - 1).contiguous()


def cast(name: str, dtype: torch.dtype) -> Change:
    return lambda w: getattr(w, name).to(dtype)


def set_to_none(_weights: ExpertWeights) -> None:
    return None


def ones(*shape: int) -> Change:
    return lambda _: torch.ones(shape)


INT4 = "int4_w4a16_group:group=16,zero_points=true"
INT8 = "int8_w8a16_group:group=16,zero_points=true"
BLOCK = "fp8_w8a8_block:block=32x16"
STATIC = "fp8_w8a8_tensor:static=true"

INVALID_WEIGHTS = (
    InvalidField(
        "fp8_w8a8_tensor", "w1", cast("w1", torch.bfloat16), DtypeError, "bfloat16", "float8_e4m3fn"
    ),
    InvalidField("int8_w8a8_channel", "w2", cast("w2", torch.uint8), DtypeError, "uint8", "int8"),
    InvalidField("int8_w8a16_group", "w1", cast("w1", torch.int8), DtypeError, "int8", "uint8"),
    InvalidField(
        "fp8_w8a8_tensor", "w1", narrow_by_one("w1", 2), ShapeError, "(3, 48, 39)", "(e, 2I, H)"
    ),
    InvalidField(
        INT4,
        "w1",
        narrow_by_one("w1", 2),
        ShapeError,
        "(3, 48, 19)",
        "(e, 2I, H / 2) = (3, 48, 20)",
    ),
    InvalidField(
        INT4,
        "w2",
        lambda w: torch.cat([w.w2, w.w2], 2),
        ShapeError,
        "(3, 40, 24)",
        "(e, H, I / 2) = (3, 40, 12)",
    ),
    InvalidField(
        "mxfp4_w4a16", "w2", narrow_by_one("w2", 1), ShapeError, "(3, 39, 12)", "(e, H, I / 2)"
    ),
    InvalidField(
        "fp8_w8a8_tensor", "w1_scale", set_to_none, WeightsError, "None", "(e,) = (3,) float32 for"
    ),
    InvalidField("fp8_w8a8_tensor", "w1_scale", ones(3, 2), ShapeError, "(3, 2)", "(e,) = (3,)"),
    InvalidField("fp8_w8a8_tensor", "w2_scale", ones(3, 1), ShapeError, "(3, 1)", "(e,) = (3,)"),
    InvalidField(
        "fp8_w8a8_tensor",
        "w2_scale",
        cast("w2_scale", torch.bfloat16),
        DtypeError,
        "bfloat16",
        "float32",
    ),
    InvalidField(
        "fp8_w8a8_channel", "w1_scale", ones(3, 48, 1), ShapeError, "(3, 48, 1)", "(e, 2I)"
    ),
    InvalidField(
        "fp8_w8a8_channel",
        "w1_scale",
        lambda w: torch.ones(48, 3).mT,
        LayoutError,
        "strides (1, 3)",
        "contiguous",
    ),
    InvalidField(
        "fp8_w8a8_channel",
        "w2_scale",
        lambda w: w.w2_scale.to("meta"),
        DeviceError,
        "meta",
        "cpu, where x is",
    ),
    InvalidField("fp8_w8a8_channel", "w1", lambda w: w.w1.to("meta"), DeviceError, "meta", "cpu"),
    InvalidField(
        BLOCK,
        "w1_scale",
        narrow_by_one("w1_scale", 1),
        ShapeError,
        "(3, 1, 3)",
        "(e, ceil(2I / 32), ceil(H / 16)) = (3, 2, 3)",
    ),
    InvalidField(
        BLOCK,
        "w2_scale",
        narrow_by_one("w2_scale", 2),
        ShapeError,
        "(3, 2, 1)",
        "(e, ceil(H / 32), ceil(I / 16)) = (3, 2, 2)",
    ),
    InvalidField(
        "int8_w8a8_block:block=16x32", "w1_scale", ones(3, 48), ShapeError, "(3, 48)", "(3, 3, 2)"
    ),
    InvalidField(
        "int8_w8a16_channel",
        "w1_scale",
        cast("w1_scale", torch.float16),
        DtypeError,
        "float16",
        "float32 or bfloat16",
    ),
    InvalidField(
        "int8_w8a16_channel", "w1_zero_point", ones(3, 48), WeightsError, "a tensor", "None for"
    ),
    InvalidField(
        INT8,
        "w1_zero_point",
        set_to_none,
        WeightsError,
        "None",
        "(e, 2I, ceil(H / 16)) = (3, 48, 3)",
    ),
    InvalidField(
        INT8, "w1_zero_point", cast("w1_zero_point", torch.int8), DtypeError, "int8", "uint8"
    ),
    InvalidField(
        INT8,
        "w2_zero_point",
        narrow_by_one("w2_zero_point", 2),
        ShapeError,
        "(3, 40, 1)",
        "(3, 40, 2)",
    ),
    InvalidField(
        INT4,
        "w1_zero_point",
        lambda w: torch.cat([w.w1_zero_point] * 2, 1),
        ShapeError,
        "(3, 48, 3)",
        "(e, 2I / 2, ceil(H / 16)) = (3, 24, 3)",
    ),
    InvalidField(
        INT4,
        "w2_zero_point",
        set_to_none,
        WeightsError,
        "None",
        "(e, H / 2, ceil(I / 16)) = (3, 20, 2)",
    ),
    InvalidField(
        INT4, "w1_scale", narrow_by_one("w1_scale", 2), ShapeError, "(3, 48, 2)", "(3, 48, 3)"
    ),
    InvalidField(
        "int4_w4a16_group:group=16",
        "w1_zero_point",
        lambda w: torch.zeros(3, 24, 3, dtype=torch.uint8),
        WeightsError,
        "a tensor",
        "None for",
    ),
    InvalidField(
        "mxfp4_w4a16", "w1_scale", cast("w1_scale", torch.float32), DtypeError, "float32", "uint8"
    ),
    InvalidField(
        "mxfp4_w4a16",
        "w2_scale",
        narrow_by_one("w2_scale", 2),
        ShapeError,
        "(3, 40, 0)",
        "ceil(I / 32)",
    ),
    InvalidField(
        "fp8_w8a8_tensor", "a1_scale", ones(1), WeightsError, "a tensor", "None for quant="
    ),
    InvalidField(
        "fp8_w8a8_channel", "a2_scale", ones(1), WeightsError, "a tensor", "None for quant="
    ),
    InvalidField(STATIC, "a1_scale", set_to_none, WeightsError, "None", "(1,) = (1,) float32"),
    InvalidField(STATIC, "a2_scale", ones(3), ShapeError, "(3,)", "(1,) = (1,)"),
    InvalidField(
        STATIC, "a2_scale", lambda w: torch.ones(1).half(), DtypeError, "float16", "float32"
    ),
)


@pytest.mark.parametrize("case", INVALID_WEIGHTS, ids=str)
def test_bad_weights_are_refused_by_name(case: InvalidField) -> None:
    """Both the check itself and a kernel refuse them, before anything is launched."""
    problem, weights = make_weights(case.scheme_name)
    invalid_weights = replace(weights, **{case.name: case.change(weights)})
    with pytest.raises(case.error) as exc_info:
        check_weights_quantized(invalid_weights, problem, CPU)
    assert exc_info.value.what == case.name
    assert case.got in str(exc_info.value.got)
    assert case.need in str(exc_info.value.need)
    pair = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
    kernel = make_kernel(*pair, problem, machine=Machine("cpu"))
    x_TH = torch.ones(2, 40, dtype=torch.bfloat16)
    routing = Routing(torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int32))
    with pytest.raises(case.error):
        kernel(x_TH, invalid_weights, routing)
