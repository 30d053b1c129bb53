"""Launches of the gemv path worth timing.

Collected from what won on one H200 (2026-11-20, triton 3.6.0), and what is near it.
"""

from experts.triton.candidates import FEW_TRIED, ByBlock, Groups, Rows, groups, worth
from experts.triton.gemv import config
from modular_kernel.types import Problem

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
    if tokens > FEW_TRIED * config.most_tokens(problem):
        return {}
    return groups(worth(_ROWS, problem, tokens), _ENTRIES, problem)
