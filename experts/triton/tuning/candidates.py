"""Launches worth timing, by number format and row block: the one place to add more.

An entry is (columns, block_k, warps, stages), or with a fifth number the swizzle group. columns
are those of the whole product: a gated GEMM 1 has half of them as gate and half as up columns.
What a problem or a device cannot launch is left out when candidates are made (tuning.space).
Collected from what won on one H200 (2026-11-20, triton 3.6.0), and its neighbours.
"""

import torch

from experts.triton.launch_config import ALIGNED, DEQUANTISED, PERMUTED, SINGLE, STREAMED
from modular_kernel.types import Problem

Entry = tuple[int, ...]
ByBlock = dict[int, tuple[Entry, ...]]  # by block_m

# The mean rows of an expert between which a block_m is worth a try, on each path.
ROWS: dict[str, dict[int, tuple[float, float]]] = {
    ALIGNED: {
        16: (0, 24),
        32: (8, 80),
        64: (20, 600),
        128: (60, 1 << 62),
    },
    PERMUTED: {128: (48, 1 << 62)},
    DEQUANTISED: {128: (32, 1 << 62)},
    SINGLE: {16: (0, 4)},
    STREAMED: {16: (0, 4)},
}
# The most tokens for which a path of few tokens is tried, over those for which it is taken untuned.
FEW_TRIED = 2

_OWN_KERNEL = 16  # block_m up to which 4-bit weights do not come to these launches
_OWN_ROWS = 64  # mean rows of an expert up to which that kernel is worth a try

