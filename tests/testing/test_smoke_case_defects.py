"""Source defects that earlier case lists missed are each detected by a case of the current lists.

A list of cases can execute every line and still miss a defect such as a wrong rounding mode.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from source_defect_runs import SourceDefect, findings

from modular_kernel.catalog import this_machine
from modular_kernel.testing.cases.lists import cases_for

STANDARD_PREPARE_FINALIZE, BATCHED_PREPARE_FINALIZE = (
    "MoEPrepareAndFinalizeNoEP",
    "BatchedPrepareAndFinalize",
)
QUANTIZE = "modular_kernel/ops/kernels/quantize.py"

pytestmark = pytest.mark.skipif(
    this_machine().device == "cuda", reason="defects are applied to interpreted kernels"
)


@dataclass(frozen=True)
class ListedDefect:
    """A defect that the cases whose names contain all of `name_parts` must detect."""

    defect: SourceDefect
    prepare_finalize: str
    experts: str
    name_parts: tuple[str, ...]
    level: Literal["smoke", "full"] = "smoke"

    def __str__(self) -> str:
        return str(self.defect)


DEFECTS = (
    # Unwritten rows are NaN. If the maximum ignored NaN, no case would detect this defect.
    ListedDefect(
        SourceDefect(
            "rows without a token change the scale of the tensor",
            "experts/triton/batched.py",
            "quantize_rows(h_eCI.flatten(0, 1), scheme, out=out, valid_rows=valid_rows)",
            "quantize_rows(h_eCI.flatten(0, 1), scheme, out=out, valid_rows=None)",
        ),
        BATCHED_PREPARE_FINALIZE,
        "BatchedTritonExperts",
        ("quant=fp8_w8a8_tensor-bias",),
    ),
    ListedDefect(
        SourceDefect(
            "a zero is multiplied by the weight of a skipped pair",
            "modular_kernel/ops/kernels/rows.py",
            "        value = value * tl.load(router_weights_ptr + pair, mask=row >= 0, other=0.0)\n"
            "    tl.store(out_ptr + pair",
            "        value = value * tl.load(router_weights_ptr + pair)\n"
            "    tl.store(out_ptr + pair",
        ),
        STANDARD_PREPARE_FINALIZE,
        "TorchExperts",
        ("combine=topk_weighted",),
    ),
    ListedDefect(
        SourceDefect(
            "up uses the scale of gate where 32-bit words are read",
            "experts/triton/aligned_w4/kernels/grouped_gemm_w4.py",
            "up_tile *= tl.load(zero_point_ptr + 1)",
            "up_tile *= tl.load(zero_point_ptr)",
        ),
        STANDARD_PREPARE_FINALIZE,
        "TritonExperts",
        ("T7-H128-I64", "nvfp4_w4a16-bias"),
    ),
    ListedDefect(
        SourceDefect(
            "adapters only add the first block of LoRA ranks",
            "experts/triton/kernels/adapters.py",
            "if start >= lora_rank:",
            "if start >= 0:",
        ),
        STANDARD_PREPARE_FINALIZE,
        "TritonExperts",
        ("rank=80",),
    ),
    ListedDefect(
        SourceDefect(
            "integers round half up",
            QUANTIZE,
            "value = (value + 12582912.0) - 12582912.0",
            "value = tl.floor(value + 0.5)",
        ),
        STANDARD_PREPARE_FINALIZE,
        "GroupedGemmExperts",
        ("quant=int8_w8a8_channel", "ties"),
    ),
    ListedDefect(
        SourceDefect(
            "float8 rounds half away from zero",
            QUANTIZE,
            "    if ROUND_TO_INT:\n        # Adding",
            "    if not ROUND_TO_INT:\n        value = value * 1.0000005\n"
            "    if ROUND_TO_INT:\n        # Adding",
        ),
        STANDARD_PREPARE_FINALIZE,
        "GroupedGemmExperts",
        ("quant=fp8_w8a8_tensor-bias", "ties"),
    ),
    *(
        ListedDefect(
            SourceDefect(
                f"{name} does not check the arguments of callers other than kernels",
                f"topk_reduce/{name}.py",
                'if getattr(rows, "checked", None) is not True:',
                'if getattr(rows, "checked", None) is True:',
            ),
            prepare_finalize,
            experts,
            name_parts,
        )
        for name, prepare_finalize, experts, name_parts in (
            ("contiguous", STANDARD_PREPARE_FINALIZE, "TorchExperts", ("T0-",)),
            ("keep_topk", STANDARD_PREPARE_FINALIZE, "TorchExperts", ("combine=topk_weighted",)),
            (
                "naive_batched",
                BATCHED_PREPARE_FINALIZE,
                "NaiveBatchedExperts",
                ("T7-", "quant=fp8_w8a8_tensor"),
            ),
        )
    ),
    ListedDefect(  # pairs times the LoRA rank exceed _MAX_SMALL_U, and hidden is large
        SourceDefect(
            "adapter kernels depend on the number of tokens despite batch_invariant",
            "experts/triton/adapters.py",
            "if num_pairs * a.shape[2] <= _MAX_SMALL_U and not problem.batch_invariant:",
            "if num_pairs * a.shape[2] <= _MAX_SMALL_U:",
        ),
        STANDARD_PREPARE_FINALIZE,
        "TritonExperts",
        ("T35-H160", "batch_invariant", "rank=80"),
        "full",
    ),
)


@pytest.mark.share(2)
@pytest.mark.parametrize("listed_defect", DEFECTS, ids=str)
def test_source_defect_is_detected_by_its_cases(
    listed_defect: ListedDefect, tmp_path: Path
) -> None:
    pairing = listed_defect.prepare_finalize, listed_defect.experts
    all_cases = cases_for(*pairing, this_machine(), listed_defect.level).cases
    cases = [
        case for case in all_cases if all(part in str(case) for part in listed_defect.name_parts)
    ]
    assert cases
    assert findings(listed_defect.defect, cases, tmp_path)
