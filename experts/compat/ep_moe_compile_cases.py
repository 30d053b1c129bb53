"""Launch the kernels of `experts.compat.ep_moe` on meta tensors, for `mk compile`."""

import torch

from experts.compat.ep_moe import (
    grouped_gemm_triton,
    post_reorder,
    pre_reorder,
    run_moe_ep_preproess,
    silu_and_mul,
)

FP8 = torch.float8_e4m3fn
EXPERTS, HIDDEN, INTERMEDIATE = 8, 512, 256
# (tokens, weight dtype, block shape of the scales). Each case launches different kernels.
COMPILE_CASES: tuple[tuple[int, torch.dtype, list[int] | None], ...] = (
    (4, torch.bfloat16, None),
    (1024, torch.bfloat16, None),
    (1024, FP8, None),
    (1024, FP8, [128, 128]),
)


def launch_all(tokens: int, top_k: int, dtype: torch.dtype, block_shape: list[int] | None) -> None:
    """Launch the kernels of all steps for a rank that has half of the experts.

    dtype: the dtype of the weights.
    block_shape: the block shape of the scales, or None.
    """
    rows, num_local = tokens * top_k, EXPERTS // 2
    ids = _make_empty(tokens, top_k, dtype=torch.int64)
    scales, is_quantized = None, dtype == FP8
    gemm1_scales: tuple[torch.Tensor | None, ...] = (None, None)
    gemm2_scales = gemm1_scales
    if is_quantized:
        scales = _make_empty(num_local, dtype=torch.float32)
        gemm1_scales = gemm2_scales = (scales, scales)
    if block_shape:
        bn, bk = block_shape
        gemm1_scales = _make_scales(
            (rows, HIDDEN // bk), (num_local, 2 * INTERMEDIATE // bn, HIDDEN // bk)
        )
        gemm2_scales = _make_scales(
            (rows, INTERMEDIATE // bk), (num_local, HIDDEN // bn, INTERMEDIATE // bk)
        )
    reorder_ids, src2dst, seg_indptr = run_moe_ep_preproess(ids, EXPERTS)
    segments = (num_local, True, seg_indptr[: num_local + 1], None)
    x, gateup = _make_empty(rows, HIDDEN, dtype=dtype), _make_empty(rows, 2 * INTERMEDIATE)
    pre_reorder(_make_empty(tokens, HIDDEN), x, src2dst, ids, scales, 0, num_local - 1)
    w13 = _make_empty(num_local, 2 * INTERMEDIATE, HIDDEN, dtype=dtype)
    grouped_gemm_triton(
        x, w13, gateup, *segments, is_quantized, gemm1_scales[0], gemm1_scales[1], block_shape
    )
    h, down = _make_empty(rows, INTERMEDIATE, dtype=dtype), _make_empty(rows, HIDDEN)
    silu_and_mul(gateup, h, reorder_ids, scales, 0, num_local - 1)
    w2 = _make_empty(num_local, HIDDEN, INTERMEDIATE, dtype=dtype)
    grouped_gemm_triton(
        h, w2, down, *segments, is_quantized, gemm2_scales[0], gemm2_scales[1], block_shape
    )
    weights = _make_empty(tokens, top_k, dtype=torch.float32)
    post_reorder(down, _make_empty(tokens, HIDDEN), src2dst, ids, weights, 0, num_local - 1)


def _make_scales(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(_make_empty(*shape, dtype=torch.float32) for shape in shapes)


def _make_empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
