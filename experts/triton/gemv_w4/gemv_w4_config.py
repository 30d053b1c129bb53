"""The gemv path for 4-bit weights: which problems it serves, and what it launches."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from experts.triton.candidates import FEW_TRIED, Entry, Groups, Rows, worth
from experts.triton.launch_config import Device, Gemm, LaunchConfig, MoEConfig, Violation, gemms
from experts.triton.launch_config import violations as bounds
from experts.triton.operands_w4 import fills_words
from modular_kernel.spec.problem import Problem

NAME = "gemv_w4"

CHUNK = 128  # weights of a row that a warp loads 16 bytes a lane
ROWS = 16  # of weights in a product, at least
SLOTS = 8  # columns of the product: sums that are scaled apart
_HELD = 512  # weights of a row in stages, up to which 80 registers do
_REGISTERS = 65536  # of a multiprocessor
_MOST_OF_A_THREAD = 255
_MOST_PAIRS = 64  # of a token
_MOST_TOKENS = 8  # of a call without a tuned file: those of 16 were slower, if little


@dataclass(frozen=True)
class GemvW4Config:
    """One launch: a program multiplies block_n columns (of gate, and as many of up) with one row.

    num_warps share the depth, and in GEMM 2 a token's pairs too, in blocks of block_k. Of each warp
    num_stages blocks are in registers or on their way to them. In GEMM 2 block_n may be 8: the 16
    rows of a product are then twice the same, each time with half of a block.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    block_m: ClassVar[int] = 1  # a pair, or a token

    def __str__(self) -> str:
        sizes = f"block_n={self.block_n} block_k={self.block_k}"
        return f"{sizes} warps={self.num_warps} stages={self.num_stages}"


def serves(problem: Problem) -> bool:
    """Return whether the kernels of this path can compute `problem`."""
    served = fills_words(problem) and not problem.scheme.matrix_scales
    return served and not problem.batch_invariant and problem.top_k <= _MOST_PAIRS


def violations(config: GemvW4Config, gemm: Gemm, device: Device) -> Iterator[Violation]:
    """Yield every reason not to launch `config`: as a tile of 16 rows that may be narrow.

    A scheme's groups do not bound it.
    """
    tile = LaunchConfig(16, config.block_n, config.block_k, 1, config.num_warps, config.num_stages)
    return bounds(tile, replace(gemm, group_k=0, least_block_n=least_block_n(gemm)), device)


