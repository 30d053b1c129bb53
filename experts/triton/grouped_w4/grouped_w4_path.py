"""The grouped_w4 path: 4-bit weights are tiled, then grouped GEMMs unpack them in registers.

The path works like the dequantized path, but the launch before each GEMM reorders the weights
(`layout`) instead of converting them. This launch therefore writes 4 bits per weight instead of 16,
and the GEMM reads 4 bits. Prepared weights are already tiled.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from experts.triton.candidates import CandidateGroups
from experts.triton.dequantized.dequantized_path import DequantizedPath
from experts.triton.grouped.base import GemmRows
from experts.triton.grouped_w4 import grouped_w4_config
from experts.triton.grouped_w4.grouped_w4_config import max_short_rows, violations
from experts.triton.grouped_w4.kernel_launches import (
    choose_tiled_format,
    tile_experts,
    tiled_gemm,
    tiled_shapes,
)
from experts.triton.grouped_w4.layout import (
    LINES_PER_STEP,
    WORDS_PER_LINE,
    WORDS_PER_SCALE_LINE,
    TiledWeights,
)
from experts.triton.launch_config import Device, Gemm, Launch, LaunchConfig, MoEConfig, Violation
from experts.triton.operands import TMA_BYTES, GemmOperands, gemm1_operands, gemm2_operands
from experts.triton.path import PathCall
from modular_kernel.ops.sort import SortedPairs
from modular_kernel.quant.quantized_weights import weight_specs
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import ExpertWeights
from modular_kernel.workspace import BufferSpec, Workspace


class GroupedW4Path(DequantizedPath):
    """The path for the problems of `grouped_w4_config.supports`."""

    name = grouped_w4_config.NAME

    @classmethod
    def supports(cls, problem: Problem, device: Device) -> bool:
        return problem.adapters is None and grouped_w4_config.supports(problem, device)

    @classmethod
    def min_tokens(cls, problem: Problem) -> int:
        return grouped_w4_config.min_tokens(problem)

    @classmethod
    def max_tokens(cls, problem: Problem) -> int | None:
        return grouped_w4_config.max_tokens(problem)

    @classmethod
    def default_config(cls, problem: Problem, tokens: int, device: Device) -> MoEConfig:
        block_m = grouped_w4_config.choose_block_m(problem, tokens)
        return grouped_w4_config.default_config(problem, block_m)

    @classmethod
    def breakpoints(cls, problem: Problem) -> Iterable[int]:
        return grouped_w4_config.breakpoints(problem)

    @classmethod
    def violations(
        cls, config: Launch, gemm: Gemm, problem: Problem, device: Device
    ) -> Iterator[Violation]:
        assert isinstance(config, LaunchConfig)
        return violations(config, gemm, problem, device)

    @classmethod
    def candidates(cls, problem: Problem, tokens: int) -> CandidateGroups:
        return grouped_w4_config.candidates(problem, tokens)

    @classmethod
    def replace_foreign_config(
        cls, config: MoEConfig, tokens: int, problem: Problem, device: Device
    ) -> MoEConfig:
        """Return the default configuration if the call would use it without a tuned file."""
        max_tokens = cls.max_tokens(problem)
        is_above_range = max_tokens is not None and (max_tokens == 0 or tokens > max_tokens)
        if is_above_range or tokens < cls.min_tokens(problem):
            return config
        return cls.default_config(problem, tokens, device)

    @classmethod
    def prepared_configs(cls, problem: Problem) -> tuple[tuple[int, MoEConfig], ...]:
        return grouped_w4_config.prepared_configs(problem)

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.permutes_tokens = True
        # Unpacked NVFP4 weights are exact in bf16, because the global scale multiplies the results.
        self.roundings = Roundings(weights=not problem.scheme.matrix_scales)
        self._prepares = bool(grouped_w4_config.prepared_configs(problem))
        # The range of tokens with prepared weights, by dtype of the scales.
        self._prepared_range = {
            dtype: (
                grouped_w4_config.min_prepared_tokens(problem, dtype),
                grouped_w4_config.max_prepared_tokens(problem, dtype),
            )
            for dtype in weight_specs(problem)["w1_scale"].dtypes
        }
        self._chunk_size = grouped_w4_config.experts_per_chunk(problem)
        self._packed_formats = grouped_w4_config.packed_formats(problem)
        self._max_boxes = max(grouped_w4_config.boxes_per_expert(problem)) * self._chunk_size
        self._max_lines = max(packed_format.lines for packed_format in self._packed_formats)

    def weight_specs(self) -> dict[str, BufferSpec]:
        """Return the buffers for the tiled words and scales of a chunk of experts."""
        words_shape = (self._max_boxes, LINES_PER_STEP, WORDS_PER_LINE)
        scales_shape = (self._max_boxes, self._max_lines, WORDS_PER_SCALE_LINE)
        return {
            "tiled_words": BufferSpec(words_shape, torch.int32),
            "tiled_scales": BufferSpec(scales_shape, torch.int32),
        }

    def prepared_specs(self) -> dict[str, BufferSpec]:
        problem, specs = self.problem, dict[str, BufferSpec]()
        sizes = (problem.intermediate, problem.hidden), (problem.hidden, problem.intermediate)
        are_gated = problem.act.gated, False
        matrices = zip(("w1", "w2"), sizes, self._packed_formats, are_gated, strict=True)
        for name, sizes_nk, packed_format, is_gated in matrices:
            words_shape, scales_shape = tiled_shapes(
                problem.e, *sizes_nk, packed_format, gated=is_gated
            )
            specs[f"{name}_tiles"] = BufferSpec(words_shape, torch.int32)
            specs[f"{name}_tile_scales"] = BufferSpec(scales_shape, torch.int32)
        return specs if self._prepares else {}

    def is_faster_when_prepared(self, weights: ExpertWeights, tokens: int) -> bool:
        # With fewer tokens, the aligned_w4 path is faster. With more tokens, it is faster to
        # dequantize the weights to bf16 once than to unpack them in every GEMM tile.
        assert weights.w1_scale is not None
        min_tokens, max_tokens = self._prepared_range[weights.w1_scale.dtype]
        return min_tokens <= tokens and (max_tokens is None or tokens <= max_tokens)

    def specs_of_prepared(self, tokens: int, block_m: int) -> dict[str, BufferSpec]:
        return super(DequantizedPath, self).specs(tokens, block_m)

    def prepare(self, weights: ExpertWeights, out: Mapping[str, torch.Tensor]) -> None:
        """Tile the weights of all experts, one chunk of experts at a time."""
        starts = torch.arange(self.problem.e + 1, dtype=torch.int32, device=weights.w1.device)
        gemms = gemm1_operands(weights, self.problem), gemm2_operands(weights, self.problem)
        for name, operands in zip(("w1", "w2"), gemms, strict=True):
            assert operands.scale is not None
            w, scale = operands.w.contiguous(), operands.scale.contiguous()
            # The kernel reads aligned int32 words.
            if w.storage_offset() % TMA_BYTES or w.data_ptr() % TMA_BYTES:
                w = w.clone()
            zero_point = operands.zero_point
            zero_point = None if zero_point is None else zero_point.contiguous()
            operands = replace(
                operands, w=w, scale=scale, zero_point=zero_point, scheme=self._scheme
            )
            tiled = out[f"{name}_tiles"], out[f"{name}_tile_scales"]
            for first_expert in range(0, self.problem.e, self._chunk_size):
                chunk = TiledWeights(
                    *(tensor[first_expert : first_expert + self._chunk_size] for tensor in tiled)
                )
                tile_experts(operands, starts, chunk, first_expert)

    def supports_tensors(self, weights: ExpertWeights, x_TH: torch.Tensor) -> bool:
        # Prepared weights always have the required strides and alignment.
        if weights.w1_tiles is None:
            return super().supports_tensors(weights, x_TH)
        return all(b is None or b.is_contiguous() for b in (weights.b1, weights.b2))

    def multiply_all_experts(
        self,
        rows: GemmRows,
        operands: GemmOperands,
        tile: LaunchConfig,
        order: SortedPairs,
        out: torch.Tensor,
        call: PathCall,
    ) -> None:
        """Run one GEMM. Without prepared weights, each launch computes a chunk of experts."""
        if operands.tiles is None:
            super().multiply_all_experts(rows, operands, tile, order, out, call)
        else:
            self.multiply(rows, replace(operands, scheme=self._scheme), tile, order, out)

    def prepare_operands(
        self,
        operands: GemmOperands,
        first_expert: int,
        count: int,
        order: SortedPairs,
        workspace: Workspace,
    ) -> GemmOperands:
        """Return the operands of `count` experts from first_expert on, with tiled weights.

        See `DequantizedPath.prepare_operands`.
        """
        packed_format = choose_tiled_format(operands)
        gated = bool(operands.constants["GATED"])
        shapes = tiled_shapes(count, operands.size_n, operands.size_k, packed_format, gated=gated)
        tiled = TiledWeights(*map(workspace.take, ("tiled_words", "tiled_scales"), shapes))
        tile_experts(operands, order.starts, tiled, first_expert)
        global_scale = operands.global_scale
        global_scale = (
            None if global_scale is None else global_scale[first_expert : first_expert + count]
        )
        return replace(
            operands, tiles=tiled.words, tile_scales=tiled.scales, global_scale=global_scale
        )

    def multiply(
        self,
        rows: GemmRows,
        operands: GemmOperands,
        tile: LaunchConfig,
        order: SortedPairs,
        out: torch.Tensor,
    ) -> None:
        """Run one GEMM with tiled weights."""
        assert operands.tiles is not None
        assert operands.tile_scales is not None
        tiled = TiledWeights(operands.tiles, operands.tile_scales)
        short_rows = max_short_rows(tile)
        tiled_gemm(rows.values, tiled, operands, tile, order, out, max_short_rows=short_rows)
