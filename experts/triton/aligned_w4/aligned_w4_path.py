"""The aligned_w4 path: the aligned path with a GEMM kernel for 4-bit weights.

The path is for few rows per expert, in blocks of 8 or 16 rows. It differs from the aligned path
only in the GEMM kernel, which unpacks 32-bit words of eight weights in registers. The weights are
the left operand of the MMA, and the warps of a program split K.
"""

from collections.abc import Iterable, Iterator

import torch

from experts.triton.adapters import ShrinkOutput
from experts.triton.aligned.aligned_path import AlignedPath
from experts.triton.aligned_w4 import aligned_w4_config
from experts.triton.aligned_w4.aligned_w4_config import AlignedW4Config
from experts.triton.candidates import CandidateGroups
from experts.triton.launch_config import Device, Gemm, Launch, MoEConfig, Violation
from experts.triton.operands import GemmOperands
from experts.triton.operands_w4 import allows_vector_loads, choose_mma_k, w4_arguments
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights


class AlignedW4Path(AlignedPath):
    """The path for the problems of `aligned_w4_config.supports`."""

    name = aligned_w4_config.NAME
    may_reject_tensors = True
    launch = AlignedW4Config
    transferable = False

    @classmethod
    def supports(cls, problem: Problem, device: Device) -> bool:
        return problem.adapters is None and aligned_w4_config.supports(problem)

    @classmethod
    def max_tokens(cls, problem: Problem) -> int | None:
        return aligned_w4_config.max_tokens(problem)

    @classmethod
    def default_config(cls, problem: Problem, tokens: int, device: Device) -> MoEConfig:
        return aligned_w4_config.default_config(problem, tokens)

    @classmethod
    def breakpoints(cls, problem: Problem) -> Iterable[int]:
        return aligned_w4_config.breakpoints(problem)

    @classmethod
    def violations(
        cls, config: Launch, gemm: Gemm, problem: Problem, device: Device
    ) -> Iterator[Violation]:
        assert isinstance(config, AlignedW4Config)
        return config.violations()

    @classmethod
    def candidates(cls, problem: Problem, tokens: int) -> CandidateGroups:
        return aligned_w4_config.candidates(problem, tokens)

    @classmethod
    def replace_foreign_config(
        cls, config: MoEConfig, tokens: int, problem: Problem, device: Device
    ) -> MoEConfig:
        """Replace a configuration of the aligned path with a small block_m."""
        is_aligned = config.path == AlignedPath.name
        if is_aligned and aligned_w4_config.is_faster(problem, tokens, config.gemm1.block_m):
            return aligned_w4_config.default_config(problem, tokens)
        return config

    def __init__(self, problem: Problem) -> None:
        from experts.triton.aligned_w4.kernels.grouped_gemm_w4 import grouped_gemm_w4_kernel

        super().__init__(problem)
        self._kernel = grouped_gemm_w4_kernel

    def supports_tensors(self, weights: ExpertWeights, x_TH: torch.Tensor) -> bool:
        return x_TH.stride(1) == 1 and allows_vector_loads(weights)

    def arguments(
        self,
        rows: tuple[torch.Tensor, torch.Tensor | None],
        operands: GemmOperands,
        config: Launch,
        shrink_output: ShrinkOutput | None,
    ) -> dict[str, object]:
        """Return the arguments of the 4-bit kernel that do not depend on how rows are addressed."""
        assert isinstance(config, AlignedW4Config)
        assert shrink_output is None  # `supports` excludes adapters
        mma_k = choose_mma_k(operands.scheme, operands.size_k, config.block_k)
        return {
            **w4_arguments(operands),
            "size_n": operands.size_n,
            "size_k": operands.size_k,
            "UP_ROW_OFFSET": operands.up_row_offset,
            "GATE_STRIDE": operands.gate_stride,
            "EVEN_K": operands.size_k % (config.num_warps * config.block_k) == 0,
            "MMA_K": mma_k,
            "NUM_WARPS": config.num_warps,
            "MMAS_PER_WARP": config.block_k // mma_k,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "EVEN_N": operands.size_n % config.block_n == 0,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "maxnreg": config.registers or None,
            **operands.constants,
        }
