"""Tables of launches that `mk tune` times, and their conversion to launch configurations.

The <path>_config.py of each path has such tables. An entry of a table is (weight_rows, block_k,
num_warps, num_stages[, group_m]). weight_rows is the number of weight rows of a tile: in a gated
GEMM 1, half of them are gate rows and half are up rows, so block_n, the number of output columns,
is weight_rows / 2. `tuning.space` drops entries that the device cannot launch for the layer.
"""

from collections.abc import Iterable, Mapping, Sequence

from experts.triton.launch_config import Gemm, Launch, LaunchConfig, gemms
from modular_kernel.spec.problem import Problem

Entry = tuple[int, ...]  # (weight_rows, block_k, num_warps, num_stages[, group_m])
EntryTable = Mapping[int, Sequence[Entry]]  # block_m -> entries
RowRanges = Mapping[int, tuple[float, float]]  # block_m -> (min, max) mean rows per expert
# block_m, which both GEMMs share -> (launches of GEMM 1, launches of GEMM 2).
CandidateGroups = Mapping[int, tuple[Sequence[Launch], Sequence[Launch]]]

# Paths for few tokens (gemv, gemv_tma, gemv_w4) are the default up to a maximum number of tokens.
# `mk tune` times them up to this multiple of the maximum.
SMALL_M_LIMIT_FACTOR = 2
# group_m of entries that do not specify it, if block_m is above _MAX_UNGROUPED_BLOCK_M.
_LARGE_GROUP_M = 16
# Above this block_m, tiles are ordered in groups that share weight tiles in the L2 cache. For
# smaller blocks, groups are not faster.
_MAX_UNGROUPED_BLOCK_M = 32


def select_blocks(row_ranges: RowRanges, problem: Problem, num_tokens: int) -> list[int]:
    """Return the values of block_m to time for a call of num_tokens tokens.

    These are the values whose range in row_ranges contains the mean number of rows per expert.
    """
    mean_rows = num_tokens * problem.top_k / problem.experts
    return [
        block_m
        for block_m, (min_rows, max_rows) in row_ranges.items()
        if min_rows <= mean_rows <= max_rows
    ]


def build_candidate_groups(
    blocks: Iterable[int], tables: tuple[EntryTable, EntryTable], problem: Problem
) -> CandidateGroups:
    """Return the launches of both GEMMs for each block_m in `blocks`.

    tables: the entries of GEMM 1 and of GEMM 2.
    """
    groups = {}
    for block_m in blocks:
        launches1, launches2 = (
            [launch_from_entry(entry, block_m, gemm) for entry in table.get(block_m, ())]
            for table, gemm in zip(tables, gemms(problem), strict=True)
        )
        groups[block_m] = (launches1, launches2)
    return groups


def launch_from_entry(entry: Entry, block_m: int, gemm: Gemm) -> LaunchConfig:
    """Convert a table entry to a launch of one GEMM. The default of group_m depends on block_m."""
    weight_rows, block_k, num_warps, num_stages, *specified_group_m = entry
    default_group_m = 1 if block_m <= _MAX_UNGROUPED_BLOCK_M else _LARGE_GROUP_M
    group_m = specified_group_m[0] if specified_group_m else default_group_m
    block_n = weight_rows // gemm.num_matrices
    return LaunchConfig(block_m, block_n, block_k, group_m, num_warps, num_stages)
