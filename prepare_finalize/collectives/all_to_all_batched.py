"""TorchAll2AllBatchedPrepareAndFinalize: all-to-all, then received rows are grouped by expert.

An exchange component ("part") for experts that take the batched format, (e, C, H): C rows for each
of the e experts of a rank. If an expert has n tokens, its first n rows are valid.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from modular_kernel.contracts import TopKWeightAndReduce
from modular_kernel.ops.batch import assign_rows, assign_rows_scratch
from modular_kernel.ops.permute import permute_tokens
from modular_kernel.ops.quantize import scale_shape
from modular_kernel.quant.quantized_weights import STORAGE
from modular_kernel.spec.problem import ActivationFormat, Reduce, RowContents
from modular_kernel.tensors import (
    BatchedShape,
    BatchedTokens,
    Dispatched,
    ExpertRows,
    StandardTokens,
)
from modular_kernel.workspace import BufferSpec
from prepare_finalize.collectives.all_to_all import All2AllHandle, TorchAll2AllPrepareAndFinalize
from prepare_finalize.common.tokens import has_shared_scale
from topk_reduce import TopKWeightAndReduceNaiveBatched


@dataclass(frozen=True)
class RegroupedHandle(All2AllHandle):
    """Handle of an all-to-all whose received rows are grouped by expert.

    row_of_pair_RK: (R, K) int32, index in [0, e * C) of the batched row of each pair of a received
        row, or -1 for a pair without a batched row.
    """

    row_of_pair_RK: torch.Tensor


class TorchAll2AllBatchedPrepareAndFinalize(TorchAll2AllPrepareAndFinalize):
    """Send rows as TorchAll2AllPrepareAndFinalize does, then group them by expert.

    The R received rows, (R, H), are copied to the batched format, (e, C, H), once for each of their
    local experts. The rows of an expert are ordered by sending rank, then by token. The capacity C
    is sufficient for problem.tokens tokens of every rank.
    """

    replayable = True  # plans can replay the recorded launches of fixed-capacity exchanges
    requires = replace(
        TorchAll2AllPrepareAndFinalize.requires,
        activation_format=ActivationFormat.BATCHED_EXPERTS,
        reduces=frozenset({Reduce.NAIVE_BATCHED, Reduce.DELEGATE}),
        padding=RowContents.UNDEFINED,
        can_defer_quant=False,
        rounds_capacity=True,
    )

    def dispatch_shape(self, tokens: int) -> BatchedShape:
        return BatchedShape(self.problem.e, self.padded_capacity(self.max_received_tokens))

    def workspace_shapes(self, tokens: int) -> Mapping[str, BufferSpec]:
        problem, scheme = self.problem, self.problem.scheme
        e, capacity, dtype = problem.e, self.dispatch_shape(tokens).capacity, problem.dtype
        rows = self.max_input_rows
        specs = dict(super().workspace_shapes(tokens))
        if scheme.dispatched_quantized:
            dtype = STORAGE[scheme.activation]
        if problem.adapters is not None:
            specs["batched_adapters"] = BufferSpec((e, capacity), torch.int32)
        if self._rows_have_scales:
            scales = (e, *scale_shape(scheme, capacity, problem.hidden))
            specs["batched_scale"] = BufferSpec(scales, torch.float32)
        return {
            **specs,
            "batched_x": BufferSpec((e, capacity, problem.hidden), dtype),
            "row_of_pair": BufferSpec((rows, problem.top_k), torch.int32),
            "expert_counts": BufferSpec((e,), torch.int32),
            "assign_scratch": assign_rows_scratch(rows, problem.top_k, e),
        }

    @property
    def _rows_have_scales(self) -> bool:
        """Whether each row is sent with its own scales."""
        scheme = self.problem.scheme
        shares_scale = scheme.static or has_shared_scale(self.problem)
        return scheme.dispatched_quantized and not shares_scale

    def arrange(
        self, tokens: StandardTokens, handle: All2AllHandle
    ) -> tuple[Dispatched, RegroupedHandle]:
        take, (rows, hidden), e = handle.call.workspace.take, tokens.x_TH.shape, self.problem.e
        # In a fixed-capacity exchange, some of the rows are unused.
        capacity = self.padded_capacity(
            rows if self.fixed_capacity is None else self.max_received_tokens
        )
        row_of_pair_RK = take("row_of_pair", (rows, self.problem.top_k))
        counts_e = take("expert_counts", (e,))
        scratch_spec = assign_rows_scratch(rows, self.problem.top_k, e)
        assign_rows(
            tokens.routing,
            capacity=capacity,
            row_of_pair_TK=row_of_pair_RK,
            counts_e=counts_e,
            scratch=take("assign_scratch", scratch_spec.shape),
        )
        x_eCH, scale = take("batched_x", (e, capacity, hidden)), tokens.scale
        row_scales = batched_scales = None
        if self._rows_have_scales and scale is not None:
            row_scales, scale = scale, take("batched_scale", (e, capacity, scale.shape[1]))
            batched_scales = scale.flatten(0, 1)
        permute_tokens(
            tokens.x_TH,
            row_of_pair_RK,
            None,
            rows_RH=x_eCH.flatten(0, 1),
            scale_TG=row_scales,
            scale_rows_RG=batched_scales,
        )
        slots_eC = None
        if tokens.routing.adapters_T is not None:
            slots_eC = take("batched_adapters", (e, capacity))
            slots_R1 = tokens.routing.adapters_T[:, None]
            permute_tokens(slots_R1, row_of_pair_RK, None, rows_RH=slots_eC.view(-1, 1))
        regrouped = RegroupedHandle(**vars(handle), row_of_pair_RK=row_of_pair_RK)
        return BatchedTokens(x_eCH, counts_e, scale, slots_eC), regrouped

    def sum_rows(
        self, expert_output: torch.Tensor, handle: All2AllHandle, reduce: TopKWeightAndReduce
    ) -> None:
        assert isinstance(handle, RegroupedHandle)
        if reduce.kind is Reduce.DELEGATE:
            reduce = TopKWeightAndReduceNaiveBatched()
        factor = self.problem.routed_scaling_factor
        weights_RK = handle.topk_weights_RK
        pairs_RK = handle.row_of_pair_RK
        rows = ExpertRows(expert_output, pairs_RK, weights_RK, factor, checked=True)
        reduce.apply(rows, handle.sum_RH)
