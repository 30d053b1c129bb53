"""Triton's products for few rows an expert, DeepGEMM's for many: chosen by sizes alone."""

from contextlib import AbstractContextManager
from dataclasses import replace
from operator import attrgetter
from typing import ClassVar

import torch

from experts.deepgemm.library import BLOCK, TILE_M
from experts.deepgemm.parts import BatchedDeepGemmExperts, DeepGemmExperts
from experts.triton.batched import BatchedTritonExperts
from experts.triton.contiguous import TritonExperts
from modular_kernel.contracts import PermuteExpertsUnpermute, TopKWeightAndReduce
from modular_kernel.roundings import Roundings
from modular_kernel.support import Rejection
from modular_kernel.tensors import (
    BatchedShape,
    BatchedTokens,
    ContiguousShape,
    ContiguousTokens,
    Dispatched,
    DispatchShape,
    ExpertWeights,
)
from modular_kernel.types import Machine, Problem
from modular_kernel.workspace import Workspace, WorkspaceShapes

# Rows that an expert must have on average before DeepGEMM takes a call. With fewer, most of a tile
# stands for no token; beside other Triton kernels that is where it overtook them on one H200.
LEAST_ROWS = 128
LEAST_BATCHED_ROWS = 64  # its smallest masked tile


def fits(problem: Problem) -> bool:
    """Return whether DeepGEMM takes the problem's sizes and options at all."""
    whole = problem.hidden % BLOCK == 0 and problem.intermediate % BLOCK == 0
    blocks = not problem.scheme.quantised or problem.scheme.group == (BLOCK, BLOCK)
    return whole and blocks and not problem.bias and not problem.apply_router_weight_on_input


def least_tokens(problem: Problem, rows: int) -> int:
    """Return the fewest tokens of which an expert gets so many rows on average."""
    return -(-rows * problem.experts // problem.top_k)


class TritonOrDeepGemmExperts(PermuteExpertsUnpermute):
    """TritonExperts or, for 128 rows an expert and more, DeepGemmExperts.

    Weights that do not lie row by row are left to TritonExperts, too. A workspace has room for
    either where a call may take either.
    """

    with_library: ClassVar[type[DeepGemmExperts]] = DeepGemmExperts
    requires = replace(
        DeepGemmExperts.requires,
        bias=True,
        weight_on_input=True,
        hidden_multiple=1,
        intermediate_multiple=1,
        blocks=None,
    )

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._few = TritonExperts(problem)
        self._many = self.with_library(problem) if fits(problem) else None

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        found = TritonExperts.extra_rejections(problem, machine)
        return tuple(replace(r, parties=(cls.__name__, *r.parties[1:])) for r in found)

    @classmethod
    def described(cls, machine: Machine) -> AbstractContextManager[None]:
        return TritonExperts.described(machine)

    @classmethod
    def explained(cls, problem: Problem) -> tuple[str, ...]:
        if not fits(problem):
            return ("every call: TritonExperts, because DeepGEMM does not take these sizes",)
        least = least_tokens(problem, LEAST_ROWS)
        return (
            f"calls of fewer than {least} tokens: TritonExperts",
            f"calls of {least} tokens or more: DeepGemmExperts, if weights lie row by row",
        )

    def _has_many(self, tokens: int) -> bool:
        return self._many is not None and tokens >= least_tokens(self.problem, LEAST_ROWS)

    def _part(self, tokens: int, weights: ExpertWeights) -> PermuteExpertsUnpermute:
        by_rows = weights.w1.is_contiguous() and weights.w2.is_contiguous()
        if self._many is not None and self._has_many(tokens) and by_rows:
            return self._many
        return self._few

    def takes_unquantised(self, shape: DispatchShape) -> bool:
        assert isinstance(shape, ContiguousShape)
        return not self._has_many(shape.tokens) and self._few.takes_unquantised(shape)

    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        assert isinstance(shape, ContiguousShape)
        few = self._few.workspace_shapes(shape)
        if self._many is None or not self._has_many(shape.tokens):
            return few
        return _room_of_both(few, self._many.workspace_shapes(shape))

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return self._few.finalize_weight_and_reduce_impl()

    def roundings(self, x_TH: torch.Tensor, weights: ExpertWeights) -> Roundings | None:
        return self._part(len(x_TH), weights).roundings(x_TH, weights)

    def apply(
        self,
        tokens: Dispatched,
        *,
        weights: ExpertWeights,
        workspace: Workspace,
        output: torch.Tensor,
    ) -> None:
        assert isinstance(tokens, ContiguousTokens)
        part = self._part(len(tokens.x_TH), weights)
        part.apply(tokens, weights=weights, workspace=workspace, output=output)


class BatchedTritonOrDeepGemmExperts(PermuteExpertsUnpermute):
    """BatchedTritonExperts or, for 64 rows an expert and more, BatchedDeepGemmExperts.

    The rows are those that a batch of this room is likely to have; a plan fixes them. An expert
    has room for a multiple of 128 rows in either case.
    """

    with_library: ClassVar[type[BatchedDeepGemmExperts]] = BatchedDeepGemmExperts
    requires = replace(
        BatchedDeepGemmExperts.requires,
        bias=True,
        hidden_multiple=1,
        intermediate_multiple=1,
        blocks=None,
        capacity_multiple=TILE_M,
    )

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._few = BatchedTritonExperts(problem)
        self._many = self.with_library(problem) if fits(problem) else None

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        found = BatchedTritonExperts.extra_rejections(problem, machine)
        return tuple(replace(r, parties=(cls.__name__, *r.parties[1:])) for r in found)

    @classmethod
    def explained(cls, problem: Problem) -> tuple[str, ...]:
        if not fits(problem):
            return ("every call: BatchedTritonExperts, DeepGEMM does not take these sizes",)
        least = least_tokens(problem, LEAST_BATCHED_ROWS)
        return (
            f"experts with room for fewer than {least} rows: BatchedTritonExperts",
            f"experts with room for {least} rows or more: BatchedDeepGemmExperts",
        )

    def _has_many(self, capacity: int) -> bool:
        return self._many is not None and capacity >= least_tokens(self.problem, LEAST_BATCHED_ROWS)

    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        assert isinstance(shape, BatchedShape)
        few = self._few.workspace_shapes(shape)
        if self._many is None or not self._has_many(shape.capacity):
            return few
        # What came may be less than what a plan has room for, and go the other way.
        return _room_of_both(few, self._many.workspace_shapes(shape))

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return self._few.finalize_weight_and_reduce_impl()

    def apply(
        self,
        tokens: Dispatched,
        *,
        weights: ExpertWeights,
        workspace: Workspace,
        output: torch.Tensor,
    ) -> None:
        assert isinstance(tokens, BatchedTokens)
        part: PermuteExpertsUnpermute = self._few
        if self._many is not None and self._has_many(tokens.x_eCH.shape[1]):
            part = self._many
        part.apply(tokens, weights=weights, workspace=workspace, output=output)


def _room_of_both(few: WorkspaceShapes, many: WorkspaceShapes) -> WorkspaceShapes:
    """Return room for a call of either part, whose outputs are the same.

    What one of them still reads may be dead in the other: a buffer that both have lies over what
    it lies over in both.
    """
    room = {**few.buffers(), **many.buffers()}
    for name, spec in few.buffers().items():
        other = room[name]
        over = tuple(below for below in spec.over if below in other.over)
        room[name] = replace(max(spec, other, key=attrgetter("nbytes")), over=over)
    return WorkspaceShapes(room.pop("workspace13"), room.pop("workspace2"), few.output, room)
