"""BatchedTritonExperts: experts for the batched format (e, C, H), in Triton.

In the batched format, local expert i has C rows, of which only the first counts_e[i] hold tokens.
The router weights and the sum over top-k are left to the PrepareAndFinalize that made the batches.
"""

from dataclasses import dataclass, replace

import torch

from experts.derived_requirements import to_batched_requirements
from experts.triton.adapters import ShrinkOutput, adapter_specs, shrink_batched
from experts.triton.base import TritonExpertsBase
from experts.triton.configs.select import choose_config
from experts.triton.launch_config import LaunchConfig
from experts.triton.operands import GemmOperands, gemm1_operands, gemm2_operands
from modular_kernel.contracts import TopKWeightAndReduce
from modular_kernel.ops.quantize import quantize_rows, quantize_specs, take_quantized
from modular_kernel.ops.valid_rows import BatchedRows
from modular_kernel.replay import stages
from modular_kernel.replay.launch.launch import launch
from modular_kernel.spec.problem import Problem
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


class BatchedTritonExperts(TritonExpertsBase):
    """Experts for the batched format. Each of the two GEMMs is one launch of `batched_gemm_kernel`.

    Only the first counts_e[i] rows of expert i are read or written.

    replayable: a plan may record the launches of a call and repeat them without running this code.
    """

    replayable = True
    requires = replace(to_batched_requirements(TritonExpertsBase.requires), weight_on_input=False)

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        from experts.triton.kernels.batched_gemm import batched_gemm_kernel

        self._kernel = batched_gemm_kernel

    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        assert isinstance(shape, BatchedShape)
        problem = self.problem
        row_shape, extra = (shape.experts, shape.capacity), dict[str, BufferSpec]()
        num_rows = shape.experts * shape.capacity
        if problem.scheme.quantizes_activations:  # buffers of the quantized input of GEMM 2
            columns, segments = problem.intermediate, shape.experts
            extra |= quantize_specs("h", problem.scheme, num_rows, columns, segments=segments)
        if problem.adapters is not None:
            extra |= adapter_specs(problem, num_rows)
        return WorkspaceShapes(
            workspace13=BufferSpec((*row_shape, problem.intermediate), problem.dtype),
            workspace2=BufferSpec((0,), problem.dtype),
            output=BufferSpec((*row_shape, problem.hidden), problem.dtype),
            extra=extra,
        )

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return reducer_for(self.problem, TopKWeightAndReduceDelegate())

    def roundings(self, x_TH: torch.Tensor, weights: ExpertWeights) -> Roundings:
        return Roundings()

    def apply(
        self,
        tokens: Dispatched,
        *,
        weights: ExpertWeights,
        workspace: Workspace,
        output: torch.Tensor,
    ) -> None:
        assert isinstance(tokens, BatchedTokens)
        problem = self.problem
        experts, capacity, _ = tokens.x_eCH.shape
        launch1, launch2 = choose_config(problem, capacity).typed_launches(LaunchConfig)
        h_eCI = workspace.take("workspace13", (experts, capacity, problem.intermediate))
        shrink, shrink_output = None, None
        if tokens.adapters_eC is not None:
            shrink = _BatchedShrink(tokens, weights, problem, workspace, launch1.block_m)
        with stages.stage(stages.GEMM1):
            if shrink is not None:
                shrink_output = shrink.shrink_x()
            operands = gemm1_operands(weights, problem)
            rows = (tokens.x_eCH, tokens.scale)
            self._multiply(rows, operands, launch1, tokens.counts_e, h_eCI, shrink_output)
        h_rows: tuple[torch.Tensor, torch.Tensor | None] = h_eCI, None
        if problem.scheme.quantizes_activations:
            h_rows = self._quantize(h_eCI, tokens, weights, workspace)
        with stages.stage(stages.GEMM2):
            if shrink is not None:
                shrink_output = shrink.shrink_h(h_eCI)
            operands = gemm2_operands(weights, problem)
            self._multiply(h_rows, operands, launch2, tokens.counts_e, output, shrink_output)

    def _quantize(
        self,
        h_eCI: torch.Tensor,
        tokens: BatchedTokens,
        weights: ExpertWeights,
        workspace: Workspace,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize h, the input of GEMM 2; return the 8-bit values (e, C, I) and their scales."""
        scheme, (experts, capacity, columns) = self.problem.scheme, h_eCI.shape
        with stages.stage(stages.QUANTIZE):
            out = take_quantized(
                workspace,
                "h",
                scheme,
                (experts * capacity, columns),
                segments=experts,
                static_scale=weights.a2_scale,
            )
            valid_rows = BatchedRows(tokens.counts_e)
            quantize_rows(h_eCI.flatten(0, 1), scheme, out=out, valid_rows=valid_rows)
        return out.q_RK.view_as(h_eCI), out.scale

    def _multiply(
        self,
        rows: tuple[torch.Tensor, torch.Tensor | None],
        operands: GemmOperands,
        tile: LaunchConfig,
        counts_e: torch.Tensor,
        out: torch.Tensor,
        shrink_output: ShrinkOutput | None,
    ) -> None:
        """Launch one GEMM.

        rows: values (e, C, K), and their scales or None.
        out: the output, (e, C, columns).
        """
        a_eCK, a_scale = rows
        experts, capacity, _ = a_eCK.shape
        num_m_blocks = -(-capacity // tile.block_m)
        num_n_blocks = -(-operands.size_n // tile.block_n)
        launch(
            self._kernel,
            (num_m_blocks * num_n_blocks, experts),
            a_ptr=a_eCK,
            out_ptr=out,
            counts_ptr=counts_e,
            capacity=capacity,
            num_m_blocks=num_m_blocks,
            stride_ase=0 if a_scale is None else _get_expert_stride(a_scale, capacity),
            **({} if shrink_output is None else shrink_output.arguments()),
            **operands.arguments(tile, self.problem.fp32_precision, a_scale),
        )


@dataclass(frozen=True)
class _BatchedShrink:
    """The LoRA shrink launches of one call in which some rows have adapters."""

    tokens: BatchedTokens
    weights: ExpertWeights
    problem: Problem
    workspace: Workspace
    block_m: int

    def shrink_x(self) -> ShrinkOutput:
        matrices = self.weights.lora_a13, self.weights.lora_b13
        return self._shrink("lora_u13", self.tokens.plain_eCH, *matrices)

    def shrink_h(self, h_eCI: torch.Tensor) -> ShrinkOutput:
        return self._shrink("lora_u2", h_eCI, self.weights.lora_a2, self.weights.lora_b2)

    def _shrink(
        self, name: str, x_eCK: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None
    ) -> ShrinkOutput:
        slots_eC, counts_e = self.tokens.adapters_eC, self.tokens.counts_e
        assert slots_eC is not None
        assert a is not None
        assert b is not None  # validated with the weights
        experts, capacity, _ = x_eCK.shape
        u = self.workspace.take(name, (experts * capacity, a.shape[2]))
        with stages.stage(stages.SHRINK):
            return shrink_batched(u, x_eCK, slots_eC, counts_e, (a, b), self.problem, self.block_m)


def _get_expert_stride(a_scale: torch.Tensor, capacity: int) -> int:
    """Return the stride of a_scale between experts. Its shape is (1,), (e * C, G) or (e, C, G)."""
    if a_scale.dim() == 1:
        return 0
    return a_scale.stride(0) * (capacity if a_scale.dim() == 2 else 1)
