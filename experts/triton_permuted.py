"""The permuted path: rows moved into the order of experts, then products fed by TMA (sm_90).

Pays for moving rows once with products that load whole boxes and never mask: for many rows an
expert. Launches: count, scan, place; permute; GEMM 1 + activation; [quantise]; GEMM 2; sum.
"""

import torch

from experts.tile_permuted import BLOCK_M, MODES, TMA_BYTES, half_rows
from experts.tile_shapes import PERMUTED, Tile
from experts.triton_gemm import Product, first_product, second_product
from experts.triton_path import PathCall
from modular_kernel import stages
from modular_kernel.ops.launch import launch
from modular_kernel.ops.permute import permute_tokens
from modular_kernel.ops.quantise import quantise_rows, quantise_specs, scale_shape, take_quantised
from modular_kernel.ops.reduce import gather_rows, gather_weight_and_sum
from modular_kernel.ops.sort import Sorted, sort_pairs, sort_specs
from modular_kernel.quant import STORAGE
from modular_kernel.tensors import ExpertWeights
from modular_kernel.types import Combine, Problem
from modular_kernel.workspace import BufferSpec

Rows = tuple[torch.Tensor, torch.Tensor | None]  # and their scales


class PermutedPath:
    """Row r of both products' inputs and results is sorted row r; see ops.sort."""

    name = PERMUTED

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._mode = MODES[problem.scheme.name]

    def takes(self, weights: ExpertWeights) -> bool:
        """Whether every tensor lies as the boxes of TMA and the kernel's indices want it."""
        given = (weights.b1, weights.b2, weights.w1_scale, weights.w2_scale)
        tensors = (weights.w1, weights.w2, *(t for t in given if t is not None))
        return all(t.is_contiguous() for t in tensors) and all(
            t.data_ptr() % TMA_BYTES == 0 for t in tensors[:2]
        )

    def specs(self, tokens: int, block_m: int) -> dict[str, BufferSpec]:
        """Buffers for a call of `tokens` tokens in tiles of block_m rows."""
        problem, pairs = self.problem, tokens * self.problem.top_k
        scheme = problem.scheme
        stored = STORAGE[scheme.activation] if scheme.quantised else problem.dtype
        specs = {
            "workspace13": BufferSpec((pairs, problem.intermediate), problem.dtype),
            "workspace2": BufferSpec((pairs, problem.hidden), problem.dtype),
            "permuted_x": BufferSpec((pairs, problem.hidden), stored),
            **sort_specs(tokens, problem.top_k, block_m, problem.e),
        }
        if scheme.quantised:
            shape = scale_shape(scheme, pairs, problem.hidden)
            specs["permuted_scale"] = BufferSpec(shape, torch.float32)
            specs |= quantise_specs("h", scheme, pairs, problem.intermediate)
        return specs

    def run(self, call: PathCall) -> None:
        problem, workspace, routing = self.problem, call.workspace, call.tokens.routing
        pairs = routing.topk_ids_TK.numel()
        with stages.stage(stages.PERMUTE):
            block_m = call.tiles.gemm1.block_m
            order = sort_pairs(routing, block_m=block_m, num_local=problem.e, workspace=workspace)
            x = self._permuted(call, order)
        h_RI = workspace.take("workspace13", (pairs, problem.intermediate))
        with stages.stage(stages.GEMM1):
            product = first_product(call.weights, problem)
            self._multiply(x, product, call.tiles.gemm1, order, h_RI)
        h = self._quantised(h_RI, call)
        rows_RH = workspace.take("workspace2", (pairs, problem.hidden))
        with stages.stage(stages.GEMM2):
            product = second_product(call.weights, problem)
            self._multiply(h, product, call.tiles.gemm2, order, rows_RH)
        with stages.stage(stages.REDUCE):
            self._unpermute(rows_RH, order, call)

    def _permuted(self, call: PathCall, order: Sorted) -> Rows:
        """(P, H) sorted rows of x, and their scales."""
        pairs, (_, hidden) = order.row_of_pair_TK.numel(), call.tokens.x_TH.shape
        x_RH = call.workspace.take("permuted_x", (pairs, hidden))
        scale_TG, scale_RG = call.tokens.scale, None
        if scale_TG is not None:
            scale_RG = call.workspace.take("permuted_scale", (pairs, scale_TG.shape[1]))
        permute_tokens(
            call.tokens.x_TH,
            order.row_of_pair_TK,
            None,
            rows_RH=x_RH,
            scale_TG=scale_TG,
            scale_rows_RG=scale_RG,
        )
        return x_RH, scale_RG

    def _quantised(self, h_RI: torch.Tensor, call: PathCall) -> Rows:
        """GEMM 2's rows and their scales; h_RI itself where activations are not quantised."""
        scheme = self.problem.scheme
        if not scheme.quantised:
            return h_RI, None
        with stages.stage(stages.QUANTISE):
            shape = (h_RI.shape[0], h_RI.shape[1])
            static = call.weights.a2_scale
            out = take_quantised(call.workspace, "h", scheme, shape, static_scale=static)
            quantise_rows(h_RI, scheme, out=out)
        return out.q_RK, out.scale

    def _unpermute(self, rows_RH: torch.Tensor, order: Sorted, call: PathCall) -> None:
        weights, scale = call.tokens.routing.topk_weights_TK, self.problem.routed_scaling_factor
        if self.problem.combine is Combine.SUM:
            gather_weight_and_sum(
                rows_RH, order.row_of_pair_TK, weights, scale=scale, out=call.output
            )
        else:
            gather_rows(rows_RH, order.row_of_pair_TK, None, scale=1.0, out=call.output)

    def _multiply(
        self, rows: Rows, product: Product, tile: Tile, order: Sorted, out: torch.Tensor
    ) -> None:
        """One product over sorted rows."""
        from experts.kernels.gluon.boxes import boxes, multiprocessors
        from experts.kernels.gluon.sorted_gemm import sorted_gemm_kernel

        a, a_scale = rows
        experts, rows_b, depth = product.w.shape
        half = half_rows(tile, 2 if product.constants["GATED"] else 1)
        unused = product.w
        b_scale = unused if product.scale is None else product.scale
        launch(
            sorted_gemm_kernel,
            (multiprocessors(),),
            a_desc=boxes(a, BLOCK_M),
            b_desc=boxes(product.w.view(experts * rows_b, depth), half),
            out_ptr=out,
            tiles_ptr=order.tiles,
            a_scale_ptr=unused if a_scale is None else a_scale,
            b_scale_ptr=b_scale,
            bias_ptr=unused if product.bias is None else product.bias,
            max_tiles=order.max_tiles,
            columns=product.columns,
            depth=depth,
            rows_b=rows_b,
            up_rows=product.up_row,
            a_groups=0 if a_scale is None else a_scale.shape[-1],
            b_scale_rows=b_scale.shape[1],
            b_groups=b_scale.shape[-1],
            MODE=self._mode,
            STEP=product.step,
            HAS_BIAS=product.bias is not None,
            STAGES=tile.num_stages,
            GROUP_M=tile.group_m,
            num_warps=4,
            **product.constants,
        )
