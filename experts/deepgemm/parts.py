"""DeepGemmExperts and BatchedDeepGemmExperts: experts parts whose GEMMs DeepGEMM computes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from experts.common.batched_rows import BatchedRowsExperts
from experts.common.sorted_rows import RowOrder, SortedRowsExperts
from experts.deepgemm.align_rows import align_rows, aligned_specs, max_aligned_rows
from experts.deepgemm.library import (
    BLOCK,
    DEEP_GEMM,
    TILE_M,
    grouped_gemm_contiguous,
    grouped_gemm_masked,
    load,
)
from experts.derived_requirements import to_batched_requirements
from modular_kernel.spec.problem import MAX_TOP_K, IdSpace, Problem
from modular_kernel.tensors import BatchedShape, DispatchedRouting
from modular_kernel.workspace import BufferSpec, Workspace

TensorAndScale = tuple[torch.Tensor, torch.Tensor | None]
_COLUMN_MAJOR_SCALES = "column_major_scales"  # name of a workspace buffer


class DeepGemmExperts(SortedRowsExperts):
    """Experts over tokens in the standard format, in bf16 or fp8 (scales per 128 x 128 block).

    The part applies the router weights and sums over top-k. The rows of each expert start at a
    multiple of 128, the tile size. Every call copies weights that are not row-major and 16-byte
    aligned.
    """

    load_library = staticmethod(load)
    column_major_scales = True  # required by DeepGEMM
    requires = replace(
        SortedRowsExperts.requires,
        devices=frozenset({"cuda"}),
        packages=("triton", DEEP_GEMM.name),
        providers=(DEEP_GEMM,),
        archs=frozenset({(9, 0)}),  # sm_100 needs scales in another format
        dtypes=frozenset({torch.bfloat16}),
        top_k=(1, MAX_TOP_K),  # any K, because the library receives sorted rows, not top-k ids
        hidden_multiple=BLOCK,
        intermediate_multiple=BLOCK,
        schemes=frozenset({"none", "fp8_w8a8_block"}),
        blocks=frozenset({(BLOCK, BLOCK)}),
    )

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._library: Any = self.load_library()

    @classmethod
    def meta_calls(cls) -> Mapping[str, Callable[[], object]]:
        """Return a call on meta tensors that compiles the Triton kernel `align_rows_kernel`."""
        return {"aligned rows": _align_rows_on_meta}

    def max_rows(self, num_pairs: int) -> int:
        return max_aligned_rows(num_pairs, self.problem.e, TILE_M)

    def sort_rows_specs(self, num_tokens: int, top_k: int) -> Mapping[str, BufferSpec]:
        return aligned_specs(num_tokens, top_k, self.problem.e)

    def sort_rows(self, routing: DispatchedRouting, workspace: Workspace) -> RowOrder:
        rows_TK, ends = align_rows(routing, TILE_M, num_local=self.problem.e, workspace=workspace)
        return RowOrder(rows_TK, ends, ends[-1:])

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
        grouped_gemm_contiguous(self._library, rows, weights, order.ends, out)
        return out


class BatchedDeepGemmExperts(BatchedRowsExperts):
    """Experts over batched rows, in bf16 or in fp8 with scales per 128 x 128 block.

    Router weights are not applied. The capacity of an expert is a multiple of 128, because DeepGEMM
    stores whole tiles.
    """

    load_library = staticmethod(load)
    column_major_scales = True
    requires = replace(to_batched_requirements(DeepGemmExperts.requires), capacity_multiple=TILE_M)

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._library: Any = self.load_library()

    def grouped_gemm_specs(self, shape: BatchedShape) -> Mapping[str, BufferSpec]:
        if not self.problem.scheme.quantizes_activations:
            return {}
        scale_shape = (self.problem.hidden // BLOCK, shape.experts * shape.capacity)
        return {_COLUMN_MAJOR_SCALES: BufferSpec(scale_shape, torch.float32)}

    def grouped_gemm(
        self,
        rows: TensorAndScale,
        weights: TensorAndScale,
        counts_e: torch.Tensor,
        workspace: Workspace,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        assert out is not None
        (a, scale), problem = rows, self.problem
        experts, capacity, _ = a.shape
        # Scales from `prepare` are row-major, but DeepGEMM needs them column-major.
        if scale is not None and scale.stride()[1:] != (1, capacity):
            buffer_shape = (experts, scale.shape[2], capacity)
            scale = workspace.take(_COLUMN_MAJOR_SCALES, buffer_shape).copy_(scale.mT).mT
        expected_rows = capacity * problem.top_k // problem.experts
        grouped_gemm_masked(self._library, (a, scale), weights, counts_e, expected_rows, out)
        return out


def _align_rows_on_meta() -> None:
    meta = torch.device("meta")
    ids, num_invalid = (
        torch.empty(shape, dtype=torch.int32, device=meta) for shape in ((64, 8), (1,))
    )
    routing = DispatchedRouting(None, ids, IdSpace.LOCAL, 32, None, num_invalid)
    workspace = Workspace(aligned_specs(64, 8, 32), meta)
    align_rows(routing, TILE_M, num_local=32, workspace=workspace)
