"""DeepGemmExperts and BatchedDeepGemmExperts: both products are DeepGEMM's."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from experts.common.batched_rows import BatchedRowsExperts
from experts.common.sorted_rows import RowOrder, SortedRowsExperts
from experts.deepgemm.aligned_rows import aligned_rows, most_aligned
from experts.deepgemm.library import BLOCK, DEEP_GEMM, TILE_M, contiguous, load, masked
from modular_kernel.ops.sort import Sorted, sort_pairs, sort_specs
from modular_kernel.support import ExpertsRequirements
from modular_kernel.tensors import BatchedShape, DispatchedRouting
from modular_kernel.types import ActivationFormat, Problem, Reduce
from modular_kernel.workspace import BufferSpec, Workspace

Rows = tuple[torch.Tensor, torch.Tensor | None]
_SCALES = "scales_along_rows"


class DeepGemmExperts(SortedRowsExperts):
    """Contiguous tokens, bf16 or fp8 by blocks of 128 x 128; weights and sums over top-k itself.

    Each expert's rows begin a tile of 128. Weights that do not lie row by row are copied in every
    call.
    """

    load_library = staticmethod(load)
    requires = ExpertsRequirements(
        activation_format=ActivationFormat.STANDARD,
        devices=frozenset({"cuda"}),
        packages=("triton", DEEP_GEMM.name),
        providers=(DEEP_GEMM,),
        triton=True,
        archs=frozenset({(9, 0)}),  # sm_100 wants other scales
        dtypes=frozenset({torch.bfloat16}),
        graph_capturable=True,
        reduce=Reduce.NOOP,
        keep_topk=True,
        bias=False,
        weight_on_input=False,
        expert_map=True,
        chunking=True,
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
        """Return the launch that no call makes where the library is missing."""
        return {"aligned rows": _align_without_memory}

    def most_rows(self, pairs: int) -> int:
        return most_aligned(pairs, self.problem.e, TILE_M)

    def order_specs(self, tokens: int, top_k: int) -> Mapping[str, BufferSpec]:
        return {
            **sort_specs(tokens, top_k, TILE_M, self.problem.e),
            "aligned_rows": BufferSpec((tokens, top_k), torch.int32),
            "aligned_ends": BufferSpec((self.problem.e,), torch.int32),
        }

    def order(self, routing: DispatchedRouting, workspace: Workspace) -> RowOrder:
        order = sort_pairs(routing, block_m=TILE_M, num_local=self.problem.e, workspace=workspace)
        rows_TK = workspace.take("aligned_rows", tuple(order.row_of_pair_TK.shape))
        ends = workspace.take("aligned_ends", (self.problem.e,))
        aligned_rows(order, TILE_M, rows_TK=rows_TK, ends=ends)
        return RowOrder(rows_TK, ends, ends[-1:])

    def product_specs(self, rows: int) -> Mapping[str, BufferSpec]:
        return _scale_specs(self.problem, rows)

    def product(
        self,
        rows: Rows,
        weights: Rows,
        order: RowOrder,
        workspace: Workspace,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        assert out is not None
        a, scale = rows
        if scale is not None:
            along = workspace.take(_SCALES, (scale.shape[1], len(a)))
            scale = along.copy_(scale.T).T
        contiguous(self._library, (a, scale), weights, order.ends, out)
        return out


class BatchedDeepGemmExperts(BatchedRowsExperts):
    """Batched rows in and out, unweighted, bf16 or fp8 by blocks of 128 x 128.

    An expert has room for a multiple of 128 rows, because whole tiles are stored.
    """

    load_library = staticmethod(load)
    requires = replace(
        DeepGemmExperts.requires,
        activation_format=ActivationFormat.BATCHED_EXPERTS,
        reduce=Reduce.DELEGATE,
        expert_map=False,
        chunking=False,
        capacity_multiple=TILE_M,
    )

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._library: Any = self.load_library()

    def product_specs(self, shape: BatchedShape) -> Mapping[str, BufferSpec]:
        return _scale_specs(self.problem, shape.experts * shape.capacity)

    def product(
        self,
        rows: Rows,
        weights: Rows,
        counts_e: torch.Tensor,
        workspace: Workspace,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        assert out is not None
        (a, scale), problem = rows, self.problem
        experts, capacity, _ = a.shape
        if scale is not None:
            along = workspace.take(_SCALES, (experts, scale.shape[2], capacity))
            scale = along.copy_(scale.transpose(1, 2)).transpose(1, 2)
        expected = capacity * problem.top_k // problem.experts
        masked(self._library, (a, scale), weights, counts_e, expected, out)
        return out


def _scale_specs(problem: Problem, rows: int) -> Mapping[str, BufferSpec]:
    """Room for the scales of either product's rows, those of a group side by side."""
    if not problem.scheme.quantises_activations:
        return {}
    groups = max(problem.hidden, problem.intermediate) // BLOCK
    return {_SCALES: BufferSpec((groups, rows), torch.float32)}


def _align_without_memory() -> None:
    rows_TK, ends = (torch.empty(s, dtype=torch.int32, device="meta") for s in ((64, 8), (32,)))
    starts, nothing = torch.empty(33, dtype=torch.int32, device="meta"), ends[:0]
    order = Sorted(rows_TK, nothing, nothing, starts)
    aligned_rows(order, TILE_M, rows_TK=torch.empty_like(rows_TK), ends=ends)
