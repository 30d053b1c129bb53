"""Parts in plain torch under one CPU instruction set, which affects the products of oneDNN.

`make test-isa` runs this file once for every instruction set that oneDNN can be limited to on the
machine.
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


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_nonfinite_row_does_not_affect_other_rows(dtype: torch.dtype, bad: float) -> None:
    """With plain `@`, a CPU with AMX spreads NaN and infinity of one row to others."""
    for rows in (2, 7, 17, 33, 65):
        for depth in (7, 16, 33, 40, 80, 136):
            a, b = torch.ones(rows, depth, dtype=dtype), torch.ones(depth, 80, dtype=dtype)
            for row in {0, rows // 2, rows - 1}:
                spoiled = a.clone()
                spoiled[row] = bad
                finite = torch.isfinite(matmul(spoiled, b)).all(1)
                assert (~finite).nonzero().flatten().tolist() == [row]
