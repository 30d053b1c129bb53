"""nvfp4, to the bit: e2m1 values, an e4m3 scale for 16 of them, one float32 scale over all.

    w = (e2m1(q) s) g                      in float32, in this order: the first product is exact
    s = e4m3(min(448, G amax / 6))         of 16 values, G = 1 / g
    q = e2m1(x (G / s)), 0 where s is 0    to nearest, ties to the even code, at most 6

`quantize` is what packers do to weights, and what kernels of 4-bit activations (w4a4) do to those.
Hardware divides by an approximate reciprocal there, so that a scale may be one code off.
"""

import torch

from modular_kernel.quant.scale_tiles import pack_pairs

GROUP = 16
LARGEST = 6.0  # of e2m1
LARGEST_SCALE = 448.0  # of e4m3

# The eight values of e2m1 by code; bit 3 is the sign.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of uint8 codes 0 to 15; 8 is -0."""
    magnitude = torch.tensor(_VALUES, device=codes.device)[(codes & 7).long()]
    return torch.where(codes >= 8, -magnitude, magnitude)


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """Return the uint8 codes nearest to float values: ties to the even code, at most 6; so is NaN.

    Codes count steps of 1/2 up to 2, of 1 up to 4 and of 2 from there on. Each count is right in
    its own range and no less than the right one elsewhere. What is added to a rounded count is
    even, so halves that are rounded to even give even codes.
    """
    size = values.abs().nan_to_num_(LARGEST).clamp_(max=LARGEST)
    halves, ones = (2 * size).round_(), size.round().add_(2)
    twos = size.div_(2).round_().add_(4)
    code = torch.minimum(torch.minimum(halves, ones), twos).to(torch.uint8)
    return code | (values < 0).to(torch.uint8) << 3


def quantize(x: torch.Tensor, inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize (..., K): uint8 codes (..., K), one a byte, and e4m3 scales (..., ceil(K / 16)).

    inverse: G, float32, broadcastable to (..., 1). x is read as float32. A last group may be
    ragged.
    """
    x, depth = x.float(), x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -depth % GROUP))
    groups = padded.reshape(*x.shape[:-1], padded.shape[-1] // GROUP, GROUP)
    # A tensor: on a GPU torch divides by a number as it multiplies by its reciprocal.
    wanted = inverse * groups.abs().amax(-1) / x.new_tensor(LARGEST)
    scale = wanted.clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn)
    divisor = scale.float()
    factor = torch.where(divisor == 0, 0.0, inverse / divisor)
    codes = e2m1_codes(groups * factor[..., None])
    return codes.flatten(-2)[..., :depth], scale


def dequantize(codes: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return float32 (..., K) of what `quantize` gives; factor: g, broadcastable to (..., 1)."""
    spread = scale.float().repeat_interleave(GROUP, -1)[..., : codes.shape[-1]]
    return (e2m1_values(codes) * spread) * factor


def matrix_of_rows(rows: int, matrices: int, *, interleaved: bool) -> torch.Tensor:
    """Return which of `matrices` each row is of: one below the other, or row by row in turn."""
    row = torch.arange(rows)
    return row % matrices if interleaved else row // (rows // matrices)


def quantize_matrices(
    w_eNK: torch.Tensor, matrices: int, *, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize (e, N, K): packed codes, scales of groups, and (e, matrices) of matrices.

    The latter reach to the largest of each matrix's weights, whose rows lie as `matrix_of_rows`.
    """
    e, rows = w_eNK.shape[:2]
    most = w_eNK.abs().amax(2)
    if interleaved:
        largest = most.reshape(e, rows // matrices, matrices).amax(1)
    else:
        largest = most.reshape(e, matrices, rows // matrices).amax(2)
    reach = largest.new_tensor(LARGEST * LARGEST_SCALE)
    whole = torch.where(largest > 0, largest / reach, 1.0)
    of_row = matrix_of_rows(rows, matrices, interleaved=interleaved).to(w_eNK.device)
    codes, scale = quantize(w_eNK, (1 / whole)[:, of_row, None])
    return pack_pairs(codes, 2), scale, whole
