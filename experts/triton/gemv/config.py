"""Tiles of the single path: which problems it serves, up to how many tokens, and which are taken.

A tile's block_n counts rows of weights that a program holds at once (of gate, and as many of up);
in GEMM 2 group_m pairs of a token share them. block_k may span a scheme's groups. block_m is of no
account.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from experts.triton.gemv_w4 import config as gemv_w4_config
from experts.triton.launch_config import SINGLE, Gemm, Tile, TilePair
from modular_kernel.types import Problem

# (block_n, block_k, warps, pairs held) of GEMM 2 by its depth, up to the first number. Measured on
# one H200 (triton 3.6.0) over Mixtral, DeepSeek-V3 EP8, Qwen3-30B and gpt-oss with one token.
_Row = tuple[int, tuple[int, int, int, int]]
_DEEP = 1 << 62
_HALF: tuple[_Row, ...] = (
    (1024, (32, 256, 4, 8)),
    (2048, (32, 256, 4, 4)),
    (4096, (16, 512, 4, 4)),
    (_DEEP, (16, 1024, 8, 4)),
)
_BYTES: tuple[_Row, ...] = (
    (2048, (32, 256, 4, 8)),
    (4096, (32, 512, 8, 8)),
    (_DEEP, (32, 1024, 8, 8)),
)
_PACKED_BITS = 4
_WIDE = 4096  # hidden values from which programs of GEMM 1 share the search for the largest


def serves(problem: Problem) -> bool:
    """Return whether the kernels of this path can compute `problem`.

    Groups of activations are powers of two, because they are cut by halves. Packed weights have
    kernels of their own.
    """
    scheme = problem.scheme
    if scheme.packed:
        return gemv_w4_config.serves(problem)
    group = scheme.group[-1] if scheme.activation_granularity == "group" else 1
    return group & (group - 1) == 0 or group >= max(problem.hidden, problem.intermediate)


def most_tokens(problem: Problem) -> int:
    """Return the most tokens of a call that takes this path without a tuned file.

    Tokens read the weights of an expert they share once each, so that it pays while few do; the
    aligned path's products of 8 bits catch up sooner.
    """
    if problem.scheme.packed:
        return gemv_w4_config.most_tokens(problem)
    most, share = (4, 4) if problem.scheme.quantised else (8, 2)
    return min(most, max(1, problem.experts // (share * problem.top_k)))


def unbounded(gemm: Gemm) -> Gemm:
    """Return `gemm` as it bounds tiles of this path.

    Groups do not bound them, and tiles of packed weights may be narrower.
    """
    least = (
        gemv_w4_config.least_block_n(gemm) if gemm.b_bits == _PACKED_BITS else gemm.least_block_n
    )
    return replace(gemm, group_k=0, least_block_n=least)


def defaults(problem: Problem) -> Iterator[tuple[int, TilePair]]:
    """Yield the tiles without a tuned file: the most tokens each pair is for, ascending."""
    most = most_tokens(problem)
    pairs = [default(problem, tokens) for tokens in range(1, most + 1)]
    for tokens, (pair, after) in enumerate(zip(pairs, [*pairs[1:], None], strict=True), 1):
        if pair != after:
            yield tokens, pair


def default(problem: Problem, tokens: int = 1) -> TilePair:
    """Return the tiles without a tuned file for a call of `tokens` tokens."""
    if problem.scheme.packed:
        return gemv_w4_config.default(problem, tokens)
    narrow = problem.scheme.quantised
    rows = next(row for most, row in (_BYTES if narrow else _HALF) if problem.intermediate <= most)
    first = (32 if narrow and problem.hidden > _WIDE else 16, 512, 8)
    if problem.scheme.activation_granularity == "group":
        first = (16, 512, 2 if problem.hidden % 512 else 4)
    if problem.scheme.activation_granularity == "group" and problem.intermediate <= 2048:
        rows = (64, 256, 8, 8)
    # A thread's values of float32 are half as many in as many bytes.
    halve = 2 if problem.dtype is torch.float32 and not narrow else 1
    return TilePair(
        Tile(16, first[0], first[1] // halve, 1, first[2], 1),
        Tile(16, rows[0], rows[1] // halve, rows[3], rows[2], 1),
        SINGLE,
    )
