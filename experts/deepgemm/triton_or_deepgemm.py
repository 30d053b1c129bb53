"""Triton's products for few rows an expert, DeepGEMM's for many: chosen by sizes alone."""

from contextlib import AbstractContextManager
from dataclasses import replace
from operator import attrgetter
from typing import ClassVar

import torch

from experts.common.row_major import lies_by_rows
from experts.deepgemm.library import BLOCK, TILE_M
from experts.deepgemm.parts import BatchedDeepGemmExperts, DeepGemmExperts
from experts.triton.batched import BatchedTritonExperts
from experts.triton.contiguous import TritonExperts
from modular_kernel.compatibility.support import Rejection
from modular_kernel.contracts import PermuteExpertsUnpermute, PickledByProblem, TopKWeightAndReduce
from modular_kernel.ops.quantize import quantize_rows, quantize_specs, take_quantized
from modular_kernel.replay import stages
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.spec.rounding import Roundings
from modular_kernel.tensors import (
    BatchedShape,
    BatchedTokens,
    ContiguousShape,
    ContiguousTokens,
    Dispatched,
    DispatchShape,
    ExpertWeights,
)
from modular_kernel.workspace import Workspace, WorkspaceShapes

# Rows that an expert must have on average before DeepGEMM takes a call. With fewer, most of a tile
# stands for no token; beside other Triton kernels that is where it overtook them on one H200.
LEAST_ROWS = 128
LEAST_BATCHED_ROWS = 64  # its smallest masked tile
_X = "either_x"


def fits(problem: Problem) -> bool:
    """Return whether DeepGEMM takes the problem's sizes and options at all."""
    whole = problem.hidden % BLOCK == 0 and problem.intermediate % BLOCK == 0
    blocks = not problem.scheme.quantized or problem.scheme.group == (BLOCK, BLOCK)
    return whole and blocks and not problem.bias and not problem.apply_router_weight_on_input


