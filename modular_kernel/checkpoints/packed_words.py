"""Transposes and permutes packed integer weights without unpacking them.

Values are bytes or nibbles (4 bits) of int32 words. GPTQ packs them along K, and AWQ along N.
Kernels need (N, K) with K packed along bytes: two 4-bit values, or one 8-bit value, per byte.

On the CPU, large matrices are processed by packed_words.c, which is compiled on first use. Without
a C compiler, on other devices, and for small matrices, torch operations do the same. They transpose
32-bit words about four times as fast per byte as single bytes. Words are therefore transposed as a
whole, and masks process all nibbles of a word together. Callers can pass `out` to
avoid another copy.
"""

import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from modular_kernel.replay.launch.build import BuildError, load_module

_LOG = logging.getLogger("modular_kernel.loading")
_MODULE_NAME = "modular_kernel_packed_words"  # must match packed_words.c
_MIN_COMPILED_BYTES = 1 << 16  # compiling does not pay off for smaller matrices
_LAYOUTS = {"gptq": 0, "rows": 1, "awq": 2}  # as in packed_words.c

# Nibble i of an AWQ word has column AWQ_ORDER[i] of the word's eight columns.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# Masks of the low and the high nibble of each byte of an int32.
_LOW_NIBBLES, _HIGH_NIBBLES = 0x0F0F0F0F, -0x0F0F0F10
_WORD_BYTES, _WORD_BITS = 4, 32
_OUT_DTYPES = (torch.int32, torch.uint8)


