"""Supported problems, limits, launches and tuning candidates of the gemv_w4 path."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from experts.triton.candidates import (
    SMALL_M_MARGIN,
    CandidateGroups,
    Entry,
    RowRanges,
    select_blocks,
)
from experts.triton.launch_config import Device, Gemm, LaunchConfig, MoEConfig, Violation, gemms
from experts.triton.launch_config import violations as bounds
from experts.triton.operands_w4 import supports_w4
from modular_kernel.spec.problem import Problem

NAME = "gemv_w4"

CHUNK = 128  # weights of a row that four lanes load, 16 bytes each
ROWS = 16  # M of an MMA: weight rows
SLOTS = 8  # N of an MMA: sums of a row with separate scales
_MAX_STAGED_WEIGHTS = 512  # weights of a row in all stages, up to which 80 registers suffice
_REGISTERS = 65536  # per SM
_MAX_THREAD_REGISTERS = 255
_MAX_PAIRS = 64  # per token
_MAX_TOKENS = 8  # without a tuned file: with 16 tokens, the path was slightly slower


@dataclass(frozen=True)
class GemvW4Config:
    """The launch of one GEMM. A program computes block_n columns of one row.

    If the activation is gated, it also computes as many up columns. The num_warps warps of a
    program split K, and in GEMM 2 also the pairs of a token, in blocks of block_k. Each warp has
    num_stages blocks in registers or being loaded. An MMA has 16 weight rows. In GEMM 2, block_n
    may be 8: an MMA then has the same 8 weight rows twice, once for each half of a block along K.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    block_m: ClassVar[int] = 1  # one pair or one token per program

    def __str__(self) -> str:
        sizes = f"block_n={self.block_n} block_k={self.block_k}"
        return f"{sizes} warps={self.num_warps} stages={self.num_stages}"


def supports(problem: Problem) -> bool:
    """Return whether the kernels of this path support `problem`."""
    supported = supports_w4(problem) and not problem.scheme.matrix_scales
    return supported and not problem.batch_invariant and problem.top_k <= _MAX_PAIRS


def violations(config: GemvW4Config, gemm: Gemm, device: Device) -> Iterator[Violation]:
    """Yield every reason why `config` cannot be launched.

    The limits are those of a tile of 16 rows, with a smaller minimum block_n. Scale groups do not
    limit block_k.
    """
    tile = LaunchConfig(16, config.block_n, config.block_k, 1, config.num_warps, config.num_stages)
    return bounds(tile, replace(gemm, group_k=0, min_block_n=min_block_n(gemm)), device)


