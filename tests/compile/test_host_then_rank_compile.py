"""The kernels of the two-level exchange with a fixed capacity compile for sm_90 without spills."""

import pytest

from modular_kernel import Problem
from modular_kernel.testing.compile.report import check, record_compiles
from prepare_finalize.host_then_rank.compile_cases import launch_all, problems


@pytest.mark.parametrize("problem", problems(), ids=str)
def test_received_blocks_and_headers_compile_without_spills(problem: Problem) -> None:
    with record_compiles() as records:
        launch_all(problem)
    assert [record.kernel for record in records] == ["read_blocks_kernel", "agree_kernel"]
    failures = [failure for record in records for failure in check(record)]
    assert failures == []
