"""Supported problems, limits, launches and tuning candidates of the grouped_tma path."""

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
MODES = {"none": "plain", "fp8_w8a8_channel": "channel", "fp8_w8a8_block": "block"}
_BLOCK = (128, 128)
# Possible weight rows of half a tile, by MODE. With block scales, partial sums take registers in
# addition to the accumulators, so there are no wide tiles.
_HALVES = {"plain": (64, 128), "channel": (64, 128), "block": (64,)}
MAX_ADAPTERS = 8  # maximum adapter slots; each one in a tile adds K steps
# Mean rows per expert from which the path is used by default, and up to which its tiles are narrow.
# Measured on one H200 (2026-11-28, triton 3.6.0) on seven layers of E 48 to 256, H 2048 to 8192,
# I 1024 to 3584. Time relative to the aligned path: bf16 0.97 to 1.02 with 48 rows and 0.87 to 0.91
# with 64; fp8 with block scales 1.03 to 1.07 with 48, 1.01 to 1.05 with 52 and 0.84 to 0.92 with
# 64. Time of narrow tiles relative to wide ones: 0.96 to 1.00 with 64 rows, 0.99 to 1.03 with 96
# and 1.03 to 1.16 with 128.
_MIN_ROWS = {"plain": 48, "channel": 56, "block": 56}
_MAX_NARROW_ROWS = 88
_STAGING_BYTES_PER_COLUMN = (
    BLOCK_M * 2
)  # bytes of a column of results in the staging buffers, 16 bits each
_MAX_STAGES = 6  # stages that fit in the shared memory of sm_90 with the narrowest tile


def supports(problem: Problem, device: Device) -> bool:
    """Return whether the kernels of this path support `problem` on `device`."""
    if not supports_tma(problem, device, MODES) or not _one_scale_a_half(problem):
        return False
    if problem.adapters is not None and not _supports_adapters(problem):
        return False
    itemsize = 1 if problem.scheme.quantized else problem.dtype.itemsize
    widths = (problem.hidden, problem.intermediate)
    return not problem.apply_router_weight_on_input and all(
        width * itemsize % TMA_BYTES == 0 for width in widths
    )


def min_tokens(problem: Problem) -> int:
    """Return the smallest call for which this path is used without a tuned file, in tokens."""
    return _MIN_ROWS[MODES[problem.scheme.name]] * problem.experts // problem.top_k


def narrow_tokens(problem: Problem) -> int:
    """Return the largest call that uses narrow tiles without a tuned file, in tokens."""
    return _MAX_NARROW_ROWS * problem.experts // problem.top_k


def _supports_adapters(problem: Problem) -> bool:
    """Return whether B of every slot can be loaded by TMA, as extra K steps of 16-bit weights.

    With interleaved gate and up rows, a TMA box has rows of both, so both must use the same u.
    """
    spec = problem.adapters
    assert spec is not None
    shares_u = spec.a13_shared or not problem.act.gated or not problem.act.interleaved
    fits = spec.adapters <= MAX_ADAPTERS and spec.rank * problem.dtype.itemsize % TMA_BYTES == 0
    return MODES[problem.scheme.name] == "plain" and shares_u and fits


def _one_scale_a_half(problem: Problem) -> bool:
    """Return whether each half of a tile lies in one scale block of the weights, if any."""
    if problem.scheme.granularity != "block":
        return True
    gate_then_up = problem.act.gated and not problem.act.interleaved
    aligned = problem.intermediate % max(_HALVES["block"]) == 0
    return problem.scheme.group == _BLOCK and (aligned or not gate_then_up)