_HALF: ByBlock = {
    16: (
        (128, 128, 4, 3), (128, 128, 4, 4), (128, 128, 4, 5), (128, 64, 4, 6), (128, 128, 8, 4),
        (64, 128, 4, 4), (64, 128, 4, 6), (64, 256, 4, 3), (64, 256, 4, 4), (32, 256, 4, 4),
        (256, 64, 4, 4), (256, 64, 8, 4), (256, 128, 4, 3), (256, 128, 8, 3),
    ),
    32: (
        (128, 64, 4, 6, 8), (128, 64, 4, 4), (128, 64, 4, 6), (64, 128, 4, 4, 8), (64, 128, 4, 3),
        (64, 128, 4, 5), (128, 128, 4, 3), (128, 128, 4, 4), (128, 128, 4, 3, 8), (128, 128, 8, 3),
        (256, 64, 4, 4), (256, 64, 8, 4), (256, 128, 8, 3), (256, 128, 8, 3, 8),
    ),
    64: (
        (128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 4, 4, 8), (128, 64, 8, 4), (64, 128, 4, 3),
        (128, 128, 4, 3), (128, 128, 8, 3), (128, 128, 8, 4), (256, 64, 4, 3), (256, 64, 8, 3),
        (256, 64, 8, 4),
    ),
    128: (
        (128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 3),
        (256, 64, 8, 3), (256, 64, 8, 4), (256, 64, 8, 3, 8), (256, 64, 8, 4, 8),
        (256, 64, 8, 4, 32),
    ),
}  # fmt: skip
_W8A8: ByBlock = {
    16: (
        (128, 256, 4, 3), (128, 256, 4, 4), (128, 128, 4, 4), (128, 128, 4, 6), (128, 256, 8, 4),
        (64, 128, 4, 4), (64, 256, 4, 3), (64, 256, 4, 4), (64, 256, 4, 5), (64, 512, 4, 3),
        (32, 256, 4, 4), (256, 128, 4, 4), (256, 128, 8, 4), (256, 256, 8, 3),
    ),
    32: (
        (128, 128, 4, 5, 8), (64, 256, 4, 4, 8), (64, 128, 4, 4, 8), (128, 256, 4, 3, 8),
        (64, 128, 4, 4), (64, 256, 4, 3), (128, 128, 4, 3), (128, 128, 4, 5), (128, 256, 4, 3),
        (128, 256, 8, 3), (256, 128, 4, 4), (256, 128, 8, 3),
    ),
    64: (
        (128, 128, 4, 3), (128, 128, 4, 4), (128, 128, 4, 4, 8), (128, 256, 4, 3), (128, 256, 8, 3),
        (256, 128, 4, 3), (256, 128, 8, 3), (256, 128, 8, 4),
    ),
    128: (
        (128, 128, 4, 3), (128, 128, 4, 4), (128, 128, 8, 4), (128, 256, 8, 3),
        (256, 128, 8, 3), (256, 128, 8, 4), (256, 128, 8, 3, 8), (256, 128, 8, 4, 32),
    ),
}  # fmt: skip
_W8A8_BLOCK: ByBlock = {
    16: (
        (128, 128, 4, 3), (128, 128, 4, 5), (128, 128, 4, 6), (128, 128, 8, 5), (64, 128, 4, 3),
        (64, 128, 4, 4), (64, 128, 4, 5), (64, 128, 4, 7), (64, 128, 8, 5), (32, 128, 4, 6),
        (256, 128, 8, 4),
    ),
    32: (
        (128, 128, 4, 5, 8), (64, 128, 4, 4, 8), (128, 128, 4, 4, 8), (64, 128, 4, 6, 8),
        (64, 128, 4, 4), (64, 128, 4, 5), (128, 128, 4, 3), (128, 128, 4, 4), (128, 128, 8, 4),
    ),
    64: (
        (64, 128, 4, 4), (128, 128, 4, 3), (128, 128, 4, 4), (128, 128, 4, 4, 8), (128, 128, 8, 3),
        (128, 128, 8, 4), (256, 128, 8, 3),
    ),
    128: (
        (64, 128, 4, 3), (128, 128, 8, 3), (128, 128, 8, 4), (256, 128, 8, 3),
        (128, 128, 8, 3, 8), (128, 128, 8, 3, 32),
    ),
}  # fmt: skip
# Weights that are dequantised on the way: they take registers, so that tall blocks are narrow.
_WEIGHT_ONLY: ByBlock = {
    16: (
        (64, 64, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4), (32, 128, 4, 4), (128, 64, 4, 4),
        (128, 128, 4, 3), (128, 128, 4, 4), (128, 128, 8, 3), (128, 128, 8, 4), (256, 64, 8, 4),
        (256, 128, 8, 3),
    ),
    32: (
        (64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3),
        (128, 128, 8, 3), (256, 64, 8, 3),
    ),
    64: (
        (64, 64, 4, 3), (64, 64, 8, 3), (64, 128, 8, 3), (128, 32, 8, 4), (128, 64, 8, 3),
        (128, 64, 8, 4), (128, 128, 8, 3),
    ),
    128: ((64, 32, 4, 3), (64, 32, 8, 4), (64, 64, 8, 3), (64, 64, 8, 4), (64, 128, 8, 3)),
}  # fmt: skip
# Groups of 32 bound a step.
_MXFP4: ByBlock = {
    32: (
        (64, 32, 4, 4), (128, 32, 4, 4), (128, 32, 8, 4), (128, 32, 8, 6), (256, 32, 4, 4),
        (256, 32, 8, 4),
    ),
    64: ((64, 32, 4, 4), (64, 32, 8, 4), (128, 32, 8, 4)),
    128: ((64, 32, 4, 3), (64, 32, 8, 3), (64, 32, 8, 4)),
}  # fmt: skip
# Boxes are 128 bytes deep whatever the number format (grouped_tma.path).
_PERMUTED_HALF: ByBlock = {
    128: (
        (256, 64, 4, 4, 8), (256, 64, 4, 4, 4), (256, 64, 4, 4, 16), (256, 64, 4, 4, 32),
        (256, 64, 4, 3, 8), (128, 64, 4, 6, 8), (128, 64, 4, 6, 16), (128, 64, 4, 5, 8),
    ),
}  # fmt: skip
_PERMUTED_W8A8: ByBlock = {
    128: tuple((n, 128, warps, *more) for n, _, warps, *more in _PERMUTED_HALF[128])
}
_PERMUTED_BLOCK: ByBlock = {
    128: tuple((128, 128, 4, places, group) for places in (6, 5) for group in (4, 8, 16, 32))
}
# One stage; behind it the pairs of a token that share weights of GEMM 2 (gemv.config).
_SINGLE: tuple[ByBlock, ByBlock] = (
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
# Of packed weights (gemv_w4.config): a warp's block is a multiple of 128 deep.
_PACKED: tuple[ByBlock, ByBlock] = (
    {
        16: (
            (32, 256, 8, 1), (32, 256, 4, 1), (32, 512, 8, 1), (32, 512, 4, 1), (32, 256, 16, 1),
            (32, 512, 16, 1), (32, 256, 2, 1), (32, 128, 8, 2), (32, 128, 8, 1), (16, 256, 8, 1),
            (16, 512, 4, 1),
        ),
    },
    {
        16: (
            (16, 512, 8, 1), (16, 512, 16, 1), (16, 256, 8, 2), (16, 256, 16, 1), (16, 256, 8, 1),
            (16, 256, 16, 2), (16, 512, 4, 1), (16, 256, 4, 2), (32, 256, 8, 1), (32, 128, 8, 1),
            (16, 256, 8, 4), (16, 256, 8, 3), (16, 256, 16, 3), (16, 128, 16, 4), (8, 256, 8, 4),
            (8, 256, 8, 2), (8, 512, 8, 1), (8, 512, 4, 2), (8, 1024, 8, 1), (8, 1024, 4, 1),
        ),
    },
)  # fmt: skip
# Places of a ring, as many as fit and fewer (gemv_tma.config).
_STREAMED: ByBlock = {
    16: tuple(
        (64, block_k, 4, places)
        for block_k, counts in ((512, (6, 5, 4, 3, 2)), (256, (12, 10, 8, 6)), (128, (16, 12)))
        for places in counts
    ),
}


def rows_span(problem: Problem, path: str, block_m: int) -> tuple[float, float]:
    """Mean rows of an expert between which block_m is worth a try; ROWS has the block_m."""
    least, most = ROWS[path][block_m]
    if path == ALIGNED and problem.scheme.packed and block_m <= _OWN_KERNEL:
        most = _OWN_ROWS
    return least, most


def entries(problem: Problem, path: str) -> tuple[ByBlock, ByBlock]:
    """Entries for the GEMMs of `problem` on `path`, by block_m; the regimes' come beside them."""
    if path == STREAMED:
        return _STREAMED, _STREAMED
    if path == SINGLE:
        return _PACKED if problem.scheme.packed else _SINGLE
    both = _both(problem, path)
    return both, both


def _both(problem: Problem, path: str) -> ByBlock:
    scheme = problem.scheme
    if problem.dtype is torch.float32:
        return {}
    if path == DEQUANTISED:
        return _PERMUTED_HALF
    if path == PERMUTED:
        if scheme.granularity == "block":
            return _PERMUTED_BLOCK
        return _PERMUTED_W8A8 if scheme.quantises_activations else _PERMUTED_HALF
    if scheme.quantises_activations:
        return _W8A8_BLOCK if scheme.granularity == "block" else _W8A8
    if scheme.packed:
        known = _MXFP4 if scheme.weight == "float4_e2m1" else _WEIGHT_ONLY
        # Short blocks have a kernel of their own that chooses for itself (aligned_w4.path).
        return {block_m: rows for block_m, rows in known.items() if block_m > _OWN_KERNEL}
    return _WEIGHT_ONLY if scheme.quantised else _HALF
