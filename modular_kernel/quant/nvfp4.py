"""Bit-exact nvfp4: e2m1 values, an e4m3 scale per 16 of them, and one float32 global scale.

    w = (e2m1(q) s) g                      in float32, in this order: the first product is exact
    s = e4m3(min(448, G amax / 6))         amax over 16 values, G = 1 / g
    q = e2m1(x (G / s)), 0 where s is 0    to nearest, ties to the even code, at most 6

Libraries that pack weights compute the same as `quantize`. GEMMs with fp4 activations do, too,
except that hardware divides by an approximate reciprocal, so that a scale may differ by one code.
"""

import torch

from modular_kernel.quant.scale_tiles import pack_pairs

GROUP = 16
MAX_VALUE = 6.0  # of e2m1
MAX_SCALE = 448.0  # of e4m3
_MIN_SCALE = 2.0**-126  # of a matrix: the inverse of a smaller one may overflow

# Magnitudes of e2m1 by code; bit 3 is the sign.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of uint8 codes 0 to 15; code 8 is -0."""
    magnitude = torch.tensor(_MAGNITUDES, dtype=torch.float32, device=codes.device)
    magnitude = magnitude[(codes & 7).long()]
    return torch.where(codes >= 8, -magnitude, magnitude)


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """Return the nearest uint8 codes of float values: ties to the even code, at most 6, NaN to 6.

    Codes have steps of 1/2 up to 2, of 1 up to 4, and of 2 above. Each of `halves`, `ones` and
    `twos` is the code in its own range, and not smaller than the code elsewhere, so their minimum
    is the code. The offsets added to rounded values are even, so rounding halves to even gives even
    codes.
    """
    magnitude = values.abs().nan_to_num_(MAX_VALUE).clamp_(max=MAX_VALUE)
    halves, ones = (2 * magnitude).round_(), magnitude.round().add_(2)
    twos = magnitude.div_(2).round_().add_(4)
    code = torch.minimum(torch.minimum(halves, ones), twos).to(torch.uint8)
    return code | (values < 0).to(torch.uint8) << 3


def quantize(x: torch.Tensor, inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize (..., K) values; return uint8 codes (..., K) and e4m3 scales (..., ceil(K / 16)).

    Each code takes a byte. The last group may be partial.

    x: of any floating dtype; converted to float32.
    inverse: G, float32, broadcastable to (..., 1).
    """
    x, depth = x.float(), x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -depth % GROUP))
    groups = padded.reshape(*x.shape[:-1], padded.shape[-1] // GROUP, GROUP)
    # Divide by a tensor: on a GPU, torch turns division by a Python number into a multiplication
    # by its reciprocal.
    unclamped = inverse * groups.abs().amax(-1) / x.new_tensor(MAX_VALUE)
    scale = unclamped.clamp(max=MAX_SCALE).to(torch.float8_e4m3fn)
    divisor = scale.float()
    factor = torch.where(divisor == 0, 0.0, inverse / divisor)
    codes = e2m1_codes(groups * factor[..., None])
    return codes.flatten(-2)[..., :depth], scale


def dequantize(codes: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return the float32 values (..., K) of `quantize`'s results.

    factor: the global scale g, broadcastable to (..., 1).
    """
    scale_of_value = scale.float().repeat_interleave(GROUP, -1)[..., : codes.shape[-1]]
    return (e2m1_values(codes) * scale_of_value) * factor


def matrix_of_rows(rows: int, matrices: int, *, interleaved: bool) -> torch.Tensor:
    """Return (rows,) int64: the index of the matrix that each row belongs to.

    matrices: number of matrices of equal size: 2 if gate and up are stored together, else 1.
    interleaved: whether their rows alternate. Otherwise one matrix follows the other.
    """
    row = torch.arange(rows, device="cpu")
    return row % matrices if interleaved else row // (rows // matrices)


def matrix_scales(row_amax_eN: torch.Tensor, matrices: int, *, interleaved: bool) -> torch.Tensor:
    """Return the global scales (e, matrices), each of which covers its matrix's largest weight.

    A scale is at least 2^-126, so that its inverse is finite, and 1 for a matrix of zeros.

    row_amax_eN: float32, the largest magnitude of each row.
    matrices, interleaved: see `matrix_of_rows`.
    """
    e, rows = row_amax_eN.shape
    if interleaved:
        amax = row_amax_eN.reshape(e, rows // matrices, matrices).amax(1)
    else:
        amax = row_amax_eN.reshape(e, matrices, rows // matrices).amax(2)
    max_magnitude = amax.new_tensor(MAX_VALUE * MAX_SCALE)
    return torch.where(amax > 0, (amax / max_magnitude).clamp(min=_MIN_SCALE), 1.0)


def quantize_matrices(
    w_eNK: torch.Tensor, matrices: int, *, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize weights (e, N, K); return codes (e, N, K / 2), scales, global scales (e, matrices).

    matrices, interleaved: see `matrix_of_rows`.
    """
    global_scale = matrix_scales(w_eNK.abs().amax(2), matrices, interleaved=interleaved)
    matrix_of_row = matrix_of_rows(w_eNK.shape[1], matrices, interleaved=interleaved)
    inverse = (1 / global_scale)[:, matrix_of_row.to(w_eNK.device), None]
    codes, scale = quantize(w_eNK, inverse)
    return pack_pairs(codes, 2), scale, global_scale
