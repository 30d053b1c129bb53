"""Make tiny matrices in the formats of published checkpoints, with their exact values.

Codes and scales are drawn at random, not computed by rounding other numbers, so the float64 values
of the stored matrix are exact. The packing follows the documentation of the formats, and shares no
code with `modular_kernel.checkpoints`.

Most functions either have the type `Make` and draw one matrix, or return a `Make` for the given
parameters of a format. `published_formats` lists the formats.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

F64, FP8 = torch.float64, torch.float8_e4m3fn
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=F64)
# Of eight columns, AWQ stores column n in nibble AWQ_ORDER[n] of an int32 word.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class StoredMatrix:
    """A stored matrix.

    Attributes:
        tensors: maps the suffix of a tensor's name to the tensor.
        values: the exact values, (N, K) float64.
    """

    tensors: dict[str, torch.Tensor]
    values: torch.Tensor


# Maps (rows N, depth K, generator, gain) to a matrix. The scales are multiplied by gain: the gate
# and up matrices of an expert are made with different gains, so that confusing them is detected.
Make = Callable[[int, int, torch.Generator, float], StoredMatrix]


def pack_words(
    codes: torch.Tensor, dim: int, bits: int, order: tuple[int, ...] | None = None
) -> Any:
    """Pack int64 codes into int32 along `dim`; code i of a word starts at bit bits * order[i]."""
    codes_per_word = 32 // bits
    order = order or tuple(range(codes_per_word))
    codes = codes.movedim(dim, -1)
    codes = codes.reshape(*codes.shape[:-1], -1, codes_per_word)
    packed = sum(codes[..., i] << (bits * order[i]) for i in range(codes_per_word))
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed)  # type: ignore[arg-type]
    return packed.to(torch.int32).movedim(-1, dim).contiguous()


def expand_tiles(tiles: torch.Tensor, rows: int, depth: int, bn: int, bk: int) -> torch.Tensor:
    """Repeat each scale over its tile of bn x bk values; return (rows, depth) float64."""
    return tiles.to(F64).repeat_interleave(bn, 0)[:rows].repeat_interleave(bk, 1)[:, :depth]


def _draw_normal(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    return torch.randn(*shape, generator=g)


def _draw_scales(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """Draw scales of similar magnitude, between 0.6 and 1.4."""
    return 0.6 + 0.8 * torch.rand(*shape, generator=g)


def plain(dtype: torch.dtype) -> Make:
    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
        w = (_draw_normal((rows, depth), g) * gain / depth**0.5).to(dtype)
        return StoredMatrix({"weight": w}, w.to(F64))

    return make


def _draw_fp8_codes(rows: int, depth: int, g: torch.Generator) -> torch.Tensor:
    return (_draw_normal((rows, depth), g) * 100).clamp(-448, 448).to(FP8)


def fp8_block(
    scale_dtype: torch.dtype, name: str = "weight_scale_inv", block: tuple[int, int] = (128, 128)
) -> Make:
    bn, bk = block

    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
        w = _draw_fp8_codes(rows, depth, g)
        scale = _draw_scales((-(-rows // bn), -(-depth // bk)), g) * gain / (100 * depth**0.5)
        if scale_dtype is torch.float8_e8m0fnu:  # powers of two, including the gain
            scale = torch.exp2(torch.log2(scale * 2.0 ** (4 * (gain - 1))).round())
        scale = scale.to(scale_dtype)
        values = w.to(F64) * expand_tiles(scale.float(), rows, depth, bn, bk)
        return StoredMatrix({"weight": w, name: scale}, values)

    return make


def fp8_block_4d(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
    """Make a matrix in modelopt's FP8_PB_WO, whose scales have the shape (blocks, 1, blocks, 1)."""
    stored = fp8_block(torch.float32, "weight_scale")(rows, depth, g, gain)
    scale = stored.tensors["weight_scale"]
    return StoredMatrix(
        stored.tensors | {"weight_scale": scale[:, None, :, None].contiguous()}, stored.values
    )


