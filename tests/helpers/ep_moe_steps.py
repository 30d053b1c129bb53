"""Inputs for the steps of EPMoE, and a function that runs all steps."""

import torch

from experts.compat.ep_moe import (
    grouped_gemm_triton,
    post_reorder,
    pre_reorder,
    run_moe_ep_preproess,
    silu_and_mul,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP8 = torch.float8_e4m3fn


def random_normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def nan_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), device=DEVICE).to(dtype)


def random_ids(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    """Draw ids from [-1, experts), so that some pairs are skipped."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(-1, experts, (tokens, top_k), generator=generator).to(DEVICE)


def run_steps(
    x_TH: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    local_range: tuple[int, int],
) -> torch.Tensor:
    """Run the steps on one rank.

    w13, w2: weights of all experts. local_range: ids of the first and the last local expert.
    """
    (tokens, hidden), (experts, width, _) = x_TH.shape, w13.shape
    start, end = local_range
    reorder_ids, src2dst, seg_indptr = run_moe_ep_preproess(ids_TK, experts)
    segments = (end - start + 1, True, seg_indptr[start : end + 2])
    rows, dtype = ids_TK.numel(), x_TH.dtype
    gateup_input, gateup_output = (
        nan_tensor(rows, hidden, dtype=dtype),
        nan_tensor(rows, width, dtype=dtype),
    )
    pre_reorder(x_TH, gateup_input, src2dst, ids_TK, None, start, end)
    grouped_gemm_triton(gateup_input, w13[start : end + 1], gateup_output, *segments)
    down_input, down_output = (
        nan_tensor(rows, width // 2, dtype=dtype),
        nan_tensor(rows, hidden, dtype=dtype),
    )
    silu_and_mul(gateup_output, down_input, reorder_ids, None, start, end)
    grouped_gemm_triton(down_input, w2[start : end + 1], down_output, *segments)
    out = nan_tensor(tokens, hidden, dtype=dtype)
    post_reorder(down_output, out, src2dst, ids_TK, weights_TK, start, end)
    return out
