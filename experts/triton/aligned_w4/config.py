"""Launches of the aligned path for few rows an expert and 4-bit weights.

Their kernel takes the place of the tiles' launches where a tile has few rows (`_MOST`); it chooses
for itself, because registers bound it, not shared memory.
"""

import math
from dataclasses import dataclass, replace

import torch

from experts.triton.launch_config import ALIGNED, TilePair
from modular_kernel.schemes import QuantScheme
from modular_kernel.types import Problem

FEW = 16  # rows of a block of this kernel, where it has not LEAST_M
LEAST_M = 8  # the narrow side of a tensor core's product
_ROWS = 6  # mean rows of an expert up to which few have more than LEAST_M
# The most block_m of tiles that this kernel takes the place of, and the mean rows of an expert up
# to which it does: with more, weights are unpacked too often, once for each block of FEW rows.
# Tiles of mxfp4 of 32 rows are slower with any number (H200, 2026-11-24, triton 3.6.0, 1 to 1024).
_MOST: dict[str, tuple[int, float]] = {"uint4": (16, 12), "float4_e2m1": (32, math.inf)}
_MOST_REGISTERS = 128  # by `_registers`: more, and the compiler spills some
DEPTH = 128  # of the products of one warp in one step
_LEAST_DEPTH = 32  # four lanes of one word each


@dataclass(frozen=True)
class Shape:
    """One launch: columns of a block (a gated product has as many up columns), warps that share
    the depth, and steps in flight; the most registers of a thread, 0 as many as the compiler
    wants: it may spill a few to have one more program on a multiprocessor; the depth of a warp's
    step."""

    block_n: int
    num_warps: int
    num_stages: int
    registers: int = 0
    depth: int = DEPTH

    def __str__(self) -> str:
        return f"block_n={self.block_n} warps={self.num_warps} stages={self.num_stages}"


# (below so many blocks of 64 columns, from this depth on, shape): the first row that applies.
# Measured on one H200 (triton 3.6.0, bf16) over Mixtral, DeepSeek-V3 EP8, Qwen3-30B and gpt-oss:
# integers with 4 to 16 tokens on 2026-11-22; mxfp4 with 4 and 16, and the rows below 200 blocks and
# below 500 of mxfp4 with one token, on 2026-11-20, before the loop was made shorter.
_Rows = tuple[tuple[float, int, Shape], ...]
# By the weights' format and whether they come with zero points: of gated products, of others.
_SHAPES: dict[tuple[str, bool], tuple[_Rows, _Rows]] = {
    ("uint4", False): (
        (
            (200, 0, Shape(32, 4, 3)),
            (math.inf, 4096, Shape(64, 4, 2)),
            (math.inf, 0, Shape(64, 2, 3)),
        ),
        (
            (200, 0, Shape(32, 4, 4)),
            (400, 8192, Shape(64, 4, 2)),
            (math.inf, 8192, Shape(128, 4, 2)),
            (500, 0, Shape(64, 2, 3)),
            (math.inf, 0, Shape(128, 2, 3)),
        ),
    ),
    ("uint4", True): (
        (
            (200, 0, Shape(32, 4, 3)),
            (math.inf, 6144, Shape(64, 4, 3)),
            (math.inf, 0, Shape(64, 2, 3)),
        ),
        (
            (200, 0, Shape(32, 4, 4)),
            (400, 8192, Shape(64, 4, 2)),
            (math.inf, 8192, Shape(128, 4, 2)),
            (600, 0, Shape(64, 2, 3)),
            (math.inf, 1024, Shape(128, 2, 3)),
            (math.inf, 0, Shape(64, 1, 4)),
        ),
    ),
    ("float4_e2m1", False): (
        (
            (200, 0, Shape(16, 2, 4)),
            (500, 4096, Shape(16, 4, 3)),
            (math.inf, 0, Shape(32, 2, 3)),
        ),
        (
            (200, 0, Shape(32, 4, 4)),
            (math.inf, 8192, Shape(32, 4, 3)),
            (math.inf, 1024, Shape(32, 2, 4)),
            (math.inf, 0, Shape(32, 1, 4)),
        ),
    ),
}
# Twice the rows take registers for twice the sums. Those of mxfp4: the fastest of 12 in blocks of
# 16, 32 and 64 rows on Mixtral, Qwen3-30B and gpt-oss-20b (H200, 2026-11-24, triton 3.6.0).
_WIDE = {
    ("uint4", True): Shape(32, 2, 4),
    ("uint4", False): Shape(64, 2, 3, 200),
    ("float4_e2m1", True): Shape(32, 2, 3, depth=64),
    ("float4_e2m1", False): Shape(64, 2, 3, depth=64),
}


