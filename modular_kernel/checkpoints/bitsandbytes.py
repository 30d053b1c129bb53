"""Weights of bitsandbytes: nf4 and fp4, which are dequantized, and LLM.int8()'s int8.

In 4 bits, a matrix (N, K) is one row-major sequence of values in blocks of `blocksize`, which may
extend over the border of two rows. Value i is

    quant_map[code i] absmax[i // blocksize]

in float32, as bitsandbytes itself computes it. The high nibble of a byte is the even i. With double
quantization, block j has the float32 factor

    nested_quant_map[absmax[j]] nested_absmax[j // nested_blocksize] + nested_offset

`quant_state.bitsandbytes__nf4` (or `__fp4`) is a JSON object in bytes with the sizes and the
offset. Bytes may be stored as another dtype (`bnb_4bit_quant_storage`). No scheme has these 16
levels, so the values are rounded to the layer's dtype: not at all in float32.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from modular_kernel.checkpoints.matrix_layout import FLOATS, Dim, Range, StoredTensor
from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError, WeightsError
from modular_kernel.spec.problem import dtype_name
from modular_kernel.spec.quantization import QuantScheme

KINDS = ("nf4", "fp4")
_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_MAX_STATE_BYTES = 4096
_MAX_SHAPE = 1 << 31
_STATE = "weight.quant_state.bitsandbytes__"
# Bytes of codes as they are, or as a dtype that a trainer can shard (`bnb_4bit_quant_storage`).
_STORAGE = (torch.uint8, *FLOATS, torch.int8, torch.int16, torch.int32, torch.int64, torch.float64)


class FlatTensors(Protocol):
    """The tensors of one matrix, by their names in `tensors_4bit`."""

    def header(self, name: str) -> tuple[int, torch.dtype] | None:
        """Return the number of entries of a tensor and its dtype, or None if there is none."""

    def read(self, name: str, entries: Range | None = None) -> torch.Tensor:
        """Return entries [start, stop) of a flattened tensor, or all of them."""


@dataclass(frozen=True)
class FlatTensor(StoredTensor):
    """A tensor of a matrix whose values are stored as one sequence, without regard to rows."""

    def shape(self, rows: int, depth: int) -> tuple[int, ...]:
        """Return (the number of values of the matrix,), for `check`."""
        return (rows * depth,)

    def check(
        self, what: str, got: Sequence[int], dtype: torch.dtype, need: tuple[int, ...]
    ) -> None:
        """Raise ShapeError unless the shape `got` is possible for need[0] values."""
        if dtype not in self.dtypes:
            names = " or ".join(map(dtype_name, self.dtypes))
            raise DtypeError(what, got=dtype_name(dtype), need=names)
        values, entries = need[-1], prod(got)
        sizes: tuple[int, ...] = ()
        if self.role == "w":
            sizes = (_ceil_div(_ceil_div(values, 2), dtype.itemsize),)
        elif self.name == "weight.absmax":
            sizes = tuple(_ceil_div(values, block) for block in _BLOCK_SIZES)
        elif self.role == "codebook":
            sizes = (16,) if self.name == "weight.quant_map" else (256,)
        is_flat = len(got) == 1 or (self.role == "w" and len(got) == 2 and 1 in got)
        if len(need) > 1 or not is_flat or (sizes and entries not in sizes) or not entries:
            expected = " or ".join(map(str, sizes[:3])) or "1 or more"
            raise ShapeError(what, got=tuple(got), need=f"({expected},) for {values} values")


def tensors_4bit(kind: str) -> tuple[StoredTensor, ...]:
    """Return the tensors of one matrix. kind: "nf4" or "fp4"."""
    floats = (torch.float32,)
    return (
        FlatTensor("weight", "w", (), _STORAGE),
        FlatTensor("weight.absmax", "scale", (), (torch.uint8, torch.float32)),
        FlatTensor("weight.quant_map", "codebook", (), floats),
        FlatTensor(f"{_STATE}{kind}", "state", (), (torch.uint8,)),
        FlatTensor("weight.nested_absmax", "scale", (), floats, optional=True),
        FlatTensor("weight.nested_quant_map", "codebook", (), floats, optional=True),
    )


def tensors_int8(scheme: QuantScheme) -> tuple[StoredTensor, ...]:
    """Return the tensors of one matrix of LLM.int8(): rows in int8, and 127 times their scales."""
    return (
        StoredTensor("weight", "w", (Dim("N"), Dim("K")), (torch.int8,)),
        StoredTensor("SCB", "scale", (Dim("N"),), (torch.float32,)),
        StoredTensor("weight_format", "format", (), (torch.uint8,), optional=True),
    )


@dataclass(frozen=True)
class _State:
    """The sizes of the blocks of one matrix, and the offset of its double quantization."""

    block: int
    shape: tuple[int, int]
    nested_block: int
    offset: float


def _parse_state(packed: torch.Tensor, kind: str, what: str) -> _State:
    """Parse the JSON of a quant_state; raise WeightsError for what bitsandbytes does not write."""
    need = f"the JSON object of a quant_state of {kind}"
    if packed.numel() > _MAX_STATE_BYTES:
        raise WeightsError(what, got=f"{packed.numel()} bytes", need=need)
    try:
        state = json.loads(bytes(packed.flatten().tolist()))
    except (ValueError, RecursionError):
        raise WeightsError(what, got="no JSON", need=need) from None
    if not isinstance(state, dict) or state.get("quant_type") != kind:
        raise WeightsError(what, got=str(state)[:120], need=need)
    shape, block = state.get("shape"), state.get("blocksize")
    sizes = shape if isinstance(shape, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 0 < size < _MAX_SHAPE for size in sizes):
        raise WeightsError(what, got=f"shape {str(shape)[:80]}", need="(N, K) of the matrix")
    if type(block) is not int or block not in _BLOCK_SIZES:
        need = f"one of {', '.join(map(str, _BLOCK_SIZES))}"
        raise WeightsError(what, got=f"blocksize {str(block)[:80]}", need=need)
    nested, offset = state.get("nested_blocksize", 0), state.get("nested_offset", 0.0)
    if type(nested) is not int or not 0 <= nested < _MAX_SHAPE:
        need = "the number of blocks per nested_absmax"
        raise WeightsError(what, got=f"nested_blocksize {str(nested)[:80]}", need=need)
    if type(offset) not in (int, float) or not abs(offset) < float("inf"):
        got = f"nested_offset {str(offset)[:80]}"
        raise WeightsError(what, got=got, need="a finite number")
    return _State(block, (sizes[0], sizes[1]), nested, float(offset))


def dequantize_part(
    kind: str, shape: tuple[int, int], rows: Range, columns: Range, tensors: FlatTensors, what: str
) -> torch.Tensor:
    """Return rows [a, b) and columns [c, d) of a matrix of `shape` (N, K), float32.

    kind: "nf4" or "fp4". what: the name of its weight, for messages.

    All bytes of the rows are read, as blocks ignore columns, but only those of the columns are
    unpacked. Raises WeightsError for a state, scale or codebook that is no number or does not match
    the sizes.
    """
    state = _parse_state(tensors.read(f"{_STATE}{kind}"), kind, f"{what}.quant_state")
    if state.shape != shape:
        raise WeightsError(f"{what}.quant_state", got=f"shape {state.shape}", need=shape)
    first, last = rows[0] * shape[1], rows[1] * shape[1]
    codebook = tensors.read("weight.quant_map")
    _check_finite(codebook, f"{what}.quant_map")
    blocks = (first // state.block, _ceil_div(last, state.block))
    absmax = _absmax(state, tensors, blocks, _ceil_div(prod(shape), state.block), what)
    values = _levels(tensors, codebook, first, last).view(-1, shape[1])
    if shape[1] % state.block == 0:
        values = values.view(-1, state.block).mul_(absmax[:, None]).view(-1, shape[1])
        return values[:, columns[0] : columns[1]]
    values = values[:, columns[0] : columns[1]]
    device = absmax.device
    row_R1 = torch.arange(rows[0], rows[1], device=device)[:, None]
    index = row_R1 * shape[1] + torch.arange(*columns, device=device)
    return values * absmax[index.div_(state.block, rounding_mode="floor").sub_(blocks[0])]


def dequantize_matrix(kind: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the whole matrix (N, K), float32, of the tensors of `tensors_4bit` by name.

    Raises WeightsError, ShapeError or DtypeError for tensors that do not match.
    """
    specs = {spec.name: spec for spec in tensors_4bit(kind)}
    extra = sorted(map(str, set(tensors) - set(specs)))
    missing = [name for name, spec in specs.items() if name not in tensors and not spec.optional]
    if extra or missing:
        got = f"unexpected {', '.join(extra)}" if extra else f"no {', '.join(missing)}"
        raise WeightsError(f"{kind} tensors", got=got, need=", ".join(specs))
    state = _parse_state(tensors[f"{_STATE}{kind}"], kind, "weight.quant_state")
    for name, tensor in tensors.items():
        specs[name].check(name, tuple(tensor.shape), tensor.dtype, (prod(state.shape),))
    rows, depth = state.shape
    return dequantize_part(
        kind, state.shape, (0, rows), (0, depth), _GivenTensors(tensors), "weight"
    )


