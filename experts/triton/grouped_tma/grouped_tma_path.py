"""The grouped_tma path: persistent grouped GEMMs over expert-sorted rows, with TMA (sm_90).

The path is for many rows per expert, because it always loads whole TMA boxes, even for tiles with
fewer rows. GEMM 1 gathers the tokens, or a separate launch permutes them
(`grouped_tma_config.gathers_tokens`). The other launches are in `grouped.base`.
"""

from collections.abc import Iterable, Iterator

import torch

from experts.triton.adapters import TileShrinkOutput
from experts.triton.candidates import CandidateGroups
from experts.triton.grouped.base import ExpertSortedGemms, GemmRows
from experts.triton.grouped_tma import grouped_tma_config
from experts.triton.grouped_tma.adapters import TileShrink, round_up_to_box, shrink_buffer_specs
from experts.triton.grouped_tma.grouped_tma_config import (
    BLOCK_M,
    BOX_BYTES,
    MODE_BY_SCHEME,
    candidates,
    gathers_tokens,
    num_staging_buffers,
    rows_per_half,
    violations,
)
from experts.triton.launch_config import Device, Gemm, Launch, LaunchConfig, MoEConfig, Violation
from experts.triton.operands import TMA_BYTES, GemmOperands
from experts.triton.path import Path
from modular_kernel.ops.sort import SortedPairs, max_tile_count
from modular_kernel.replay.launch.launch import launch
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import ExpertWeights
from modular_kernel.workspace import BufferSpec

_BOX_ELEMENTS = BOX_BYTES // 2  # 16-bit elements per box row


