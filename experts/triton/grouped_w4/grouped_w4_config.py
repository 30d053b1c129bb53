"""Products of weights in registers: which problems they serve, what bounds a launch."""

from collections.abc import Iterator

import torch

from experts.triton.candidates import ByBlock, Groups, Rows, groups, worth
from experts.triton.dequantized import dequantized_config as dequantized
from experts.triton.dequantized.dequantized_config import plain
from experts.triton.grouped_w4.layout import (
    BLOCK,
    BLOCKS,
    GROUP,
    LINE,
    LINES,
    SCALE_LINE,
    Form,
    form_of,
)
from experts.triton.launch_config import Device, Gemm, LaunchConfig, MoEConfig, Violation
from experts.triton.operands import scale_group
from modular_kernel.spec.problem import Problem, dtype_name

NAME = "grouped_w4"

# Rows of a tile, each with as many stages as fit. Of 128, float32 sums of both its blocks are half
# a thread's registers.
_HEIGHTS = (32, 64, 128)
_STAGES = {32: 11, 64: 8, 128: 6}
# Mean rows of an expert for which the path is taken, and below which tiles have 64 rows. Measured
# on one H200 (2026-11-26, triton 3.6.0) on Mixtral, DeepSeek-V3 EP8, Qwen3-30B and, of mxfp4,
# gpt-oss. mxfp4, in both orders: 0.73 to 0.83 x what was launched before with 48 rows, 0.87 to 0.96
# with 512, 0.90 to 1.04 with 768; 0.99 to 1.32 with 32. Integers: 0.78 to 0.87 with 48; with 256
# 0.84 to 0.98, 0.77 to 0.91 and 0.69 to 0.84 with scales of float32, float16 and bf16; with zero
# points 0.77 with 24. nvfp4: 0.74 with 48, 0.90 to 1.04 with 128.
_LEAST_ROWS, _LEAST_WITH_ZEROS, _SHORT_ROWS = 40, 24, 56
_MOST_ROWS = {"mxfp4_w4a16": 640, "nvfp4_w4a16": 128, "int4_w4a16_group": 320}
# Calls with prepared weights: mean rows of an expert from which the path is taken, from which tiles
# have 64 rows, and from which they have 128. Measured on one H200 (2026-11-28, triton 3.6.0) on
# layers of E 32 to 160, H 2048 to 5120, I 1024 to 2880. Tiles of 32 rows take 0.91 to 0.95 x the
# time of mxfp4 as loaded with 6 rows, 0.61 to 0.63 x with 16; of int4 0.96 to 1.03 x with 10 rows.
# They take 0.74 to 0.77 x the time of whole tiles of 64 with 12.8 rows (int4: 0.84 to 0.85). Beside
# tiles of 64 that multiply up to 32 rows as half a tile, they take as long with 24 rows, and 1.15
# to 1.31 x with 32.
_LEAST_PREPARED = {"mxfp4_w4a16": 6, "nvfp4_w4a16": 8, "int4_w4a16_group": 10}
_LOW_PREPARED, _SHORT_PREPARED = 22, 56
# With more rows calls launch what they would without: 1.04 x with 640 rows and float32 scales, 0.94
# with 640 and 0.97 to 1.09 with 1024 and float16, 1.04 to 1.08 with 4096, bf16 scales and zero
# points, and of nvfp4.
# mxfp4 and plain integers with bf16 scales are as fast then.
_MOST_PREPARED = {"float32": 512, "float16": 768}
_MOST_WITH_ZEROS = 2048
_COLUMNS = BLOCK * BLOCKS  # weight rows of a tile
_MOST_BYTES = 1 << 30  # of tiled weights at a time, unless one expert has more
_WORD = 4
_SCHEMES = ("mxfp4_w4a16", "nvfp4_w4a16", "int4_w4a16_group")
_SIXTEEN = 2  # bytes of a value of tokens and results
_PARTS = 2  # warpgroups, each of which stages results
_BARRIERS = 1 << 10  # bytes, at most

_TRIED: Rows = {32: (6, 48), 64: (16, 160), 128: (48, 1 << 62)}
_ENTRIES: ByBlock = {
    32: ((_COLUMNS, BLOCK, 4, 11, 8), (_COLUMNS, BLOCK, 4, 8, 8)),
    64: ((_COLUMNS, BLOCK, 4, 8, 8), (_COLUMNS, BLOCK, 4, 8, 16)),
    128: tuple((_COLUMNS, BLOCK, 4, 6, group) for group in (8, 4, 16)),
}


def serves(problem: Problem, device: Device) -> bool:
    """Whether the kernels of this path can compute `problem` on `device`: 4 bits in bf16."""
    scheme, depths = problem.scheme, (problem.hidden, problem.intermediate)
    if scheme.name not in _SCHEMES or not dequantized.serves(problem, device):
        return False
    groups = (0,) if scheme.matrix_scales else (scale_group(scheme, k)[1] for k in depths)
    return all(k % GROUP == 0 for k in (*depths, *groups))


def forms(problem: Problem) -> tuple[Form, Form]:
    """Return how words and scales of w1 and w2 lie; those of float32 scales are the same size."""
    return form_of(problem.scheme, problem.hidden), form_of(problem.scheme, problem.intermediate)


