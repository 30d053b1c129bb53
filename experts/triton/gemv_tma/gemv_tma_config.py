"""Configuration of the gemv_tma path: supported layers, limits, default launches and candidates.

A producer warp loads weights into a ring buffer in shared memory. In a LaunchConfig of this path,
block_k is the K extent of one stage of the ring, and num_stages is the number of stages. block_n is
fixed, because a tile has 64 weight rows, half of which are up rows in a gated GEMM. block_m and
group_m are ignored.
"""

from collections.abc import Iterator

from experts.triton.candidates import (
    SMALL_M_LIMIT_FACTOR,
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
VECTORS = 8  # N of the MMA: vectors in shared memory, which are tokens or the pairs of one token
COLUMNS = 32  # output columns of a tile of GEMM 1, which has 32 gate rows and 32 up rows
_SCHEMES = ("fp8_w8a8_channel", "fp8_w8a8_block")
_BLOCK = (128, 128)
_BLOCK_K_VALUES = (128, 256, 512)
_ROW_ALIGNMENT = 16  # bytes, required by TMA
_MIN_STAGES = 4  # a block_k is used by default only if this many stages fit
_OTHER_SHARED_BYTES = 1 << 12  # shared memory for reductions across warps, barriers and padding


def supports(problem: Problem, device: Device) -> bool:
    """Return whether the kernels of this path support `problem` on `device`."""
    if not supports_tma(problem, device, _SCHEMES) or not _halves_share_scales(problem):
        return False
    has_weighted_sum = problem.combine is Combine.SUM and not problem.apply_router_weight_on_input
    is_aligned = all(k % _ROW_ALIGNMENT == 0 for k in (problem.hidden, problem.intermediate))
    if not has_weighted_sum or not is_aligned or not problem.act.gated or problem.top_k > VECTORS:
        return False
    return all(_count_max_stages(_BLOCK_K_VALUES[0], gemm, device) > 1 for gemm in gemms(problem))


def _halves_share_scales(problem: Problem) -> bool:
    """Return whether the gate rows of a tile are in one scale block, and the up rows in another.

    Return True for schemes without scale blocks.
    """
    if problem.scheme.granularity != "block":
        return True
    is_aligned = problem.act.interleaved or problem.intermediate % COLUMNS == 0
    return problem.scheme.group == _BLOCK and is_aligned


def max_tokens(problem: Problem) -> int:
    """Return the largest token count for which this path is used without a tuned file.

    Each token reads the weights of its experts separately, so the path is faster than the aligned
    path only up to experts / 2 pairs, or experts / 4 with block scales (H200, 2026-11-22, triton
    3.6.0, 1 to 8 tokens, Mixtral, DeepSeek-V3 EP8, Qwen3-30B and gpt-oss). Block scales add a cost
    per vector. With them, the path was faster with an intermediate size of 1408, but not with 768
    (1 and 2 tokens, layers of all tuned files).
    """
    has_block_scales = problem.scheme.granularity == "block"
    if has_block_scales and problem.intermediate < PIECE:
        return 0
    min_experts_per_pair = 4 if has_block_scales else 2
    return min(VECTORS, max(1, problem.experts // (min_experts_per_pair * problem.top_k)))


def violations(tile: LaunchConfig, gemm: Gemm, device: Device) -> Iterator[Violation]:
    """Yield every limit that prevents `tile` from being launched on this path."""
    fixed_fields = {"block_n": ROWS // gemm.num_matrices, "num_warps": 4}
    for name, value in fixed_fields.items():
        if getattr(tile, name) != value:
            yield Violation(name, getattr(tile, name), f"{value} on the {NAME} path")
    if tile.block_k not in _BLOCK_K_VALUES:
        yield Violation("block_k", tile.block_k, f"one of {_BLOCK_K_VALUES} on the {NAME} path")
        return
    max_stages = _count_max_stages(tile.block_k, gemm, device)
    if not 2 <= tile.num_stages <= max_stages:
        need = f"2 to {max_stages}, because vectors of {gemm.size_k} values share the memory"
        yield Violation("num_stages", tile.num_stages, need)


def count_pieces(k: int) -> int:
    """Return the number of pieces of a vector of k values."""
    return -(-k // PIECE)


def _count_max_stages(block_k: int, gemm: Gemm, device: Device) -> int:
    """Return the number of ring stages that fit in shared memory next to vectors and scales."""
    vector_bytes = count_pieces(gemm.size_k) * VECTORS * (PIECE + 4 * VECTORS)
    ring_bytes = max(0, device.shared - _OTHER_SHARED_BYTES - vector_bytes)
    return ring_bytes // (ROWS * block_k)


def default_config(problem: Problem, device: Device) -> MoEConfig:
    """Return the configuration without a tuned file.

    Each launch has the largest block_k with which at least _MIN_STAGES stages fit.
    """
    launch1, launch2 = (_make_default_launch(gemm, device) for gemm in gemms(problem))
    return MoEConfig(launch1, launch2, NAME)


def _make_default_launch(gemm: Gemm, device: Device) -> LaunchConfig:
    stages_by_block_k = {
        block_k: _count_max_stages(block_k, gemm, device) for block_k in reversed(_BLOCK_K_VALUES)
    }
    block_k = next(
        (k for k, count in stages_by_block_k.items() if count >= _MIN_STAGES), _BLOCK_K_VALUES[0]
    )
    return LaunchConfig(16, ROWS // gemm.num_matrices, block_k, 1, 4, stages_by_block_k[block_k])


_CANDIDATE_ROWS: RowRanges = {16: (0, 4)}
# For each block_k, as many stages as can fit, and fewer stages.
_CANDIDATES: EntryTable = {
    16: tuple(
        (64, block_k, 4, num_stages)
        for block_k, counts in ((512, (6, 5, 4, 3, 2)), (256, (12, 10, 8, 6)), (128, (16, 12)))
        for num_stages in counts
    ),
}


def candidates(problem: Problem, tokens: int) -> CandidateGroups:
    """Return the launches to time for a call of `tokens` tokens."""
    if tokens > SMALL_M_LIMIT_FACTOR * max_tokens(problem):
        return {}
    blocks = select_blocks(_CANDIDATE_ROWS, problem, tokens)
    return build_candidate_groups(blocks, (_CANDIDATES, _CANDIDATES), problem)
