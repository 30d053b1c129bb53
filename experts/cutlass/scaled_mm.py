"""Wrapper of torch._scaled_grouped_mm, PyTorch's CUTLASS grouped GEMM for fp8 rows.

Each row and each output column has one scale.
"""

from collections.abc import Mapping

import torch

from experts.common.row_major import to_row_major
from modular_kernel.spec.problem import Problem
from modular_kernel.workspace import BufferSpec, Workspace

ARCHS = frozenset({(9, 0), (10, 0)})
DIM_MULTIPLE = 16  # N and K must be multiples of 16, so that rows are 16-byte aligned
MAX_EXPERTS = 1023
SCHEMES = frozenset({"fp8_w8a8_channel", "fp8_w8a8_tensor"})


def expanded_scale_specs(problem: Problem, num_rows: int) -> Mapping[str, BufferSpec]:
    """Return the workspace buffers of `scaled_grouped_mm`, which hold the expanded scales."""
    max_n = max(problem.w1_rows, problem.hidden)
    return {
        "row_scales": BufferSpec((num_rows,), torch.float32),
        "column_scales": BufferSpec((problem.e, max_n), torch.float32),
    }


def scaled_grouped_mm(
    rows: tuple[torch.Tensor, torch.Tensor | None],
    weights: tuple[torch.Tensor, torch.Tensor | None],
    ends: torch.Tensor | None,
    workspace: Workspace,
) -> torch.Tensor:
    """Multiply each row by the weights of its expert; return the results in bfloat16.

    rows: float8_e4m3fn values and float32 scales. The values are (R, K) if `ends` is given, and
        (e, C, K) otherwise, where C is the number of rows per expert. The scales are (1,), (R, 1)
        or (e, C, 1).
    weights: float8_e4m3fn values (e, N, K) and float32 scales (e,) or (e, N). The values are copied
        unless they are row-major and 16-byte aligned.
    ends: (e,) int32, one past the last row of each expert; None for values (e, C, K). Results of
        rows past the last end are undefined.
    workspace: has the buffers of `expanded_scale_specs`.
    """
    (a, a_scale), (w, w_scale) = rows, weights
    assert a_scale is not None
    assert w_scale is not None
    experts, columns, _ = w.shape
    out: torch.Tensor = torch._scaled_grouped_mm(
        a,
        to_row_major(w).transpose(1, 2),
        _expand_scale(a_scale.squeeze(-1), a.shape[:-1], workspace, "row_scales"),
        _expand_scale(w_scale.view(experts, -1), (experts, columns), workspace, "column_scales"),
        offs=ends,
        out_dtype=torch.bfloat16,
    )
    return out


def _expand_scale(
    scale: torch.Tensor, shape: tuple[int, ...], workspace: Workspace, name: str
) -> torch.Tensor:
    """Return `scale` expanded to `shape` and contiguous, because torch rejects broadcast scales."""
    if tuple(scale.shape) == tuple(shape) and scale.is_contiguous():
        return scale
    return workspace.take(name, tuple(shape)).copy_(scale.expand(shape))
