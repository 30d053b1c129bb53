"""Kernels for weights that are contiguous along N compile for sm_90 with wide loads."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from path_launches import launches_of

from experts.triton.aligned.aligned_config import default_config, n_major_config
from experts.triton.aligned.aligned_path import AlignedPath
from experts.triton.gemv import gemv_config
from experts.triton.gemv.gemv_path import GemvPath
from experts.triton.launch_config import Device, LaunchConfig
from modular_kernel import Problem
from modular_kernel.testing.compile.report import check

BASE = Problem(tokens=64, hidden=2880, intermediate=2880, experts=32, top_k=4)
BOTH_N_MAJOR = (True, True)
CHANGES: tuple[dict[str, Any], ...] = (
    {"activation": "swiglu_oai", "bias": True},
    {"activation": "silu", "hidden": 2048, "intermediate": 1024},
    {"activation": "relu2", "dtype": torch.float16},
    # K is not a multiple of block_k.
    {"activation": "silu:interleaved=true", "hidden": 2880 + 16},
)
MAX_SCALAR_LOADS = 24  # loads of rows, biases and ids


@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("tokens", [16, 128, 256, 1024])
def test_aligned_tiles_are_copied_in_vectors(tokens: int, change: dict[str, Any]) -> None:
    problem = replace(BASE, tokens=tokens, **change)
    config = n_major_config(
        problem, default_config(problem, tokens, Device()), BOTH_N_MAJOR, Device()
    )
    records = [
        r
        for r in launches_of(AlignedPath(problem), problem, config, n_major=True)
        if r.kernel == "grouped_gemm_kernel"
    ]
    for record, tile in zip(records, config.typed_launches(LaunchConfig), strict=True):
        assert check(record, "HGMMA") == ()
        num_projections = 2 if record.config["GATED"] else 1
        rows = tile.block_m + num_projections * tile.block_n
        vectors_per_thread = rows * tile.block_k * 2 // (16 * 32 * tile.num_warps)
        assert record.instructions["LDGSTS"] == vectors_per_thread * tile.num_stages, record
    is_interleaved = problem.act.interleaved and problem.act.gated
    assert [r.config["ADJACENT_GATE_UP"] for r in records] == [is_interleaved, False]


@pytest.mark.parametrize(
    "change", [{"dtype": torch.float32}, {"hidden": 200, "intermediate": 136}], ids=str
)
@pytest.mark.parametrize("tokens", [16, 512])
def test_unaligned_and_float32_tiles_compile_without_violations(
    tokens: int, change: dict[str, Any]
) -> None:
    problem = replace(BASE, tokens=tokens, activation="silu:interleaved=true", **change)
    config = n_major_config(
        problem, default_config(problem, tokens, Device()), BOTH_N_MAJOR, Device()
    )
    for record in launches_of(AlignedPath(problem), problem, config, n_major=True):
        assert check(record) == ()


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_gemv_loads_vectors_along_n(change: dict[str, Any]) -> None:
    problem = replace(BASE, tokens=2, **change)
    config = gemv_config.n_major_config(gemv_config.default_config(problem), BOTH_N_MAJOR)
    records = launches_of(GemvPath(problem), problem, config, n_major=True)
    assert [r.config["N_MAJOR"] for r in records] == [True, True]
    for record, tile in zip(records, config.typed_launches(LaunchConfig), strict=True):
        assert check(record, "FFMA") == ()
        num_projections = 2 if record.config.get("GATED") else 1
        tile_bytes = num_projections * tile.block_n * tile.block_k * 2
        vectors_per_thread = tile_bytes // (16 * 32 * tile.num_warps)
        assert record.instructions["LDG"] <= vectors_per_thread + MAX_SCALAR_LOADS, record
