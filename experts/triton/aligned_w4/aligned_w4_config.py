"""Supported problems, launches and tuning candidates of the aligned path for 4-bit weights.

The kernel is for few rows per expert. It unpacks weights in registers, so registers limit its
launches, not shared memory.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from experts.triton.candidates import CandidateGroups, RowRanges, select_blocks
from experts.triton.launch_config import MoEConfig, Violation, rows_aligned_to_16
from experts.triton.operands_w4 import WARP_K, choose_mma_k, supports_w4
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme

NAME = "aligned_w4"

MAX_BLOCK_M = 16  # max block_m
MIN_BLOCK_M = 8  # min block_m: the rows are the right operand of the MMA, whose N is 8
# Mean rows per expert up to which block_m is MIN_BLOCK_M, by weight type. Time with blocks of 8
# rows relative to blocks of 16: integers 0.74 to 0.80 at 8 rows per expert and 0.81 to 0.85 at 10;
# mxfp4 0.96 to 1.03 at 8 and 1.13 to 1.19 at 10 (H200, 2026-11-28, triton 3.6.0).
_ROWS = {"uint4": 11, "float4_e2m1": 6}
# Mean rows per expert up to which calls use this path by default: for rows that are aligned to 16
# elements, and for others. Every block of MAX_BLOCK_M rows unpacks the weights again, which costs
# too much with more rows. The limits for integers were measured on an H200 on 2026-11-22. With
# mxfp4 the path is also faster than the aligned path with tiles of 32 rows (H200, 2026-11-24,
# triton 3.6.0, 1 to 1024 tokens).
_MAX_ROWS = {"uint4": (12, 12), "float4_e2m1": (192, 24)}
# (max block_m, max mean rows per expert) of launches of the aligned path that are slower than this
# path.
_SLOW_ALIGNED_TILES: dict[str, tuple[int, float]] = {
    "uint4": (16, 12),
    "float4_e2m1": (32, math.inf),
}
_MAX_REGISTERS = 128  # limit of the `_registers` estimate, above which the compiler spills
_UNBOUNDED = 1 << 62
_BLOCKS_M, _WARPS = (MIN_BLOCK_M, MAX_BLOCK_M), (1, 2, 4, 8, 16)
_MIN_N, _MAX_N, _MIN_K, _MAX_STAGES, _MAX_MAXNREG = 16, 256, 32, 16, 255


@dataclass(frozen=True)
class AlignedW4Config:
    """The launch of one GEMM. A gated GEMM computes block_n gate columns and block_n up columns.

    block_k: K elements per step and warp; the warps of a program split K.
    num_stages: stages of the software pipeline.
    registers: maximum registers per thread (maxnreg), 0 for no limit. A limit can fit one more
        program on an SM, at the cost of spilling a few registers.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    registers: int = 0

    def __str__(self) -> str:
        sizes = f"block_m={self.block_m} block_n={self.block_n} block_k={self.block_k}"
        limit = f" registers={self.registers}" if self.registers else ""
        return f"{sizes} warps={self.num_warps} stages={self.num_stages}{limit}"

    def violations(self) -> Iterator[Violation]:
        """Yield every limit of the kernel that this launch violates."""
        rules = (
            ("block_m", self.block_m in _BLOCKS_M, f"one of {_BLOCKS_M}"),
            (
                "block_n",
                _is_power_of_two_within(self.block_n, _MIN_N, _MAX_N),
                _describe_powers(_MIN_N, _MAX_N),
            ),
            (
                "block_k",
                _is_power_of_two_within(self.block_k, _MIN_K, WARP_K),
                _describe_powers(_MIN_K, WARP_K),
            ),
            ("num_warps", self.num_warps in _WARPS, f"one of {_WARPS}"),
            ("num_stages", 1 <= self.num_stages <= _MAX_STAGES, f"1 to {_MAX_STAGES}"),
            (
                "registers",
                0 <= self.registers <= _MAX_MAXNREG,
                f"0 for as many as there are, to {_MAX_MAXNREG}",
            ),
        )
        for name, satisfied, need in rules:
            if not satisfied:
                yield Violation(name, getattr(self, name), need)


def _is_power_of_two_within(value: int, minimum: int, maximum: int) -> bool:
    return minimum <= value <= maximum and not value & (value - 1)


