"""Supported problems, limits, chunk size, launches and tuning candidates of the grouped_w4 path."""

from collections.abc import Iterator

import torch

from experts.triton.candidates import (
    CandidateGroups,
    EntryTable,
    RowRanges,
    build_candidate_groups,
    select_blocks,
)
from experts.triton.dequantized import dequantized_config as dequantized
from experts.triton.dequantized.dequantized_config import without_quant
from experts.triton.grouped_w4.layout import (
    BLOCK,
    BLOCKS_PER_TILE,
    GROUP,
    LINE,
    LINES,
    SCALE_LINE,
    PackedFormat,
    packed_format_of,
)
from experts.triton.launch_config import Device, Gemm, LaunchConfig, MoEConfig, Violation
from experts.triton.operands import scale_group
from modular_kernel.spec.problem import Problem, dtype_name

NAME = "grouped_w4"

# Possible values of block_m, and as many stages as fit for each. With 128, the float32 accumulators
# of two blocks take half the registers of a thread.
_BLOCK_M_VALUES = (32, 64, 128)
_STAGES = {32: 11, 64: 8, 128: 6}
# Mean rows per expert from which and up to which the path is used by default, and from which tiles
# have 128 rows, not 64. Measured on one H200 (2026-11-26, triton 3.6.0) on Mixtral, DeepSeek-V3
# EP8, Qwen3-30B and, for mxfp4, gpt-oss. Time relative to the other paths, by rows per expert:
#   mxfp4, plain or repacked: 0.99 to 1.32 with 32, 0.73 to 0.83 with 48, 0.87 to 0.96 with 512,
#     0.90 to 1.04 with 768
#   integers: 0.77 with 24 and zero points; 0.78 to 0.87 with 48; with 256, 0.84 to 0.98, 0.77 to
#     0.91 and 0.69 to 0.84 for scales of float32, float16 and bf16
#   NVFP4: 0.74 with 48, 0.90 to 1.04 with 128
_MIN_ROWS, _MIN_ROWS_WITH_ZEROS, _MIN_ROWS_OF_128 = 40, 24, 56
_MAX_ROWS = {"mxfp4_w4a16": 640, "nvfp4_w4a16": 128, "int4_w4a16_group": 320}
# For calls with prepared weights: mean rows per expert from which the path is used, and from which
# tiles have 64 and 128 rows, not 32. Measured on one H200 (2026-11-28, triton 3.6.0) on layers of
# E 32 to 160, H 2048 to 5120, I 1024 to 2880. Time of tiles of 32 rows, by rows per expert:
#   relative to weights that are not prepared: mxfp4 0.91 to 0.95 with 6 and 0.61 to 0.63 with 16,
#     int4 0.96 to 1.03 with 10
#   relative to tiles of 64 rows, all multiplied: 0.74 to 0.77 with 12.8 (int4: 0.84 to 0.85)
#   relative to tiles of 64 rows that multiply up to 32 rows as half a tile: 1 with 24, 1.15 to 1.31
#     with 32
_MIN_PREPARED = {"mxfp4_w4a16": 6, "nvfp4_w4a16": 8, "int4_w4a16_group": 10}
_MIN_PREPARED_OF_64, _MIN_PREPARED_OF_128 = 22, 56
# Mean rows per expert up to which prepared weights are used, by scale dtype. Time relative to
# weights that are not prepared: float32 scales 1.04 with 640 rows; float16 0.94 with 640 and 0.97
# to 1.09 with 1024; bf16 scales with zero points, and NVFP4, 1.04 to 1.08 with 4096. There is no
# limit for mxfp4, or for integers with bf16 scales without zero points: they are as fast.
_MAX_PREPARED = {"float32": 512, "float16": 768}
_MAX_PREPARED_WITH_ZEROS = 2048
_COLUMNS = BLOCK * BLOCKS_PER_TILE  # weight rows per tile
_MAX_BYTES = 1 << 30  # maximum size of the tiled weights, unless one expert is larger
_WORD = 4
_SCHEMES = ("mxfp4_w4a16", "nvfp4_w4a16", "int4_w4a16_group")
_BF16_BYTES = 2  # bytes per element of tokens and results
_PARTS = 2  # consumer warpgroups, each with its own staging buffers
_BARRIERS = 1 << 10  # upper bound on the bytes of barriers

