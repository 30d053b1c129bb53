"""Device functions: minima and maxima that keep a NaN.

`tl.maximum`, `tl.minimum` and `tl.max` return the operand that is a number when the other one is
NaN. These return NaN: `max.NaN` and `min.NaN` of PTX, one instruction as well.
"""

import triton
import triton.language as tl


@triton.jit
def maximum_nan(a, b):
    """Return the larger of two floating-point values, NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum_nan(a, b):
    """Return the smaller of two floating-point values, NaN if either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def clamp_nan(value, low, high):
    """`value` limited to [low, high], NaN where it is."""
    return minimum_nan(maximum_nan(value, low), high)


@triton.jit
def max_nan(value, axis: tl.constexpr):
    """Return the largest value along `axis`, NaN if one of them is."""
    return tl.reduce(value, axis, maximum_nan)
