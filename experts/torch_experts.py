"""TorchExperts: the PyTorch reference for contiguous tokens, on any device."""

import torch

from modular_kernel.compatibility.support import ExpertsRequirements
from modular_kernel.contracts import PermuteExpertsUnpermute, TopKWeightAndReduce
from modular_kernel.ops.count import local_ids
from modular_kernel.ops.mlp import ExpertTokens, expert_mlps, mlp_roundings
from modular_kernel.quant.quantized_weights import SCHEMES
from modular_kernel.replay import stages
from modular_kernel.spec.problem import ActivationFormat, Reduce, RowContents
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import (
    Dispatched,
    DispatchShape,
    ExpertWeights,
    StandardShape,
    StandardTokens,
)
from modular_kernel.workspace import BufferSpec, Workspace, WorkspaceShapes
from topk_reduce import TopKWeightAndReduceContiguous, reducer_for


class TorchExperts(PermuteExpertsUnpermute):
    """Loop over the experts and write unweighted rows (T, K, H); rows of skipped pairs are zero.

    Every call copies the routing to the host, so it cannot be captured in a CUDA graph.
    """

    requires = ExpertsRequirements(
        activation_format=ActivationFormat.STANDARD,
        reduce=Reduce.CONTIGUOUS,
        keep_topk=True,
        expert_map=True,
        chunking=True,
        invalid_rows=RowContents.ZERO,
        schemes=SCHEMES,
        external_schemes=True,
        lora=True,
    )

    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        assert isinstance(shape, StandardShape)
        empty = BufferSpec((0,), self.problem.dtype)
        output_shape = (shape.tokens, shape.top_k, self.problem.hidden)
        return WorkspaceShapes(empty, empty, BufferSpec(output_shape, self.problem.dtype))

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return reducer_for(self.problem, TopKWeightAndReduceContiguous())

    def roundings(self, x_TH: torch.Tensor, weights: ExpertWeights) -> Roundings:
        return mlp_roundings(
            weights, self.problem, has_row_weights=self.problem.apply_router_weight_on_input
        )

    def apply(
        self,
        tokens: Dispatched,
        *,
        weights: ExpertWeights,
        workspace: Workspace,
        output: torch.Tensor,
    ) -> None:
        assert isinstance(tokens, StandardTokens)
        with stages.stage(stages.SORT):
            ids_TK = local_ids(tokens.routing, weights.w1.shape[0])
        input_weights_TK = None
        if self.problem.apply_router_weight_on_input:
            input_weights_TK = tokens.routing.topk_weights_TK
        slots_T = tokens.routing.adapters_T
        expert_inputs, pair_indices = [], []
        with stages.stage(stages.PERMUTE):
            for expert in range(weights.w1.shape[0]):
                token, k = (ids_TK == expert).nonzero(as_tuple=True)
                if token.numel() == 0:
                    continue
                scale = tokens.scale
                if scale is not None and scale.dim() == 2:
                    scale = scale[token]
                row_weights = None if input_weights_TK is None else input_weights_TK[token, k]
                # LoRA adapters read unquantized rows.
                adapters = () if slots_T is None else (slots_T[token], tokens.plain_TH[token])
                x_RH = tokens.x_TH[token]
                expert_inputs.append(ExpertTokens(expert, x_RH, scale, row_weights, *adapters))
                pair_indices.append((token, k))
        rows_per_expert = expert_mlps(expert_inputs, weights, self.problem)
        with stages.stage(stages.UNPERMUTE):
            output.zero_()
            for pair_index, rows in zip(pair_indices, rows_per_expert, strict=True):
                output[pair_index] = rows
