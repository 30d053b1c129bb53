"""Configuration of the dequantized path: supported layers, limits, chunk size and launches.

The path runs the GEMMs of the grouped_tma path on weights that a separate launch converts to bf16,
one chunk of experts at a time.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import torch

from experts.triton.candidates import CandidateGroups, RowRanges
from experts.triton.grouped_tma import grouped_tma_config
from experts.triton.launch_config import Device, Gemm, LaunchConfig, MoEConfig, Violation, gemms
from modular_kernel.spec.problem import Problem

NAME = "dequantized"

_CANDIDATE_ROWS: RowRanges = {128: (32, 1 << 62)}
# Minimum mean rows per expert for which the path is faster than the aligned path, which dequantizes
# in its GEMMs. A key is a scheme, with an option if the option changes the limit. Measured on an
# H200 (2026-11-23, triton 3.6.0, bf16) with Mixtral, DeepSeek-V3 EP8, Qwen3-30B and gpt-oss. fp8
# and NVFP4 were not measured. fp8 uses the limit of int8 with channel scales, and NVFP4 that of
# mxfp4.
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
_MAX_CHUNK_BYTES = 1 << 30  # maximum size of dequantized weights, unless a single expert is larger


@lru_cache(maxsize=1 << 10)
def remove_quant(problem: Problem) -> Problem:
    """Return the same layer with unquantized weights."""
    return replace(problem, quant="none")


def supports(problem: Problem, device: Device) -> bool:
    """Return whether the kernels of this path support `problem` on `device`.

    The scheme must quantize weights, without act order, but not activations. Activations must be
    bf16, because the exponent range of fp16 is too small for dequantized weights.
    """
    scheme = problem.scheme
    is_weight_only = scheme.quantized and not scheme.quantizes_activations
    if not is_weight_only or scheme.act_order or problem.dtype is not torch.bfloat16:
        return False
    return grouped_tma_config.supports(remove_quant(problem), device)


def violations(
    tile: LaunchConfig, gemm: Gemm, problem: Problem, device: Device
) -> Iterator[Violation]:
    """Yield every limit that prevents `tile` from being launched for this GEMM of `problem`."""
    unquantized_gemm = gemms(remove_quant(problem))[gemm.index - 1]
    for violation in grouped_tma_config.violations(tile, unquantized_gemm, "plain", device):
        need = violation.need.replace(f"{grouped_tma_config.NAME} path", f"{NAME} path")
        yield replace(violation, need=need)


def min_rows(problem: Problem) -> int:
    """Return the minimum mean rows per expert for which this path is used without a tuned file."""
    scheme = problem.scheme
    option = ":zero_points" if scheme.zero_points else ":repacked" if scheme.repacked else ""
    return _MIN_ROWS.get(scheme.name + option, _MIN_ROWS[scheme.name])


def min_tokens(problem: Problem) -> int:
    """Return the smallest token count for which this path is used without a tuned file."""
    return min_rows(problem) * problem.experts // problem.top_k


def experts_per_chunk(problem: Problem) -> int:
    """Return the number of experts whose weights are dequantized at once."""
    expert_bytes = _count_max_expert_values(problem) * problem.dtype.itemsize
    num_chunks = -(-problem.e // max(1, _MAX_CHUNK_BYTES // expert_bytes))
    return -(-problem.e // num_chunks)


def values_per_chunk(problem: Problem) -> int:
    """Return the number of elements of a buffer that fits w1 or w2 of all experts in a chunk."""
    return experts_per_chunk(problem) * _count_max_expert_values(problem)


def _count_max_expert_values(problem: Problem) -> int:
    """Return the number of elements of w1 or w2 of one expert, whichever is larger."""
    return max(problem.w1_rows, problem.intermediate) * problem.hidden


def default_config(problem: Problem) -> MoEConfig:
    """Return the launches of unquantized weights."""
    return replace(grouped_tma_config.default_config(remove_quant(problem)), path=NAME)


def candidates(problem: Problem, tokens: int) -> CandidateGroups:
    """Return the launches to time for a call of `tokens` tokens."""
    return grouped_tma_config.candidates(remove_quant(problem), tokens, _CANDIDATE_ROWS)
