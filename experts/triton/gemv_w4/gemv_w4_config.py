"""Configuration of the gemv_w4 path: supported layers, limits, default launches and candidates.

A chunk is 128 weights of a row, which four lanes load. A block is one or more chunks of each weight
row of a warp (`gemv_w4.kernels.common`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from experts.triton.candidates import (
    SMALL_M_LIMIT_FACTOR,
    CandidateGroups,
    Entry,
    RowRanges,
    select_blocks,
)
from experts.triton.launch_config import Device, Gemm, LaunchConfig, MoEConfig, Violation, gemms
from experts.triton.launch_config import violations as tile_violations
from experts.triton.operands_w4 import supports_w4
from modular_kernel.spec.problem import Problem

NAME = "gemv_w4"

CHUNK = 128  # weights of a row that four lanes load, 16 bytes each
ROWS = 16  # M of an MMA: weight rows
MMA_N = 8  # columns of an MMA; a weight row has one sum per column, and each sum has its own scale
# If the stages together hold at most this many weights of a row, 80 registers suffice.
_MAX_STAGED_WEIGHTS = 512
_REGISTERS_PER_SM = 65536
_MAX_THREAD_REGISTERS = 255
_MAX_TOP_K = 64
_MAX_TOKENS = 8  # without a tuned file; with 16 tokens, the path was slightly slower


@dataclass(frozen=True)
class GemvW4Config:
    """The launch of one GEMM. A program computes block_n columns of one row.

    An MMA has 16 weight rows. In GEMM 2, block_n may be 8. An MMA then has the same 8 weight rows
    twice, once for each half of a block along K.

    block_n: output columns per program. To compute them, a gated GEMM 1 multiplies by block_n gate
        rows and block_n up rows.
    block_k: K elements per block. The warps of a program split K into blocks. In GEMM 2, they also
        split the pairs of a token.
    num_warps: warps per program.
    num_stages: number of blocks that each warp holds in registers or is loading.
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
    if not supports_w4(problem) or problem.scheme.matrix_scales:
        return False
    return not problem.batch_invariant and problem.top_k <= _MAX_TOP_K


def violations(config: GemvW4Config, gemm: Gemm, device: Device) -> Iterator[Violation]:
    """Yield every limit that prevents `config` from being launched.

    The limits are the same as for a LaunchConfig with 16 rows, except that the minimum block_n is
    smaller and that scale groups do not limit block_k.
    """
    tile = LaunchConfig(16, config.block_n, config.block_k, 1, config.num_warps, config.num_stages)
    return tile_violations(tile, replace(gemm, group_k=0, min_block_n=min_block_n(gemm)), device)


