"""What the aligned path launches without a tuned file, by the mean rows of an expert."""

from collections.abc import Iterator

import torch

from experts.triton.candidates import ByBlock, Groups, Rows, groups, worth
from experts.triton.launch_config import (
    Device,
    Gemm,
    LaunchConfig,
    MoEConfig,
    clamped,
    gemms,
    require,
    starts_on_16,
)
from modular_kernel.spec.problem import Problem

NAME = "aligned"

_LEAST_HALVED = 128  # shallower steps cost more than masks: gpt-oss, depth 2880, H200, 2026-11-20
_LEAST_STAGES = 3  # of a shallow product: Qwen3-30B, depth 768, H200, 2026-11-20
# block_m of tiles for every number of tokens: a warpgroup's product has 64 rows, and where an
# expert has fewer, weights still take longer to arrive than to be multiplied.
_FIXED_ROWS = 64

# By the mean rows of an expert, up to the first number: (block_n, block_k, warps, stages) of GEMM 1
# and GEMM 2, and the swizzle group. Measured on one H200 (2026-11-20, triton 3.6.0, bf16) as the
# best mean over Mixtral, DeepSeek-V3 EP8, Qwen3-30B and gpt-oss from 1 to 8192 tokens.
_Row = tuple[int | None, int, tuple[int, int, int, int], tuple[int, int, int, int], int]
_HALF: tuple[_Row, ...] = (
    (10, 16, (64, 128, 4, 3), (64, 128, 4, 4), 1),
    (24, 32, (64, 64, 4, 6), (64, 128, 4, 4), 8),
    (48, 64, (64, 64, 4, 4), (128, 128, 8, 4), 16),
    (None, 128, (128, 64, 8, 3), (256, 64, 8, 4), 16),
)
# Float32 products take twice the shared memory, and without tensor cores gain nothing from width.
_FLOAT32: tuple[_Row, ...] = (
    (24, 16, (32, 32, 4, 3), (64, 32, 4, 3), 1),
    (None, 64, (32, 32, 4, 2), (64, 32, 4, 2), 8),
)
# Rows that start off a 16-element boundary load value by value: larger tiles spill registers.
_UNALIGNED: tuple[_Row, ...] = (
    (24, 16, (32, 32, 4, 3), (64, 32, 4, 3), 1),
    (None, 64, (64, 32, 8, 3), (128, 32, 8, 3), 8),
)


# Both operands 8 bits: one scale per row and column, or one per block along the depth, whose
# partial sums need registers of their own. Same machine and shapes, 1 to 4096 tokens.
_W8A8: tuple[_Row, ...] = (
    (12, 16, (64, 256, 4, 3), (64, 256, 4, 4), 1),
    (24, 32, (64, 128, 4, 5), (64, 256, 4, 4), 8),
    (80, 64, (64, 128, 4, 3), (128, 128, 4, 4), 16),
    (None, 128, (64, 128, 4, 3), (256, 128, 8, 3), 16),
)
# One scale per tensor comes with strides of zero, known only at run time: four warps spill.
_W8A8_TENSOR: tuple[_Row, ...] = (*_W8A8[:-1], (None, 128, (64, 128, 8, 3), (256, 128, 8, 3), 16))
_W8A8_BLOCK: tuple[_Row, ...] = (
    (12, 16, (64, 128, 4, 6), (64, 128, 4, 4), 1),
    (24, 32, (64, 128, 4, 5), (64, 128, 4, 4), 8),
    (300, 64, (64, 128, 4, 4), (128, 128, 4, 3), 16),
    (None, 128, (64, 128, 8, 4), (128, 128, 8, 3), 16),
)
# Weights that are dequantized on the way need registers for it; e2m1's groups of 32 bound a step,
# so more of them are kept in flight.
_W8A16: tuple[_Row, ...] = (
    (10, 16, (32, 128, 4, 4), (64, 128, 4, 4), 1),
    (48, 32, (64, 128, 8, 3), (128, 64, 8, 3), 1),
    (None, 64, (64, 64, 8, 3), (128, 64, 8, 3), 16),
)
_W4A16: tuple[_Row, ...] = (
    (24, 16, (64, 128, 4, 4), (128, 128, 4, 4), 1),
    (None, 32, (64, 64, 4, 4), (128, 64, 4, 3), 1),
)
_W4A16_STEP = 128  # of the deepest tiles above
# Masks along the depth, and zero points, take registers from four warps of larger tiles.
_W4A16_UNEVEN: tuple[_Row, ...] = (
    (24, 16, (32, 64, 4, 4), (64, 64, 4, 4), 1),
    (None, 32, (64, 64, 8, 3), (128, 64, 8, 3), 1),
)
_MXFP4: tuple[_Row, ...] = (
    (24, 16, (64, 32, 4, 6), (64, 32, 4, 8), 1),
    (96, 32, (64, 32, 4, 4), (256, 32, 4, 4), 1),
    (192, 32, (64, 32, 4, 4), (128, 32, 8, 6), 1),
    (None, 128, (32, 32, 4, 3), (64, 32, 4, 3), 16),
)


