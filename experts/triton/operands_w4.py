"""Limits and kernel arguments shared by the paths that unpack 4-bit weights in registers."""

import math

import torch

from experts.triton.operands import GemmOperands, scale_group, word_format
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights

_ALIGNMENT = 16  # bytes per vector load
WARP_K = 128  # K elements per warp and step, by default
_MIN_DEPTH = 32  # K elements of four lanes, which have one 32-bit word (eight weights) each


def supports_w4(problem: Problem) -> bool:
    """Return whether the kernels for 4-bit weights support `problem`.

    They need 16-bit activations, weights without act order, and K and groups that are multiples of
    32.
    """
    scheme = problem.scheme
    if not scheme.packed or scheme.act_order:
        return False
    if problem.dtype is torch.float32:
        return False
    return all(
        k % _MIN_DEPTH == 0 and mma_depth(scheme, k) >= _MIN_DEPTH
        for k in (problem.hidden, problem.intermediate)
    )


def mma_depth(scheme: QuantScheme, k: int, max_depth: int = WARP_K) -> int:
    """Return the K elements of one MMA, at most `max_depth`, for a GEMM with K = k.

    The result divides the scale group, so that one scale applies to the whole MMA, unless one group
    covers all of k. It is not limited by NVFP4 groups, because their scales multiply the weights.
    """
    (group,) = scheme.group
    group = 0 if group >= k or scheme.matrix_scales else group
    return math.gcd(group, max_depth)


def allows_vector_loads(weights: ExpertWeights) -> bool:
    """Return whether the rows of w1 and w2 (packed, uint8) can be read in 16-byte vector loads."""
    return all(
        w.stride(2) == 1
        and all(n % _ALIGNMENT == 0 for n in (w.data_ptr(), w.stride(0), w.stride(1)))
        for w in (weights.w1, weights.w2)
    )


def w4_arguments(operands: GemmOperands) -> dict[str, object]:
    """Return the weight, scale, zero-point and bias arguments of the 4-bit kernels."""
    w, scale, zero, bias = operands.w, operands.scale, operands.zero_point, operands.bias
    assert scale is not None
    _, group = scale_group(operands.scheme, operands.depth)
    zero_or_global = zero if operands.global_scale is None else operands.global_scale
    return {
        "b_ptr": w,
        "b_scale_ptr": scale,
        "zero_ptr": w if zero_or_global is None else zero_or_global,
        "bias_ptr": w if bias is None else bias,
        "stride_be": w.stride(0),
        "stride_bn": w.stride(1),
        "stride_bse": scale.stride(0),
        "stride_bsn": scale.stride(1),
        "stride_bze": 0 if zero_or_global is None else zero_or_global.stride(0),
        "stride_bzn": 0 if zero is None else zero.stride(1),
        "stride_bias": 0 if bias is None else bias.stride(0),
        "HAS_BIAS": bias is not None,
        "FORMAT": word_format(operands.scheme),
        "HAS_ZERO": zero is not None,
        "GROUP_K": group or operands.depth,
    }
