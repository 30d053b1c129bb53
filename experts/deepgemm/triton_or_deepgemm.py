"""Experts parts that use Triton for few rows per expert and DeepGEMM for many.

The choice depends only on sizes, not on the routing, so it does not synchronize with the device.
"""

from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import replace
from operator import attrgetter
from typing import Any, ClassVar

import torch

from experts.common.row_major import is_row_major
from experts.deepgemm.library import BLOCK, TILE_M
from experts.deepgemm.parts import BatchedDeepGemmExperts, DeepGemmExperts
from experts.triton.batched import BatchedTritonExperts
from experts.triton.standard import TritonExperts
from modular_kernel.compatibility.support import Rejection
from modular_kernel.contracts import PermuteExpertsUnpermute, PickledByProblem, TopKWeightAndReduce
from modular_kernel.ops.quantize import quantize_rows, quantize_specs, take_quantized
from modular_kernel.replay import stages
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import (
    BatchedShape,
    BatchedTokens,
    Dispatched,
    DispatchShape,
    ExpertWeights,
    StandardShape,
    StandardTokens,
)
from modular_kernel.workspace import Workspace, WorkspaceShapes

# (H * I, rows per expert): a layer with at least this H * I uses DeepGEMM from this mean number of
# rows per expert on. The first pair that applies counts. Times relative to Triton kernels, on an
# H200 (2026-12-01, fp8, uniform routing) with H * I of 6.3e6, 4.2e6, 2.9e6, 2.1e6 and 1.6e6:
# - 128 rows: 0.98, 1.03, 1.05, 1.08, 1.09
# - 256 rows: 0.90, 0.95, 1.00, 1.01, 1.03
# - 512 rows: 0.88, 0.91, 0.95, 0.97, 0.96
_MIN_ROWS = ((6_000_000, 128), (2_000_000, 256), (0, 512))
MIN_BATCHED_ROWS = 64  # rows of the smallest tile of DeepGEMM's masked GEMM
_QUANTIZED_X = "either_x"  # name of a workspace buffer


def deepgemm_supports(problem: Problem) -> bool:
    """Return whether DeepGEMM supports the sizes and options of the problem."""
    has_whole_blocks = problem.hidden % BLOCK == 0 and problem.intermediate % BLOCK == 0
    supports_scheme = not problem.scheme.quantized or problem.scheme.group == (BLOCK, BLOCK)
    supports_options = not problem.bias and not problem.apply_router_weight_on_input
    return has_whole_blocks and supports_scheme and supports_options


