"""Launches of the dequantized path compile for sm_90 without violations, and GEMMs use HGMMA."""

from dataclasses import replace

import pytest
import torch
from path_launches import launches_of

from experts.triton.dequantized import dequantized_config
from experts.triton.dequantized.dequantized_path import DequantizedPath
from experts.triton.launch_config import Device
from modular_kernel import Problem
from modular_kernel.testing.compile.report import check

BASE = Problem(
    tokens=600, hidden=512, intermediate=256, experts=4, top_k=2, dtype=torch.bfloat16,
    quant="int4_w4a16_group",
)  # fmt: skip
DEVICE = Device("sm_90", tma=True)


@pytest.mark.parametrize("experts_per_chunk", [4, 3])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"quant": "int4_w4a16_group:group=32,zero_points=true"},
        {"quant": "mxfp4_w4a16", "hidden": 200, "activation": "relu2", "bias": True},
        {"quant": "mxfp4_w4a16:repacked=true"},
        {"quant": "int8_w8a16_channel"},
        {"quant": "fp8_w8a16_tensor"},
        {"quant": "nvfp4_w4a16", "hidden": 208},
        {"quant": "fp8_w8a16_block:block=48x64"},
        {"quant": "int8_w8a16_group:zero_points=true"},
    ],
    ids=str,
)
def test_launches_compile_without_violations(
    change: dict[str, object], experts_per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = replace(BASE, **change)
    assert dequantized_config.supports(problem, DEVICE)
    monkeypatch.setattr(dequantized_config, "experts_per_chunk", lambda p: experts_per_chunk)
    path, tiles = DequantizedPath(problem), dequantized_config.default_config(problem)
    records = launches_of(path, problem, tiles)
    num_chunks = -(-4 // experts_per_chunk)
    names = [record.kernel for record in records]
    assert names.count("dequantize_kernel") == 2 * num_chunks
    assert ("select_expert_tiles_kernel" in names) == (num_chunks > 1)
    for record in records:
        assert check(record) == ()
    for record in (r for r in records if r.kernel == "grouped_gemm_tma_kernel"):
        assert check(record, "HGMMA") == ()
