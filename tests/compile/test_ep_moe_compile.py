"""The steps of EPMoE compile for sm_90 without spills, and with the expected MMA."""

import pytest
import torch

from experts.compat.ep_moe_compile_cases import COMPILE_CASES, FP8, launch_all
from modular_kernel.testing.compile.report import check, record_compiles


@pytest.mark.parametrize(("tokens", "dtype", "block_shape"), COMPILE_CASES, ids=str)
def test_steps_compile_without_violations(
    tokens: int, dtype: torch.dtype, block_shape: list[int] | None
) -> None:
    with record_compiles("sm_90") as records:
        launch_all(tokens, 2, dtype, block_shape)
    assert [record.kernel for record in records] == [
        "pre_reorder_kernel",
        "segment_gemm_kernel",
        "silu_and_mul_kernel",
        "segment_gemm_kernel",
        "weight_and_sum_kernel",
    ]
    instruction = "QGMMA" if dtype == FP8 else "HGMMA"
    for record in records:
        expected = instruction if record.kernel == "segment_gemm_kernel" else None
        assert check(record, expected) == ()
