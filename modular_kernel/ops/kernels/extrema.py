"""Device functions for minima and maxima that propagate NaN.

`tl.maximum`, `tl.minimum` and `tl.max` ignore a NaN operand. The functions here return NaN. They
compile to the PTX instructions max.NaN and min.NaN, which are as fast.
"""

import triton
import triton.language as tl


@triton.jit
def maximum_nan(a, b):
    """Return the larger of two floating-point values, or NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum_nan(a, b):
    """Return the smaller of two floating-point values, or NaN if either is NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def clamp_nan(value, low, high):
    """Clamp `value` to [low, high]. NaN stays NaN."""
    return minimum_nan(maximum_nan(value, low), high)


@triton.jit
def max_nan(value, axis: tl.constexpr):
    """Return the largest value along `axis`, or NaN if any value is NaN."""
    return tl.reduce(value, axis, maximum_nan)
