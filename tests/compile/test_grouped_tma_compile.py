"""Launches of the grouped_tma path compile for sm_90 without spills, with TMA and warpgroup MMAs.

If GEMM 1 gathers rows of tokens, it copies them by cp.async, and no launch permutes tokens.
"""

from dataclasses import replace

import pytest
import torch
from path_launches import META, launches_of

from experts.triton.grouped_tma import grouped_tma_config
from experts.triton.grouped_tma.grouped_tma_path import GroupedTmaPath
from experts.triton.launch_config import Device, LaunchConfig, MoEConfig
from modular_kernel import Problem
from modular_kernel.ops.quantize import quantize_rows, quantize_specs, take_quantized
from modular_kernel.spec.problem import Combine
from modular_kernel.testing.compile.report import CompileRecord, check, record_compiles
from modular_kernel.workspace import Workspace

BASE = Problem(tokens=600, hidden=512, intermediate=256, experts=4, top_k=2)
DEVICE = Device("sm_90", tma=True)


def compile_call(problem: Problem, tiles: MoEConfig) -> list[CompileRecord]:
    """Compile all launches of a call, including the quantization of x, and return their records."""
    assert grouped_tma_config.supports(problem, DEVICE)
    path, scheme = GroupedTmaPath(problem), problem.scheme
    if not scheme.quantized:
        return launches_of(path, problem, tiles)
    x_TH = torch.empty(problem.tokens, problem.hidden, dtype=problem.dtype, device=META)
    workspace = Workspace(quantize_specs("x", scheme, *x_TH.shape), META)
    out = take_quantized(workspace, "x", scheme, tuple(x_TH.shape))
    with record_compiles("sm_90") as records:
        quantize_rows(x_TH, scheme, out=out)
    return records + launches_of(path, problem, tiles, x_TH=out.q_RK, scale=out.scale)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": "float16", "bias": True},
        {"activation": "relu2"},
        {"hidden": 200},
        {"hidden": 456},
        {"hidden": 464, "quant": "fp8_w8a8_channel"},
        {"hidden": 1040, "quant": "fp8_w8a8_channel"},
        {"activation": "gelu", "combine": Combine.TOPK_WEIGHTED},
        {"activation": "gelu_tanh:limit=7"},
        {"activation": "situ:alpha=4,limit=25"},
        {"activation": "silu_no_mul"},
        {"activation": "swiglu_clamp_after:limit=7"},
        {"activation": "swiglu_clamp_before:limit=7"},
        {"activation": "swiglu_oai:alpha=1.702,limit=7,interleaved=true", "bias": True},
        {"quant": "fp8_w8a8_channel"},
        {"quant": "fp8_w8a8_channel", "activation": "relu2", "bias": True},
        {"quant": "fp8_w8a8_block"},
        {"quant": "fp8_w8a8_block", "activation": "relu2"},
        {
            "quant": "fp8_w8a8_block",
            "activation": "swiglu_oai:alpha=1.702,limit=7,interleaved=true",
        },
    ],
    ids=str,
)
def test_launches_compile_without_violations(change: dict[str, object]) -> None:
    problem = replace(BASE, **change)
    quantized = problem.scheme.quantized
    records = compile_call(problem, grouped_tma_config.default_config(problem))
    gemm_records = [r for r in records if r.kernel == "grouped_gemm_tma_kernel"]
    assert len(gemm_records) == 2
    for record in records:
        assert check(record) == ()
    for record in gemm_records:
        assert check(record, "QGMMA" if quantized else "HGMMA") == ()
    gathers = grouped_tma_config.gathers_tokens(problem)
    permutes = [r for r in records if r.kernel == "permute_tokens_kernel"]
    assert len(permutes) == (not gathers)
    tma_loads = [r.instructions["UTMALDG"] for r in gemm_records]
    assert tma_loads == [2 if gathers else 3, 3]  # two loads of weights, and one of rows
    cp_asyncs = [r.instructions["LDGSTS"] for r in gemm_records]
    # Each of two warpgroups copies its 64 rows of a step by 4 instructions. The code has STAGES - 1
    # steps before the first tile, and one step in each of two loops.
    assert cp_asyncs == [2 * 4 * (gemm_records[0].config["STAGES"] - 1 + 2) if gathers else 0, 0]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"activation": "relu2"},
        {"activation": "swiglu_oai:alpha=1.702,limit=7,interleaved=true"},
        {"quant": "fp8_w8a8_channel"},
        {"quant": "fp8_w8a8_block"},
    ],
    ids=str,
)
def test_outputs_are_stored_by_stmatrix_and_tma(change: dict[str, object]) -> None:
    """Threads write 8 x 8 matrices to shared memory, and TMA stores them."""
    problem = replace(BASE, **change)
    records = compile_call(problem, grouped_tma_config.default_config(problem))
    for record in (r for r in records if r.kernel == "grouped_gemm_tma_kernel"):
        # If gate and up rows alternate, a warpgroup has one store, and otherwise two.
        is_interleaved = record.config["GATED"] and record.config["GATE_STRIDE"] == 1
        num_stores = 1 if is_interleaved else 2
        assert record.instructions["UTMASTG"] >= 2 * num_stores
        assert record.instructions["STS"] <= 4


@pytest.mark.parametrize("hidden", [512, 640])
def test_mmas_of_two_steps_overlap(hidden: int) -> None:
    """Each warpgroup has a loop over two steps, and code for a remaining single step."""
    problem = replace(BASE, hidden=hidden, quant="fp8_w8a8_block")
    records = compile_call(problem, grouped_tma_config.default_config(problem))
    gemm_records = [r for r in records if r.kernel == "grouped_gemm_tma_kernel"]
    assert [r.instructions["QGMMA"] for r in gemm_records] == [2 * 3 * 4, 2 * 3 * 4]


def test_wide_tiles_with_block_scales_spill() -> None:
    """Such tiles are refused because they spill."""
    problem = replace(BASE, quant="fp8_w8a8_block")
    wide_tiles = MoEConfig(
        LaunchConfig(128, 128, 128, 8, 4, 4), LaunchConfig(128, 256, 128, 8, 4, 4), "permuted"
    )
    gemm_records = [
        r for r in compile_call(problem, wide_tiles) if r.kernel == "grouped_gemm_tma_kernel"
    ]
    assert all(record.stack > 0 for record in gemm_records)