def least_tokens(problem: Problem, rows: int) -> int:
    """Return the fewest tokens of which an expert gets so many rows on average."""
    return -(-rows * problem.experts // problem.top_k)


class _Either(PickledByProblem, PermuteExpertsUnpermute):
    """A part over Triton and one over DeepGEMM of the same format, and what is alike in both."""

    of_triton: ClassVar[type[PermuteExpertsUnpermute]]
    with_library: ClassVar[type[PermuteExpertsUnpermute]]
    least_rows: ClassVar[int]  # an expert's, on average, for DeepGEMM
    # Which calls are whose, by the number from which they are DeepGEMM's.
    few: ClassVar[str] = "calls of fewer than {least} tokens"
    many: ClassVar[str] = "calls of {least} tokens or more"
    if_many: ClassVar[str] = ""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._few = self.of_triton(problem)
        self._many = self.with_library(problem) if fits(problem) else None

    def is_overridden(self) -> bool:
        return self._few.is_overridden()

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        found = cls.of_triton.extra_rejections(problem, machine)
        return tuple(replace(r, parties=(cls.__name__, *r.parties[1:])) for r in found)

    @classmethod
    def described(cls, machine: Machine) -> AbstractContextManager[None]:
        return cls.of_triton.described(machine)

    @classmethod
    def explained(cls, problem: Problem) -> tuple[str, ...]:
        triton, library = cls.of_triton.__name__, cls.with_library.__name__
        if not fits(problem):
            return (f"every call: {triton}, because DeepGEMM does not take these sizes",)
        least = least_tokens(problem, cls.least_rows)
        few, many = (calls.format(least=least) for calls in (cls.few, cls.many))
        return f"{few}: {triton}", f"{many}: {library}{cls.if_many}"

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return self._few.finalize_weight_and_reduce_impl()

    def _part(self, size: int) -> PermuteExpertsUnpermute:
        """Return whose call it is, of so many tokens, or rows of an expert in a batch."""
        enough = size >= least_tokens(self.problem, self.least_rows)
        return self._few if self._many is None or not enough else self._many

    def _room(self, size: int, shape: DispatchShape) -> WorkspaceShapes:
        """Return room for either where the call may be DeepGEMM's, else for Triton's alone."""
        few, part = self._few.workspace_shapes(shape), self._part(size)
        # What came may be less than what a plan has room for, and go the other way.
        return few if part is self._few else _room_of_both(few, part.workspace_shapes(shape))


class TritonOrDeepGemmExperts(_Either):
    """TritonExperts or, for 128 rows an expert and more, DeepGemmExperts.

    Weights that do not lie row by row are left to TritonExperts, too. A workspace has room for
    either where a call may take either. Tokens of a call that may be DeepGEMM's come unquantized;
    they are quantized here where it is TritonExperts' after all, and that wants them so.
    """

    of_triton = TritonExperts
    with_library: ClassVar[type[DeepGemmExperts]] = DeepGemmExperts
    least_rows = LEAST_ROWS
    if_many = ", if weights lie row by row"
    requires = replace(
        DeepGemmExperts.requires,
        bias=True,
        weight_on_input=True,
        hidden_multiple=1,
        intermediate_multiple=1,
        blocks=None,
    )

    def _part_of(self, tokens: int, weights: ExpertWeights) -> PermuteExpertsUnpermute:
        by_rows = lies_by_rows(weights.w1) and lies_by_rows(weights.w2)
        return self._part(tokens) if by_rows else self._few

    def takes_unquantized(self, shape: DispatchShape) -> bool:
        assert isinstance(shape, ContiguousShape)
        return self._part(shape.tokens).takes_unquantized(shape)

    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        assert isinstance(shape, ContiguousShape)
        room, scheme = self._room(shape.tokens, shape), self.problem.scheme
        if self._part(shape.tokens) is self._few or not scheme.quantizes_activations:
            return room
        own = quantize_specs(_X, scheme, shape.tokens, self.problem.hidden)
        return replace(room, extra={**room.extra, **own})

    def roundings(self, x_TH: torch.Tensor, weights: ExpertWeights) -> Roundings | None:
        return self._part_of(len(x_TH), weights).roundings(x_TH, weights)

    def apply(
        self,
        tokens: Dispatched,
        *,
        weights: ExpertWeights,
        workspace: Workspace,
        output: torch.Tensor,
    ) -> None:
        assert isinstance(tokens, ContiguousTokens)
        count, scheme = len(tokens.x_TH), self.problem.scheme
        part = self._part_of(count, weights)
        if part is self._few and tokens.scale is None and scheme.quantizes_activations:
            shape = ContiguousShape(count, tokens.routing.topk_ids_TK.shape[1])
            if not part.takes_unquantized(shape):
                tokens = self._quantized(tokens, workspace)
        part.apply(tokens, weights=weights, workspace=workspace, output=output)

    def _quantized(self, tokens: ContiguousTokens, workspace: Workspace) -> ContiguousTokens:
        """Return the tokens as `prepare` would have, had it known the weights."""
        scheme, x_TH = self.problem.scheme, tokens.x_TH
        out = take_quantized(workspace, _X, scheme, (len(x_TH), self.problem.hidden))
        with stages.stage(stages.QUANTIZE_INPUT):
            quantize_rows(x_TH, scheme, out=out)
        return replace(tokens, x_TH=out.q_RK, scale=out.scale)


class BatchedTritonOrDeepGemmExperts(_Either):
    """BatchedTritonExperts or, for 64 rows an expert and more, BatchedDeepGemmExperts.

    The rows are those that a batch of this room is likely to have; a plan fixes them. An expert
    has room for a multiple of 128 rows in either case.
    """

    of_triton = BatchedTritonExperts
    with_library: ClassVar[type[BatchedDeepGemmExperts]] = BatchedDeepGemmExperts
    least_rows = LEAST_BATCHED_ROWS
    few = "experts with room for fewer than {least} rows"
    many = "experts with room for {least} rows or more"
    requires = replace(
        BatchedDeepGemmExperts.requires,
        bias=True,
        hidden_multiple=1,
        intermediate_multiple=1,
        blocks=None,
        capacity_multiple=TILE_M,
    )

    def workspace_shapes(self, shape: DispatchShape) -> WorkspaceShapes:
        assert isinstance(shape, BatchedShape)
        return self._room(shape.capacity, shape)

    def roundings(self, x_TH: torch.Tensor, weights: ExpertWeights) -> Roundings | None:
        # Tokens do not tell how much room a batch gives an expert, which decides.
        return self._few.roundings(x_TH, weights) if self._many is None else None

    def apply(
        self,
        tokens: Dispatched,
        *,
        weights: ExpertWeights,
        workspace: Workspace,
        output: torch.Tensor,
    ) -> None:
        assert isinstance(tokens, BatchedTokens)
        part = self._part(tokens.x_eCH.shape[1])
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
