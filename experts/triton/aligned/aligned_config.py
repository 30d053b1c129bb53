"""Default launches of the aligned path, and the launches that `mk tune` times.

Both depend on the mean number of rows per expert, tokens * top_k / experts. In the names of tables,
W8A8 means 8-bit weights and activations, W8A16 and W4A16 mean 8- and 4-bit weights with 16-bit
activations, and HALF means unquantized 16-bit types.
"""

from collections.abc import Iterator
from functools import cache

import torch

from experts.triton.candidates import (
    CandidateGroups,
    EntryTable,
    RowRanges,
    build_candidate_groups,
    select_blocks,
)
from experts.triton.launch_config import (
    Device,
    Gemm,
    LaunchConfig,
    MoEConfig,
    clamp,
    gemms,
    require,
    rows_aligned_to_16,
)
from modular_kernel.spec.problem import Problem

NAME = "aligned"

# block_k is not halved below this value, because masks along K cost less than smaller steps
# (gpt-oss, K = 2880, H200, 2026-11-20).
_MIN_HALVED_K = 128
_MIN_STAGES = 3  # minimum for a small K (Qwen3-30B, K = 768, H200, 2026-11-20)
# Maximum block_m of a batch-invariant problem. Smaller blocks are not faster: wgmma has M = 64, and
# with few rows per expert, most of the time is spent loading weights.
_MAX_FIXED_BLOCK_M = 64

# (max mean rows per expert, block_m, (block_n, block_k, warps, stages) of GEMM 1, the same for
# GEMM 2, group_m). These launches have the best mean time over Mixtral, DeepSeek-V3 EP8, Qwen3-30B
# and gpt-oss from 1 to 8192 tokens, on one H200 (2026-11-20, triton 3.6.0, bf16). With 3 to 56 rows
# per expert, the launches of _HALF and _W8A8_BLOCK are chosen for uniform routing and for skewed
# routing, in which few experts get most of the tokens (2026-12-01, twelve layers, 64 to 1024
# tokens). Larger blocks and groups take up to 8% less time with skewed routing, and up to 4% more
# with uniform routing.
_Row = tuple[int | None, int, tuple[int, int, int, int], tuple[int, int, int, int], int]
_HALF: tuple[_Row, ...] = (
    (10, 16, (64, 128, 4, 3), (64, 128, 4, 4), 32),
    (20, 32, (64, 64, 4, 6), (64, 128, 4, 4), 32),
    (56, 64, (64, 64, 4, 4), (128, 64, 4, 4), 8),
    (None, 128, (128, 64, 8, 3), (256, 64, 8, 4), 16),
)
# Float32 tiles take twice the shared memory. Without tensor cores, larger tiles are not faster.
_FLOAT32: tuple[_Row, ...] = (
    (24, 16, (32, 32, 4, 3), (64, 32, 4, 3), 1),
    (None, 64, (32, 32, 4, 2), (64, 32, 4, 2), 8),
)
# Rows that are not aligned to 16 elements are loaded element by element, and larger tiles spill.
_UNALIGNED: tuple[_Row, ...] = (
    (24, 16, (32, 32, 4, 3), (64, 32, 4, 3), 1),
    (None, 64, (64, 32, 8, 3), (128, 32, 8, 3), 8),
)


