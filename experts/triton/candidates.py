"""Launches worth timing, as the paths list them.

An entry is (columns, block_k, warps, stages), or with a fifth number the swizzle group. columns
are those of the whole product: a gated GEMM 1 has half of them as gate and half as up columns.
What a problem or a device cannot launch is left out when candidates are made (tuning.space).
"""

from collections.abc import Iterable, Mapping, Sequence

from experts.triton.launch_config import Gemm, Launch, LaunchConfig, gemms
from modular_kernel.spec.problem import Problem

Entry = tuple[int, ...]
ByBlock = Mapping[int, Sequence[Entry]]  # by block_m
Rows = Mapping[int, tuple[float, float]]  # mean rows of an expert between which a block_m is tried
# Launches of GEMM 1 and of GEMM 2 by the block_m that both have.
Groups = Mapping[int, tuple[Sequence[Launch], Sequence[Launch]]]

FEW_TRIED = 2  # most tokens of a path of few tokens that are tried, over those that take it untuned
_GROUP_M = 16  # of a swizzle group where an entry names none and blocks are tall
_SHORT = 32  # block_m up to which there is nothing to swizzle


def worth(rows: Rows, problem: Problem, tokens: int) -> list[int]:
    """Return the block_m that are worth a try with so many tokens."""
    mean = tokens * problem.top_k / problem.experts
    return [block_m for block_m, (least, most) in rows.items() if least <= mean <= most]


def groups(blocks: Iterable[int], entries: tuple[ByBlock, ByBlock], problem: Problem) -> Groups:
    """Return the launches of `entries`, those of GEMM 1 and of GEMM 2, for these block_m."""
    found = {}
    for block_m in blocks:
        one, two = (
            [launch_of(entry, block_m, gemm) for entry in of.get(block_m, ())]
            for of, gemm in zip(entries, gemms(problem), strict=True)
        )
        found[block_m] = (one, two)
    return found


def launch_of(entry: Entry, block_m: int, gemm: Gemm) -> LaunchConfig:
    """Return the launch that an entry stands for."""
    columns, block_k, warps, num_stages, *group = entry
    group_m = group[0] if group else 1 if block_m <= _SHORT else _GROUP_M
    return LaunchConfig(block_m, columns // gemm.sides, block_k, group_m, warps, num_stages)