def serves(problem: Problem) -> bool:
    """Whether the kernel can compute `problem`: 16-bit rows, and depths that words of eight fill.

    Where launches may not depend on the number of tokens, it is of use for any number of rows, or
    for none.
    """
    if not problem.scheme.packed or problem.dtype is torch.float32:
        return False
    if problem.batch_invariant and _MOST[problem.scheme.weight][1] < math.inf:
        return False
    return all(
        k % _LEAST_DEPTH == 0 and product_depth(problem.scheme, k) >= _LEAST_DEPTH
        for k in (problem.hidden, problem.intermediate)
    )


def block_m(problem: Problem, pairs: int) -> int:
    """Rows of a block in a call of so many pairs: 8, or 16 where many experts have more."""
    few_rows = pairs <= _ROWS * problem.experts and not problem.batch_invariant
    return LEAST_M if few_rows else FEW


@dataclass(frozen=True)
class Spread:
    """How the rows of a call are spread: in blocks of block_m, over so many of the experts here,
    all being as likely."""

    block_m: int
    experts: float

    @classmethod
    def of(cls, problem: Problem, pairs: int) -> "Spread":
        without: float = (1 - problem.top_k / problem.experts) ** (pairs / problem.top_k)
        return cls(block_m(problem, pairs), problem.e * (1 - without))


@dataclass(frozen=True)
class FewRows:
    """One product: rows of weights for `columns` output columns along `depth`. zeros: weights come
    with zero points."""

    scheme: QuantScheme
    columns: int
    depth: int
    gated: bool
    zeros: bool

    @classmethod
    def both(cls, problem: Problem) -> "tuple[FewRows, FewRows]":
        scheme, gated = problem.scheme, problem.act.gated
        zeros = scheme.zero_points
        return (
            cls(scheme, problem.intermediate, problem.hidden, gated, zeros),
            cls(scheme, problem.hidden, problem.intermediate, False, zeros),
        )


def launched(problem: Problem, tokens: int, pair: TilePair) -> tuple[Shape, Shape] | None:
    """Return what a call of `tokens` tokens launches in place of these tiles, or None."""
    pairs = tokens * problem.top_k
    if pair.path != ALIGNED or not serves(problem) or not few(problem, pairs, pair):
        return None
    spread = Spread.of(problem, pairs)
    first, second = (shape(product, spread) for product in FewRows.both(problem))
    return first, second


def few(problem: Problem, pairs: int, tiles: TilePair) -> bool:
    """Whether tiles and rows of a call are few."""
    block_m, rows = _MOST[problem.scheme.weight]
    return tiles.gemm1.block_m <= block_m and pairs <= rows * problem.experts


def shape(product: FewRows, spread: Spread) -> Shape:
    """Return the launch of `product` in a call whose rows are spread so."""
    weight, block_m = product.scheme.weight, spread.block_m
    if block_m == LEAST_M:
        blocks = spread.experts * -(-product.columns // 64)
        gated, plain = _SHAPES[weight, product.zeros]
        rows = gated if product.gated else plain
        found = next(one for below, k, one in rows if blocks < below and product.depth >= k)
    else:
        found = _WIDE[weight, product.gated]
    while found.block_n > 64 and product.columns % found.block_n:
        found = replace(found, block_n=found.block_n // 2)
    while found.block_n > 16 and _registers(found, product, block_m) > _MOST_REGISTERS:
        found = replace(found, block_n=found.block_n // 2)
    return found


def _registers(found: Shape, product: FewRows, block_m: int) -> int:
    """Count the registers that a thread holds at once.

    Words, sums, and a step's products of each group, beside what several groups' zero points take
    from them.
    """
    rows = found.block_n * (2 if product.gated else 1)
    groups = found.depth // product_depth(product.scheme, product.depth, found.depth)
    per_group = 3 if product.zeros and groups > 1 else 1
    return rows * found.depth // 256 + rows * block_m // 32 * (1 + groups * per_group)


def product_depth(scheme: QuantScheme, k: int, most: int = DEPTH) -> int:
    """Return the depth of one product, at most `most`.

    It is within a group, if that is not all of the depth k.
    """
    (group,) = scheme.group
    group = 0 if group >= k else group
    return math.gcd(group, most)
