"""Supported problems, limits, launches and tuning candidates of the gemv_tma path.

Its launches are LaunchConfig with these meanings: block_k is the K extent of one stage of the ring
in shared memory, and num_stages the number of stages. block_n is fixed: a tile has 64 weight rows,
half of them up rows in a gated GEMM. block_m and group_m are ignored.
"""

from collections.abc import Iterator

from experts.triton.candidates import (
    SMALL_M_MARGIN,
    CandidateGroups,
    EntryTable,
    RowRanges,
    build_candidate_groups,
    select_blocks,
)
from experts.triton.launch_config import Device, Gemm, LaunchConfig, MoEConfig, Violation, gemms
from experts.triton.operands import supports_tma
from modular_kernel.spec.problem import Combine, Problem

NAME = "gemv_tma"

ROWS = 64  # weight rows per tile
PANEL = 128  # fp8 values (bytes) along K per TMA box
PIECE = 1024  # values of a vector (a row of x or h) that are written to shared memory at once
VECTORS = 8  # N of the MMA: vectors in shared memory, of tokens or of the pairs of one token
COLUMNS = 32  # output columns of a GEMM 1 tile, which has as many gate as up rows
_SCHEMES = ("fp8_w8a8_channel", "fp8_w8a8_block")
_BLOCK = (128, 128)
_DEPTHS = (128, 256, 512)  # possible block_k
_ALIGNED = 16  # alignment of rows in bytes, for TMA
_MIN_STAGES = 4  # minimum number of stages with which a block_k is used by default
_STAGING = 1 << 12  # bytes of shared memory for reductions across warps, barriers and padding


def supports(problem: Problem, device: Device) -> bool:
    """Return whether the kernels of this path support `problem` on `device`."""
    if not supports_tma(problem, device, _SCHEMES) or not _halves_share_scales(problem):
        return False
    weighted_sum = problem.combine is Combine.SUM and not problem.apply_router_weight_on_input
    aligned = all(k % _ALIGNED == 0 for k in (problem.hidden, problem.intermediate))
    fits = all(_ring_slots(_DEPTHS[0], gemm, device) > 1 for gemm in gemms(problem))
    return weighted_sum and aligned and fits and problem.act.gated and problem.top_k <= VECTORS


def _halves_share_scales(problem: Problem) -> bool:
    """Return whether the gate rows of every tile lie in one scale block, and so do the up rows."""
    if problem.scheme.granularity != "block":
        return True
    aligned = problem.act.interleaved or problem.intermediate % COLUMNS == 0
    return problem.scheme.group == _BLOCK and aligned


def max_tokens(problem: Problem) -> int:
    """Return the largest call for which this path is used without a tuned file, in tokens; 0: none.

    Each token reads the weights of its experts separately. Measured on one H200 (2026-11-22, triton
    3.6.0) with 1 to 8 tokens on Mixtral, DeepSeek-V3 EP8, Qwen3-30B and gpt-oss: the path is faster
    than the aligned path while pairs <= experts / 2, with block scales while pairs <= experts / 4.
    Block scales add a cost per vector: with 1 and 2 tokens on the layers of all tuned files, the
    path was faster with an intermediate size of 1408, but not with 768.
    """
    block = problem.scheme.granularity == "block"
    if block and problem.intermediate < PIECE:
        return 0
    return min(VECTORS, max(1, problem.experts // ((4 if block else 2) * problem.top_k)))


def violations(tile: LaunchConfig, gemm: Gemm, device: Device) -> Iterator[Violation]:
    """Yield every reason why `tile` cannot be launched on this path."""
    fixed = {"block_n": ROWS // gemm.num_matrices, "num_warps": 4}
    for name, value in fixed.items():
        if getattr(tile, name) != value:
            yield Violation(name, getattr(tile, name), f"{value} on the {NAME} path")
    if tile.block_k not in _DEPTHS:
        yield Violation("block_k", tile.block_k, f"one of {_DEPTHS} on the {NAME} path")
    elif not 2 <= tile.num_stages <= _ring_slots(tile.block_k, gemm, device):
        need = (
            f"2 to {_ring_slots(tile.block_k, gemm, device)}, beside vectors of {gemm.depth} values"
        )
        yield Violation("num_stages", tile.num_stages, need)


def pieces(depth: int) -> int:
    """Return the number of pieces of a vector of `depth` values."""
    return -(-depth // PIECE)


def _ring_slots(block_k: int, gemm: Gemm, device: Device) -> int:
    """Return the ring stages that fit in shared memory with the vectors and their scales."""
    vectors = pieces(gemm.depth) * VECTORS * (PIECE + 4 * VECTORS)
    return max(0, device.shared - _STAGING - vectors) // (ROWS * block_k)


def default(problem: Problem, device: Device) -> MoEConfig:
    """Return the launches without a tuned file.

    They use the largest block_k that allows _MIN_STAGES stages.
    """
    launch1, launch2 = (_tile(gemm, device) for gemm in gemms(problem))
    return MoEConfig(launch1, launch2, NAME)


def _tile(gemm: Gemm, device: Device) -> LaunchConfig:
    stages_by_block_k = {
        block_k: _ring_slots(block_k, gemm, device) for block_k in reversed(_DEPTHS)
    }
    block_k = next(
        (k for k, count in stages_by_block_k.items() if count >= _MIN_STAGES), _DEPTHS[0]
    )
    return LaunchConfig(16, ROWS // gemm.num_matrices, block_k, 1, 4, stages_by_block_k[block_k])


_ROWS: RowRanges = {16: (0, 4)}
# For each block_k, as many stages as can fit, and fewer.
_ENTRIES: EntryTable = {
    16: tuple(
        (64, block_k, 4, num_stages)
        for block_k, counts in ((512, (6, 5, 4, 3, 2)), (256, (12, 10, 8, 6)), (128, (16, 12)))
        for num_stages in counts
    ),
}


def candidates(problem: Problem, tokens: int) -> CandidateGroups:
    """Return the launches to time for `tokens` tokens."""
    if tokens > SMALL_M_MARGIN * max_tokens(problem):
        return {}
    return build_candidate_groups(
        select_blocks(_ROWS, problem, tokens), (_ENTRIES, _ENTRIES), problem
    )
