"""Values of quantized weights: examples computed by hand, and each value compared with the table of
schemes.
"""

import math

import torch
from quant_samples import each_scheme, make_quantized, plain_weights, tensors_of

from modular_kernel.quant.quantized_weights import dequantize
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights


def test_int4_example() -> None:
    """Two rows of four weights. The byte 0x21 contains 1 at k = 0 and 2 at k = 1."""
    w = torch.tensor([[[0x21, 0x43], [0x08, 0xF7]]], dtype=torch.uint8)
    scale = torch.tensor([[[0.5, 2.0], [1.0, 10.0]]])
    scheme = QuantScheme.parse("int4_w4a16_group:group=2")
    rows = [[-3.5, -3.0, -10.0, -8.0], [0.0, -8.0, -10.0, 70.0]]
    assert dequantize(w, scale, None, scheme).tolist() == [rows]
    # The zero points of row 0 are in the low nibbles (1 and 3), those of row 1 in the high nibbles
    # (2 and 4).
    zeros = torch.tensor([[[0x21, 0x43]]], dtype=torch.uint8)
    scheme = QuantScheme.parse("int4_w4a16_group:group=2,zero_points=true")
    rows = [[0.0, 0.5, 0.0, 2.0], [6.0, -2.0, 30.0, 110.0]]
    assert dequantize(w, scale, zeros, scheme).tolist() == [rows]


def test_mxfp4_example() -> None:
    """All sixteen codes, two per byte, with scales of 1, 2, 1/2, the minimum, the maximum and
    NaN.
    """
    codes = torch.tensor([[[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]], dtype=torch.uint8)
    scheme = QuantScheme.parse("mxfp4_w4a16")
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = torch.tensor([magnitudes + [-v for v in magnitudes]])
    for byte, factor in ((127, 1.0), (128, 2.0), (126, 0.5), (0, 2.0**-127), (254, 2.0**127)):
        scale = torch.tensor([[[byte]]], dtype=torch.uint8)
        assert torch.equal(dequantize(codes, scale, None, scheme)[0], values * factor)
    nan_scale = torch.tensor([[[255]]], dtype=torch.uint8)
    assert dequantize(codes, nan_scale, None, scheme).isnan().all()


def decode_e4m3(byte: int) -> float:
    """Return the value of a float8_e4m3fn byte."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    value = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def compute_expected_value(
    weights: ExpertWeights, name: str, position: tuple[int, int, int], scheme_name: str
) -> float:
    """Return one weight, computed from the table in modular_kernel.quant.quantized_weights."""
    (w, scale, zero), (e, n, k) = tensors_of(weights, name), position
    scheme = QuantScheme.parse(scheme_name)
    width = scheme.group[-1] if scheme.group else 0
    scale_index = {
        "tensor": (e,),
        "channel": (e, n),
        "block": (e, n // scheme.group[0] if scheme.group else 0, k // width if width else 0),
        "group": (e, n, k // width if width else 0),
    }[scheme.granularity]
    scale_value = scale[scale_index].item()
    if scheme.weight == "float8_e4m3fn":
        return decode_e4m3(int(w.view(torch.uint8)[position])) * scale_value
    if scheme.weight == "int8":
        return int(w[position]) * scale_value
    if scheme.weight == "uint8":
        return (int(w[position]) - (128 if zero is None else int(zero[scale_index]))) * scale_value
    nibble = int(w[e, n, k // 2]) >> (4 if k % 2 else 0) & 15
    if scheme.weight == "uint4":
        if zero is None:
            return (nibble - 8) * scale_value
        packed = int(zero[e, n // 2, k // width])
        return (nibble - (packed >> 4 if n % 2 else packed & 15)) * scale_value
    magnitude = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[nibble % 8]
    return math.copysign(magnitude, -1 if nibble > 7 else 1) * 2.0 ** (scale_value - 127)


@each_scheme
def test_dequantize_equals_the_table(scheme_name: str) -> None:
    problem, weights = make_quantized(scheme_name)
    for name in ("w1", "w2"):
        actual = dequantize(*tensors_of(weights, name), problem.scheme)
        e, rows, depth = getattr(plain_weights(problem), name).shape
        assert actual.shape == (e, rows, depth)
        assert actual.dtype == torch.float32
        expected = [
            [
                [
                    compute_expected_value(weights, name, (x, n, k), scheme_name)
                    for k in range(depth)
                ]
                for n in range(rows)
            ]
            for x in range(e)
        ]
        torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64))
