"""Tiles of the single path for packed weights: which problems it serves, and which are taken.

A program multiplies block_n columns (of gate, and as many of up) with the row of a pair. num_warps
share the depth, and in GEMM 2 a token's pairs too, in blocks of block_k. Of each warp num_stages
blocks are in registers or on their way to them. block_m and group_m are of no account.
"""

import math

from experts import tile_few_rows
from experts.tile_shapes import SINGLE, Tile, TilePair
from modular_kernel.types import Problem

CHUNK = 128  # weights of a row that a warp loads 16 bytes a lane
SLOTS = 8  # columns of the product: sums that are scaled apart
_MOST_PAIRS = 64  # of a token
_MOST_TOKENS = 8  # of a call without a tuned file: those of 16 were slower, if little


def serves(problem: Problem) -> bool:
    """Whether the kernels of this path can compute `problem`."""
    return tile_few_rows.serves(problem) and problem.top_k <= _MOST_PAIRS


def chunks(tile: Tile, group: int) -> int:
    """Chunks of a block of block_k, no more than there are columns for groups of `group`."""
    slots = CHUNK // math.gcd(group, CHUNK)
    return max(1, min(tile.block_k // CHUNK, SLOTS // slots))


def most_tokens(problem: Problem) -> int:
    """The most tokens of a call that takes this path without a tuned file.

    Tokens read the weights of an expert they share once each. Measured on one H200 (2026-11-22,
    triton 3.6.0, Mixtral, DeepSeek-V3 EP8, Qwen3-30B and gpt-oss, 1 to 16 tokens): ahead of the
    aligned path up to half as many pairs as experts.
    """
    return max(1, min(_MOST_TOKENS, problem.experts // (2 * problem.top_k)))


# (block_n, block_k, warps, stages) of GEMM 1; by the weights' format those of GEMM 2 by its depth,
# up to the first number. Measured as said above: the fastest or within 3 % of it, and none spills.
_Launch = tuple[int, int, int, int]
_GEMM1: _Launch = (16, 256, 4, 1)
_DEEP = 1 << 62
_GEMM2: dict[str, tuple[tuple[int, _Launch], ...]] = {
    "uint4": ((1024, (16, 256, 8, 2)), (2048, (16, 512, 4, 1)), (_DEEP, (16, 256, 8, 2))),
    "float4_e2m1": ((1024, (16, 256, 4, 2)), (2048, (16, 256, 4, 1)), (_DEEP, (16, 256, 8, 2))),
}


def default(problem: Problem) -> TilePair:
    """The tiles without a tuned file."""
    rows = _GEMM2[problem.scheme.weight]
    gemm2 = next(launch for most, launch in rows if problem.intermediate <= most)
    first, second = (
        Tile(16, block_n, block_k, 1, warps, stages)
        for block_n, block_k, warps, stages in (_GEMM1, gemm2)
    )
    return TilePair(first, second, SINGLE)