def gathers_tokens(problem: Problem) -> bool:
    """Return whether GEMM 1 gathers tokens itself, so that no launch permutes them.

    Its copies run ahead into the next tile, but not past it, so a tile must have at least as many K
    steps as the copies are ahead.
    """
    itemsize = 1 if problem.scheme.quantized else problem.dtype.itemsize
    steps = -(-problem.hidden * itemsize // BOX_BYTES)
    if problem.adapters is not None:  # u is in sorted order
        return False
    return MODES[problem.scheme.name] != "block" and steps >= _MAX_STAGES - 1


def half_rows(tile: LaunchConfig, sides: int) -> int:
    """Return the weight rows of half a tile: its gate rows, or those of half its columns."""
    return tile.block_n if sides == 2 else tile.block_n // 2


def _ring_bytes(tile: LaunchConfig, half: int) -> int:
    return tile.num_stages * (BLOCK_M + 2 * half) * BOX_BYTES


def staging_slots(tile: LaunchConfig, half: int, columns: int) -> int:
    """Return the staging buffers (boxes of `columns` columns) per warpgroup: 2 if they fit, else 1.

    With two, the second box of a tile need not wait until the first has been stored.
    """
    fit = _ring_bytes(tile, half) + 2 * _STAGING_BYTES_PER_COLUMN * columns <= Device().shared
    return 2 if fit else 1


def violations(tile: LaunchConfig, gemm: Gemm, mode: str, device: Device) -> Iterator[Violation]:
    """Yield every reason why `tile` cannot be launched on this path."""
    step = BOX_BYTES * 8 // gemm.a_bits
    halves = _HALVES[mode]
    fixed = (
        ("block_m", tile.block_m, BLOCK_M),
        ("block_k", tile.block_k, step),
        ("num_warps", tile.num_warps, 4),
    )
    for name, got, need in fixed:
        if got != need:
            yield Violation(name, got, f"{need} on the {NAME} path")
    half = half_rows(tile, gemm.num_matrices)
    if half not in halves:
        sizes = (h if gemm.num_matrices == 2 else 2 * h for h in halves)
        yield Violation("block_n", tile.block_n, f"one of {tuple(sizes)} on the {NAME} path")
        return
    shared_bytes = _ring_bytes(tile, half) + _STAGING_BYTES_PER_COLUMN * half
    if shared_bytes > device.shared:
        yield Violation("bytes of shared memory", shared_bytes, f"<= {device.shared}")


def default_config(problem: Problem, tokens: int | None = None) -> MoEConfig:
    """Return the launches of a call without a tuned file; tokens = None means many."""
    mode = MODES[problem.scheme.name]
    half, num_stages = (64, 6) if mode == "block" else (128, 4)
    if mode == "plain" and tokens is not None and tokens <= narrow_tokens(problem):
        half, num_stages = 64, 5
    block_k = BOX_BYTES // (1 if problem.scheme.quantized else problem.dtype.itemsize)
    first = half if problem.act.gated else 2 * half
    launch1, launch2 = (
        LaunchConfig(BLOCK_M, n, block_k, 8, 4, num_stages) for n in (first, 2 * half)
    )
    return MoEConfig(launch1, launch2, NAME)


_ROWS: RowRanges = {128: (48, 1 << 62)}
# Steps have 128 bytes along K for every dtype.
_HALF: EntryTable = {
    128: (
        (256, 64, 4, 4, 8), (256, 64, 4, 4, 4), (256, 64, 4, 4, 16), (256, 64, 4, 4, 32),
        (256, 64, 4, 3, 8), (128, 64, 4, 6, 8), (128, 64, 4, 6, 16), (128, 64, 4, 5, 8),
    ),
}  # fmt: skip
_W8A8: EntryTable = {128: tuple((n, 128, warps, *more) for n, _, warps, *more in _HALF[128])}
_BLOCK_CANDIDATES: EntryTable = {
    128: tuple(
        (128, 128, 4, num_stages, group) for num_stages in (6, 5) for group in (4, 8, 16, 32)
    )
}


def candidates(problem: Problem, tokens: int, rows: RowRanges = _ROWS) -> CandidateGroups:
    """Return the launches to time for `tokens` tokens."""
    scheme, table = problem.scheme, _HALF
    if scheme.quantized:
        table = _BLOCK_CANDIDATES if scheme.granularity == "block" else _W8A8
    return build_candidate_groups(select_blocks(rows, problem, tokens), (table, table), problem)
