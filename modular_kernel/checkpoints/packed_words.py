"""Rearrangement of packed integer weights without a value per element.

Checkpoints pack values along K or N into 32-bit words; the layers' rows have two 4-bit values, or
one 8-bit value, per byte. On CPUs, torch transposes 32-bit words about four times as fast per byte
as bytes, so words are transposed first, and all nibbles of a word are processed together, with
masks. Large temporary tensors are avoided: most of their cost is page faults.
"""

from collections.abc import Sequence

import numpy as np
import torch

_WORD_BYTES = 4
_WORDS_PER_STEP = 1 << 16  # 32-bit words of AWQ that are unpacked at once
_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F


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
    # One row for each word of eight columns; an int64 has the words of an even k and an odd k.
    pairs = transpose_words(words).view(torch.int64).view(-1, depth // 2)
    out = torch.empty(len(pairs), 8, depth // 2, dtype=torch.uint8, device=words.device)
    step = max(_WORDS_PER_STEP // depth, 1)
    for start in range(0, len(pairs), step):
        chunk, target = pairs[start : start + step], out[start : start + step]
        for odd in (0, 1):
            # Nibbles odd, odd + 2, ... of both words, one per byte.
            nibbles = (chunk >> 4 if odd else chunk) & _LOW_NIBBLES
            # Those of the second word become the high nibbles of the first: 32 - 4 bits down.
            packed = nibbles.bitwise_or_(nibbles >> 28).view(torch.uint8)
            packed = packed.view(len(chunk), depth // 2, 2 * _WORD_BYTES)
            for byte, column in enumerate(order[odd::2]):
                target[:, column] = packed[..., byte]
    return out.view(*batch, 8 * per_row, depth // 2)


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


def _select_columns(w: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return columns of a matrix of bytes. On CPUs, NumPy is about four times as fast as torch."""
    if w.device.type != "cpu":
        return w.index_select(1, index)
    return torch.from_numpy(np.take(w.numpy(), index.numpy(), axis=1))