def min_tokens(problem: Problem, min_rows: int) -> int:
    """Return the smallest token count with at least min_rows rows per expert on average."""
    return -(-min_rows * problem.experts // problem.top_k)


class _TritonOrDeepGemm(PickledByProblem, PermuteExpertsUnpermute):
    """Base class for parts that select between a Triton and a DeepGEMM part of the same format.

    triton_part: the part for calls with few rows per expert.
    deepgemm_part: the part for calls with many rows per expert.
    small_calls: describes the calls that use triton_part, for `explained`. {min_size} stands for
        the smallest size that uses DeepGEMM.
    large_calls: describes the calls that use deepgemm_part, in the same way.
    deepgemm_condition: another condition for the use of DeepGEMM, for `explained`.
    """

    triton_part: ClassVar[type[PermuteExpertsUnpermute]]
    deepgemm_part: ClassVar[type[PermuteExpertsUnpermute]]
    small_calls: ClassVar[str] = "calls of fewer than {min_size} tokens"
    large_calls: ClassVar[str] = "calls of {min_size} tokens or more"
    deepgemm_condition: ClassVar[str] = ""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._triton = self.triton_part(problem)
        self._deepgemm = self.deepgemm_part(problem) if deepgemm_supports(problem) else None

    @classmethod
    def load_library(cls) -> Any:
        return cls.deepgemm_part.load_library()

    @classmethod
    @abstractmethod
    def min_rows(cls, problem: Problem) -> int:
        """Return the mean number of rows per expert from which on DeepGEMM is used."""

    def is_overridden(self) -> bool:
        return self._triton.is_overridden()

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        rejections = cls.triton_part.extra_rejections(problem, machine)
        return tuple(
            replace(rejection, parties=(cls.__name__, *rejection.parties[1:]))
            for rejection in rejections
        )

    @classmethod
    def described(cls, machine: Machine) -> AbstractContextManager[None]:
        return cls.triton_part.described(machine)

    @classmethod
    def explained(cls, problem: Problem) -> tuple[str, ...]:
        triton, deepgemm = cls.triton_part.__name__, cls.deepgemm_part.__name__
        if not deepgemm_supports(problem):
            return (
                f"all calls: {triton}, because DeepGEMM does not support these sizes or options",
            )
        min_size = min_tokens(problem, cls.min_rows(problem))
        small_calls, large_calls = (
            calls.format(min_size=min_size) for calls in (cls.small_calls, cls.large_calls)
        )
        return f"{small_calls}: {triton}", f"{large_calls}: {deepgemm}{cls.deepgemm_condition}"

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return self._triton.finalize_weight_and_reduce_impl()

    def _select_part(self, size: int) -> PermuteExpertsUnpermute:
        """Return the part for a call.

        size: the number of tokens of the call; in the batched format, the number of rows per
            expert.
        """
        is_large = size >= min_tokens(self.problem, self.min_rows(self.problem))
        return self._triton if self._deepgemm is None or not is_large else self._deepgemm

    def _get_merged_shapes(self, size: int, shape: DispatchShape) -> WorkspaceShapes:
        """Return the buffers of calls with at most this size and shape.

        If the largest call uses DeepGEMM, the buffers fit both parts, because smaller calls may use
        Triton.
        """
        shapes, part = self._triton.workspace_shapes(shape), self._select_part(size)
        if part is self._triton:
            return shapes
        return _merge_shapes(shapes, part.workspace_shapes(shape))


class TritonOrDeepGemmExperts(_TritonOrDeepGemm):
    """DeepGemmExperts for many rows per expert on average; TritonExperts for fewer.

    The limit is 128 rows for layers with H * I of at least 6e6, and 256 or 512 rows for smaller
    layers.

    Calls whose weights are not row-major and 16-byte aligned also use TritonExperts. The tokens of
    a call that is large enough for DeepGEMM are dispatched unquantized. If the call then uses a
    path of TritonExperts that needs quantized tokens, `apply` quantizes the tokens.
    """

    triton_part = TritonExperts
    deepgemm_part: ClassVar[type[DeepGemmExperts]] = DeepGemmExperts
    deepgemm_condition = ", if weights are row-major"
    requires = replace(
        DeepGemmExperts.requires,
        bias=True,
        weight_on_input=True,
        hidden_multiple=1,
        intermediate_multiple=1,
        blocks=None,
    )

    @classmethod
    def min_rows(cls, problem: Problem) -> int:
        size = problem.hidden * problem.intermediate
        return next(rows for min_size, rows in _MIN_ROWS if size >= min_size)

    def _select_part_for_call(
        self, num_tokens: int, weights: ExpertWeights
    ) -> PermuteExpertsUnpermute:
        deepgemm_can_read = is_row_major(weights.w1) and is_row_major(weights.w2)
        return self._select_part(num_tokens) if deepgemm_can_read else self._triton

    def takes_unquantized(self, shape: DispatchShape) -> bool:
        assert isinstance(shape, StandardShape)
        return self._select_part(shape.tokens).takes_unquantized(shape)

    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        assert isinstance(shape, StandardShape)
        shapes, scheme = self._get_merged_shapes(shape.tokens, shape), self.problem.scheme
        part = self._select_part(shape.tokens)
        if part is self._triton or not scheme.quantizes_activations:
            return shapes
        quantized_x = quantize_specs(_QUANTIZED_X, scheme, shape.tokens, self.problem.hidden)
        return replace(shapes, extra={**shapes.extra, **quantized_x})

    def roundings(self, x_TH: torch.Tensor, weights: ExpertWeights) -> Roundings | None:
        return self._select_part_for_call(len(x_TH), weights).roundings(x_TH, weights)

    def apply(
        self,
        tokens: Dispatched,
        *,
        weights: ExpertWeights,
        workspace: Workspace,
        output: torch.Tensor,
    ) -> None:
        assert isinstance(tokens, StandardTokens)
        num_tokens, scheme = len(tokens.x_TH), self.problem.scheme
        part = self._select_part_for_call(num_tokens, weights)
        if part is self._triton and tokens.scale is None and scheme.quantizes_activations:
            shape = StandardShape(num_tokens, tokens.routing.topk_ids_TK.shape[1])
            if not part.takes_unquantized(shape):
                tokens = self._quantize(tokens, workspace)
        part.apply(tokens, weights=weights, workspace=workspace, output=output)

    def _quantize(self, tokens: StandardTokens, workspace: Workspace) -> StandardTokens:
        """Quantize the tokens in the same way as `PrepareAndFinalize.prepare`."""
        scheme, x_TH = self.problem.scheme, tokens.x_TH
        out = take_quantized(workspace, _QUANTIZED_X, scheme, (len(x_TH), self.problem.hidden))
        with stages.stage(stages.QUANTIZE_INPUT):
            quantize_rows(x_TH, scheme, out=out)
        return replace(tokens, x_TH=out.q_RK, scale=out.scale)


class BatchedTritonOrDeepGemmExperts(_TritonOrDeepGemm):
    """BatchedDeepGemmExperts for a large capacity; BatchedTritonExperts for a small capacity.

    The capacity is the number of rows reserved for each expert, a multiple of 128. DeepGEMM is used
    if the capacity is at least the number of tokens with which an expert has 64 rows on average.
    """

    triton_part = BatchedTritonExperts
    deepgemm_part: ClassVar[type[BatchedDeepGemmExperts]] = BatchedDeepGemmExperts
    small_calls = "experts with room for fewer than {min_size} rows"
    large_calls = "experts with room for {min_size} rows or more"
    requires = replace(
        BatchedDeepGemmExperts.requires,
        bias=True,
        hidden_multiple=1,
        intermediate_multiple=1,
        blocks=None,
        capacity_multiple=TILE_M,
    )

    @classmethod
    def min_rows(cls, problem: Problem) -> int:
        return MIN_BATCHED_ROWS

    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        assert isinstance(shape, BatchedShape)
        return self._get_merged_shapes(shape.capacity, shape)

    def roundings(self, x_TH: torch.Tensor, weights: ExpertWeights) -> Roundings | None:
        # The part depends on the capacity, which x_TH does not determine.
        return self._triton.roundings(x_TH, weights) if self._deepgemm is None else None

    def apply(
        self,
        tokens: Dispatched,
        *,
        weights: ExpertWeights,
        workspace: Workspace,
        output: torch.Tensor,
    ) -> None:
        assert isinstance(tokens, BatchedTokens)
        part = self._select_part(tokens.x_eCH.shape[1])
        part.apply(tokens, weights=weights, workspace=workspace, output=output)


def _merge_shapes(triton: WorkspaceShapes, deepgemm: WorkspaceShapes) -> WorkspaceShapes:
    """Return buffers that are large enough for either part. Both parts have the same output.

    A merged buffer may reuse the memory of another buffer only if both parts allow this.
    """
    merged = {**triton.buffers(), **deepgemm.buffers()}
    for name, spec in triton.buffers().items():
        merged_spec = merged[name]
        aliases = tuple(alias for alias in spec.over if alias in merged_spec.over)
        merged[name] = replace(max(spec, merged_spec, key=attrgetter("nbytes")), over=aliases)
    return WorkspaceShapes(
        merged.pop("workspace13"), merged.pop("workspace2"), triton.output, merged
    )
