"""fp8 experts with per-channel or per-tensor scales over torch's grouped GEMM, for both formats."""

from dataclasses import replace

import torch

from experts.common.batched_rows import BatchedRowsExperts
from experts.common.sorted_rows import RowOrder, SortedRowsExperts
from experts.cutlass.scaled_mm import (
    ARCHS,
    MAX_EXPERTS,
    MULTIPLE,
    SCHEMES,
    rows_product,
    scale_specs,
)
from experts.derived_requirements import batched_requirements
from modular_kernel.spec.problem import MAX_TOP_K
from modular_kernel.tensors import BatchedShape
from modular_kernel.workspace import BufferSpec, Workspace

Rows = tuple[torch.Tensor, torch.Tensor | None]


class CutlassRowwiseExpertsFP8(SortedRowsExperts):
    """Experts with fp8 by channel or tensor over contiguous tokens.

    They apply router weights and sum over top-k themselves. Both GEMMs are
    torch._scaled_grouped_mm, which allocates its output in every call.
    """

    library_allocates_output = True
    requires = replace(
        SortedRowsExperts.requires,
        devices=frozenset({"cuda"}),
        archs=ARCHS,
        dtypes=frozenset({torch.bfloat16}),
        top_k=(1, MAX_TOP_K),  # torch gets sorted rows and does not see K
        hidden_multiple=MULTIPLE,
        intermediate_multiple=MULTIPLE,
        max_experts=MAX_EXPERTS,
        schemes=SCHEMES,
        library_allocates=True,
    )

    def product_specs(self, rows: int) -> dict[str, BufferSpec]:
        return dict(scale_specs(self.problem, rows))

    def product(
        self,
        rows: Rows,
        weights: Rows,
        order: RowOrder,
        workspace: Workspace,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        return rows_product(rows, weights, order.ends, workspace)


class BatchedCutlassExpertsFP8(BatchedRowsExperts):
    """Experts with fp8 by channel or tensor over batched rows, without router weights.

    All C rows of each expert are computed, including those without a token.
    """

    library_allocates_output = True
    requires = batched_requirements(CutlassRowwiseExpertsFP8.requires)

    def product_specs(self, shape: BatchedShape) -> dict[str, BufferSpec]:
        return dict(scale_specs(self.problem, shape.experts * shape.capacity))

    def product(
        self,
        rows: Rows,
        weights: Rows,
        counts_e: torch.Tensor,
        workspace: Workspace,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        return rows_product(rows, weights, None, workspace)
