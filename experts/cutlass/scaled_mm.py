"""torch._scaled_grouped_mm: torch's CUTLASS grouped GEMM over fp8 rows, with one scale per row.

It needs no other package. Two kernels are launched: one computes the arguments of each group, the
other is the GEMM.
"""

from collections.abc import Mapping

import torch

from experts.common.row_major import to_row_major
from modular_kernel.spec.problem import Problem
from modular_kernel.workspace import BufferSpec, Workspace

ARCHS = frozenset({(9, 0), (10, 0)})
MULTIPLE = 16  # N and K are multiples of 16, so that rows are 16-byte aligned
MAX_EXPERTS = 1023
SCHEMES = frozenset({"fp8_w8a8_channel", "fp8_w8a8_tensor"})


def scale_specs(problem: Problem, rows: int) -> Mapping[str, BufferSpec]:
    """Return the buffers that `rows_product` takes."""
    max_n = max(problem.w1_rows, problem.hidden)
    return {
        "scale_of_rows": BufferSpec((rows,), torch.float32),
        "scale_of_columns": BufferSpec((problem.e, max_n), torch.float32),
    }


def rows_product(
    rows: tuple[torch.Tensor, torch.Tensor | None],
    weights: tuple[torch.Tensor, torch.Tensor | None],
    ends: torch.Tensor | None,
    workspace: Workspace,
) -> torch.Tensor:
    """Return the product of rows and the weights of each row's expert, in bfloat16.

    rows: float8_e4m3fn (R, K) if `ends` is given, else (e, C, K), and scales (1,), (R, 1) or (e, C,
        1).
    weights: (e, N, K) and scales (e,) or (e, N). Copied unless row-major and 16-byte aligned.
    ends: (e,) int32, one past the last row of each expert, or None. Rows past the last end are
        undefined.
    """
    (a, a_scale), (w, w_scale) = rows, weights
    assert a_scale is not None
    assert w_scale is not None
    experts, columns, _ = w.shape
    product: torch.Tensor = torch._scaled_grouped_mm(
        a,
        to_row_major(w).transpose(1, 2),
        _expand_scale(a_scale.squeeze(-1), a.shape[:-1], workspace, "scale_of_rows"),
        _expand_scale(w_scale.view(experts, -1), (experts, columns), workspace, "scale_of_columns"),
        offs=ends,
        out_dtype=torch.bfloat16,
    )
    return product


def _expand_scale(
    scale: torch.Tensor, shape: tuple[int, ...], workspace: Workspace, name: str
) -> torch.Tensor:
    """Return one scale per row, contiguous, because the operation rejects a broadcast scale."""
    if tuple(scale.shape) == tuple(shape) and scale.is_contiguous():
        return scale
    return workspace.take(name, tuple(shape)).copy_(scale.expand(shape))
