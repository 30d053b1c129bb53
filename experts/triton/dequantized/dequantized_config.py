"""The dequantized path: which problems it serves, and how many experts go at once.

Its products are grouped GEMMs of weights that a launch has written as bf16 before.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import torch

from experts.triton.candidates import Groups, Rows
from experts.triton.grouped_tma import grouped_tma_config as grouped
from experts.triton.grouped_tma.grouped_tma_config import candidates as plain_candidates
from experts.triton.launch_config import Device, Gemm, LaunchConfig, MoEConfig, Violation, gemms
from modular_kernel.spec.problem import Problem

NAME = "dequantized"

_TRIED: Rows = {128: (32, 1 << 62)}
# Mean rows of an expert from which the path pays, by how slowly the aligned path unpacks. Measured
# on one H200 (2026-11-23, triton 3.6.0, bf16) on Mixtral, DeepSeek-V3 EP8, Qwen3-30B and gpt-oss;
# fp8 and nvfp4 were not: they take the numbers of int8 by channel and of mxfp4, the nearest.
_LEAST_ROWS = {
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
_MOST_BYTES = 1 << 30  # of dequantized weights at a time, unless one expert has more


@lru_cache(maxsize=1 << 10)
def plain(problem: Problem) -> Problem:
    """Return the same layer with unquantized weights."""
    return replace(problem, quant="none")


def serves(problem: Problem, device: Device) -> bool:
    """Whether the kernels of this path can compute `problem` on `device`.

    Weights alone are quantized, and their columns lie as x has them. fp16 has too few exponents for
    every weight that a scale gives.
    """
    scheme = problem.scheme
    weights_alone = scheme.quantized and not scheme.quantizes_activations
    if not weights_alone or scheme.act_order or problem.dtype is not torch.bfloat16:
        return False
    return grouped.serves(plain(problem), device)


def violations(
    tile: LaunchConfig, gemm: Gemm, problem: Problem, device: Device
) -> Iterator[Violation]:
    """Every reason not to launch `tile` for this GEMM of `problem` on this path."""
    unquantized = gemms(plain(problem))[gemm.index - 1]
    for violation in grouped.violations(tile, unquantized, "plain", device):
        yield replace(
            violation, need=violation.need.replace(f"{grouped.NAME} path", f"{NAME} path")
        )


def least_rows(problem: Problem) -> int:
    """Mean rows of an expert from which a call takes this path without a tuned file."""
    scheme = problem.scheme
    option = ":zero_points" if scheme.zero_points else ":repacked" if scheme.repacked else ""
    return _LEAST_ROWS.get(scheme.name + option, _LEAST_ROWS[scheme.name])


def least_tokens(problem: Problem) -> int:
    """Return the fewest tokens of a call that takes this path without a tuned file."""
    return least_rows(problem) * problem.experts // problem.top_k


def experts_at_once(problem: Problem) -> int:
    """How many experts' matrices are dequantized and multiplied before the next ones are."""
    largest = max(problem.w1_rows, problem.intermediate) * problem.hidden * problem.dtype.itemsize
    groups = -(-problem.e // max(1, _MOST_BYTES // largest))
    return -(-problem.e // groups)


def values_at_once(problem: Problem) -> int:
    """Elements of the buffer that holds `experts_at_once` matrices of either product."""
    return experts_at_once(problem) * max(problem.w1_rows, problem.intermediate) * problem.hidden


def default(problem: Problem) -> MoEConfig:
    """Return the launches without a tuned file: those for unquantized weights."""
    return replace(grouped.default(plain(problem)), path=NAME)


def candidates(problem: Problem, tokens: int) -> Groups:
    """Return launches worth timing with so many tokens."""
    return plain_candidates(plain(problem), tokens, _TRIED)