def chunks(tile: GemvW4Config, group: int) -> int:
    """Chunks of a block of block_k, no more than there are columns for groups of `group`."""
    slots = CHUNK // math.gcd(group, CHUNK)
    return max(1, min(tile.block_k // CHUNK, SLOTS // slots))


def least_block_n(gemm: Gemm) -> int:
    """Columns of the narrowest tile: a product has 16 rows, be they of gate and up, or 8 twice."""
    return ROWS // 2 if gemm.index == 2 else ROWS // gemm.sides


def halves(tile: GemvW4Config) -> int:
    """Of a block of GEMM 2, that each have rows of a product to themselves: 2 for 8 columns."""
    return max(1, ROWS // tile.block_n)


def registers(tile: GemvW4Config, gemm: int, *, in_lanes: bool) -> int:
    """Return the most registers of a thread of GEMM 1 or 2.

    With 128 sixteen warps are at work on a multiprocessor, with 80 there are 24, with 64 there are
    32. Fewer are for tiles of 8 columns, of which more programs are to be there at once.

    in_lanes: compat.WORDS_STAY_IN_LANES. Where they do not, each of these bounds spills: a thread
    may take all that one program's threads can have, which is said because ptxas, left to itself,
    spills for the sake of a second program.
    """
    if not in_lanes:
        return min(_MOST_OF_A_THREAD, _REGISTERS // (32 * tile.num_warps))
    if tile.block_n >= ROWS:
        return 128
    if gemm == 1:
        return 64
    return 80 if tile.block_k * tile.num_stages <= _HELD else 128


def most_tokens(problem: Problem) -> int:
    """Return the most tokens of a call that takes this path without a tuned file.

    Tokens read the weights of an expert they share once each. Measured on one H200 (2026-11-22,
    triton 3.6.0, Mixtral, DeepSeek-V3 EP8, Qwen3-30B and gpt-oss, 1 to 16 tokens): ahead of the
    aligned path up to half as many pairs as experts.
    """
    return max(1, min(_MOST_TOKENS, problem.experts // (2 * problem.top_k)))


_Launch = tuple[int, int, int, int]  # block_n, block_k, warps, stages
_PROGRAMS = 132  # one on each multiprocessor


def default(problem: Problem, tokens: int = 1) -> MoEConfig:
    """Return the tiles without a tuned file for a call of `tokens` tokens.

    Measured as said above, and on the shapes of Qwen3-235B and Qwen2-57B: the fastest or within 4 %
    of it, and none spills 16 bytes or more.
    """
    first, second = _first(problem, tokens), _second(problem, tokens)
    return MoEConfig(GemvW4Config(*first), GemvW4Config(*second), NAME)


def _first(problem: Problem, tokens: int) -> _Launch:
    """Of GEMM 1: where all programs fit at once and eight warps reach through the depth, narrow
    ones with half the registers are no second wave, and one warp loads while another multiplies."""
    programs = tokens * problem.top_k * -(-problem.intermediate // ROWS)
    if problem.act.gated and problem.hidden <= 2048 and programs <= 4 * _PROGRAMS:
        return 8, 256, 8, 1
    return 16, 256, 4, 1


def _second(problem: Problem, tokens: int) -> _Launch:
    """Of GEMM 2: the fewer programs, the more warps share one. 8 columns are for where 16 leave
    multiprocessors with one program beside others with two."""
    few = _of_8_columns(problem, tokens)
    if few is not None:
        return few
    programs = tokens * -(-problem.hidden // ROWS)
    integers = problem.scheme.weight == "uint4"
    if programs <= (2 if integers else 3) * _PROGRAMS:
        return 16, 256, 8, 2
    return (16, 512, 4, 1) if integers and problem.intermediate > 1024 else (16, 256, 4, 2)


def _of_8_columns(problem: Problem, tokens: int) -> _Launch | None:
    """8 columns of GEMM 2, if all programs are at work at once: two a multiprocessor where they can
    have all weights on their way before GEMM 1 has ended, or three. Blocks of more than 256 are for
    integers with groups of 128: smaller groups leave no columns for them.

    Measured on one H200 (2026-11-23, triton 3.6.0): faster at one token on Qwen3-30B, OLMoE,
    Qwen1.5-MoE, gpt-oss and a layer of 2560 by 1536; elsewhere at most 2 % faster, or slower.
    """
    integers = problem.scheme.weight == "uint4"
    deep = integers and problem.scheme.group[-1] % CHUNK == 0
    programs = tokens * -(-problem.hidden // 8)
    if programs <= 2 * _PROGRAMS:
        if deep and problem.top_k * -(-problem.intermediate // 1024) <= 8:
            return 8, 1024, 8, 1
        return (8, 256, 8, 4) if problem.top_k * -(-problem.intermediate // 256) <= 3 * 8 else None
    if programs <= 3 * _PROGRAMS and (deep or not integers):
        return (8, 512, 8, 1) if deep else (8, 256, 8, 2)
    return None


_ROWS: Rows = {GemvW4Config.block_m: (0, 4)}
# Columns of the whole product, block_k, warps, stages: a warp's block is a multiple of 128 deep.
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


def candidates(problem: Problem, tokens: int) -> Groups:
    """Return launches worth timing with so many tokens."""
    if tokens > FEW_TRIED * most_tokens(problem) or not worth(_ROWS, problem, tokens):
        return {}
    one, two = (
        [GemvW4Config(columns // gemm.sides, *rest) for columns, *rest in entries]
        for entries, gemm in zip(_ENTRIES, gemms(problem), strict=True)
    )
    return {GemvW4Config.block_m: (one, two)}
