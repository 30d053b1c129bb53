"""Tuning candidates: the paths' tables of launches to time, and their conversion to launches.

An entry of a table is (columns, block_k, warps, stages[, group_m]). `columns` counts rows of the
weights: in a gated GEMM 1, half of them are gate and half are up rows. `tuning.space` drops
candidates that the problem or the device cannot launch.
"""

from collections.abc import Iterable, Mapping, Sequence

from experts.triton.launch_config import Gemm, Launch, LaunchConfig, gemms
from modular_kernel.spec.problem import Problem

Entry = tuple[int, ...]
ByBlock = Mapping[int, Sequence[Entry]]  # by block_m
RowRange = Mapping[int, tuple[float, float]]  # block_m -> (min, max) mean rows per expert
# block_m, which both GEMMs share -> launches of GEMM 1 and of GEMM 2.
Groups = Mapping[int, tuple[Sequence[Launch], Sequence[Launch]]]

SMALL_M_MARGIN = 2  # paths for few tokens are timed up to this multiple of their default limit
_GROUP_M = 16  # default group_m of entries with block_m above _SHORT
_SHORT = 32  # block_m up to which sharing weight tiles in L2 (group_m > 1) does not pay


def blocks_worth_timing(rows: RowRange, problem: Problem, tokens: int) -> list[int]:
    """Return the values of block_m whose range in `rows` has the mean rows per expert of a call."""
    mean = tokens * problem.top_k / problem.experts
    return [
        block_m for block_m, (min_rows, max_rows) in rows.items() if min_rows <= mean <= max_rows
    ]


def launches_by_block(
    blocks: Iterable[int], entries: tuple[ByBlock, ByBlock], problem: Problem
) -> Groups:
    """Return the launches of both GEMMs for each block_m; `entries` has the table of each GEMM."""
    result = {}
    for block_m in blocks:
        launch1, launch2 = (
            [launch_from_entry(entry, block_m, gemm) for entry in table.get(block_m, ())]
            for table, gemm in zip(entries, gemms(problem), strict=True)
        )
        result[block_m] = (launch1, launch2)
    return result


def launch_from_entry(entry: Entry, block_m: int, gemm: Gemm) -> LaunchConfig:
    """Convert a table entry to the launch of one GEMM; group_m defaults by block_m."""
    columns, block_k, warps, num_stages, *group = entry
    group_m = group[0] if group else 1 if block_m <= _SHORT else _GROUP_M
    return LaunchConfig(block_m, columns // gemm.sides, block_k, group_m, warps, num_stages)