_CANDIDATE_ROWS: RowRanges = {32: (6, 48), 64: (16, 160), 128: (48, 1 << 62)}
_ENTRIES: EntryTable = {
    32: ((_COLUMNS, BLOCK, 4, 11, 8), (_COLUMNS, BLOCK, 4, 8, 8)),
    64: ((_COLUMNS, BLOCK, 4, 8, 8), (_COLUMNS, BLOCK, 4, 8, 16)),
    128: tuple((_COLUMNS, BLOCK, 4, 6, group) for group in (8, 4, 16)),
}


def supports(problem: Problem, device: Device) -> bool:
    """Return whether the path supports `problem`: 4-bit weights and bf16 activations."""
    scheme, depths = problem.scheme, (problem.hidden, problem.intermediate)
    if scheme.name not in _SCHEMES or not dequantized.supports(problem, device):
        return False
    groups = (0,) if scheme.matrix_scales else (scale_group(scheme, k)[1] for k in depths)
    return all(k % GROUP == 0 for k in (*depths, *groups))


def packed_formats(problem: Problem) -> tuple[PackedFormat, PackedFormat]:
    """Return the formats of tiled w1 and w2 for float32 scales.

    Those for other scales have the same sizes.
    """
    return packed_format_of(problem.scheme, problem.hidden), packed_format_of(
        problem.scheme, problem.intermediate
    )


def box_bytes(packed_format: PackedFormat) -> int:
    """Return the bytes of words and scales in a box: one K step of a tile."""
    return _WORD * (LINES * LINE + packed_format.lines * SCALE_LINE)


