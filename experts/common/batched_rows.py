"""Base classes for experts parts that call a library's grouped GEMM on batched rows (e, C, K).

Expert i has C rows, of which only the first counts_e[i] are valid. A call launches GEMM 1, the
activation (with quantization if the scheme quantizes activations), and GEMM 2.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch

from experts.common.activation_rows import (
    LIBRARY_ROUNDINGS,
    activate_and_quantize,
    activation_specs,
)
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

TensorAndScale = tuple[torch.Tensor, torch.Tensor | None]


class UnweightedRowsExperts(PickledByProblem, PermuteExpertsUnpermute):
    """Base class for parts that return the batched rows of GEMM 2, neither weighted nor summed."""

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return reducer_for(self.problem, TopKWeightAndReduceDelegate())

    def roundings(self, x_TH: torch.Tensor, weights: ExpertWeights) -> Roundings:
        return LIBRARY_ROUNDINGS


class BatchedRowsExperts(UnweightedRowsExperts):
    """Base class for parts that call a library's grouped GEMM on (e, C, K) rows.

    library_allocates_output: whether the library allocates its outputs. If so, the output of GEMM 2
        is copied to the output of the part.
    column_major_scales: whether the library takes the scales of GEMM 2's input column-major,
        (e, C, groups) with stride(1) = 1.
    """

    library_allocates_output: ClassVar[bool] = False
    column_major_scales: ClassVar[bool] = False

    @abstractmethod
    def grouped_gemm(
        self,
        rows: TensorAndScale,
        weights: TensorAndScale,
        counts_e: torch.Tensor,
        workspace: Workspace,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Multiply the rows of each expert by its weights; return the results (e, C, N).

        rows: values (e, C, K), and scales (1,) or (e, C, groups) with any strides.
        weights: values (e, N, K), and scales as in `weight_specs`.
        counts_e: (e,) int32. Only the first counts_e[i] rows of expert i are valid.
        workspace: has the buffers of `grouped_gemm_specs`.
        out: the buffer for the results; None if `library_allocates_output`.
        """

    def grouped_gemm_specs(self, shape: BatchedShape) -> Mapping[str, BufferSpec]:
        """Return the workspace buffers that `grouped_gemm` needs in addition to `out`."""
        return {}

    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        assert isinstance(shape, BatchedShape)
        problem, num_rows = self.problem, shape.experts * shape.capacity
        empty = BufferSpec((0,), problem.dtype)
        gate_up = BufferSpec((num_rows, problem.w1_rows), problem.dtype)
        output_shape = (shape.experts, shape.capacity, problem.hidden)
        return WorkspaceShapes(
            workspace13=empty if self.library_allocates_output else gate_up,
            workspace2=empty,
            output=BufferSpec(output_shape, problem.dtype),
            extra={
                **activation_specs(problem, num_rows, shape.experts),
                **self.grouped_gemm_specs(shape),
            },
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
            gate_up_eCN = self.grouped_gemm(x, w1, counts_e, workspace, out)
        h_RI, scale = activate_and_quantize(
            gate_up_eCN.flatten(0, 1),
            problem,
            counts_e,
            weights,
            workspace,
            column_major_scales=self.column_major_scales,
        )
        if scale is not None and scale.dim() == 2:  # restore the shape (e, C, groups)
            is_column_major = self.column_major_scales
            scale = scale.T[None].mT if is_column_major else scale.view(*row_shape, -1)
        with stages.stage(stages.GEMM2):
            h = h_RI.view(*row_shape, -1), scale
            w2 = weights.w2, weights.w2_scale
            rows_eCH = self.grouped_gemm(
                h, w2, counts_e, workspace, None if self.library_allocates_output else output
            )
            if self.library_allocates_output:
                output.copy_(rows_eCH)
