"""Every Triton kernel, as the parts launch it, compiles for sm_90 without spilling."""

import pytest

from experts.tile_shapes import Device
from experts.tiles import on_device
from modular_kernel.testing.compile_cases import Row, compile_all

pytestmark = pytest.mark.timeout(1200)  # some 150 kernels, one after the other


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    with on_device(Device()):  # with tiles as without a GPU, whatever is here
        return compile_all("sm_90")


def test_no_kernel_is_in_violation(rows: list[Row]) -> None:
    """No spills, shared memory within the limit, and the expected tensor-core instruction."""
    assert [f"{row.case}: {v}" for row in rows for v in row.violations] == []


def test_every_kernel_of_the_project_was_compiled(rows: list[Row]) -> None:
    assert {row.record.kernel for row in rows} == {
        "activation_kernel",
        "align_kernel",
        "align_place_kernel",
        "amax_kernel",
        "assign_rows_kernel",
        "batched_gemm_kernel",
        "count_pairs_kernel",
        "four_bit_gemm_kernel",
        "gather_rows_kernel",
        "grouped_gemm_kernel",
        "number_pairs_kernel",
        "permute_and_quantise_kernel",
        "permute_tokens_kernel",
        "quantise_rows_kernel",
        "scan_counts_kernel",
        "segment_gemm_kernel",
        "single_down_kernel",
        "single_up_kernel",
        "sort_place_kernel",
        "weight_and_sum_kernel",
    }


def test_products_use_the_instructions_they_should(rows: list[Row]) -> None:
    used = {
        (row.record.dtypes["a_ptr"], row.record.config["PRECISION"], row.record.config["BLOCK_M"])
        for row in rows
        if "BLOCK_M" in row.record.config and row.record.instructions["HGMMA"]
    }
    assert {("bf16", "ieee", 64), ("bf16", "ieee", 128), ("fp16", "ieee", 128)} <= used
    assert ("fp32", "tf32", 64) in used
    assert not any(precision == "ieee" for dtype, precision, _ in used if dtype == "fp32")
