"""Configuration of the grouped_tma path: supported layers, limits, default launches and candidates.

A tile is 128 activation rows by two halves of weight rows. Narrow tiles have 64 weight rows per
half, and wide tiles have 128.
"""

from collections.abc import Iterator

from experts.triton.candidates import (
    CandidateGroups,
    EntryTable,
    RowRanges,
    build_candidate_groups,
    select_blocks,
)
from experts.triton.launch_config import Device, Gemm, LaunchConfig, MoEConfig, Violation
from experts.triton.operands import TMA_BYTES, supports_tma
from modular_kernel.spec.problem import Problem

NAME = "grouped_tma"

BOX_BYTES = 128  # bytes along K per step, the widest swizzle of a TMA box
BLOCK_M = 128  # two warpgroups of 64 rows
# Quantization scheme -> MODE of the kernel.
MODE_BY_SCHEME = {"none": "plain", "fp8_w8a8_channel": "channel", "fp8_w8a8_block": "block"}
_BLOCK = (128, 128)
# Possible numbers of weight rows in half a tile, by MODE. With block scales, partial sums take
# registers in addition to the accumulators, so tiles are narrow.
_ROWS_PER_HALF = {"plain": (64, 128), "channel": (64, 128), "block": (64,)}
MAX_ADAPTERS = 8  # maximum number of adapter slots; each slot in a tile adds K steps
# The path is used by default with at least _MIN_ROWS rows per expert on average. Its tiles are
# narrow with at most _MAX_NARROW_ROWS rows. Measured on an H200 (2026-11-28, triton 3.6.0) on seven
# layers with E from 48 to 256, H from 2048 to 8192, and I from 1024 to 3584:
# - bf16, relative to the time of the aligned path: 1.03 with 48 rows (2026-12-01, one layer), 0.87
#   to 0.91 with 64.
# - fp8 with block scales, relative to the time of the aligned path: 1.03 to 1.07 with 48 rows, 1.01
#   to 1.05 with 52, 0.84 to 0.92 with 64.
# - Narrow tiles, relative to the time of wide tiles: 0.96 to 1.00 with 64 rows, 0.99 to 1.03 with
#   96, 1.03 to 1.16 with 128. With skewed routing (2026-12-01): 0.96 to 1.02 with 64 rows, 1.06
#   with 85.
_MIN_ROWS = {"plain": 56, "channel": 56, "block": 56}
_MAX_NARROW_ROWS = 72
# Bytes of one output column of a tile in the staging buffers. An element has 16 bits.
_STAGING_BYTES_PER_COLUMN = BLOCK_M * 2
_MAX_STAGES = 6  # with the narrowest tile, this many stages fit in the shared memory of sm_90


def supports(problem: Problem, device: Device) -> bool:
    """Return whether the kernels of this path support `problem` on `device`."""
    if not supports_tma(problem, device, MODE_BY_SCHEME) or not _has_one_scale_per_half(problem):
        return False
    if problem.adapters is not None and not _supports_adapters(problem):
        return False
    itemsize = 1 if problem.scheme.quantized else problem.dtype.itemsize
    widths = (problem.hidden, problem.intermediate)
    return not problem.apply_router_weight_on_input and all(
        width * itemsize % TMA_BYTES == 0 for width in widths
    )


def min_tokens(problem: Problem) -> int:
    """Return the smallest token count for which this path is used without a tuned file."""
    return _MIN_ROWS[MODE_BY_SCHEME[problem.scheme.name]] * problem.experts // problem.top_k


def max_narrow_tokens(problem: Problem) -> int:
    """Return the largest token count for which tiles are narrow without a tuned file."""
    return _MAX_NARROW_ROWS * problem.experts // problem.top_k


def _supports_adapters(problem: Problem) -> bool:
    """Return whether TMA can load the matrices B in extra K steps of 16-bit weights.

    With interleaved gate and up rows, a TMA box contains gate and up rows, so both must use the
    same columns of u.
    """
    spec = problem.adapters
    assert spec is not None
    is_plain = MODE_BY_SCHEME[problem.scheme.name] == "plain"
    shares_u = spec.a13_shared or not problem.act.gated or not problem.act.interleaved
    is_aligned = spec.rank * problem.dtype.itemsize % TMA_BYTES == 0
    return is_plain and shares_u and is_aligned and spec.adapters <= MAX_ADAPTERS


def _has_one_scale_per_half(problem: Problem) -> bool:
    """Return whether the weight rows of each half of a tile are in a single scale block.

    Return True for schemes without scale blocks.
    """
    if problem.scheme.granularity != "block":
        return True
    has_separate_up = problem.act.gated and not problem.act.interleaved
    is_aligned = problem.intermediate % max(_ROWS_PER_HALF["block"]) == 0
    return problem.scheme.group == _BLOCK and (is_aligned or not has_separate_up)


