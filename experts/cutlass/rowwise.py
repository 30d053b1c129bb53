"""fp8 by channel and by tensor over torch's CUTLASS product, for both formats."""

from dataclasses import replace

import torch

from experts.common.batched_rows import BatchedRowsExperts
from experts.common.sorted_rows import RowOrder, SortedRowsExperts
from experts.cutlass.scaled_mm import (
    ARCHS,
    MOST_EXPERTS,
    MULTIPLE,
    SCHEMES,
    rows_product,
    scale_specs,
)
from experts.derived_requirements import of_batched_rows
from modular_kernel.tensors import BatchedShape
from modular_kernel.workspace import BufferSpec, Workspace

Rows = tuple[torch.Tensor, torch.Tensor | None]


class CutlassRowwiseExpertsFP8(SortedRowsExperts):
    """Contiguous tokens, fp8 by channel or tensor; weights and sums over top-k itself.

    The products are torch._scaled_grouped_mm's. It returns memory of its own, so a call allocates.
    """

    keeps_results = True
    requires = replace(
        SortedRowsExperts.requires,
        devices=frozenset({"cuda"}),
        archs=ARCHS,
        dtypes=frozenset({torch.bfloat16}),
        hidden_multiple=MULTIPLE,
        intermediate_multiple=MULTIPLE,
        max_experts=MOST_EXPERTS,
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
    """Batched rows in and out, unweighted, fp8 by channel or tensor.

    Every row that an expert has room for is computed, whether it stands for a token or not.
    """

    keeps_results = True
    requires = of_batched_rows(CutlassRowwiseExpertsFP8.requires)

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
