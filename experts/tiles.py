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


def choose_tiles(problem: Problem, tokens: int) -> TilePair:
    """Tiles for a call of `tokens` tokens, by the mean number of rows an expert gets.

    A gated GEMM 1 computes two block_n columns (gate and up), so its block_n is half as wide.
    """
    rows = tokens * problem.top_k / max(1, problem.experts)
    if problem.dtype is torch.float32:
        small = Tile(16, 64, 32, 1, 4, 3)
        large = Tile(64, 64, 32, 8, 4, 3)
        tile = small if rows <= 32 else large
        return TilePair(tile, tile)
    if rows <= 16:
        return TilePair(Tile(16, 64, 128, 1, 4, 4), Tile(16, 128, 128, 1, 4, 4))
    if rows <= 48:
        return TilePair(Tile(32, 64, 128, 1, 4, 4), Tile(32, 128, 128, 1, 4, 4))
    if rows <= 160:
        return TilePair(Tile(64, 64, 64, 8, 4, 4), Tile(64, 128, 64, 8, 4, 4))
    return TilePair(Tile(128, 128, 64, 16, 8, 3), Tile(128, 256, 64, 16, 8, 3))
