"""Kernels of run_moe_lora compile for sm_90 without spills, and use MMAs for 16-bit dtypes."""

import pytest
import torch

from modular_kernel.testing.compile.moe_lora import launch_all
from modular_kernel.testing.compile.report import check, record_compiles

KERNELS = [
    "moe_lora_a_kernel",
    "moe_lora_gate_up_b_kernel",
    "moe_lora_a_kernel",
    "moe_lora_down_combine_kernel",
    "moe_lora_fused_kernel",
]


@pytest.mark.parametrize("top_k", [8])
@pytest.mark.parametrize("max_rank", [8, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_compile_without_violations(dtype: torch.dtype, max_rank: int, top_k: int) -> None:
    with record_compiles("sm_90") as records:
        launch_all(dtype, max_rank, top_k=top_k)
    assert [record.kernel for record in records] == KERNELS
    for record in records:
        uses_mmas = dtype is torch.bfloat16 and record.kernel != "moe_lora_fused_kernel"
        assert check(record, "HMMA" if uses_mmas else None) == ()
        assert record.shared <= 64 << 10
