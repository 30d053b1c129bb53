"""Rearrangement of packed integer weights without a value per element.

Checkpoints pack values along K or N into 32-bit words; the layers' rows have two 4-bit values, or
one 8-bit value, per byte. On CPUs, torch transposes 32-bit words about four times as fast per byte
as bytes, so words are transposed first, and all nibbles of a word are processed together, with
masks. Large temporary tensors are avoided: most of their cost is page faults.
"""

from collections.abc import Sequence

import numpy as np
import torch

_LOW_NIBBLES, _HIGH_NIBBLES = 0x0F0F0F0F, -0x0F0F0F10  # of the bytes of an int32


def transpose_words(words: torch.Tensor) -> torch.Tensor:
    """Return (..., R, C) of any dtype as contiguous (..., C, R)."""
    *batch, rows, columns = words.shape
    out = words.new_empty(*batch, columns, rows)
    pairs = zip(out.view(-1, columns, rows), words.reshape(-1, rows, columns), strict=True)
    for target, source in pairs:
        target.copy_(source.contiguous().mT)  # torch is fast only for a contiguous source
    return out


def pack_columns(words: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return uint8 (..., N, K / 2), packed along K, of 4-bit values (..., K, N / 8) packed along N.

    words: int32, K even. order: the column, of the eight of a word, of each nibble.
    """
    *batch, depth, per_row = words.shape
    out = torch.empty(*batch, per_row, 8, depth // 2, dtype=torch.uint8, device=words.device)
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
            rows = transpose_words(packed)
            for byte, column in enumerate(order[first::2]):
                target[:, column] = rows >> 8 * byte  # the copy to uint8 keeps the low byte
    return out.flatten(-3, -2)


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

    order: (..., K) integers.
    """
    if w.dim() > 2:
        matrices = zip(w.flatten(0, -3), order.reshape(-1, order.shape[-1]), strict=True)
        return torch.stack([permute_columns(*each, bits) for each in matrices]).view(w.shape)
    order = order.long()
    if bits == 8:
        return _select_columns(w, order)
    halves = []
    for columns in (order[0::2], order[1::2]):
        shift = (columns % 2 * 4).to(torch.uint8)
        selected = _select_columns(w, columns // 2)  # bytes that contain these columns
        halves.append(selected.bitwise_right_shift_(shift).bitwise_and_(15))
    low, high = halves
    return low.bitwise_or_(high.bitwise_left_shift_(4))


def permute_rows(words: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return 4-bit values, int32 (K / 8, N) packed along K, with the rows order[0], order[1], ...

    order: (K,) integers. Rows are moved as a whole, which is faster than `permute_columns` after
    the words are transposed.
    """
    words_per_row = words.shape[1]
    pairs = words.new_empty(len(words), 4, words_per_row, dtype=torch.uint8)
    for byte in range(4):
        pairs[:, byte] = words >> 8 * byte  # the copy to uint8 keeps the low byte
    pairs, order = pairs.view(-1, words_per_row), order.long()
    halves = []
    for rows in (order[0::2], order[1::2]):
        shift = (rows % 2 * 4).to(torch.uint8)[:, None]
        halves.append(pairs.index_select(0, rows // 2).bitwise_right_shift_(shift).bitwise_and_(15))
    low, high = halves
    packed = low.bitwise_or_(high.bitwise_left_shift_(4)).view(-1, 4, words_per_row)
    out = packed[:, 3].int()
    for byte in (2, 1, 0):
        out.bitwise_left_shift_(8).bitwise_or_(packed[:, byte])
    return out


def _select_columns(w: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return columns of a matrix of bytes. On CPUs, NumPy is about four times as fast as torch."""
    if w.device.type != "cpu":
        return w.index_select(1, index)
    # Every index is valid; of the modes that numpy has for others, "wrap" is the fastest.
    return torch.from_numpy(np.take(w.numpy(), index.numpy(), axis=1, mode="wrap"))
