"""Tile shapes for the grouped GEMMs, chosen from the expected rows per expert."""

from dataclasses import dataclass

import torch

from modular_kernel.types import Problem


@dataclass(frozen=True)
class Tile:
    """One launch: block sizes in elements, row blocks per swizzle group, warps, stages."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class TilePair:
    """Tiles of both GEMMs. They share one alignment, so block_m is the same."""

    gemm1: Tile
    gemm2: Tile

    def __post_init__(self) -> None:
        assert self.gemm1.block_m == self.gemm2.block_m, "GEMM 1 and 2 share one alignment"


# By the mean rows of an expert, up to the first number: (block_n, block_k, warps, stages) of GEMM 1
# and GEMM 2, and the swizzle group. Measured on one H200 (2026-11-20, triton 3.6.0, bf16) as the
# best mean over Mixtral, DeepSeek-V3 EP8, Qwen3-30B and gpt-oss from 1 to 8192 tokens.
_Row = tuple[int | None, int, tuple[int, int, int, int], tuple[int, int, int, int], int]
_HALF: tuple[_Row, ...] = (
    (10, 16, (64, 128, 4, 4), (64, 128, 4, 4), 1),
    (24, 32, (64, 128, 4, 3), (128, 64, 4, 4), 1),
    (48, 64, (64, 64, 4, 3), (128, 64, 4, 3), 16),
    (None, 128, (128, 64, 8, 3), (256, 64, 8, 4), 16),
)
# Float32 products take twice the shared memory, and without tensor cores gain nothing from width.
_FLOAT32: tuple[_Row, ...] = (
    (24, 16, (32, 32, 4, 3), (64, 32, 4, 3), 1),
    (None, 64, (32, 32, 4, 2), (64, 32, 4, 2), 8),
)
# Rows that start off a 16-element boundary load value by value: larger tiles spill registers.
_UNALIGNED: tuple[_Row, ...] = (
    (24, 16, (32, 32, 4, 3), (64, 32, 4, 3), 1),
    (None, 64, (64, 32, 8, 3), (128, 32, 8, 3), 8),
)


def _table(problem: Problem) -> tuple[_Row, ...]:
    if problem.dtype is torch.float32:
        return _FLOAT32
    if problem.hidden % 16 or problem.intermediate % 16:
        return _UNALIGNED
    return _HALF


def choose_tiles(problem: Problem, tokens: int) -> TilePair:
    """Tiles for a call of `tokens` tokens, by the mean number of rows an expert gets.

    A gated GEMM 1 computes block_n gate and block_n up columns. block_k is halved (down to 32) if
    that makes it divide the depth of the product, which spares the masks along it.
    """
    rows = tokens * problem.top_k / problem.experts
    regime = next(r for r in _table(problem) if r[0] is None or rows <= r[0])
    _, block_m, first, second, group = regime

    def tile(depth: int, choice: tuple[int, int, int, int]) -> Tile:
        block_n, block_k, warps, stages = choice
        fits = [k for k in (block_k, block_k // 2, block_k // 4) if k >= 32 and depth % k == 0]
        return Tile(block_m, block_n, fits[0] if fits else block_k, group, warps, stages)

    return TilePair(tile(problem.hidden, first), tile(problem.intermediate, second))


def regimes_up_to(problem: Problem, tokens: int) -> list[tuple[int, int]]:
    """(most tokens, block_m) of every regime that a call of at most `tokens` tokens can meet."""
    limits = [
        tokens if rows is None else min(tokens, rows * problem.experts // problem.top_k)
        for rows, *_ in _table(problem)
    ]
    return [(limit, choose_tiles(problem, limit).gemm1.block_m) for limit in limits]