# Both operands have 8 bits. _W8A8 is for one scale per row. _W8A8_BLOCK is for one scale per block
# along K, where partial sums take extra registers. Measured like _HALF, from 1 to 4096 tokens.
_W8A8: tuple[_Row, ...] = (
    (12, 16, (64, 256, 4, 3), (64, 256, 4, 4), 1),
    (24, 32, (64, 128, 4, 5), (64, 256, 4, 4), 8),
    (80, 64, (64, 128, 4, 3), (128, 128, 4, 4), 16),
    (None, 128, (64, 128, 4, 3), (256, 128, 8, 3), 16),
)
# With per-tensor scales, whose zero strides are not known at compile time, four warps spill.
_W8A8_TENSOR: tuple[_Row, ...] = (*_W8A8[:-1], (None, 128, (64, 128, 8, 3), (256, 128, 8, 3), 16))
_W8A8_BLOCK: tuple[_Row, ...] = (
    (12, 16, (64, 128, 4, 5), (64, 128, 4, 5), 32),
    (14, 32, (64, 128, 4, 5), (64, 128, 4, 4), 32),
    (300, 64, (64, 128, 4, 4), (128, 128, 4, 3), 16),
    (None, 128, (64, 128, 8, 4), (128, 128, 8, 3), 16),
)
# Dequantizing weights takes registers, so tiles are smaller. The groups of 32 of mxfp4 limit
# block_k, so more stages are in flight.
_W8A16: tuple[_Row, ...] = (
    (10, 16, (32, 128, 4, 4), (64, 128, 4, 4), 1),
    (48, 32, (64, 128, 8, 3), (128, 64, 8, 3), 1),
    (None, 64, (64, 64, 8, 3), (128, 64, 8, 3), 16),
)
_W4A16: tuple[_Row, ...] = (
    (24, 16, (64, 128, 4, 4), (128, 128, 4, 4), 1),
    (None, 32, (64, 64, 4, 4), (128, 64, 4, 3), 1),
)
_W4A16_STEP = 128  # largest block_k in _W4A16
# For K that is not a multiple of _W4A16_STEP. With masks along K and zero points, larger tiles
# spill with four warps.
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


# block_m -> (block_n, block_k, warps, stages) of both GEMMs, for 16-bit weights whose N is
# contiguous. With these launches, a layer takes at most 9% longer than with the fastest candidate,
# on one H200 with gpt-oss and with E=64, H=2048, I=1024, from 1 to 4096 tokens (2026-11-30, triton
# 3.6.0). block_m 32 was not measured.
_N_MAJOR = {
    16: ((64, 64, 4, 6), (64, 128, 4, 4)),
    32: ((64, 64, 4, 4), (128, 64, 4, 4)),
    64: ((64, 64, 4, 3), (128, 64, 4, 3)),
    128: ((128, 32, 8, 5), (256, 64, 8, 4)),
}


def _select_table(problem: Problem) -> tuple[_Row, ...]:
    if problem.dtype is torch.float32:
        return _FLOAT32
    if not rows_aligned_to_16(problem):
        return _UNALIGNED
    scheme = problem.scheme
    if scheme.quantizes_activations:
        return {"block": _W8A8_BLOCK, "tensor": _W8A8_TENSOR}.get(scheme.granularity, _W8A8)
    if scheme.weight == "float4_e2m1":
        return _MXFP4
    if scheme.packed:
        is_multiple_of_step = all(gemm.size_k % _W4A16_STEP == 0 for gemm in gemms(problem))
        return _W4A16 if is_multiple_of_step else _W4A16_UNEVEN
    if scheme.quantized:
        return _W8A16
    return _HALF


def breakpoints(problem: Problem) -> Iterator[int]:
    """Yield the largest token count of each row of the table except the last row."""
    if problem.batch_invariant:
        return
    for max_rows, *_ in _select_table(problem)[:-1]:
        assert max_rows is not None
        yield max_rows * problem.experts // problem.top_k


def default_config(problem: Problem, tokens: int, device: Device) -> MoEConfig:
    """Return the configuration of a call of `tokens` tokens without a tuned file.

    The launches are taken from the table row for the mean rows per expert, with these changes.
    block_k is halved (down to 128) if the half divides K and block_k does not, which saves the
    masks along K. If K has few steps, block_k is also halved and the number of stages is reduced. A
    tile too large for the scale groups or the device is clamped.

    A batch-invariant problem uses one row for all token counts: the first with the largest block_m
    up to _MAX_FIXED_BLOCK_M. Raise ConfigurationError if the scale groups allow no tile.
    """
    table = _select_table(problem)
    if problem.batch_invariant:
        row = max(table, key=lambda row: row[1] if row[1] <= _MAX_FIXED_BLOCK_M else 0)
    else:
        row = table[sum(tokens > max_tokens for max_tokens in breakpoints(problem))]
    _, block_m, launch1, launch2, group_m = row
    tile1, tile2 = (
        _make_tile(block_m, group_m, launch, gemm, device)
        for launch, gemm in zip((launch1, launch2), gemms(problem), strict=True)
    )
    return MoEConfig(tile1, tile2, NAME)


