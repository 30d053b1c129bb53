"""One grouped product with weights in the order of `experts.triton.grouped_w4.layout`."""

import torch

from experts.triton.grouped_w4.layout import (
    BLOCK,
    LINE,
    LINES,
    LOWERED,
    SCALE_LINE,
    SCALE_LINES,
    Tiled,
)
from experts.triton.launch_config import LaunchConfig
from experts.triton.operands import Product
from modular_kernel.ops.launch.launch import launch
from modular_kernel.ops.sort import Sorted


def multiply_tiled(
    x_RK: torch.Tensor,
    weights: Tiled,
    product: Product,
    tile: LaunchConfig,
    order: Sorted,
    out: torch.Tensor,
    *,
    short: int = 0,
    slots: int = 1,
) -> None:
    """Write act(x_RK @ W^T) of every row of `order`, in tiles of tile.block_m rows, to `out`.

    short: rows up to which a tile is multiplied as one of so many, or 0. slots: of results that
    wait to be stored, 1 or 2. Of `product` all but its weights and scales is read.
    """
    from experts.triton.grouped_w4.kernels.gemm import grouped_gemm_w4_kernel
    from experts.triton.kernels.tma_descriptors import multiprocessors, tma_descriptor

    bias = product.bias
    launch(
        grouped_gemm_w4_kernel,
        (multiprocessors(),),
        x_desc=tma_descriptor(x_RK, tile.block_m),
        w_desc=tma_descriptor(weights.words.view(-1, LINE), LINES),
        scale_desc=tma_descriptor(weights.scales.view(-1, SCALE_LINE), SCALE_LINES, SCALE_LINE),
        out_desc=tma_descriptor(out, tile.block_m, BLOCK),
        bias_ptr=out if bias is None else bias,
        out_ptr=out,
        tiles_ptr=order.tiles,
        max_tiles=order.max_tiles,
        columns=product.columns,
        num_n=weights.tiles,
        steps=weights.steps,
        stride_bias=0 if bias is None else bias.stride(0),
        up_row=product.up_row,
        FACTOR=2.0**LOWERED,
        STEP=product.step,
        HAS_BIAS=bias is not None,
        SHORT=short,
        STAGES=tile.num_stages,
        SLOTS=slots,
        GROUP_M=tile.group_m,
        num_warps=4,
        **product.constants,
    )
