"""Tiny matrices in the formats of published checkpoints, with their exact values.

Codes and scales are drawn at random, never rounded from other numbers, so the float64 values are
exactly those of the stored matrix. Everything is packed here value by value, following the packers'
own documentation and without any code of `modular_kernel.checkpoints`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

F64, FP8 = torch.float64, torch.float8_e4m3fn
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=F64)
# AWQ stores column n of eight in nibble FOUND[n] of a word.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class StoredMatrix:
    """A stored matrix. tensors: by name suffix. values: the exact values, (N, K) float64."""

    tensors: dict[str, torch.Tensor]
    values: torch.Tensor


Make = Callable[[int, int, torch.Generator, float], StoredMatrix]


def pack_words(
    codes: torch.Tensor, dim: int, bits: int, order: tuple[int, ...] | None = None
) -> Any:
    """Pack int64 codes into int32 along `dim`; value i of a word has bits `bits * order[i]`."""
    per = 32 // bits
    order = order or tuple(range(per))
    codes = codes.movedim(dim, -1)
    codes = codes.reshape(*codes.shape[:-1], -1, per)
    packed = sum(codes[..., i] << (bits * order[i]) for i in range(per))
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed)  # type: ignore[arg-type]
    return packed.to(torch.int32).movedim(-1, dim).contiguous()


def expand_tiles(tiles: torch.Tensor, rows: int, depth: int, bn: int, bk: int) -> torch.Tensor:
    return tiles.to(F64).repeat_interleave(bn, 0)[:rows].repeat_interleave(bk, 1)[:, :depth]


def _randn(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    return torch.randn(*shape, generator=g)


def _uniform(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """Draw scales between 0.6 and 1.4, which all differ but have the same magnitude."""
    return 0.6 + 0.8 * torch.rand(*shape, generator=g)


def plain(dtype: torch.dtype) -> Make:
    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
        w = (_randn((rows, depth), g) * gain / depth**0.5).to(dtype)
        return StoredMatrix({"weight": w}, w.to(F64))

    return make


def _fp8_codes(rows: int, depth: int, g: torch.Generator) -> torch.Tensor:
    return (_randn((rows, depth), g) * 100).clamp(-448, 448).to(FP8)


def fp8_block(
    scale_dtype: torch.dtype, name: str = "weight_scale_inv", block: tuple[int, int] = (128, 128)
) -> Make:
    bn, bk = block

    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
        w = _fp8_codes(rows, depth, g)
        scale = _uniform((-(-rows // bn), -(-depth // bk)), g) * gain / (100 * depth**0.5)
        if scale_dtype is torch.float8_e8m0fnu:  # powers of two, including the gain
            scale = torch.exp2(torch.log2(scale * 2.0 ** (4 * (gain - 1))).round())
        scale = scale.to(scale_dtype)
        values = w.to(F64) * expand_tiles(scale.float(), rows, depth, bn, bk)
        return StoredMatrix({"weight": w, name: scale}, values)

    return make


def fp8_tensor(*, static: bool, shape: tuple[int, ...] = (), one: bool = False) -> Make:
    """Make fp8 matrices with per-tensor scales; static adds an input scale.

    one: all matrices of the same depth have the same scales.
    """

    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
        w = _fp8_codes(rows, depth, g)
        size, inputs = (torch.ones(1), torch.ones(1)) if one else (_uniform((1,), g) * gain, None)
        scale = (size / (100 * depth**0.5)).reshape(shape)
        tensors = {"weight": w, "weight_scale": scale}
        if static:
            inputs = _uniform((1,), g) if inputs is None else inputs
            tensors["input_scale"] = (16 / 448 * inputs).reshape(shape)
        return StoredMatrix(tensors, w.to(F64) * scale.to(F64))

    return make


def fp8_channel(scale_dtype: torch.dtype = torch.bfloat16) -> Make:
    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
        w = _fp8_codes(rows, depth, g)
        scale = (_uniform((rows, 1), g) * gain / (100 * depth**0.5)).to(scale_dtype)
        return StoredMatrix({"weight": w, "weight_scale": scale}, w.to(F64) * scale.to(F64))

    return make


def int8_channel(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
    w = (_randn((rows, depth), g) * 40).round().clamp(-127, 127).to(torch.int8)
    scale = (_uniform((rows, 1), g) * gain / (40 * depth**0.5)).to(torch.bfloat16)
    return StoredMatrix({"weight": w, "weight_scale": scale}, w.to(F64) * scale.to(F64))


def _codes(rows: int, depth: int, bits: int, g: torch.Generator) -> torch.Tensor:
    """Draw unsigned codes around the middle of their range."""
    half = 1 << (bits - 1)
    return (_randn((rows, depth), g) * half / 3 + half).round().clamp(0, 2 * half - 1).long()


def _zero_points(
    shape: tuple[int, ...], bits: int, g: torch.Generator, symmetric: bool
) -> torch.Tensor:
    half, off = 1 << (bits - 1), max(1, (1 << bits) // 8)
    if symmetric:
        return torch.full(shape, half, dtype=torch.int64)
    return half + torch.randint(-off, off + 1, shape, generator=g)


@dataclass(frozen=True)
class _GroupedMatrix:
    """Values (codes - zeros) * scale; zeros and scale have one column per group of `width`."""

    codes: torch.Tensor
    zeros: torch.Tensor
    scale: torch.Tensor
    values: torch.Tensor
    width: int


@dataclass(frozen=True)
class _GroupFormat:
    """Codes in groups along the depth, with scales of `dtype`. group: None or -1 for one group."""

    bits: int
    group: int | None
    symmetric: bool
    dtype: torch.dtype

    def draw(self, rows: int, depth: int, g: torch.Generator, gain: float) -> _GroupedMatrix:
        width = depth if self.group is None or self.group == -1 else self.group
        codes, groups = _codes(rows, depth, self.bits, g), -(-depth // width)
        zeros = _zero_points((rows, groups), self.bits, g, self.symmetric)
        size = gain * 3 / (1 << (self.bits - 1)) / depth**0.5
        scale = (_uniform((rows, groups), g) * size).to(self.dtype)
        centered = codes - expand_tiles(zeros, rows, depth, 1, width)
        return _GroupedMatrix(
            codes, zeros, scale, centered * expand_tiles(scale, rows, depth, 1, width), width
        )


def compressed(bits: int, group: int | None, *, symmetric: bool = True) -> Make:
    """Make pack-quantized matrices: N rows, K packed. group: None for one scale per row."""

    grouped = _GroupFormat(bits, group, symmetric, torch.bfloat16)

    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
        drawn = grouped.draw(rows, depth, g, gain)
        tensors = {
            "weight_packed": pack_words(drawn.codes, 1, bits),
            "weight_scale": drawn.scale,
            "weight_shape": torch.tensor([rows, depth]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = pack_words(drawn.zeros, 0, bits)
        return StoredMatrix(tensors, drawn.values)

    return make


def awq(group: int, *, zero_point: bool = True) -> Make:
    grouped = _GroupFormat(4, group, not zero_point, torch.float16)

    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
        drawn = grouped.draw(rows, depth, g, gain)
        tensors = {
            "qweight": pack_words(drawn.codes.T, 1, 4, AWQ_ORDER),
            "qzeros": pack_words(drawn.zeros.T, 1, 4, AWQ_ORDER),
            "scales": drawn.scale.T.contiguous(),
        }
        return StoredMatrix(tensors, drawn.values)

    return make


def gptq(bits: int, group: int, *, symmetric: bool = True, less: int = 1) -> Make:
    """Make GPTQ matrices.

    less: amount subtracted from stored zero points, 1 in version 1 of the format.
    """

    grouped = _GroupFormat(bits, group, symmetric, torch.float16)

    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
        drawn = grouped.draw(rows, depth, g, gain)
        tensors = {
            "qweight": pack_words(drawn.codes.T, 0, bits),
            "qzeros": pack_words(drawn.zeros.T - less, 1, bits),
            "scales": drawn.scale.T.contiguous(),
            "g_idx": torch.arange(depth, dtype=torch.int32) // drawn.width,
        }
        return StoredMatrix(tensors, drawn.values)

    return make


def with_act_order(make: Make, name: str, group: int, values: str) -> Make:
    """Make matrices like `make` with columns assigned to random groups (act-order).

    The n-th gate and the n-th up matrix get the same order.
    """
    counts: Counter[Any] = Counter()

    def shuffled(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
        stored, number = make(rows, depth, g, gain), counts[rows, depth, gain]
        counts[rows, depth, gain] += 1  # counts gate and up matrices separately
        generator = torch.Generator().manual_seed(number)
        column_order = torch.randperm(depth, generator=generator)  # position of each sorted column
        tensors = dict(stored.tensors)
        tensors[name] = torch.empty(depth, dtype=torch.int32)
        tensors[name][column_order] = torch.arange(depth, dtype=torch.int32) // group
        codes = torch.empty(rows, depth, dtype=torch.int64)
        bits = 4 if tensors[values].numel() * 8 == codes.numel() else 8
        dim = 0 if name == "g_idx" else 1
        unpacked = torch.stack(
            [tensors[values].long() >> (bits * i) & (1 << bits) - 1 for i in range(32 // bits)],
            dim + 1,
        ).flatten(dim, dim + 1)
        # A stable sort keeps the order of columns within a group.
        first = torch.argsort(tensors[name], stable=True)
        codes[:, first] = unpacked.T if dim == 0 else unpacked
        tensors[values] = pack_words(codes.T if dim == 0 else codes, dim, bits)
        numbers = torch.empty_like(stored.values)
        numbers[:, first] = stored.values
        return StoredMatrix(tensors, numbers)

    return shuffled


def _mxfp4(rows: int, depth: int, g: torch.Generator, gain: float) -> Any:
    codes = torch.randint(0, 16, (rows, depth), generator=g)
    scale = torch.randint(123, 127, (rows, depth // 32), generator=g)
    scale = scale + round(3 * (gain - 1)) - int(torch.tensor(depth).log2().item() / 2)
    values = E2M1[codes] * expand_tiles(torch.exp2(scale.to(F64) - 127), rows, depth, 1, 32)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return packed, scale.to(torch.uint8), values


def mxfp4(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
    packed, scale, values = _mxfp4(rows, depth, g, gain)
    return StoredMatrix({"blocks": packed.reshape(rows, -1, 16), "scales": scale}, values)


def mxfp4_compressed(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
    packed, scale, values = _mxfp4(rows, depth, g, gain)
    return StoredMatrix({"weight_packed": packed, "weight_scale": scale}, values)


def nvfp4(weight: str, whole: str, inputs: str, *, divides: bool, one: bool = False) -> Make:
    """Make matrices of e2m1 codes with e4m3 scales per 16 and one float32 scale.

    divides: whether the float32 scale divides the values instead of multiplying them. one: all
    matrices of the same depth have the same float32 scale.
    """

    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> StoredMatrix:
        codes = torch.randint(0, 16, (rows, depth), generator=g)
        scale = (_uniform((rows, -(-depth // 16)), g) * 100).to(FP8)
        factor = torch.ones(1) if one else _uniform((1,), g) * gain
        factor = factor / (300 * depth**0.5)
        factor = (1 / factor if divides else factor).float()
        number = 1 / factor.to(F64) if divides else factor.to(F64)
        values = E2M1[codes] * expand_tiles(scale.float(), rows, depth, 1, 16) * number
        tensors = {
            weight: (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8),
            "weight_scale": scale,
            whole: factor if divides else factor.reshape(()),
            inputs: torch.tensor([0.01]),
        }
        return StoredMatrix(tensors, values)

    return make
