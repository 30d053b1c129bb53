"""Parts in plain torch with the current CPU instruction set, which affects products of oneDNN.
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
    """With plain `@`, NaN or infinity in one row changes other rows on a CPU with AMX."""
    for rows in (2, 7, 17, 33, 65):
        for depth in (7, 16, 33, 40, 80, 136):
            a, b = torch.ones(rows, depth, dtype=dtype), torch.ones(depth, 80, dtype=dtype)
            for row in {0, rows // 2, rows - 1}:
                changed = a.clone()
                changed[row] = nonfinite
                finite = torch.isfinite(matmul(changed, b)).all(1)
                assert (~finite).nonzero().flatten().tolist() == [row]
