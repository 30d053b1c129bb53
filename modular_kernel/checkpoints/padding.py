"""Pads a tensor-parallel rank's share of the intermediate size I with weights of exactly 0.

All ranks have tensors of the same width, but shares consist of whole quantization groups
(`modular_kernel.spec.intermediate_split`), so a share may have fewer columns. The remaining rows of
w1 and columns of w2 are padding. A quantized weight of 0 has the code of the zero point in an
integer format, and the code of 0.0 in other formats.
"""

from collections.abc import Mapping

import torch

from modular_kernel.checkpoints.matrix_layout import Range
from modular_kernel.quant.quantized_weights import IMPLICIT_ZERO_POINT
from modular_kernel.quant.scale_tiles import ceil_div, unpack_pairs
from modular_kernel.spec.quantization import QuantScheme

_ONE_E8M0, _ONE = 127, 1.0  # a scale of 1, as an E8M0 byte and as a float


def fill_padding(
    tensors: Mapping[str, torch.Tensor | None],
    scheme: QuantScheme,
    split: Range,
    *,
    gated: bool,
    interleaved: bool,
) -> None:
    """Write weights of exactly 0 to the padding of a rank's share, in place.

    Padding gets codes and biases of 0, and scales of 1. A scale or zero point that also applies to
    loaded weights is not changed.

    tensors: fields of ExpertWeights by name, in the layout of `weight_specs` for I = `split[1]`.
    split: (columns of I that were loaded, columns of I in the tensors).
    gated: whether w1 has gate and up rows.
    interleaved: whether gate and up rows alternate.
    """
    columns, width = split
    if columns == width:
        return
    row_ranges = [(half * width + columns, (half + 1) * width) for half in range(1 + gated)]
    for start, stop in [(2 * columns, 2 * width)] if interleaved else row_ranges:
        _fill_w1_rows(tensors, scheme, start, stop)
    _fill_w2_columns(tensors, scheme, columns, width)


def _fill_w1_rows(
    tensors: Mapping[str, torch.Tensor | None], scheme: QuantScheme, start: int, stop: int
) -> None:
    _fill_codes(tensors["w1"], (slice(start, stop),), scheme)
    scale, zero_point, bias = (tensors.get(name) for name in ("w1_scale", "w1_zero_point", "b1"))
    if scale is not None and scheme.granularity != "tensor":
        block_rows = scheme.group[0] if scheme.granularity == "block" else 1
        _fill_scale(scale[:, ceil_div(start, block_rows) : ceil_div(stop, block_rows)])
    if zero_point is not None:
        per_byte = 2 if scheme.packed else 1
        zero_point[:, start // per_byte : stop // per_byte] = _get_zero_code(scheme)
    if bias is not None:
        bias[:, start:stop] = 0


def _fill_w2_columns(
    tensors: Mapping[str, torch.Tensor | None], scheme: QuantScheme, start: int, stop: int
) -> None:
    w, scale, zero_point = (tensors.get(f"w2{suffix}") for suffix in ("", "_scale", "_zero_point"))
    assert w is not None
    per_byte = 2 if scheme.packed else 1
    _fill_codes(w, (slice(None), slice(start // per_byte, stop // per_byte)), scheme)
    if scale is None or scheme.granularity not in ("group", "block"):
        return
    group = scheme.group[-1]
    first_empty_group = ceil_div(start, group)  # the first group without a loaded weight
    _fill_scale(scale[..., first_empty_group:])
    if zero_point is None:
        return
    zero_point[..., first_empty_group:] = _get_zero_code(scheme)
    if start % group:
        # The last loaded group extends into the padding, where
        # weights of 0 have the code of the group's zero point.
        end = min(first_empty_group * group, stop)
        loaded_zero_point = zero_point[..., first_empty_group - 1]
        if scheme.packed:
            loaded_zero_point = unpack_pairs(loaded_zero_point, 1) * 0x11  # in both nibbles
        w[..., start // per_byte : end // per_byte] = loaded_zero_point[..., None]


def _fill_codes(
    w: torch.Tensor | None, rows_columns: tuple[slice, ...], scheme: QuantScheme
) -> None:
    assert w is not None
    codes = w.view(torch.uint8) if w.itemsize == 1 else w
    codes[:, *rows_columns] = _get_zero_code(scheme)


def _get_zero_code(scheme: QuantScheme) -> int:
    """Return the byte that encodes a weight of 0, or two packed 4-bit weights of 0."""
    code = IMPLICIT_ZERO_POINT.get(scheme.weight, 0)
    if scheme.external:
        code = scheme.values.index(0.0)
    return code * 0x11 if scheme.packed else code


def _fill_scale(scale: torch.Tensor) -> None:
    scale.fill_(_ONE_E8M0 if scale.dtype is torch.uint8 else _ONE)