def gathers_tokens(problem: Problem) -> bool:
    """Return whether GEMM 1 gathers the tokens itself, so that no separate launch permutes them.

    The kernel copies rows a few K steps ahead. These steps may belong to the next tile, but not to
    a later one, so a tile must have at least that many K steps.
    """
    itemsize = 1 if problem.scheme.quantized else problem.dtype.itemsize
    steps = -(-problem.hidden * itemsize // BOX_BYTES)
    if problem.adapters is not None:  # u is in sorted order, so x must also be in sorted order
        return False
    return MODE_BY_SCHEME[problem.scheme.name] != "block" and steps >= _MAX_STAGES - 1


def rows_per_half(tile: LaunchConfig, num_matrices: int) -> int:
    """Return the number of weight rows in half a tile.

    With two matrices, these are the gate rows of the tile. Otherwise, they are the weight rows of
    half of its columns.
    """
    return tile.block_n if num_matrices == 2 else tile.block_n // 2


def _count_ring_bytes(tile: LaunchConfig, half_rows: int) -> int:
    return tile.num_stages * (BLOCK_M + 2 * half_rows) * BOX_BYTES


def num_staging_buffers(tile: LaunchConfig, half_rows: int, columns: int) -> int:
    """Return the number of staging buffers per warpgroup: 2 if they fit in shared memory, or 1.

    With two buffers, the second box of a tile need not wait until the first one is stored.

    half_rows: weight rows in half a tile.
    columns: output columns per buffer.
    """
    staging_bytes = 2 * _STAGING_BYTES_PER_COLUMN * columns
    return 2 if _count_ring_bytes(tile, half_rows) + staging_bytes <= Device().shared else 1


def violations(tile: LaunchConfig, gemm: Gemm, mode: str, device: Device) -> Iterator[Violation]:
    """Yield every limit that prevents `tile` from being launched on this path."""
    fixed_fields = (
        ("block_m", tile.block_m, BLOCK_M),
        ("block_k", tile.block_k, BOX_BYTES * 8 // gemm.a_bits),
        ("num_warps", tile.num_warps, 4),
    )
    for name, got, need in fixed_fields:
        if got != need:
            yield Violation(name, got, f"{need} on the {NAME} path")
    half_rows, allowed_rows = rows_per_half(tile, gemm.num_matrices), _ROWS_PER_HALF[mode]
    if half_rows not in allowed_rows:
        sizes = (rows if gemm.num_matrices == 2 else 2 * rows for rows in allowed_rows)
        yield Violation("block_n", tile.block_n, f"one of {tuple(sizes)} on the {NAME} path")
        return
    shared_bytes = _count_ring_bytes(tile, half_rows) + _STAGING_BYTES_PER_COLUMN * half_rows
    if shared_bytes > device.shared:
        yield Violation("bytes of shared memory", shared_bytes, f"<= {device.shared}")


def default_config(problem: Problem, tokens: int | None = None) -> MoEConfig:
    """Return the configuration without a tuned file for a call of `tokens` tokens.

    If `tokens` is None, return the configuration for many tokens, with wide tiles.
    """
    mode = MODE_BY_SCHEME[problem.scheme.name]
    half_rows, num_stages = (64, 6) if mode == "block" else (128, 4)
    if mode == "plain" and tokens is not None and tokens <= max_narrow_tokens(problem):
        half_rows, num_stages = 64, 5
    block_k = BOX_BYTES // (1 if problem.scheme.quantized else problem.dtype.itemsize)
    block_n1 = half_rows if problem.act.gated else 2 * half_rows
    launch1, launch2 = (
        LaunchConfig(BLOCK_M, block_n, block_k, 8, 4, num_stages)
        for block_n in (block_n1, 2 * half_rows)
    )
    return MoEConfig(launch1, launch2, NAME)


_CANDIDATE_ROWS: RowRanges = {128: (48, 1 << 62)}
# A step has 128 bytes along K, for every dtype.
_HALF_CANDIDATES: EntryTable = {
    128: (
        (256, 64, 4, 4, 8), (256, 64, 4, 4, 4), (256, 64, 4, 4, 16), (256, 64, 4, 4, 32),
        (256, 64, 4, 3, 8), (128, 64, 4, 6, 8), (128, 64, 4, 6, 16), (128, 64, 4, 5, 8),
    ),
}  # fmt: skip
_W8A8_CANDIDATES: EntryTable = {
    128: tuple(
        (weight_rows, 128, num_warps, *stages_and_group_m)
        for weight_rows, _, num_warps, *stages_and_group_m in _HALF_CANDIDATES[128]
    )
}
_BLOCK_CANDIDATES: EntryTable = {
    128: tuple(
        (128, 128, 4, num_stages, group) for num_stages in (6, 5) for group in (4, 8, 16, 32)
    )
}


def candidates(
    problem: Problem, tokens: int, row_ranges: RowRanges = _CANDIDATE_ROWS
) -> CandidateGroups:
    """Return the launches to time for a call of `tokens` tokens."""
    scheme, table = problem.scheme, _HALF_CANDIDATES
    if scheme.quantized:
        table = _BLOCK_CANDIDATES if scheme.granularity == "block" else _W8A8_CANDIDATES
    blocks = select_blocks(row_ranges, problem, tokens)
    return build_candidate_groups(blocks, (table, table), problem)
