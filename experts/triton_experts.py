"""TritonExperts: align, two grouped GEMMs (the first with the activation behind it), sum."""

import torch

from experts.tile_search import TileSpace
from experts.tiles import Tile, choose_tiles, regimes_up_to
from experts.triton_gemm import (
    SCHEMES,
    Product,
    first_product,
    group_rejections,
    second_product,
)
from modular_kernel import stages
from modular_kernel.contracts import PermuteExpertsUnpermute, TopKWeightAndReduce
from modular_kernel.ops.align import Aligned, align, align_specs
from modular_kernel.ops.quantise import PairRows, quantise_rows, quantise_specs, take_quantised
from modular_kernel.ops.reduce import weight_and_sum
from modular_kernel.support import ExpertsRequirements, Rejection
from modular_kernel.tensors import (
    ContiguousShape,
    ContiguousTokens,
    Dispatched,
    DispatchShape,
    ExpertWeights,
)
from modular_kernel.types import ActivationFormat, Combine, Machine, Problem, Reduce
from modular_kernel.workspace import BufferSpec, Workspace, WorkspaceShapes
from topk_reduce import TopKWeightAndReduceNoOp, unless_kept


class TritonExperts(PermuteExpertsUnpermute):
    """Contiguous tokens, Triton grouped GEMMs; weights and sums over top-k itself.

    Six launches: count, scan and place the pairs; GEMM 1 + activation; GEMM 2; weighted sum.
    Where top-k is kept the last one falls away and GEMM 2 writes the output, zeros for skipped
    pairs included. No atomics on floating-point values, so results are bitwise repeatable.
    """

    requires = ExpertsRequirements(
        activation_format=ActivationFormat.STANDARD,
        packages=("triton",),
        triton=True,
        min_arch=(8, 0),
        graph_capturable=True,
        reduce=Reduce.NOOP,
        keep_topk=True,
        expert_map=True,
        chunking=True,
        tf32=True,
        schemes=SCHEMES,
    )

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        from experts.kernels.triton.grouped_gemm import grouped_gemm_kernel

        self._kernel = grouped_gemm_kernel
        self._sums = problem.combine is Combine.SUM

    @classmethod
    def tunable(cls, problem: Problem) -> TileSpace:
        return TileSpace(problem, cls.__name__)

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        return group_rejections(cls.__name__, problem)

    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        assert isinstance(shape, ContiguousShape)
        problem, pairs = self.problem, shape.tokens * shape.top_k
        rows = BufferSpec((pairs if self._sums else 0, problem.hidden), problem.dtype)
        kept = (shape.tokens, shape.top_k, problem.hidden)
        output = (shape.tokens, problem.hidden) if self._sums else kept
        return WorkspaceShapes(
            workspace13=BufferSpec((pairs, problem.intermediate), problem.dtype),
            workspace2=rows,
            output=BufferSpec(output, problem.dtype),
            extra=self._align_specs(shape.tokens) | self._quantised_specs(pairs),
        )

    def _quantised_specs(self, pairs: int) -> dict[str, BufferSpec]:
        """GEMM 2's rows as 8-bit values, where the scheme wants them."""
        scheme = self.problem.scheme
        if not scheme.quantises_activations:
            return {}
        return quantise_specs("h", scheme, pairs, self.problem.intermediate)

    def _align_specs(self, tokens: int) -> dict[str, BufferSpec]:
        """Room for the alignment of any call up to `tokens`: fewer tokens can mean more blocks,
        because they come with smaller ones."""
        problem, largest = self.problem, dict[str, BufferSpec]()
        for most, block in regimes_up_to(problem, tokens):
            for name, spec in align_specs(most * problem.top_k, block, problem.e).items():
                if name not in largest or spec.numel > largest[name].numel:
                    largest[name] = spec
        return largest

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return unless_kept(self.problem, TopKWeightAndReduceNoOp())

    def apply(
        self,
        tokens: Dispatched,
        *,
        weights: ExpertWeights,
        workspace: Workspace,
        output: torch.Tensor,
    ) -> None:
        assert isinstance(tokens, ContiguousTokens)
        problem, routing = self.problem, tokens.routing
        num_tokens, top_k = routing.topk_ids_TK.shape
        pairs = num_tokens * top_k
        tiles = choose_tiles(problem, num_tokens)
        with stages.stage(stages.PERMUTE):
            aligned = align(
                routing,
                block_size=tiles.gemm1.block_m,
                num_local=problem.e,
                workspace=workspace,
                ignore_invalid=self._sums,
            )
        h_PI = workspace.take("workspace13", (pairs, problem.intermediate))
        on_input = routing.topk_weights_TK if problem.apply_router_weight_on_input else None
        with stages.stage(stages.GEMM1):
            product = first_product(weights, problem)
            self._multiply(
                (tokens.x_TH, tokens.scale), product, tiles.gemm1, aligned, h_PI, on_input
            )
        h_rows = self._quantised(h_PI, tokens, weights, workspace)
        rows_PH = workspace.take("workspace2", (pairs, problem.hidden)) if self._sums else output
        with stages.stage(stages.GEMM2):
            product = second_product(weights, problem)
            self._multiply(h_rows, product, tiles.gemm2, aligned, rows_PH, None)
        if self._sums:
            with stages.stage(stages.REDUCE):
                weight_and_sum(
                    rows_PH.view(num_tokens, top_k, problem.hidden),
                    None if problem.apply_router_weight_on_input else routing.topk_weights_TK,
                    scale=problem.routed_scaling_factor,
                    out=output,
                    routing=routing,
                    num_local=problem.e,
                )

    def _quantised(
        self,
        h_PI: torch.Tensor,
        tokens: ContiguousTokens,
        weights: ExpertWeights,
        workspace: Workspace,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """GEMM 2's rows and their scales; h_PI itself where activations are not quantised."""
        scheme = self.problem.scheme
        if not scheme.quantises_activations:
            return h_PI, None
        with stages.stage(stages.QUANTISE):
            shape = (h_PI.shape[0], h_PI.shape[1])
            out = take_quantised(workspace, "h", scheme, shape, static_scale=weights.a2_scale)
            live = PairRows(tokens.routing, self.problem.e)
            quantise_rows(h_PI, scheme, out=out, live=live)
        return out.q_RK, out.scale

    def _multiply(
        self,
        rows: tuple[torch.Tensor, torch.Tensor | None],
        product: Product,
        tile: Tile,
        aligned: Aligned,
        out: torch.Tensor,
        row_weights_TK: torch.Tensor | None,
    ) -> None:
        """One grouped GEMM. rows: (T, H) tokens, or (P, I) one row per pair, and their scales;
        out: a row per pair."""
        a, a_scale = rows
        pairs = out.numel() // product.columns
        blocks = aligned.expert_ids.numel()
        num_n = -(-product.columns // tile.block_n)
        self._kernel[(blocks * num_n,)](
            a_ptr=a,
            row_weights_ptr=a if row_weights_TK is None else row_weights_TK,
            out_ptr=out,
            sorted_ptr=aligned.sorted_token_ids,
            expert_ids_ptr=aligned.expert_ids,
            num_post_ptr=aligned.num_tokens_post_padded,
            num_pairs=pairs,
            num_m=blocks,
            stride_am=a.stride(0),
            stride_ak=a.stride(1),
            A_TOP_K=pairs // a.shape[0],
            WRITE_ZEROS=not self._sums,
            HAS_ROW_WEIGHTS=row_weights_TK is not None,
            **product.arguments(tile, self.problem.fp32_precision, a_scale),
        )
