"""CutlassExpertsFP4 and BatchedCutlassExpertsFP4: nvfp4 weights and activations, for sm_100.

With contiguous tokens, a call sorts the pairs by expert, permutes and quantizes the tokens, runs
`fp4_mlp`, and sums the weighted rows of each token. With batched rows, a call lists the tiles,
quantizes the rows, and runs `fp4_mlp`.

The kernels have never been run, because no sm_100 GPU was available. Tests compile the GEMM and
inspect the generated code.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from experts.common.batched_rows import UnweightedRowsExperts
from experts.common.sorted_rows import SummedRowsExperts
from experts.cutlass.fp4_gemm import DIM_MULTIPLE, fp4_gemm
from experts.cutlass.fp4_mlp import compile_on_meta, mlp_specs, run_mlp
from experts.derived_requirements import to_batched_requirements
from experts.triton.path import merge_workspaces
from modular_kernel.ops.fp4_rows import (
    TILE_M,
    batched_tile_specs,
    make_batched_tiles,
    quantize_tiles,
    take_fp4,
)
from modular_kernel.ops.sort import VALUES_PER_TILE, max_tile_count, sort_pairs, sort_specs
from modular_kernel.replay import stages
from modular_kernel.tensors import (
    BatchedShape,
    BatchedTokens,
    Dispatched,
    DispatchShape,
    ExpertWeights,
    StandardShape,
    StandardTokens,
)
from modular_kernel.workspace import BufferSpec, Workspace, WorkspaceShapes

_PACKAGES = ("triton", "nvidia_cutlass_dsl", "tvm_ffi")
_ARCHS = frozenset({(10, 0)})  # the kernel uses tcgen05 instructions


class CutlassExpertsFP4(SummedRowsExperts):
    """Experts with nvfp4 weights and activations over contiguous tokens.

    The part applies the router weights and sums over top-k. Every call rearranges the scales of the
    weights into the layout that the GEMM reads, and copies weights that are not row-major and
    16-byte aligned.
    """

    gemm = staticmethod(fp4_gemm)
    requires = replace(
        SummedRowsExperts.requires,
        devices=frozenset({"cuda"}),
        packages=_PACKAGES,
        packages_extra="cutlass",
        archs=_ARCHS,
        dtypes=frozenset({torch.bfloat16}),
        interleaved=False,
        hidden_multiple=DIM_MULTIPLE,
        intermediate_multiple=DIM_MULTIPLE,
        schemes=frozenset({"nvfp4_w4a4"}),
    )

    @classmethod
    def meta_calls(cls) -> Mapping[str, Callable[[], object]]:
        """Return a call on meta tensors that compiles the Triton kernels around the GEMM."""
        return {"nvfp4 rows": compile_on_meta}

    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        assert isinstance(shape, StandardShape)
        problem, num_rows = self.problem, shape.tokens * shape.top_k
        max_tiles = max_tile_count(num_rows, TILE_M, problem.e)
        # GEMM 2 may overwrite x and the output of GEMM 1, because neither is read again.
        aliases = ("x_q", "workspace13")
        specs = {
            **sort_specs(shape.tokens, shape.top_k, TILE_M, problem.e),
            **mlp_specs(problem, num_rows, max_tiles),
            "workspace13": BufferSpec((num_rows, problem.w1_rows), problem.dtype),
            "workspace2": BufferSpec((num_rows, problem.hidden), problem.dtype, over=aliases),
        }
        return merge_workspaces(problem, shape, [specs])

    def apply(
        self,
        tokens: Dispatched,
        *,
        weights: ExpertWeights,
        workspace: Workspace,
        output: torch.Tensor,
    ) -> None:
        assert isinstance(tokens, StandardTokens)
        problem, routing = self.problem, tokens.routing
        num_rows = routing.topk_ids_TK.numel()
        with stages.stage(stages.SORT):
            order = sort_pairs(routing, block_m=TILE_M, num_local=problem.e, workspace=workspace)
        with stages.stage(stages.PERMUTE_QUANTIZED):
            x = take_fp4(workspace, "x", num_rows, problem.hidden, order.max_tiles)
            scale_e, source_R = weights.a1_scale, order.token_of_row
            assert scale_e is not None
            quantize_tiles(tokens.x_TH, order.tiles, scale_e, out=x, source_R=source_R)
        rows_RH = run_mlp(
            x,
            order.tiles,
            weights,
            problem,
            gemm=self.gemm,
            workspace=workspace,
            allocate_out=lambda: workspace.take("workspace2", (num_rows, problem.hidden)),
        )
        self.unpermute(rows_RH, order.row_of_pair_TK, routing.topk_weights_TK, output)


class BatchedCutlassExpertsFP4(UnweightedRowsExperts):
    """Like CutlassExpertsFP4, but for batched rows, and without router weights.

    Only valid rows are written.
    """

    gemm = staticmethod(fp4_gemm)
    requires = to_batched_requirements(CutlassExpertsFP4.requires)

    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        assert isinstance(shape, BatchedShape)
        problem, num_rows = self.problem, shape.experts * shape.capacity
        tile_specs = batched_tile_specs(shape.experts, shape.capacity)
        max_tiles = tile_specs["batched_tiles"].shape[0] // VALUES_PER_TILE
        output_shape = (shape.experts, shape.capacity, problem.hidden)
        return WorkspaceShapes(
            workspace13=BufferSpec((num_rows, problem.w1_rows), problem.dtype),
            workspace2=BufferSpec((0,), problem.dtype),
            output=BufferSpec(output_shape, problem.dtype),
            extra={**tile_specs, **mlp_specs(problem, num_rows, max_tiles)},
        )

    def apply(
        self,
        tokens: Dispatched,
        *,
        weights: ExpertWeights,
        workspace: Workspace,
        output: torch.Tensor,
    ) -> None:
        assert isinstance(tokens, BatchedTokens)
        problem, x_RH = self.problem, tokens.x_eCH.flatten(0, 1)
        num_rows, out_RH = len(x_RH), output.flatten(0, 1)
        with stages.stage(stages.SORT):  # the rows are already sorted, so only list their tiles
            tiles = make_batched_tiles(tokens.counts_e, tokens.x_eCH.shape[1], workspace)
        with stages.stage(stages.QUANTIZE_INPUT):
            x = take_fp4(workspace, "x", num_rows, problem.hidden, tiles.numel() // VALUES_PER_TILE)
            assert weights.a1_scale is not None
            quantize_tiles(x_RH, tiles, weights.a1_scale, out=x)
        run_mlp(
            x,
            tiles,
            weights,
            problem,
            gemm=self.gemm,
            workspace=workspace,
            allocate_out=lambda: out_RH,
        )
