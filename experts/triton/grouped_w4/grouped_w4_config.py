"""Configuration of the grouped_w4 path: supported layers, limits, default launches and candidates.

The path reorders 4-bit weights to a tiled layout (`layout`) before each GEMM. Prepared weights are
already in this layout, so the path is also fast with fewer rows per expert. "Rows per expert" means
the mean number, tokens * top_k / experts.
"""

import math
from collections.abc import Iterator

import torch

from experts.triton.candidates import (
    CandidateGroups,
    EntryTable,
    RowRanges,
    build_candidate_groups,
    select_blocks,
)
from experts.triton.dequantized import dequantized_config
from experts.triton.dequantized.dequantized_config import remove_quant
from experts.triton.grouped_w4.layout import (
    BLOCK,
    BLOCKS_PER_TILE,
    GROUP,
    LINES_PER_STEP,
    WORDS_PER_LINE,
    WORDS_PER_SCALE_LINE,
    PackedFormat,
    choose_packed_format,
)
from experts.triton.launch_config import Device, Gemm, LaunchConfig, MoEConfig, Violation
from experts.triton.operands import scale_group
from modular_kernel.spec.problem import Problem, dtype_name

NAME = "grouped_w4"

# With block_m 128, the float32 accumulators of two blocks take half of the registers of a thread.
_BLOCK_M_VALUES = (32, 64, 128)
_STAGES = {32: 11, 64: 8, 128: 6}  # block_m -> maximum number of stages that fit
# The path is used by default with _MIN_ROWS to _MAX_ROWS rows per expert. With at least
# _MIN_ROWS_OF_128 rows, tiles have 128 rows instead of 64. Measured on an H200 (2026-11-26, triton
# 3.6.0) on Mixtral, DeepSeek-V3 EP8, Qwen3-30B and, for mxfp4, gpt-oss. Time relative to the other
# paths:
# - mxfp4: 0.99 to 1.32 with 32 rows per expert, 0.73 to 0.83 with 48, 0.87 to 0.96 with 512, 0.90
#   to 1.04 with 768.
# - integers: 0.77 with 24 rows and zero points, 0.78 to 0.87 with 48 rows. With 256 rows, 0.84 to
#   0.98 for float32 scales, 0.77 to 0.91 for float16, and 0.69 to 0.84 for bf16.
# - NVFP4: 0.74 with 48 rows, 0.90 to 1.04 with 128.
_MIN_ROWS, _MIN_ROWS_WITH_ZEROS, _MIN_ROWS_OF_128 = 40, 24, 56
_MAX_ROWS = {"mxfp4_w4a16": 640, "nvfp4_w4a16": 128, "int4_w4a16_group": 320}
# Minimum rows per expert for which prepared weights are used, if the tiles keep all SMs busy: by
# scheme, and for integers by (scale dtype, has zero points). With fewer rows, the aligned_w4 path
# is faster. Its time grows with the number of rows, but the time of this path hardly changes up to
# 24 rows (H200, 2026-11-30, triton 3.6.0, 2 to 24 rows per expert, seven layers with E from 16 to
# 128, H from 2048 to 4096, and I from 384 to 2880). With float16 and float32 scales, the limits are
# higher, because unpacking takes most of the time.
_MIN_PREPARED_ROWS = {"mxfp4_w4a16": 4.5, "nvfp4_w4a16": 2.0}
_MIN_PREPARED_ROWS_OF_INTEGERS = {
    ("bfloat16", False): 4.0,
    ("bfloat16", True): 5.0,
    ("float16", False): 7.0,
    ("float16", True): 8.0,
    ("float32", False): 9.0,
    ("float32", True): 9.0,
}
# With groups of less than 128 columns, the aligned_w4 path has more steps, so the limit is reduced
# by _FEWER_ROWS_WITH_SMALL_GROUPS, but not below _MIN_ROWS_OF_INTEGERS. Measured with groups of 64.
_FEWER_ROWS_WITH_SMALL_GROUPS, _MIN_ROWS_OF_INTEGERS = 3.0, 2.0
# If SMs idle in the last wave of tiles, the limit is raised by this number times the fraction of
# the time for which they idle. The measured limit was 3.6 to 6.4 rows higher with a fraction of
# 0.38 (E=48, H=3072, I=384).
_MORE_ROWS_PER_IDLE_FRACTION = 13.0
_NUM_SMS = 132  # of the H100 SXM and the H200
# Minimum rows per expert for which tiles of prepared weights have 64 and 128 rows instead of 32.
# Time of tiles of 32 rows (H200, 2026-11-28):
# - relative to tiles of 64 rows that are always multiplied as a whole: 0.74 to 0.77 with 12.8 rows
#   per expert, 0.84 to 0.85 for int4.
# - relative to tiles of 64 rows that are multiplied as half a tile if they have at most 32 rows: 1
#   with 24 rows per expert, 1.15 to 1.31 with 32.
_MIN_PREPARED_ROWS_OF_64, _MIN_PREPARED_ROWS_OF_128 = 22, 56
# Maximum rows per expert for which prepared weights are used, by scale dtype. Time relative to
# weights that are not prepared:
# - float32 scales: 1.04 with 640 rows.
# - float16 scales: 0.94 with 640 rows, 0.97 to 1.09 with 1024.
# - bf16 scales with zero points, and NVFP4: 1.04 to 1.08 with 4096 rows.
# mxfp4, and integers with bf16 scales and without zero points, have no limit: prepared weights are
# at least as fast for any number of rows.
_MAX_PREPARED_ROWS = {"float32": 512, "float16": 768}
_MAX_PREPARED_ROWS_WITH_ZEROS = 2048
_TILE_WEIGHT_ROWS = BLOCK * BLOCKS_PER_TILE  # weight rows per tile
_MAX_CHUNK_BYTES = 1 << 30  # maximum size of the tiled weights, unless a single expert is larger
_WORD_BYTES = 4
_SCHEMES = ("mxfp4_w4a16", "nvfp4_w4a16", "int4_w4a16_group")
_BF16_BYTES = 2  # bytes per element of tokens and outputs
_CONSUMERS = 2  # consumer warpgroups, each with its own staging buffers
_MAX_BARRIER_BYTES = 1 << 10

