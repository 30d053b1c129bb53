"""Tiny matrices in the formats of published checkpoints, and the numbers they stand for.

Codes and scales are drawn, never rounded from other numbers, so a matrix stands for exactly what
its format says, in float64. Everything is packed here by hand, value by value, by the packers' own
descriptions; nothing of `modular_kernel.checkpoints` is used.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

F64, FP8 = torch.float64, torch.float8_e4m3fn
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=F64)
# AWQ puts column n of eight into nibble FOUND[n] of a word.
FOUND = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Stored:
    """tensors: by their names behind the matrix's own. values: (N, K) float64."""

    tensors: dict[str, torch.Tensor]
    values: torch.Tensor


Make = Callable[[int, int, torch.Generator, float], Stored]


def words(codes: torch.Tensor, dim: int, bits: int, order: tuple[int, ...] | None = None) -> Any:
    """Codes (int64) packed into int32 along `dim`, value i of a word in bits `bits * order[i]`."""
    per = 32 // bits
    order = order or tuple(range(per))
    codes = codes.movedim(dim, -1)
    codes = codes.reshape(*codes.shape[:-1], -1, per)
    packed = sum(codes[..., i] << (bits * order[i]) for i in range(per))
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed)  # type: ignore[arg-type]
    return packed.to(torch.int32).movedim(-1, dim).contiguous()


def spread(tiles: torch.Tensor, rows: int, depth: int, bn: int, bk: int) -> torch.Tensor:
    return tiles.to(F64).repeat_interleave(bn, 0)[:rows].repeat_interleave(bk, 1)[:, :depth]


