"""Limits and kernel arguments of the paths aligned_w4 and gemv_w4, for 4-bit weights.

The kernels of these paths read weights as int32 words, each with eight weights of a row, and unpack
them in registers. An MMA operand spreads K over four lanes, and each lane holds whole words, so K
of an MMA is a multiple of 32.
"""

import math

import torch

from experts.triton.operands import GemmOperands, scale_group, word_format
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights

_VECTOR_BYTES = 16  # bytes per vector load
MAX_MMA_K = 128  # largest number of K elements that a warp multiplies per step
_MIN_MMA_K = 32  # four lanes hold one 32-bit word of eight weights each along K


def supports_w4(problem: Problem) -> bool:
    """Return whether the kernels for 4-bit weights support `problem`.

    The kernels need 16-bit activations and weights without act order. K must be a multiple of 32,
    and so must the size of the scale groups, except for NVFP4.
    """
    scheme = problem.scheme
    if not scheme.packed or scheme.act_order:
        return False
    if problem.dtype is torch.float32:
        return False
    return all(
        k % _MIN_MMA_K == 0 and choose_mma_k(scheme, k) >= _MIN_MMA_K
        for k in (problem.hidden, problem.intermediate)
    )


def choose_mma_k(scheme: QuantScheme, k: int, max_mma_k: int = MAX_MMA_K) -> int:
    """Return the number of K elements per MMA, at most max_mma_k.

    If a scale covers fewer than k elements, the result divides the group, so that one scale applies
    to the whole MMA. NVFP4 groups do not limit the result, because the weights are multiplied by
    their scales before the MMA.
    """
    (group,) = scheme.group
    group = 0 if group >= k or scheme.matrix_scales else group
    return math.gcd(group, max_mma_k)


def allows_vector_loads(weights: ExpertWeights) -> bool:
    """Return whether 16-byte vector loads can read the packed rows of w1 and w2."""
    return all(
        w.stride(2) == 1
        and all(n % _VECTOR_BYTES == 0 for n in (w.data_ptr(), w.stride(0), w.stride(1)))
        for w in (weights.w1, weights.w2)
    )


def w4_arguments(operands: GemmOperands) -> dict[str, object]:
    """Return the arguments of the 4-bit kernels for weights, scales, zero points and biases."""
    w, scale, zero_point, bias = operands.w, operands.scale, operands.zero_point, operands.bias
    assert scale is not None
    _, group = scale_group(operands.scheme, operands.size_k)
    zero_point_or_global_scale = (
        zero_point if operands.global_scale is None else operands.global_scale
    )
    return {
        "b_ptr": w,
        "b_scale_ptr": scale,
        "zero_point_ptr": w if zero_point_or_global_scale is None else zero_point_or_global_scale,
        "bias_ptr": w if bias is None else bias,
        "stride_be": w.stride(0),
        "stride_bn": w.stride(1),
        "stride_bse": scale.stride(0),
        "stride_bsn": scale.stride(1),
        "stride_bze": 0
        if zero_point_or_global_scale is None
        else zero_point_or_global_scale.stride(0),
        "stride_bzn": 0 if zero_point is None else zero_point.stride(1),
        "stride_bias": 0 if bias is None else bias.stride(0),
        "HAS_BIAS": bias is not None,
        "WEIGHT_FORMAT": word_format(operands.scheme),
        "HAS_ZERO_POINTS": zero_point is not None,
        "GROUP_K": group or operands.size_k,
    }
