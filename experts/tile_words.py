"""Tiles of 4-bit weights that are read as int32 words of eight: the single path's.

There a warp is a part of the work of a program: block_n rows of weights (of gate, and as many of
up) along its share of the depth. In GEMM 2 group_m pairs of a token are held at once, and the warps
are shared out among them. block_k is the depth of one step of all warps of a pair; a warp takes 64
to 256 of it.
"""

import math

import torch

from experts.tile_shapes import SINGLE, Tile, TilePair
from modular_kernel.types import Problem

_WORD = 32  # values of a copy of 16 bytes: depths, and groups, are multiples of it
_PARTS = (64, 256)  # depth of one warp in one step; eight groups of 32 fill the widest
_GATED = 2

# (programs of 64 rows below, depth up to, (block_n, block_k, warps, pairs held, stages)): the first
# row that applies to a product of one token, by scheme's weights. Not yet measured: to be filled
# from a run of candidates on one H200 over Mixtral, DeepSeek-V3 EP8, Qwen3-30B and gpt-oss.
_Row = tuple[float, float, tuple[int, int, int, int, int]]
_UP: dict[str, tuple[_Row, ...]] = {
    "uint4": (
        (200, math.inf, (16, 512, 4, 1, 3)),
        (math.inf, math.inf, (32, 512, 4, 1, 3)),
    ),
    "float4_e2m1": (
        (200, math.inf, (16, 1024, 4, 1, 2)),
        (math.inf, math.inf, (16, 1024, 4, 1, 3)),
    ),
}
_DOWN: dict[str, tuple[_Row, ...]] = {
    "uint4": (
        (math.inf, 1024, (16, 128, 8, 8, 3)),
        (math.inf, 2048, (32, 128, 8, 8, 3)),
        (65, math.inf, (16, 512, 8, 4, 2)),
        (math.inf, math.inf, (32, 512, 8, 4, 2)),
    ),
    "float4_e2m1": (
        (math.inf, 1024, (16, 256, 8, 8, 2)),
        (math.inf, 2048, (32, 256, 8, 8, 2)),
        (65, math.inf, (16, 512, 8, 4, 2)),
        (math.inf, math.inf, (32, 512, 8, 4, 2)),
    ),
}


def serves_single(problem: Problem) -> bool:
    """Whether the single path's kernels of words can compute `problem`: 16-bit rows, depths that
    copies of 16 bytes fill, and groups that cut a warp's step evenly."""
    if problem.dtype is torch.float32:
        return False
    (group,) = problem.scheme.group
    return all(
        k % _WORD == 0 and (group >= k or (group % _WORD == 0 and group & (group - 1) == 0))
        for k in (problem.hidden, problem.intermediate)
    )


def part_depth(tile: Tile, warps: int) -> int:
    """The depth that one of `warps` warps takes in a step."""
    least, most = _PARTS
    return min(max(tile.block_k // warps, least), most)


def held(tile: Tile, slots: int) -> int:
    """Pairs that a program of GEMM 2 holds at once, of `slots` pairs of an output row."""
    most = 1 << max(0, slots - 1).bit_length()
    return min(most, tile.num_warps, 1 << (tile.group_m.bit_length() - 1))


def most_tokens(problem: Problem) -> int:
    """The most tokens of a call that takes the single path without a tuned file: it reads and
    unpacks the weights of an expert anew for each of its tokens."""
    return min(8, max(1, problem.experts // (2 * problem.top_k)))


def single(problem: Problem) -> TilePair:
    """The single path's tiles without a tuned file."""
    sides = _GATED if problem.act.gated else 1
    up = problem.top_k * sides * problem.intermediate / 64
    first = _choose(_UP[problem.scheme.weight], up, problem.hidden)
    second = _choose(_DOWN[problem.scheme.weight], problem.hidden / 64, problem.intermediate)
    return TilePair(first, second, SINGLE)


def _choose(rows: tuple[_Row, ...], programs: float, depth: int) -> Tile:
    block_n, block_k, warps, pairs, stages = next(
        row for below, most, row in rows if programs < below and depth <= most
    )
    return Tile(16, block_n, block_k, pairs, warps, stages)
