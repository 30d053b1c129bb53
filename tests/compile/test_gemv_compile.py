"""Launches of the gemv path compile for sm_90 without spills, and do not use tensor cores."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from path_launches import launches_of

from experts.triton.gemv import gemv_config
from experts.triton.gemv.gemv_path import GemvPath
from modular_kernel import Problem
from modular_kernel.spec.problem import Combine
from modular_kernel.testing.compile.report import CompileRecord, check

BASE = Problem(tokens=2, hidden=256, intermediate=512, experts=9, top_k=8)


def compile_gemms(problem: Problem, target: str = "sm_90") -> list[CompileRecord]:
    """Compile both launches of a call, and return their records."""
    return launches_of(
        GemvPath(problem), problem, gemv_config.default_config(problem), target=target
    )


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"intermediate": 2048},
        {"intermediate": 2880, "top_k": 4, "bias": True, "activation": "swiglu_oai"},
        {"intermediate": 8192, "top_k": 2, "experts": 3},
        {"dtype": torch.float32},
        {"combine": Combine.TOPK_WEIGHTED},
        *(
            {"quant": quant, "intermediate": intermediate, "hidden": 8192, "experts": 8}
            for quant in ("fp8_w8a8_channel", "fp8_w8a8_block", "int8_w8a8_channel")
            for intermediate in (256, 2880)
        ),
        {"quant": "fp8_w8a8_block", "hidden": 2880},
        {"quant": "fp8_w8a8_tensor"},
        {"quant": "fp8_w8a8_tensor:static=true"},
        {"quant": "int8_w8a16_channel"},
        {"quant": "int8_w8a16_group"},
    ],
    ids=str,
)
def test_launches_compile_without_violations(change: dict[str, Any]) -> None:
    records = compile_gemms(replace(BASE, **change))
    assert [record.kernel for record in records] == ["gemv_gate_up_kernel", "gemv_down_kernel"]
    for record in records:
        assert check(record, "FFMA") == ()
        assert not any(n for name, n in record.instructions.items() if name.endswith("MMA"))


def test_launches_do_not_overlap_before_hopper() -> None:
    for target, overlaps in (("sm_80", False), ("sm_90", True)):
        for record in compile_gemms(BASE, target):
            assert record.config.get("USE_PDL", False) is overlaps
