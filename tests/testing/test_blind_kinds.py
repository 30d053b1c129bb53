"""Kinds of defects that earlier lists of cases did not see: each dies in a smoke case of its kind.

What a list enters and which values meet in it says little of what it notices: a maximum that
ignores NaN, a weight that is only ever 7.0, a rule of rounding, a threshold.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from put_in import SourceDefect, findings

from modular_kernel.catalog import this_machine
from modular_kernel.testing.cases.lists import cases_for

STANDARD, BATCHED = "MoEPrepareAndFinalizeNoEP", "BatchedPrepareAndFinalize"
QUANTIZE = "modular_kernel/ops/kernels/quantize.py"

pytestmark = pytest.mark.skipif(
    this_machine().device == "cuda", reason="defects are put in where kernels are interpreted"
)


@dataclass(frozen=True)
class Kind:
    """A defect, and the cases that are to notice it: those of a list with all words in the name."""

    wrong: SourceDefect
    prepare_finalize: str
    experts: str
    words: tuple[str, ...]
    level: Literal["smoke", "full"] = "smoke"

    def __str__(self) -> str:
        return str(self.wrong)


KINDS = (
    Kind(  # NaN in the rows that no call wrote is ignored by the maximum
        SourceDefect(
            "rows without a token join the scale of the tensor",
            "experts/triton/batched.py",
            "quantize_rows(h_eCI.flatten(0, 1), scheme, out=out, live=valid_rows)",
            "quantize_rows(h_eCI.flatten(0, 1), scheme, out=out, live=None)",
        ),
        BATCHED,
        "BatchedTritonExperts",
        ("quant=fp8_w8a8_tensor-bias",),
    ),
    Kind(
        SourceDefect(
            "the weight of a skipped pair multiplies a zero",
            "modular_kernel/ops/kernels/rows.py",
            "        value = value * tl.load(weights_ptr + pair, mask=row >= 0, other=0.0)\n"
            "    tl.store(out_ptr + pair",
            "        value = value * tl.load(weights_ptr + pair)\n    tl.store(out_ptr + pair",
        ),
        STANDARD,
        "TorchExperts",
        ("combine=topk_weighted",),
    ),
    Kind(
        SourceDefect(
            "up has the scale of gate's matrix where words are read",
            "experts/triton/aligned_w4/kernels/grouped_gemm_w4.py",
            "up_tile *= tl.load(zero_ptr + 1)",
            "up_tile *= tl.load(zero_ptr)",
        ),
        STANDARD,
        "TritonExperts",
        ("T7-H128-I64", "nvfp4_w4a16-bias"),
    ),
    Kind(
        SourceDefect(
            "adapters add the first block of ranks alone",
            "experts/triton/kernels/adapters.py",
            "if start >= rank:",
            "if start >= 0:",
        ),
        STANDARD,
        "TritonExperts",
        ("rank=80",),
    ),
    Kind(
        SourceDefect(
            "integers round half up",
            QUANTIZE,
            "value = (value + 12582912.0) - 12582912.0",
            "value = tl.floor(value + 0.5)",
        ),
        STANDARD,
        "GroupedGemmExperts",
        ("quant=int8_w8a8_channel", "ties"),
    ),
    Kind(
        SourceDefect(
            "float8 rounds half away from zero",
            QUANTIZE,
            "    if ROUND:\n        # Below",
            "    if not ROUND:\n        value = value * 1.0000005\n    if ROUND:\n        # Below",
        ),
        STANDARD,
        "GroupedGemmExperts",
        ("quant=fp8_w8a8_tensor-bias", "ties"),
    ),
    Kind(  # pairs times columns of u are more than the threshold, in a deep float32 product
        SourceDefect(
            "kernels of adapters change with the number of tokens",
            "experts/triton/adapters.py",
            "if pairs * a.shape[2] <= _FEW_ROWS and not problem.batch_invariant:",
            "if pairs * a.shape[2] <= _FEW_ROWS:",
        ),
        STANDARD,
        "TritonExperts",
        ("T35-H160", "batch_invariant", "rank=80"),
        "full",
    ),
)


@pytest.mark.share(2)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_defect_of_the_kind_is_noticed(kind: Kind, tmp_path: Path) -> None:
    listed = cases_for(kind.prepare_finalize, kind.experts, this_machine(), kind.level).cases
    cases = [case for case in listed if all(word in str(case) for word in kind.words)]
    assert cases
    assert findings(kind.wrong, cases, tmp_path)
