"""How the grouped kernel of 4-bit weights unpacks, on a CPU: its functions over torch's.

Gluon has no interpreter. What tensors the functions make is run here; in which registers they lie
the compiler proves (tests/compile/test_grouped_w4_compile.py): they claim no data to be moved.
"""

import re
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from test_grouped_w4_layout import weights

from experts.triton.grouped_w4.kernels import gemm
from experts.triton.grouped_w4.layout import (
    BLOCK,
    LOWERED,
    rows_of_tiles,
    tile_weights,
    untiled,
)

_MASK = 0xFFFFFFFF


class _Values:
    """A tensor with the methods of Gluon's that the functions call; int64 holds a register."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self.type = SimpleNamespace(layout=None)

    def reshape(self, shape: tuple[Any, ...]) -> "_Values":
        return _Values(self.value.reshape([int(getattr(n, "value", n)) for n in shape]))

    def permute(self, order: tuple[int, ...]) -> "_Values":
        return _Values(self.value.permute(order))

    def split(self) -> tuple["_Values", "_Values"]:
        first, second = self.value.unbind(-1)
        return _Values(first), _Values(second)

    def __rshift__(self, bits: int) -> "_Values":
        return _Values(self.value >> bits)

    def to(self, dtype: str, bitcast: bool = False) -> "_Values":
        if dtype == "int16":
            return _Values(self.value & 0xFFFF)
        assert (dtype, bitcast) == ("bfloat16", True)
        return _Values((self.value << 16).to(torch.int32).view(torch.float32))


class _Place:
    """A place of shared memory."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def load(self, layout: object) -> _Values:
        return _Values(self.value)


def _halves(word: torch.Tensor) -> list[torch.Tensor]:
    halves = ((word << 16) & _MASK, word & 0xFFFF0000)
    return [half.to(torch.int32).view(torch.float32).double() for half in halves]


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """mul.bf16x2."""
    low, high = (
        (x * y).to(torch.bfloat16).view(torch.int16).long() & 0xFFFF
        for x, y in zip(_halves(a), _halves(b), strict=True)
    )
    return low | high << 16


def _prmt(a: torch.Tensor, _zero: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    result = torch.zeros_like(a)
    for byte in range(4):
        chosen = int(selector) >> 4 * byte & 7
        result |= (a >> 8 * chosen & 0xFF if chosen < 4 else torch.zeros_like(a)) << 8 * byte
    return result


def _lop3(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    assert int(table) == (0xF0 ^ 0xCC) & 0xAA
    return (a ^ b) & c


_OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b & _MASK,
    "shr.u32": lambda a, b: a >> b,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "mul.bf16x2": _product,
}


def _assembled(code: Any, constraints: Any, args: list[_Values], **_: Any) -> list[_Values]:
    """Run the assembler text over whole tensors."""
    count = constraints.value.count("=")
    known = {f"${count + i}": arg.value.long() & _MASK for i, arg in enumerate(args)}
    shape = torch.broadcast_shapes(*(value.shape for value in known.values()))
    for line in code.value.strip("{} ").split(";"):
        words = re.split(r"[ ,]+", line.strip())
        if words[0] in ("", ".reg"):
            continue
        name, to, *given = words
        operands = [known[n] if n in known else torch.tensor(int(n, 0)) for n in given]
        known[to] = _OPERATIONS[name](*operands)
    return [_Values(known[f"${i}"].expand(shape)) for i in range(count)]


_GL = SimpleNamespace(
    constexpr=object,
    int16="int16",
    int32="int32",
    bfloat16="bfloat16",
    BlockedLayout=lambda *_: None,
    DistributedLinearLayout=lambda *_: None,
    SliceLayout=lambda *_: None,
    join=lambda a, b: _Values(torch.stack((a.value, b.value), -1)),
    expand_dims=lambda a, axis: _Values(a.value.unsqueeze(axis)),
    convert_layout=lambda a, _, assert_trivial: a,
    inline_asm_elementwise=_assembled,
)


def _as_python(name: str) -> Callable[..., Any]:
    plain = {**vars(gemm), "gl": _GL}
    plain["_four"] = FunctionType(gemm._four.fn.__code__, plain)
    return FunctionType(getattr(gemm, name).fn.__code__, plain)


def test_unpacked_weights_are_those_that_were_tiled() -> None:
    w, scale, _ = weights(1, 256, 128)
    tiled = tile_weights(w, scale, rows_of_tiles(256, 1, 0, gated=False))
    expected = untiled(tiled)[0].double() * 2.0**-LOWERED
    unpack, scales = _as_python("_unpack"), _as_python("_scales")
    for step in range(2):
        places = _Place(tiled.scales[0, 0, step])
        words = tiled.words[0, 0, step].view(4, 16, 32)
        for part in range(2):
            for block, of_block in enumerate(scales(places, part)):
                at = 2 * part + block
                got = unpack(_Place(words[at]), of_block, None).value.double()
                rows, depth = slice(at * BLOCK, (at + 1) * BLOCK), slice(step * BLOCK, None)
                assert torch.equal(got, expected[rows, depth][:, :BLOCK])
