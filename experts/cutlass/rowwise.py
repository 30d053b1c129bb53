"""fp8 experts with per-channel or per-tensor scales that call PyTorch's CUTLASS grouped GEMM.

CutlassRowwiseExpertsFP8 is for contiguous tokens, BatchedCutlassExpertsFP8 for the batched format.
"""

from dataclasses import replace

import torch

from experts.common.batched_rows import BatchedRowsExperts
from experts.common.sorted_rows import RowOrder, SortedRowsExperts
from experts.cutlass.scaled_mm import (
    ARCHS,
    DIM_MULTIPLE,
    MAX_EXPERTS,
    SCHEMES,
    expanded_scale_specs,
    scaled_grouped_mm,
)
from experts.derived_requirements import to_batched_requirements
from modular_kernel.spec.problem import MAX_TOP_K
from modular_kernel.tensors import BatchedShape
from modular_kernel.workspace import BufferSpec, Workspace

TensorAndScale = tuple[torch.Tensor, torch.Tensor | None]


class CutlassRowwiseExpertsFP8(SortedRowsExperts):
    """Experts over contiguous tokens, with fp8 weights scaled per channel or per tensor.

    Both GEMMs call torch._scaled_grouped_mm, which allocates its output in every call. The part
    applies the router weights and sums over top-k.
    """

    library_allocates_output = True
    requires = replace(
        SortedRowsExperts.requires,
        devices=frozenset({"cuda"}),
        archs=ARCHS,
        dtypes=frozenset({torch.bfloat16}),
        top_k=(1, MAX_TOP_K),  # any K, because torch receives sorted rows, not top-k ids
        hidden_multiple=DIM_MULTIPLE,
        intermediate_multiple=DIM_MULTIPLE,
        max_experts=MAX_EXPERTS,
        schemes=SCHEMES,
        library_allocates=True,
    )

    def grouped_gemm_specs(self, num_rows: int) -> dict[str, BufferSpec]:
        return dict(expanded_scale_specs(self.problem, num_rows))

    def grouped_gemm(
        self,
        rows: TensorAndScale,
        weights: TensorAndScale,
        bias: torch.Tensor | None,
        order: RowOrder,
        workspace: Workspace,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        return scaled_grouped_mm(rows, weights, order.ends, workspace)


class BatchedCutlassExpertsFP8(BatchedRowsExperts):
    """Experts over batched rows, with fp8 weights scaled per channel or per tensor.

    Router weights are not applied. All C rows of each expert are computed, including rows without a
    token.
    """

    library_allocates_output = True
    requires = to_batched_requirements(CutlassRowwiseExpertsFP8.requires)

    def grouped_gemm_specs(self, shape: BatchedShape) -> dict[str, BufferSpec]:
        return dict(expanded_scale_specs(self.problem, shape.experts * shape.capacity))

    def grouped_gemm(
        self,
        rows: TensorAndScale,
        weights: TensorAndScale,
        counts_e: torch.Tensor,
        workspace: Workspace,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        return scaled_grouped_mm(rows, weights, None, workspace)
