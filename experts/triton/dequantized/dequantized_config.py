"""Supported problems, limits, chunk size and launches of the dequantized path.

Its GEMMs are those of the grouped_tma path, on weights that a launch before them converts to bf16.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import torch

from experts.triton.candidates import CandidateGroups, RowRanges
from experts.triton.grouped_tma import grouped_tma_config as grouped
from experts.triton.grouped_tma.grouped_tma_config import candidates as plain_candidates
from experts.triton.launch_config import Device, Gemm, LaunchConfig, MoEConfig, Violation, gemms
from modular_kernel.spec.problem import Problem

NAME = "dequantized"

_CANDIDATE_ROWS: RowRanges = {128: (32, 1 << 62)}
# Mean rows per expert from which the path is faster than the aligned path, whose GEMMs dequantize.
# Measured on one H200 (2026-11-23, triton 3.6.0, bf16) on Mixtral, DeepSeek-V3 EP8, Qwen3-30B and
# gpt-oss. fp8 and NVFP4 were not measured: they use the limits of the most similar schemes, int8
# with channel scales and mxfp4.
_MIN_ROWS = {
    "int4_w4a16_group": 96,
    "int4_w4a16_group:zero_points": 64,
    "mxfp4_w4a16": 72,
    "mxfp4_w4a16:repacked": 72,
    "nvfp4_w4a16": 72,
    "int8_w8a16_group": 64,
    "int8_w8a16_channel": 128,
    "fp8_w8a16_tensor": 128,
    "fp8_w8a16_channel": 128,
    "fp8_w8a16_block": 128,
}
_MAX_BYTES = 1 << 30  # maximum size of the dequantized weights, unless one expert is larger


@lru_cache(maxsize=1 << 10)
def without_quant(problem: Problem) -> Problem:
    """Return the same layer with unquantized weights."""
    return replace(problem, quant="none")


def supports(problem: Problem, device: Device) -> bool:
    """Return whether the kernels of this path support `problem` on `device`.

    Weights must be quantized, without act order, and activations must not be. Activations must be
    bf16, because the exponent range of fp16 is too small for dequantized weights.
    """
    scheme = problem.scheme
    weight_only = scheme.quantized and not scheme.quantizes_activations
    if not weight_only or scheme.act_order or problem.dtype is not torch.bfloat16:
        return False
    return grouped.supports(without_quant(problem), device)


def violations(
    tile: LaunchConfig, gemm: Gemm, problem: Problem, device: Device
) -> Iterator[Violation]:
    """Yield every reason why `tile` cannot be launched for this GEMM of `problem`."""
    unquantized = gemms(without_quant(problem))[gemm.index - 1]
    for violation in grouped.violations(tile, unquantized, "plain", device):
        yield replace(
            violation, need=violation.need.replace(f"{grouped.NAME} path", f"{NAME} path")
        )


def min_rows(problem: Problem) -> int:
    """Return the mean rows per expert from which this path is used without a tuned file."""
    scheme = problem.scheme
    option = ":zero_points" if scheme.zero_points else ":repacked" if scheme.repacked else ""
    return _MIN_ROWS.get(scheme.name + option, _MIN_ROWS[scheme.name])


def min_tokens(problem: Problem) -> int:
    """Return the smallest call for which this path is used without a tuned file, in tokens."""
    return min_rows(problem) * problem.experts // problem.top_k


def experts_at_once(problem: Problem) -> int:
    """Return the number of experts whose weights are dequantized and multiplied at a time."""
    largest = max(problem.w1_rows, problem.intermediate) * problem.hidden * problem.dtype.itemsize
    groups = -(-problem.e // max(1, _MAX_BYTES // largest))
    return -(-problem.e // groups)


def values_at_once(problem: Problem) -> int:
    """Return the number of elements of a buffer for w1 or w2 of `experts_at_once` experts."""
    return experts_at_once(problem) * max(problem.w1_rows, problem.intermediate) * problem.hidden


def default(problem: Problem) -> MoEConfig:
    """Return the launches without a tuned file, those of unquantized weights."""
    return replace(grouped.default_config(without_quant(problem)), path=NAME)


def candidates(problem: Problem, tokens: int) -> CandidateGroups:
    """Return the launches to time for `tokens` tokens."""
    return plain_candidates(without_quant(problem), tokens, _CANDIDATE_ROWS)
