"""ExpertSortedGemms: the steps of a layer that runs two grouped GEMMs over rows sorted by expert.

The grouped_tma, dequantized and grouped_w4 paths, and `MGroupedGemms` (segments.py), derive from
this class. A pair is a token together with one of its top_k experts: pair p belongs to token
p // top_k. `modular_kernel.ops.sort` gives each pair a row, with the rows of an expert adjacent.

A call sorts the pairs, runs GEMM 1 with the activation function and GEMM 2, and sums the weighted
rows of each token. Some subclasses permute the tokens before GEMM 1. If the scheme quantizes
activations, h, the result of GEMM 1, is quantized before GEMM 2.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch

from experts.triton.adapters import SegmentShrink, ShrinkOutput, TileShrinkOutput, adapter_specs
from experts.triton.launch_config import LaunchConfig
from experts.triton.operands import GemmOperands, gemm1_operands, gemm2_operands
from experts.triton.path import PathCall
from modular_kernel.ops.permute import permute_tokens
from modular_kernel.ops.quantize import (
    quantize_rows,
    quantize_specs,
    scale_shape,
    take_quantized,
)
from modular_kernel.ops.reduce import gather_rows, gather_weight_and_sum
from modular_kernel.ops.sort import SortedPairs, sort_pairs, sort_specs
from modular_kernel.ops.valid_rows import BatchedRows
from modular_kernel.quant.quantized_weights import STORAGE
from modular_kernel.replay import stages
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.workspace import BufferSpec


class GemmRows(NamedTuple):
    """The activations of a GEMM: P rows in expert order, where P is the number of pairs.

    If the experts of some pairs are on other ranks, the last rows are unused.

    values: (P, K), or (T, K) if `tokens` is not None.
    scale: the scales of quantized values, (1,) or one row of scales per row of values; or None.
    weights: router weights (P, 1), which multiply the sums before the bias is added; or None.
    tokens: (P,) int32, the row of `values` and `scale` for each sorted row. None if `values` and
        `scale` are already in sorted order.
    shrink_output: the output of the LoRA shrink (`experts.triton.adapters`), or None.
    """

    values: torch.Tensor
    scale: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    shrink_output: ShrinkOutput | TileShrinkOutput | None = None


class ExpertSortedGemms(ABC):
    """Two grouped GEMMs whose input and output rows are sorted by expert (`ops.sort`).

    Buffers have a row for every pair. Only the rows of pairs with a local expert are in use.

    skips_unused_rows: whether only the rows in use are quantized. It must be True if all rows share
        a scale, because the contents of unused rows are arbitrary.
    permutes_tokens: whether a separate launch permutes the tokens to sorted order. If False, GEMM 1
        gathers the tokens.
    shrink_class: the class that computes the shrink output in the layout that the GEMM kernel
        takes.
    """

    skips_unused_rows = True
    permutes_tokens = True
    shrink_class: ClassVar[type[SegmentShrink]] = SegmentShrink

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @abstractmethod
    def multiply(
        self,
        rows: GemmRows,
        operands: GemmOperands,
        tile: LaunchConfig,
        order: SortedPairs,
        out: torch.Tensor,
    ) -> None:
        """Run one GEMM, and write the rows of `out` that are in use.

        out: (P, columns), contiguous.
        """

    def multiply_all_experts(
        self,
        rows: GemmRows,
        operands: GemmOperands,
        tile: LaunchConfig,
        order: SortedPairs,
        out: torch.Tensor,
        call: PathCall,
    ) -> None:
        """Run one GEMM for all experts. A subclass may process a few experts at a time."""
        self.multiply(rows, operands, tile, order, out)

    def specs(self, tokens: int, block_m: int) -> dict[str, BufferSpec]:
        """Return the buffers of a call of `tokens` tokens in tiles of block_m rows."""
        problem, num_pairs = self.problem, tokens * self.problem.top_k
        scheme = problem.scheme
        x_dtype = STORAGE[scheme.activation] if scheme.quantizes_activations else problem.dtype
        # The output of GEMM 2 may reuse the memory of the input of GEMM 1. It may also reuse the
        # memory of the output of GEMM 1 if that output was quantized into another buffer.
        aliases: tuple[str, ...] = ("permuted_x", "permuted_scale") if self.permutes_tokens else ()
        if scheme.quantizes_activations:
            aliases += ("workspace13",)
        specs = {
            "workspace13": BufferSpec((num_pairs, problem.intermediate), problem.dtype),
            "workspace2": BufferSpec((num_pairs, problem.hidden), problem.dtype, aliases),
            **sort_specs(tokens, problem.top_k, block_m, problem.e),
        }
        if problem.apply_router_weight_on_input:
            specs["permuted_weights"] = BufferSpec((num_pairs, 1), torch.float32)
        if scheme.quantizes_activations:
            specs |= quantize_specs("h", scheme, num_pairs, problem.intermediate)
        if self.permutes_tokens:
            specs["permuted_x"] = BufferSpec((num_pairs, problem.hidden), x_dtype)
            if scheme.quantizes_activations and scheme.activation_granularity != "tensor":
                shape = scale_shape(scheme, num_pairs, problem.hidden)
                specs["permuted_scale"] = BufferSpec(shape, torch.float32)
        return specs | adapter_specs(problem, num_pairs)

    def run(self, call: PathCall) -> None:
        """Write every element of call.output."""
        problem, workspace, routing = self.problem, call.workspace, call.tokens.routing
        num_pairs = routing.topk_ids_TK.numel()
        launch1, launch2 = call.config.typed_launches(LaunchConfig)
        with stages.stage(stages.SORT):
            block_m = launch1.block_m
            order = sort_pairs(routing, block_m=block_m, num_local=problem.e, workspace=workspace)
        x = GemmRows(call.tokens.x_TH, call.tokens.scale, tokens=order.token_of_row)
        if self.permutes_tokens:
            with stages.stage(stages.PERMUTE):
                x = self._permute(call, order)
        h = self.compute_hidden_rows(x, launch1, order, call)
        rows_RH = workspace.take("workspace2", (num_pairs, problem.hidden))
        with stages.stage(stages.GEMM2):
            operands = gemm2_operands(call.weights, problem)
            self.multiply_all_experts(h, operands, launch2, order, rows_RH, call)
        is_summed = problem.combine is Combine.SUM
        with stages.stage(stages.GATHER_REDUCE if is_summed else stages.UNPERMUTE):
            self._unpermute(rows_RH, order, call)

    def compute_hidden_rows(
        self, x: GemmRows, tile: LaunchConfig, order: SortedPairs, call: PathCall
    ) -> GemmRows:
        """Run GEMM 1 with the activation; return the input of GEMM 2, quantized if necessary."""
        num_pairs = order.row_of_pair_TK.numel()
        h_RI = call.workspace.take("workspace13", (num_pairs, self.problem.intermediate))
        shrink = self._make_shrink(tile, order, call)
        with stages.stage(stages.GEMM1 if self.permutes_tokens else stages.GATHER_GEMM1):
            if shrink is not None:
                x = x._replace(shrink_output=shrink.shrink_x(call.tokens.plain_TH, call.weights))
            operands = gemm1_operands(call.weights, self.problem)
            self.multiply_all_experts(x, operands, tile, order, h_RI, call)
        h = self._quantize(h_RI, order, call)
        if shrink is None:
            return h
        with stages.stage(stages.GEMM2):
            return h._replace(shrink_output=shrink.shrink_h(h_RI, call.weights))

    def _make_shrink(
        self, tile: LaunchConfig, order: SortedPairs, call: PathCall
    ) -> SegmentShrink | None:
        """Return the shrink launches of the call, or None if it has no adapters."""
        slots_T = call.tokens.routing.adapters_T
        if slots_T is None:
            return None
        return self.shrink_class(slots_T, self.problem, call.workspace, order, tile.block_m)

    def _permute(self, call: PathCall, order: SortedPairs) -> GemmRows:
        """Permute the tokens, their scales and router weights to sorted rows (P, H)."""
        num_pairs, (_, hidden) = order.row_of_pair_TK.numel(), call.tokens.x_TH.shape
        x_RH = call.workspace.take("permuted_x", (num_pairs, hidden))
        scale = call.tokens.scale
        scale_TG = None if scale is None or scale.dim() == 1 else scale
        scale_RG = None
        if scale_TG is not None:
            scale_RG = call.workspace.take("permuted_scale", (num_pairs, scale_TG.shape[1]))
        permute_tokens(
            call.tokens.x_TH,
            order.row_of_pair_TK,
            None,
            rows_RH=x_RH,
            scale_TG=scale_TG,
            scale_rows_RG=scale_RG,
        )
        row_scale = scale if scale_TG is None else scale_RG
        return GemmRows(x_RH, row_scale, self._permute_weights(call, order))

    def _permute_weights(self, call: PathCall, order: SortedPairs) -> torch.Tensor | None:
        """Return router weights (P, 1) in sorted order, or None if GEMM 1 does not apply them."""
        if not self.problem.apply_router_weight_on_input:
            return None
        weights_TK = call.tokens.routing.topk_weights_TK
        assert weights_TK is not None
        weights_R1 = call.workspace.take("permuted_weights", (weights_TK.numel(), 1))
        row_of_pair_P1 = order.row_of_pair_TK.view(-1, 1)
        permute_tokens(weights_TK.view(-1, 1), row_of_pair_P1, None, rows_RH=weights_R1)
        return weights_R1

    def _quantize(self, h_RI: torch.Tensor, order: SortedPairs, call: PathCall) -> GemmRows:
        """Return the input of GEMM 2: h_RI, quantized if the scheme quantizes activations."""
        scheme = self.problem.scheme
        if not scheme.quantizes_activations:
            return GemmRows(h_RI)
        with stages.stage(stages.QUANTIZE):
            shape = (h_RI.shape[0], h_RI.shape[1])
            static_scale = call.weights.a2_scale
            out = take_quantized(call.workspace, "h", scheme, shape, static_scale=static_scale)
            valid_rows = BatchedRows(order.starts[-1:]) if self.skips_unused_rows else None
            quantize_rows(h_RI, scheme, out=out, valid_rows=valid_rows)
        return GemmRows(out.q_RK, out.scale)

    def _unpermute(self, rows_RH: torch.Tensor, order: SortedPairs, call: PathCall) -> None:
        problem, row_of_pair_TK = self.problem, order.row_of_pair_TK
        assert len(row_of_pair_TK) == len(call.output)  # the kernels do not check this bound
        if problem.combine is not Combine.SUM:
            gather_rows(rows_RH, row_of_pair_TK, None, scale=1.0, out=call.output)
            return
        applied_on_input = problem.apply_router_weight_on_input
        gather_weight_and_sum(
            rows_RH,
            row_of_pair_TK,
            None if applied_on_input else call.tokens.routing.topk_weights_TK,
            scale=problem.routed_scaling_factor,
            out=call.output,
        )
