"""GroupedGemmExperts: pre-reorder, two products over segments of rows, post-reorder.

Above the folders: its products are those of `experts.triton`, and `experts.compat` has them by
their steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from experts.triton.base import OwnProductsExperts
from experts.triton.configs.select import choose_config, kinds_up_to
from experts.triton.grouped.segments import MGroupedGemms
from experts.triton.path import PathCall, Rooms
from modular_kernel.contracts import TopKWeightAndReduce
from modular_kernel.quant.quantized_weights import ACTIVATION_SCHEMES
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import (
    ContiguousShape,
    ContiguousTokens,
    Dispatched,
    DispatchShape,
    ExpertWeights,
)
from modular_kernel.workspace import BufferSpec, Workspace, WorkspaceShapes
from topk_reduce import TopKWeightAndReduceNoOp, unless_kept

# Weights that are dequantized in the product gain nothing by rows that were moved: TritonExperts.
_SCHEMES = ACTIVATION_SCHEMES | {"none"}


class GroupedGemmExperts(OwnProductsExperts):
    """Contiguous tokens, copied into the order of experts; weights and sums over top-k itself.

    The experts of this rank get segments that follow each other; pairs of other ranks' experts get
    no row. A token without an expert here becomes a row of zeros, so over ranks outputs sum up.
    Bitwise repeatable.
    """

    replayable = True
    requires = replace(OwnProductsExperts.requires, schemes=_SCHEMES)

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._products = MGroupedGemms(problem)
        self._rooms = Rooms()

    @classmethod
    def meta_calls(cls) -> Mapping[str, Callable[[], object]]:
        """Return the steps of experts.compat.ep_moe, whose products are these."""
        from experts.compat.ep_moe_compile_cases import FORMS, launch_all

        return {
            f"EPMoE {dtype}, {tokens} tokens, block {block}": partial(
                launch_all, tokens, 2, dtype, block
            )
            for tokens, dtype, block in FORMS
        }

    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        """Room for any call up to shape.tokens: fewer can need more tiles, of fewer rows each."""
        assert isinstance(shape, ContiguousShape)
        kinds = tuple(kinds_up_to(self.problem, shape.tokens))
        return self._rooms.of(self.problem, shape, kinds, self._specs)

    def _specs(self, kind: tuple[int, str, int]) -> dict[str, BufferSpec]:
        most, _, block_m = kind
        return self._products.specs(most, block_m)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return unless_kept(self.problem, TopKWeightAndReduceNoOp())

    def roundings(self, x_TH: torch.Tensor, weights: ExpertWeights) -> Roundings:
        return Roundings()

    def apply(
        self,
        tokens: Dispatched,
        *,
        weights: ExpertWeights,
        workspace: Workspace,
        output: torch.Tensor,
    ) -> None:
        assert isinstance(tokens, ContiguousTokens)
        config = choose_config(self.problem, tokens.x_TH.shape[0])
        self._products.run(PathCall(tokens, weights, workspace, output, config))
