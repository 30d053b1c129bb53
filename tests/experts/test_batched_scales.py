"""Batched experts accept scales with any strides, such as the column-major scales of libraries."""

from dataclasses import replace

import pytest
import torch

from experts import BatchedTritonExperts, NaiveBatchedExperts
from modular_kernel.catalog import this_machine
from modular_kernel.contracts import CallState
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import BatchedTokens, Dispatched, ExpertWeights, Handle, Routing
from modular_kernel.testing.random_inputs import random_inputs
from prepare_finalize import BatchedPrepareAndFinalize

BASE = Problem(7, hidden=96, intermediate=64, experts=3, top_k=2, dtype=torch.bfloat16)


class ColumnMajorScalesPrepare(BatchedPrepareAndFinalize):
    """Stores scales (e, C, G) as (e, G, C) with gaps of NaN."""

    def prepare(
        self, x_TH: torch.Tensor, routing: Routing, *, weights: ExpertWeights, call: CallState
    ) -> tuple[Dispatched, Handle]:
        tokens, handle = super().prepare(x_TH, routing, weights=weights, call=call)
        assert isinstance(tokens, BatchedTokens)
        assert tokens.scale is not None
        e, capacity, groups = tokens.scale.shape
        buffer = tokens.scale.new_full((e, groups + 1, capacity + 3), torch.nan)
        scale = buffer[:, :groups, :capacity].mT
        scale.copy_(tokens.scale)
        return replace(tokens, scale=scale), handle


@pytest.mark.parametrize("experts", [NaiveBatchedExperts, BatchedTritonExperts])
@pytest.mark.parametrize(
    "quant",
    ["fp8_w8a8_block:block=32x32", "int8_w8a8_block:block=32x32", "fp8_w8a8_channel"],
)
def test_scales_may_have_any_strides(
    quant: str, experts: type[NaiveBatchedExperts | BatchedTritonExperts]
) -> None:
    problem = replace(BASE, quant=quant)
    inputs = random_inputs(problem, torch.device(this_machine().device))
    row_major_output, column_major_output = (
        FusedMoEModularKernel(part(problem), experts(problem))(*inputs)
        for part in (BatchedPrepareAndFinalize, ColumnMajorScalesPrepare)
    )
    assert torch.equal(row_major_output, column_major_output)
    assert bool(row_major_output.isfinite().all())
