"""Launch the kernels of the grouped_w4 path, which tile weights and multiply by tiled weights.

Tiling reorders 4-bit weights and their scales for the GEMM kernel (`layout`).
"""

import torch

from experts.triton.grouped_w4.grouped_w4_config import num_staging_buffers
from experts.triton.grouped_w4.layout import (
    BLOCK,
    BLOCKS_PER_TILE,
    LINES_PER_STEP,
    WORDS_PER_LINE,
    WORDS_PER_SCALE_LINE,
    PackedFormat,
    TiledWeights,
    choose_packed_format,
)
from experts.triton.launch_config import LaunchConfig
from experts.triton.operands import GemmOperands, scale_group, word_format
from modular_kernel.ops.sort import SortedPairs
from modular_kernel.replay.launch.launch import launch

_STEPS_PER_PROGRAM = 4  # K steps that a program tiles, which are 128 bytes of a row


def choose_tiled_format(operands: GemmOperands) -> PackedFormat:
    """Return the format that the weights of `operands` have after tiling."""
    assert operands.scale is not None
    return choose_packed_format(operands.scheme, operands.size_k, operands.scale.dtype)


def tiled_gemm(
    x_RK: torch.Tensor,
    weights: TiledWeights,
    operands: GemmOperands,
    tile: LaunchConfig,
    order: SortedPairs,
    out: torch.Tensor,
    *,
    max_short_rows: int = 0,
) -> None:
    """Run a grouped GEMM with tiled weights: out[r] = act(x[r] @ W[expert of r]^T).

    x_RK: the activations, sorted by expert.
    weights: the tiled weights.
    operands: the other operands. Only the shapes and dtypes of its weights, scales and zero points
        are used.
    order: the sorted pairs, in tiles of tile.block_m rows.
    out: (R, N), contiguous. Rows outside all tiles are not written.
    max_short_rows: tiles with at most this many rows are multiplied as tiles of this size, which
        takes less time. If it is 0, all tiles have the full size.
    """
    from experts.triton.grouped_w4.kernels.gemm import grouped_gemm_w4_tma_kernel
    from experts.triton.kernels.tma_descriptors import count_sms, tma_descriptor

    packed_format = choose_tiled_format(operands)
    bias, global_scale = operands.bias, operands.global_scale
    launch(
        grouped_gemm_w4_tma_kernel,
        (count_sms(),),
        x_desc=tma_descriptor(x_RK, tile.block_m),
        w_desc=tma_descriptor(weights.words.view(-1, WORDS_PER_LINE), LINES_PER_STEP),
        scale_desc=tma_descriptor(
            weights.scales.view(-1, WORDS_PER_SCALE_LINE), packed_format.lines, WORDS_PER_SCALE_LINE
        ),
        out_desc=tma_descriptor(out, tile.block_m, BLOCK),
        global_scale_ptr=out if global_scale is None else global_scale,
        bias_ptr=out if bias is None else bias,
        out_ptr=out,
        tiles_ptr=order.tiles,
        max_tiles=order.max_tiles,
        size_n=operands.size_n,
        num_n_tiles=weights.tiles,
        num_k_steps=weights.steps,
        stride_bias=0 if bias is None else bias.stride(0),
        up_row_offset=operands.up_row_offset,
        PACKED_FORMAT=str(packed_format),
        ACC_FACTOR=2.0**packed_format.scale_shift,
        NUM_GLOBAL_SCALES=0 if global_scale is None else global_scale.shape[1],
        GATE_STRIDE=operands.gate_stride,
        HAS_BIAS=bias is not None,
        SHORT_TILE_ROWS=max_short_rows,
        STAGES=tile.num_stages,
        STAGING_BUFFERS=num_staging_buffers(
            tile, packed_format, gated=bool(operands.constants["GATED"])
        ),
        GROUP_M=tile.group_m,
        num_warps=4,
        **operands.constants,
    )


def tiled_shapes(
    experts: int, columns: int, k: int, packed_format: PackedFormat, *, gated: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of `TiledWeights.words` and `TiledWeights.scales`.

    columns: output columns of the GEMM.
    gated: whether the GEMM computes gate and up columns.
    """
    tiles = -(-columns // (BLOCKS_PER_TILE * BLOCK // (2 if gated else 1)))
    boxes = (experts, tiles, -(-k // BLOCK))
    words_shape = (*boxes, LINES_PER_STEP, WORDS_PER_LINE)
    return words_shape, (*boxes, packed_format.lines, WORDS_PER_SCALE_LINE)


def tile_experts(
    operands: GemmOperands, starts: torch.Tensor, out: TiledWeights, first_expert: int
) -> None:
    """Tile the weights of some experts. Experts without rows are skipped.

    operands: the operands of all experts. w, scale and zero_point must be contiguous.
    starts: (experts + 1,) int32, the first row of each expert, then the number of rows.
    out: the tiled weights of the experts to tile, which are first_expert and the following ones.
    """
    from experts.triton.grouped_w4.kernels.tile import tile_weights_kernel

    words, scale, zero_point = operands.w.view(torch.int32), operands.scale, operands.zero_point
    packed_format = choose_tiled_format(operands)
    assert scale is not None
    if packed_format.kind == "nvfp4":
        scale = scale.view(torch.uint8)
    launch(
        tile_weights_kernel,
        (out.tiles, -(-out.steps // _STEPS_PER_PROGRAM), len(out.words)),
        w_ptr=words,
        scale_ptr=scale,
        zero_point_ptr=words if zero_point is None else zero_point,
        starts_ptr=starts,
        out_words_ptr=out.words,
        out_scales_ptr=out.scales
        if packed_format.kind == "integer"
        else out.scales.view(torch.uint8),
        first_expert=first_expert,
        rows=words.shape[1],
        row_words=words.shape[2],
        scale_groups=scale.shape[2],
        size_n=operands.size_n,
        num_tiles=out.tiles,
        num_k_steps=out.steps,
        up_row_offset=operands.up_row_offset,
        GATE_STRIDE=operands.gate_stride,
        NUM_MATRICES=2 if operands.constants["GATED"] else 1,
        WEIGHT_FORMAT=word_format(operands.scheme),
        HAS_ZERO_POINTS=packed_format.zero,
        GROUP_K=scale_group(operands.scheme, operands.size_k)[1],
        SCALES_PER_ROW_AND_STEP=packed_format.groups,
        K_STEPS_PER_PROGRAM=_STEPS_PER_PROGRAM,
        num_warps=8,
    )
