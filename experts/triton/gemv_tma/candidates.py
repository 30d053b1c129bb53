"""Launches of the TMA-pipelined gemv path worth timing."""

from experts.triton.candidates import FEW_TRIED, ByBlock, Groups, Rows, groups, worth
from experts.triton.gemv_tma import config
from modular_kernel.types import Problem

_ROWS: Rows = {16: (0, 4)}
# Places of a ring, as many as fit and fewer (config).
_ENTRIES: ByBlock = {
    16: tuple(
        (64, block_k, 4, places)
        for block_k, counts in ((512, (6, 5, 4, 3, 2)), (256, (12, 10, 8, 6)), (128, (16, 12)))
        for places in counts
    ),
}


def candidates(problem: Problem, tokens: int) -> Groups:
    """Return launches worth timing with so many tokens."""
    if tokens > FEW_TRIED * config.most_tokens(problem):
        return {}
    return groups(worth(_ROWS, problem, tokens), (_ENTRIES, _ENTRIES), problem)