_CANDIDATE_ROWS: RowRanges = {32: (2, 48), 64: (16, 160), 128: (48, 1 << 62)}
_CANDIDATES: EntryTable = {
    32: ((_TILE_WEIGHT_ROWS, BLOCK, 4, 11, 8), (_TILE_WEIGHT_ROWS, BLOCK, 4, 8, 8)),
    64: ((_TILE_WEIGHT_ROWS, BLOCK, 4, 8, 8), (_TILE_WEIGHT_ROWS, BLOCK, 4, 8, 16)),
    128: tuple((_TILE_WEIGHT_ROWS, BLOCK, 4, 6, group_m) for group_m in (8, 4, 16)),
}


def supports(problem: Problem, device: Device) -> bool:
    """Return whether the path supports `problem`. It needs 4-bit weights and bf16 activations."""
    scheme, sizes = problem.scheme, (problem.hidden, problem.intermediate)
    if scheme.name not in _SCHEMES or not dequantized_config.supports(problem, device):
        return False
    groups = (0,) if scheme.matrix_scales else (scale_group(scheme, k)[1] for k in sizes)
    return all(size % GROUP == 0 for size in (*sizes, *groups))


def packed_formats(problem: Problem) -> tuple[PackedFormat, PackedFormat]:
    """Return the formats of tiled w1 and w2 with float32 scales.

    The formats with scales of other dtypes have the same sizes.
    """
    return choose_packed_format(problem.scheme, problem.hidden), choose_packed_format(
        problem.scheme, problem.intermediate
    )


def box_bytes(packed_format: PackedFormat) -> int:
    """Return the bytes of the words and scales in a box, which is one K step of a tile."""
    scale_words = packed_format.lines * WORDS_PER_SCALE_LINE
    return _WORD_BYTES * (LINES_PER_STEP * WORDS_PER_LINE + scale_words)


