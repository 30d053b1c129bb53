"""The path of weights in registers: 4-bit weights are put in order, then grouped GEMMs unpack them.

As the dequantized path, but that a launch rewrites four bits a weight rather than sixteen, and the
products read so many.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from experts.triton.candidates import Groups
from experts.triton.dequantized.dequantized_path import DequantizedPath
from experts.triton.grouped.base import Rows
from experts.triton.grouped_w4 import grouped_w4_config
from experts.triton.grouped_w4.grouped_w4_config import short_rows, violations
from experts.triton.grouped_w4.layout import LINE, LINES, SCALE_LINE, Tiled
from experts.triton.grouped_w4.product import (
    form_of_product,
    multiply_tiled,
    tile_experts,
    tiled_shapes,
)
from experts.triton.launch_config import Device, Gemm, Launch, LaunchConfig, MoEConfig, Violation
from experts.triton.operands import TMA_BYTES, Product, first_product, second_product
from experts.triton.path import PathCall
from modular_kernel.ops.sort import Sorted
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import ExpertWeights
from modular_kernel.workspace import BufferSpec, Workspace


class GroupedW4Path(DequantizedPath):
    """Serves what config.serves says."""

    name = grouped_w4_config.NAME
    former_names = ()
    younger = True

    @classmethod
    def serves(cls, problem: Problem, device: Device) -> bool:
        """Return whether weights have 4 bits, and tokens are bf16 that TMA fetches."""
        return problem.adapters is None and grouped_w4_config.serves(problem, device)

    @classmethod
    def least_tokens(cls, problem: Problem) -> int:
        """Return from where experts have enough rows."""
        return grouped_w4_config.least_tokens(problem)

    @classmethod
    def most_tokens(cls, problem: Problem) -> int | None:
        """Return up to where weights are not unpacked too often."""
        return grouped_w4_config.most_tokens(problem)

    @classmethod
    def default_config(cls, problem: Problem, tokens: int, device: Device) -> MoEConfig:
        """Return launches with tiles of 128 rows; of 64 where experts have few."""
        return grouped_w4_config.default(problem, grouped_w4_config.height(problem, tokens))

    @classmethod
    def turns(cls, problem: Problem) -> Iterable[int]:
        """Return where tiles grow, and both ends of what the path takes."""
        return grouped_w4_config.turns(problem)

    @classmethod
    def violations(
        cls, config: Launch, gemm: Gemm, problem: Problem, device: Device
    ) -> Iterator[Violation]:
        """Yield what the kernel's fixed sizes and shared memory forbid."""
        assert isinstance(config, LaunchConfig)
        return violations(config, gemm, problem, device)

    @classmethod
    def candidates(cls, problem: Problem, tokens: int) -> Groups:
        """Return launches with tiles of 64 and of 128 rows."""
        return grouped_w4_config.candidates(problem, tokens)

    @classmethod
    def turns_of_prepared(cls, problem: Problem) -> tuple[tuple[int, MoEConfig], ...]:
        """Return both tiles: weights in order cost nothing."""
        return grouped_w4_config.turns_of_prepared(problem)

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.moves_tokens = True
        # nvfp4's are exact in bf16 without the scale of their matrix, which multiplies results.
        self.roundings = Roundings(weights=not problem.scheme.matrix_scales)
        self._prepares = bool(grouped_w4_config.turns_of_prepared(problem))
        floats = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
        self._most_prepared = {
            scale: grouped_w4_config.most_prepared(problem, scale) for scale in floats
        }
        self._at_once = grouped_w4_config.experts_at_once(problem)
        self._forms = grouped_w4_config.forms(problem)
        self._boxes = max(grouped_w4_config.boxes_of(problem)) * self._at_once
        self._lines = max(form.lines for form in self._forms)

    def weight_buffers(self) -> dict[str, BufferSpec]:
        """Return the buffers of some experts' words and scales."""
        return {
            "tiled_words": BufferSpec((self._boxes, LINES, LINE), torch.int32),
            "tiled_scales": BufferSpec((self._boxes, self._lines, SCALE_LINE), torch.int32),
        }

    def prepared_specs(self) -> dict[str, BufferSpec]:
        """Return the words and scales of all experts' w1 and w2."""
        problem, found = self.problem, dict[str, BufferSpec]()
        sizes = (problem.intermediate, problem.hidden), (problem.hidden, problem.intermediate)
        gated = problem.act.gated, False
        each = zip(("w1", "w2"), sizes, self._forms, gated, strict=True)
        for name, size, form, sides in each:
            words, scales = tiled_shapes(problem.e, *size, form, gated=sides)
            found[f"{name}_tiles"] = BufferSpec(words, torch.int32)
            found[f"{name}_tile_scales"] = BufferSpec(scales, torch.int32)
        return found if self._prepares else {}

    def reads_prepared(self, weights: ExpertWeights, tokens: int) -> bool:
        """Return whether unpacking in every product costs less than writing bf16 once."""
        assert weights.w1_scale is not None
        most = self._most_prepared.get(weights.w1_scale.dtype)
        return most is None or tokens <= most

    def specs_of_prepared(self, tokens: int, block_m: int) -> dict[str, BufferSpec]:
        """Return the buffers of grouped GEMMs alone: all weights are in order."""
        return super(DequantizedPath, self).specs(tokens, block_m)

    def prepare(self, weights: ExpertWeights, out: Mapping[str, torch.Tensor]) -> None:
        """Put all weights in order, some experts' at a time."""
        starts = torch.arange(self.problem.e + 1, dtype=torch.int32, device=weights.w1.device)
        both = first_product(weights, self.problem), second_product(weights, self.problem)
        for name, product in zip(("w1", "w2"), both, strict=True):
            assert product.scale is not None
            w, scale = product.w.contiguous(), product.scale.contiguous()
            if w.storage_offset() % TMA_BYTES or w.data_ptr() % TMA_BYTES:  # read as words
                w = w.clone()
            zero = product.zero_point
            zero = None if zero is None else zero.contiguous()
            product = replace(product, w=w, scale=scale, zero_point=zero, scheme=self._scheme)
            tiled = out[f"{name}_tiles"], out[f"{name}_tile_scales"]
            for first in range(0, self.problem.e, self._at_once):
                some = Tiled(*(part[first : first + self._at_once] for part in tiled))
                tile_experts(product, starts, some, first)

    def takes(self, weights: ExpertWeights, x_TH: torch.Tensor) -> bool:
        """Whether weights lie as they are read: prepared ones do."""
        if weights.w1_tiles is None:
            return super().takes(weights, x_TH)
        return all(b is None or b.is_contiguous() for b in (weights.b1, weights.b2))

    def products(
        self,
        rows: Rows,
        product: Product,
        tile: LaunchConfig,
        order: Sorted,
        out: torch.Tensor,
        call: PathCall,
    ) -> None:
        """One product: at once with prepared weights, else some experts at a time."""
        if product.tiles is None:
            super().products(rows, product, tile, order, out, call)
        else:
            self.multiply(rows, replace(product, scheme=self._scheme), tile, order, out)

    def ready(
        self, product: Product, first: int, count: int, order: Sorted, workspace: Workspace
    ) -> Product:
        """Return the product of these experts with words and scales in order."""
        form = form_of_product(product)
        gated = bool(product.constants["GATED"])
        shapes = tiled_shapes(count, product.columns, product.depth, form, gated=gated)
        tiled = Tiled(*map(workspace.take, ("tiled_words", "tiled_scales"), shapes))
        tile_experts(product, order.starts, tiled, first)
        whole = product.global_scale
        whole = None if whole is None else whole[first : first + count]
        return replace(product, tiles=tiled.words, tile_scales=tiled.scales, global_scale=whole)

    def multiply(
        self, rows: Rows, product: Product, tile: LaunchConfig, order: Sorted, out: torch.Tensor
    ) -> None:
        """One product with weights in order."""
        assert product.tiles is not None
        assert product.tile_scales is not None
        tiled = Tiled(product.tiles, product.tile_scales)
        multiply_tiled(rows.values, tiled, product, tile, order, out, short=short_rows(tile))
