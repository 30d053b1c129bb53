"""DeepGemmExperts and BatchedDeepGemmExperts: both GEMMs are those of DeepGEMM."""

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
from experts.derived_requirements import batched_requirements
from modular_kernel.spec.problem import MAX_TOP_K, IdSpace, Problem
from modular_kernel.tensors import BatchedShape, DispatchedRouting
from modular_kernel.workspace import BufferSpec, Workspace

TensorAndScale = tuple[torch.Tensor, torch.Tensor | None]
_SCALES = "scales_of_tokens"


class DeepGemmExperts(SortedRowsExperts):
    """Experts in bf16, or fp8 with 128 x 128 blocks, over contiguous tokens.

    They apply router weights and sum over top-k themselves. The rows of each expert start at a
    multiple of 128, the tile size. Weights that are not row-major and 16-byte aligned are copied in
    every call.
    """

    load_library = staticmethod(load)
    scales_along_rows = True  # as DeepGEMM requires
    requires = replace(
        SortedRowsExperts.requires,
        devices=frozenset({"cuda"}),
        packages=("triton", DEEP_GEMM.name),
        providers=(DEEP_GEMM,),
        archs=frozenset({(9, 0)}),  # sm_100 needs scales in another format
        dtypes=frozenset({torch.bfloat16}),
        top_k=(1, MAX_TOP_K),  # the library gets sorted rows and does not see K
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
        """Return the compile case of the alignment kernel, a Triton kernel of this package."""
        return {"aligned rows": _align_meta_tensors}

    def max_rows(self, pairs: int) -> int:
        return max_aligned_rows(pairs, self.problem.e, TILE_M)

    def order_specs(self, tokens: int, top_k: int) -> Mapping[str, BufferSpec]:
        return aligned_specs(tokens, top_k, self.problem.e)

    def order(self, routing: DispatchedRouting, workspace: Workspace) -> RowOrder:
        rows_TK, ends = align_rows(routing, TILE_M, num_local=self.problem.e, workspace=workspace)
        return RowOrder(rows_TK, ends, ends[-1:])

    def product(
        self,
        rows: TensorAndScale,
        weights: TensorAndScale,
        order: RowOrder,
        workspace: Workspace,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        assert out is not None
        grouped_gemm_contiguous(self._library, rows, weights, order.ends, out)
        return out


class BatchedDeepGemmExperts(BatchedRowsExperts):
    """Experts in bf16, or fp8 with 128 x 128 blocks, over batched rows, without router weights.

    The capacity of an expert is a multiple of 128, because DeepGEMM stores whole tiles.
    """

    load_library = staticmethod(load)
    scales_along_rows = True
    requires = replace(batched_requirements(DeepGemmExperts.requires), capacity_multiple=TILE_M)

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._library: Any = self.load_library()

    def product_specs(self, shape: BatchedShape) -> Mapping[str, BufferSpec]:
        if not self.problem.scheme.quantizes_activations:
            return {}
        shape_of_scales = (self.problem.hidden // BLOCK, shape.experts * shape.capacity)
        return {_SCALES: BufferSpec(shape_of_scales, torch.float32)}

    def product(
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
        # Scales from `prepare` are row-major; DeepGEMM needs them column-major.
        if scale is not None and scale.stride()[1:] != (1, capacity):
            scale_buffer = workspace.take(_SCALES, (experts, scale.shape[2], capacity))
            scale = scale_buffer.copy_(scale.mT).mT
        expected_m = capacity * problem.top_k // problem.experts
        grouped_gemm_masked(self._library, (a, scale), weights, counts_e, expected_m, out)
        return out


def _align_meta_tensors() -> None:
    meta = torch.device("meta")
    ids, num_invalid = (torch.empty(s, dtype=torch.int32, device=meta) for s in ((64, 8), (1,)))
    routing = DispatchedRouting(None, ids, IdSpace.LOCAL, 32, None, num_invalid)
    workspace = Workspace(aligned_specs(64, 8, 32), meta)
    align_rows(routing, TILE_M, num_local=32, workspace=workspace)
