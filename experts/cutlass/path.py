"""CutlassPath: the grouped_tma path of TritonExperts, with CuTe DSL GEMMs for fp8 block scales.

GEMM 1 also applies the activation and quantizes h, the input of GEMM 2.
"""

import torch

from experts.cutlass.block_gemm import TILE_M, block_gemm
from experts.triton.grouped.base import GemmRows
from experts.triton.grouped_tma.grouped_tma_path import GroupedTmaPath
from experts.triton.launch_config import LaunchConfig
from experts.triton.operands import GemmOperands, gemm1_operands
from experts.triton.path import PathCall
from modular_kernel.ops.quantize import QuantizedRows, take_quantized
from modular_kernel.ops.sort import SortedPairs
from modular_kernel.replay import stages
from modular_kernel.workspace import BufferSpec


class CutlassPath(GroupedTmaPath):
    """The grouped_tma path with the GEMMs of `block_gemm`."""

    def specs(self, tokens: int, block_m: int) -> dict[str, BufferSpec]:
        specs = super().specs(tokens, block_m)
        del specs["workspace13"]  # h is never stored in 16 bits
        gemm2_spec = specs["workspace2"]
        aliases = tuple(name for name in gemm2_spec.over if name in specs)
        return specs | {"workspace2": BufferSpec(gemm2_spec.shape, gemm2_spec.dtype, aliases)}

    def compute_hidden_rows(
        self, x: GemmRows, tile: LaunchConfig, order: SortedPairs, call: PathCall
    ) -> GemmRows:
        shape = (order.row_of_pair_TK.numel(), self.problem.intermediate)
        h = take_quantized(call.workspace, "h", self.problem.scheme, shape)
        with stages.stage(stages.GEMM1):
            operands = gemm1_operands(call.weights, self.problem)
            block_gemm(_to_quantized_rows(x), operands, self.problem, order, h)
        return GemmRows(h.q_RK, h.scale)

    def multiply(
        self,
        rows: GemmRows,
        operands: GemmOperands,
        tile: LaunchConfig,
        order: SortedPairs,
        out: torch.Tensor,
    ) -> None:
        assert tile.block_m == TILE_M
        block_gemm(_to_quantized_rows(rows), operands, self.problem, order, out)


def _to_quantized_rows(rows: GemmRows) -> QuantizedRows:
    assert rows.scale is not None
    return QuantizedRows(rows.values, rows.scale)
