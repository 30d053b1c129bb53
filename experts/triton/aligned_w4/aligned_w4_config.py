"""What the aligned path for 4-bit weights launches: small M, weights unpacked in registers.

Registers bound these launches, not shared memory.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from experts.triton.candidates import Groups, Rows, worth
from experts.triton.launch_config import MoEConfig, Violation, starts_on_16
from experts.triton.operands_w4 import WARP_K, fills_words, product_depth
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme

NAME = "aligned_w4"

MOST_M = 16  # rows of a block, where it has not LEAST_M
LEAST_M = 8  # the narrow side of a tensor core's product
# Mean rows of an expert up to which blocks have LEAST_M rows. Of integers, blocks of 8 rows take
# 0.74 to 0.80 x the time of blocks of 16 with 8 rows, 0.81 to 0.85 x with 10; of mxfp4, 0.96 to
# 1.03 x and 1.13 to 1.19 x (H200, 2026-11-28, triton 3.6.0).
_ROWS = {"uint4": 11, "float4_e2m1": 6}
# Mean rows of an expert up to which calls come here without a tuned file: with more, weights are
# unpacked too often, once for each block of MOST_M rows. The second number: where rows start off 16
# elements. Integers: H200, 2026-11-22. mxfp4: up to where tiles of 32 rows were taken, which are
# slower with any number (H200, 2026-11-24, triton 3.6.0, 1 to 1024 tokens).
_MOST_ROWS = {"uint4": (12, 12), "float4_e2m1": (192, 24)}
# What files of version 1 call aligned and this path has taken over: the most block_m of tiles, and
# the mean rows of an expert.
_TAKEN_OVER: dict[str, tuple[int, float]] = {"uint4": (16, 12), "float4_e2m1": (32, math.inf)}
_MOST_REGISTERS = 128  # by `_registers`: more, and the compiler spills some
_ENDLESS = 1 << 62
_BLOCKS_M, _WARPS = (LEAST_M, MOST_M), (1, 2, 4, 8, 16)
_LEAST_N, _MOST_N, _LEAST_K, _MOST_STAGES, _ALL_REGISTERS = 16, 256, 32, 16, 255


@dataclass(frozen=True)
class AlignedW4Config:
    """One launch: rows and columns of a block (a gated product has as many up columns), and warps.

    The warps of a program share the depth. block_k: of a warp's step. num_stages: steps in flight.
    registers: the most of a thread, 0 as many as the compiler wants: it may spill a few to have
    one more program on a multiprocessor.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    registers: int = 0

    def __str__(self) -> str:
        sizes = f"block_m={self.block_m} block_n={self.block_n} block_k={self.block_k}"
        most = f" registers={self.registers}" if self.registers else ""
        return f"{sizes} warps={self.num_warps} stages={self.num_stages}{most}"

    def violations(self) -> Iterator[Violation]:
        """Yield every reason not to launch this."""
        rules = (
            ("block_m", self.block_m in _BLOCKS_M, f"one of {_BLOCKS_M}"),
            ("block_n", _power(self.block_n, _LEAST_N, _MOST_N), _powers(_LEAST_N, _MOST_N)),
            ("block_k", _power(self.block_k, _LEAST_K, WARP_K), _powers(_LEAST_K, WARP_K)),
            ("num_warps", self.num_warps in _WARPS, f"one of {_WARPS}"),
            ("num_stages", 1 <= self.num_stages <= _MOST_STAGES, f"1 to {_MOST_STAGES}"),
            (
                "registers",
                0 <= self.registers <= _ALL_REGISTERS,
                f"0 for as many as there are, to {_ALL_REGISTERS}",
            ),
        )
        for name, kept, need in rules:
            if not kept:
                yield Violation(name, getattr(self, name), need)


def _power(value: int, least: int, most: int) -> bool:
    return least <= value <= most and not value & (value - 1)


def _powers(least: int, most: int) -> str:
    return f"a power of two from {least} to {most}"


class _Shape(NamedTuple):
    """A launch of either block_m."""

    block_n: int
    num_warps: int
    num_stages: int
    registers: int = 0
    block_k: int = WARP_K


