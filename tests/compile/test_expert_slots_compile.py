"""Operations of the parts that use DeepEP or pplx-kernels compile for sm_90 without spills."""

import pytest
import torch

from modular_kernel.ops.expert_slots import Numbering, Pairs, number_pairs
from modular_kernel.ops.mask_unwritten import mask_unwritten_pairs
from modular_kernel.ops.quantize import quantize_specs, take_quantized
from modular_kernel.ops.slots_and_quantize import number_and_quantize
from modular_kernel.ops.zero_rows import zero_rows
from modular_kernel.spec.placement import Placement, PlacementTables
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import Routing
from modular_kernel.testing.compile.report import CompileRecord, check, record_compiles
from modular_kernel.workspace import Workspace

LINEAR = Placement.linear(32, 2)
COPIES = LINEAR.with_copies({0: (1,)})


def make_meta_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def make_pairs(
    placement: Placement, top_k: int, *, join: bool, ids_dtype: torch.dtype, num_sinks: int = 0
) -> Pairs:
    """Return pairs with the dtypes that DeepEP needs, or pplx-kernels if there are sinks."""
    tables = PlacementTables(
        make_meta_tensor(32, 2, 2, dtype=torch.int32), make_meta_tensor(32, dtype=torch.int32)
    )
    weights = make_meta_tensor(16, top_k)
    return Pairs(
        Routing(weights, make_meta_tensor(16, top_k, dtype=ids_dtype)),
        Numbering(placement, tables, 1, num_sinks),
        make_meta_tensor(16, top_k, dtype=torch.int32 if num_sinks else torch.int64),
        weights,
        make_meta_tensor(1, dtype=torch.int32),
        join,
        2.5,
    )


def assert_no_violations(records: list[CompileRecord], *kernels: str) -> None:
    assert tuple(record.kernel for record in records) == kernels
    assert [violation for record in records for violation in check(record)] == []


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("join", "top_k", "num_sinks"),
    [(False, 8, 0), (True, 1, 0), (True, 8, 0), (True, 32, 0), (True, 8, 4), (True, 3, 2)],
)
def test_number_pairs_compiles_without_spills(
    ids_dtype: torch.dtype, join: bool, top_k: int, num_sinks: int
) -> None:
    with record_compiles("sm_90") as records:
        for placement in (LINEAR, COPIES):
            number_pairs(
                make_pairs(placement, top_k, join=join, ids_dtype=ids_dtype, num_sinks=num_sinks)
            )
    assert_no_violations(records, *["number_pairs_kernel"] * 2)
    # Lanes of a warp compare ids without shared memory.
    assert [record.shared for record in records] == [0, 0]


@pytest.mark.parametrize("num_sinks", [0, 4])
@pytest.mark.parametrize(
    "quant",
    ["fp8_w8a8_tensor:static=true", "fp8_w8a8_channel", "fp8_w8a8_block", "int8_w8a8_block"],
)
def test_number_and_quantize_compiles_without_spills(quant: str, num_sinks: int) -> None:
    scheme, hidden = QuantScheme.parse(quant), 7168
    workspace = Workspace(quantize_specs("x", scheme, 16, hidden), torch.device("meta"))
    static_scale = make_meta_tensor(1) if scheme.static else None
    out = take_quantized(workspace, "x", scheme, (16, hidden), static_scale=static_scale)
    pairs = make_pairs(LINEAR, 8, join=True, ids_dtype=torch.int32, num_sinks=num_sinks)
    with record_compiles("sm_90") as records:
        number_and_quantize(
            make_meta_tensor(16, hidden, dtype=torch.bfloat16), scheme, pairs, out=out
        )
    assert_no_violations(records, "number_and_quantize_kernel")


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_mask_unwritten_pairs_compiles_without_spills(ids_dtype: torch.dtype) -> None:
    with record_compiles("sm_90") as records:
        mask_unwritten_pairs(
            make_meta_tensor(16, 8, dtype=ids_dtype),
            make_meta_tensor(16, 8),
            make_meta_tensor(dtype=torch.int32),
            out_ids_RK=make_meta_tensor(16, 8, dtype=torch.int32),
            out_weights_RK=make_meta_tensor(16, 8),
        )
    assert_no_violations(records, "mask_unwritten_pairs_kernel")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_zero_rows_compiles_without_spills(dtype: torch.dtype) -> None:
    with record_compiles("sm_90") as records:
        zero_rows(
            make_meta_tensor(4, 256, 7168, dtype=dtype), make_meta_tensor(4, dtype=torch.int32)
        )
    assert_no_violations(records, "zero_rows_kernel")
