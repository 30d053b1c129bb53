"""Quantized weights of every scheme, and the expected shapes and dtypes of their tensors."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from modular_kernel.quant.quantized_weights import quantize_weights
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights

CPU = torch.device("cpu")
# The hidden and intermediate sizes are not multiples of the group and block sizes below, except 40.
BASE = Problem(tokens=2, hidden=40, intermediate=24, experts=3, top_k=1)
FP8, HALF = torch.float8_e4m3fn, (torch.float32, torch.bfloat16)
FLOAT32, BYTE = (torch.float32,), (torch.uint8,)
ANY = (torch.float32, torch.float16, torch.bfloat16)

# Scheme -> (shapes, dtypes). shapes: the stored weight, scale and zero point of w1, then of w2. The
# weights are (3, 48, 40) and (3, 40, 24). dtypes: possible dtypes of the weights and of the scales.
# fmt: off
SPECS: dict[str, tuple[tuple[tuple[int, ...] | None, ...], tuple[Any, ...]]] = {
    "fp8_w8a8_tensor": (((3, 48, 40), (3,), None, (3, 40, 24), (3,), None), ((FP8,), FLOAT32)),
    "fp8_w8a8_tensor:static=true": (
        ((3, 48, 40), (3,), None, (3, 40, 24), (3,), None), ((FP8,), FLOAT32)),
    "fp8_w8a8_channel": (
        ((3, 48, 40), (3, 48), None, (3, 40, 24), (3, 40), None), ((FP8,), FLOAT32)),
    "fp8_w8a8_block:block=32x16": (
        ((3, 48, 40), (3, 2, 3), None, (3, 40, 24), (3, 2, 2), None), ((FP8,), FLOAT32)),
    "fp8_w8a8_block": (
        ((3, 48, 40), (3, 1, 1), None, (3, 40, 24), (3, 1, 1), None), ((FP8,), FLOAT32)),
    "fp8_w8a16_tensor": (((3, 48, 40), (3,), None, (3, 40, 24), (3,), None), ((FP8,), HALF)),
    "fp8_w8a16_channel": (((3, 48, 40), (3, 48), None, (3, 40, 24), (3, 40), None), ((FP8,), HALF)),
    "fp8_w8a16_block:block=32x16": (
        ((3, 48, 40), (3, 2, 3), None, (3, 40, 24), (3, 2, 2), None), ((FP8,), HALF)),
    "int8_w8a8_channel": (
        ((3, 48, 40), (3, 48), None, (3, 40, 24), (3, 40), None), ((torch.int8,), FLOAT32)),
    "int8_w8a8_block:block=16x32": (
        ((3, 48, 40), (3, 3, 2), None, (3, 40, 24), (3, 3, 1), None), ((torch.int8,), FLOAT32)),
    "int8_w8a16_channel": (
        ((3, 48, 40), (3, 48), None, (3, 40, 24), (3, 40), None), ((torch.int8,), HALF)),
    "int8_w8a16_group:group=16": (
        ((3, 48, 40), (3, 48, 3), None, (3, 40, 24), (3, 40, 2), None), (BYTE, ANY)),
    "int8_w8a16_group:group=16,zero_points=true": (
        ((3, 48, 40), (3, 48, 3), (3, 48, 3), (3, 40, 24), (3, 40, 2), (3, 40, 2)), (BYTE, ANY)),
    "int4_w4a16_group:group=16": (
        ((3, 48, 20), (3, 48, 3), None, (3, 40, 12), (3, 40, 2), None), (BYTE, ANY)),
    "int4_w4a16_group:group=16,zero_points=true": (
        ((3, 48, 20), (3, 48, 3), (3, 24, 3), (3, 40, 12), (3, 40, 2), (3, 20, 2)), (BYTE, ANY)),
    "int4_w4a16_group:group=40": (
        ((3, 48, 20), (3, 48, 1), None, (3, 40, 12), (3, 40, 1), None), (BYTE, ANY)),
    "mxfp4_w4a16": (((3, 48, 20), (3, 48, 2), None, (3, 40, 12), (3, 40, 1), None), (BYTE, BYTE)),
}
# fmt: on
each_scheme = pytest.mark.parametrize("scheme_name", SPECS)


def make_problem(scheme_name: str, **changes: Any) -> Problem:
    return replace(BASE, quant=scheme_name, **changes)


def plain_weights(problem: Problem, seed: int = 0, std: float = 1.0) -> ExpertWeights:
    """Draw float32 weights, with static scales if the scheme has them."""
    generator = torch.Generator().manual_seed(seed)
    w1 = std * torch.randn(problem.e, problem.w1_rows, problem.hidden, generator=generator)
    w2 = std * torch.randn(problem.e, problem.hidden, problem.intermediate, generator=generator)
    static_scale = torch.tensor([0.01]) if problem.scheme.static else None
    return ExpertWeights(w1, w2, a1_scale=static_scale, a2_scale=static_scale)


def make_quantized(scheme_name: str, **changes: Any) -> tuple[Problem, ExpertWeights]:
    """Return the problem and quantized weights of a scheme."""
    problem = make_problem(scheme_name, **changes)
    return problem, quantize_weights(plain_weights(problem), problem)


def tensors_of(weights: ExpertWeights, name: str) -> tuple[Any, Any, Any]:
    """Return a weight, its scale and its zero point."""
    return tuple(getattr(weights, f"{name}{suffix}") for suffix in ("", "_scale", "_zero_point"))
