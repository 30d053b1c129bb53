"""number_pairs and live_pairs compile for sm_90, in every form that parts launch."""

import pytest
import torch

from modular_kernel.ops.live_pairs import live_pairs
from modular_kernel.ops.numbers import NumberedPairs, Numbering, number_pairs
from modular_kernel.placement import Placement, PlacementTables
from modular_kernel.tensors import Routing
from modular_kernel.testing.compile import check, record_compiles


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("join", "top_k"), [(False, 8), (True, 1), (True, 8), (True, 32)])
def test_it_compiles_without_spills(ids_dtype: torch.dtype, join: bool, top_k: int) -> None:
    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    placements = Placement.linear(32, 2), Placement.linear(32, 2).with_copies({0: (1,)})
    with record_compiles("sm_90") as records:
        for placement in placements:
            tables = PlacementTables(
                empty(32, 2, 2, dtype=torch.int32), empty(32, dtype=torch.int32)
            )
            weights = empty(16, top_k, dtype=torch.float32)
            number_pairs(
                Routing(weights, empty(16, top_k, dtype=ids_dtype)),
                Numbering(placement, tables, 1),
                join=join,
                factor=2.5,
                out=NumberedPairs(empty(16, top_k, dtype=torch.int64), weights),
                invalid_ids=empty(1, dtype=torch.int32),
            )
    assert [record.kernel for record in records] == ["number_pairs_kernel"] * 2
    assert [violation for record in records for violation in check(record)] == []


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_live_pairs_compile_without_spills(ids_dtype: torch.dtype) -> None:
    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    with record_compiles("sm_90") as records:
        live_pairs(
            empty(ids_dtype, 16, 8),
            empty(torch.float32, 16, 8),
            empty(torch.int32),
            out_ids_RK=empty(torch.int32, 16, 8),
            out_weights_RK=empty(torch.float32, 16, 8),
        )
    assert [record.kernel for record in records] == ["live_pairs_kernel"]
    assert [violation for record in records for violation in check(record)] == []
