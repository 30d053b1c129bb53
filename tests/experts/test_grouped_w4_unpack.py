"""The Gluon functions of the `grouped_w4` kernel that unpack 4-bit weights, run on torch tensors.

Gluon has no interpreter, so the test replaces `gl` and emulates the inline assembly. The test
verifies values, but not layouts. tests/compile/test_grouped_w4_compile.py verifies that the
functions move no data between registers.
"""

import re
from collections.abc import Callable
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from w4_samples import INTEGERS, random_weights

from experts.triton.grouped_w4.bitwise_reference import _round_to_bf16, untile_weights
from experts.triton.grouped_w4.kernels import unpack as kernels
from experts.triton.grouped_w4.layout import BLOCK, list_tile_rows

_MASK = 0xFFFFFFFF


class StandInTensor:
    """A tensor with the Gluon methods that the functions call. Each int64 element is a register."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self.type = SimpleNamespace(layout=None)

    def reshape(self, shape: tuple[Any, ...]) -> "StandInTensor":
        return StandInTensor(self.value.reshape([int(getattr(n, "value", n)) for n in shape]))

    def permute(self, order: tuple[int, ...]) -> "StandInTensor":
        return StandInTensor(self.value.permute(order))

    def split(self) -> tuple["StandInTensor", "StandInTensor"]:
        first, second = self.value.unbind(-1)
        return StandInTensor(first), StandInTensor(second)

    def __rshift__(self, bits: int) -> "StandInTensor":
        return StandInTensor(self.value >> bits)

    def to(self, dtype: str, bitcast: bool = False) -> "StandInTensor":
        if dtype == "int16":
            return StandInTensor(self.value & 0xFFFF)
        assert (dtype, bitcast) == ("bfloat16", True)
        return StandInTensor((self.value << 16).to(torch.int32).view(torch.float32))


class StandInSharedMemory:
    """A buffer in shared memory."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def load(self, layout: object) -> StandInTensor:
        return StandInTensor(self.value)

    def slice(self, start: int, length: int, dim: int) -> "StandInSharedMemory":
        return StandInSharedMemory(self.value.narrow(dim, start, length))


def unpack_halves(word: torch.Tensor) -> list[torch.Tensor]:
    halves = ((word << 16) & _MASK, word & 0xFFFF0000)
    return [half.to(torch.int32).view(torch.float32).double() for half in halves]


def _pack_halves(halves: list[torch.Tensor]) -> torch.Tensor:
    """Round two float64 halves to bf16 and pack them into a register."""
    low, high = (
        _round_to_bf16(half).to(torch.bfloat16).view(torch.int16).long() & 0xFFFF for half in halves
    )
    return low | high << 16


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _pack_halves([x * y for x, y in zip(unpack_halves(a), unpack_halves(b), strict=True)])


def _add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _pack_halves([x + y for x, y in zip(unpack_halves(a), unpack_halves(b), strict=True)])


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    halves = zip(unpack_halves(a), unpack_halves(b), unpack_halves(c), strict=True)
    return _pack_halves([x * y + z for x, y, z in halves])


def view_as_float32(register: torch.Tensor) -> torch.Tensor:
    return (
        torch.where(register > _MASK >> 1, register - _MASK - 1, register).int().view(torch.float32)
    )


