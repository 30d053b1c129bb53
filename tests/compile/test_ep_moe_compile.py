"""EPMoE's steps compile for sm_90, each as it is launched: no spills, the product expected."""

import pytest
import torch

from experts.ep_moe import (
    grouped_gemm_triton,
    post_reorder,
    pre_reorder,
    run_moe_ep_preproess,
    silu_and_mul,
)
from modular_kernel.testing.compile import CompileRecord, check, record_compiles

FP8 = torch.float8_e4m3fn
EXPERTS, HIDDEN, INTERMEDIATE = 8, 512, 256


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def compiled(
    tokens: int, top_k: int, dtype: torch.dtype, block_shape: list[int] | None
) -> list[CompileRecord]:
    """Everything one rank launches, with half of the experts."""
    rows, half = tokens * top_k, EXPERTS // 2
    ids = empty(tokens, top_k, dtype=torch.int64)
    scales, gemm, gemm2 = None, [], []
    if dtype == FP8:
        scales = empty(half, dtype=torch.float32)
        gemm = [True, scales, scales]
        if block_shape:
            bn, bk = block_shape
            shapes = [(rows, HIDDEN // bk), (half, 2 * INTERMEDIATE // bn, HIDDEN // bk)]
            gemm = [True, *(empty(*s, dtype=torch.float32) for s in shapes), block_shape]
            shapes = [(rows, INTERMEDIATE // bk), (half, HIDDEN // bn, INTERMEDIATE // bk)]
            gemm2 = [True, *(empty(*s, dtype=torch.float32) for s in shapes), block_shape]
    with record_compiles("sm_90") as records:
        reorder_ids, src2dst, seg_indptr = run_moe_ep_preproess(ids, EXPERTS)
        segments = (half, True, seg_indptr[: half + 1], None)
        x, gateup = empty(rows, HIDDEN, dtype=dtype), empty(rows, 2 * INTERMEDIATE)
        pre_reorder(empty(tokens, HIDDEN), x, src2dst, ids, scales, 0, half - 1)
        w13 = empty(half, 2 * INTERMEDIATE, HIDDEN, dtype=dtype)
        grouped_gemm_triton(x, w13, gateup, *segments, *gemm)
        h, down = empty(rows, INTERMEDIATE, dtype=dtype), empty(rows, HIDDEN)
        silu_and_mul(gateup, h, reorder_ids, scales, 0, half - 1)
        w2 = empty(half, HIDDEN, INTERMEDIATE, dtype=dtype)
        grouped_gemm_triton(h, w2, down, *segments, *(gemm2 or gemm))
        weights = empty(tokens, top_k, dtype=torch.float32)
        post_reorder(down, empty(tokens, HIDDEN), src2dst, ids, weights, 0, half - 1)
    return records


@pytest.mark.parametrize(
    ("dtype", "block_shape", "tokens", "instruction"),
    [
        (torch.bfloat16, None, 4, "HGMMA"),  # few rows: the weights take the side of 64
        (torch.bfloat16, None, 1024, "HGMMA"),
        (FP8, None, 1024, "QGMMA"),
        (FP8, [128, 128], 1024, "QGMMA"),
    ],
    ids=str,
)
def test_every_step_is_clean(
    dtype: torch.dtype, block_shape: list[int] | None, tokens: int, instruction: str
) -> None:
    records = compiled(tokens, 2, dtype, block_shape)
    assert [record.kernel for record in records] == [
        "pre_reorder_kernel",
        "segment_gemm_kernel",
        "silu_and_mul_kernel",
        "segment_gemm_kernel",
        "weight_and_sum_kernel",
    ]
    for record in records:
        expected = instruction if record.kernel == "segment_gemm_kernel" else None
        assert check(record, expected) == ()