def transpose_words(words: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Transpose (..., R, C) of any dtype to contiguous (..., C, R), optionally into `out`."""
    *batch, rows, columns = words.shape
    out = words.new_empty(*batch, columns, rows) if out is None else out
    pairs = zip(out.view(-1, columns, rows), words.reshape(-1, rows, columns), strict=True)
    for target, source in pairs:
        if not _try_compiled("gptq", source, None, 8, target):
            target.copy_(source.contiguous().mT)  # torch is fast only for a contiguous source
    return out


def pack_columns(words: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Transpose 4-bit values of AWQ, packed along N, into a matrix that is packed along K.

    words: (..., K, N / 8) int32 with even K.
    out: contiguous tensor to write to.

    Returns (..., N, K / 2) uint8 with even k in the low nibble.
    """
    *batch, depth, words_per_row = words.shape
    if out is None:
        shape = (*batch, words_per_row * 8, depth // 2)
        out = torch.empty(shape, dtype=torch.uint8, device=words.device)
    matrices = zip(
        out.view(-1, words_per_row, 8, depth // 2),
        words.reshape(-1, depth, words_per_row),
        strict=True,
    )
    for target, matrix in matrices:
        if _try_compiled("awq", matrix, None, 4, target.view(-1, depth // 2)):
            continue
        # A byte of the result has k in the low and k + 1 in the high nibble.
        even_k, odd_k = matrix[0::2], matrix[1::2]
        even_nibbles = (odd_k & _LOW_NIBBLES).bitwise_left_shift_(4)
        even_nibbles.bitwise_or_(even_k & _LOW_NIBBLES)  # nibbles 0, 2, 4, 6 of both words
        odd_nibbles = (even_k >> 4).bitwise_and_(_LOW_NIBBLES)
        odd_nibbles.bitwise_or_(odd_k & _HIGH_NIBBLES)
        for first, packed in enumerate((even_nibbles, odd_nibbles)):
            shifted_words = _shift_bytes(transpose_words(packed))
            for column, shifted in zip(AWQ_ORDER[first::2], shifted_words, strict=True):
                target[:, column] = shifted
    return out


def interleave_nibbles(words: torch.Tensor) -> torch.Tensor:
    """Return int32 words with nibbles 0, 4, 1, 5, 2, 6, 3, 7 of `words`.

    For an AWQ word, these are the eight columns in ascending order.
    """
    low, high = words.contiguous() & 0xFFFF, words >> 16 & 0xFFFF
    for half in (low, high):
        half.bitwise_or_(half << 8).bitwise_and_(0x00FF00FF)
        half.bitwise_or_(half << 4).bitwise_and_(_LOW_NIBBLES)
    return high.bitwise_left_shift_(4).bitwise_or_(low)


def permute_columns(w: torch.Tensor, order: torch.Tensor, bits: int) -> torch.Tensor:
    """Permute the columns of a packed matrix.

    w: (..., N, K bits / 8) uint8, packed along K. The size of the last dimension is a multiple of
        4.
    order: (..., K) integers, the source of each column.

    Returns a tensor like w.
    """
    if w.dim() > 2:
        pairs = zip(w.flatten(0, -3), order.reshape(-1, order.shape[-1]), strict=True)
        permuted = [permute_columns(matrix, column_order, bits) for matrix, column_order in pairs]
        return torch.stack(permuted).view(w.shape)
    words = w.contiguous().view(torch.int32)
    out = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    if _try_compiled("rows", words, order, bits, out):
        return out
    return permute_rows(transpose_words(words), order, bits)


def permute_rows(
    words: torch.Tensor, order: torch.Tensor, bits: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Permute the rows of a matrix that is packed along its rows, and transpose the matrix.

    words: (..., K / p, N) int32 with p = 32 / bits values per word.
    order: (..., K) integers, the source of each row k.
    out: contiguous tensor to write to.

    Returns (..., N, K bits / 8) uint8, packed along K.

    The rows are permuted before the transposition, because torch copies whole rows many times as
    fast as it gathers single bytes.
    """
    *batch, num_words, rows = words.shape
    if out is None:
        row_bytes = num_words * _WORD_BYTES
        out = torch.empty(*batch, rows, row_bytes, dtype=torch.uint8, device=words.device)
    matrices = zip(
        out.view(-1, *out.shape[-2:]),
        words.reshape(-1, num_words, rows),
        order.reshape(-1, order.shape[-1]),
        strict=True,
    )
    for target, matrix, matrix_order in matrices:
        if not _try_compiled("gptq", matrix, matrix_order, bits, target):
            target.copy_(_permute_rows_in_torch(matrix, matrix_order, bits))
    return out


def _permute_rows_in_torch(words: torch.Tensor, order: torch.Tensor, bits: int) -> torch.Tensor:
    num_words, rows = words.shape
    # `_transpose_bytes` requires a multiple of the word size
    aligned_rows = -(-rows // _WORD_BYTES) * _WORD_BYTES
    values = words.new_empty(num_words, _WORD_BYTES, aligned_rows, dtype=torch.uint8)
    for byte, shifted in enumerate(_shift_bytes(words)):
        values[:, byte, :rows] = shifted
    values, order = values.view(-1, aligned_rows), order.long()
    if bits == 8:
        return _transpose_bytes(values.index_select(0, order))[:rows]
    low, high = (  # value k is in byte k // 2, shifted by 4 bits if k is odd
        values.index_select(0, k >> 1).bitwise_right_shift_((k << 2 & 4).to(torch.uint8)[:, None])
        for k in (order[0::2], order[1::2])
    )
    high.bitwise_left_shift_(4).bitwise_or_(low.bitwise_and_(15))
    return _transpose_bytes(high)[:rows]


def _shift_bytes(words: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield `words` shifted right by 0, 1, 2 and 3 bytes, for copies that keep the lowest byte.

    The shifted tensors share memory, so use each of them before you advance the iterator. `words`
    is not changed.
    """
    yield words
    words = words >> 8
    yield words
    for _ in range(_WORD_BYTES - 2):
        yield words.bitwise_right_shift_(8)


def _transpose_bytes(values: torch.Tensor) -> torch.Tensor:
    """Transpose (R, C) uint8 to contiguous (C, R). C must be a multiple of four."""
    rows, columns = values.shape
    out = values.new_empty(columns // _WORD_BYTES, _WORD_BYTES, rows)
    for byte, words in enumerate(_shift_bytes(transpose_words(values.view(torch.int32)))):
        out[:, byte] = words
    return out.view(columns, rows)


def _try_compiled(
    layout: Literal["gptq", "rows", "awq"],
    words: torch.Tensor,
    order: torch.Tensor | None,
    bits: int,
    out: torch.Tensor,
) -> bool:
    """Transpose a matrix with packed_words.c if possible, and return whether it did so.

    layout: shape of `words`: "gptq" is (K bits / 32, N), "rows" (N, K bits / 32), "awq" (K, N / 8).
    order: (K,) integers, the source of each k; None keeps the order. Only int32 is compiled.
    out: contiguous (N, ...) with K bits / 8 bytes per row.

    Returns False for arguments that do not match, because the C code would access memory outside
    the tensors. The caller then uses torch, which raises an error for such arguments.
    """
    tensors = (words, out) if order is None else (words, out, order)
    are_cpu_tensors = all(type(t) is torch.Tensor and t.device.type == "cpu" for t in tensors)
    if not are_cpu_tensors or words.dtype is not torch.int32:
        return False
    if words.stride(1) != 1 or not out.is_contiguous():
        return False
    rows, row_words = words.shape
    depth, columns = {
        "gptq": (rows * _WORD_BITS // bits, row_words),
        "rows": (row_words * _WORD_BITS // bits, rows),
        "awq": (rows, row_words * _WORD_BITS // bits),
    }[layout]
    has_valid_depth = layout != "awq" or depth % 2 == 0
    if bits not in (4, 8) or not has_valid_depth:
        return False
    if len(out) != columns or out.nbytes != words.nbytes or out.dtype not in _OUT_DTYPES:
        return False
    if order is not None and (order.dtype is not torch.int32 or order.shape != (depth,)):
        return False
    if words.nbytes < _MIN_COMPILED_BYTES or (module := _load_compiled()) is None:
        return False
    order = None if order is None else order.contiguous()
    source = (words.data_ptr(), words.stride(0))
    order_pointer = 0 if order is None else order.data_ptr()
    target = (out.data_ptr(), out.stride(0) * out.itemsize)
    module.transpose(*source, _LAYOUTS[layout], depth, columns, bits, order_pointer, *target)
    return True


@cache
def _load_compiled() -> Any:
    """Return packed_words.c as a module, or None if it cannot be built."""
    try:
        return load_module(Path(__file__).with_suffix(".c"), _MODULE_NAME, ())
    except (BuildError, OSError) as error:
        _LOG.info("AWQ and GPTQ weights are transposed by torch: %s", error)
        return None
