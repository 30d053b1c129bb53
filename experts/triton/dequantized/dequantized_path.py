"""The dequantized path: 4- or 8-bit weights are converted to bf16 before the grouped GEMMs.

The path is for many rows per expert. Experts are processed in chunks, to limit the size of the
buffer for dequantized weights (`dequantized_config.experts_per_chunk`). Only the weights of experts
with rows are dequantized.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from experts.triton.candidates import CandidateGroups
from experts.triton.dequantized import dequantized_config
from experts.triton.dequantized.dequantized_config import violations
from experts.triton.grouped.base import GemmRows
from experts.triton.grouped_tma.grouped_tma_path import GroupedTmaPath
from experts.triton.launch_config import Device, Gemm, Launch, LaunchConfig, MoEConfig, Violation
from experts.triton.operands import DEFAULT_ZERO_POINT, GemmOperands, scale_group, word_format
from experts.triton.path import PathCall
from modular_kernel.ops.count import next_power_of_2
from modular_kernel.ops.sort import SortedPairs, max_tile_count
from modular_kernel.quant.quantized_weights import SCALE_FIELDS
from modular_kernel.replay.launch.launch import launch
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import ExpertWeights
from modular_kernel.workspace import BufferSpec, Workspace

# Elements and warps per program: the fastest of 4096 to 32768 elements and of 4 and 8 warps on an
# H200.
_ELEMENTS_PER_PROGRAM, _NUM_WARPS = 8192, 4
_MAX_K_PER_PROGRAM = 1024
_MAX_STEP_K = 128  # maximum number of K elements that share a scale in the kernel
_TILES_PER_PROGRAM = 64  # tiles that a program of `select_expert_tiles_kernel` copies


class DequantizedPath(GroupedTmaPath):
    """The path for the problems of `dequantized_config.supports`."""

    name = dequantized_config.NAME
    roundings = Roundings(weights=True)

    @classmethod
    def supports(cls, problem: Problem, device: Device) -> bool:
        return problem.adapters is None and dequantized_config.supports(problem, device)

    @classmethod
    def min_tokens(cls, problem: Problem) -> int:
        return dequantized_config.min_tokens(problem)

    @classmethod
    def default_config(cls, problem: Problem, tokens: int, device: Device) -> MoEConfig:
        return dequantized_config.default_config(problem)

    @classmethod
    def violations(
        cls, config: Launch, gemm: Gemm, problem: Problem, device: Device
    ) -> Iterator[Violation]:
        assert isinstance(config, LaunchConfig)
        return violations(config, gemm, problem, device)

    @classmethod
    def candidates(cls, problem: Problem, tokens: int) -> CandidateGroups:
        return dequantized_config.candidates(problem, tokens)

    def __init__(self, problem: Problem) -> None:
        super().__init__(dequantized_config.remove_quant(problem))
        self._scheme = problem.scheme
        self._chunk_size = dequantized_config.experts_per_chunk(problem)
        self._chunk_numel = dequantized_config.values_per_chunk(problem)

    def specs(self, tokens: int, block_m: int) -> dict[str, BufferSpec]:
        specs = super().specs(tokens, block_m) | self.weight_specs()
        if self._chunk_size < self.problem.e:
            tiles = max_tile_count(tokens * self.problem.top_k, block_m, self.problem.e)
            specs["dequantized_tiles"] = BufferSpec((3 * tiles + 1,), torch.int32)
        return specs

    def weight_specs(self) -> dict[str, BufferSpec]:
        """Return the buffer for the dequantized w1 or w2 of a chunk of experts."""
        return {"dequantized": BufferSpec((self._chunk_numel,), self.problem.dtype)}

    def supports_tensors(self, weights: ExpertWeights, x_TH: torch.Tensor) -> bool:
        scale_tensors = (getattr(weights, name) for name in SCALE_FIELDS)
        are_contiguous = all(t.is_contiguous() for t in scale_tensors if t is not None)
        return are_contiguous and super().supports_tensors(weights, x_TH)

    def multiply_all_experts(
        self,
        rows: GemmRows,
        operands: GemmOperands,
        tile: LaunchConfig,
        order: SortedPairs,
        out: torch.Tensor,
        call: PathCall,
    ) -> None:
        quantized_operands = replace(operands, scheme=self._scheme)
        for first_expert in range(0, self.problem.e, self._chunk_size):
            count = min(self._chunk_size, self.problem.e - first_expert)
            bias = (
                None
                if operands.bias is None
                else operands.bias[first_expert : first_expert + count]
            )
            chunk_operands = self.prepare_operands(
                replace(quantized_operands, bias=bias), first_expert, count, order, call.workspace
            )
            chunk_order = self._select_tiles(
                first_expert, count, order, tile.block_m, call.workspace
            )
            self.multiply(rows, chunk_operands, tile, chunk_order, out)

    def prepare_operands(
        self,
        operands: GemmOperands,
        first_expert: int,
        count: int,
        order: SortedPairs,
        workspace: Workspace,
    ) -> GemmOperands:
        """Return the operands of `count` experts from first_expert on, with dequantized weights.

        The weights of experts without rows are undefined.

        operands: the operands of all experts, but `bias` has only the selected experts.
        """
        w_eNK = self._dequantize(operands, first_expert, count, order, workspace)
        return replace(operands, w=w_eNK, scale=None, zero_point=None, scheme=self.problem.scheme)

    def _dequantize(
        self,
        operands: GemmOperands,
        first_expert: int,
        count: int,
        order: SortedPairs,
        workspace: Workspace,
    ) -> torch.Tensor:
        """Dequantize the weights of `count` experts from first_expert on to bf16 (count, N, K).

        The weights of experts without rows are undefined.
        """
        from experts.triton.dequantized.kernels.dequantize import dequantize_kernel

        n, k = operands.w.shape[1], operands.size_k
        values = workspace.take("dequantized", (self._chunk_numel,))[: count * n * k]
        w_eNK = values.view(count, n, k)
        group_n, group_k = scale_group(operands.scheme, k)
        step_k = math.gcd(group_k, _MAX_STEP_K) if group_k else _MAX_STEP_K
        num_steps = min(_MAX_K_PER_PROGRAM // step_k, next_power_of_2(-(-k // step_k)))
        block_n = _ELEMENTS_PER_PROGRAM // (step_k * num_steps)
        is_repacked = operands.scheme.repacked
        scale, zero_point, global_scale = operands.scale, operands.zero_point, operands.global_scale
        num_global_scales = 1 if global_scale is None else global_scale.shape[1]
        zero_or_global = zero_point if global_scale is None else global_scale
        assert scale is not None
        launch(
            dequantize_kernel,
            (-(-n // block_n), -(-k // (step_k * num_steps)), count),
            w_ptr=operands.w.view(torch.int32) if is_repacked else operands.w,
            scale_ptr=scale,
            zero_point_or_global_scale_ptr=operands.w if zero_or_global is None else zero_or_global,
            expert_starts_ptr=order.starts,
            out_ptr=w_eNK,
            first_expert=first_expert,
            size_n=n,
            size_k=k,
            scale_groups=scale.shape[2] if scale.dim() == 3 else 1,
            scale_rows=scale.shape[1] if scale.dim() > 1 else 1,
            WEIGHT_FORMAT=word_format(operands.scheme),
            PACKED=operands.scheme.packed,
            HAS_ZERO_POINTS=zero_point is not None,
            ZERO_POINT=float(DEFAULT_ZERO_POINT.get(operands.scheme.weight, 0)),
            NUM_GLOBAL_SCALES=num_global_scales,
            UP_ROW_OFFSET=operands.up_row_offset if num_global_scales > 1 else n,
            GROUP_N=group_n if scale.dim() > 1 else 0,
            GROUP_K=group_k,
            STEP_K=step_k,
            K_STEPS_PER_PROGRAM=num_steps,
            BLOCK_N=block_n,
            num_warps=_NUM_WARPS,
        )
        return w_eNK

    def _select_tiles(
        self, first_expert: int, count: int, order: SortedPairs, block_m: int, workspace: Workspace
    ) -> SortedPairs:
        """Return `order` with only the tiles of `count` experts from first_expert on.

        In the result, these experts are numbered from 0.
        """
        from experts.triton.dequantized.kernels.dequantize import select_expert_tiles_kernel

        if count == self.problem.e:
            return order
        tiles = workspace.take("dequantized_tiles", order.tiles.shape)
        launch(
            select_expert_tiles_kernel,
            (-(-order.max_tiles // _TILES_PER_PROGRAM),),
            tiles_ptr=order.tiles,
            expert_starts_ptr=order.starts,
            out_ptr=tiles,
            first_expert=first_expert,
            num_experts=count,
            max_tiles=order.max_tiles,
            BLOCK_M=block_m,
            BLOCK_EXPERTS=next_power_of_2(self.problem.e),
            TILES_PER_PROGRAM=_TILES_PER_PROGRAM,
        )
        return replace(order, tiles=tiles)