def violations(
    tile: LaunchConfig, gemm: Gemm, problem: Problem, device: Device
) -> Iterator[Violation]:
    """Yield every reason why `tile` cannot be launched for this GEMM on this path."""
    if tile.block_m not in _BLOCK_M_VALUES:
        yield Violation("block_m", tile.block_m, f"one of {_BLOCK_M_VALUES} on the {NAME} path")
    fixed = (
        ("block_n", tile.block_n, _COLUMNS // gemm.num_matrices),
        ("block_k", tile.block_k, BLOCK),
        ("num_warps", tile.num_warps, 4),
    )
    for name, got, need in fixed:
        if got != need:
            yield Violation(name, got, f"{need} on the {NAME} path")
    shared_bytes = _shared_bytes(tile, 1, packed_formats(problem)[gemm.index - 1])
    if shared_bytes > device.shared:
        yield Violation("bytes of shared memory", shared_bytes, f"<= {device.shared}")


def _shared_bytes(tile: LaunchConfig, slots: int, packed_format: PackedFormat) -> int:
    """Return an upper bound on the shared memory with `slots` staging buffers per warpgroup."""
    box = tile.block_m * BLOCK * _BF16_BYTES  # bytes per stage of tokens, or per staging buffer
    return tile.num_stages * (box + box_bytes(packed_format)) + _PARTS * slots * box + _BARRIERS


def staging_slots(tile: LaunchConfig, packed_format: PackedFormat, *, gated: bool) -> int:
    """Return the staging buffers per warpgroup: 2 if it stores two boxes and they fit, else 1."""
    return 1 if gated or _shared_bytes(tile, 2, packed_format) > Device().shared else 2


def short_rows(tile: LaunchConfig) -> int:
    """Return the number of rows up to which a tile is multiplied as half a tile."""
    return tile.block_m // 2


def boxes_per_expert(problem: Problem) -> tuple[int, int]:
    """Return the boxes (K steps of tiles) in w1 and in w2 of one expert."""
    sides = 2 if problem.act.gated else 1
    w1_boxes = -(-problem.intermediate * sides // _COLUMNS) * -(-problem.hidden // BLOCK)
    w2_boxes = -(-problem.hidden // _COLUMNS) * -(-problem.intermediate // BLOCK)
    return w1_boxes, w2_boxes


def chunk_size(problem: Problem) -> int:
    """Return the number of experts that are tiled and multiplied at a time."""
    boxes_and_formats = zip(boxes_per_expert(problem), packed_formats(problem), strict=True)
    largest = max(boxes * box_bytes(packed_format) for boxes, packed_format in boxes_and_formats)
    parts = -(-problem.e // max(1, _MAX_BYTES // largest))
    return -(-problem.e // parts)


def min_tokens(problem: Problem) -> int:
    """Return the smallest call for which this path is used without a tuned file, in tokens."""
    rows = _MIN_ROWS_WITH_ZEROS if problem.scheme.zero_points else _MIN_ROWS
    return -(-rows * problem.experts // problem.top_k)


def max_tokens(problem: Problem) -> int:
    """Return the largest call for which this path is used without a tuned file, in tokens."""
    return _MAX_ROWS[problem.scheme.name] * problem.experts // problem.top_k


def max_prepared_tokens(problem: Problem, scale: torch.dtype) -> int | None:
    """Return the largest call, in tokens, that uses prepared weights; None: any.

    scale: dtype of the scales of the weights.
    """
    scheme, max_rows = problem.scheme, None
    if scheme.matrix_scales or scheme.zero_points:
        max_rows = _MAX_PREPARED_WITH_ZEROS
    if scheme.weight == "uint4":
        max_rows = _MAX_PREPARED.get(dtype_name(scale), max_rows)
    return None if max_rows is None else max_rows * problem.experts // problem.top_k


def breakpoints(problem: Problem) -> tuple[int, ...]:
    """Return the token counts after which the launches change.

    They are the last one before the path, the last one with tiles of 64 rows, and the last one with
    the path.
    """
    last_short = -(-_MIN_ROWS_OF_128 * problem.experts // problem.top_k) - 1
    return min_tokens(problem) - 1, last_short, max_tokens(problem)


def prepared_configs(problem: Problem) -> tuple[tuple[int, MoEConfig], ...]:
    """Return (minimum tokens, configuration) of calls with prepared weights, ascending."""
    if problem.batch_invariant:  # all calls must use the same tiles
        return ()
    min_tokens = _MIN_PREPARED[problem.scheme.name]
    breakpoints = zip(
        (min_tokens, _MIN_PREPARED_OF_64, _MIN_PREPARED_OF_128), _BLOCK_M_VALUES, strict=True
    )
    return tuple(
        (-(-rows * problem.experts // problem.top_k), default(problem, height))
        for rows, height in breakpoints
    )


def block_m_for(problem: Problem, tokens: int) -> int:
    """Return block_m of a call of `tokens` tokens without prepared weights."""
    return _BLOCK_M_VALUES[1 + (tokens * problem.top_k >= _MIN_ROWS_OF_128 * problem.experts)]


def default(problem: Problem, rows: int = _BLOCK_M_VALUES[-1]) -> MoEConfig:
    """Return the launches with block_m = rows."""
    first = _COLUMNS // (2 if problem.act.gated else 1)
    stages = _STAGES[rows]
    launch1, launch2 = (LaunchConfig(rows, n, BLOCK, 8, 4, stages) for n in (first, _COLUMNS))
    return MoEConfig(launch1, launch2, NAME)


def candidates(problem: Problem, tokens: int) -> CandidateGroups:
    """Return the launches to time for `tokens` tokens."""
    bf16 = without_quant(problem)
    return build_candidate_groups(
        select_blocks(_CANDIDATE_ROWS, bf16, tokens), (_ENTRIES, _ENTRIES), bf16
    )
