"""Configuration of the aligned_w4 path: supported layers, default launches and tuning candidates.

The kernel is for 4-bit weights and few rows per expert. It unpacks weights in registers, so tile
sizes are limited by registers, not by shared memory. Defaults depend on the mean rows per expert
and on the number of active experts. An expert is active if it has rows.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from experts.triton.candidates import CandidateGroups, RowRanges, select_blocks
from experts.triton.launch_config import MoEConfig, Violation, rows_aligned_to_16
from experts.triton.operands_w4 import MAX_MMA_K, choose_mma_k, supports_w4
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme

NAME = "aligned_w4"

MAX_BLOCK_M = 16
MIN_BLOCK_M = 8  # the rows are the right operand of the MMA, whose N is 8
# Maximum mean rows per expert for which block_m is MIN_BLOCK_M, by (weight type, is NVFP4). Time of
# blocks of 8 rows relative to blocks of 16 rows (H200, 2026-11-30, triton 3.6.0, 5 to 7 layers):
# - integers: 0.70 to 0.93 with 8 rows per expert, 0.79 to 0.86 with 12. With 12 rows and groups of
#   64, 1.02 and 1.13 in two layers.
# - mxfp4: 0.81 to 0.99 with 8 rows, 0.87 to 1.12 with 10.7.
# - NVFP4: 0.87 to 1.03 with 6 rows, 0.90 to 1.19 with 8.
_MAX_ROWS_FOR_MIN_BLOCK = {
    ("uint4", False): 12,
    ("float4_e2m1", False): 8,
    ("float4_e2m1", True): 6,
}
# Maximum mean rows per expert for which calls use this path by default: (limit if rows are aligned
# to 16 elements, limit otherwise). Every block of MAX_BLOCK_M rows unpacks the weights again, which
# takes too long with more rows. The limits for integers were measured on an H200 on 2026-11-22.
# With mxfp4, this path is also faster than the aligned path with tiles of 32 rows (H200,
# 2026-11-24, triton 3.6.0, 1 to 1024 tokens).
_MAX_ROWS = {"uint4": (12, 12), "float4_e2m1": (192, 24)}
# The launches of the aligned path that are slower than this path: (maximum block_m, maximum mean
# rows per expert).
_SLOW_ALIGNED_TILES: dict[str, tuple[int, float]] = {
    "uint4": (16, 12),
    "float4_e2m1": (32, math.inf),
}
_MAX_REGISTERS = 128  # the compiler spills if `_estimate_registers` returns more
_UNBOUNDED_TOKENS = 1 << 62
_BLOCKS_M, _NUM_WARPS = (MIN_BLOCK_M, MAX_BLOCK_M), (1, 2, 4, 8, 16)
_MIN_BLOCK_N, _MAX_BLOCK_N, _MIN_BLOCK_K, _MAX_STAGES, _MAX_MAXNREG = 16, 256, 32, 16, 255


@dataclass(frozen=True)
class AlignedW4Config:
    """The launch of one GEMM.

    block_m: rows per block.
    block_n: output columns per block. To compute them, a gated GEMM multiplies by block_n gate rows
        and block_n up rows.
    block_k: K elements per step and warp. The warps of a program split K.
    num_warps: warps per program.
    num_stages: stages of the software pipeline.
    registers: maximum registers per thread (maxnreg); 0 for no limit. With a limit, one more
        program may fit on an SM, while a few registers are spilled.
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
        limits = (
            ("block_m", self.block_m in _BLOCKS_M, f"one of {_BLOCKS_M}"),
            (
                "block_n",
                _is_power_of_two_within(self.block_n, _MIN_BLOCK_N, _MAX_BLOCK_N),
                _describe_powers(_MIN_BLOCK_N, _MAX_BLOCK_N),
            ),
            (
                "block_k",
                _is_power_of_two_within(self.block_k, _MIN_BLOCK_K, MAX_MMA_K),
                _describe_powers(_MIN_BLOCK_K, MAX_MMA_K),
            ),
            ("num_warps", self.num_warps in _NUM_WARPS, f"one of {_NUM_WARPS}"),
            ("num_stages", 1 <= self.num_stages <= _MAX_STAGES, f"1 to {_MAX_STAGES}"),
            (
                "registers",
                0 <= self.registers <= _MAX_MAXNREG,
                f"1 to {_MAX_MAXNREG}, or 0 for no limit",
            ),
        )
        for name, is_satisfied, need in limits:
            if not is_satisfied:
                yield Violation(name, getattr(self, name), need)


def _is_power_of_two_within(value: int, minimum: int, maximum: int) -> bool:
    return minimum <= value <= maximum and not value & (value - 1)


def _describe_powers(minimum: int, maximum: int) -> str:
    return f"a power of two from {minimum} to {maximum}"


class _Shape(NamedTuple):
    """An AlignedW4Config without block_m."""

    block_n: int
    num_warps: int
    num_stages: int
    registers: int = 0
    block_k: int = MAX_MMA_K


