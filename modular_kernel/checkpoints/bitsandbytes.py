"""Converts bitsandbytes weights: nf4 and fp4, which are dequantized, and int8 of LLM.int8().

A 4-bit matrix (N, K) is stored as one row-major sequence of codes in blocks of `blocksize`. A block
may extend over the end of a row. The value at position i is

    quant_map[code[i]] * absmax[i // blocksize]

in float32, where quant_map has 16 entries. A byte has two codes, with the even position in the high
nibble. With double quantization, the absmax of block j is itself quantized:

    nested_quant_map[absmax[j]] * nested_absmax[j // nested_blocksize] + nested_offset

`quant_state.bitsandbytes__nf4` (or `__fp4`) contains the sizes and the offset, as JSON in a tensor
of bytes. The codes may be stored as a wider dtype (`bnb_4bit_quant_storage`). No scheme can
represent the values, so they are dequantized when they are loaded, and rounded to the dtype of the
layer.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from modular_kernel.checkpoints.matrix_layout import FLOATS, Dim, Range, StoredTensor
from modular_kernel.errors import DtypeError, ShapeError, WeightsError
from modular_kernel.spec.problem import dtype_name
from modular_kernel.spec.quantization import QuantScheme

_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_MAX_STATE_BYTES = 4096
_MAX_SHAPE = 1 << 31
_STATE_PREFIX = "weight.quant_state.bitsandbytes__"
# Dtypes in which the bytes of codes may be stored. Floating dtypes are included because FSDP can
# shard only these.
_CODE_DTYPES = (
    torch.uint8,
    *FLOATS,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float64,
)


class FlatTensors(Protocol):
    """The tensors of one matrix as 1-D tensors, with the names of `list_stored_tensors_4bit`."""

    def header(self, name: str) -> tuple[int, torch.dtype] | None:
        """Return the number of entries and the dtype of a tensor, or None if it does not exist."""

    def read(self, name: str, entries: Range | None = None) -> torch.Tensor:
        """Return entries [start, stop) of a flattened tensor, or all entries."""


@dataclass(frozen=True)
class FlatTensor(StoredTensor):
    """A tensor of a matrix whose values are stored as one sequence, without row boundaries."""

    def shape(self, rows: int, depth: int) -> tuple[int, ...]:
        """Return (N * K,), the number of values of the matrix, for `check`."""
        return (rows * depth,)

    def check(
        self, what: str, got: Sequence[int], dtype: torch.dtype, need: tuple[int, ...]
    ) -> None:
        """Check the shape `got` of a tensor of a matrix with need[-1] values, and its dtype.

        The block size is not known here, so every valid block size is accepted. Raises ShapeError
        or DtypeError.
        """
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


def list_stored_tensors_4bit(kind: str) -> tuple[StoredTensor, ...]:
    """Return the tensors that the files have for one 4-bit matrix.

    kind: "nf4" or "fp4".
    """
    floats = (torch.float32,)
    return (
        FlatTensor("weight", "w", (), _CODE_DTYPES),
        FlatTensor("weight.absmax", "scale", (), (torch.uint8, torch.float32)),
        FlatTensor("weight.quant_map", "codebook", (), floats),
        FlatTensor(f"{_STATE_PREFIX}{kind}", "state", (), (torch.uint8,)),
        FlatTensor("weight.nested_absmax", "scale", (), floats, optional=True),
        FlatTensor("weight.nested_quant_map", "codebook", (), floats, optional=True),
    )


def list_stored_tensors_int8(scheme: QuantScheme) -> tuple[StoredTensor, ...]:
    """Return the tensors that the files have for one matrix of LLM.int8()."""
    return (
        StoredTensor("weight", "w", (Dim("N"), Dim("K")), (torch.int8,)),
        StoredTensor("SCB", "scale", (Dim("N"),), (torch.float32,)),
        StoredTensor("weight_format", "format", (), (torch.uint8,), optional=True),
    )


@dataclass(frozen=True)
class _QuantState:
    """The parameters in the quant_state of one matrix.

    shape: (N, K).
    nested_blocksize: 0 without double quantization.
    """

    blocksize: int
    shape: tuple[int, int]
    nested_blocksize: int
    nested_offset: float


def _parse_quant_state(stored: torch.Tensor, kind: str, what: str) -> _QuantState:
    """Parse the JSON of a quant_state. Raises WeightsError if it is invalid.

    stored: (bytes,) uint8.
    """
    need = f"the JSON object of a quant_state of {kind}"
    if stored.numel() > _MAX_STATE_BYTES:
        raise WeightsError(what, got=f"{stored.numel()} bytes", need=need)
    try:
        state = json.loads(bytes(stored.flatten().tolist()))
    except (ValueError, RecursionError):
        raise WeightsError(what, got="no JSON", need=need) from None
    if not isinstance(state, dict) or state.get("quant_type") != kind:
        raise WeightsError(what, got=str(state)[:120], need=need)
    shape, blocksize = state.get("shape"), state.get("blocksize")
    sizes = shape if isinstance(shape, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 0 < size < _MAX_SHAPE for size in sizes):
        raise WeightsError(what, got=f"shape {str(shape)[:80]}", need="(N, K) of the matrix")
    if type(blocksize) is not int or blocksize not in _BLOCK_SIZES:
        need = f"one of {', '.join(map(str, _BLOCK_SIZES))}"
        raise WeightsError(what, got=f"blocksize {str(blocksize)[:80]}", need=need)
    nested_blocksize = state.get("nested_blocksize", 0)
    nested_offset = state.get("nested_offset", 0.0)
    if type(nested_blocksize) is not int or not 0 <= nested_blocksize < _MAX_SHAPE:
        need = "the number of blocks per nested_absmax"
        raise WeightsError(what, got=f"nested_blocksize {str(nested_blocksize)[:80]}", need=need)
    if type(nested_offset) not in (int, float) or not abs(nested_offset) < float("inf"):
        got = f"nested_offset {str(nested_offset)[:80]}"
        raise WeightsError(what, got=got, need="a finite number")
    return _QuantState(blocksize, (sizes[0], sizes[1]), nested_blocksize, float(nested_offset))


def dequantize_part(
    kind: str, shape: tuple[int, int], rows: Range, columns: Range, tensors: FlatTensors, what: str
) -> torch.Tensor:
    """Dequantize rows [a, b) and columns [c, d) of a 4-bit matrix to float32.

    Only the codes of these rows are read.

    kind: "nf4" or "fp4".
    shape: (N, K) of the matrix.
    what: name of the weight, for messages.

    Raises WeightsError for tensors that are invalid or do not match the shape.
    """
    state = _parse_quant_state(tensors.read(f"{_STATE_PREFIX}{kind}"), kind, f"{what}.quant_state")
    if state.shape != shape:
        raise WeightsError(f"{what}.quant_state", got=f"shape {state.shape}", need=shape)
    start, stop = rows[0] * shape[1], rows[1] * shape[1]
    quant_map = tensors.read("weight.quant_map")
    _check_finite(quant_map, f"{what}.quant_map")
    blocks = (start // state.blocksize, _ceil_div(stop, state.blocksize))
    num_blocks = _ceil_div(prod(shape), state.blocksize)
    absmax = _read_absmax(state, tensors, blocks, num_blocks, what)
    values = _read_mapped_codes(tensors, quant_map, start, stop).view(-1, shape[1])
    if shape[1] % state.blocksize == 0:  # blocks end at the ends of rows
        values = values.view(-1, state.blocksize).mul_(absmax[:, None]).view(-1, shape[1])
        return values[:, columns[0] : columns[1]]
    values = values[:, columns[0] : columns[1]]
    device = absmax.device
    row_R1 = torch.arange(rows[0], rows[1], device=device)[:, None]
    positions = row_R1 * shape[1] + torch.arange(*columns, device=device)
    return values * absmax[positions.div_(state.blocksize, rounding_mode="floor").sub_(blocks[0])]


def dequantize_matrix(kind: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Dequantize a whole 4-bit matrix to (N, K) float32.

    tensors: the tensors by their names in `list_stored_tensors_4bit`.

    Raises WeightsError, ShapeError or DtypeError for tensors that are missing, unexpected or
    invalid.
    """
    specs = {spec.name: spec for spec in list_stored_tensors_4bit(kind)}
    unexpected = sorted(map(str, set(tensors) - set(specs)))
    missing = [name for name, spec in specs.items() if name not in tensors and not spec.optional]
    if unexpected or missing:
        got = f"unexpected {', '.join(unexpected)}" if unexpected else f"no {', '.join(missing)}"
        raise WeightsError(f"{kind} tensors", got=got, need=", ".join(specs))
    state = _parse_quant_state(tensors[f"{_STATE_PREFIX}{kind}"], kind, "weight.quant_state")
    for name, tensor in tensors.items():
        specs[name].check(name, tuple(tensor.shape), tensor.dtype, (prod(state.shape),))
    rows, depth = state.shape
    flat_tensors = _InMemoryTensors(tensors)
    return dequantize_part(kind, state.shape, (0, rows), (0, depth), flat_tensors, "weight")


