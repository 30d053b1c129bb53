"""Defects that only show where two axis values meet are detected by the cases of the full list.

`test_matrix.py` checks that these pairs of values are covered. Here a defect that only changes
problems with such a pair is applied to the source, and the cheapest cases with the pair run.
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
MAX_CASES = 4  # of a pair of values, the cheapest first

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


def cost(case: Case) -> int:
    """Return a rough estimate of the relative run time of a case."""
    p = case.problem
    return p.tokens * p.top_k * (p.hidden + p.intermediate) + 1000 * p.experts


def has_several_chunks(problem: Problem) -> bool:
    return problem.tokens > (problem.chunk_tokens or problem.tokens)


PAIR_DEFECTS = (
    PairDefect(
        "quantized x chunks",
        lambda p: p.scheme.activation_granularity == "group" and has_several_chunks(p),
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
        lambda p: p.scheme.zero_points and p.scheme.packed and p.act.interleaved,
        SourceDefect(
            "up reads the zero point of the wrong half of the byte",
            "experts/triton/kernels/gemm_tile_dispatch.py",
            "(up_rows % ZERO_ROWS) * 4",
            "(row % ZERO_ROWS) * 4",
        ),
    ),
    PairDefect(
        "quantized x ragged I",
        lambda p: (
            p.scheme.activation_granularity in ("token", "group")
            and p.hidden % 16 == 0 < p.intermediate % 16
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
        lambda p: p.dtype is torch.bfloat16 and p.top_k >= 8 and p.combine is Combine.SUM,
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
        lambda p: (
            p.scheme.packed
            and p.scheme.weight == "uint4"
            and p.bias
            and 1 < p.e == p.experts
            and p.dtype.itemsize == 2
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
def test_source_defect_is_detected(pair: PairDefect, tmp_path: Path) -> None:
    listed = cases_for(PREPARE, pair.experts, this_machine()).cases
    routed = [case for case in listed if case.problem.tokens and case.routing != "all_skipped"]
    matching = sorted((case for case in routed if pair.matches(case.problem)), key=cost)
    assert matching
    assert findings(pair.defect, matching[:MAX_CASES], tmp_path)