def _randn(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    return torch.randn(*shape, generator=g)


def _uniform(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """Between 0.6 and 1.4: scales that are all different, and of one size."""
    return 0.6 + 0.8 * torch.rand(*shape, generator=g)


def plain(dtype: torch.dtype) -> Make:
    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> Stored:
        w = (_randn((rows, depth), g) * gain / depth**0.5).to(dtype)
        return Stored({"weight": w}, w.to(F64))

    return make


def _fp8_codes(rows: int, depth: int, g: torch.Generator) -> torch.Tensor:
    return (_randn((rows, depth), g) * 100).clamp(-448, 448).to(FP8)


def fp8_block(
    scale_dtype: torch.dtype, name: str = "weight_scale_inv", block: tuple[int, int] = (128, 128)
) -> Make:
    bn, bk = block

    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> Stored:
        w = _fp8_codes(rows, depth, g)
        scale = _uniform((-(-rows // bn), -(-depth // bk)), g) * gain / (100 * depth**0.5)
        if scale_dtype is torch.float8_e8m0fnu:  # powers of two, the gain among them
            scale = torch.exp2(torch.log2(scale * 2.0 ** (4 * (gain - 1))).round())
        scale = scale.to(scale_dtype)
        values = w.to(F64) * spread(scale.float(), rows, depth, bn, bk)
        return Stored({"weight": w, name: scale}, values)

    return make


def fp8_tensor(*, static: bool, shape: tuple[int, ...] = (), one: bool = False) -> Make:
    """One: scales are the same of all matrices of a depth."""

    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> Stored:
        w = _fp8_codes(rows, depth, g)
        size, inputs = (torch.ones(1), torch.ones(1)) if one else (_uniform((1,), g) * gain, None)
        scale = (size / (100 * depth**0.5)).reshape(shape)
        tensors = {"weight": w, "weight_scale": scale}
        if static:
            inputs = _uniform((1,), g) if inputs is None else inputs
            tensors["input_scale"] = (16 / 448 * inputs).reshape(shape)
        return Stored(tensors, w.to(F64) * scale.to(F64))

    return make


def fp8_channel(scale_dtype: torch.dtype = torch.bfloat16) -> Make:
    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> Stored:
        w = _fp8_codes(rows, depth, g)
        scale = (_uniform((rows, 1), g) * gain / (100 * depth**0.5)).to(scale_dtype)
        return Stored({"weight": w, "weight_scale": scale}, w.to(F64) * scale.to(F64))

    return make


def int8_channel(rows: int, depth: int, g: torch.Generator, gain: float) -> Stored:
    w = (_randn((rows, depth), g) * 40).round().clamp(-127, 127).to(torch.int8)
    scale = (_uniform((rows, 1), g) * gain / (40 * depth**0.5)).to(torch.bfloat16)
    return Stored({"weight": w, "weight_scale": scale}, w.to(F64) * scale.to(F64))


def _codes(rows: int, depth: int, bits: int, g: torch.Generator) -> torch.Tensor:
    """Unsigned, around the middle."""
    half = 1 << (bits - 1)
    return (_randn((rows, depth), g) * half / 3 + half).round().clamp(0, 2 * half - 1).long()


def _points(shape: tuple[int, ...], bits: int, g: torch.Generator, symmetric: bool) -> torch.Tensor:
    half, off = 1 << (bits - 1), max(1, (1 << bits) // 8)
    if symmetric:
        return torch.full(shape, half, dtype=torch.int64)
    return half + torch.randint(-off, off + 1, shape, generator=g)


@dataclass(frozen=True)
class _Drawn:
    """(codes - zeros) * scale = values, zeros and scale with a column for each group of `width`."""

    codes: torch.Tensor
    zeros: torch.Tensor
    scale: torch.Tensor
    values: torch.Tensor
    width: int


@dataclass(frozen=True)
class _Grouped:
    """Codes in groups along the depth, all of it with None or -1, and scales of `dtype`."""

    bits: int
    group: int | None
    symmetric: bool
    dtype: torch.dtype

    def draw(self, rows: int, depth: int, g: torch.Generator, gain: float) -> _Drawn:
        width = depth if self.group is None or self.group == -1 else self.group
        codes, groups = _codes(rows, depth, self.bits, g), -(-depth // width)
        zeros = _points((rows, groups), self.bits, g, self.symmetric)
        size = gain * 3 / (1 << (self.bits - 1)) / depth**0.5
        scale = (_uniform((rows, groups), g) * size).to(self.dtype)
        centred = codes - spread(zeros, rows, depth, 1, width)
        return _Drawn(codes, zeros, scale, centred * spread(scale, rows, depth, 1, width), width)


def compressed(bits: int, group: int | None, *, symmetric: bool = True) -> Make:
    """pack-quantized: N rows, K packed; group None: one scale a row."""

    grouped = _Grouped(bits, group, symmetric, torch.bfloat16)

    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> Stored:
        drawn = grouped.draw(rows, depth, g, gain)
        tensors = {
            "weight_packed": words(drawn.codes, 1, bits),
            "weight_scale": drawn.scale,
            "weight_shape": torch.tensor([rows, depth]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(drawn.zeros, 0, bits)
        return Stored(tensors, drawn.values)

    return make


def awq(group: int, *, zero_point: bool = True) -> Make:
    grouped = _Grouped(4, group, not zero_point, torch.float16)

    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> Stored:
        drawn = grouped.draw(rows, depth, g, gain)
        tensors = {
            "qweight": words(drawn.codes.T, 1, 4, FOUND),
            "qzeros": words(drawn.zeros.T, 1, 4, FOUND),
            "scales": drawn.scale.T.contiguous(),
        }
        return Stored(tensors, drawn.values)

    return make


def gptq(bits: int, group: int, *, symmetric: bool = True, less: int = 1) -> Make:
    """less: what a stored zero point is less than it is, 1 in the format's first version."""

    grouped = _Grouped(bits, group, symmetric, torch.float16)

    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> Stored:
        drawn = grouped.draw(rows, depth, g, gain)
        tensors = {
            "qweight": words(drawn.codes.T, 0, bits),
            "qzeros": words(drawn.zeros.T - less, 1, bits),
            "scales": drawn.scale.T.contiguous(),
            "g_idx": torch.arange(depth, dtype=torch.int32) // drawn.width,
        }
        return Stored(tensors, drawn.values)

    return make


def ordered(make: Make, name: str, group: int, values: str) -> Make:
    """As `make`, but that columns are in groups at random, as those of gate and up alike."""
    made: Counter[Any] = Counter()

    def shuffled(rows: int, depth: int, g: torch.Generator, gain: float) -> Stored:
        stored, number = make(rows, depth, g, gain), made[rows, depth, gain]
        made[rows, depth, gain] += 1  # the first of gate, the first of up, ...
        own = torch.Generator().manual_seed(number)
        place = torch.randperm(depth, generator=own)  # of each sorted column
        tensors = dict(stored.tensors)
        tensors[name] = torch.empty(depth, dtype=torch.int32)
        tensors[name][place] = torch.arange(depth, dtype=torch.int32) // group
        codes = torch.empty(rows, depth, dtype=torch.int64)
        bits = 4 if tensors[values].numel() * 8 == codes.numel() else 8
        along = 0 if name == "g_idx" else 1
        unpacked = torch.stack(
            [tensors[values].long() >> (bits * i) & (1 << bits) - 1 for i in range(32 // bits)],
            along + 1,
        ).flatten(along, along + 1)
        # Equal columns of a group keep their order when they are sorted again.
        first = torch.argsort(tensors[name], stable=True)
        codes[:, first] = unpacked.T if along == 0 else unpacked
        tensors[values] = words(codes.T if along == 0 else codes, along, bits)
        numbers = torch.empty_like(stored.values)
        numbers[:, first] = stored.values
        return Stored(tensors, numbers)

    return shuffled


def _mxfp4(rows: int, depth: int, g: torch.Generator, gain: float) -> Any:
    codes = torch.randint(0, 16, (rows, depth), generator=g)
    scale = torch.randint(123, 127, (rows, depth // 32), generator=g)
    scale = scale + round(3 * (gain - 1)) - int(torch.tensor(depth).log2().item() / 2)
    values = E2M1[codes] * spread(torch.exp2(scale.to(F64) - 127), rows, depth, 1, 32)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return packed, scale.to(torch.uint8), values


def mxfp4(rows: int, depth: int, g: torch.Generator, gain: float) -> Stored:
    packed, scale, values = _mxfp4(rows, depth, g, gain)
    return Stored({"blocks": packed.reshape(rows, -1, 16), "scales": scale}, values)


def mxfp4_compressed(rows: int, depth: int, g: torch.Generator, gain: float) -> Stored:
    packed, scale, values = _mxfp4(rows, depth, g, gain)
    return Stored({"weight_packed": packed, "weight_scale": scale}, values)


def nvfp4(weight: str, whole: str, inputs: str, *, divides: bool, one: bool = False) -> Make:
    """Of codes, e4m3 scales of 16, and a float32 scale that multiplies the numbers, or divides.

    one: that scale is the same of all matrices of a depth.
    """

    def make(rows: int, depth: int, g: torch.Generator, gain: float) -> Stored:
        codes = torch.randint(0, 16, (rows, depth), generator=g)
        scale = (_uniform((rows, -(-depth // 16)), g) * 100).to(FP8)
        factor = torch.ones(1) if one else _uniform((1,), g) * gain
        factor = factor / (300 * depth**0.5)
        factor = (1 / factor if divides else factor).float()
        number = 1 / factor.to(F64) if divides else factor.to(F64)
        values = E2M1[codes] * spread(scale.float(), rows, depth, 1, 16) * number
        tensors = {
            weight: (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8),
            "weight_scale": scale,
            whole: factor if divides else factor.reshape(()),
            inputs: torch.tensor([0.01]),
        }
        return Stored(tensors, values)

    return make
