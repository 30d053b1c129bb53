"""All variants of the router kernel compile for sm_90 without spills."""

import pytest
import torch

from modular_kernel.ops.route import RouterTensors, route
from modular_kernel.spec.router import RouterSpec
from modular_kernel.testing.compile.report import check, record_compiles

DEEPSEEK = {"groups": 8, "topk_groups": 4, "selection_bias": True, "renormalize": True}
VARIANTS = (
    (RouterSpec(2), 8),
    (RouterSpec(8, renormalize=True, eps=1e-20, floor=1e-12), 128),
    (RouterSpec(4, order="topk_first"), 32),
    (RouterSpec(8, "sigmoid", **DEEPSEEK), 256),
    (RouterSpec(6, groups=8, topk_groups=3, group_score="max"), 160),
    (RouterSpec(6, "sqrtsoftplus", table=True, renormalize=True), 256),
    (RouterSpec(16, "sqrtsoftplus", selection_bias=True), 512),
    (RouterSpec(12, selection_bias=True, zero_experts=256), 512),
    (RouterSpec(16, "sigmoid", zero_experts=512), 512),
)


def make_meta_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(("tokens", "dtype"), [(4, torch.float32), (4096, torch.bfloat16)])
@pytest.mark.parametrize(("spec", "experts"), VARIANTS, ids=str)
def test_route_compiles_without_spills(
    spec: RouterSpec, experts: int, tokens: int, dtype: torch.dtype
) -> None:
    columns = spec.columns(experts)
    bias = make_meta_tensor(columns) if spec.selection_bias else None
    ids_dtype = torch.int32 if dtype == torch.float32 else torch.int64
    table = make_meta_tensor(100, spec.top_k, dtype=ids_dtype) if spec.table else None
    token_ids = make_meta_tensor(tokens, dtype=ids_dtype) if spec.table else None
    logits = make_meta_tensor(tokens, columns, dtype=dtype)
    with record_compiles("sm_90") as records:
        tensors = RouterTensors(bias, table)
        route(logits, spec, tensors, token_ids_T=token_ids, ids_dtype=ids_dtype)
    (record,) = records
    assert (record.kernel, check(record)) == ("route_kernel", ())
    assert record.registers <= 128
    assert record.shared <= 1024  # for exchanges between lanes of a warp