# (below so many blocks of 64 columns, from this depth on, shape): the first row that applies.
# Measured on one H200 (triton 3.6.0, bf16) over Mixtral, DeepSeek-V3 EP8, Qwen3-30B and gpt-oss:
# integers with 4 to 16 tokens on 2026-11-22; mxfp4 with 4 and 16, and the rows below 200 blocks and
# below 500 of mxfp4 with one token, on 2026-11-20, before the loop was made shorter.
_Rows = tuple[tuple[float, int, _Shape], ...]
# By the weights' format and whether they come with zero points: of gated products, of others.
_SHAPES: dict[tuple[str, bool], tuple[_Rows, _Rows]] = {
    ("uint4", False): (
        (
            (200, 0, _Shape(32, 4, 3)),
            (math.inf, 4096, _Shape(64, 4, 2)),
            (math.inf, 0, _Shape(64, 2, 3)),
        ),
        (
            (200, 0, _Shape(32, 4, 4)),
            (400, 8192, _Shape(64, 4, 2)),
            (math.inf, 8192, _Shape(128, 4, 2)),
            (500, 0, _Shape(64, 2, 3)),
            (math.inf, 0, _Shape(128, 2, 3)),
        ),
    ),
    ("uint4", True): (
        (
            (200, 0, _Shape(32, 4, 3)),
            (math.inf, 6144, _Shape(64, 4, 3)),
            (math.inf, 0, _Shape(64, 2, 3)),
        ),
        (
            (200, 0, _Shape(32, 4, 4)),
            (400, 8192, _Shape(64, 4, 2)),
            (math.inf, 8192, _Shape(128, 4, 2)),
            (600, 0, _Shape(64, 2, 3)),
            (math.inf, 1024, _Shape(128, 2, 3)),
            (math.inf, 0, _Shape(64, 1, 4)),
        ),
    ),
    ("float4_e2m1", False): (
        (
            (200, 0, _Shape(16, 2, 4)),
            (500, 4096, _Shape(16, 4, 3)),
            (math.inf, 0, _Shape(32, 2, 3)),
        ),
        (
            (200, 0, _Shape(32, 4, 4)),
            (math.inf, 8192, _Shape(32, 4, 3)),
            (math.inf, 1024, _Shape(32, 2, 4)),
            (math.inf, 0, _Shape(32, 1, 4)),
        ),
    ),
}
# Twice the rows take registers for twice the sums. Those of mxfp4: the fastest of 12 in blocks of
# 16, 32 and 64 rows on Mixtral, Qwen3-30B and gpt-oss-20b (H200, 2026-11-24, triton 3.6.0).
_WIDE = {
    ("uint4", True): _Shape(32, 2, 4),
    ("uint4", False): _Shape(64, 2, 3, 200),
    ("float4_e2m1", True): _Shape(32, 2, 3, block_k=64),
    ("float4_e2m1", False): _Shape(64, 2, 3, block_k=64),
}


def serves(problem: Problem) -> bool:
    """Return whether the kernel can compute `problem`: depths that words of eight fill.

    Where launches may not depend on the number of tokens, it is of use for any number of rows, or
    for none.
    """
    if not fills_words(problem):
        return False
    return not problem.batch_invariant or _TAKEN_OVER[problem.scheme.weight][1] == math.inf


def most_tokens(problem: Problem) -> int:
    """Return the most tokens of a call that takes this path without a tuned file."""
    if problem.batch_invariant:
        return _ENDLESS
    even, odd = _MOST_ROWS[problem.scheme.weight]
    rows = even if starts_on_16(problem) else odd
    return rows * problem.experts // problem.top_k


def took_over(problem: Problem, tokens: int, block_m: int) -> bool:
    """Return whether a call took this path where a file of version 1 has tiles of block_m rows."""
    most, rows = _TAKEN_OVER[problem.scheme.weight]
    return block_m <= most and tokens * problem.top_k <= rows * problem.experts


def block_m(problem: Problem, pairs: int) -> int:
    """Return the rows of a block in a call of so many pairs."""
    rows = _ROWS[problem.scheme.weight]
    small = pairs <= rows * problem.experts and not problem.batch_invariant
    return LEAST_M if small else MOST_M


