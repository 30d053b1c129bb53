"""Repacking of e2m1 weights into a bit order that takes fewer instructions to unpack.

A 32-bit word holds eight 4-bit codes, as four pairs. Pair i consists of the values k = 2i, in the
lower half of the word, and k = 2i + 1, at the same bit positions of the upper half, because a GEMM
reads a pair as bf16x2. `unpack_words` moves a pair to the bits of PAIR_MASK. In each half of the
word, these are bit 15 for the sign of a code and bits 8 to 6 for its magnitude:

    pair 0   w & PAIR_MASK                      pair 2   ((w << 6) ^ (w << 1)) & PAIR_MASK
    pair 1   (w << 3) & PAIR_MASK               pair 3   ((w >> 3) ^ (w << 2)) & PAIR_MASK

This takes nine instructions for eight values: four masks, which include the XORs, and five shifts.
The four left shifts run in the multiply pipe. Codes in their natural order take thirteen
instructions, nine of them in the slower of the two pipes.

Only two of the four pairs fit at positions from which a single shift moves them to the mask. The
sign and the magnitude of pairs 2 and 3 need different shifts, which an XOR combines.
Each of the two shifts also moves bits of other pairs to the mask. `_pack_words` stores bits of
pairs 2 and 3 that cancel the bits of other pairs in the XOR.
"""

from collections.abc import Callable

import torch

from modular_kernel.errors import DtypeError, ShapeError
from modular_kernel.spec.problem import dtype_name
from modular_kernel.utils.tensor_checks import check_output, check_tensor

_SIGN_MASK = 0x80008000
_MAGNITUDE_MASK = 0x01C001C0
PAIR_MASK = _SIGN_MASK | _MAGNITUDE_MASK
VALUES_PER_WORD = 8  # in a 32-bit word
_BYTES_PER_WORD = VALUES_PER_WORD // 2
_MAX_WORDS = 1 << 22  # words per step, to limit the 64-bit temporaries
_Pack = Callable[[list[torch.Tensor]], torch.Tensor]
_Unpack = Callable[[torch.Tensor], list[torch.Tensor]]


def repack(w_eNK: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Repack e2m1 weights for a scheme with the option `repacked=true`. Return `out`.

    Repacking twice corrupts the weights.

    w_eNK: uint8 (e, N, K / 2), where K is a multiple of 8. A byte holds two codes, with the first
        code in the low nibble. Any strides are allowed.
    out: tensor with the shape and dtype of w_eNK; None allocates it. If it is w_eNK itself, the
        weights are repacked in place.

    Raises ShapeError or DtypeError if a tensor has a wrong shape or dtype.
    """
    return _convert(w_eNK, out, _pack_words, _split_nibbles)


def unrepack(w_eNK: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Invert `repack`: return the codes packed two per byte."""
    return _convert(w_eNK, out, _join_nibbles, unpack_words)


def _pack_words(pairs: list[torch.Tensor]) -> torch.Tensor:
    """Pack four pairs, which are at the bits of PAIR_MASK, into words. All tensors are int64."""
    p0, p1, p2, p3 = pairs
    w = p0 | p1 >> 3
    w |= ((p3 ^ w << 2) & _MAGNITUDE_MASK) << 3
    w |= ((p2 ^ w << 1) & _MAGNITUDE_MASK) >> 6
    w |= ((p2 ^ w << 6) & _SIGN_MASK) >> 1
    w |= ((p3 ^ w >> 3) & _SIGN_MASK) >> 2
    return w


def unpack_words(w: torch.Tensor) -> list[torch.Tensor]:
    """Return the four pairs of each word, at the bits of PAIR_MASK. All tensors are int64."""
    return [
        w & PAIR_MASK,
        (w << 3) & PAIR_MASK,
        ((w << 6) ^ (w << 1)) & PAIR_MASK,
        ((w >> 3) ^ (w << 2)) & PAIR_MASK,
    ]


def _split_nibbles(w: torch.Tensor) -> list[torch.Tensor]:
    """Split words of eight nibbles into pairs at the bits of PAIR_MASK."""
    packed = [(w >> 8 * i) & 0xFF for i in range(_BYTES_PER_WORD)]
    codes = [(b & 0xF) | (b & 0xF0) << 12 for b in packed]
    return [(c & 0x00080008) << 12 | (c & 0x00070007) << 6 for c in codes]


def _join_nibbles(pairs: list[torch.Tensor]) -> torch.Tensor:
    """Join pairs at the bits of PAIR_MASK into words of eight nibbles."""
    w = torch.zeros_like(pairs[0])
    for i, pair in enumerate(pairs):
        code = (pair & _SIGN_MASK) >> 12 | (pair & _MAGNITUDE_MASK) >> 6
        w |= ((code & 0xF) | (code >> 12 & 0xF0)) << 8 * i
    return w


def _convert(
    w_eNK: torch.Tensor, out: torch.Tensor | None, pack: _Pack, unpack: _Unpack
) -> torch.Tensor:
    """Write pack(unpack(words)) of all words to `out`, a few experts at a time."""
    check_tensor("w", w_eNK)
    if w_eNK.dtype is not torch.uint8:
        raise DtypeError("w", got=dtype_name(w_eNK.dtype), need="uint8")
    if w_eNK.dim() != 3 or w_eNK.shape[2] % _BYTES_PER_WORD:
        need = f"(e, N, K / 2) with K a multiple of {VALUES_PER_WORD}"
        raise ShapeError("w", got=tuple(w_eNK.shape), need=need)
    if out is None:
        out = torch.empty(w_eNK.shape, dtype=torch.uint8, device=w_eNK.device)
    check_tensor("out", out, device=w_eNK.device)
    if out.dtype is not torch.uint8:
        raise DtypeError("out", got=dtype_name(out.dtype), need="uint8")
    if out.shape != w_eNK.shape:
        raise ShapeError("out", got=tuple(out.shape), need=f"the shape of w, {tuple(w_eNK.shape)}")
    is_inplace = out.data_ptr() == w_eNK.data_ptr() and out.stride() == w_eNK.stride()
    check_output("out", out, {} if is_inplace else {"w": w_eNK})
    if not w_eNK.numel():
        return out
    step = max(1, _MAX_WORDS * _BYTES_PER_WORD // w_eNK[0].numel())
    for start in range(0, len(w_eNK), step):
        # A copy, because a view may start between two words.
        chunk = w_eNK[start : start + step].clone(memory_format=torch.contiguous_format)
        words = chunk.view(torch.int32).long() & 0xFFFFFFFF
        out[start : start + step] = pack(unpack(words)).int().view(torch.uint8)
    return out
