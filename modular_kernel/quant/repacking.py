"""e2m1 weights in the order that takes kernels the fewest instructions to unpack.

A 32-bit word holds eight codes: four pairs, of values k = 2i and 2i + 1 for pair i. A pair's lower
value lies in the lower half of the word, its upper one in the upper half, both in the same way. A
product takes a pair as two bf16 numbers in one register, each code's sign in bit 15 and its other
bits in bits 8 to 6 of a half: with FIELDS for these bits,

    pair 0   w & FIELDS                         pair 2   ((w << 6) ^ (w << 1)) & FIELDS
    pair 1   (w << 3) & FIELDS                  pair 3   ((w >> 3) ^ (w << 2)) & FIELDS

Nine instructions for eight values: four masks and five shifts, four of which the multiplying pipe
does; codes side by side take thirteen, nine of them in the slower pipe of the two. No four places
for a code can be brought to FIELDS by a shift each, hence the differences: what the other shift
brings along is known, and is in the stored bit too.
"""

from collections.abc import Callable

import torch

from modular_kernel.errors import DtypeError, ShapeError
from modular_kernel.spec.problem import dtype_name
from modular_kernel.utils.tensor_checks import check_output, check_tensor

_SIGN = 0x80008000
_REST = 0x01C001C0
FIELDS = _SIGN | _REST
VALUES = 8  # of a word
_BYTES = VALUES // 2
_WORDS_AT_ONCE = 1 << 22  # of which 64-bit copies are made
_Words = Callable[[list[torch.Tensor]], torch.Tensor]
_Pairs = Callable[[torch.Tensor], list[torch.Tensor]]


def repack(w_eNK: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """e2m1 weights two to a byte, the low nibble first along K, as `repacked=true` has them.

    w_eNK: uint8 (e, N, K / 2) with K a multiple of 8, any strides. Returns `out`, a tensor of the
    same shape and dtype, which may be w_eNK itself: then it is rewritten, and to repack it once
    more would spoil it. ShapeError, DtypeError.
    """
    return _rewritten(w_eNK, out, _pack_words, _split_nibbles)


def as_nibbles(w_eNK: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return what `repack` made, two codes to a byte again."""
    return _rewritten(w_eNK, out, _join_nibbles, unpack_words)


def _pack_words(pairs: list[torch.Tensor]) -> torch.Tensor:
    """Pack words of four pairs in FIELDS; all int64."""
    p0, p1, p2, p3 = pairs
    w = p0 | p1 >> 3
    w |= ((p3 ^ w << 2) & _REST) << 3
    w |= ((p2 ^ w << 1) & _REST) >> 6
    w |= ((p2 ^ w << 6) & _SIGN) >> 1
    w |= ((p3 ^ w >> 3) & _SIGN) >> 2
    return w


def unpack_words(w: torch.Tensor) -> list[torch.Tensor]:
    """Return the four pairs of each word, in FIELDS; all int64."""
    return [
        w & FIELDS,
        (w << 3) & FIELDS,
        ((w << 6) ^ (w << 1)) & FIELDS,
        ((w >> 3) ^ (w << 2)) & FIELDS,
    ]


def _split_nibbles(w: torch.Tensor) -> list[torch.Tensor]:
    """Split words of nibbles to pairs in FIELDS."""
    bytes_of = [(w >> 8 * i) & 0xFF for i in range(_BYTES)]
    codes = [(b & 0xF) | (b & 0xF0) << 12 for b in bytes_of]
    return [(c & 0x00080008) << 12 | (c & 0x00070007) << 6 for c in codes]


def _join_nibbles(pairs: list[torch.Tensor]) -> torch.Tensor:
    """Join pairs in FIELDS to words of nibbles."""
    w = torch.zeros_like(pairs[0])
    for i, pair in enumerate(pairs):
        code = (pair & _SIGN) >> 12 | (pair & _REST) >> 6
        w |= ((code & 0xF) | (code >> 12 & 0xF0)) << 8 * i
    return w


def _rewritten(
    w_eNK: torch.Tensor, out: torch.Tensor | None, words_of: _Words, pairs_of: _Pairs
) -> torch.Tensor:
    """Return words_of(pairs_of(words)) of every word, some experts at a time."""
    check_tensor("w", w_eNK)
    if w_eNK.dtype is not torch.uint8:
        raise DtypeError("w", got=dtype_name(w_eNK.dtype), need="uint8")
    if w_eNK.dim() != 3 or w_eNK.shape[2] % _BYTES:
        need = f"(e, N, K / 2) with K a multiple of {VALUES}"
        raise ShapeError("w", got=tuple(w_eNK.shape), need=need)
    if out is None:
        out = torch.empty(w_eNK.shape, dtype=torch.uint8, device=w_eNK.device)
    check_tensor("out", out, device=w_eNK.device)
    if out.dtype is not torch.uint8:
        raise DtypeError("out", got=dtype_name(out.dtype), need="uint8")
    if out.shape != w_eNK.shape:
        raise ShapeError("out", got=tuple(out.shape), need=f"as w: {tuple(w_eNK.shape)}")
    same = out.data_ptr() == w_eNK.data_ptr() and out.stride() == w_eNK.stride()
    check_output("out", out, {} if same else {"w": w_eNK})
    if not w_eNK.numel():
        return out
    step = max(1, _WORDS_AT_ONCE * _BYTES // w_eNK[0].numel())
    for start in range(0, len(w_eNK), step):
        # A copy of its own: a view might begin between words.
        some = w_eNK[start : start + step].clone(memory_format=torch.contiguous_format)
        words = some.view(torch.int32).long() & 0xFFFFFFFF
        out[start : start + step] = words_of(pairs_of(words)).int().view(torch.uint8)
    return out
