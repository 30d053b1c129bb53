"""Adapters as more depth of products fed by TMA: u of all of a tile's slots, side by side."""

import torch

from experts.triton.adapters import (
    Matrices,
    SegmentAdapters,
    TileShrunk,
    block_r,
    rows_of_a13,
    shrink_arguments,
)
from modular_kernel.replay.launch.launch import launch
from modular_kernel.spec.problem import Problem
from modular_kernel.workspace import BufferSpec

_BOX = 64  # 16-bit values of a TMA box's 128 bytes


def tile_specs(problem: Problem, rows: int, tiles: int) -> dict[str, BufferSpec]:
    """Return the buffers of `TileAdapters`; none for a problem without adapters."""
    spec = problem.adapters
    if spec is None:
        return {}
    widths = {"lora_u13": rows_of_a13(problem), "lora_u2": spec.rank}
    return {
        **{
            name: BufferSpec((rows, spec.adapters * whole_boxes(width)), problem.dtype)
            for name, width in widths.items()
        },
        "lora_named": BufferSpec((tiles, spec.adapters + 1), torch.int32),
    }


def whole_boxes(columns: int) -> int:
    """Return the columns of u that one slot takes: whole steps of a product fed by TMA."""
    return -(-columns // _BOX) * _BOX


class TileAdapters(SegmentAdapters):
    """The same rows for products fed by TMA: u of all of a tile's slots is more depth."""

    def _shrunk(  # type: ignore[override]
        self, name: str, x: torch.Tensor, matrices: Matrices, *, gather: bool
    ) -> TileShrunk:
        from experts.triton.grouped_tma.kernels.shrink import shrink_tiles_kernel

        a, b = matrices
        assert a is not None
        assert b is not None  # the weights were checked
        order, width = self._order, whole_boxes(a.shape[2])
        u = self._workspace.take(name, (order.row_of_pair_TK.numel(), len(a) * width))
        named = self._workspace.take("lora_named", (order.max_tiles, len(a) + 1))
        how = shrink_arguments(a, x.shape[1], self._problem, self._block_m)
        how["BLOCK_R"] = block_r(a.shape[2])  # all rows of A, or a whole box of them
        launch(
            shrink_tiles_kernel,
            (order.max_tiles, width // _BOX, how["PARTS"]),
            x_ptr=x,
            u_ptr=u,
            named_ptr=named,
            slots_ptr=self._slots_T,
            tokens_ptr=order.token_of_row,
            tiles_ptr=order.tiles,
            max_tiles=order.max_tiles,
            stride_u=u.shape[1],
            stride_xm=x.stride(0),
            stride_xk=x.stride(1),
            GATHER=gather,
            WIDTH=width,
            BOX=_BOX,
            **how,
        )
        return TileShrunk(u, named, b, a.shape[2] - b.shape[3])
