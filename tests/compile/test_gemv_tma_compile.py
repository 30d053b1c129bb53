"""Launches of the gemv_tma path compile for sm_90 with TMA and warpgroup MMAs."""

from dataclasses import replace

import pytest
import torch
from path_launches import META, launches_of

from experts.triton.gemv_tma import gemv_tma_config
from experts.triton.gemv_tma.gemv_tma_path import GemvTmaPath
from experts.triton.launch_config import Device
from modular_kernel import Problem
from modular_kernel.testing.compile.report import CompileRecord, check

DEVICE = Device("sm_90", tma=True)
BASE = Problem(
    tokens=1, hidden=2048, intermediate=768, experts=128, top_k=8, dtype=torch.bfloat16,
    quant="fp8_w8a8_channel", ids_dtype=torch.int64,
)  # fmt: skip


def compile_call(problem: Problem, *, quantized_input: bool = False) -> list[CompileRecord]:
    """Compile all launches of a call, and return their records.

    quantized_input: whether x is already quantized.
    """
    assert gemv_tma_config.supports(problem, DEVICE)
    path, tiles = GemvTmaPath(problem), gemv_tma_config.default_config(problem, DEVICE)
    if not quantized_input:
        return launches_of(path, problem, tiles)
    groups = -(-problem.hidden // 128) if problem.scheme.granularity == "block" else 1
    x_TH = torch.empty(problem.tokens, problem.hidden, dtype=torch.float8_e4m3fn, device=META)
    scale = torch.empty(problem.tokens, groups, device=META)
    return launches_of(path, problem, tiles, x_TH=x_TH, scale=scale)


@pytest.mark.parametrize("quant", ["fp8_w8a8_channel", "fp8_w8a8_block"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tokens": 3},
        {"tokens": 9, "top_k": 6, "expert_map": True},
        {"given": True, "tokens": 2},
        {"hidden": 7168, "intermediate": 2048, "experts": 32},
        {"hidden": 4096, "intermediate": 3584, "experts": 8, "top_k": 2, "dtype": torch.float16},
        {"hidden": 2880, "intermediate": 2880, "top_k": 4, "bias": True,
         "activation": "swiglu_oai:alpha=1.702,limit=7,interleaved=true"},
    ],
    ids=str,
)  # fmt: skip
def test_launches_compile_without_violations(quant: str, change: dict[str, object]) -> None:
    fields = {name: value for name, value in change.items() if name != "given"}
    problem = replace(BASE, quant=quant, **fields)
    records = compile_call(problem, quantized_input="given" in change)
    assert [r.kernel for r in records] == ["gemv_tma_gate_up_kernel", "gemv_tma_down_kernel"]
    for record in records:
        assert check(record, "QGMMA") == ()
        assert record.instructions["UTMALDG"] > 0
        assert record.instructions["FFMA"] < 200  # Only MMAs multiply weights.
