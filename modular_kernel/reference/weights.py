"""Reference for the dequantization of weights, which shares no code with any part."""

from math import prod

import torch

from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights


def dequantize_matrix(
    weights: ExpertWeights, name: str, expert: int, problem: Problem, dtype: torch.dtype
) -> torch.Tensor:
    """Return a weight matrix of one expert, dequantized, (N, K) in `dtype`.

    name: "w1" or "w2".
    """
    scheme = problem.scheme
    codes: torch.Tensor = getattr(weights, name)[expert]
    if not scheme.quantized:
        return codes.to(dtype)
    num_rows, num_columns = codes.shape[0], codes.shape[1] * (2 if scheme.packed else 1)
    n = torch.arange(num_rows, device=codes.device)[:, None]
    k = torch.arange(num_columns, device=codes.device)[None, :]
    if scheme.packed:
        codes = unpack_codes(codes, n, k, scheme)
    scale = _select_scales(getattr(weights, f"{name}_scale")[expert], n, k, scheme)
    if scheme.weight == "float4_e2m1":
        global_scale = getattr(weights, f"{name}_global_scale")
        scales = _list_e2m1_scales(
            scale, None if global_scale is None else global_scale[expert], n, problem
        )
        return prod((s.to(dtype) for s in scales), start=_decode_e2m1(codes.to(dtype)))
    if scheme.external:
        return _look_up_values(codes, scheme.values, dtype) * scale.to(dtype)
    zero_point = getattr(weights, f"{name}_zero_point")
    value = codes.to(dtype)
    if zero_point is not None and scheme.packed:
        zero = zero_point[expert][n // 2, k // scheme.group[0]] >> (4 * (n % 2)) & 15
        value = value - zero.to(dtype)
    elif zero_point is not None:
        value = value - zero_point[expert][n, k // scheme.group[0]].to(dtype)
    elif scheme.weight in ("uint4", "uint8"):
        value = value - (8 if scheme.packed else 128)
    return value * scale.to(dtype)


def _select_scales(
    scale: torch.Tensor, n: torch.Tensor, k: torch.Tensor, scheme: QuantScheme
) -> torch.Tensor:
    """Return the scales of one expert at rows n and columns k, or its only scale."""
    if scheme.granularity == "channel":
        return scale[n]
    if scheme.granularity == "block":
        return scale[n // scheme.group[0], k // scheme.group[1]]
    if scheme.granularity == "group":
        return scale[n, k // scheme.group[0]]
    return scale


def _look_up_values(
    codes: torch.Tensor, values: tuple[float, ...], dtype: torch.dtype
) -> torch.Tensor:
    result = torch.full(codes.shape, torch.nan, dtype=dtype, device=codes.device)
    for code, value in enumerate(values):
        result = result.masked_fill(codes == code, value)
    return result


def _list_e2m1_scales(
    scale: torch.Tensor, global_scale: torch.Tensor | None, n: torch.Tensor, problem: Problem
) -> tuple[torch.Tensor, ...]:
    """Return the scales that multiply the e2m1 values of rows n, in order of multiplication.

    scale: scale of the group of each value.
    global_scale: (2,) for gate and up, or (1,) for one matrix; None if group scales are E8M0.
    """
    if global_scale is None:
        return (torch.exp2(scale.double() - 127).where(scale != 255, torch.nan),)
    num_matrices = len(global_scale)
    matrix_index = n % num_matrices if problem.act.interleaved else n * num_matrices // len(n)
    return scale, global_scale[matrix_index]


# A repacked 32-bit word holds four pairs of codes. The even code of each pair is in the lower half
# of the word. _REPACKED_BITS[pair][bit] lists the stored bits whose XOR is bit 0 to 3 of a code.
# They are counted from bit 0 of the half word. Bit 18 of the upper half is outside the word and 0.
_REPACKED_BITS = (
    ((6,), (7,), (8,), (15,)),
    ((3,), (4,), (5,), (12,)),
    ((0, 5), (1, 6), (2, 7), (14, 9)),
    ((9, 4), (10, 5), (11, 6), (13, 18)),
)


def unpack_codes(
    codes: torch.Tensor, n: torch.Tensor, k: torch.Tensor, scheme: QuantScheme
) -> torch.Tensor:
    """Return the 4-bit codes at rows n and columns k of one expert's weights.

    codes: (N, K / 2) uint8.
    n, k: integer tensors that broadcast against each other.
    """
    if not scheme.repacked:
        return codes[n, k // 2] >> (4 * (k % 2)) & 15
    code = torch.zeros_like(n + k)
    for pair, bits in enumerate(_REPACKED_BITS):
        for position, sources in enumerate(bits):
            bit = torch.zeros_like(code)
            for source in sources:
                bit_index = source + 16 * (k % 2)
                byte = codes[n, k // 8 * 4 + bit_index.clamp(max=31) // 8].long()
                bit ^= torch.where(bit_index < 32, byte >> (bit_index % 8) & 1, 0)
            code += torch.where(k % 8 // 2 == pair, bit << position, 0)
    return code


def _decode_e2m1(code: torch.Tensor) -> torch.Tensor:
    """Decode e2m1: (-1)^s 2^(x - 1) (1 + m / 2), or (-1)^s m / 2 if the 2-bit exponent x is 0."""
    sign, magnitude = torch.where(code >= 8, -1.0, 1.0), code % 8
    exponent, mantissa = torch.floor(magnitude / 2), magnitude % 2
    normal = torch.exp2(exponent - 1) * (1 + mantissa / 2)
    return sign.to(code.dtype) * torch.where(exponent == 0, mantissa / 2, normal)
