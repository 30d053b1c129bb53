"""Base classes of experts parts that call a library's grouped GEMM on batched rows.

The launches are: GEMM 1; activation [and quantize]; GEMM 2.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch

from experts.common.activation_rows import ROUNDINGS, hidden_rows, hidden_specs
from modular_kernel.contracts import PermuteExpertsUnpermute, PickledByProblem, TopKWeightAndReduce
from modular_kernel.replay import stages
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import (
    BatchedShape,
    BatchedTokens,
    Dispatched,
    DispatchShape,
    ExpertWeights,
)
from modular_kernel.workspace import BufferSpec, Workspace, WorkspaceShapes
from topk_reduce import TopKWeightAndReduceDelegate, reducer_for

Rows = tuple[torch.Tensor, torch.Tensor | None]


class UnweightedRowsExperts(PickledByProblem, PermuteExpertsUnpermute):
    """Base of parts that return the batched rows of GEMM 2, neither weighted nor summed."""

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return reducer_for(self.problem, TopKWeightAndReduceDelegate())

    def roundings(self, x_TH: torch.Tensor, weights: ExpertWeights) -> Roundings:
        return ROUNDINGS


class BatchedRowsExperts(UnweightedRowsExperts):
    """Base of parts that call a library's grouped GEMM on (e, C, K) rows.

    library_allocates_output: the library allocates its results; those of GEMM 2 are then copied.
    scales_along_rows: the library takes the scales of GEMM 2's rows column-major, (e, C, groups)
        with stride(1) = 1.
    """

    library_allocates_output: ClassVar[bool] = False
    scales_along_rows: ClassVar[bool] = False

    @abstractmethod
    def product(
        self,
        rows: Rows,
        weights: Rows,
        counts_e: torch.Tensor,
        workspace: Workspace,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the product (e, C, N) of rows (e, C, K) and weights (e, N, K), both with scales.

        rows: scales have the shape (1,), or (e, C, groups) with any strides.
        weights: scales are as in `weight_specs`.
        counts_e: only the first counts_e[i] rows of expert i are valid.
        out: the buffer of the product; None if `library_allocates_output`.
        """

    def product_specs(self, shape: BatchedShape) -> Mapping[str, BufferSpec]:
        """Return the buffers that `product` takes in addition to its results."""
        return {}

    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        assert isinstance(shape, BatchedShape)
        problem, rows = self.problem, shape.experts * shape.capacity
        empty = BufferSpec((0,), problem.dtype)
        gate_up = BufferSpec((rows, problem.w1_rows), problem.dtype)
        output = (shape.experts, shape.capacity, problem.hidden)
        return WorkspaceShapes(
            workspace13=empty if self.library_allocates_output else gate_up,
            workspace2=empty,
            output=BufferSpec(output, problem.dtype),
            extra={**hidden_specs(problem, rows, shape.experts), **self.product_specs(shape)},
        )

    def apply(
        self,
        tokens: Dispatched,
        *,
        weights: ExpertWeights,
        workspace: Workspace,
        output: torch.Tensor,
    ) -> None:
        assert isinstance(tokens, BatchedTokens)
        problem, counts_e = self.problem, tokens.counts_e
        row_shape = tuple(tokens.x_eCH.shape[:2])
        with stages.stage(stages.GEMM1):
            out = None
            if not self.library_allocates_output:
                out = workspace.take("workspace13", (*row_shape, problem.w1_rows))
            x = tokens.x_eCH, tokens.scale
            w1 = weights.w1, weights.w1_scale
            gate_up_eCN = self.product(x, w1, counts_e, workspace, out)
        flat_RN = gate_up_eCN.flatten(0, 1)
        along = self.scales_along_rows
        h_RI, scale = hidden_rows(flat_RN, problem, counts_e, weights, workspace, along_rows=along)
        if scale is not None and scale.dim() == 2:
            scale = scale.T[None].mT if along else scale.view(*row_shape, -1)
        with stages.stage(stages.GEMM2):
            h = h_RI.view(*row_shape, -1), scale
            w2 = weights.w2, weights.w2_scale
            rows_eCH = self.product(
                h, w2, counts_e, workspace, None if self.library_allocates_output else output
            )
            if self.library_allocates_output:
                output.copy_(rows_eCH)
