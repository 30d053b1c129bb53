"""Every Triton kernel compiles for sm_90, with the arguments that the parts pass."""

import pytest

from modular_kernel.testing.compile.cases import (
    CompiledRow,
    CompileResult,
    compile_all,
    find_gemm_operand,
)

pytestmark = [
    pytest.mark.timeout(1200),  # about 300 variants of kernels
    # Time limits of this module, in seconds, in `make test` (quick) and `make test-rest` (rest).
    pytest.mark.budget(quick=0.0, rest=60.0, module=True),
]
GLUON = ("grouped_gemm_tma_kernel", "gemv_tma_down_kernel", "gemv_tma_gate_up_kernel")


@pytest.fixture(scope="module")
def compiled() -> CompileResult:
    return compile_all("sm_90", workers=2)


@pytest.fixture(scope="module")
def rows(compiled: CompileResult) -> tuple[CompiledRow, ...]:
    return compiled.rows


def test_kernels_compile_without_violations(rows: tuple[CompiledRow, ...]) -> None:
    assert [f"{row.case}: {v}" for row in rows for v in row.violations] == []


def test_no_kernel_is_skipped_without_a_reason(compiled: CompileResult) -> None:
    assert [kernel.kernel for kernel in compiled.left_out if not kernel.reason] == []
    assert len({row.record.kernel for row in compiled.rows}) >= 33


def test_gemms_use_the_expected_instructions(rows: tuple[CompiledRow, ...]) -> None:
    # Disassembly of a kernel takes 0.25 s, so only one launch is checked for each key.
    launches = {
        (r.kernel, r.dtypes[operand], r.config["INPUT_PRECISION"], r.config["BLOCK_M"]): r
        for r in (row.record for row in rows)
        if (operand := find_gemm_operand(r.kernel)) is not None
        and {"BLOCK_M", "INPUT_PRECISION"} <= r.config.keys()
    }
    with_hgmma = {key[1:] for key, record in launches.items() if record.instructions["HGMMA"]}
    assert {("bf16", "ieee", 64), ("bf16", "ieee", 128), ("fp16", "ieee", 128)} <= with_hgmma
    assert ("fp32", "tf32", 64) in with_hgmma
    assert not any(precision == "ieee" for dtype, precision, _ in with_hgmma if dtype == "fp32")
    gluon_records = {name: [r.record for r in rows if r.record.kernel == name] for name in GLUON}
    assert all(r.instructions["UTMALDG"] for records in gluon_records.values() for r in records)
    grouped_gemm_records = gluon_records["grouped_gemm_tma_kernel"]
    assert any(r.instructions["HGMMA"] for r in grouped_gemm_records)
    assert any(r.instructions["QGMMA"] for r in grouped_gemm_records)
    assert all(r.instructions["QGMMA"] for name in GLUON[1:] for r in gluon_records[name])
