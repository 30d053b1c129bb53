"""Parts that use vendor libraries copy misaligned weights, because the libraries need alignment."""

from dataclasses import replace

import pytest
import torch
import vendor_stand_in as parts
from vendor_stand_in import prove_part

from experts.common.row_major import to_row_major
from modular_kernel.spec.problem import Problem
from modular_kernel.testing.cases.inputs import InputVariation

BASE = Problem(tokens=9, hidden=128, intermediate=128, experts=3, top_k=2)


@pytest.mark.parametrize(
    ("part", "quant"),
    [
        ("CutlassRowwise", "fp8_w8a8_channel"),
        ("BatchedCutlass", "fp8_w8a8_tensor"),
        ("DeepGemm", "none"),
        ("BatchedDeepGemm", "fp8_w8a8_block"),
        ("TritonKernels", "none"),
    ],
)
def test_misaligned_weights_are_accepted(part: str, quant: str) -> None:
    problem = replace(BASE, quant=quant)
    proof = prove_part(getattr(parts, part), problem, variation=InputVariation(layout="shifted"))
    assert proof.passed, str(proof)


def test_only_misaligned_weights_are_copied() -> None:
    buffer = torch.arange(3 * 4 * 16 + 1, dtype=torch.bfloat16)
    aligned = buffer[:-1].view(3, 4, 16)
    assert to_row_major(aligned) is aligned
    for view in (buffer[1:].view(3, 4, 16), aligned.transpose(1, 2)):
        copied = to_row_major(view)
        assert copied.is_contiguous()
        assert copied.data_ptr() % 16 == 0
        assert torch.equal(copied, view)
