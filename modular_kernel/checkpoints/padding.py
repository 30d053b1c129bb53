"""Padding of a tensor-parallel rank's share of the intermediate size, with weights of exactly 0.

`modular_kernel.spec.intermediate_split` has the shares.
"""

from collections.abc import Mapping

import torch

from modular_kernel.checkpoints.matrix_layout import Range
from modular_kernel.quant.quantized_weights import IMPLICIT_ZERO_POINT
from modular_kernel.quant.scale_tiles import ceil_div, unpack_pairs
from modular_kernel.spec.quantization import QuantScheme

_ONE_E8M0, _ONE = 127, 1.0  # scales of 1


def fill_padding(
    tensors: Mapping[str, torch.Tensor | None],
    scheme: QuantScheme,
    split: Range,
    *,
    gated: bool,
    interleaved: bool,
) -> None:
    """Write weights of exactly 0 to the padding of a rank's share, in place.

    tensors: by field of ExpertWeights, in the layout of `weight_specs` for I = `split[1]`. split:
    (columns of I that were loaded, columns of the tensors). gated, interleaved: of the rows of w1.
    Padded rows of w1 and padded columns of w2 get codes of 0 (integers: of the zero point), scales
    of 1 where no loaded weight has the same one, and biases of 0. Loaded values are not changed.
    """
    columns, width = split
    if columns == width:
        return
    row_ranges = [(half * width + columns, (half + 1) * width) for half in range(1 + gated)]
    for first, last in [(2 * columns, 2 * width)] if interleaved else row_ranges:
        _fill_rows(tensors, scheme, first, last)
    _fill_columns(tensors, scheme, columns, width)


def _zero_code(scheme: QuantScheme) -> int:
    """Return the byte of a weight, or of two, that equals the middle of the range or 0."""
    code = IMPLICIT_ZERO_POINT.get(scheme.weight, 0)
    if scheme.external:
        code = scheme.values.index(0.0)
    return code * 0x11 if scheme.packed else code


def _fill_rows(
    tensors: Mapping[str, torch.Tensor | None], scheme: QuantScheme, first: int, last: int
) -> None:
    _fill_codes(tensors["w1"], (slice(first, last),), scheme)
    scale, zero, bias = (tensors.get(name) for name in ("w1_scale", "w1_zero_point", "b1"))
    if scale is not None and scheme.granularity != "tensor":
        step = scheme.group[0] if scheme.granularity == "block" else 1
        _fill_scale(scale[:, ceil_div(first, step) : ceil_div(last, step)])
    if zero is not None:
        step = 2 if scheme.packed else 1
        zero[:, first // step : last // step] = _zero_code(scheme)
    if bias is not None:
        bias[:, first:last] = 0


def _fill_columns(
    tensors: Mapping[str, torch.Tensor | None], scheme: QuantScheme, first: int, last: int
) -> None:
    w, scale, zero = (tensors.get(f"w2{suffix}") for suffix in ("", "_scale", "_zero_point"))
    assert w is not None
    per_byte = 2 if scheme.packed else 1
    _fill_codes(w, (slice(None), slice(first // per_byte, last // per_byte)), scheme)
    if scale is None or scheme.granularity not in ("group", "block"):
        return
    size = scheme.group[-1]
    whole = ceil_div(first, size)  # the first tile without a loaded weight
    _fill_scale(scale[..., whole:])
    if zero is None:
        return
    zero[..., whole:] = _zero_code(scheme)
    if first % size:  # the last loaded group has a zero point, which padding must equal
        end = min(whole * size, last)
        point = zero[..., whole - 1]
        code = unpack_pairs(point, 1) * 0x11 if scheme.packed else point
        w[..., first // per_byte : end // per_byte] = code[..., None]


def _fill_codes(
    w: torch.Tensor | None, rows_columns: tuple[slice, ...], scheme: QuantScheme
) -> None:
    assert w is not None
    codes = w.view(torch.uint8) if w.itemsize == 1 else w
    codes[:, *rows_columns] = _zero_code(scheme)


def _fill_scale(scale: torch.Tensor) -> None:
    scale.fill_(_ONE_E8M0 if scale.dtype is torch.uint8 else _ONE)
