"""PyTorch reference of the grouped_w4 path: tile 4-bit weights (`layout`), and unpack them.

Tests require the kernels of the path to match this reference bit for bit. A code is a 4-bit integer
or an e2m1 value (the 4-bit floating-point type of mxfp4 and NVFP4).
"""

import torch

from experts.triton.grouped_w4.layout import (
    BLOCK,
    BLOCKS_PER_TILE,
    GROUP,
    LINES_PER_STEP,
    WORDS_PER_LINE,
    WORDS_PER_SCALE_LINE,
    PackedFormat,
    TiledWeights,
)
from modular_kernel.errors import DtypeError, ShapeError
from modular_kernel.quant.repacking import repack, unpack_words
from modular_kernel.quant.scale_tiles import pack_pairs, unpack_pairs
from modular_kernel.spec.problem import dtype_name

_WORD_MASK = 0xFFFFFFFF
# Added to mxfp4 exponents. Codes are interpreted as value * 2^-126, and unpacked weights are
# weight * 2^-50.
_EXPONENT_OFFSET = 126 - 50
# log2 of the factor of integer scales. A code q is interpreted as q * 2^-133, and unpacked weights
# are weight * 2^-50.
_INTEGER_SCALE_LOG2 = 133 - 50
_INF_EXPONENT = 255  # exponent field of infinity and NaN
_NAN_BITS = 0x7FC00000  # bits of a float32 NaN whose last four bits are free for a zero point
_NVFP4_GROUP = 16  # K elements per NVFP4 scale
# Offset of an NVFP4 scale byte, which has five exponent bits and three significand bits.
_NVFP4_SCALE_OFFSET = (127 - 10) << 3
_BF16_DROPPED_BITS = 45  # significand bits of float64 beyond those of bf16