def mxfp8(name: str, scale_dtype: torch.dtype) -> Make:
    """Make e4m3 codes with an E8M0 scale per 32 columns of a row, stored as `scale_dtype`."""

    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
        w = _draw_fp8_codes(rows, depth, g)
        exponents = torch.randint(118, 121, (rows, depth // 32), generator=g)
        exponents = exponents + round(3 * (gain - 1)) - int(torch.tensor(depth).log2().item() / 2)
        scale = exponents.to(torch.uint8).view(scale_dtype)
        values = w.to(F64) * expand_tiles(torch.exp2(exponents.to(F64) - 127), rows, depth, 1, 32)
        return StoredMatrix({"weight": w, name: scale}, values)

    return make


def fp8_tensor(*, static: bool, shape: tuple[int, ...] = (), shared_scale: bool = False) -> Make:
    """Make fp8 matrices with one scale per matrix.

    static: whether the matrices also have an input scale.
    shared_scale: whether all matrices with the same K have the same scales.
    """

    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
        w = _draw_fp8_codes(rows, depth, g)
        gain_factor = torch.ones(1) if shared_scale else _draw_scales((1,), g) * gain
        scale = (gain_factor / (100 * depth**0.5)).reshape(shape)
        tensors = {"weight": w, "weight_scale": scale}
        if static:
            input_factor = torch.ones(1) if shared_scale else _draw_scales((1,), g)
            tensors["input_scale"] = (16 / 448 * input_factor).reshape(shape)
        return StoredMatrix(tensors, w.to(F64) * scale.to(F64))

    return make


def fp8_channel(scale_dtype: torch.dtype = torch.bfloat16) -> Make:
    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
        w = _draw_fp8_codes(rows, depth, g)
        scale = (_draw_scales((rows, 1), g) * gain / (100 * depth**0.5)).to(scale_dtype)
        return StoredMatrix({"weight": w, "weight_scale": scale}, w.to(F64) * scale.to(F64))

    return make


def int8_channel(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
    w = (_draw_normal((rows, depth), g) * 40).round().clamp(-127, 127).to(torch.int8)
    scale = (_draw_scales((rows, 1), g) * gain / (40 * depth**0.5)).to(torch.bfloat16)
    return StoredMatrix({"weight": w, "weight_scale": scale}, w.to(F64) * scale.to(F64))


# Levels of bitsandbytes' 4-bit types, by code. NF4 consists of quantiles of a normal distribution.
# FP4 has two exponent bits and is divided by 12. Its code 1 is an exception and means 1 / 192.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FP4 = tuple(sign * level / 12 for sign in (1.0, -1.0) for level in (0, 0.0625, 8, 12, 4, 6, 2, 3))


def bitsandbytes(
    kind: str,
    *,
    block: int = 64,
    double: bool = False,
    storage: torch.dtype = torch.uint8,
    nested_block: int = 256,
) -> Make:
    """Make 4-bit matrices of bitsandbytes.

    Blocks may span several rows. The high nibble of byte i contains value 2i of the matrix.

    kind: "nf4" or "fp4".
    block: number of values in a block, which share a scale.
    double: whether the scales of blocks are quantized to 8-bit codes.
    storage: dtype of the stored tensor, whose bytes contain the codes.
    nested_block: number of scales that share a second-level scale, if `double`.
    """

    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
        num_values = rows * depth
        codes = torch.randint(0, 16, (num_values + num_values % 2,), generator=g)
        codes[num_values:] = 0
        packed = (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)
        pad = -len(packed) % storage.itemsize
        packed = torch.cat([packed, packed.new_zeros(pad)]).view(storage)[:, None]
        levels = torch.tensor(NF4 if kind == "nf4" else FP4, dtype=torch.float32)
        blocks = -(-num_values // block)
        state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16"}
        state |= {"shape": [rows, depth]}
        tensors = {"weight": packed, "weight.quant_map": levels}
        if double:
            offset = 1.5 * gain / depth**0.5
            absmax = torch.randint(0, 256, (blocks,), generator=g).to(torch.uint8)
            levels_8bit = torch.linspace(-1, 1, 256)
            scale = _draw_scales((-(-blocks // nested_block),), g) * gain / depth**0.5
            tensors |= {"weight.nested_absmax": scale, "weight.nested_quant_map": levels_8bit}
            state |= {"nested_blocksize": nested_block, "nested_dtype": "float32"}
            state |= {"nested_offset": offset}
            products = (
                levels_8bit[absmax.long()].to(F64)
                * scale.to(F64).repeat_interleave(nested_block)[:blocks]
            )
            factors = products + offset
        else:
            absmax = _draw_scales((blocks,), g) * 2 * gain / depth**0.5
            factors = absmax.to(F64)
        tensors["weight.absmax"] = absmax
        state_bytes = json.dumps(state).encode()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(
            list(state_bytes), dtype=torch.uint8
        )
        matrix_values = (
            levels.to(F64)[codes[:num_values]] * factors.repeat_interleave(block)[:num_values]
        )
        return StoredMatrix(tensors, matrix_values.view(rows, depth))

    return make


def llm_int8(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
    """Make an int8 matrix of bitsandbytes, which stores the largest magnitude of each row."""
    w = (_draw_normal((rows, depth), g) * 40).round().clamp(-127, 127).to(torch.int8)
    absmax = _draw_scales((rows,), g) * 127 * gain / (40 * depth**0.5)
    tensors = {"weight": w, "SCB": absmax, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return StoredMatrix(tensors, w.to(F64) * (absmax.to(F64) / 127)[:, None])


def _draw_codes(rows: int, depth: int, bits: int, g: torch.Generator) -> torch.Tensor:
    """Draw unsigned codes around the middle of their range."""
    half = 1 << (bits - 1)
    return (_draw_normal((rows, depth), g) * half / 3 + half).round().clamp(0, 2 * half - 1).long()


def _draw_zero_points(
    shape: tuple[int, ...], bits: int, g: torch.Generator, symmetric: bool
) -> torch.Tensor:
    half, max_offset = 1 << (bits - 1), max(1, (1 << bits) // 8)
    if symmetric:
        return torch.full(shape, half, dtype=torch.int64)
    return half + torch.randint(-max_offset, max_offset + 1, shape, generator=g)


@dataclass(frozen=True)
class _GroupedMatrix:
    """A matrix with the values (codes - zeros) * scale.

    zeros, scale: one column per group of `width` columns.
    """

    codes: torch.Tensor
    zeros: torch.Tensor
    scale: torch.Tensor
    values: torch.Tensor
    width: int


@dataclass(frozen=True)
class _GroupFormat:
    """Integer codes with a scale and a zero point per group of columns of a row.

    Attributes:
        bits: number of bits of a code.
        group: number of columns in a group; None or -1 for a single group.
        symmetric: whether all zero points are the middle of the range.
        dtype: dtype of the scales.
    """

    bits: int
    group: int | None
    symmetric: bool
    dtype: torch.dtype

    def draw(self, rows: int, depth: int, g: torch.Generator, gain: float) -> _GroupedMatrix:
        width = depth if self.group is None or self.group == -1 else self.group
        codes, groups = _draw_codes(rows, depth, self.bits, g), -(-depth // width)
        zeros = _draw_zero_points((rows, groups), self.bits, g, self.symmetric)
        magnitude = gain * 3 / (1 << (self.bits - 1)) / depth**0.5
        scale = (_draw_scales((rows, groups), g) * magnitude).to(self.dtype)
        centered = codes - expand_tiles(zeros, rows, depth, 1, width)
        return _GroupedMatrix(
            codes, zeros, scale, centered * expand_tiles(scale, rows, depth, 1, width), width
        )


def compressed_tensors(bits: int, group: int | None, *, symmetric: bool = True) -> Make:
    """Make pack-quantized matrices of compressed-tensors, packed along K.

    group: number of columns that share a scale; None for one scale per row.
    """

    group_format = _GroupFormat(bits, group, symmetric, torch.bfloat16)

    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
        matrix = group_format.draw(rows, depth, g, gain)
        tensors = {
            "weight_packed": pack_words(matrix.codes, 1, bits),
            "weight_scale": matrix.scale,
            "weight_shape": torch.tensor([rows, depth]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = pack_words(matrix.zeros, 0, bits)
        return StoredMatrix(tensors, matrix.values)

    return make


def awq(group: int, *, zero_point: bool = True) -> Make:
    group_format = _GroupFormat(4, group, not zero_point, torch.float16)

    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
        matrix = group_format.draw(rows, depth, g, gain)
        tensors = {
            "qweight": pack_words(matrix.codes.T, 1, 4, AWQ_ORDER),
            "qzeros": pack_words(matrix.zeros.T, 1, 4, AWQ_ORDER),
            "scales": matrix.scale.T.contiguous(),
        }
        return StoredMatrix(tensors, matrix.values)

    return make


def gptq(bits: int, group: int, *, symmetric: bool = True, zero_point_offset: int = 1) -> Make:
    """Make GPTQ matrices.

    zero_point_offset: number that is subtracted from zero points before they are stored. It is 1 in
        version 1 of the format.
    """

    group_format = _GroupFormat(bits, group, symmetric, torch.float16)

    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
        matrix = group_format.draw(rows, depth, g, gain)
        tensors = {
            "qweight": pack_words(matrix.codes.T, 0, bits),
            "qzeros": pack_words(matrix.zeros.T - zero_point_offset, 1, bits),
            "scales": matrix.scale.T.contiguous(),
            "g_idx": torch.arange(depth, dtype=torch.int32) // matrix.width,
        }
        return StoredMatrix(tensors, matrix.values)

    return make


def with_act_order(make: Make, group_index_name: str, group: int, codes_name: str) -> Make:
    """Make matrices like `make`, but with columns assigned to groups at random (act order).

    The n-th gate matrix and the n-th up matrix have the same assignment.

    group_index_name: name of the tensor of group indices.
    codes_name: name of the tensor of codes.
    """
    counts: Counter[Any] = Counter()

    def make_shuffled(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
        stored, seed = make(rows, depth, g, gain), counts[rows, depth, gain]
        counts[rows, depth, gain] += 1  # gate and up matrices differ in gain
        generator = torch.Generator().manual_seed(seed)
        column_order = torch.randperm(depth, generator=generator)  # position of each sorted column
        tensors = dict(stored.tensors)
        tensors[group_index_name] = torch.empty(depth, dtype=torch.int32)
        tensors[group_index_name][column_order] = torch.arange(depth, dtype=torch.int32) // group
        codes = torch.empty(rows, depth, dtype=torch.int64)
        bits = 4 if tensors[codes_name].numel() * 8 == codes.numel() else 8
        dim = 0 if group_index_name == "g_idx" else 1
        unpacked = torch.stack(
            [tensors[codes_name].long() >> (bits * i) & (1 << bits) - 1 for i in range(32 // bits)],
            dim + 1,
        ).flatten(dim, dim + 1)
        # A stable sort keeps the order of columns within a group.
        sorted_columns = torch.argsort(tensors[group_index_name], stable=True)
        codes[:, sorted_columns] = unpacked.T if dim == 0 else unpacked
        tensors[codes_name] = pack_words(codes.T if dim == 0 else codes, dim, bits)
        shuffled_values = torch.empty_like(stored.values)
        shuffled_values[:, sorted_columns] = stored.values
        return StoredMatrix(tensors, shuffled_values)

    return make_shuffled


def _draw_mxfp4(rows: int, depth: int, g: torch.Generator, gain: float) -> Any:
    codes = torch.randint(0, 16, (rows, depth), generator=g)
    scale = torch.randint(123, 127, (rows, depth // 32), generator=g)
    scale = scale + round(3 * (gain - 1)) - int(torch.tensor(depth).log2().item() / 2)
    values = E2M1[codes] * expand_tiles(torch.exp2(scale.to(F64) - 127), rows, depth, 1, 32)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return packed, scale.to(torch.uint8), values


def with_e8m0_dtype(make: Make, name: str) -> Make:
    """Make matrices like `make`, but with scales of dtype float8_e8m0fnu instead of uint8.

    name: name of the scales.
    """

    def make_with_dtype(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
        stored = make(rows, depth, g, gain)
        scale = stored.tensors[name].view(torch.float8_e8m0fnu)
        return StoredMatrix(stored.tensors | {name: scale}, stored.values)

    return make_with_dtype


def mxfp4(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
    packed, scale, values = _draw_mxfp4(rows, depth, g, gain)
    return StoredMatrix({"blocks": packed.reshape(rows, -1, 16), "scales": scale}, values)


def mxfp4_deepseek(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
    """Make a matrix of DeepSeek-V4's experts: codes in int8, scales in float8_e8m0fnu."""
    packed, scale, values = _draw_mxfp4(rows, depth, g, gain)
    tensors = {"weight": packed.view(torch.int8), "scale": scale.view(torch.float8_e8m0fnu)}
    return StoredMatrix(tensors, values)


def mxfp4_quark(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
    packed, scale, values = _draw_mxfp4(rows, depth, g, gain)
    return StoredMatrix({"weight": packed, "weight_scale": scale}, values)


def mxfp4_compressed(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
    packed, scale, values = _draw_mxfp4(rows, depth, g, gain)
    return StoredMatrix({"weight_packed": packed, "weight_scale": scale}, values)


def nvfp4(
    weight_name: str,
    global_scale_name: str,
    input_scale_name: str,
    *,
    divides: bool,
    shared_scale: bool = False,
) -> Make:
    """Make matrices of e2m1 codes with an e4m3 scale per 16 columns and one float32 scale.

    weight_name, global_scale_name, input_scale_name: names of the tensors.
    divides: whether values are divided by the float32 scale instead of multiplied by it.
    shared_scale: whether all matrices with the same K have the same float32 scale.
    """

    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
        codes = torch.randint(0, 16, (rows, depth), generator=g)
        scale = (_draw_scales((rows, -(-depth // 16)), g) * 100).to(FP8)
        global_scale = torch.ones(1) if shared_scale else _draw_scales((1,), g) * gain
        global_scale = global_scale / (300 * depth**0.5)
        global_scale = (1 / global_scale if divides else global_scale).float()
        multiplier = 1 / global_scale.to(F64) if divides else global_scale.to(F64)
        values = E2M1[codes] * expand_tiles(scale.float(), rows, depth, 1, 16) * multiplier
        tensors = {
            weight_name: (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8),
            "weight_scale": scale,
            global_scale_name: global_scale if divides else global_scale.reshape(()),
            input_scale_name: torch.tensor([0.01]),
        }
        return StoredMatrix(tensors, values)

    return make
