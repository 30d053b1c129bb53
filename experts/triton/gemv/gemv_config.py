"""Supported layers, token limit, default launches and tuning candidates of the gemv path.

A pair is a token together with one of its top_k experts. The fields of a LaunchConfig have these
meanings on this path:

block_n: weight rows that a program holds at once. In GEMM 1, a program holds block_n gate rows and
    block_n up rows. In GEMM 2, block_n counts the rows of all pairs that are processed at once.
block_k: K elements per step. A step may span several scale groups.
group_m: in GEMM 2, the maximum number of pairs of a token that are processed at once.
block_m: ignored.
"""

import torch

from experts.triton.candidates import (
    SMALL_M_LIMIT_FACTOR,
    CandidateGroups,
    EntryTable,
    RowRanges,
    build_candidate_groups,
    select_blocks,
)
from experts.triton.launch_config import LaunchConfig, MoEConfig
from modular_kernel.spec.problem import Combine, Problem

NAME = "gemv"

# (max K, (block_n, block_k, warps, pairs at once)) of GEMM 2, for 16-bit and for 8-bit weights.
# Measured on one H200 (triton 3.6.0) over Mixtral, DeepSeek-V3 EP8, Qwen3-30B and gpt-oss with one
# token.
_Row = tuple[int, tuple[int, int, int, int]]
_UNBOUNDED_K = 1 << 62
_HALF: tuple[_Row, ...] = (
    (1024, (32, 256, 4, 8)),
    (2048, (32, 256, 4, 4)),
    (4096, (16, 512, 4, 4)),
    (_UNBOUNDED_K, (16, 1024, 8, 4)),
)
_EIGHT_BIT: tuple[_Row, ...] = (
    (2048, (32, 256, 4, 8)),
    (4096, (32, 512, 8, 8)),
    (_UNBOUNDED_K, (32, 1024, 8, 8)),
)
# For 8-bit weights with one activation scale per group: pairs that GEMM 2 processes at once, and
# the maximum bytes of the weights of all pairs if the last step of a token has fewer pairs. With
# more bytes, the aligned path is faster: with 10 experts per token, H 1792 and I 5120, it takes
# 85 us instead of 146 us for one token. (H200, 2026-12-01, triton 3.6.0; top-k 10, 16 and 22, three
# layers, 1 to 4 tokens)
_PAIRS_PER_STEP_8BIT = 8
_MAX_BYTES_PARTIAL_STEP = 150_000_000
# Hidden size above which GEMM 1 uses larger blocks. Every program computes the amax of its token,
# so larger blocks repeat this work fewer times.
_WIDE = 4096


def supports(problem: Problem) -> bool:
    """Return whether the kernels of this path support `problem`.

    Groups of activations must be powers of two, because the kernels reshape vectors by them.
    """
    scheme = problem.scheme
    if scheme.packed or scheme.act_order or problem.batch_invariant:
        return False
    group = scheme.group[-1] if scheme.activation_granularity == "group" else 1
    return group & (group - 1) == 0 or group >= max(problem.hidden, problem.intermediate)