def violations(
    tile: LaunchConfig, gemm: Gemm, problem: Problem, device: Device
) -> Iterator[Violation]:
    """Yield every limit that prevents `tile` from being launched for this GEMM on this path."""
    if tile.block_m not in _BLOCK_M_VALUES:
        yield Violation("block_m", tile.block_m, f"one of {_BLOCK_M_VALUES} on the {NAME} path")
    fixed_fields = (
        ("block_n", tile.block_n, _TILE_WEIGHT_ROWS // gemm.num_matrices),
        ("block_k", tile.block_k, BLOCK),
        ("num_warps", tile.num_warps, 4),
    )
    for name, got, need in fixed_fields:
        if got != need:
            yield Violation(name, got, f"{need} on the {NAME} path")
    shared_bytes = _count_shared_bytes(tile, 1, packed_formats(problem)[gemm.index - 1])
    if shared_bytes > device.shared:
        yield Violation("bytes of shared memory", shared_bytes, f"<= {device.shared}")


def _count_shared_bytes(
    tile: LaunchConfig, staging_buffers: int, packed_format: PackedFormat
) -> int:
    """Return an upper bound on the bytes of shared memory.

    staging_buffers: number of staging buffers per warpgroup.
    """
    token_bytes = tile.block_m * BLOCK * _BF16_BYTES  # per stage, and per staging buffer
    ring_bytes = tile.num_stages * (token_bytes + box_bytes(packed_format))
    return ring_bytes + _CONSUMERS * staging_buffers * token_bytes + _MAX_BARRIER_BYTES


def num_staging_buffers(tile: LaunchConfig, packed_format: PackedFormat, *, gated: bool) -> int:
    """Return the number of staging buffers per warpgroup.

    There are two if a warpgroup stores two boxes and both fit in shared memory, otherwise one.
    """
    return 1 if gated or _count_shared_bytes(tile, 2, packed_format) > Device().shared else 2


def max_short_rows(tile: LaunchConfig) -> int:
    """Return the maximum number of rows with which a tile is multiplied as half a tile."""
    return tile.block_m // 2


def boxes_per_expert(problem: Problem) -> tuple[int, int]:
    """Return the number of boxes (K steps of tiles) in w1 and in w2 of one expert."""
    w1_rows = problem.intermediate * (2 if problem.act.gated else 1)
    w1_boxes = -(-w1_rows // _TILE_WEIGHT_ROWS) * -(-problem.hidden // BLOCK)
    w2_boxes = -(-problem.hidden // _TILE_WEIGHT_ROWS) * -(-problem.intermediate // BLOCK)
    return w1_boxes, w2_boxes


def experts_per_chunk(problem: Problem) -> int:
    """Return the number of experts whose weights are tiled and multiplied at once."""
    boxes_and_formats = zip(boxes_per_expert(problem), packed_formats(problem), strict=True)
    expert_bytes = max(
        boxes * box_bytes(packed_format) for boxes, packed_format in boxes_and_formats
    )
    num_chunks = -(-problem.e // max(1, _MAX_CHUNK_BYTES // expert_bytes))
    return -(-problem.e // num_chunks)


def min_tokens(problem: Problem) -> int:
    """Return the smallest token count for which this path is used without a tuned file."""
    min_rows = _MIN_ROWS_WITH_ZEROS if problem.scheme.zero_points else _MIN_ROWS
    return -(-min_rows * problem.experts // problem.top_k)


def max_tokens(problem: Problem) -> int:
    """Return the largest token count for which this path is used without a tuned file."""
    return _MAX_ROWS[problem.scheme.name] * problem.experts // problem.top_k


def min_prepared_tokens(problem: Problem, scale_dtype: torch.dtype) -> int:
    """Return the smallest token count for which prepared weights are used.

    Tokens are assumed to be distributed evenly over the experts.
    """
    scheme = problem.scheme
    if scheme.weight == "uint4":
        rows = _MIN_PREPARED_ROWS_OF_INTEGERS[dtype_name(scale_dtype), scheme.zero_points]
        groups = (scale_group(scheme, k)[1] for k in (problem.hidden, problem.intermediate))
        if min(groups) < 2 * BLOCK:
            rows = max(rows - _FEWER_ROWS_WITH_SMALL_GROUPS, _MIN_ROWS_OF_INTEGERS)
    else:
        rows = _MIN_PREPARED_ROWS[scheme.name]
    rows += _MORE_ROWS_PER_IDLE_FRACTION * _compute_idle_fraction(problem)
    return math.ceil(rows * problem.experts / problem.top_k)


def _compute_idle_fraction(problem: Problem) -> float:
    """Return the mean fraction of the GEMMs' time for which an SM waits for other SMs.

    Each expert is assumed to have one tile of rows. If a GEMM has at most one tile per SM, its SMs
    count as busy, because this case was not measured.
    """
    w1_rows = problem.intermediate * (2 if problem.act.gated else 1)
    busy_steps = elapsed_steps = 0.0
    for rows, k in ((w1_rows, problem.hidden), (problem.hidden, problem.intermediate)):
        num_tiles = problem.e * -(-rows // _TILE_WEIGHT_ROWS)
        num_waves = num_tiles / _NUM_SMS
        steps = -(-k // BLOCK)
        elapsed_steps += steps * math.ceil(num_waves)
        busy_steps += steps * (num_waves if num_waves > 1 else 1)
    return 1 - busy_steps / elapsed_steps


def max_prepared_tokens(problem: Problem, scale_dtype: torch.dtype) -> int | None:
    """Return the largest token count for which prepared weights are used; None means no limit."""
    scheme, max_rows = problem.scheme, None
    if scheme.matrix_scales or scheme.zero_points:
        max_rows = _MAX_PREPARED_ROWS_WITH_ZEROS
    if scheme.weight == "uint4":
        max_rows = _MAX_PREPARED_ROWS.get(dtype_name(scale_dtype), max_rows)
    return None if max_rows is None else max_rows * problem.experts // problem.top_k


def breakpoints(problem: Problem) -> tuple[int, ...]:
    """Return the token counts after which the launches change.

    These are the last count below the range of the path, the last count with tiles of 64 rows, and
    the last count in the range of the path.
    """
    last_with_64_rows = -(-_MIN_ROWS_OF_128 * problem.experts // problem.top_k) - 1
    return min_tokens(problem) - 1, last_with_64_rows, max_tokens(problem)


def prepared_configs(problem: Problem) -> tuple[tuple[int, MoEConfig], ...]:
    """Return (minimum tokens, configuration) of calls with prepared weights, ascending.

    For integers, the first value is the minimum for bf16 scales, because other scales have larger
    minima.
    """
    if problem.batch_invariant:  # all calls must use the same tiles
        return ()
    min_tokens_of_64, min_tokens_of_128 = (
        -(-rows * problem.experts // problem.top_k)
        for rows in (_MIN_PREPARED_ROWS_OF_64, _MIN_PREPARED_ROWS_OF_128)
    )
    min_tokens_of_32 = min(min_prepared_tokens(problem, torch.bfloat16), min_tokens_of_64)
    min_token_counts = min_tokens_of_32, min_tokens_of_64, min_tokens_of_128
    return tuple(
        (tokens, default_config(problem, block_m))
        for tokens, block_m in zip(min_token_counts, _BLOCK_M_VALUES, strict=True)
    )


def choose_block_m(problem: Problem, tokens: int) -> int:
    """Return block_m for a call of `tokens` tokens without prepared weights."""
    return _BLOCK_M_VALUES[1 + (tokens * problem.top_k >= _MIN_ROWS_OF_128 * problem.experts)]


def default_config(problem: Problem, block_m: int = _BLOCK_M_VALUES[-1]) -> MoEConfig:
    """Return the configuration without a tuned file for blocks of block_m rows."""
    block_n1 = _TILE_WEIGHT_ROWS // (2 if problem.act.gated else 1)
    launch1, launch2 = (
        LaunchConfig(block_m, block_n, BLOCK, 8, 4, _STAGES[block_m])
        for block_n in (block_n1, _TILE_WEIGHT_ROWS)
    )
    return MoEConfig(launch1, launch2, NAME)


def candidates(problem: Problem, tokens: int) -> CandidateGroups:
    """Return the launches to time for a call of `tokens` tokens."""
    bf16_problem = remove_quant(problem)
    blocks = select_blocks(_CANDIDATE_ROWS, bf16_problem, tokens)
    return build_candidate_groups(blocks, (_CANDIDATES, _CANDIDATES), bf16_problem)
