"""Weights in the order of `experts.triton.grouped_w4.layout`, and back to values, in torch.

What the launch that puts them in order, and the instructions that unpack them, are held against.
"""

import torch

from experts.triton.grouped_w4.layout import (
    BLOCK,
    BLOCKS,
    GROUP,
    LINE,
    LINES,
    SCALE_LINE,
    Form,
    Tiled,
)
from modular_kernel.errors import DtypeError, ShapeError
from modular_kernel.quant.repacking import repack, unpack_words
from modular_kernel.quant.scale_tiles import pack_pairs, unpack_pairs
from modular_kernel.spec.problem import dtype_name

_WORD = 0xFFFFFFFF
_RAISED = 126 - 50  # of an exponent of mxfp4, whose codes read as their value times 2^-126
_RAISED_INTEGERS = 133 - 50  # of a scale of integers, which read as q times 2^-133
_INFINITE = 255  # such an exponent
_NAN = 0x7FC00000  # in float32's bits, the last of which are free
_SIXTEENTH = 16  # of the depth, of a scale of nvfp4
_BELOW = (127 - 10) << 3  # of an exponent and three bits of a significand, of nvfp4
_BF16_LOST = 45  # bits of float64's significand that bf16 has not


def tile_weights(
    w_eNK: torch.Tensor,
    scale_eNG: torch.Tensor,
    rows: torch.Tensor,
    form: Form,
    *,
    group: int = GROUP,
    zero_point: torch.Tensor | None = None,
) -> Tiled:
    """Bring weights to this order; rows: as `rows_of_tiles` gives them.

    w_eNK: uint8 (e, N, K / 2), two codes to a byte, the low nibble first along K, a multiple of 32.
    scale_eNG: (e, N, G), one for `group` of K, 0 for all: uint8 E8M0 exponents of mxfp4, e4m3 of
    nvfp4, any floats of integers. zero_point: uint8 (e, N / 2, G), two rows to a byte, if
    form.zero. ShapeError, DtypeError.
    """
    experts, depth = len(w_eNK), 2 * w_eNK.shape[2]
    for name, given, need in (("w", w_eNK, True), ("scale", scale_eNG, form.kind == "e2m1")):
        if need and given.dtype is not torch.uint8:
            raise DtypeError(name, got=dtype_name(given.dtype), need="uint8")
    shape = (*w_eNK.shape[:2], -(-depth // group) if group else 1)
    if depth % GROUP or scale_eNG.shape != shape:
        raise ShapeError("scale", got=tuple(scale_eNG.shape), need=f"{shape} and a depth of 32s")
    steps, tiles = -(-depth // BLOCK), len(rows)
    taken = rows.to(w_eNK.device).flatten()

    def of_groups(values: torch.Tensor, each: int) -> torch.Tensor:
        """(N, G, ...) to rows of tiles, one for each `each` of their steps."""
        at = torch.arange(steps * BLOCK // each, device=values.device) * each
        inside = (taken >= 0)[:, None] & (at < depth)
        index = (at // group if group else at * 0).clamp(max=values.shape[1] - 1)
        found = values[taken.clamp(min=0)][:, index]
        return torch.where(inside, found, torch.zeros_like(found))

    words, scales = [], []
    for expert in range(experts):  # one copy of one expert's at a time
        codes = w_eNK.new_zeros(len(taken), steps * BLOCK // 2)
        codes[:, : depth // 2] = w_eNK[expert][taken.clamp(min=0)] * (taken >= 0)[:, None]
        scale = scale_eNG[expert]
        if form.kind == "e2m1":
            exponent = (of_groups(scale.int(), GROUP) + _RAISED).clamp(max=_INFINITE)
            exponent *= (of_groups(torch.ones_like(scale), GROUP)).int()
            # 255 is NaN, and would read as infinity: times codes of 0 that is NaN.
            number = of_groups((scale != _INFINITE).to(torch.uint8), GROUP)
            codes *= number.repeat_interleave(GROUP // 2, 1)
            split = exponent.to(torch.uint8).view(tiles, BLOCKS, 4, 2, 8, steps, 2)
            made = split.permute(0, 5, 2, 4, 1, 3, 6).reshape(-1, 4).view(torch.int32)
        elif form.kind == "nvfp4":
            value = of_groups(scale.float(), _SIXTEENTH)
            codes = _with_signs(codes, value.repeat_interleave(_SIXTEENTH, 1))
            bits = (value.abs().view(torch.int32) >> 20) - _BELOW
            made = bits.clamp(0, 255).to(torch.uint8).view(len(taken), steps, 4).view(torch.int32)
            made = _in_fours(made[..., 0], tiles, steps, form)
        else:
            raised = scale.float() * 2.0**_RAISED_INTEGERS
            bits = raised.view(torch.int32)
            if zero_point is not None:
                bits = torch.where(raised.isnan(), _NAN, bits + 8 & ~15)
                bits |= unpack_pairs(zero_point[expert], 0).int()
            made = _in_fours(of_groups(bits, BLOCK // form.groups), tiles, steps, form)
        # row: warp, half, row; byte: step, half of it, pair, lane
        split = codes.view(tiles, BLOCKS, 4, 2, 8, steps, 2, 4, 4)
        bytes_ = split.permute(0, 5, 1, 2, 4, 8, 3, 6, 7).reshape(1, -1, 4 * LINE)
        word = _by_halves(bytes_) if form.kind == "integer" else repack(bytes_).view(torch.int32)
        words.append(word.view(tiles, steps, LINES, LINE))
        scales.append(made.view(tiles, steps, form.lines, SCALE_LINE))
    return Tiled(torch.stack(words), torch.stack(scales))


def _with_signs(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Packed e2m1 codes with the signs of their scales; 0 where these are."""
    each = unpack_pairs(codes, 1)
    each = torch.where(scale == 0, 0, each ^ (torch.signbit(scale).to(torch.uint8) << 3))
    return pack_pairs(each, 1)


def _by_halves(bytes_: torch.Tensor) -> torch.Tensor:
    """Words whose byte i, a pair of nibbles, is at bits 4 i of either half."""
    four = bytes_.view(-1, 4).long()
    places = torch.arange(4, device=four.device) * 4
    word = ((four & 15) << places | (four >> 4) << (16 + places)).sum(1)
    return torch.where(word > _WORD >> 1, word - _WORD - 1, word).to(torch.int32)


def _in_fours(words: torch.Tensor, tiles: int, steps: int, form: Form) -> torch.Tensor:
    """Words (rows of tiles, steps * groups) in the order of threads that share rows."""
    # part, block, warp, half, row
    split = words.reshape(tiles, 2, 2, 4, 2, 8, steps, form.groups)
    order = (0, 6, 1, 2, 3, 5, 4, 7) if form.groups > 1 else (0, 6, 1, 3, 5, 2, 4, 7)
    return split.permute(order).contiguous()


def _out_of_fours(scales: torch.Tensor, tiles: int, steps: int, form: Form) -> torch.Tensor:
    """Words as they were before `_in_fours`, (tiles * 256, steps, groups)."""
    if form.groups > 1:
        split = scales.reshape(tiles, steps, 2, 2, 4, 8, 2, form.groups)
        split = split.permute(0, 2, 3, 4, 6, 5, 1, 7)
    else:
        split = scales.reshape(tiles, steps, 2, 4, 8, 2, 2, form.groups)
        split = split.permute(0, 2, 5, 3, 6, 4, 1, 7)
    return split.reshape(tiles * BLOCKS * BLOCK, steps, form.groups)


def untiled(tiled: Tiled, form: Form) -> torch.Tensor:
    """Return float32 weights (e, tiles * 256, steps * 64) as the kernel unpacks them, times 2^n."""
    tiles, steps = tiled.tiles, tiled.steps
    each = zip(tiled.words, tiled.scales, strict=True)
    return torch.stack([_values(*one, tiles, steps, form) for one in each])


def _values(
    words: torch.Tensor, scales: torch.Tensor, tiles: int, steps: int, form: Form
) -> torch.Tensor:
    """(tiles * 256, steps * 64) of one expert."""
    wide = words.long() & _WORD
    if form.kind == "integer":
        halves = [((wide >> 4 * i & 15), wide >> 16 + 4 * i & 15) for i in range(4)]
        read = torch.stack([torch.stack(both, -1) for both in halves], -2).double()
    else:
        pairs = torch.stack(unpack_words(wide), -1)
        both = torch.stack((pairs & 0xFFFF, pairs >> 16), -1).to(torch.int32)
        read = (both << 16).view(torch.float32).double()
    split = read.view(tiles, steps, BLOCKS, 4, 8, 4, 2, 2, 4, 2)
    ordered = split.permute(0, 2, 3, 6, 4, 1, 7, 8, 5, 9)
    codes = ordered.reshape(tiles * BLOCKS * BLOCK, steps * BLOCK)
    if form.kind == "e2m1":
        split = scales.contiguous().view(torch.uint8).view(tiles, steps, 4, 8, BLOCKS, 2, 2)
        exponent = split.permute(0, 4, 2, 5, 3, 1, 6).reshape(len(codes), -1)
        factor = torch.exp2(exponent.double() - 127).where(exponent < _INFINITE, torch.inf)
        made = codes * factor.repeat_interleave(GROUP, 1)
    elif form.kind == "nvfp4":
        of_rows = _out_of_fours(scales, tiles, steps, form)
        byte = of_rows.contiguous().view(torch.uint8).view(len(codes), -1).int()
        factor = ((byte << 4) + 0x7000 << 16).view(torch.float32).double()
        made = codes * factor.repeat_interleave(_SIXTEENTH, 1)
    else:
        of_rows = _out_of_fours(scales, tiles, steps, form).reshape(len(codes), -1)
        of_rows = of_rows.repeat_interleave(BLOCK // form.groups, 1)
        zero = (of_rows & 15).double() if form.zero else 8.0
        rest = (of_rows & ~15 if form.zero else of_rows).view(torch.float32)
        count = (codes - zero) * 2.0**-133
        made = (count.float() * rest).bfloat16().double()
        if form.scale != "float32":
            high = rest.bfloat16()
            low = (rest - high.float()).bfloat16().double()
            made = _rounded(count * high.double() + _rounded(count * low))
    return (made * 2.0**form.lowered).float()


def _rounded(value: torch.Tensor) -> torch.Tensor:
    """float64 to the nearest bf16, once; by way of float32 it could be rounded twice."""
    bits = value.view(torch.int64)
    half = (1 << _BF16_LOST - 1) - 1
    even = bits + half + (bits >> _BF16_LOST & 1)
    kept = (even >> _BF16_LOST << _BF16_LOST).view(torch.float64)
    return torch.where(value.isfinite(), kept, value)