def chunks_per_block(tile: GemvW4Config, group: int) -> int:
    """Return the number of chunks per block.

    A block has at most MMA_N scale groups, because the MMA computes a sum for each of them.

    group: weights per scale.
    """
    groups_per_chunk = CHUNK // math.gcd(group, CHUNK)
    return max(1, min(tile.block_k // CHUNK, MMA_N // groups_per_chunk))


def min_block_n(gemm: Gemm) -> int:
    """Return the minimum block_n of a GEMM.

    The 16 rows of an MMA are 8 weight rows for each half of a block in GEMM 2, and 8 gate rows and
    8 up rows in a gated GEMM 1.
    """
    return ROWS // 2 if gemm.index == 2 else ROWS // gemm.num_matrices


def num_halves(tile: GemvW4Config) -> int:
    """Return 2 if GEMM 2 splits a block into two halves along K (block_n is 8), and otherwise 1."""
    return max(1, ROWS // tile.block_n)


def max_registers(tile: GemvW4Config, gemm_index: int, *, words_stay_in_lanes: bool) -> int:
    """Return maxnreg, the maximum number of registers per thread, of GEMM 1 or 2.

    16 warps fit on an SM with 128 registers per thread, 24 warps with 80, and 32 warps with 64.
    Tiles of 8 columns get fewer registers, because more programs must be resident at once.

    words_stay_in_lanes: whether each lane of a warp unpacks the words of packed weights that it has
        loaded (`triton_versions.WORDS_STAY_IN_LANES`). If not, kernels would spill with any of
        these limits, so the result is the maximum with which one program fits on an SM. Without a
        limit, ptxas would spill to make a second program fit.
    """
    if not words_stay_in_lanes:
        return min(_MAX_THREAD_REGISTERS, _REGISTERS_PER_SM // (32 * tile.num_warps))
    if tile.block_n >= ROWS:
        return 128
    if gemm_index == 1:
        return 64
    return 80 if tile.block_k * tile.num_stages <= _MAX_STAGED_WEIGHTS else 128


def max_tokens(problem: Problem) -> int:
    """Return the largest token count for which this path is used without a tuned file.

    Each token reads the weights of its experts separately. On an H200, the path is faster than the
    aligned path if pairs <= experts / 2 (2026-11-22, triton 3.6.0, Mixtral, DeepSeek-V3 EP8,
    Qwen3-30B and gpt-oss, 1 to 16 tokens).
    """
    return max(1, min(_MAX_TOKENS, problem.experts // (2 * problem.top_k)))


_Launch = tuple[int, int, int, int]  # (block_n, block_k, warps, stages)
_NUM_SMS = 132  # of an H100 or H200


def default_config(problem: Problem, tokens: int = 1) -> MoEConfig:
    """Return the configuration of a call of `tokens` tokens without a tuned file.

    In the measurements of `max_tokens`, and with the shapes of Qwen3-235B and Qwen2-57B, this
    configuration takes at most 4% longer than the fastest one. No kernel spills 16 bytes or more.
    """
    launch1, launch2 = _choose_gemm1_launch(problem, tokens), _choose_gemm2_launch(problem, tokens)
    return MoEConfig(GemvW4Config(*launch1), GemvW4Config(*launch2), NAME)


def _choose_gemm1_launch(problem: Problem, tokens: int) -> _Launch:
    """Return the launch of GEMM 1.

    Tiles of 8 columns with half the registers are used if all programs are resident at once and the
    eight warps of a program cover K in one step. Some warps then load while others multiply,
    and there is no second wave of programs.
    """
    num_programs = tokens * problem.top_k * -(-problem.intermediate // ROWS)
    if problem.act.gated and problem.hidden <= 2048 and num_programs <= 4 * _NUM_SMS:
        return 8, 256, 8, 1
    return 16, 256, 4, 1


def _choose_gemm2_launch(problem: Problem, tokens: int) -> _Launch:
    """Return the launch of GEMM 2. If there are few programs, each of them has more warps.

    Tiles of 8 columns are used in the cases of `_choose_narrow_gemm2_launch`, in which tiles of 16
    columns would divide unevenly among the SMs.
    """
    narrow_launch = _choose_narrow_gemm2_launch(problem, tokens)
    if narrow_launch is not None:
        return narrow_launch
    num_programs = tokens * -(-problem.hidden // ROWS)
    is_uint4 = problem.scheme.weight == "uint4"
    if num_programs <= (2 if is_uint4 else 3) * _NUM_SMS:
        return 16, 256, 8, 2
    return (16, 512, 4, 1) if is_uint4 and problem.intermediate > 1024 else (16, 256, 4, 2)


def _choose_narrow_gemm2_launch(problem: Problem, tokens: int) -> _Launch | None:
    """Return a launch of GEMM 2 with 8 columns, or None if 16 columns are faster.

    All programs must be resident at once: two per SM if they can load all weights before GEMM 1
    ends, otherwise three. A block_k of more than 256 is used only for integers with groups of 128.
    With smaller groups, a block would have more groups than the MMA has columns.

    On an H200 (2026-11-23, triton 3.6.0), these launches are faster with one token on Qwen3-30B,
    OLMoE, Qwen1.5-MoE, gpt-oss and a layer of 2560 by 1536. On other layers, they are slower, or at
    most 2% faster.
    """
    is_uint4 = problem.scheme.weight == "uint4"
    has_wide_groups = is_uint4 and problem.scheme.group[-1] % CHUNK == 0
    num_programs = tokens * -(-problem.hidden // 8)
    if num_programs <= 2 * _NUM_SMS:
        if has_wide_groups and problem.top_k * -(-problem.intermediate // 1024) <= 8:
            return 8, 1024, 8, 1
        return (8, 256, 8, 4) if problem.top_k * -(-problem.intermediate // 256) <= 3 * 8 else None
    if num_programs <= 3 * _NUM_SMS and (has_wide_groups or not is_uint4):
        return (8, 512, 8, 1) if has_wide_groups else (8, 256, 8, 2)
    return None


_CANDIDATE_ROWS: RowRanges = {GemvW4Config.block_m: (0, 4)}
# Entries of GEMM 1 and of GEMM 2: (number of gate and up columns together, block_k, warps, stages).
# block_k is a multiple of 128.
_CANDIDATES: tuple[tuple[Entry, ...], ...] = (
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
    """Return the launches to time for a call of `tokens` tokens."""
    if tokens > SMALL_M_LIMIT_FACTOR * max_tokens(problem):
        return {}
    if not select_blocks(_CANDIDATE_ROWS, problem, tokens):
        return {}
    launches1, launches2 = (
        [
            GemvW4Config(columns // gemm.num_matrices, *block_k_warps_and_stages)
            for columns, *block_k_warps_and_stages in entries
        ]
        for entries, gemm in zip(_CANDIDATES, gemms(problem), strict=True)
    )
    return {GemvW4Config.block_m: (launches1, launches2)}
