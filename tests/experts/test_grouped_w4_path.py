"""The `grouped_w4` path without a GPU: kernels are interpreted, and torch stands in for its GEMMs.

The stand-in multiplies by the tiled weights. tests/gpu/test_grouped_w4_on_gpu.py verifies the GEMM
kernel, and tests/experts/test_grouped_w4_unpack.py verifies how it unpacks weights.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from grouped_gemm_stand_in import H200, MXFP4, OAI, make_gemm_fixture, multiply_w4

from experts.triton.configs.heuristics import make_heuristic_steps, require_config
from experts.triton.configs.select import choose_config, on_device, override_config
from experts.triton.grouped_w4 import grouped_w4_config
from experts.triton.grouped_w4.grouped_w4_path import GroupedW4Path
from experts.triton.launch_config import Device, gemms
from experts.triton.standard import supported_paths
from modular_kernel.spec.problem import Combine, Machine, Problem
from modular_kernel.testing import Case, prove

_stand_in_gemms = make_gemm_fixture(GroupedW4Path, multiply_w4)


@pytest.mark.share(3)
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu proves it, with its own products")
@pytest.mark.parametrize(
    ("changes", "routing", "group_size"),
    [
        ({}, "uniform", 64),
        ({"quant": "mxfp4_w4a16:repacked=true", "hidden": 1088}, "empty_experts", 3),
        ({"bias": True, "activation": OAI}, "uniform", 3),
        ({"intermediate": 320, "activation": "relu2", "bias": True}, "skips", 3),
        ({"expert_map": True, "local_experts": 3, "experts": 5}, "uniform", 2),
        ({"combine": Combine.TOPK_UNWEIGHTED, "top_k": 3}, "skips", 64),
        ({"tokens": 300, "top_k": 2}, "zipf", 3),
        ({"quant": "int4_w4a16_group:group=32"}, "uniform", 3),
        ({"quant": "int4_w4a16_group:zero_points=true", "activation": OAI}, "uniform", 3),
        ({"quant": "int4_w4a16_group:group=96,zero_points=true"}, "skips", 64),
        ({"quant": "nvfp4_w4a16", "bias": True}, "uniform", 3),
        ({"quant": "nvfp4_w4a16", "activation": OAI}, "skips", 64),
    ],
)
def test_cases_are_proven(
    changes: dict[str, Any],
    routing: str,
    group_size: int,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = replace(MXFP4, **changes)
    monkeypatch.setattr(
        grouped_w4_config, "experts_per_chunk", lambda problem: min(group_size, problem.e)
    )
    with override_config(grouped_w4_config.default_config(problem, 64)):
        assert choose_config(problem, 1, supported_paths(problem)).path == "grouped_w4"
        case = Case("MoEPrepareAndFinalizeNoEP", "TritonExperts", problem, routing)
        proof = prove(case, machine)
    assert proof.passed, str(proof)


@pytest.mark.parametrize(
    ("rows", "block_m"), [(39, 0), (40, 64), (55, 64), (56, 128), (640, 128), (641, 0)]
)
def test_calls_with_some_rows_per_expert_use_the_path(rows: int, block_m: int) -> None:
    problem = replace(MXFP4, experts=6, top_k=3)
    config = make_heuristic_steps(problem, H200).choose(2 * rows)
    assert (config.gemm1.block_m if config.path == "grouped_w4" else 0) == block_m


@pytest.mark.parametrize(
    ("quant", "min_rows"), [("mxfp4_w4a16", 5), ("nvfp4_w4a16", 2), ("int4_w4a16_group", 2)]
)
def test_tiles_for_prepared_weights_have_the_rows_of_an_expert(quant: str, min_rows: int) -> None:
    problem = replace(MXFP4, quant=quant, experts=6, top_k=3)
    steps = make_heuristic_steps(problem, H200, prepared=True)
    for rows, block_m in (
        (min_rows - 1, 0),
        (min_rows, 32),
        (21, 32),
        (22, 64),
        (55, 64),
        (56, 128),
    ):
        config = steps.choose(2 * rows)
        assert (config.gemm1.block_m if config.path == "grouped_w4" else 0) == block_m, rows
        if block_m:
            require_config(config, problem, H200, "heuristics")


@pytest.mark.parametrize(
    ("quant", "rows", "block_m"),
    [
        ("int4_w4a16_group:group=32", 39, 0),
        ("int4_w4a16_group:group=32", 40, 64),
        ("int4_w4a16_group:group=32", 320, 128),
        ("int4_w4a16_group:group=32", 321, 0),
        ("int4_w4a16_group:group=32,zero_points=true", 23, 0),
        ("int4_w4a16_group:group=32,zero_points=true", 24, 64),
        ("nvfp4_w4a16", 40, 64),
        ("nvfp4_w4a16", 128, 128),
        ("nvfp4_w4a16", 129, 0),
    ],
)
def test_int4_and_nvfp4_calls_use_the_path(quant: str, rows: int, block_m: int) -> None:
    problem = replace(MXFP4, experts=6, top_k=3, quant=quant)
    config = make_heuristic_steps(problem, H200).choose(2 * rows)
    assert (config.gemm1.block_m if config.path == "grouped_w4" else 0) == block_m


@pytest.mark.parametrize("experts", [5, 7, 128])
def test_minimum_and_maximum_tokens_of_the_path(experts: int) -> None:
    problem = replace(MXFP4, experts=experts, top_k=3)
    steps = make_heuristic_steps(problem, H200)
    tokens = [t for t in range(700 * experts // 3) if steps.choose(t).path == "grouped_w4"]
    min_tokens, max_tokens = math.ceil(40 * experts / 3), math.floor(640 * experts / 3)
    assert tokens == list(range(min_tokens, max_tokens + 1))
    assert {t: steps.choose(t) for t in tokens} == {
        t: GroupedW4Path.default_config(problem, t, H200) for t in tokens
    }


@pytest.mark.parametrize(
    ("tokens", "path"),
    [(64, "aligned_w4"), (159, "aligned_w4"), (160, "grouped_w4"), (256, "grouped_w4"),
     (384, "grouped_w4"), (1024, "grouped_w4"), (2560, "grouped_w4"), (2561, "dequantized"),
     (8192, "dequantized")],
)  # fmt: skip
def test_tuned_files_of_version_1_do_not_use_the_path(tokens: int, path: str) -> None:
    mixtral = Problem(1, 4096, 14336, 8, 2, quant="mxfp4_w4a16")
    with on_device(H200):
        assert choose_config(mixtral, tokens, supported_paths(mixtral)).path == path


@pytest.mark.parametrize(
    "changes",
    [
        {"quant": "none"},
        {"quant": "int4_w4a16_group:group=48"},
        {"quant": "int4_w4a16_act_order"},
        {"quant": "int8_w8a16_group"},
        {"dtype": torch.float16},
        {"hidden": 152},
        {"intermediate": 104},
        {"apply_router_weight_on_input": True, "top_k": 1},
    ],
)
def test_unsupported_problems_are_refused(changes: dict[str, Any]) -> None:
    assert grouped_w4_config.supports(MXFP4, H200)
    assert not grouped_w4_config.supports(replace(MXFP4, **changes), H200)
    assert not grouped_w4_config.supports(MXFP4, Device("NVIDIA A100"))


def test_tiled_weights_fit_a_bounded_buffer() -> None:
    layer = Problem(
        tokens=1, hidden=2880, intermediate=2880, experts=128, top_k=4, dtype=torch.bfloat16,
        quant="mxfp4_w4a16",
    )  # fmt: skip
    assert grouped_w4_config.experts_per_chunk(layer) == 64
    specs = GroupedW4Path(layer).specs(4096, 128)
    nbytes = specs["tiled_words"].nbytes + specs["tiled_scales"].nbytes
    assert (1 << 28) < nbytes <= 1 << 30
    assert "dequantized" not in specs


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"block_m": 16}, "block_m"),
        ({"block_n": 64}, "block_n"),
        ({"block_k": 128}, "block_k"),
        ({"num_warps": 8}, "num_warps"),
        ({"num_stages": 9}, "bytes of shared memory"),
    ],
)
def test_invalid_launches_are_refused(change: dict[str, int], field: str) -> None:
    config = grouped_w4_config.default_config(MXFP4)
    for gemm, tile in zip(gemms(MXFP4), (config.gemm1, config.gemm2), strict=True):
        assert not list(grouped_w4_config.violations(tile, gemm, MXFP4, H200))
        invalid_tile = replace(tile, **change)
        violations = list(grouped_w4_config.violations(invalid_tile, gemm, MXFP4, H200))
        assert [violation.what for violation in violations] == [field]


def test_tuning_candidates_can_be_launched() -> None:
    problem = replace(MXFP4, tokens=256)
    for block_m, tiles_by_gemm in grouped_w4_config.candidates(problem, 256).items():
        for gemm, tiles in zip(gemms(problem), tiles_by_gemm, strict=True):
            assert tiles
            for tile in tiles:
                assert tile.block_m == block_m
                assert not list(grouped_w4_config.violations(tile, gemm, MXFP4, H200))
    assert len(grouped_w4_config.candidates(problem, 256)) == 2