def max_tokens(problem: Problem) -> int:
    """Return the largest token count for which this path is used without a tuned file.

    Each token reads the weights of its experts separately, so the path is faster only while tokens
    rarely share an expert. With quantized weights, the aligned path becomes faster earlier.
    """
    scheme = problem.scheme
    limit, min_experts_per_pair = (4, 4) if scheme.quantized else (8, 2)
    limit = min(limit, max(1, problem.experts // (min_experts_per_pair * problem.top_k)))
    if (
        scheme.activation_granularity == "group"
        and problem.combine is Combine.SUM
        and problem.top_k > _PAIRS_PER_STEP_8BIT
    ):
        bytes_per_expert = (problem.w1_rows + problem.intermediate) * problem.hidden
        limit = min(limit, _MAX_BYTES_PARTIAL_STEP // (problem.top_k * bytes_per_expert))
    return limit


def default_config(problem: Problem, tokens: int = 1) -> MoEConfig:
    """Return the launches without a tuned file, the same for every token count."""
    quantized = problem.scheme.quantized
    down_shape = next(
        shape
        for max_k, shape in (_EIGHT_BIT if quantized else _HALF)
        if problem.intermediate <= max_k
    )
    gate_up_shape = (32 if quantized and problem.hidden > _WIDE else 16, 512, 8)
    if problem.scheme.activation_granularity == "group":
        gate_up_shape = (16, 512, 2 if problem.hidden % 512 else 4)
    if problem.scheme.activation_granularity == "group" and problem.intermediate <= 2048:
        down_shape = (64, 256, 8, 8)
    # Half as many float32 weights take the same number of bytes per thread.
    k_divisor = 2 if problem.dtype is torch.float32 and not quantized else 1
    return MoEConfig(
        LaunchConfig(16, gate_up_shape[0], gate_up_shape[1] // k_divisor, 1, gate_up_shape[2], 1),
        LaunchConfig(
            16, down_shape[0], down_shape[1] // k_divisor, down_shape[3], down_shape[2], 1
        ),
        NAME,
    )


# (block_n, block_k, warps, stages, pairs at once) of both GEMMs, for weights whose N is contiguous.
# With 4 tokens, the aligned path took 4% to 14% less time. With 1 token, it took between 8% less
# and 4% more time. 2 and 3 tokens were not measured. (H200, 2026-11-30, triton 3.6.0, gpt-oss and a
# layer with E=64, H=2048, I=1024)
_MAX_N_MAJOR_TOKENS = 1
_N_MAJOR = ((32, 256, 8, 1, 1), (64, 256, 8, 1, 4))


def n_major_config(config: MoEConfig, n_major: tuple[bool, bool]) -> MoEConfig:
    """Return `config` with other launches for the GEMMs whose weights are contiguous along N.

    n_major: for each GEMM, whether its weights are contiguous along N.
    """
    launch1, launch2 = (
        LaunchConfig(launch.block_m, *row[:2], row[4], *row[2:4]) if is_n_major else launch
        for launch, row, is_n_major in zip(
            config.typed_launches(LaunchConfig), _N_MAJOR, n_major, strict=True
        )
    )
    return MoEConfig(launch1, launch2, config.path)


def is_fast(tokens: int, n_major: tuple[bool, bool]) -> bool:
    """Return whether this path is the fastest for `tokens` tokens with weights of these layouts.

    n_major: for each GEMM, whether its weights are contiguous along N.
    """
    return tokens <= _MAX_N_MAJOR_TOKENS or not any(n_major)


_CANDIDATE_ROWS: RowRanges = {16: (0, 4)}
# All entries have one stage. The fifth number of an entry of GEMM 2 is the number of pairs at once.
_CANDIDATES: tuple[EntryTable, EntryTable] = (
    {
        16: (
            (32, 512, 8, 1), (32, 512, 4, 1), (32, 512, 2, 1), (32, 256, 4, 1), (32, 256, 8, 1),
            (32, 1024, 8, 1), (64, 256, 4, 1), (64, 256, 8, 1), (64, 512, 8, 1), (64, 1024, 8, 1),
        ),
    },
    {
        16: (
            (32, 256, 4, 1, 8), (32, 256, 4, 1, 4), (16, 512, 4, 1, 4), (16, 1024, 8, 1, 4),
            (32, 512, 8, 1, 8), (16, 1024, 4, 1, 8), (64, 256, 8, 1, 8), (64, 256, 4, 1, 4),
            (16, 512, 8, 1, 2), (32, 512, 4, 1, 4), (32, 256, 8, 1, 2), (32, 128, 4, 1, 8),
        ),
    },
)  # fmt: skip


def candidates(problem: Problem, tokens: int) -> CandidateGroups:
    """Return the launches to time for `tokens` tokens."""
    if tokens > SMALL_M_LIMIT_FACTOR * max_tokens(problem):
        return {}
    return build_candidate_groups(
        select_blocks(_CANDIDATE_ROWS, problem, tokens), _CANDIDATES, problem
    )