@dataclass(frozen=True)
class Spread:
    """How the rows of a call are spread: in blocks of block_m, over so many of the experts here,
    all being as likely."""

    block_m: int
    experts: float

    @classmethod
    def of(cls, problem: Problem, pairs: int) -> "Spread":
        share = min(1.0, problem.top_k / problem.experts)  # top-k may name an expert twice
        without: float = (1.0 - share) ** (pairs / problem.top_k)
        return cls(block_m(problem, pairs), problem.e * (1 - without))


@dataclass(frozen=True)
class SmallM:
    """One product: rows of weights for `columns` output columns along `depth`. zeros: weights come
    with zero points."""

    scheme: QuantScheme
    columns: int
    depth: int
    gated: bool
    zeros: bool

    @classmethod
    def both(cls, problem: Problem) -> "tuple[SmallM, SmallM]":
        scheme, gated = problem.scheme, problem.act.gated
        zeros = scheme.zero_points
        return (
            cls(scheme, problem.intermediate, problem.hidden, gated, zeros),
            cls(scheme, problem.hidden, problem.intermediate, False, zeros),
        )


def default(problem: Problem, tokens: int) -> MoEConfig:
    """Return the launches of a call of `tokens` tokens without a tuned file."""
    spread = Spread.of(problem, tokens * problem.top_k)
    first, second = (shape(product, spread) for product in SmallM.both(problem))
    return MoEConfig(first, second, NAME)


def turns(problem: Problem) -> Iterator[int]:
    """Yield the most tokens of each of the default launches, ascending.

    They change where more experts have rows, and end to where blocks have 16 rows. Equal launches
    at both ends of a stretch are equal all along it: more blocks only lead on through a table.
    """
    if problem.batch_invariant:
        return
    few = _ROWS[problem.scheme.weight] * problem.experts // problem.top_k
    if few:
        yield from _changes(problem, 1, few)
        yield few
    yield most_tokens(problem)


def _changes(problem: Problem, low: int, high: int) -> Iterator[int]:
    """Yield the last number of tokens before each change from `low` to `high`."""
    if default(problem, low) == default(problem, high):
        return
    if high - low == 1:
        yield low
        return
    middle = (low + high) // 2
    yield from _changes(problem, low, middle)
    yield from _changes(problem, middle, high)


def shape(product: SmallM, spread: Spread) -> AlignedW4Config:
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
        found = found._replace(block_n=found.block_n // 2)
    while found.block_n > 16 and _registers(found, product, block_m) > _MOST_REGISTERS:
        found = found._replace(block_n=found.block_n // 2)
    return _made(found, block_m)


def _registers(found: _Shape, product: SmallM, block_m: int) -> int:
    """Count the registers that a thread holds at once.

    Words, sums, and a step's products of each group, beside what several groups' zero points take
    from them.
    """
    rows = found.block_n * (2 if product.gated else 1)
    groups = found.block_k // product_depth(product.scheme, product.depth, found.block_k)
    per_group = 3 if product.zeros and groups > 1 else 1
    return rows * found.block_k // 256 + rows * block_m // 32 * (1 + groups * per_group)


# By block_m: mean rows of an expert between which it is worth a try, and block_k.
_TRIED: Rows = {LEAST_M: (0, 12), MOST_M: (4, 64)}
_TRIED_K = {LEAST_M: (WARP_K,), MOST_M: (WARP_K // 2, WARP_K)}
_TRIED_WARPS = ((1, 4), (2, 3), (4, 2), (4, 4))  # and stages


def candidates(problem: Problem, tokens: int) -> Groups:
    """Return launches worth timing: those that do not spill by `_registers`."""
    found = {}
    for rows in worth(_TRIED, problem, tokens):
        shapes = [
            _Shape(block_n, *launch, block_k=block_k)
            for block_n in (16, 32, 64, 128)
            for block_k in _TRIED_K[rows]
            for launch in _TRIED_WARPS
        ]
        one, two = (
            [_made(s, rows) for s in shapes if _registers(s, product, rows) <= _MOST_REGISTERS]
            for product in SmallM.both(problem)
        )
        found[rows] = (one, two)
    return found


def _made(found: _Shape, rows: int) -> AlignedW4Config:
    return AlignedW4Config(
        rows, found.block_n, found.block_k, found.num_warps, found.num_stages, found.registers
    )
