"""torch._scaled_grouped_mm, torch's CUTLASS product of fp8 rows with a scale for each row.

Nothing else needs to be installed for it. Launches: the arguments of every group, the product.
"""

from collections.abc import Mapping

import torch

from experts.common.row_major import by_rows
from modular_kernel.spec.problem import Problem
from modular_kernel.workspace import BufferSpec, Workspace

ARCHS = frozenset({(9, 0), (10, 0)})
MULTIPLE = 16  # of N and K: rows start on 16 bytes
MOST_EXPERTS = 1023
SCHEMES = frozenset({"fp8_w8a8_channel", "fp8_w8a8_tensor"})


def scale_specs(problem: Problem, rows: int) -> Mapping[str, BufferSpec]:
    """Return the buffers that `rows_product` takes."""
    widest = max(problem.w1_rows, problem.hidden)
    return {
        "scale_of_rows": BufferSpec((rows,), torch.float32),
        "scale_of_columns": BufferSpec((problem.e, widest), torch.float32),
    }


def rows_product(
    rows: tuple[torch.Tensor, torch.Tensor | None],
    weights: tuple[torch.Tensor, torch.Tensor | None],
    ends: torch.Tensor | None,
    workspace: Workspace,
) -> torch.Tensor:
    """Return the product of rows and each one's expert's weights, in bfloat16.

    rows: float8_e4m3fn (R, K), ends (e,) int32 the row behind each expert's last one; or (e, C, K)
    and no ends. Their scales: (1,), (R, 1) or (e, C, 1). weights: (e, N, K), scales (e,) or (e, N).
    Rows behind the last end are undefined. Weights that do not lie row by row are copied.
    """
    (a, a_scale), (w, w_scale) = rows, weights
    assert a_scale is not None
    assert w_scale is not None
    experts, columns, _ = w.shape
    product: torch.Tensor = torch._scaled_grouped_mm(
        a,
        by_rows(w).transpose(1, 2),
        _each(a_scale.squeeze(-1), a.shape[:-1], workspace, "scale_of_rows"),
        _each(w_scale.view(experts, -1), (experts, columns), workspace, "scale_of_columns"),
        offs=ends,
        out_dtype=torch.bfloat16,
    )
    return product


def _each(
    scale: torch.Tensor, shape: tuple[int, ...], workspace: Workspace, name: str
) -> torch.Tensor:
    """Return a scale for each row, side by side: the operation refuses one that is repeated."""
    if tuple(scale.shape) == tuple(shape) and scale.is_contiguous():
        return scale
    return workspace.take(name, tuple(shape)).copy_(scale.expand(shape))