def _pack_float32(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    return _pack_halves([view_as_float32(low).double(), view_as_float32(high).double()])


def _subtract(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (view_as_float32(a) - view_as_float32(b)).view(torch.int32).long() & _MASK


def _prmt(a: torch.Tensor, _zero: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    result = torch.zeros_like(a)
    for byte in range(4):
        source_byte = int(selector) >> 4 * byte & 7
        if source_byte < 4:
            result |= (a >> 8 * source_byte & 0xFF) << 8 * byte
    return result


def _lop3(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    if int(table) == (0xF0 & 0xCC) | 0xAA:
        return (a & b) | c
    assert int(table) == (0xF0 ^ 0xCC) & 0xAA
    return (a ^ b) & c


def _multiply_float32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (view_as_float32(a) * view_as_float32(b)).view(torch.int32).long() & _MASK


_OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b & _MASK,
    "shr.u32": lambda a, b: a >> b,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "mov.b32": lambda a: a,
    "mad.lo.u32": lambda a, b, c: a * b + c & _MASK,
    "mul.bf16x2": _multiply,
    "add.bf16x2": _add,
    "fma.rn.bf16x2": _fma,
    "cvt.rn.bf16x2.f32": _pack_float32,
    "sub.f32": _subtract,
    "mul.f32": _multiply_float32,
}


def _run_assembly(
    code: Any, constraints: Any, args: list[StandInTensor], **_: Any
) -> list[StandInTensor]:
    """Run inline assembly on whole tensors, as gl.inline_asm_elementwise does."""
    num_outputs = constraints.count("=")
    registers = {f"${num_outputs + i}": arg.value.long() & _MASK for i, arg in enumerate(args)}
    shape = torch.broadcast_shapes(*(value.shape for value in registers.values()))
    for instruction in code.strip("{} ").split(";"):
        tokens = re.split(r"[ ,]+", instruction.strip())
        if tokens[0] in ("", ".reg"):
            continue
        name, target, *names = tokens
        operands = [registers[n] if n in registers else torch.tensor(int(n, 0)) for n in names]
        registers[target] = _OPERATIONS[name](*operands)
    return [StandInTensor(registers[f"${i}"].expand(shape)) for i in range(num_outputs)]


_GL = SimpleNamespace(
    constexpr=object,
    int16="int16",
    int32="int32",
    bfloat16="bfloat16",
    BlockedLayout=lambda *_: None,
    DistributedLinearLayout=lambda *_: None,
    SliceLayout=lambda *_: None,
    join=lambda a, b: StandInTensor(torch.stack((a.value, b.value), -1)),
    expand_dims=lambda a, axis: StandInTensor(a.value.unsqueeze(axis)),
    convert_layout=lambda a, _, assert_trivial: a,
    inline_asm_elementwise=_run_assembly,
)


def make_python_function(name: str) -> Callable[..., Any]:
    """Return a function of the kernel that runs in Python, with `gl` and its helpers replaced."""
    namespace = {**vars(kernels), "gl": _GL}
    for helper in ("_join4", "_load_scale_quads"):
        namespace[helper] = FunctionType(getattr(kernels, helper).fn.__code__, namespace)
    return FunctionType(getattr(kernels, name).fn.__code__, namespace)


@pytest.mark.parametrize(
    ("quant", "scales"),
    [
        ("mxfp4_w4a16", None),
        ("nvfp4_w4a16", None),
        *product(INTEGERS, (torch.float32, torch.float16, torch.bfloat16)),
    ],
)
def test_unpacking_inverts_tiling(quant: str, scales: torch.dtype | None) -> None:
    sample = random_weights(quant, 1, 256, 128, scales=scales or torch.float32)
    tiled, packed_format = (
        sample.tiled(list_tile_rows(256, 1, 0, gated=False)),
        sample.packed_format,
    )
    expected = untile_weights(tiled, packed_format)[0].double() * 2.0**-packed_format.scale_shift
    unpack, load_block_scales = (
        make_python_function("unpack"),
        make_python_function("load_block_scales"),
    )
    for step in range(2):
        scale_memory = StandInSharedMemory(tiled.scales[0, 0, step])
        words = tiled.words[0, 0, step].view(4, 16, 32)
        for part in range(2):
            part_scales = load_block_scales(scale_memory, part, str(packed_format))
            for index, block_scales in enumerate(part_scales):
                block = 2 * part + index
                memory = StandInSharedMemory(words[block])
                got = unpack(memory, block_scales, None, str(packed_format)).value.double()
                rows, depth = slice(block * BLOCK, (block + 1) * BLOCK), slice(step * BLOCK, None)
                assert torch.equal(got, expected[rows, depth][:, :BLOCK])
