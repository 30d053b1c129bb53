"""MGroupedGemms: grouped GEMMs over rows that are sorted by expert, in Triton, for any GPU.

"M-grouped" means that the rows (M) of the experts are concatenated, and all experts have the same N
and K. The rows of an expert form a segment.
"""

import torch

from experts.triton.adapters import ShrinkOutput
from experts.triton.grouped.base import ExpertSortedGemms, GemmRows
from experts.triton.launch_config import LaunchConfig
from experts.triton.operands import GemmOperands
from modular_kernel.ops.sort import SortedPairs
from modular_kernel.replay.launch.launch import launch


class MGroupedGemms(ExpertSortedGemms):
    """Two grouped GEMMs, each in one Triton launch."""

    def multiply(
        self,
        rows: GemmRows,
        operands: GemmOperands,
        tile: LaunchConfig,
        order: SortedPairs,
        out: torch.Tensor,
    ) -> None:
        precision, tokens = self.problem.fp32_precision, order.token_of_row
        m_grouped_gemm(rows, operands, tile, order.tiles, out, precision, tokens)


def m_grouped_gemm(
    rows: GemmRows,
    operands: GemmOperands,
    tile: LaunchConfig,
    tiles: torch.Tensor,
    out: torch.Tensor,
    precision: str,
    tokens: torch.Tensor | None = None,
) -> None:
    """Compute out[r] = rows[r] @ W[expert of r]^T for the rows of `tiles`.

    rows: the left operand, with contiguous values.
    tile: the launch configuration.
    tiles: the encoded tile list, as in `modular_kernel.ops.sort.SortedPairs.tiles`.
    out: (R, columns), contiguous.
    precision: the precision of float32 GEMMs, as in Problem.fp32_precision.
    tokens: (R,), the token of each row. Needed only if `rows` has a shrink output.
    """
    from experts.triton.grouped.kernels.segment_gemm import segment_gemm_kernel

    a, a_scale, weights, _, shrink_output = rows
    assert shrink_output is None or isinstance(shrink_output, ShrinkOutput)
    lora_arguments = (
        {} if shrink_output is None else {"tokens_ptr": tokens, **shrink_output.arguments()}
    )
    max_tiles = tiles.numel() // 3
    num_n_blocks = -(-operands.size_n // tile.block_n)
    launch(
        segment_gemm_kernel,
        (max_tiles * num_n_blocks,),
        a_ptr=a,
        router_weights_ptr=a if weights is None else weights,
        out_ptr=out,
        tiles_ptr=tiles,
        max_tiles=max_tiles,
        HAS_ROUTER_WEIGHTS=weights is not None,
        **lora_arguments,
        **operands.arguments(tile, precision, a_scale),
    )
