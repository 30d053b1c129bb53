"""Base classes for experts that sort rows of contiguous tokens and call a library's grouped GEMM.

A pair is a token together with one of its top_k experts. A call sorts the pairs by expert, copies
each token to the rows of its pairs, runs GEMM 1, the activation and GEMM 2, and sums the weighted
rows of each token. The copy and the activation also quantize if the scheme quantizes activations.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from experts.common.activation_rows import (
    LIBRARY_ROUNDINGS,
    activate_and_quantize,
    activation_specs,
)
from experts.triton.path import merge_workspaces
from modular_kernel.compatibility.support import ExpertsRequirements
from modular_kernel.contracts import PermuteExpertsUnpermute, PickledByProblem, TopKWeightAndReduce
from modular_kernel.ops.permute import permute_tokens
from modular_kernel.ops.permute_quantize import permute_and_quantize
from modular_kernel.ops.quantize import QuantizedRows, scale_shape
from modular_kernel.ops.reduce import gather_rows, gather_weight_and_sum
from modular_kernel.ops.sort import sort_pairs, sort_specs
from modular_kernel.quant.quantized_weights import STORAGE
from modular_kernel.replay import stages
from modular_kernel.spec.problem import ActivationFormat, Combine, Reduce
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import (
    Dispatched,
    DispatchedRouting,
    DispatchShape,
    ExpertWeights,
    StandardShape,
    StandardTokens,
)
from modular_kernel.workspace import BufferSpec, Workspace, WorkspaceShapes
from topk_reduce import TopKWeightAndReduceNoOp, reducer_for

# Rows per tile in the tile list of `sort_pairs`. The libraries do not use this list.
_TILE_M = 128


@dataclass(frozen=True)
class RowOrder:
    """The row of each pair when rows are sorted by expert.

    row_of_pair_TK: (T, K) int32, -1 for a skipped pair.
    ends: (e,) int32, one past the last row of each expert.
    num_rows: (1,) int32, the number of rows in use. The contents of later rows are undefined.
    """

    row_of_pair_TK: torch.Tensor
    ends: torch.Tensor
    num_rows: torch.Tensor


class SummedRowsExperts(PickledByProblem, PermuteExpertsUnpermute):
    """Base class for parts whose last step gathers, weights and sums the rows of each token.

    Subclasses choose the order of the rows, and add the limits of their GEMMs to `requires`.
    """

    requires = ExpertsRequirements(
        activation_format=ActivationFormat.STANDARD,
        packages=("triton",),
        triton=True,
        graph_capturable=True,
        reduce=Reduce.NOOP,
        keep_topk=True,
        bias=False,
        weight_on_input=False,
        expert_map=True,
        chunking=True,
    )

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return reducer_for(self.problem, TopKWeightAndReduceNoOp())

    def roundings(self, x_TH: torch.Tensor, weights: ExpertWeights) -> Roundings:
        return LIBRARY_ROUNDINGS

    def unpermute(
        self,
        rows_RH: torch.Tensor,
        row_of_pair_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor | None,
        output: torch.Tensor,
    ) -> None:
        """Write the weighted sum of each token's rows to `output`.

        If the problem keeps top-k, write the unweighted rows (T, K, H) instead.
        """
        problem = self.problem
        is_summed = problem.combine is Combine.SUM
        with stages.stage(stages.GATHER_REDUCE if is_summed else stages.UNPERMUTE):
            if not is_summed:
                gather_rows(rows_RH, row_of_pair_TK, None, scale=1.0, out=output)
                return
            factor = problem.routed_scaling_factor
            gather_weight_and_sum(
                rows_RH, row_of_pair_TK, topk_weights_TK, scale=factor, out=output
            )


class SortedRowsExperts(SummedRowsExperts):
    """Base class for parts that call a library's grouped GEMM on expert-sorted rows.

    A pair whose expert is on another rank gets no row.

    library_allocates_output: whether the library allocates its outputs outside the workspace.
    column_major_scales: whether the library takes the scales of rows column-major, (R, groups) with
        stride(0) = 1.
    """

    library_allocates_output: ClassVar[bool] = False
    column_major_scales: ClassVar[bool] = False

    @abstractmethod
    def grouped_gemm(
        self,
        rows: tuple[torch.Tensor, torch.Tensor | None],
        weights: tuple[torch.Tensor, torch.Tensor | None],
        bias: torch.Tensor | None,
        order: RowOrder,
        workspace: Workspace,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Multiply each row by the weights of its expert, and add the expert's bias.

        Return the results (R, N).

        rows: values (R, K), and their scales as in `QuantizedRows`.
        weights: values (e, N, K), and their scales as in `weight_specs`.
        bias: (e, N), float32 or the problem's dtype, with any strides. None if the problem has no
            biases, and always None unless `requires.bias`.
        order: the order of the rows, which determines the expert of each row.
        workspace: has the buffers of `grouped_gemm_specs`.
        out: the buffer for the results; None if `library_allocates_output`.
        """

    def max_rows(self, num_pairs: int) -> int:
        """Return the maximum number of rows for `num_pairs` pairs, including padding."""
        return num_pairs

    def sort_rows_specs(self, num_tokens: int, top_k: int) -> Mapping[str, BufferSpec]:
        """Return the workspace buffers of `sort_rows`."""
        return sort_specs(num_tokens, top_k, _TILE_M, self.problem.e)

    def sort_rows(self, routing: DispatchedRouting, workspace: Workspace) -> RowOrder:
        """Sort the pairs by expert and assign a row to each pair."""
        sorted_pairs = sort_pairs(
            routing, block_m=_TILE_M, num_local=self.problem.e, workspace=workspace
        )
        return RowOrder(
            sorted_pairs.row_of_pair_TK, sorted_pairs.starts[1:], sorted_pairs.starts[-1:]
        )

    def grouped_gemm_specs(self, num_rows: int) -> Mapping[str, BufferSpec]:
        """Return the workspace buffers that `grouped_gemm` needs in addition to `out`."""
        return {}

    def takes_unquantized(self, shape: DispatchShape) -> bool:
        """Return whether the permutation of this part also quantizes the tokens.

        It does if the scale is static, or if each scale depends on a single token.
        """
        scheme = self.problem.scheme
        is_row_local = scheme.static or scheme.activation_granularity != "tensor"
        return scheme.quantizes_activations and is_row_local

    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        assert isinstance(shape, StandardShape)
        return merge_workspaces(self.problem, shape, [self._make_buffer_specs(shape)])

    def _make_buffer_specs(self, shape: StandardShape) -> dict[str, BufferSpec]:
        problem, scheme = self.problem, self.problem.scheme
        num_rows = self.max_rows(shape.tokens * shape.top_k)
        x_dtype = STORAGE[scheme.activation] if scheme.quantizes_activations else problem.dtype
        specs = {
            **self.sort_rows_specs(shape.tokens, shape.top_k),
            "permuted_x": BufferSpec((num_rows, problem.hidden), x_dtype),
            **activation_specs(problem, num_rows),
            **self.grouped_gemm_specs(num_rows),
        }
        if scheme.quantizes_activations and scheme.activation_granularity != "tensor":
            permuted_scale_shape = scale_shape(scheme, num_rows, problem.hidden)
            specs["permuted_scale"] = BufferSpec(permuted_scale_shape, torch.float32)
        if not self.library_allocates_output:
            dtype = problem.dtype
            specs["workspace13"] = BufferSpec((num_rows, problem.w1_rows), dtype)
            aliases = ("permuted_x", "workspace13")
            specs["workspace2"] = BufferSpec((num_rows, problem.hidden), dtype, aliases)
        return specs

    def apply(
        self,
        tokens: Dispatched,
        *,
        weights: ExpertWeights,
        workspace: Workspace,
        output: torch.Tensor,
    ) -> None:
        assert isinstance(tokens, StandardTokens)
        problem, routing = self.problem, tokens.routing
        with stages.stage(stages.SORT):
            order = self.sort_rows(routing, workspace)
        max_rows = self.max_rows(routing.topk_ids_TK.numel())
        is_only_copied = tokens.scale is not None or not problem.scheme.quantizes_activations
        with stages.stage(stages.PERMUTE if is_only_copied else stages.PERMUTE_QUANTIZED):
            x = self._permute(tokens, order, max_rows, weights, workspace)
        with stages.stage(stages.GEMM1):
            w1 = weights.w1, weights.w1_scale
            out = self._take_output("workspace13", (max_rows, problem.w1_rows), workspace)
            gate_up_RN = self.grouped_gemm(x, w1, weights.b1, order, workspace, out)
        h = activate_and_quantize(
            gate_up_RN,
            problem,
            order.num_rows,
            weights,
            workspace,
            column_major_scales=self.column_major_scales,
        )
        with stages.stage(stages.GEMM2):
            w2 = weights.w2, weights.w2_scale
            out = self._take_output("workspace2", (max_rows, problem.hidden), workspace)
            rows_RH = self.grouped_gemm(h, w2, weights.b2, order, workspace, out)
        self.unpermute(rows_RH, order.row_of_pair_TK, routing.topk_weights_TK, output)

    def _take_output(
        self, name: str, shape: tuple[int, int], workspace: Workspace
    ) -> torch.Tensor | None:
        return None if self.library_allocates_output else workspace.take(name, shape)

    def _permute(
        self,
        tokens: StandardTokens,
        order: RowOrder,
        max_rows: int,
        weights: ExpertWeights,
        workspace: Workspace,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Copy each token to the rows of its pairs, and quantize it if necessary.

        Return the rows and their scales.
        """
        scheme, row_of_pair_TK = self.problem.scheme, order.row_of_pair_TK
        x_RH = workspace.take("permuted_x", (max_rows, self.problem.hidden))
        if not scheme.quantizes_activations:
            permute_tokens(tokens.x_TH, row_of_pair_TK, None, rows_RH=x_RH)
            return x_RH, None
        static_scale = weights.a1_scale if scheme.static else None
        scale = static_scale if tokens.scale is None else tokens.scale
        if scale is None or scale.dim() == 2:
            scale = self._take_scale_buffer(max_rows, workspace)
        out = QuantizedRows(x_RH, scale, along_rows=scale.dim() == 3)
        if tokens.scale is None:
            permute_and_quantize(tokens.x_TH, row_of_pair_TK, None, scheme, out=out)
            return x_RH, out.scale_of_rows
        scale_arguments = {}
        if tokens.scale.dim() == 2:
            scale_arguments = {"scale_TG": tokens.scale, "scale_rows_RG": out.scale_of_rows}
        permute_tokens(tokens.x_TH, row_of_pair_TK, None, rows_RH=x_RH, **scale_arguments)
        return x_RH, out.scale_of_rows

    def _take_scale_buffer(self, max_rows: int, workspace: Workspace) -> torch.Tensor:
        shape = scale_shape(self.problem.scheme, max_rows, self.problem.hidden)
        if self.column_major_scales:
            shape = (1, *reversed(shape))
        return workspace.take("permuted_scale", shape)
