"""The grouped_w4 path: 4-bit weights are tiled, then grouped GEMMs unpack them in registers.

It works like the dequantized path, but the launch before each GEMM reorders weights (`layout`)
instead of converting them: 4 bits per weight are written and read again, not 16. Prepared weights
are already in that order.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from experts.triton.candidates import CandidateGroups
from experts.triton.dequantized.dequantized_path import DequantizedPath
from experts.triton.grouped.base import GemmRows
from experts.triton.grouped_w4 import grouped_w4_config
from experts.triton.grouped_w4.grouped_w4_config import short_rows, violations
from experts.triton.grouped_w4.layout import LINE, LINES, SCALE_LINE, TiledWeights
from experts.triton.grouped_w4.product import (
    tile_experts,
    tiled_format_of,
    tiled_gemm,
    tiled_shapes,
)
from experts.triton.launch_config import Device, Gemm, Launch, LaunchConfig, MoEConfig, Violation
from experts.triton.operands import TMA_BYTES, GemmOperands, gemm1_operands, gemm2_operands
from experts.triton.path import PathCall
from modular_kernel.ops.sort import SortedPairs
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import ExpertWeights
from modular_kernel.workspace import BufferSpec, Workspace


class GroupedW4Path(DequantizedPath):
    """The path for the problems of `grouped_w4_config.supports`."""

    name = grouped_w4_config.NAME

    @classmethod
    def supports(cls, problem: Problem, device: Device) -> bool:
        """Return whether the kernels support `problem`; see `grouped_w4_config.supports`."""
        return problem.adapters is None and grouped_w4_config.supports(problem, device)

    @classmethod
    def min_tokens(cls, problem: Problem) -> int:
        """Return the smallest call in which experts have enough rows, in tokens."""
        return grouped_w4_config.min_tokens(problem)

    @classmethod
    def max_tokens(cls, problem: Problem) -> int | None:
        """Return the largest call in which repeated unpacking is cheap enough, in tokens."""
        return grouped_w4_config.max_tokens(problem)

    @classmethod
    def default_config(cls, problem: Problem, tokens: int, device: Device) -> MoEConfig:
        """Return launches with tiles of 128 rows, or of 64 if experts have few."""
        return grouped_w4_config.default(problem, grouped_w4_config.block_m_for(problem, tokens))

    @classmethod
    def breakpoints(cls, problem: Problem) -> Iterable[int]:
        """Return the token counts after which the launches change.

        See `grouped_w4_config.breakpoints`.
        """
        return grouped_w4_config.breakpoints(problem)

    @classmethod
    def violations(
        cls, config: Launch, gemm: Gemm, problem: Problem, device: Device
    ) -> Iterator[Violation]:
        """Yield violations of the fixed tile sizes and of shared memory."""
        assert isinstance(config, LaunchConfig)
        return violations(config, gemm, problem, device)

    @classmethod
    def candidates(cls, problem: Problem, tokens: int) -> CandidateGroups:
        return grouped_w4_config.candidates(problem, tokens)

    @classmethod
    def replace_foreign_config(
        cls, config: MoEConfig, tokens: int, problem: Problem, device: Device
    ) -> MoEConfig:
        """Return the default configuration for calls that would use it without a tuned file."""
        max_tokens = cls.max_tokens(problem)
        is_above_range = max_tokens is not None and (max_tokens == 0 or tokens > max_tokens)
        if is_above_range or tokens < cls.min_tokens(problem):
            return config
        return cls.default_config(problem, tokens, device)

    @classmethod
    def prepared_configs(cls, problem: Problem) -> tuple[tuple[int, MoEConfig], ...]:
        """Return launches for each block_m.

        With prepared weights, the path is faster from fewer rows on.
        """
        return grouped_w4_config.prepared_configs(problem)

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.permutes_tokens = True
        # Unpacked NVFP4 weights are exact in bf16, because the global scale multiplies the results.
        self.roundings = Roundings(weights=not problem.scheme.matrix_scales)
        self._prepares = bool(grouped_w4_config.prepared_configs(problem))
        floats = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
        self._max_prepared = {
            scale: grouped_w4_config.max_prepared_tokens(problem, scale) for scale in floats
        }
        self._chunk_size = grouped_w4_config.chunk_size(problem)
        self._packed_formats = grouped_w4_config.packed_formats(problem)
        self._boxes = max(grouped_w4_config.boxes_per_expert(problem)) * self._chunk_size
        self._lines = max(packed_format.lines for packed_format in self._packed_formats)

    def weight_buffers(self) -> dict[str, BufferSpec]:
        """Return the buffers of the words and scales of one chunk of experts."""
        return {
            "tiled_words": BufferSpec((self._boxes, LINES, LINE), torch.int32),
            "tiled_scales": BufferSpec((self._boxes, self._lines, SCALE_LINE), torch.int32),
        }

    def prepared_specs(self) -> dict[str, BufferSpec]:
        """Return the tiled words and scales of w1 and w2 of all experts."""
        problem, specs = self.problem, dict[str, BufferSpec]()
        sizes = (problem.intermediate, problem.hidden), (problem.hidden, problem.intermediate)
        gated = problem.act.gated, False
        matrices = zip(("w1", "w2"), sizes, self._packed_formats, gated, strict=True)
        for name, size, packed_format, is_gated in matrices:
            words, scales = tiled_shapes(problem.e, *size, packed_format, gated=is_gated)
            specs[f"{name}_tiles"] = BufferSpec(words, torch.int32)
            specs[f"{name}_tile_scales"] = BufferSpec(scales, torch.int32)
        return specs if self._prepares else {}

    def reads_prepared(self, weights: ExpertWeights, tokens: int) -> bool:
        """Return whether unpacking in every GEMM tile is faster than dequantizing to bf16 once."""
        assert weights.w1_scale is not None
        max_tokens = self._max_prepared.get(weights.w1_scale.dtype)
        return max_tokens is None or tokens <= max_tokens

    def specs_of_prepared(self, tokens: int, block_m: int) -> dict[str, BufferSpec]:
        """Return only the buffers of the grouped GEMMs; prepared weights are tiled already."""
        return super(DequantizedPath, self).specs(tokens, block_m)

    def prepare(self, weights: ExpertWeights, out: Mapping[str, torch.Tensor]) -> None:
        """Tile all weights, a chunk of experts at a time."""
        starts = torch.arange(self.problem.e + 1, dtype=torch.int32, device=weights.w1.device)
        gemms = gemm1_operands(weights, self.problem), gemm2_operands(weights, self.problem)
        for name, operands in zip(("w1", "w2"), gemms, strict=True):
            assert operands.scale is not None
            w, scale = operands.w.contiguous(), operands.scale.contiguous()
            if (
                w.storage_offset() % TMA_BYTES or w.data_ptr() % TMA_BYTES
            ):  # the kernel reads aligned int32 words
                w = w.clone()
            zero = operands.zero_point
            zero = None if zero is None else zero.contiguous()
            operands = replace(operands, w=w, scale=scale, zero_point=zero, scheme=self._scheme)
            tiled = out[f"{name}_tiles"], out[f"{name}_tile_scales"]
            for first_expert in range(0, self.problem.e, self._chunk_size):
                chunk = TiledWeights(
                    *(part[first_expert : first_expert + self._chunk_size] for part in tiled)
                )
                tile_experts(operands, starts, chunk, first_expert)

    def supports_tensors(self, weights: ExpertWeights, x_TH: torch.Tensor) -> bool:
        """Return whether the layout of the tensors is supported. Prepared weights always are."""
        if weights.w1_tiles is None:
            return super().supports_tensors(weights, x_TH)
        return all(b is None or b.is_contiguous() for b in (weights.b1, weights.b2))

    def products(
        self,
        rows: GemmRows,
        operands: GemmOperands,
        tile: LaunchConfig,
        order: SortedPairs,
        out: torch.Tensor,
        call: PathCall,
    ) -> None:
        """Run one GEMM: at once with prepared weights, otherwise a chunk of experts at a time."""
        if operands.tiles is None:
            super().products(rows, operands, tile, order, out, call)
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
        """Return the operands of `count` experts from first_expert on, with tiled weights."""
        packed_format = tiled_format_of(operands)
        gated = bool(operands.constants["GATED"])
        shapes = tiled_shapes(count, operands.columns, operands.depth, packed_format, gated=gated)
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
        tiled_gemm(rows.values, tiled, operands, tile, order, out, short=short_rows(tile))