@cache
def n_major_config(
    problem: Problem, config: MoEConfig, n_major: tuple[bool, bool], device: Device
) -> MoEConfig:
    """Return `config` with other tiles for the GEMMs whose weights are contiguous along N.

    Weights (experts, N, K) are usually contiguous along K. block_m and group_m do not change.

    n_major: for each GEMM, whether its weights are contiguous along N.
    """
    launches = config.typed_launches(LaunchConfig)
    tiles = _N_MAJOR.get(launches[0].block_m)
    if tiles is None or problem.dtype is torch.float32 or not rows_aligned_to_16(problem):
        return config
    launch1, launch2 = (
        clamp(LaunchConfig(launch.block_m, *tile[:2], launch.group_m, *tile[2:]), gemm, device)
        if is_n_major
        else launch
        for launch, tile, gemm, is_n_major in zip(
            launches, tiles, gemms(problem), n_major, strict=True
        )
    )
    return MoEConfig(launch1, launch2, config.path)


def _has_few_steps(steps: int, stages: int) -> bool:
    """Return whether K has few steps of block_k, compared with the number of pipeline stages.

    Using less shared memory is then faster, because more blocks fit on an SM.
    """
    return steps * 2 < stages * 3


def _make_tile(
    block_m: int, group_m: int, launch: tuple[int, int, int, int], gemm: Gemm, device: Device
) -> LaunchConfig:
    """Return the launch of one GEMM, with the changes that `default_config` describes.

    launch: (block_n, block_k, warps, stages), from a table row.
    """
    block_n, block_k, warps, stages = launch
    half_k, steps = block_k // 2, -(-gemm.size_k // block_k)
    saves_masks = gemm.size_k % block_k and gemm.size_k % half_k == 0
    if (saves_masks or _has_few_steps(steps, stages)) and half_k >= _MIN_HALVED_K:
        block_k, steps = half_k, -(-gemm.size_k // half_k)
    if _has_few_steps(steps, stages):
        stages = min(stages, max(_MIN_STAGES, steps * 2 // 3))
    tile = LaunchConfig(block_m, block_n, block_k, group_m, warps, stages)
    return require(clamp(tile, gemm, device), gemm, device, "launch without a tuned file")


BLOCK_M_ROWS: RowRanges = {16: (0, 24), 32: (8, 80), 64: (20, 600), 128: (60, 1 << 62)}
# Up to this block_m, 4-bit weights are timed on the aligned_w4 path instead.
_MAX_ALIGNED_W4_BLOCK_M = 16

_HALF_CANDIDATES: EntryTable = {
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
_W8A8_CANDIDATES: EntryTable = {
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
_W8A8_BLOCK_CANDIDATES: EntryTable = {
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
# Dequantizing weights takes registers, so tiles with large block_m have small block_n.
_WEIGHT_ONLY: EntryTable = {
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
# Groups of 32 limit block_k.
_MXFP4_CANDIDATES: EntryTable = {
    32: (
        (64, 32, 4, 4), (128, 32, 4, 4), (128, 32, 8, 4), (128, 32, 8, 6), (256, 32, 4, 4),
        (256, 32, 8, 4),
    ),
    64: ((64, 32, 4, 4), (64, 32, 8, 4), (128, 32, 8, 4)),
    128: ((64, 32, 4, 3), (64, 32, 8, 3), (64, 32, 8, 4)),
}  # fmt: skip


def candidates(problem: Problem, tokens: int) -> CandidateGroups:
    """Return the launches to time for `tokens` tokens, in addition to the default ones."""
    table = entries(problem)
    return build_candidate_groups(
        select_blocks(BLOCK_M_ROWS, problem, tokens), (table, table), problem
    )


def entries(problem: Problem) -> EntryTable:
    """Return the candidates of `problem` as table entries, which are the same for both GEMMs."""
    scheme = problem.scheme
    if problem.dtype is torch.float32:
        return {}
    if scheme.quantizes_activations:
        return _W8A8_BLOCK_CANDIDATES if scheme.granularity == "block" else _W8A8_CANDIDATES
    if scheme.packed:
        table = _MXFP4_CANDIDATES if scheme.weight == "float4_e2m1" else _WEIGHT_ONLY
        return {
            block_m: rows for block_m, rows in table.items() if block_m > _MAX_ALIGNED_W4_BLOCK_M
        }
    return _WEIGHT_ONLY if scheme.quantized else _HALF_CANDIDATES
