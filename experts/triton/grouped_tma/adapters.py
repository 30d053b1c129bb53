"""LoRA for the GEMMs of the grouped_tma path: the launch of the shrink kernel.

An adapter adds B u to the result of a GEMM, where u = A x. The index of an adapter in the stacked
matrices A and B is its slot. The TMA GEMM adds B u in extra steps along K, one group of steps for
each slot that occurs in a tile. A row of u therefore has columns for every slot of its tile. All of
them are zero except the columns of the row's own slot.
"""

import torch

from experts.triton.adapters import (
    Matrices,
    SegmentShrink,
    TileShrinkOutput,
    choose_block_r,
    count_u13_columns,
    make_shrink_arguments,
)
from modular_kernel.replay.launch.launch import launch
from modular_kernel.spec.problem import Problem
from modular_kernel.workspace import BufferSpec

_BOX_WIDTH = 64  # 16-bit values in a row of a TMA box, which has 128 bytes


def shrink_buffer_specs(problem: Problem, num_rows: int, num_tiles: int) -> dict[str, BufferSpec]:
    """Return the buffers of `TileShrink`; {} for a problem without adapters."""
    spec = problem.adapters
    if spec is None:
        return {}
    widths = {"lora_u13": count_u13_columns(problem), "lora_u2": spec.rank}
    return {
        **{
            name: BufferSpec((num_rows, spec.adapters * round_up_to_box(width)), problem.dtype)
            for name, width in widths.items()
        },
        "lora_tile_slots": BufferSpec((num_tiles, spec.adapters + 1), torch.int32),
    }


def round_up_to_box(columns: int) -> int:
    """Round the number of columns of u per slot up to whole TMA boxes. A box is a K step."""
    return -(-columns // _BOX_WIDTH) * _BOX_WIDTH


class TileShrink(SegmentShrink):
    """The shrink launches for the TMA GEMMs. u has columns for every slot that a tile can have."""

    def _shrink(  # type: ignore[override]
        self, name: str, x: torch.Tensor, matrices: Matrices, *, gather: bool
    ) -> TileShrinkOutput:
        from experts.triton.grouped_tma.kernels.shrink import shrink_tiles_kernel

        a, b = matrices
        assert a is not None
        assert b is not None  # validated with the weights
        order, width = self._order, round_up_to_box(a.shape[2])
        u = self._workspace.take(name, (order.row_of_pair_TK.numel(), len(a) * width))
        tile_slots = self._workspace.take("lora_tile_slots", (order.max_tiles, len(a) + 1))
        launch_args = make_shrink_arguments(a, x.shape[1], self._problem, self._block_m)
        launch_args["BLOCK_RANK"] = choose_block_r(a.shape[2])  # all rows of A, but at most one box
        launch(
            shrink_tiles_kernel,
            (order.max_tiles, width // _BOX_WIDTH, launch_args["SLOT_PROGRAMS"]),
            x_ptr=x,
            lora_u_ptr=u,
            tile_slots_ptr=tile_slots,
            adapter_slots_ptr=self._slots_T,
            tokens_ptr=order.token_of_row,
            tiles_ptr=order.tiles,
            max_tiles=order.max_tiles,
            stride_lora_u=u.shape[1],
            stride_xm=x.stride(0),
            stride_xk=x.stride(1),
            GATHER_TOKENS=gather,
            SLOT_COLUMNS=width,
            BOX_COLUMNS=_BOX_WIDTH,
            **launch_args,
        )
        return TileShrinkOutput(u, tile_slots, b, a.shape[2] - b.shape[3])
