"""Kinds of values of x and of the router weights.

Zeros, negative weights, overflow, NaN and infinity occur in real layers and are difficult for
parts.
"""

from dataclasses import replace

import torch

from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import Routing

VALUES = (
    "ordinary",
    "zero_rows",  # every third token is zero
    "signed",  # router weights of both signs, and zero; NaN or negative where a pair is skipped
    "large",  # one third of the tokens have large gates, and another third have gates that overflow
    "nan_token",  # one token is NaN
    "inf_token",  # one token contains an infinity
    "peaks",  # one value per token is far above the rest, at a different position in each token
    "faint",  # values so small that 8-bit scales are clamped to their minimum
    "ties",  # midpoints between two values of the quantized dtype, which reveal the rounding rule
)
HANDPICKED_VALUES = ("peaks", "faint", "ties")  # used only in hand-picked cases

# Factors of x. The product of gate and up stays finite with _LARGE_FACTOR, except in float16, and
# overflows with _OVERFLOW_FACTOR.
_LARGE_FACTOR = {torch.float16: 50.0, torch.bfloat16: 1e12, torch.float32: 1e12}
# Ratio of the peak to the expected norm of its row. Its mantissa has many nonzero bits.
_PEAK_RATIO = 1.2
_FAINT_FACTOR = 4e-9
# Scale of each group with values="ties": a power of two, so that division by it is exact.
TIED_SCALE = {"int8": 2.0**-6, "float8_e4m3fn": 2.0**-7, "float4_e2m1": 2.0**-1}
_TIED_PEAK = {"int8": 127.0, "float8_e4m3fn": 448.0, "float4_e2m1": 6.0}
_OVERFLOW_FACTOR = {torch.float16: 2e4, torch.bfloat16: 1e30, torch.float32: 1e30}


def apply_values_to_x(x_TH: torch.Tensor, problem: Problem, values: str) -> torch.Tensor:
    """Return x, in float32, with values of the kind `values`. May modify x_TH in place."""
    tokens = len(x_TH)
    if values == "zero_rows":
        x_TH[0::3] = 0
    elif values == "large":
        x_TH[0::3] *= _LARGE_FACTOR[problem.dtype]
        x_TH[2::3] *= _OVERFLOW_FACTOR[problem.dtype]
    elif tokens and values == "nan_token":
        x_TH[tokens // 2] = torch.nan
    elif tokens and values == "inf_token":
        x_TH[tokens // 2, 0] = torch.inf
    elif values == "faint":
        x_TH *= _FAINT_FACTOR
    elif values == "peaks":
        rows, last_column = torch.arange(tokens), x_TH.shape[1] - 1
        peaks = _PEAK_RATIO * x_TH.shape[1] ** 0.5 * (1.0 + rows)
        x_TH[rows, last_column - rows * last_column // max(1, tokens - 1)] = peaks
    elif values == "ties":
        return _round_to_midpoints(x_TH, problem)
    return x_TH


def _round_to_midpoints(x_TH: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Return the midpoints nearest to x.

    The first value of each group is the largest representable value, so that the scale computed
    from the group is the power of two for which the midpoints are made.
    """
    scheme = problem.scheme
    scale, peak = TIED_SCALE[scheme.activation], _TIED_PEAK[scheme.activation]
    magnitude = x_TH.abs() / scale
    if scheme.activation == "int8":
        ties = (magnitude.floor() + 0.5).clamp(max=peak - 0.5)
    elif scheme.activation == "float8_e4m3fn":
        step = torch.exp2(magnitude.clamp(min=2.0**-6).log2().floor() - 3)  # 3 mantissa bits
        ties = ((magnitude / step).floor() + 0.5) * step
        ties = ties.clamp(max=peak * 27 / 28)  # 432, between 416 and 448
    else:
        midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
        ties = midpoints[(magnitude[..., None] - midpoints).abs().argmin(-1)]
    group = scheme.group[-1] if scheme.activation_granularity == "group" else x_TH.shape[1]
    ties[:, ::group] = peak
    return torch.copysign(ties * scale, x_TH)


def assign_token_groups(values: str, tokens: int) -> torch.Tensor:
    """Return the group number of each token, (T,) int64; 0 for ordinary tokens.

    Each group is compared separately, because extreme tokens would hide errors in ordinary tokens.
    """
    groups = torch.zeros(tokens, dtype=torch.int64)
    if values == "large":
        groups[0::3], groups[2::3] = 1, 2
    elif tokens and values in ("nan_token", "inf_token"):
        groups[tokens // 2] = 1
    return groups


def find_unsupported_reason(problem: Problem, values: str) -> str | None:
    """Return why values of this kind cannot be checked in `problem`, or None if they can."""
    has_one_scale = problem.scheme.activation_granularity == "tensor"
    if has_one_scale and values in ("large", "nan_token", "inf_token"):
        reason = "all tokens share one activation scale, so no token is independent of the others"
        return f"[values] {values}: {reason}"
    if values == "ties" and not problem.scheme.quantizes_activations:
        return "[values] ties: activations are not quantized"
    if values == "faint" and problem.dtype is torch.float16:
        return "[values] faint: float16 holds no such values"
    return None


def apply_values_to_routing(
    routing: Routing, problem: Problem, expert_map: torch.Tensor | None, values: str
) -> Routing:
    """Return the routing with router weights of the kind `values`.

    With "signed", all weights of an expert have the same sign. If the weights of a token canceled
    each other, its sum over top-k would be far smaller than its terms, and the order of summation
    would determine the error.
    """
    if values != "signed":
        return routing
    weights_TK = routing.topk_weights_TK.clone()
    flat_weights = weights_TK.view(-1)
    ids = routing.topk_ids_TK.view(-1)
    flat_weights[ids % 3 == 1] *= -1
    flat_weights[5::7] = 0
    is_unused = (ids < 0) | (ids >= problem.experts)
    if expert_map is not None:
        is_unused |= expert_map[ids.clamp(0, problem.experts - 1)] < 0
    flat_weights[is_unused] = torch.nan
    flat_weights[is_unused & (torch.arange(len(flat_weights)) % 2 == 1)] = -7
    return replace(routing, topk_weights_TK=weights_TK)
