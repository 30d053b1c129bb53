"""Rearrangement of packed integer weights without a value per element.

Checkpoints pack values along K or N into 32-bit words; the layers' rows have two 4-bit values, or
one 8-bit value, per byte. On CPUs, torch transposes 32-bit words about four times as fast per byte
as bytes, so words are transposed first, and all nibbles of a word are processed together, with
masks. Large temporary tensors are avoided, and results are written where they are needed (`out`):
most of the cost is memory traffic.
"""

from collections.abc import Iterator, Sequence

import torch

_LOW_NIBBLES, _HIGH_NIBBLES = 0x0F0F0F0F, -0x0F0F0F10  # of the bytes of an int32
_BYTES = 4  # of a word


def transpose_words(words: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return (..., R, C) of any dtype as contiguous (..., C, R). out: where to write it."""
    *batch, rows, columns = words.shape
    out = words.new_empty(*batch, columns, rows) if out is None else out
    pairs = zip(out.view(-1, columns, rows), words.reshape(-1, rows, columns), strict=True)
    for target, source in pairs:
        target.copy_(source.contiguous().mT)  # torch is fast only for a contiguous source
    return out


def pack_columns(
    words: torch.Tensor, order: Sequence[int], out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return uint8 (..., N, K / 2), packed along K, of 4-bit values (..., K, N / 8) packed along N.

    words: int32, K even. order: the column, of the eight of a word, of each nibble. out: where to
    write the result, contiguous.
    """
    *batch, depth, per_row = words.shape
    if out is None:
        shape = (*batch, per_row * 8, depth // 2)
        out = torch.empty(shape, dtype=torch.uint8, device=words.device)
    matrices = zip(
        out.view(-1, per_row, 8, depth // 2), words.reshape(-1, depth, per_row), strict=True
    )
    for target, matrix in matrices:
        low, high = matrix[0::2], matrix[1::2]  # of an even k and of the odd one after it
        even = (high & _LOW_NIBBLES).bitwise_left_shift_(4)
        even.bitwise_or_(low & _LOW_NIBBLES)  # nibbles 0, 2, 4, 6 of both, one of each per byte
        odd = (low >> 4).bitwise_and_(_LOW_NIBBLES)
        odd.bitwise_or_(high & _HIGH_NIBBLES)
        for first, packed in enumerate((even, odd)):
            values = _bytes(transpose_words(packed))
            for column, shifted in zip(order[first::2], values, strict=True):
                target[:, column] = shifted
    return out


def interleave_nibbles(words: torch.Tensor) -> torch.Tensor:
    """Return int32 words whose even nibbles are the four low ones of `words`, odd ones the high.

    This sorts the eight columns of a word of AWQ.
    """
    low, high = words.contiguous() & 0xFFFF, words >> 16 & 0xFFFF
    for half in (low, high):
        half.bitwise_or_(half << 8).bitwise_and_(0x00FF00FF)
        half.bitwise_or_(half << 4).bitwise_and_(_LOW_NIBBLES)
    return high.bitwise_left_shift_(4).bitwise_or_(low)


def permute_columns(w: torch.Tensor, order: torch.Tensor, bits: int) -> torch.Tensor:
    """Return packed weights uint8 (..., N, bytes of K) with the columns order[0], order[1], ...

    order: (..., K) integers. The bytes of K are a multiple of four.
    """
    return permute_rows(transpose_words(w.contiguous().view(torch.int32)), order, bits)


def permute_rows(words: torch.Tensor, order: torch.Tensor, bits: int) -> torch.Tensor:
    """Return uint8 (..., N, bytes of K) of int32 (..., K / p, N), with its columns permuted.

    Both are packed along K; a word has p = 8 or 4 values. order: (..., K) integers, the source of
    each column. The bytes of a word become rows, which are moved as a whole: torch copies rows many
    times as fast as it gathers single bytes from the rows of the transposed matrix.
    """
    if words.dim() > 2:
        pairs = zip(words.flatten(0, -3), order.reshape(-1, order.shape[-1]), strict=True)
        matrices = torch.stack([permute_rows(*each, bits) for each in pairs])
        return matrices.view(*words.shape[:-2], *matrices.shape[1:])
    depth, rows = words.shape
    aligned = -(-rows // _BYTES) * _BYTES  # for the words of `_transpose_bytes`
    values = words.new_empty(depth, _BYTES, aligned, dtype=torch.uint8)
    for byte, shifted in enumerate(_bytes(words)):
        values[:, byte, :rows] = shifted
    values, order = values.view(-1, aligned), order.long()
    if bits == 8:
        return _transpose_bytes(values.index_select(0, order))[:rows]
    low, high = (
        values.index_select(0, columns >> 1).bitwise_right_shift_(
            (columns << 2 & 4).to(torch.uint8)[:, None]
        )
        for columns in (order[0::2], order[1::2])
    )
    high.bitwise_left_shift_(4).bitwise_or_(low.bitwise_and_(15))
    return _transpose_bytes(high)[:rows]


def _bytes(words: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield int32 words whose lowest byte is the first, second, ... one of `words`.

    A copy to uint8 keeps the lowest byte. The next words may overwrite those before, but for
    `words`.
    """
    yield words
    words = words >> 8
    yield words
    for _ in range(_BYTES - 2):
        yield words.bitwise_right_shift_(8)


def _transpose_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return uint8 (R, C) as contiguous (C, R); C is a multiple of four."""
    rows, columns = values.shape
    out = values.new_empty(columns // _BYTES, _BYTES, rows)
    for byte, words in enumerate(_bytes(transpose_words(values.view(torch.int32)))):
        out[:, byte] = words
    return out.view(columns, rows)
