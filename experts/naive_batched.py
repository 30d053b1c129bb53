"""NaiveBatchedExperts: the PyTorch reference for the batched format."""

import torch

from modular_kernel.compatibility.support import ExpertsRequirements
from modular_kernel.contracts import PermuteExpertsUnpermute, TopKWeightAndReduce
from modular_kernel.ops.mlp import ExpertTokens, expert_mlps, mlp_roundings
from modular_kernel.quant.quantized_weights import SCHEMES
from modular_kernel.replay import stages
from modular_kernel.spec.problem import ActivationFormat, Reduce
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import (
    BatchedShape,
    BatchedTokens,
    Dispatched,
    DispatchShape,
    ExpertWeights,
)
from modular_kernel.workspace import BufferSpec, Workspace, WorkspaceShapes
from topk_reduce import TopKWeightAndReduceNaiveBatched, reducer_for


class NaiveBatchedExperts(PermuteExpertsUnpermute):
    """Loop over the experts of batched rows (e, C, H) and write only the valid rows.

    Every call copies the row counts to the host, so it cannot be captured in a CUDA graph.
    """

    requires = ExpertsRequirements(
        activation_format=ActivationFormat.BATCHED_EXPERTS,
        reduce=Reduce.NAIVE_BATCHED,
        keep_topk=True,
        weight_on_input=False,
        schemes=SCHEMES,
        external_schemes=True,
        lora=True,
    )

    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        assert isinstance(shape, BatchedShape)
        empty = BufferSpec((0,), self.problem.dtype)
        output_shape = (shape.experts, shape.capacity, self.problem.hidden)
        return WorkspaceShapes(empty, empty, BufferSpec(output_shape, self.problem.dtype))

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return reducer_for(self.problem, TopKWeightAndReduceNaiveBatched())

    def roundings(self, x_TH: torch.Tensor, weights: ExpertWeights) -> Roundings:
        return mlp_roundings(weights, self.problem, has_row_weights=False)

    def apply(
        self,
        tokens: Dispatched,
        *,
        weights: ExpertWeights,
        workspace: Workspace,
        output: torch.Tensor,
    ) -> None:
        assert isinstance(tokens, BatchedTokens)
        expert_inputs = []
        with stages.stage(stages.SORT):  # synchronizes with the device
            counts = tokens.counts_e.tolist()
        for expert, count in enumerate(counts):
            scale = tokens.scale
            if scale is not None and scale.dim() == 3:
                scale = scale[expert, :count]
            if not count:
                continue
            slots_R = unquantized_RH = None
            if tokens.adapters_eC is not None:
                slots_R, unquantized_RH = (
                    tokens.adapters_eC[expert, :count],
                    tokens.plain_eCH[expert],
                )
                unquantized_RH = unquantized_RH[:count]
            x_RH = tokens.x_eCH[expert, :count]
            expert_inputs.append(ExpertTokens(expert, x_RH, scale, None, slots_R, unquantized_RH))
        rows_per_expert = expert_mlps(expert_inputs, weights, self.problem)
        with stages.stage(stages.GEMM2):  # the copy to the output counts as part of GEMM 2
            for expert_input, rows in zip(expert_inputs, rows_per_expert, strict=True):
                output[expert_input.expert, : len(rows)] = rows
