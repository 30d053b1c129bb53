"""Launches of persistent grouped GEMMs worth timing."""

from experts.triton.candidates import ByBlock, Groups, Rows, groups, worth
from modular_kernel.types import Problem

_ROWS: Rows = {128: (48, 1 << 62)}
# Boxes are 128 bytes deep whatever the number format.
_HALF: ByBlock = {
    128: (
        (256, 64, 4, 4, 8), (256, 64, 4, 4, 4), (256, 64, 4, 4, 16), (256, 64, 4, 4, 32),
        (256, 64, 4, 3, 8), (128, 64, 4, 6, 8), (128, 64, 4, 6, 16), (128, 64, 4, 5, 8),
    ),
}  # fmt: skip
_W8A8: ByBlock = {128: tuple((n, 128, warps, *more) for n, _, warps, *more in _HALF[128])}
_BLOCK: ByBlock = {
    128: tuple((128, 128, 4, places, group) for places in (6, 5) for group in (4, 8, 16, 32))
}


def candidates(problem: Problem, tokens: int, rows: Rows = _ROWS) -> Groups:
    """Return launches worth timing with so many tokens."""
    scheme, known = problem.scheme, _HALF
    if scheme.quantized:
        known = _BLOCK if scheme.granularity == "block" else _W8A8
    return groups(worth(rows, problem, tokens), (known, known), problem)