def _describe_powers(minimum: int, maximum: int) -> str:
    return f"a power of two from {minimum} to {maximum}"


class _Shape(NamedTuple):
    """A launch without block_m."""

    block_n: int
    num_warps: int
    num_stages: int
    registers: int = 0
    block_k: int = WARP_K


# (limit, min K, shape): applies to fewer blocks of 64 columns than `limit` and to K of at least
# `min K`; the first row that applies is used. Measured on one H200 (triton 3.6.0, bf16) over
# Mixtral, DeepSeek-V3 EP8, Qwen3-30B and gpt-oss: integers with 4 to 16 tokens on 2026-11-22; mxfp4
# with 4 and 16 tokens on 2026-11-20, and its rows for fewer than 200 and 500 blocks with one token.
# The loop of the kernel has become shorter since 2026-11-20.
_Rows = tuple[tuple[float, int, _Shape], ...]
# (weight type, has zero points) -> (rows of gated GEMMs, rows of others).
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
# Shapes for block_m 16, which needs twice the registers for sums. Those of mxfp4 are the fastest of
# 12 on Mixtral, Qwen3-30B and gpt-oss-20b (H200, 2026-11-24, triton 3.6.0).
_SHAPES_FOR_16 = {
    ("uint4", True): _Shape(32, 2, 4),
    ("uint4", False): _Shape(64, 2, 3, 200),
    ("float4_e2m1", True): _Shape(32, 2, 3, block_k=64),
    ("float4_e2m1", False): _Shape(64, 2, 3, block_k=64),
}


def supports(problem: Problem) -> bool:
    """Return whether the kernel supports `problem`; see `operands_w4.supports_w4`.

    A batch-invariant problem must use one path for all token counts, so it is supported only if the
    path is fast with any number of rows.
    """
    if not supports_w4(problem):
        return False
    return not problem.batch_invariant or _SLOW_ALIGNED_TILES[problem.scheme.weight][1] == math.inf


def max_tokens(problem: Problem) -> int:
    """Return the largest call for which this path is used without a tuned file, in tokens."""
    if problem.batch_invariant:
        return _UNBOUNDED
    even, odd = _MAX_ROWS[problem.scheme.weight]
    rows = even if rows_aligned_to_16(problem) else odd
    return rows * problem.experts // problem.top_k


def is_faster(problem: Problem, tokens: int, block_m: int) -> bool:
    """Return whether this path is faster than the aligned path with blocks of block_m rows."""
    max_block_m, rows = _SLOW_ALIGNED_TILES[problem.scheme.weight]
    return block_m <= max_block_m and tokens * problem.top_k <= rows * problem.experts


def block_m(problem: Problem, pairs: int) -> int:
    """Return block_m for a call of `pairs` routed pairs."""
    rows = _ROWS[problem.scheme.weight]
    small = pairs <= rows * problem.experts and not problem.batch_invariant
    return MIN_BLOCK_M if small else MAX_BLOCK_M


@dataclass(frozen=True)
class RowDistribution:
    """block_m and the expected number of active experts of a call, under uniform routing.

    An active expert is one that has rows.
    """

    block_m: int
    experts: float

    @classmethod
    def from_call(cls, problem: Problem, pairs: int) -> "RowDistribution":
        share = min(1.0, problem.top_k / problem.experts)  # top_k can exceed experts
        inactive: float = (1.0 - share) ** (pairs / problem.top_k)
        return cls(block_m(problem, pairs), problem.e * (1 - inactive))


@dataclass(frozen=True)
class GemmSizes:
    """The properties of one GEMM that select its launch.

    scheme: the quantization scheme.
    columns: output columns.
    depth: K.
    gated: whether it computes gate and up columns.
    zeros: whether the weights have zero points.
    """

    scheme: QuantScheme
    columns: int
    depth: int
    gated: bool
    zeros: bool

    @classmethod
    def both(cls, problem: Problem) -> "tuple[GemmSizes, GemmSizes]":
        scheme, gated = problem.scheme, problem.act.gated
        zeros = scheme.zero_points
        return (
            cls(scheme, problem.intermediate, problem.hidden, gated, zeros),
            cls(scheme, problem.hidden, problem.intermediate, False, zeros),
        )