def box_bytes(form: Form) -> int:
    """Return the bytes of words and scales of a step of a tile."""
    return _WORD * (LINES * LINE + form.lines * SCALE_LINE)


def violations(
    tile: LaunchConfig, gemm: Gemm, problem: Problem, device: Device
) -> Iterator[Violation]:
    """Every reason not to launch `tile` for this GEMM on this path."""
    if tile.block_m not in _HEIGHTS:
        yield Violation("block_m", tile.block_m, f"one of {_HEIGHTS} on the {NAME} path")
    fixed = (
        ("block_n", tile.block_n, _COLUMNS // gemm.sides),
        ("block_k", tile.block_k, BLOCK),
        ("num_warps", tile.num_warps, 4),
    )
    for name, got, need in fixed:
        if got != need:
            yield Violation(name, got, f"{need} on the {NAME} path")
    shared = _shared(tile, 1, forms(problem)[gemm.index - 1])
    if shared > device.shared:
        yield Violation("bytes of shared memory", shared, f"<= {device.shared}")


def _shared(tile: LaunchConfig, slots: int, form: Form) -> int:
    """Bytes of shared memory with so many boxes of results a warpgroup, at most."""
    box = tile.block_m * BLOCK * _SIXTEEN  # of tokens or of results
    return tile.num_stages * (box + box_bytes(form)) + _PARTS * slots * box + _BARRIERS


def staging_slots(tile: LaunchConfig, form: Form, *, gated: bool) -> int:
    """How many boxes of results a warpgroup keeps until they are stored: 2 if it has 2 that fit."""
    return 1 if gated or _shared(tile, 2, form) > Device().shared else 2


def short_rows(tile: LaunchConfig) -> int:
    """Return the rows up to which a tile is multiplied as half of one."""
    return tile.block_m // 2


def boxes_of(problem: Problem) -> tuple[int, int]:
    """Return how many steps of tiles one expert's w1 and w2 make."""
    sides = 2 if problem.act.gated else 1
    one = -(-problem.intermediate * sides // _COLUMNS) * -(-problem.hidden // BLOCK)
    two = -(-problem.hidden // _COLUMNS) * -(-problem.intermediate // BLOCK)
    return one, two


def experts_at_once(problem: Problem) -> int:
    """How many experts' matrices are tiled and multiplied before the next ones are."""
    both = zip(boxes_of(problem), forms(problem), strict=True)
    one = max(boxes * box_bytes(form) for boxes, form in both)
    parts = -(-problem.e // max(1, _MOST_BYTES // one))
    return -(-problem.e // parts)


def least_tokens(problem: Problem) -> int:
    """Return the fewest tokens of a call that takes this path without a tuned file."""
    rows = _LEAST_WITH_ZEROS if problem.scheme.zero_points else _LEAST_ROWS
    return -(-rows * problem.experts // problem.top_k)


def most_tokens(problem: Problem) -> int:
    """Return the most tokens of a call that takes this path without a tuned file."""
    return _MOST_ROWS[problem.scheme.name] * problem.experts // problem.top_k


def most_prepared(problem: Problem, scale: torch.dtype) -> int | None:
    """Return the most tokens of a call that reads prepared weights of such scales; None for all."""
    scheme, most = problem.scheme, None
    if scheme.matrix_scales or scheme.zero_points:
        most = _MOST_WITH_ZEROS
    if scheme.weight == "uint4":
        most = _MOST_PREPARED.get(dtype_name(scale), most)
    return None if most is None else most * problem.experts // problem.top_k


def turns(problem: Problem) -> tuple[int, ...]:
    """Return the most tokens before the path is taken, of tiles of 64 rows, and of the path."""
    short = -(-_SHORT_ROWS * problem.experts // problem.top_k) - 1
    return least_tokens(problem) - 1, short, most_tokens(problem)


def turns_of_prepared(problem: Problem) -> tuple[tuple[int, MoEConfig], ...]:
    """Return from how many tokens on calls with prepared weights launch what."""
    if problem.batch_invariant:  # tiles of every call are the same
        return ()
    least = _LEAST_PREPARED[problem.scheme.name]
    ends = zip((least, _LOW_PREPARED, _SHORT_PREPARED), _HEIGHTS, strict=True)
    return tuple(
        (-(-rows * problem.experts // problem.top_k), default(problem, height))
        for rows, height in ends
    )


def height(problem: Problem, tokens: int) -> int:
    """Return the rows of a tile in a call of so many tokens whose weights are not prepared."""
    return _HEIGHTS[1 + (tokens * problem.top_k >= _SHORT_ROWS * problem.experts)]


def default(problem: Problem, rows: int = _HEIGHTS[-1]) -> MoEConfig:
    """Return launches with tiles of so many rows."""
    first = _COLUMNS // (2 if problem.act.gated else 1)
    stages = _STAGES[rows]
    one, two = (LaunchConfig(rows, n, BLOCK, 8, 4, stages) for n in (first, _COLUMNS))
    return MoEConfig(one, two, NAME)


def candidates(problem: Problem, tokens: int) -> Groups:
    """Return launches worth timing with so many tokens."""
    bf16 = plain(problem)
    return groups(worth(_TRIED, bf16, tokens), (_ENTRIES, _ENTRIES), bf16)