def chunks(tile: GemvW4Config, group: int) -> int:
    """Return the chunks per block, which have at most SLOTS scale groups of `group` weights."""
    slots = CHUNK // math.gcd(group, CHUNK)
    return max(1, min(tile.block_k // CHUNK, SLOTS // slots))


def min_block_n(gemm: Gemm) -> int:
    """Return the minimum block_n of a GEMM.

    The 16 rows of an MMA are 8 weight rows for each half of a block in GEMM 2, and gate and up
    rows, 8 each, in a gated GEMM 1.
    """
    return ROWS // 2 if gemm.index == 2 else ROWS // gemm.num_matrices


def halves(tile: GemvW4Config) -> int:
    """Return the parts of a block with separate MMA rows in GEMM 2: 2 if block_n is 8, else 1."""
    return max(1, ROWS // tile.block_n)


def registers(tile: GemvW4Config, gemm: int, *, in_lanes: bool) -> int:
    """Return maxnreg, the registers per thread, of GEMM 1 or 2.

    128 registers allow 16 warps per SM, 80 allow 24 and 64 allow 32. Tiles of 8 columns get fewer,
    because more programs must be resident at once.

    in_lanes: `triton_versions.WORDS_STAY_IN_LANES`. If it is False, kernels would spill with all of
        these numbers; the result is then the most that one program per SM can use. Without a limit,
        ptxas would spill to fit a second program.
    """
    if not in_lanes:
        return min(_MAX_THREAD_REGISTERS, _REGISTERS // (32 * tile.num_warps))
    if tile.block_n >= ROWS:
        return 128
    if gemm == 1:
        return 64
    return 80 if tile.block_k * tile.num_stages <= _MAX_STAGED_WEIGHTS else 128


def max_tokens(problem: Problem) -> int:
    """Return the largest call for which this path is used without a tuned file, in tokens.

    Each token reads the weights of its experts separately. Measured on one H200 (2026-11-22, triton
    3.6.0, Mixtral, DeepSeek-V3 EP8, Qwen3-30B and gpt-oss, 1 to 16 tokens): the path is faster than
    the aligned path while pairs <= experts / 2.
    """
    return max(1, min(_MAX_TOKENS, problem.experts // (2 * problem.top_k)))


_Launch = tuple[int, int, int, int]  # block_n, block_k, warps, stages
_NUM_SMS = 132  # of an H100 or H200


def default(problem: Problem, tokens: int = 1) -> MoEConfig:
    """Return the launches of a call of `tokens` tokens without a tuned file.

    In the measurements of `max_tokens`, and on the shapes of Qwen3-235B and Qwen2-57B, they are
    within 4 % of the fastest. None of them spills 16 bytes or more.
    """
    launch1, launch2 = _gemm1_launch(problem, tokens), _gemm2_launch(problem, tokens)
    return MoEConfig(GemvW4Config(*launch1), GemvW4Config(*launch2), NAME)


def _gemm1_launch(problem: Problem, tokens: int) -> _Launch:
    """Return the launch of GEMM 1.

    Tiles of 8 columns with half the registers are used if all programs are resident at once and the
    eight warps of a program cover K in one step: then one warp loads while another multiplies, and
    there is no second wave of programs.
    """
    programs = tokens * problem.top_k * -(-problem.intermediate // ROWS)
    if problem.act.gated and problem.hidden <= 2048 and programs <= 4 * _NUM_SMS:
        return 8, 256, 8, 1
    return 16, 256, 4, 1


def _gemm2_launch(problem: Problem, tokens: int) -> _Launch:
    """Return the launch of GEMM 2: the fewer programs there are, the more warps each has.

    Tiles of 8 columns are used where 16 would leave some SMs with one program and others with two.
    """
    narrow_launch = _narrow_gemm2(problem, tokens)
    if narrow_launch is not None:
        return narrow_launch
    programs = tokens * -(-problem.hidden // ROWS)
    integers = problem.scheme.weight == "uint4"
    if programs <= (2 if integers else 3) * _NUM_SMS:
        return 16, 256, 8, 2
    return (16, 512, 4, 1) if integers and problem.intermediate > 1024 else (16, 256, 4, 2)


def _narrow_gemm2(problem: Problem, tokens: int) -> _Launch | None:
    """Return a launch of GEMM 2 with 8 columns, or None if it is not faster than 16.

    All programs must be resident at once: two per SM if they can load all weights before GEMM 1
    ends, otherwise three. A block_k of more than 256 is used only for integers with groups of 128.
    With smaller groups, a block would have more groups than an MMA has columns for them.

    Measured on one H200 (2026-11-23, triton 3.6.0): faster with one token on Qwen3-30B, OLMoE,
    Qwen1.5-MoE, gpt-oss and a layer of 2560 by 1536; elsewhere at most 2 % faster, or slower.
    """
    integers = problem.scheme.weight == "uint4"
    wide_groups = integers and problem.scheme.group[-1] % CHUNK == 0
    programs = tokens * -(-problem.hidden // 8)
    if programs <= 2 * _NUM_SMS:
        if wide_groups and problem.top_k * -(-problem.intermediate // 1024) <= 8:
            return 8, 1024, 8, 1
        return (8, 256, 8, 4) if problem.top_k * -(-problem.intermediate // 256) <= 3 * 8 else None
    if programs <= 3 * _NUM_SMS and (wide_groups or not integers):
        return (8, 512, 8, 1) if wide_groups else (8, 256, 8, 2)
    return None


_ROWS: RowRanges = {GemvW4Config.block_m: (0, 4)}
# (gate and up columns together, block_k, warps, stages) of GEMM 1 and of GEMM 2; block_k is a
# multiple of 128.
_ENTRIES: tuple[tuple[Entry, ...], ...] = (
    (
            (32, 256, 8, 1), (32, 256, 4, 1), (32, 512, 8, 1), (32, 512, 4, 1), (32, 256, 16, 1),
            (32, 512, 16, 1), (32, 256, 2, 1), (32, 128, 8, 2), (32, 128, 8, 1), (16, 256, 8, 1),
            (16, 512, 4, 1),
    ),
    (
            (16, 512, 8, 1), (16, 512, 16, 1), (16, 256, 8, 2), (16, 256, 16, 1), (16, 256, 8, 1),
            (16, 256, 16, 2), (16, 512, 4, 1), (16, 256, 4, 2), (32, 256, 8, 1), (32, 128, 8, 1),
            (16, 256, 8, 4), (16, 256, 8, 3), (16, 256, 16, 3), (16, 128, 16, 4), (8, 256, 8, 4),
            (8, 256, 8, 2), (8, 512, 8, 1), (8, 512, 4, 2), (8, 1024, 8, 1), (8, 1024, 4, 1),
    ),
)  # fmt: skip


def candidates(problem: Problem, tokens: int) -> CandidateGroups:
    """Return the launches to time for `tokens` tokens."""
    if tokens > SMALL_M_MARGIN * max_tokens(problem) or not select_blocks(_ROWS, problem, tokens):
        return {}
    launches1, launches2 = (
        [GemvW4Config(columns // gemm.num_matrices, *rest) for columns, *rest in entries]
        for entries, gemm in zip(_ENTRIES, gemms(problem), strict=True)
    )
    return {GemvW4Config.block_m: (launches1, launches2)}
