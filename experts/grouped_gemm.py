"""GroupedGemmExperts: permute, two grouped GEMMs over expert-sorted rows, unpermute.

The GEMMs are in `experts.triton`. `experts.compat` exposes the same steps as separate functions.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from experts.triton.base import TritonExpertsBase
from experts.triton.configs.select import buffer_kinds_up_to, choose_config
from experts.triton.grouped.segments import MGroupedGemms
from experts.triton.path import PathCall, WorkspaceCache
from modular_kernel.contracts import TopKWeightAndReduce
from modular_kernel.quant.quantized_weights import ACTIVATION_SCHEMES
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import (
    Dispatched,
    DispatchShape,
    ExpertWeights,
    StandardShape,
    StandardTokens,
)
from modular_kernel.workspace import BufferSpec, Workspace, WorkspaceShapes
from topk_reduce import TopKWeightAndReduceNoOp, reducer_for

# For weight-only schemes, permuting the rows first is not faster; use TritonExperts for them.
_SCHEMES = ACTIVATION_SCHEMES | {"none"}


class GroupedGemmExperts(TritonExpertsBase):
    """Permute contiguous tokens into expert order, run both GEMMs, weight and sum over top-k.

    The rows of each local expert form a segment, with no gaps between segments. A pair whose expert
    is on another rank gets no row. The output of a token without a local expert is zero, so that
    the outputs of all ranks add up to the output of the layer. Results are bitwise reproducible.
    """

    replayable = True
    requires = replace(TritonExpertsBase.requires, schemes=_SCHEMES)

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._gemms = MGroupedGemms(problem)
        self._workspace_cache = WorkspaceCache()

    @classmethod
    def meta_calls(cls) -> Mapping[str, Callable[[], object]]:
        """Return calls on meta tensors that compile these GEMMs and `experts.compat.ep_moe`."""
        from experts.compat.ep_moe_compile_cases import COMPILE_CASES, launch_all

        return {
            f"EPMoE {dtype}, {tokens} tokens, block {block}": partial(
                launch_all, tokens, 2, dtype, block
            )
            for tokens, dtype, block in COMPILE_CASES
        }

    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        """Return buffers that fit every call with at most shape.tokens tokens.

        A smaller call can need more tiles than the largest call, because its tiles have fewer rows.
        """
        assert isinstance(shape, StandardShape)
        kinds = tuple(buffer_kinds_up_to(self.problem, shape.tokens))
        return self._workspace_cache.get_or_merge(self.problem, shape, kinds, self._make_specs)

    def _make_specs(self, buffer_kind: tuple[int, str, int]) -> dict[str, BufferSpec]:
        max_tokens, _path, block_m = buffer_kind
        return self._gemms.specs(max_tokens, block_m)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return reducer_for(self.problem, TopKWeightAndReduceNoOp())

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
        assert isinstance(tokens, StandardTokens)
        config = choose_config(self.problem, tokens.x_TH.shape[0])
        self._gemms.run(PathCall(tokens, weights, workspace, output, config))