def _table(problem: Problem) -> tuple[_Row, ...]:
    if problem.dtype is torch.float32:
        return _FLOAT32
    if not starts_on_16(problem):
        return _UNALIGNED
    scheme = problem.scheme
    if scheme.quantizes_activations:
        return {"block": _W8A8_BLOCK, "tensor": _W8A8_TENSOR}.get(scheme.granularity, _W8A8)
    if scheme.weight == "float4_e2m1":
        return _MXFP4
    if scheme.packed:
        even = all(gemm.depth % _W4A16_STEP == 0 for gemm in gemms(problem))
        return _W4A16 if even else _W4A16_UNEVEN
    if scheme.quantized:
        return _W8A16
    return _HALF


def turns(problem: Problem) -> Iterator[int]:
    """Yield the most tokens of each row of the table, but for the last."""
    if problem.batch_invariant:
        return
    for most, *_ in _table(problem)[:-1]:
        assert most is not None
        yield most * problem.experts // problem.top_k


def default(problem: Problem, tokens: int, device: Device) -> MoEConfig:
    """Return the configuration of a call of `tokens` tokens without a tuned file.

    block_k is halved (down to 128) if that makes it divide the depth of the product, which spares
    the masks along it, or if the depth has few steps, which also get fewer stages; a tile too large
    for the scheme's groups or the device is made smaller. Where sums may not depend on the number
    of tokens it is the same for all: the row of the most rows up to _FIXED_ROWS, the first of
    several. ConfigurationError where the scheme's groups allow no tile.
    """
    table = _table(problem)
    if problem.batch_invariant:
        row = max(table, key=lambda row: row[1] if row[1] <= _FIXED_ROWS else 0)
    else:
        row = table[sum(tokens > most for most in turns(problem))]
    _, block_m, one, two, group_m = row
    (first, second), blocks = gemms(problem), (block_m, group_m)
    tiles = _tile(one, first, device, blocks), _tile(two, second, device, blocks)
    return MoEConfig(*tiles, NAME)


def _too_few(steps: int, stages: int) -> bool:
    """Whether a pipeline holds so much of the depth that more blocks at a time are worth more."""
    return steps * 2 < stages * 3


def _tile(
    choice: tuple[int, int, int, int], gemm: Gemm, device: Device, blocks: tuple[int, int]
) -> LaunchConfig:
    block_n, block_k, warps, stages = choice
    block_m, group_m = blocks
    half, steps = block_k // 2, -(-gemm.depth // block_k)
    spares_masks = gemm.depth % block_k and gemm.depth % half == 0
    if (spares_masks or _too_few(steps, stages)) and half >= _LEAST_HALVED:
        block_k, steps = half, -(-gemm.depth // half)
    if _too_few(steps, stages):
        stages = min(stages, max(_LEAST_STAGES, steps * 2 // 3))
    tile = LaunchConfig(block_m, block_n, block_k, group_m, warps, stages)
    return require(clamped(tile, gemm, device), gemm, device, "launch without a tuned file")


ROWS: Rows = {16: (0, 24), 32: (8, 80), 64: (20, 600), 128: (60, 1 << 62)}
_SHORT = 16  # block_m for which 4-bit weights have a path of their own

_HALF_CANDIDATES: ByBlock = {
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
_W8A8_CANDIDATES: ByBlock = {
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
_W8A8_BLOCK_CANDIDATES: ByBlock = {
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
# Weights that are dequantized on the way: they take registers, so that tall blocks are narrow.
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
_MXFP4_CANDIDATES: ByBlock = {
    32: (
        (64, 32, 4, 4), (128, 32, 4, 4), (128, 32, 8, 4), (128, 32, 8, 6), (256, 32, 4, 4),
        (256, 32, 8, 4),
    ),
    64: ((64, 32, 4, 4), (64, 32, 8, 4), (128, 32, 8, 4)),
    128: ((64, 32, 4, 3), (64, 32, 8, 3), (64, 32, 8, 4)),
}  # fmt: skip


def candidates(problem: Problem, tokens: int) -> Groups:
    """Return launches worth timing with so many tokens; those without a tuned file come beside."""
    known = entries(problem)
    return groups(worth(ROWS, problem, tokens), (known, known), problem)


def entries(problem: Problem) -> ByBlock:
    """Return the entries for either GEMM of `problem`."""
    scheme = problem.scheme
    if problem.dtype is torch.float32:
        return {}
    if scheme.quantizes_activations:
        return _W8A8_BLOCK_CANDIDATES if scheme.granularity == "block" else _W8A8_CANDIDATES
    if scheme.packed:
        known = _MXFP4_CANDIDATES if scheme.weight == "float4_e2m1" else _WEIGHT_ONLY
        return {block_m: rows for block_m, rows in known.items() if block_m > _SHORT}
    return _WEIGHT_ONLY if scheme.quantized else _HALF_CANDIDATES