# Entries (limit, min K, shape). The first entry that applies is used. An entry applies if there are
# fewer than `limit` blocks of 64 columns and K is at least `min K`. Measured on an H200 (triton
# 3.6.0, bf16) with Mixtral, DeepSeek-V3 EP8, Qwen3-30B and gpt-oss:
# - integers: 4 to 16 tokens, 2026-11-22.
# - mxfp4: 4 and 16 tokens, and one token for the entries with limits of 200 and 500, 2026-11-20.
#   The loop of the kernel has become shorter since then.
_ShapeTable = tuple[tuple[float, int, _Shape], ...]
# (weight type, has zero points) -> (table for gated GEMMs, table for other GEMMs).
_SHAPES: dict[tuple[str, bool], tuple[_ShapeTable, _ShapeTable]] = {
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
# (weight type, is gated) -> shape for block_m 16, which needs twice as many registers for
# accumulators as block_m 8. The shapes of mxfp4 are the fastest of 12 on Mixtral, Qwen3-30B and
# gpt-oss-20b (H200, 2026-11-24, triton 3.6.0).
_SHAPES_FOR_BLOCK_16 = {
    ("uint4", True): _Shape(32, 2, 4),
    ("uint4", False): _Shape(64, 2, 3, 200),
    ("float4_e2m1", True): _Shape(32, 2, 3, block_k=64),
    ("float4_e2m1", False): _Shape(64, 2, 3, block_k=64),
}


def supports(problem: Problem) -> bool:
    """Return whether the kernel supports `problem`; see `operands_w4.supports_w4`.

    A batch-invariant problem must use the same path for all token counts, so it is supported only
    if the path is fast with any number of rows.
    """
    if not supports_w4(problem):
        return False
    return not problem.batch_invariant or _SLOW_ALIGNED_TILES[problem.scheme.weight][1] == math.inf


def max_tokens(problem: Problem) -> int:
    """Return the largest token count for which this path is used without a tuned file."""
    if problem.batch_invariant:
        return _UNBOUNDED_TOKENS
    max_aligned_rows, max_unaligned_rows = _MAX_ROWS[problem.scheme.weight]
    max_rows = max_aligned_rows if rows_aligned_to_16(problem) else max_unaligned_rows
    return max_rows * problem.experts // problem.top_k


def is_faster(problem: Problem, tokens: int, block_m: int) -> bool:
    """Return whether this path is faster than the aligned path with blocks of block_m rows."""
    max_block_m, max_rows = _SLOW_ALIGNED_TILES[problem.scheme.weight]
    return block_m <= max_block_m and tokens * problem.top_k <= max_rows * problem.experts


def choose_block_m(problem: Problem, num_pairs: int) -> int:
    """Return block_m for a call with num_pairs routed pairs."""
    max_rows = _get_max_rows_for_min_block(problem)
    is_small = num_pairs <= max_rows * problem.experts and not problem.batch_invariant
    return MIN_BLOCK_M if is_small else MAX_BLOCK_M


def _get_max_rows_for_min_block(problem: Problem) -> int:
    return _MAX_ROWS_FOR_MIN_BLOCK[problem.scheme.weight, problem.scheme.matrix_scales]


@dataclass(frozen=True)
class RowDistribution:
    """The rows of a call, assuming uniform routing.

    block_m: rows per block.
    active_experts: expected number of local experts that have rows.
    """

    block_m: int
    active_experts: float

    @classmethod
    def from_call(cls, problem: Problem, num_pairs: int) -> "RowDistribution":
        """Return the distribution of a call with num_pairs routed pairs."""
        routing_probability = min(1.0, problem.top_k / problem.experts)  # top_k can exceed experts
        inactive_fraction: float = (1.0 - routing_probability) ** (num_pairs / problem.top_k)
        return cls(choose_block_m(problem, num_pairs), problem.e * (1 - inactive_fraction))


@dataclass(frozen=True)
class GemmSizes:
    """The properties of one GEMM that select its launch.

    scheme: the quantization scheme.
    size_n: output columns.
    size_k: K.
    is_gated: whether the GEMM computes gate and up columns.
    has_zero_points: whether the weights have zero points.
    """

    scheme: QuantScheme
    size_n: int
    size_k: int
    is_gated: bool
    has_zero_points: bool

    @classmethod
    def for_both_gemms(cls, problem: Problem) -> "tuple[GemmSizes, GemmSizes]":
        """Return the properties of GEMM 1 and of GEMM 2."""
        scheme, is_gated = problem.scheme, problem.act.gated
        has_zero_points = scheme.zero_points
        return (
            cls(scheme, problem.intermediate, problem.hidden, is_gated, has_zero_points),
            cls(scheme, problem.hidden, problem.intermediate, False, has_zero_points),
        )


def default_config(problem: Problem, tokens: int) -> MoEConfig:
    """Return the configuration of a call of `tokens` tokens without a tuned file."""
    distribution = RowDistribution.from_call(problem, tokens * problem.top_k)
    launch1, launch2 = (
        default_launch(sizes, distribution) for sizes in GemmSizes.for_both_gemms(problem)
    )
    return MoEConfig(launch1, launch2, NAME)


def breakpoints(problem: Problem) -> Iterator[int]:
    """Yield the last token count of each default configuration, ascending.

    As long as block_m is 8, the configuration depends on the number of active experts.
    """
    if problem.batch_invariant:
        return
    max_small_tokens = _get_max_rows_for_min_block(problem) * problem.experts // problem.top_k
    if max_small_tokens:
        yield from _find_changes(problem, 1, max_small_tokens)
        yield max_small_tokens
    yield max_tokens(problem)


def _find_changes(problem: Problem, low: int, high: int) -> Iterator[int]:
    """Yield the last token count before each change of the default between `low` and `high`.

    The changes are found by bisection. If the configurations at both ends are equal, all
    configurations between them are equal, because the number of active experts selects the entry of
    the table, and it grows with the number of tokens.
    """
    if default_config(problem, low) == default_config(problem, high):
        return
    if high - low == 1:
        yield low
        return
    middle = (low + high) // 2
    yield from _find_changes(problem, low, middle)
    yield from _find_changes(problem, middle, high)


def default_launch(sizes: GemmSizes, distribution: RowDistribution) -> AlignedW4Config:
    """Return the launch of a GEMM without a tuned file."""
    weight, block_m = sizes.scheme.weight, distribution.block_m
    if block_m == MIN_BLOCK_M:
        num_blocks = distribution.active_experts * -(-sizes.size_n // 64)
        gated_table, ungated_table = _SHAPES[weight, sizes.has_zero_points]
        shape = next(
            entry_shape
            for limit, min_k, entry_shape in (gated_table if sizes.is_gated else ungated_table)
            if num_blocks < limit and sizes.size_k >= min_k
        )
    else:
        shape = _SHAPES_FOR_BLOCK_16[weight, sizes.is_gated]
    while shape.block_n > 64 and sizes.size_n % shape.block_n:
        shape = shape._replace(block_n=shape.block_n // 2)
    while shape.block_n > 16 and not _fits_registers(shape, sizes, block_m):
        shape = shape._replace(block_n=shape.block_n // 2)
    return _make_config(shape, block_m)


def _fits_registers(shape: _Shape, sizes: GemmSizes, block_m: int) -> bool:
    return _estimate_registers(shape, sizes, block_m) <= _MAX_REGISTERS


def _estimate_registers(shape: _Shape, sizes: GemmSizes, block_m: int) -> int:
    """Estimate the number of live registers per thread.

    These registers hold the weight words, the accumulators, the partial sums of each scale group in
    a step and, if there are several groups with zero points, the terms of the zero points.
    """
    weight_rows = shape.block_n * (2 if sizes.is_gated else 1)
    groups = shape.block_k // choose_mma_k(sizes.scheme, sizes.size_k, shape.block_k)
    terms_per_group = 3 if sizes.has_zero_points and groups > 1 else 1
    accumulators = weight_rows * block_m // 32
    return weight_rows * shape.block_k // 256 + accumulators * (1 + groups * terms_per_group)


_CANDIDATE_ROWS: RowRanges = {MIN_BLOCK_M: (0, 12), MAX_BLOCK_M: (4, 64)}
# By block_m.
_CANDIDATE_BLOCKS_K = {MIN_BLOCK_M: (MAX_MMA_K,), MAX_BLOCK_M: (MAX_MMA_K // 2, MAX_MMA_K)}
_CANDIDATE_WARPS_AND_STAGES = ((1, 4), (2, 3), (4, 2), (4, 4))


def candidates(problem: Problem, tokens: int) -> CandidateGroups:
    """Return the launches to time for a call of `tokens` tokens.

    Launches for which `_estimate_registers` predicts spilling are left out.
    """
    groups = {}
    for block_m in select_blocks(_CANDIDATE_ROWS, problem, tokens):
        shapes = [
            _Shape(block_n, *warps_and_stages, block_k=block_k)
            for block_n in (16, 32, 64, 128)
            for block_k in _CANDIDATE_BLOCKS_K[block_m]
            for warps_and_stages in _CANDIDATE_WARPS_AND_STAGES
        ]
        launches1, launches2 = (
            [
                _make_config(shape, block_m)
                for shape in shapes
                if _fits_registers(shape, sizes, block_m)
            ]
            for sizes in GemmSizes.for_both_gemms(problem)
        )
        groups[block_m] = (launches1, launches2)
    return groups


def _make_config(shape: _Shape, block_m: int) -> AlignedW4Config:
    return AlignedW4Config(
        block_m, shape.block_n, shape.block_k, shape.num_warps, shape.num_stages, shape.registers
    )