class GroupedTmaPath(ExpertSortedGemms, Path):
    """The path with grouped GEMMs in Gluon, for the problems of `grouped_tma_config.supports`."""

    name = grouped_tma_config.NAME
    roundings = Roundings()

    @classmethod
    def supports(cls, problem: Problem, device: Device) -> bool:
        return grouped_tma_config.supports(problem, device)

    @classmethod
    def min_tokens(cls, problem: Problem) -> int:
        return grouped_tma_config.min_tokens(problem)

    @classmethod
    def default_config(cls, problem: Problem, tokens: int, device: Device) -> MoEConfig:
        return grouped_tma_config.default_config(problem, tokens)

    @classmethod
    def breakpoints(cls, problem: Problem) -> Iterable[int]:
        return (grouped_tma_config.max_narrow_tokens(problem),)

    @classmethod
    def violations(
        cls, config: Launch, gemm: Gemm, problem: Problem, device: Device
    ) -> Iterator[Violation]:
        assert isinstance(config, LaunchConfig)
        mode = MODE_BY_SCHEME[problem.scheme.name]
        return violations(config, gemm, mode, device)

    @classmethod
    def candidates(cls, problem: Problem, tokens: int) -> CandidateGroups:
        return candidates(problem, tokens)

    # Usually all rows are in use. Quantizing is then faster without a check of each row.
    skips_unused_rows = False
    shrink_class = TileShrink

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._mode = MODE_BY_SCHEME[problem.scheme.name]
        self.permutes_tokens = not gathers_tokens(problem)

    def specs(self, tokens: int, block_m: int) -> dict[str, BufferSpec]:
        num_pairs = tokens * self.problem.top_k
        max_tiles = max_tile_count(num_pairs, block_m, self.problem.e)
        return super().specs(tokens, block_m) | shrink_buffer_specs(
            self.problem, num_pairs, max_tiles
        )

    def supports_tensors(self, weights: ExpertWeights, x_TH: torch.Tensor) -> bool:
        tma_tensors = (weights.w1, weights.w2, weights.lora_b13, weights.lora_b2)
        all_tensors = (*tma_tensors, weights.b1, weights.b2, weights.w1_scale, weights.w2_scale)
        tensors = [t for t in all_tensors if t is not None]
        byte_offsets = [t.data_ptr() for t in tma_tensors if t is not None]
        if not self.permutes_tokens:
            byte_offsets += [x_TH.data_ptr(), x_TH.stride(0) * x_TH.element_size()]
        return all(t.is_contiguous() for t in tensors) and all(
            offset % TMA_BYTES == 0 for offset in byte_offsets
        )

    def multiply(
        self,
        rows: GemmRows,
        operands: GemmOperands,
        tile: LaunchConfig,
        order: SortedPairs,
        out: torch.Tensor,
    ) -> None:
        from experts.triton.grouped_tma.kernels.gemm import grouped_gemm_tma_kernel
        from experts.triton.kernels.tma_descriptors import count_sms, tma_descriptor

        # `supports` excludes router weights on the input, so there are no weights.
        a, a_scale, _, tokens, shrink_output = rows
        assert shrink_output is None or isinstance(shrink_output, TileShrinkOutput)
        experts, weight_rows, size_k = operands.w.shape
        itemsize = a.element_size()
        box_rows = rows_per_half(tile, 2 if operands.constants["GATED"] else 1)
        # With interleaved gate and up rows, two weight rows make one output column.
        out_columns = box_rows // operands.gate_stride
        b_desc = tma_descriptor(operands.w.view(experts * weight_rows, size_k), box_rows)
        placeholder = operands.w
        b_scale = placeholder if operands.scale is None else operands.scale
        launch(
            grouped_gemm_tma_kernel,
            (count_sms(),),
            a_desc=b_desc if tokens is not None else tma_descriptor(a, BLOCK_M),
            b_desc=b_desc,
            out_desc=tma_descriptor(out, BLOCK_M // 2, out_columns),
            x_ptr=a,
            tokens_ptr=order.tiles if tokens is None else tokens,
            out_ptr=out,
            tiles_ptr=order.tiles,
            a_scale_ptr=placeholder if a_scale is None else a_scale,
            b_scale_ptr=b_scale,
            bias_ptr=placeholder if operands.bias is None else operands.bias,
            max_tiles=order.max_tiles,
            size_n=operands.size_n,
            size_k=size_k,
            weight_rows=weight_rows,
            up_row_offset=operands.up_row_offset,
            stride_x_in_copies=a.stride(0) * itemsize // TMA_BYTES,
            a_groups=0 if a_scale is None else a_scale.shape[-1],
            b_scale_rows=b_scale.shape[1],
            b_groups=b_scale.shape[-1],
            SCALE_MODE=self._mode,
            GATE_STRIDE=operands.gate_stride,
            HAS_BIAS=operands.bias is not None,
            GATHER_TOKENS=tokens is not None,
            EVEN_K=size_k * itemsize % BOX_BYTES == 0,
            STAGES=tile.num_stages,
            STAGING_BUFFERS=num_staging_buffers(tile, box_rows, out_columns),
            GROUP_M=tile.group_m,
            num_warps=4,
            **_make_adapter_arguments(shrink_output, b_desc, box_rows, order),
            **operands.constants,
        )


def _make_adapter_arguments(
    shrink_output: TileShrinkOutput | None, placeholder: object, box_rows: int, order: SortedPairs
) -> dict[str, object]:
    """Return the LoRA arguments of the kernel.

    placeholder: the descriptor to pass as LoRA descriptors in a call without adapters.
    box_rows: weight rows of a TMA box.
    """
    from experts.triton.kernels.tma_descriptors import tma_descriptor

    if shrink_output is None:
        integer_arguments = dict.fromkeys(
            ("stride_tile_slots", "lora_b_slot_rows", "lora_b_expert_rows", "lora_up_offset"), 0
        )
        descriptors = {
            "lora_u_desc": placeholder,
            "lora_b_desc": placeholder,
            "tile_slots_ptr": order.tiles,
        }
        return {**descriptors, **integer_arguments, "LORA_STEPS": 0}
    num_slots, experts, rows, rank = shrink_output.b.shape
    return {
        "lora_u_desc": tma_descriptor(shrink_output.u, BLOCK_M),
        "lora_b_desc": tma_descriptor(
            shrink_output.b.view(num_slots * experts * rows, rank), box_rows
        ),
        "tile_slots_ptr": shrink_output.tile_slots,
        "stride_tile_slots": shrink_output.tile_slots.shape[1],
        "lora_b_slot_rows": experts * rows,
        "lora_b_expert_rows": rows if experts > 1 else 0,
        "lora_up_offset": shrink_output.up_offset,
        "LORA_STEPS": round_up_to_box(rank + shrink_output.up_offset) // _BOX_ELEMENTS,
    }
