"""Launches of the gemv path for 4-bit weights worth timing.

Collected from what won on one H200 (2026-11-20, triton 3.6.0), and what is near it.
"""

from experts.triton.candidates import FEW_TRIED, Entry, Groups, Rows, worth
from experts.triton.gemv_w4 import config
from experts.triton.gemv_w4.config import GemvW4Config
from experts.triton.launch_config import gemms
from modular_kernel.types import Problem

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
    if tokens > FEW_TRIED * config.most_tokens(problem) or not worth(_ROWS, problem, tokens):
        return {}
    one, two = (
        [GemvW4Config(columns // gemm.sides, *rest) for columns, *rest in entries]
        for entries, gemm in zip(_ENTRIES, gemms(problem), strict=True)
    )
    return {GemvW4Config.block_m: (one, two)}
