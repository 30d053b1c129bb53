"""The TMA-pipelined gemv path: which problems it serves, what bounds a launch, which is taken.

block_n is fixed: 64 rows of weights, which gate and up columns share. block_k is what one place of
the ring holds of the depth, num_stages how many places there are. block_m and group_m are ignored.
"""

from collections.abc import Iterator

from experts.triton.candidates import FEW_TRIED, ByBlock, Groups, Rows, groups, worth
from experts.triton.launch_config import Device, Gemm, LaunchConfig, MoEConfig, Violation, gemms
from experts.triton.operands import fed_by_tma
from modular_kernel.spec.problem import Combine, Problem

NAME = "gemv_tma"

ROWS = 64  # of weights in a tile
PANEL = 128  # bytes, and values, of the depth that a box covers
PIECE = 1024  # values of a vector that are written at once
VECTORS = 8  # of a product: tokens, or the pairs of one token
COLUMNS = 32  # of GEMM 1's tile: gate and up rows
_SCHEMES = ("fp8_w8a8_channel", "fp8_w8a8_block")
_BLOCK = (128, 128)
_DEPTHS = (128, 256, 512)  # of a place
_ALIGNED = 16  # bytes between rows, for TMA
_ENOUGH = 4  # places of the deepest kind, from which on it is taken
_STAGING = 1 << 12  # bytes for sums across warps, barriers, and what separates buffers


def serves(problem: Problem, device: Device) -> bool:
    """Whether the kernels of this path can compute `problem` on `device`."""
    if not fed_by_tma(problem, device, _SCHEMES) or not _one_scale_a_half(problem):
        return False
    plain = problem.combine is Combine.SUM and not problem.apply_router_weight_on_input
    even = all(k % _ALIGNED == 0 for k in (problem.hidden, problem.intermediate))
    fits = all(_places(_DEPTHS[0], gemm, device) > 1 for gemm in gemms(problem))
    return plain and even and fits and problem.act.gated and problem.top_k <= VECTORS


def _one_scale_a_half(problem: Problem) -> bool:
    """Whether gate rows of every tile, and so up rows, lie within one scale block, if any."""
    if problem.scheme.granularity != "block":
        return True
    whole = problem.act.interleaved or problem.intermediate % COLUMNS == 0
    return problem.scheme.group == _BLOCK and whole


def most_tokens(problem: Problem) -> int:
    """Return the most tokens of a call that takes this path without a tuned file.

    Return 0 if no call should.

    Tokens read the weights of an expert they share once each. Measured on one H200 (2026-11-22,
    triton 3.6.0): 1 to 8 tokens on Mixtral, DeepSeek-V3 EP8, Qwen3-30B and gpt-oss, where it is
    ahead of the aligned path up to half as many pairs as experts, with scales of blocks up to a
    quarter; 1 and 2 on the layers of all tuned files: scales of blocks need time of their own,
    which vectors of 1408 values pay for and those of 768 do not.
    """
    block = problem.scheme.granularity == "block"
    if block and problem.intermediate < PIECE:
        return 0
    return min(VECTORS, max(1, problem.experts // ((4 if block else 2) * problem.top_k)))


def violations(tile: LaunchConfig, gemm: Gemm, device: Device) -> Iterator[Violation]:
    """Every reason not to launch `tile` on this path."""
    fixed = {"block_n": ROWS // gemm.sides, "num_warps": 4}
    for name, value in fixed.items():
        if getattr(tile, name) != value:
            yield Violation(name, getattr(tile, name), f"{value} on the {NAME} path")
    if tile.block_k not in _DEPTHS:
        yield Violation("block_k", tile.block_k, f"one of {_DEPTHS} on the {NAME} path")
    elif not 2 <= tile.num_stages <= _places(tile.block_k, gemm, device):
        need = f"2 to {_places(tile.block_k, gemm, device)}, beside vectors of {gemm.depth} values"
        yield Violation("num_stages", tile.num_stages, need)


def pieces(depth: int) -> int:
    """Of a vector of `depth` values."""
    return -(-depth // PIECE)


def _places(block_k: int, gemm: Gemm, device: Device) -> int:
    """Places of a ring that fit beside the vectors and their scales."""
    vectors = pieces(gemm.depth) * VECTORS * (PIECE + 4 * VECTORS)
    return max(0, device.shared - _STAGING - vectors) // (ROWS * block_k)


def default(problem: Problem, device: Device) -> MoEConfig:
    """Return the tiles without a tuned file: the deepest places of which there are enough."""
    first, second = (_tile(gemm, device) for gemm in gemms(problem))
    return MoEConfig(first, second, NAME)


def _tile(gemm: Gemm, device: Device) -> LaunchConfig:
    places = {block_k: _places(block_k, gemm, device) for block_k in reversed(_DEPTHS)}
    block_k = next((k for k, count in places.items() if count >= _ENOUGH), _DEPTHS[0])
    return LaunchConfig(16, ROWS // gemm.sides, block_k, 1, 4, places[block_k])


_ROWS: Rows = {16: (0, 4)}
# Places of a ring, as many as fit and fewer (config).
_ENTRIES: ByBlock = {
    16: tuple(
        (64, block_k, 4, places)
        for block_k, counts in ((512, (6, 5, 4, 3, 2)), (256, (12, 10, 8, 6)), (128, (16, 12)))
        for places in counts
    ),
}


def candidates(problem: Problem, tokens: int) -> Groups:
    """Return launches worth timing with so many tokens."""
    if tokens > FEW_TRIED * most_tokens(problem):
        return {}
    return groups(worth(_ROWS, problem, tokens), (_ENTRIES, _ENTRIES), problem)
