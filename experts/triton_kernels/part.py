"""TritonKernelsExperts: an experts part whose GEMMs are matmul_ogs of triton_kernels."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from experts.common.sorted_rows import RowOrder, SortedRowsExperts
from experts.triton_kernels.library import TRITON_KERNELS, load, ragged_matmul
from experts.triton_kernels.tile_maps import (
    TILE_ROWS,
    TileMaps,
    max_num_tiles,
    schedule_tiles,
    tile_specs,
    write_tile_maps,
)
from modular_kernel.compatibility.support import Rejection
from modular_kernel.ops.sort import sort_pairs, sort_specs
from modular_kernel.spec.problem import MAX_TOP_K, Machine, Problem
from modular_kernel.tensors import DispatchedRouting
from modular_kernel.workspace import BufferSpec, Workspace

TensorAndScale = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class TiledOrder(RowOrder):
    """A RowOrder without gaps between experts, and the tiles of its rows.

    starts: (e + 1,) int32, the first row of each local expert, followed by the number of rows.
    tiles: the tile schedules.
    """

    starts: torch.Tensor
    tiles: TileMaps


class TritonKernelsExperts(SortedRowsExperts):
    """Experts over contiguous bf16 tokens, with weights in bf16 or mxfp4.

    The library adds biases to its float32 sums, before it rounds them. The part then applies the
    router weights and sums over top-k. mxfp4 weights are used in checkpoint layout, not in the
    library's swizzled layouts. The part does not use the library's routing, so a token may have an
    expert twice, and router weights stay float32. The library's `gammas` are not used either,
    because the library rounds rows after multiplying by them.
    """

    load_library = staticmethod(load)
    requires = replace(
        SortedRowsExperts.requires,
        devices=frozenset({"cuda"}),
        packages=("triton", TRITON_KERNELS.name),
        providers=(TRITON_KERNELS,),
        min_arch=(9, 0),
        dtypes=frozenset({torch.bfloat16}),
        bias=True,
        top_k=(1, MAX_TOP_K),  # the library receives sorted rows, so K does not matter
        hidden_multiple=8,  # so that rows are 16-byte aligned
        intermediate_multiple=8,
        schemes=frozenset({"none", "mxfp4_w4a16"}),
        max_experts=1 << 15,  # the lower 16 bits of a tile map entry are the expert id
        library_allocates=True,  # matmul_ogs allocates memory in every call
    )

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._library: Any = self.load_library()

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        """Return the rejections of mxfp4 weights that `requires` cannot express.

        H and I need not be multiples of 128, the library's step along K. In the last step, masked
        activations and codes are zero. The load of scales is masked without a value for masked
        elements. On sm_90, Triton sets the registers of such a load to zero before the load, so the
        masked products are zero. Only a scale of 255 would turn them into NaN.
        """
        if problem.scheme.name != "mxfp4_w4a16":
            return ()
        rejections, parties = list[Rejection](), (cls.__name__, "problem")
        if problem.scheme.repacked:
            need = "weights in checkpoint layout, not repacked"
            rejections.append(Rejection("quant", parties, problem.quant, need))
        if machine.arch is not None and machine.arch != (9, 0):
            got, parties = f"{machine.arch[0]}.{machine.arch[1]}", (cls.__name__, "machine")
            rejections.append(Rejection("archs", parties, got, "9.0 for mxfp4"))
        return tuple(rejections)

    @classmethod
    def meta_calls(cls) -> Mapping[str, Callable[[], object]]:
        """Return a call on meta tensors that compiles the Triton kernel `tile_maps_kernel`."""
        return {"tile maps": _write_tile_maps_on_meta}

    def sort_rows_specs(self, num_tokens: int, top_k: int) -> Mapping[str, BufferSpec]:
        local_experts = self.problem.e
        return {
            **sort_specs(num_tokens, top_k, TILE_ROWS[-1], local_experts),
            **tile_specs(num_tokens * top_k, local_experts),
        }

    def sort_rows(self, routing: DispatchedRouting, workspace: Workspace) -> RowOrder:
        local_experts, num_rows = self.problem.e, routing.topk_ids_TK.numel()
        order = sort_pairs(
            routing, block_m=TILE_ROWS[-1], num_local=local_experts, workspace=workspace
        )
        tiles = schedule_tiles(order.starts, num_rows, workspace)
        ends, used_rows = order.starts[1:], order.starts[-1:]
        return TiledOrder(order.row_of_pair_TK, ends, used_rows, order.starts, tiles)

    def grouped_gemm(
        self,
        rows: TensorAndScale,
        weights: TensorAndScale,
        bias: torch.Tensor | None,
        order: RowOrder,
        workspace: Workspace,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        assert out is not None
        assert isinstance(order, TiledOrder)
        starts, tiles = order.starts, order.tiles
        return ragged_matmul(self._library, rows[0], weights, bias, starts, tiles, out)


def _write_tile_maps_on_meta() -> None:
    sizes = len(TILE_ROWS)
    shapes = ((33,), (32,), (sizes, 33), (sizes, max_num_tiles(512, 32)))
    starts, *buffers = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in shapes)
    write_tile_maps(starts, TileMaps(*buffers))
