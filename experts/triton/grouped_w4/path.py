"""The path of weights in registers: mxfp4 is put in order, then grouped GEMMs unpack it.

As the dequantised path, but that a launch rewrites four bits a weight rather than sixteen, and the
products read so many.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from experts.triton.aligned.path import AlignedPath
from experts.triton.aligned_w4.path import AlignedW4Path
from experts.triton.candidates import Groups
from experts.triton.dequantised.path import DequantisedPath
from experts.triton.grouped.base import Rows
from experts.triton.grouped_w4 import config
from experts.triton.grouped_w4.config import short_rows, violations
from experts.triton.grouped_w4.layout import LINE, LINES, SCALE_LINE, SCALE_LINES, Tiled
from experts.triton.grouped_w4.product import multiply_tiled, tile_experts, tiled_shapes
from experts.triton.launch_config import Device, Gemm, Launch, LaunchConfig, MoEConfig, Violation
from experts.triton.operands import Product
from modular_kernel.ops.sort import Sorted
from modular_kernel.roundings import Roundings
from modular_kernel.types import Problem
from modular_kernel.workspace import BufferSpec, Workspace


class GroupedW4Path(DequantisedPath):
    """Serves what config.serves says."""

    name = config.NAME
    former_names = ()
    replaces = (AlignedPath.name, AlignedW4Path.name, DequantisedPath.name)
    roundings = Roundings(weights=True)

    @classmethod
    def serves(cls, problem: Problem, device: Device) -> bool:
        """Return whether weights are mxfp4, and tokens bf16 that TMA fetches."""
        return problem.adapters is None and config.serves(problem, device)

    @classmethod
    def least_tokens(cls, problem: Problem) -> int:
        """Return from where experts have enough rows."""
        return config.least_tokens(problem)

    @classmethod
    def most_tokens(cls, problem: Problem) -> int | None:
        """Return up to where weights are not unpacked too often."""
        return config.most_tokens(problem)

    @classmethod
    def default_config(cls, problem: Problem, tokens: int, device: Device) -> MoEConfig:
        """Return launches with tiles of 128 rows; of 64 where experts have few."""
        return config.default(problem, config.height(problem, tokens))

    @classmethod
    def turns(cls, problem: Problem) -> Iterable[int]:
        """Return where tiles grow, and both ends of what the path takes."""
        return config.turns(problem)

    @classmethod
    def in_place_of(
        cls, given: MoEConfig, tokens: int, problem: Problem, device: Device
    ) -> MoEConfig:
        """Return the default where the path is taken without a file: it came later."""
        if cls.least_tokens(problem) <= tokens <= config.most_tokens(problem):
            return cls.default_config(problem, tokens, device)
        return given

    @classmethod
    def violations(
        cls, config: Launch, gemm: Gemm, problem: Problem, device: Device
    ) -> Iterator[Violation]:
        """Yield what the kernel's fixed sizes and shared memory forbid."""
        assert isinstance(config, LaunchConfig)
        return violations(config, gemm, device)

    @classmethod
    def candidates(cls, problem: Problem, tokens: int) -> Groups:
        """Return launches with tiles of 64 and of 128 rows."""
        return config.candidates(problem, tokens)

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.moves_tokens = True
        self._at_once = config.experts_at_once(problem)
        self._boxes = max(config.boxes_of(problem)) * self._at_once

    def weight_buffers(self) -> dict[str, BufferSpec]:
        """Return the buffers of some experts' words and scales."""
        return {
            "tiled_words": BufferSpec((self._boxes, LINES, LINE), torch.int32),
            "tiled_scales": BufferSpec((self._boxes, SCALE_LINES, SCALE_LINE), torch.int32),
        }

    def ready(
        self, product: Product, first: int, count: int, order: Sorted, workspace: Workspace
    ) -> Product:
        """Return the product of these experts with words and scales in order."""
        gated = bool(product.constants["GATED"])
        shapes = tiled_shapes(count, product.columns, product.depth, gated=gated)
        tiled = Tiled(*map(workspace.take, ("tiled_words", "tiled_scales"), shapes))
        tile_experts(product, order.starts, tiled, first)
        return replace(product, w=tiled.words, scale=tiled.scales)

    def multiply(
        self, rows: Rows, product: Product, tile: LaunchConfig, order: Sorted, out: torch.Tensor
    ) -> None:
        """One product with the weights of `ready`."""
        assert product.scale is not None
        tiled = Tiled(product.w, product.scale)
        multiply_tiled(rows.values, tiled, product, tile, order, out, short=short_rows(tile))
