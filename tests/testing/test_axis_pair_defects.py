"""The cases of the full list detect defects that need a combination of two axis values.

`test_matrix.py` checks that these pairs of values are covered. Each test here applies a defect to
the source that only changes problems with both values, and runs the cheapest cases with these
values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from source_defect_runs import SourceDefect, findings

from modular_kernel.catalog import this_machine
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.testing import Case
from modular_kernel.testing.cases.lists import cases_for

PREPARE = "MoEPrepareAndFinalizeNoEP"
MAX_CASES = 4  # cases to run for each pair of values, the cheapest first

pytestmark = pytest.mark.skipif(
    this_machine().device == "cuda", reason="defects are applied to interpreted kernels"
)


@dataclass(frozen=True)
class PairDefect:
    """A pair of axis values, and a defect that only changes problems with both."""

    name: str
    matches: Callable[[Problem], bool]
    defect: SourceDefect
    experts: str = "TritonExperts"

    def __str__(self) -> str:
        return self.name


def estimate_cost(case: Case) -> int:
    problem = case.problem
    return (
        problem.tokens * problem.top_k * (problem.hidden + problem.intermediate)
        + 1000 * problem.experts
    )


def has_several_chunks(problem: Problem) -> bool:
    return problem.tokens > (problem.chunk_tokens or problem.tokens)


PAIR_DEFECTS = (
    PairDefect(
        "quantized x chunks",
        lambda problem: (
            problem.scheme.activation_granularity == "group" and has_several_chunks(problem)
        ),
        SourceDefect(
            "every chunk uses the scales of the first",
            "modular_kernel/tensors.py",
            "scale = scale[start:stop]",
            "scale = scale[: stop - start]",
        ),
        "GroupedGemmExperts",
    ),
    PairDefect(
        "zero points x interleaved",
        lambda problem: (
            problem.scheme.zero_points and problem.scheme.packed and problem.act.interleaved
        ),
        SourceDefect(
            "up reads the zero point of the wrong half of the byte",
            "experts/triton/kernels/gemm_tile_dispatch.py",
            "(up_rows % ZERO_ROWS) * 4",
            "(row % ZERO_ROWS) * 4",
        ),
    ),
    PairDefect(
        "quantized x ragged I",
        lambda problem: (
            problem.scheme.activation_granularity in ("token", "group")
            and problem.hidden % 16 == 0 < problem.intermediate % 16
        ),
        SourceDefect(
            "columns after the last whole vector are not quantized",
            "modular_kernel/ops/kernels/quantize.py",
            "    mask = valid[:, None] & (columns < num_columns)\n    x_ptrs",
            "    mask = valid[:, None] & (columns < num_columns // 16 * 16)\n    x_ptrs",
        ),
        "GroupedGemmExperts",
    ),
    PairDefect(
        "bf16 x K >= 8",
        lambda problem: (
            problem.dtype is torch.bfloat16
            and problem.top_k >= 8
            and problem.combine is Combine.SUM
        ),
        SourceDefect(
            "sums over a large top-k are rounded to 16 bits",
            "modular_kernel/ops/kernels/rows.py",
            "        total += value\n",
            "        total += value\n"
            "        if TOP_K >= 8:\n"
            "            total = total.to(rows_ptr.dtype.element_ty).to(tl.float32)\n",
        ),
        "TorchExperts",
    ),
    PairDefect(
        "int4 x bias",
        lambda problem: (
            problem.scheme.packed
            and problem.scheme.weight == "uint4"
            and problem.bias
            and 1 < problem.e == problem.experts
            and problem.dtype.itemsize == 2
        ),
        SourceDefect(
            "every expert with packed weights uses the bias of the first",
            "experts/triton/operands_w4.py",
            '"stride_bias": 0 if bias is None else bias.stride(0)',
            '"stride_bias": 0',
        ),
    ),
)


@pytest.mark.share(3)
@pytest.mark.parametrize("pair", PAIR_DEFECTS, ids=str)
def test_defects_of_axis_pairs_are_detected(pair: PairDefect, tmp_path: Path) -> None:
    all_cases = cases_for(PREPARE, pair.experts, this_machine()).cases
    cases_with_pairs = [
        case for case in all_cases if case.problem.tokens and case.routing != "all_skipped"
    ]
    matching_cases = sorted(
        (case for case in cases_with_pairs if pair.matches(case.problem)), key=estimate_cost
    )
    assert matching_cases
    assert findings(pair.defect, matching_cases[:MAX_CASES], tmp_path)
