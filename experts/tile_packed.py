"""Tiles of the single path for packed weights: which problems it serves, and which are taken.

A program multiplies block_n columns (of gate, and as many of up) with the row of a pair. num_warps
share the depth, and in GEMM 2 a token's pairs too, in blocks of block_k. Of each warp num_stages
blocks are in registers or on their way to them. block_m and group_m are of no account.
"""

import math
from dataclasses import dataclass

from experts import tile_few_rows
from experts.tile_shapes import SINGLE, Tile, TilePair
from modular_kernel.types import Problem

CHUNK = 128  # weights of a row that a warp loads 16 bytes a lane
SLOTS = 8  # columns of the product: sums that are scaled apart
_MOST_PAIRS = 64  # of a token
MOST_TOKENS = 1  # of a call that takes this path without a tuned file: what was measured


def serves(problem: Problem) -> bool:
    """Whether the kernels of this path can compute `problem`."""
    return tile_few_rows.serves(problem) and problem.top_k <= _MOST_PAIRS


def chunks(tile: Tile, group: int) -> int:
    """Chunks of a block of block_k, no more than there are columns for groups of `group`."""
    slots = CHUNK // math.gcd(group, CHUNK)
    return max(1, min(tile.block_k // CHUNK, SLOTS // slots))


@dataclass(frozen=True)
class _Row:
    """(block_n, block_k, warps, stages) of GEMM 1 and GEMM 2, where GEMM 2's depth is a multiple of
    `multiple`: masks of a tail take registers."""

    multiple: int
    gemm1: tuple[int, int, int, int]
    gemm2: tuple[int, int, int, int]


# By the weights' format and whether they come with zero points: the first row that applies. The
# fastest that spill no registers, measured on one H200 (2026-11-22, triton 3.6.0, bf16) with one
# token on Mixtral, and on DeepSeek-V3 EP8 for uint4; the second row of zero points was not.
_ROWS: dict[tuple[str, bool], tuple[_Row, ...]] = {
    ("uint4", False): (_Row(1, (16, 256, 4, 1), (16, 512, 8, 1)),),
    ("uint4", True): (
        _Row(256, (16, 256, 4, 1), (16, 512, 8, 1)),
        _Row(1, (16, 256, 4, 1), (16, 256, 8, 1)),
    ),
    ("float4_e2m1", False): (_Row(1, (16, 256, 4, 1), (16, 256, 8, 2)),),
}


def default(problem: Problem) -> TilePair:
    """The tiles without a tuned file."""
    scheme = problem.scheme
    rows = _ROWS[scheme.weight, scheme.zero_points]
    found = next(row for row in rows if problem.intermediate % row.multiple == 0)
    first, second = (
        Tile(16, block_n, block_k, 1, warps, stages)
        for block_n, block_k, warps, stages in (found.gemm1, found.gemm2)
    )
    return TilePair(first, second, SINGLE)
