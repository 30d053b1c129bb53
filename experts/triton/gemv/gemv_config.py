"""The gemv path: which problems it serves, up to how many tokens, and what it launches.

A tile's block_n counts rows of weights that a program holds at once (of gate, and as many of up);
in GEMM 2 group_m pairs of a token share them. block_k may span a scheme's groups. block_m is
ignored.
"""

import torch

from experts.triton.candidates import FEW_TRIED, ByBlock, Groups, Rows, groups, worth
from experts.triton.launch_config import LaunchConfig, MoEConfig
from modular_kernel.spec.problem import Problem

NAME = "gemv"

# (block_n, block_k, warps, pairs held) of GEMM 2 by its depth, up to the first number. Measured on
# one H200 (triton 3.6.0) over Mixtral, DeepSeek-V3 EP8, Qwen3-30B and gpt-oss with one token.
_Row = tuple[int, tuple[int, int, int, int]]
_DEEP = 1 << 62
_HALF: tuple[_Row, ...] = (
    (1024, (32, 256, 4, 8)),
    (2048, (32, 256, 4, 4)),
    (4096, (16, 512, 4, 4)),
    (_DEEP, (16, 1024, 8, 4)),
)
_BYTES: tuple[_Row, ...] = (
    (2048, (32, 256, 4, 8)),
    (4096, (32, 512, 8, 8)),
    (_DEEP, (32, 1024, 8, 8)),
)
_WIDE = 4096  # hidden values from which programs of GEMM 1 share the search for the largest


def serves(problem: Problem) -> bool:
    """Return whether the kernels of this path can compute `problem`.

    Groups of activations are powers of two, because they are cut by halves.
    """
    scheme = problem.scheme
    if scheme.packed or scheme.act_order or problem.batch_invariant:
        return False
    group = scheme.group[-1] if scheme.activation_granularity == "group" else 1
    return group & (group - 1) == 0 or group >= max(problem.hidden, problem.intermediate)


def most_tokens(problem: Problem) -> int:
    """Return the most tokens of a call that takes this path without a tuned file.

    Tokens read the weights of an expert they share once each, so that it pays while few do; the
    aligned path's products of 8 bits catch up sooner.
    """
    most, share = (4, 4) if problem.scheme.quantized else (8, 2)
    return min(most, max(1, problem.experts // (share * problem.top_k)))


def default(problem: Problem, tokens: int = 1) -> MoEConfig:
    """Return the launches without a tuned file: the same for every number of tokens."""
    narrow = problem.scheme.quantized
    rows = next(row for most, row in (_BYTES if narrow else _HALF) if problem.intermediate <= most)
    first = (32 if narrow and problem.hidden > _WIDE else 16, 512, 8)
    if problem.scheme.activation_granularity == "group":
        first = (16, 512, 2 if problem.hidden % 512 else 4)
    if problem.scheme.activation_granularity == "group" and problem.intermediate <= 2048:
        rows = (64, 256, 8, 8)
    # A thread's values of float32 are half as many in as many bytes.
    halve = 2 if problem.dtype is torch.float32 and not narrow else 1
    return MoEConfig(
        LaunchConfig(16, first[0], first[1] // halve, 1, first[2], 1),
        LaunchConfig(16, rows[0], rows[1] // halve, rows[3], rows[2], 1),
        NAME,
    )


_ROWS: Rows = {16: (0, 4)}
# One stage; behind it the pairs of a token that share weights of GEMM 2 (config).
_ENTRIES: tuple[ByBlock, ByBlock] = (
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


def candidates(problem: Problem, tokens: int) -> Groups:
    """Return launches worth timing with so many tokens."""
    if tokens > FEW_TRIED * most_tokens(problem):
        return {}
    return groups(worth(_ROWS, problem, tokens), _ENTRIES, problem)
