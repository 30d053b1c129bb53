"""Division of the intermediate size over tensor-parallel ranks, and the padding of their shares.

    split = split_intermediate(2880, 8, QuantScheme.parse("mxfp4_w4a16"))
    split.width, split.columns(0), split.columns(7)     # 384, (0, 384), (2528, 2880)

All ranks have weights of one width, so that they run one kernel. Cuts fall between quantization
groups, so stored codes and scales stay as they are. A rank with fewer columns than the width gets
columns of weight zero: `fill_padding` writes codes and scales that dequantize to exactly 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm

import torch

from modular_kernel.checkpoints.matrix_layout import Range
from modular_kernel.errors import ConfigurationError
from modular_kernel.quant.quantized_weights import IMPLICIT_ZERO_POINT
from modular_kernel.quant.scale_tiles import ceil_div, unpack_pairs
from modular_kernel.spec.quantization import QuantScheme

# Padded shares are multiples of the first of these that leaves columns for every rank. Rows of 16
# values of one byte or more satisfy the alignment of TMA and of vector loads.
_ALIGNMENTS = (16, 8, 4, 2, 1)
_ONE_E8M0, _ONE = 127, 1.0  # scales of 1


@dataclass(frozen=True)
class IntermediateSplit:
    """The columns of I of each tensor-parallel rank.

    unit: columns that are kept together. width: columns of every rank's weights, with the padding.
    """

    intermediate: int
    ranks: int
    unit: int
    width: int

    def columns(self, rank: int) -> Range:
        """Return the columns [first, last) of I that a rank holds."""
        units, extra = divmod(ceil_div(self.intermediate, self.unit), self.ranks)
        first, last = (each * units + min(each, extra) for each in (rank, rank + 1))
        return first * self.unit, min(last * self.unit, self.intermediate)

    @property
    def is_padded(self) -> bool:
        """Whether a rank has fewer columns than its weights."""
        return self.width * self.ranks != self.intermediate


def columns_per_unit(scheme: QuantScheme, intermediate: int) -> int:
    """Return how many columns of I share a scale or a packed word, and are not to be separated.

    One group of all columns may be cut: every share then has one group of its own, with the same
    scale.
    """
    word = {"uint4": 8, "uint8": 4}.get(scheme.weight, 1)
    if scheme.weight == "int8" and not scheme.quantizes_activations:
        word = 4
    is_integer = scheme.weight in IMPLICIT_ZERO_POINT
    if scheme.granularity == "group" and is_integer and scheme.group[0] >= intermediate:
        return word
    return lcm(word, *scheme.group)


def split_intermediate(intermediate: int, ranks: int, scheme: QuantScheme) -> IntermediateSplit:
    """Divide I over tensor-parallel ranks.

    Equal shares are used if they cut neither a group nor a packed word. Otherwise each rank gets
    whole groups, some ranks one more than others, and the width is that of the largest share.
    Raises ConfigurationError if there are fewer groups than ranks, unless equal shares exist; those
    then cut groups, which stored weights do not allow (see `formats.fit`).
    """
    unit, (share, remainder) = columns_per_unit(scheme, intermediate), divmod(intermediate, ranks)
    if not remainder and (ranks == 1 or share % unit == 0):
        return IntermediateSplit(intermediate, ranks, share, share)
    for alignment in _ALIGNMENTS:
        padded_unit = lcm(unit, alignment)
        units = ceil_div(intermediate, padded_unit)
        if units >= ranks:
            width = ceil_div(units, ranks) * padded_unit
            return IntermediateSplit(intermediate, ranks, padded_unit, width)
    if not remainder:
        return IntermediateSplit(intermediate, ranks, share, share)
    raise too_few_groups(intermediate, ranks, unit)


def too_few_groups(intermediate: int, ranks: int, unit: int) -> ConfigurationError:
    """Return the error for ranks that would not get a single group of columns."""
    groups = ceil_div(intermediate, unit)
    what = "column" if unit == 1 else f"group of {unit} columns"
    need = f"at most {groups}: each rank holds a whole {what} of intermediate={intermediate}"
    return ConfigurationError("tp: ranks", got=ranks, need=need)


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