@dataclass(frozen=True)
class _InMemoryTensors:
    tensors: Mapping[str, torch.Tensor]

    def header(self, name: str) -> tuple[int, torch.dtype] | None:
        tensor = self.tensors.get(name)
        return None if tensor is None else (tensor.numel(), tensor.dtype)

    def read(self, name: str, entries: Range | None = None) -> torch.Tensor:
        flat = self.tensors[name].flatten()
        return flat if entries is None else flat[slice(*entries)]


def _read_mapped_codes(
    tensors: FlatTensors, quant_map: torch.Tensor, start: int, stop: int
) -> torch.Tensor:
    """Return quant_map[code[i]] for positions i in [start, stop), as float32."""
    header = tensors.header("weight")
    assert header is not None
    codes_per_entry = 2 * header[1].itemsize
    stored = tensors.read("weight", (start // codes_per_entry, _ceil_div(stop, codes_per_entry)))
    packed = stored.contiguous().flatten().view(torch.uint8)
    offset = start % codes_per_entry
    packed = packed[offset // 2 : _ceil_div(offset + stop - start, 2)]
    # One lookup per byte yields the values of both nibbles, the high nibble first.
    byte_map = torch.stack(torch.meshgrid(quant_map, quant_map, indexing="ij"), -1).view(256, 2)
    values = byte_map.index_select(0, packed.int()).flatten()
    return values[offset % 2 : offset % 2 + stop - start]


def _read_absmax(
    state: _QuantState, tensors: FlatTensors, blocks: Range, num_blocks: int, what: str
) -> torch.Tensor:
    """Return the absmax of blocks [a, b) as float32, and undo double quantization.

    num_blocks: number of blocks of the whole matrix.
    """
    header = tensors.header("weight.absmax")
    assert header is not None
    if header[0] != num_blocks:
        need = f"{num_blocks}, one for each block of {state.blocksize}"
        raise WeightsError(f"{what}.absmax", got=header[0], need=need)
    stored = tensors.read("weight.absmax", blocks)
    if stored.dtype is torch.float32:
        _check_finite(stored, f"{what}.absmax")
        return stored
    nested_blocksize = state.nested_blocksize
    if nested_blocksize == 0:
        need = "float32, or nested_blocksize in the quant_state"
        raise WeightsError(f"{what}.absmax", got="uint8 of double quantization", need=need)
    nested_blocks = (blocks[0] // nested_blocksize, _ceil_div(blocks[1], nested_blocksize))
    header = tensors.header("weight.nested_absmax")
    if header is None or tensors.header("weight.nested_quant_map") is None:
        need = "float32, or nested_quant_map and nested_absmax"
        raise WeightsError(f"{what}.absmax", got="uint8 of double quantization", need=need)
    num_nested_blocks = _ceil_div(num_blocks, nested_blocksize)
    if header[0] != num_nested_blocks:
        need = f"{num_nested_blocks}, one for each {nested_blocksize} blocks"
        raise WeightsError(f"{what}.nested_absmax", got=header[0], need=need)
    nested_absmax = tensors.read("weight.nested_absmax", nested_blocks)
    nested_quant_map = tensors.read("weight.nested_quant_map")
    _check_finite(nested_quant_map, f"{what}.nested_quant_map")
    _check_finite(nested_absmax, f"{what}.nested_absmax")
    block_index = torch.arange(*blocks, device=nested_absmax.device)
    nested_index = block_index.div_(nested_blocksize, rounding_mode="floor") - nested_blocks[0]
    absmax = nested_quant_map[stored.int()] * nested_absmax[nested_index] + state.nested_offset
    return absmax.float()


def _check_finite(values: torch.Tensor, what: str) -> None:
    is_invalid = ~values.isfinite()
    if bool(is_invalid.any()):
        raise WeightsError(what, got=float(values[is_invalid][0]), need="finite numbers")


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def compute_int8_scale(scb: torch.Tensor, weight_format: torch.Tensor | None) -> torch.Tensor:
    """Return the scale of each row of an LLM.int8() matrix, (N,) float32.

    scb: (N,) float32, the maximum magnitude of each row, whose code is 127.
    weight_format: one number, the order of the rows. 0 or None means row-major.

    Raises WeightsError for other orders, which bitsandbytes before 0.45 wrote on GPUs.
    """
    if weight_format is not None and int(weight_format.flatten()[0]) != 0:
        got = int(weight_format.flatten()[0])
        raise WeightsError("weight_format", got=got, need="0, rows in order")
    is_invalid = ~(scb.isfinite() & (scb >= 0))
    if bool(is_invalid.any()):
        raise WeightsError("SCB", got=float(scb[is_invalid][0]), need="finite numbers from 0 on")
    return scb / 127