def tile_weights(
    w_eNK: torch.Tensor,
    scale_eNG: torch.Tensor,
    rows: torch.Tensor,
    packed_format: PackedFormat,
    *,
    group: int = GROUP,
    zero_point: torch.Tensor | None = None,
) -> TiledWeights:
    """Convert weights to the tiled layout.

    w_eNK: uint8 (e, N, K / 2), two codes per byte, the low nibble first. K is a multiple of 32.
    scale_eNG: (e, N, G), one scale per `group` columns. The dtype is uint8 (E8M0 exponents) for
        mxfp4, e4m3 for NVFP4, and any float dtype for integers.
    rows: the weight row of each row of each tile, from `list_tile_rows`.
    packed_format: the format to convert to.
    group: K elements per scale; 0 means that one scale covers all of K.
    zero_point: uint8 (e, N / 2, G), two rows per byte; given if packed_format.zero.

    Raise ShapeError or DtypeError for other tensors.
    """
    experts, k = len(w_eNK), 2 * w_eNK.shape[2]
    for name, tensor, must_be_uint8 in (
        ("w", w_eNK, True),
        ("scale", scale_eNG, packed_format.kind == "e2m1"),
    ):
        if must_be_uint8 and tensor.dtype is not torch.uint8:
            raise DtypeError(name, got=dtype_name(tensor.dtype), need="uint8")
    shape = (*w_eNK.shape[:2], -(-k // group) if group else 1)
    if k % GROUP or scale_eNG.shape != shape:
        need = f"{shape}, with K a multiple of {GROUP}"
        raise ShapeError("scale", got=f"{tuple(scale_eNG.shape)} for K = {k}", need=need)
    steps, tiles = -(-k // BLOCK), len(rows)
    tile_rows = rows.to(w_eNK.device).flatten()

    def expand_groups(values: torch.Tensor, group_size: int) -> torch.Tensor:
        """Expand (N, G, ...) to the rows of tiles, with one value per `group_size` columns."""
        column = torch.arange(steps * BLOCK // group_size, device=values.device) * group_size
        in_bounds = (tile_rows >= 0)[:, None] & (column < k)
        index = (column // group if group else column * 0).clamp(max=values.shape[1] - 1)
        expanded = values[tile_rows.clamp(min=0)][:, index]
        return torch.where(in_bounds, expanded, torch.zeros_like(expanded))

    words, scales = [], []
    for expert in range(experts):  # one at a time, to limit the temporary copy to one expert
        codes = w_eNK.new_zeros(len(tile_rows), steps * BLOCK // 2)
        codes[:, : k // 2] = w_eNK[expert][tile_rows.clamp(min=0)] * (tile_rows >= 0)[:, None]
        scale = scale_eNG[expert]
        if packed_format.kind == "e2m1":
            exponent = (expand_groups(scale.int(), GROUP) + _EXPONENT_OFFSET).clamp(
                max=_INF_EXPONENT
            )
            exponent *= (expand_groups(torch.ones_like(scale), GROUP)).int()
            # 255 means NaN but is interpreted as infinity. Its product with a code of zero is NaN.
            is_number = expand_groups((scale != _INF_EXPONENT).to(torch.uint8), GROUP)
            codes *= is_number.repeat_interleave(GROUP // 2, 1)
            split = exponent.to(torch.uint8).view(tiles, BLOCKS_PER_TILE, 4, 2, 8, steps, 2)
            scale_words = split.permute(0, 5, 2, 4, 1, 3, 6).reshape(-1, 4).view(torch.int32)
        elif packed_format.kind == "nvfp4":
            value = expand_groups(scale.float(), _NVFP4_GROUP)
            codes = _apply_signs(codes, value.repeat_interleave(_NVFP4_GROUP, 1))
            bits = (value.abs().view(torch.int32) >> 20) - _NVFP4_SCALE_OFFSET
            scale_words = (
                bits.clamp(0, 255).to(torch.uint8).view(len(tile_rows), steps, 4).view(torch.int32)
            )
            scale_words = _order_by_threads(scale_words[..., 0], tiles, steps, packed_format)
        else:
            scaled = scale.float() * 2.0**_INTEGER_SCALE_LOG2
            bits = scaled.view(torch.int32)
            if zero_point is not None:
                bits = torch.where(scaled.isnan(), _NAN_BITS, bits + 8 & ~15)
                bits |= unpack_pairs(zero_point[expert], 0).int()
            scale_words = _order_by_threads(
                expand_groups(bits, BLOCK // packed_format.groups), tiles, steps, packed_format
            )
        # (tile, block, warp, row half, row, step, half of the step, pair, lane)
        split = codes.view(tiles, BLOCKS_PER_TILE, 4, 2, 8, steps, 2, 4, 4)
        code_bytes = split.permute(0, 5, 1, 2, 4, 8, 3, 6, 7).reshape(1, -1, 4 * WORDS_PER_LINE)
        word = (
            _pack_by_halves(code_bytes)
            if packed_format.kind == "integer"
            else repack(code_bytes).view(torch.int32)
        )
        words.append(word.view(tiles, steps, LINES_PER_STEP, WORDS_PER_LINE))
        scales.append(scale_words.view(tiles, steps, packed_format.lines, WORDS_PER_SCALE_LINE))
    return TiledWeights(torch.stack(words), torch.stack(scales))


def _apply_signs(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Apply the signs of scales to packed e2m1 codes. Codes become 0 where the scale is 0."""
    unpacked = unpack_pairs(codes, 1)
    unpacked = torch.where(scale == 0, 0, unpacked ^ (torch.signbit(scale).to(torch.uint8) << 3))
    return pack_pairs(unpacked, 1)


def _pack_by_halves(code_bytes: torch.Tensor) -> torch.Tensor:
    """Pack four bytes into each word.

    The low nibble of byte i starts at bit 4 * i of the word, and the high nibble at bit 16 + 4 * i.
    """
    byte_values = code_bytes.view(-1, 4).long()
    shifts = torch.arange(4, device=byte_values.device) * 4
    word = ((byte_values & 15) << shifts | (byte_values >> 4) << (16 + shifts)).sum(1)
    return torch.where(word > _WORD_MASK >> 1, word - _WORD_MASK - 1, word).to(torch.int32)


def _order_by_threads(
    words: torch.Tensor, tiles: int, steps: int, packed_format: PackedFormat
) -> torch.Tensor:
    """Put scale words (rows of tiles, steps * groups) in the order of the threads that use them."""
    # (tile, warpgroup, block, warp, row half, row, step, group)
    split = words.reshape(tiles, 2, 2, 4, 2, 8, steps, packed_format.groups)
    order = (0, 6, 1, 2, 3, 5, 4, 7) if packed_format.groups > 1 else (0, 6, 1, 3, 5, 2, 4, 7)
    return split.permute(order).contiguous()


def _undo_order_by_threads(
    scales: torch.Tensor, tiles: int, steps: int, packed_format: PackedFormat
) -> torch.Tensor:
    """Invert `_order_by_threads`; return the scale words (tiles * 256, steps, groups)."""
    if packed_format.groups > 1:
        split = scales.reshape(tiles, steps, 2, 2, 4, 8, 2, packed_format.groups)
        split = split.permute(0, 2, 3, 4, 6, 5, 1, 7)
    else:
        split = scales.reshape(tiles, steps, 2, 4, 8, 2, 2, packed_format.groups)
        split = split.permute(0, 2, 5, 3, 6, 4, 1, 7)
    return split.reshape(tiles * BLOCKS_PER_TILE * BLOCK, steps, packed_format.groups)


def untile_weights(tiled: TiledWeights, packed_format: PackedFormat) -> torch.Tensor:
    """Return the weights as the kernel unpacks them, float32 (e, tiles * 256, steps * 64).

    The result does not have the power-of-two factor of the kernel (`PackedFormat.scale_shift`).
    """
    tiles, steps = tiled.tiles, tiled.steps
    experts = zip(tiled.words, tiled.scales, strict=True)
    return torch.stack([_unpack_expert(*parts, tiles, steps, packed_format) for parts in experts])


def _unpack_expert(
    words: torch.Tensor, scales: torch.Tensor, tiles: int, steps: int, packed_format: PackedFormat
) -> torch.Tensor:
    """Return the unpacked weights (tiles * 256, steps * 64) of one expert."""
    words_int64 = words.long() & _WORD_MASK
    if packed_format.kind == "integer":
        halves = [((words_int64 >> 4 * i & 15), words_int64 >> 16 + 4 * i & 15) for i in range(4)]
        unscaled = torch.stack(
            [torch.stack(pair_halves, -1) for pair_halves in halves], -2
        ).double()
    else:
        pairs = torch.stack(unpack_words(words_int64), -1)
        pair_halves = torch.stack((pairs & 0xFFFF, pairs >> 16), -1).to(torch.int32)
        unscaled = (pair_halves << 16).view(torch.float32).double()
    split = unscaled.view(tiles, steps, BLOCKS_PER_TILE, 4, 8, 4, 2, 2, 4, 2)
    ordered = split.permute(0, 2, 3, 6, 4, 1, 7, 8, 5, 9)
    codes = ordered.reshape(tiles * BLOCKS_PER_TILE * BLOCK, steps * BLOCK)
    if packed_format.kind == "e2m1":
        split = (
            scales.contiguous().view(torch.uint8).view(tiles, steps, 4, 8, BLOCKS_PER_TILE, 2, 2)
        )
        exponent = split.permute(0, 4, 2, 5, 3, 1, 6).reshape(len(codes), -1)
        factor = torch.exp2(exponent.double() - 127).where(exponent < _INF_EXPONENT, torch.inf)
        values = codes * factor.repeat_interleave(GROUP, 1)
    elif packed_format.kind == "nvfp4":
        row_scales = _undo_order_by_threads(scales, tiles, steps, packed_format)
        byte = row_scales.contiguous().view(torch.uint8).view(len(codes), -1).int()
        factor = ((byte << 4) + 0x7000 << 16).view(torch.float32).double()
        values = codes * factor.repeat_interleave(_NVFP4_GROUP, 1)
    else:
        row_scales = _undo_order_by_threads(scales, tiles, steps, packed_format).reshape(
            len(codes), -1
        )
        row_scales = row_scales.repeat_interleave(BLOCK // packed_format.groups, 1)
        zero = (row_scales & 15).double() if packed_format.zero else 8.0
        scale_value = (row_scales & ~15 if packed_format.zero else row_scales).view(torch.float32)
        signed_code = (codes - zero) * 2.0**-133
        values = (signed_code.float() * scale_value).bfloat16().double()
        if packed_format.scale != "float32":
            high = scale_value.bfloat16()
            low = (scale_value - high.float()).bfloat16().double()
            values = _round_to_bf16(signed_code * high.double() + _round_to_bf16(signed_code * low))
    return (values * 2.0**packed_format.scale_shift).float()


def _round_to_bf16(value: torch.Tensor) -> torch.Tensor:
    """Round float64 to bf16 without rounding to float32 first."""
    bits = value.view(torch.int64)
    just_below_half = (1 << _BF16_DROPPED_BITS - 1) - 1
    rounded = bits + just_below_half + (bits >> _BF16_DROPPED_BITS & 1)
    truncated = (rounded >> _BF16_DROPPED_BITS << _BF16_DROPPED_BITS).view(torch.float64)
    return torch.where(value.isfinite(), truncated, value)
