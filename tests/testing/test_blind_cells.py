"""Two values of two axes in which defects have passed: each, put into the source, fails a case.

`test_matrix.py` says that the values meet; here a defect that shows in that cell alone is put in,
and the cases of the full list that are in it run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from put_in import SourceDefect, findings

from modular_kernel.catalog import this_machine
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.testing import Case
from modular_kernel.testing.cases.lists import cases_for

PREPARE = "MoEPrepareAndFinalizeNoEP"
MOST = 4  # the cheapest cases of a cell

pytestmark = pytest.mark.skipif(
    this_machine().device == "cuda", reason="defects are put in where kernels are interpreted"
)


@dataclass(frozen=True)
class Cell:
    """Which problems are in it, and what is wrong there and nowhere else."""

    words: str
    holds: Callable[[Problem], bool]
    wrong: SourceDefect
    experts: str = "TritonExperts"

    def __str__(self) -> str:
        return self.words


def size(case: Case) -> int:
    """Roughly what a case costs."""
    p = case.problem
    return p.tokens * p.top_k * (p.hidden + p.intermediate) + 1000 * p.experts


def several_chunks(problem: Problem) -> bool:
    return problem.tokens > (problem.chunk_tokens or problem.tokens)


CELLS = (
    Cell(
        "quantized x chunks",
        lambda p: p.scheme.activation_granularity == "group" and several_chunks(p),
        SourceDefect(
            "every chunk has the first one's scales",
            "modular_kernel/tensors.py",
            "scale = scale[start:stop]",
            "scale = scale[: stop - start]",
        ),
        "GroupedGemmExperts",
    ),
    Cell(
        "zero points x interleaved",
        lambda p: p.scheme.zero_points and p.scheme.packed and p.act.interleaved,
        SourceDefect(
            "up's zero point is the half of the byte that gate's is",
            "experts/triton/kernels/gemm_tile_dispatch.py",
            "(up_rows % ZERO_ROWS) * 4",
            "(row % ZERO_ROWS) * 4",
        ),
    ),
    Cell(
        "quantized x ragged I",
        lambda p: (
            p.scheme.activation_granularity in ("token", "group")
            and p.hidden % 16 == 0 < p.intermediate % 16
        ),
        SourceDefect(
            "columns behind the last whole vector are not quantized",
            "modular_kernel/ops/kernels/quantize.py",
            "    mask = live[:, None] & (columns < num_columns)\n    x_ptrs",
            "    mask = live[:, None] & (columns < num_columns // 16 * 16)\n    x_ptrs",
        ),
        "GroupedGemmExperts",
    ),
    Cell(
        "bf16 x K >= 8",
        lambda p: p.dtype is torch.bfloat16 and p.top_k >= 8 and p.combine is Combine.SUM,
        SourceDefect(
            "long sums over top-k are kept in 16 bits",
            "modular_kernel/ops/kernels/rows.py",
            "        total += value\n",
            "        total += value\n"
            "        if TOP_K >= 8:\n"
            "            total = total.to(rows_ptr.dtype.element_ty).to(tl.float32)\n",
        ),
        "TorchExperts",
    ),
    Cell(
        "int4 x bias",
        lambda p: (
            p.scheme.packed
            and p.scheme.weight == "uint4"
            and p.bias
            and 1 < p.e == p.experts
            and p.dtype.itemsize == 2
        ),
        SourceDefect(
            "packed experts all have the first one's bias",
            "experts/triton/operands_w4.py",
            '"stride_bias": 0 if bias is None else bias.stride(0)',
            '"stride_bias": 0',
        ),
    ),
)


@pytest.mark.share(3)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_defect_in_the_source_is_told(cell: Cell, tmp_path: Path) -> None:
    listed = cases_for(PREPARE, cell.experts, this_machine()).cases
    live = [case for case in listed if case.problem.tokens and case.routing != "all_skipped"]
    inside = sorted((case for case in live if cell.holds(case.problem)), key=size)
    assert inside
    assert findings(cell.wrong, inside[:MOST], tmp_path)