@dataclass(frozen=True)
class _GivenTensors:
    tensors: Mapping[str, torch.Tensor]

    def header(self, name: str) -> tuple[int, torch.dtype] | None:
        tensor = self.tensors.get(name)
        return None if tensor is None else (tensor.numel(), tensor.dtype)

    def read(self, name: str, entries: Range | None = None) -> torch.Tensor:
        flat = self.tensors[name].flatten()
        return flat if entries is None else flat[slice(*entries)]


def _levels(tensors: FlatTensors, codebook: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return the levels of values [first, last), float32, without their blocks' factors."""
    header = tensors.header("weight")
    assert header is not None
    size = 2 * header[1].itemsize  # values per entry
    stored = tensors.read("weight", (first // size, _ceil_div(last, size)))
    packed = stored.contiguous().flatten().view(torch.uint8)
    begin = first - first // size * size
    packed = packed[begin // 2 : _ceil_div(begin + last - first, 2)]
    # The two levels of each byte, the high nibble first: one look-up for both.
    pairs = torch.stack(torch.meshgrid(codebook, codebook, indexing="ij"), -1).view(256, 2)
    levels = pairs.index_select(0, packed.int()).flatten()
    return levels[begin % 2 : begin % 2 + last - first]


def _absmax(
    state: _State, tensors: FlatTensors, blocks: Range, count: int, what: str
) -> torch.Tensor:
    """Return the factors of blocks [first, last), float32. count: of all blocks."""
    header = tensors.header("weight.absmax")
    assert header is not None
    if header[0] != count:
        need = f"{count}, one for each block of {state.block}"
        raise WeightsError(f"{what}.absmax", got=header[0], need=need)
    stored = tensors.read("weight.absmax", blocks)
    if stored.dtype is torch.float32:
        _check_finite(stored, f"{what}.absmax")
        return stored
    if state.nested_block == 0:
        need = "float32, or nested_blocksize in the quant_state"
        raise WeightsError(f"{what}.absmax", got="uint8 of double quantization", need=need)
    nested = (blocks[0] // state.nested_block, _ceil_div(blocks[1], state.nested_block))
    header = tensors.header("weight.nested_absmax")
    if header is None or tensors.header("weight.nested_quant_map") is None:
        need = "float32, or nested_quant_map and nested_absmax"
        raise WeightsError(f"{what}.absmax", got="uint8 of double quantization", need=need)
    if header[0] != _ceil_div(count, state.nested_block):
        need = f"{_ceil_div(count, state.nested_block)}, one for each {state.nested_block} blocks"
        raise WeightsError(f"{what}.nested_absmax", got=header[0], need=need)
    scale = tensors.read("weight.nested_absmax", nested)
    codebook = tensors.read("weight.nested_quant_map")
    _check_finite(codebook, f"{what}.nested_quant_map")
    _check_finite(scale, f"{what}.nested_absmax")
    index = (
        torch.arange(*blocks, device=scale.device).div_(state.nested_block, rounding_mode="floor")
        - nested[0]
    )
    factors = codebook[stored.int()] * scale[index] + state.offset
    return factors.float()


def _check_finite(values: torch.Tensor, what: str) -> None:
    bad = ~values.isfinite()
    if bool(bad.any()):
        raise WeightsError(what, got=float(values[bad][0]), need="finite numbers")


def _ceil_div(value: int, by: int) -> int:
    return -(-value // by)


def int8_scale(scb: torch.Tensor, stored_format: torch.Tensor | None) -> torch.Tensor:
    """Return the scales of rows of LLM.int8(), float32.

    scb: the largest magnitude of each row, which has the code 127. stored_format: 0 for rows in
    order. Raises WeightsError for another order, which bitsandbytes wrote before 0.45 on GPUs.
    """
    if stored_format is not None and int(stored_format.flatten()[0]) != 0:
        got = int(stored_format.flatten()[0])
        raise WeightsError("weight_format", got=got, need="0, rows in order")
    bad = ~(scb.isfinite() & (scb >= 0))
    if bool(bad.any()):
        raise WeightsError("SCB", got=float(scb[bad][0]), need="finite numbers from 0 on")
    return scb / 127


def refused_error(what: str, format: object) -> ConfigurationError:
    """Return the error of loaders that copy stored tensors one by one."""
    need = "another format; `load_experts` reads bitsandbytes' 4 bits, torchao and GGUF"
    return ConfigurationError(what, got=str(format), need=need)
