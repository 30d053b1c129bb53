"""Products over segments of sorted rows, in Triton, on any GPU."""

import torch

from experts.triton.adapters import Shrunk
from experts.triton.grouped.base import ExpertSortedGemms, Rows
from experts.triton.launch_config import LaunchConfig
from experts.triton.operands import Product
from modular_kernel.ops.sort import Sorted
from modular_kernel.replay.launch.launch import launch


class MGroupedGemms(ExpertSortedGemms):
    """One launch a product; an expert's rows are a segment."""

    def multiply(
        self, rows: Rows, product: Product, tile: LaunchConfig, order: Sorted, out: torch.Tensor
    ) -> None:
        precision, tokens = self.problem.fp32_precision, order.token_of_row
        m_grouped_gemm(rows, product, tile, order.tiles, out, precision, tokens)


def m_grouped_gemm(
    rows: Rows,
    product: Product,
    tile: LaunchConfig,
    tiles: torch.Tensor,
    out: torch.Tensor,
    precision: str,
    tokens: torch.Tensor | None = None,
) -> None:
    """out[r] = rows[r] times the weights of r's expert, for the rows of `tiles`, as ops.sort cuts.

    out: (R, columns), contiguous as the values of `rows` are. precision: of float32 products.
    tokens: (R,) each row's, where adapters add to it.
    """
    from experts.triton.grouped.kernels.segment_gemm import segment_gemm_kernel

    a, a_scale, weights, _, shrunk = rows
    assert shrunk is None or isinstance(shrunk, Shrunk)
    adapters = {} if shrunk is None else {"tokens_ptr": tokens, **shrunk.arguments()}
    max_tiles = tiles.numel() // 3
    num_n = -(-product.columns // tile.block_n)
    launch(
        segment_gemm_kernel,
        (max_tiles * num_n,),
        a_ptr=a,
        row_weights_ptr=a if weights is None else weights,
        out_ptr=out,
        tiles_ptr=tiles,
        max_tiles=max_tiles,
        HAS_ROW_WEIGHTS=weights is not None,
        **adapters,
        **product.arguments(tile, precision, a_scale),
    )
