"""What the paths for 4-bit weights share: where words lie, and which problems fill them."""

import math

import torch

from experts.triton.operands import Product, scale_group, word_format
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights

_ALIGNMENT = 16  # bytes of one copy
WARP_K = 128  # depth of the products of one warp in one step, unless told
_LEAST_DEPTH = 32  # four lanes of one word each


def fills_words(problem: Problem) -> bool:
    """Return whether 16-bit rows meet 4-bit weights whose depths words of eight fill."""
    scheme = problem.scheme
    if not scheme.packed or scheme.act_order:
        return False
    if problem.dtype is torch.float32:
        return False
    return all(
        k % _LEAST_DEPTH == 0 and product_depth(scheme, k) >= _LEAST_DEPTH
        for k in (problem.hidden, problem.intermediate)
    )


def product_depth(scheme: QuantScheme, k: int, most: int = WARP_K) -> int:
    """Return the depth of one product, at most `most`.

    It is within a group, if that is not all of the depth k; but scales of nvfp4 multiply weights.
    """
    (group,) = scheme.group
    group = 0 if group >= k or scheme.matrix_scales else group
    return math.gcd(group, most)


def lie_ready(weights: ExpertWeights) -> bool:
    """Return whether w1 and w2, of bytes, can be read 16 bytes at once along their rows."""
    return all(
        w.stride(2) == 1
        and all(n % _ALIGNMENT == 0 for n in (w.data_ptr(), w.stride(0), w.stride(1)))
        for w in (weights.w1, weights.w2)
    )


def w4_arguments(product: Product) -> dict[str, object]:
    """Return where kernels for 4-bit weights find a product's, and what lies beside them."""
    w, scale, zero, bias = product.w, product.scale, product.zero_point, product.bias
    assert scale is not None
    _, group = scale_group(product.scheme, product.depth)
    beside = zero if product.global_scale is None else product.global_scale
    return {
        "b_ptr": w,
        "b_scale_ptr": scale,
        "zero_ptr": w if beside is None else beside,
        "bias_ptr": w if bias is None else bias,
        "stride_be": w.stride(0),
        "stride_bn": w.stride(1),
        "stride_bse": scale.stride(0),
        "stride_bsn": scale.stride(1),
        "stride_bze": 0 if beside is None else beside.stride(0),
        "stride_bzn": 0 if zero is None else zero.stride(1),
        "stride_bias": 0 if bias is None else bias.stride(0),
        "HAS_BIAS": bias is not None,
        "FORMAT": word_format(product.scheme),
        "HAS_ZERO": zero is not None,
        "GROUP_K": group or product.depth,
    }
