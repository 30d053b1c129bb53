"""TritonKernelsExperts: both GEMMs are the matmul_ogs of triton_kernels."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from experts.common.sorted_rows import RowOrder, SortedRowsExperts
from experts.triton_kernels.library import TRITON_KERNELS, load, ragged_matmul
from experts.triton_kernels.tile_maps import (
    SIZES,
    TileMaps,
    max_num_tiles,
    tile_maps,
    tile_specs,
    write_tile_maps,
)
from modular_kernel.compatibility.support import Rejection
from modular_kernel.ops.sort import sort_pairs, sort_specs
from modular_kernel.spec.problem import MAX_TOP_K, Machine, Problem
from modular_kernel.tensors import DispatchedRouting
from modular_kernel.workspace import BufferSpec, Workspace

_MX_BLOCK_K = 128  # K step of the mxfp4 matmul on sm_90

Rows = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class TiledOrder(RowOrder):
    """The order of rows, without gaps, and the tiles of the rows.

    starts is (e + 1,) int32: the first row of each expert, then the number of rows.
    """

    starts: torch.Tensor
    tiles: TileMaps


class TritonKernelsExperts(SortedRowsExperts):
    """Experts in bf16, with weights in bf16 or mxfp4, over contiguous tokens.

    They apply router weights and sum over top-k themselves. mxfp4 weights are used in the layout of
    checkpoints, not in the library's swizzled ones. The library's routing is not used, so an expert
    may appear twice in a token, and router weights stay float32. Its `gammas` are not used, because
    they round the weighted rows.
    """

    load_library = staticmethod(load)
    requires = replace(
        SortedRowsExperts.requires,
        devices=frozenset({"cuda"}),
        packages=("triton", TRITON_KERNELS.name),
        providers=(TRITON_KERNELS,),
        min_arch=(9, 0),
        dtypes=frozenset({torch.bfloat16}),
        top_k=(1, MAX_TOP_K),  # the library gets sorted rows and does not see K
        hidden_multiple=8,  # rows on 16-byte addresses
        intermediate_multiple=8,
        schemes=frozenset({"none", "mxfp4_w4a16"}),
        max_experts=1 << 15,  # expert ids use the lower 16 bits of a map entry
        library_allocates=True,
    )

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._library: Any = self.load_library()

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        """Return the rejections for mxfp4.

        If K is not a multiple of 128, the last K step reads scales past the end of a row, which may
        produce NaN.
        """
        if problem.scheme.name != "mxfp4_w4a16":
            return ()
        rejections, parties = list[Rejection](), (cls.__name__, "problem")
        if problem.scheme.repacked:
            need = "weights in checkpoint layout, not repacked"
            rejections.append(Rejection("quant", parties, problem.quant, need))
        for name in ("hidden", "intermediate"):
            if getattr(problem, name) % _MX_BLOCK_K:
                need = f"a multiple of {_MX_BLOCK_K} for mxfp4"
                rejections.append(Rejection(name, parties, str(getattr(problem, name)), need))
        if machine.arch is not None and machine.arch != (9, 0):
            got, parties = f"{machine.arch[0]}.{machine.arch[1]}", (cls.__name__, "machine")
            rejections.append(Rejection("archs", parties, got, "9.0 for mxfp4"))
        return tuple(rejections)

    @classmethod
    def meta_calls(cls) -> Mapping[str, Callable[[], object]]:
        """Return the compile case of the tile map kernel, which is not the library's."""
        return {"tile maps": _map_meta_tensors}

    def order_specs(self, tokens: int, top_k: int) -> Mapping[str, BufferSpec]:
        experts = self.problem.e
        return {
            **sort_specs(tokens, top_k, SIZES[-1], experts),
            **tile_specs(tokens * top_k, experts),
        }

    def order(self, routing: DispatchedRouting, workspace: Workspace) -> RowOrder:
        experts, rows = self.problem.e, routing.topk_ids_TK.numel()
        order = sort_pairs(routing, block_m=SIZES[-1], num_local=experts, workspace=workspace)
        tiles = tile_maps(order.starts, rows, workspace)
        ends, num_rows = order.starts[1:], order.starts[-1:]
        return TiledOrder(order.row_of_pair_TK, ends, num_rows, order.starts, tiles)

    def product(
        self,
        rows: Rows,
        weights: Rows,
        order: RowOrder,
        workspace: Workspace,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        assert out is not None
        assert isinstance(order, TiledOrder)
        return ragged_matmul(self._library, rows[0], weights, order.starts, order.tiles, out)


def _map_meta_tensors() -> None:
    shapes = ((33,), (32,), (len(SIZES), 33), (len(SIZES), max_num_tiles(512, 32)))
    starts, *buffers = (torch.empty(s, dtype=torch.int32, device="meta") for s in shapes)
    write_tile_maps(starts, TileMaps(*buffers))
