"""The launches over symmetric memory compile for sm_90 without spills, at a model's sizes."""

import pytest

from modular_kernel import Problem
from modular_kernel.testing.compile import check, record_compiles
from prepare_finalize.symm_meta import launch_all, problems


@pytest.mark.parametrize("problem", problems(), ids=str)
def test_compiles_without_spills(problem: Problem) -> None:
    with record_compiles() as records:
        launch_all(problem)
    assert [record.kernel for record in records] == [
        "dispatch_kernel",
        "dispatch_kernel",
        "arrival_kernel",
        "combine_kernel",
    ]
    assert [reason for record in records for reason in check(record)] == []
