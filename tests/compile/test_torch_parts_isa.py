"""Torch parts are correct with the CPU's instruction set, which affects oneDNN's products.

`make test-isa` runs this file for every instruction set of the machine that oneDNN can use.
"""

import pytest
import torch
from torch_part_cases import CASES

from modular_kernel.catalog import this_machine
from modular_kernel.testing import Case, prove
from modular_kernel.utils.matmul import matmul

MACHINE = this_machine(device="cpu")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_is_proven(case: Case) -> None:
    assert not MACHINE.interpreter
    proof = prove(case, MACHINE)
    assert proof.passed, str(proof)


@pytest.mark.parametrize("nonfinite", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_nonfinite_row_does_not_affect_other_rows(dtype: torch.dtype, nonfinite: float) -> None:
    """With torch's `@` on a CPU with AMX, NaN or infinity in one row would change other rows."""
    for rows in (2, 7, 17, 33, 65):
        for depth in (7, 16, 33, 40, 80, 136):
            a, b = torch.ones(rows, depth, dtype=dtype), torch.ones(depth, 80, dtype=dtype)
            for row in {0, rows // 2, rows - 1}:
                a_with_nonfinite_row = a.clone()
                a_with_nonfinite_row[row] = nonfinite
                is_finite = torch.isfinite(matmul(a_with_nonfinite_row, b)).all(1)
                assert (~is_finite).nonzero().flatten().tolist() == [row]