def default(problem: Problem, tokens: int) -> MoEConfig:
    """Return the configuration of a call of `tokens` tokens without a tuned file."""
    distribution = RowDistribution.from_call(problem, tokens * problem.top_k)
    launch1, launch2 = (launch_for(sizes, distribution) for sizes in GemmSizes.both(problem))
    return MoEConfig(launch1, launch2, NAME)


def breakpoints(problem: Problem) -> Iterator[int]:
    """Yield the last token count of each of the default configurations, ascending.

    While block_m is 8, the configuration changes as more experts become active; `_changes` finds
    where.
    """
    if problem.batch_invariant:
        return
    last_small = _ROWS[problem.scheme.weight] * problem.experts // problem.top_k
    if last_small:
        yield from _changes(problem, 1, last_small)
        yield last_small
    yield max_tokens(problem)


def _changes(problem: Problem, low: int, high: int) -> Iterator[int]:
    """Yield the last token count before each change between `low` and `high`, by bisection.

    If the configurations at both ends are equal, so are all in between: the number of active
    experts, and so the row of the table, is monotonic in the number of tokens.
    """
    if default(problem, low) == default(problem, high):
        return
    if high - low == 1:
        yield low
        return
    middle = (low + high) // 2
    yield from _changes(problem, low, middle)
    yield from _changes(problem, middle, high)


def launch_for(sizes: GemmSizes, distribution: RowDistribution) -> AlignedW4Config:
    """Return the default launch of `sizes` for the rows of `distribution`."""
    weight, block_m = sizes.scheme.weight, distribution.block_m
    if block_m == MIN_BLOCK_M:
        blocks = distribution.experts * -(-sizes.columns // 64)
        gated, ungated = _SHAPES[weight, sizes.zeros]
        rows = gated if sizes.gated else ungated
        shape = next(
            row_shape for below, k, row_shape in rows if blocks < below and sizes.depth >= k
        )
    else:
        shape = _SHAPES_FOR_16[weight, sizes.gated]
    while shape.block_n > 64 and sizes.columns % shape.block_n:
        shape = shape._replace(block_n=shape.block_n // 2)
    while shape.block_n > 16 and _registers(shape, sizes, block_m) > _MAX_REGISTERS:
        shape = shape._replace(block_n=shape.block_n // 2)
    return _make_config(shape, block_m)


def _registers(shape: _Shape, sizes: GemmSizes, block_m: int) -> int:
    """Estimate the live registers per thread.

    These are the weight words, the sums, the partial sums of each scale group in a step and, for
    several groups with zero points, the terms of the zero points.
    """
    rows = shape.block_n * (2 if sizes.gated else 1)
    groups = shape.block_k // choose_mma_k(sizes.scheme, sizes.depth, shape.block_k)
    per_group = 3 if sizes.zeros and groups > 1 else 1
    return rows * shape.block_k // 256 + rows * block_m // 32 * (1 + groups * per_group)


# Candidates: (min, max) mean rows per expert by block_m, values of block_k by block_m, and
# (warps, stages).
_CANDIDATE_ROWS: RowRanges = {MIN_BLOCK_M: (0, 12), MAX_BLOCK_M: (4, 64)}
_CANDIDATE_K = {MIN_BLOCK_M: (WARP_K,), MAX_BLOCK_M: (WARP_K // 2, WARP_K)}
_CANDIDATE_WARPS = ((1, 4), (2, 3), (4, 2), (4, 4))


def candidates(problem: Problem, tokens: int) -> CandidateGroups:
    """Return the launches to time for `tokens` tokens.

    Those that spill, as far as `_registers` predicts it, are left out.
    """
    result = {}
    for rows in select_blocks(_CANDIDATE_ROWS, problem, tokens):
        shapes = [
            _Shape(block_n, *launch, block_k=block_k)
            for block_n in (16, 32, 64, 128)
            for block_k in _CANDIDATE_K[rows]
            for launch in _CANDIDATE_WARPS
        ]
        launches1, launches2 = (
            [_make_config(s, rows) for s in shapes if _registers(s, sizes, rows) <= _MAX_REGISTERS]
            for sizes in GemmSizes.both(problem)
        )
        result[rows] = (launches1, launches2)
    return result


def _make_config(shape: _Shape, block_m: int) -> AlignedW4Config:
    return AlignedW4Config(
        block_m, shape.block_n, shape.block_k, shape.num_warps, shape.num_stages, shape.registers
    )
