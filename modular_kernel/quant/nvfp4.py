"""Bit-exact nvfp4: 4-bit e2m1 codes q, an e4m3 scale s per 16 values, a float32 global scale g.

    w = (e2m1(q) s) g                      in float32, in this order: the first product is exact
    s = e4m3(min(448, G amax / 6))         amax over 16 values, G = 1 / g
    q = e2m1(x (G / s)), 0 where s is 0    to nearest, ties to the even code, at most 6

Libraries that quantize weights return the same bits as `quantize`. GEMMs that quantize their
activations multiply by an approximate reciprocal instead of dividing. Their scales may therefore
differ by one e4m3 code.
"""

import torch

from modular_kernel.quant.scale_tiles import pack_pairs

GROUP = 16  # values per scale
MAX_VALUE = 6.0  # largest e2m1 value
MAX_SCALE = 448.0  # largest e4m3 value
_MIN_GLOBAL_SCALE = 2.0**-126  # the inverse of a smaller scale may overflow

# Magnitudes of e2m1 by code; bit 3 is the sign.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of uint8 codes 0 to 15; code 8 is -0."""
    magnitude = torch.tensor(_MAGNITUDES, dtype=torch.float32, device=codes.device)
    magnitude = magnitude[(codes & 7).long()]
    return torch.where(codes >= 8, -magnitude, magnitude)


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Return the uint8 codes of the nearest e2m1 values. Ties go to the even code.

    Magnitudes above 6, and NaN, get the code of 6.
    """
    # Values of e2m1 have steps of 1/2 in [0, 2], of 1 in [2, 4], and of 2 in [4, 6]. `halves` is
    # the code in the first range, `ones` in the second and `twos` in the third. Outside its range,
    # each of them is greater than or equal to the code. The code is therefore the minimum of the
    # three. round() rounds ties to even numbers, and the offsets 2 and 4 are even.
    magnitude = values.abs().nan_to_num_(MAX_VALUE).clamp_(max=MAX_VALUE)
    halves, ones = (2 * magnitude).round_(), magnitude.round().add_(2)
    twos = magnitude.div_(2).round_().add_(4)
    code = torch.minimum(torch.minimum(halves, ones), twos).to(torch.uint8)
    return code | (values < 0).to(torch.uint8) << 3


def quantize(x: torch.Tensor, inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize values (..., K); return uint8 codes (..., K) and e4m3 scales (..., ceil(K / 16)).

    Codes are not packed: each takes a byte. The last group may be partial.

    x: values in any floating dtype; converted to float32.
    inverse: 1 / g, float32, broadcastable to (..., 1).
    """
    x, depth = x.float(), x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -depth % GROUP))
    groups = padded.reshape(*x.shape[:-1], padded.shape[-1] // GROUP, GROUP)
    # The divisor is a tensor because torch on a GPU replaces a division by a Python number with a
    # multiplication by its reciprocal, which rounds differently.
    unclamped = inverse * groups.abs().amax(-1) / x.new_tensor(MAX_VALUE)
    scale = unclamped.clamp(max=MAX_SCALE).to(torch.float8_e4m3fn)
    divisor = scale.float()
    multiplier = torch.where(divisor == 0, 0.0, inverse / divisor)  # G / s
    codes = encode_e2m1(groups * multiplier[..., None])
    return codes.flatten(-2)[..., :depth], scale


def dequantize(
    codes: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor
) -> torch.Tensor:
    """Return the float32 values (..., K) of codes and scales from `quantize`.

    global_scale: g, float32, broadcastable to (..., 1).
    """
    expanded_scale = scale.float().repeat_interleave(GROUP, -1)[..., : codes.shape[-1]]
    return (decode_e2m1(codes) * expanded_scale) * global_scale


def compute_matrix_indices(rows: int, matrices: int, *, interleaved: bool) -> torch.Tensor:
    """Return the index of the matrix to which each row belongs, (rows,) int64.

    w1 of a gated layer stores two matrices, gate and up, each with its own global scale.

    matrices: number of matrices of equal size.
    interleaved: whether their rows alternate. Otherwise, the matrices are stored one after another.
    """
    row = torch.arange(rows, device="cpu")
    return row % matrices if interleaved else row // (rows // matrices)


def compute_global_scales(
    row_amax_eN: torch.Tensor, matrices: int, *, interleaved: bool
) -> torch.Tensor:
    """Return the global scale of each matrix, amax / (6 * 448), as (e, matrices) float32.

    amax is the largest magnitude of the matrix. A global scale is at least 2^-126, so that its
    inverse is finite. It is 1 for a matrix of zeros.

    row_amax_eN: float32, the largest magnitude of each row.
    matrices, interleaved: see `compute_matrix_indices`.
    """
    e, rows = row_amax_eN.shape
    if interleaved:
        amax = row_amax_eN.reshape(e, rows // matrices, matrices).amax(1)
    else:
        amax = row_amax_eN.reshape(e, matrices, rows // matrices).amax(2)
    max_magnitude = amax.new_tensor(MAX_VALUE * MAX_SCALE)
    return torch.where(amax > 0, (amax / max_magnitude).clamp(min=_MIN_GLOBAL_SCALE), 1.0)


def quantize_matrices(
    w_eNK: torch.Tensor, matrices: int, *, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize weights (e, N, K).

    Return packed codes (e, N, K / 2), scales (e, N, ceil(K / 16)), global scales (e, matrices).

    matrices, interleaved: see `compute_matrix_indices`.
    """
    global_scale = compute_global_scales(w_eNK.abs().amax(2), matrices, interleaved=interleaved)
    matrix_of_row = compute_matrix_indices(w_eNK.shape[1], matrices, interleaved=interleaved)
    inverse = (1 / global_scale)[:, matrix_of_row.to(w_eNK.device), None]
    codes, scale = quantize(w_eNK, inverse)
    return pack_pairs(codes, 2), scale, global_scale
