"""The `dequantized` path without a GPU: kernels are interpreted, and torch stands in for its GEMMs.

tests/gpu/test_dequantized_on_gpu.py verifies the GEMMs.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from grouped_gemm_stand_in import H200, OAI, make_gemm_fixture, multiply_tiles

from experts.triton.configs.heuristics import make_heuristic_steps
from experts.triton.configs.select import choose_config, override_config
from experts.triton.dequantized import dequantized_config
from experts.triton.dequantized.dequantized_path import DequantizedPath
from experts.triton.grouped.base import GemmRows
from experts.triton.grouped_tma.grouped_tma_path import GroupedTmaPath
from experts.triton.launch_config import Device, LaunchConfig, gemms
from experts.triton.operands import GemmOperands
from modular_kernel import Problem
from modular_kernel.ops.activation import activation_constants
from modular_kernel.ops.sort import SortedPairs
from modular_kernel.spec.problem import Combine, Machine
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases.lists import BASE
from modular_kernel.testing.random_inputs import random_inputs

_NO_EP = "MoEPrepareAndFinalizeNoEP"
_INT4, _MXFP4, _INT8 = "int4_w4a16_group", "mxfp4_w4a16", "int8_w8a16_group"
_BASE = replace(
    BASE, tokens=19, hidden=160, intermediate=96, dtype=torch.bfloat16, quant=f"{_INT4}:group=32"
)


def _multiply(
    self: GroupedTmaPath,
    rows: GemmRows,
    product: GemmOperands,
    tile: LaunchConfig,
    order: SortedPairs,
    out: torch.Tensor,
) -> None:
    depth = product.w.shape[2]
    spec = self.problem.act if product.constants["GATED"] or depth == self.problem.hidden else None
    if (
        spec is not None
        and activation_constants(spec)["ACTIVATION"] != product.constants["ACTIVATION"]
    ):
        spec = None  # GEMM 2 of a layer with H = I
    multiply_tiles(rows, product.w.__getitem__, product.bias, spec, tile, order, out)


_stand_in_gemms = make_gemm_fixture(GroupedTmaPath, _multiply)
_CASES: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "uniform"),
    ({"quant": f"{_INT4}:group=32,zero_points=true"}, "skips"),
    ({"quant": f"{_INT4}:zero_points=true", "activation": OAI, "bias": True}, "zipf"),
    ({"quant": f"{_INT4}:group=96", "hidden": 416, "activation": "relu2"}, "empty_experts"),
    ({"quant": _MXFP4, "bias": True, "activation": OAI}, "uniform"),
    ({"quant": _MXFP4, "hidden": 200, "intermediate": 72}, "skips"),
    ({"quant": f"{_MXFP4}:repacked=true", "hidden": 1096}, "empty_experts"),
    ({"quant": f"{_INT8}:group=64,zero_points=true"}, "duplicates"),
    ({"quant": f"{_INT8}:group=32", "hidden": 200}, "zipf"),
    ({"quant": "int8_w8a16_channel", "bias": True}, "uniform"),
    ({"quant": "fp8_w8a16_tensor"}, "skips"),
    ({"quant": "nvfp4_w4a16", "bias": True, "activation": OAI}, "uniform"),
    ({"quant": "nvfp4_w4a16", "hidden": 200}, "zipf"),
    ({"quant": "fp8_w8a16_channel", "activation": "relu2"}, "uniform"),
    ({"quant": "fp8_w8a16_block:block=48x64", "hidden": 200, "activation": OAI}, "uniform"),
    ({"expert_map": True, "local_experts": 3, "experts": 5}, "uniform"),
    ({"combine": Combine.TOPK_UNWEIGHTED, "top_k": 3}, "skips"),
    ({"chunk_tokens": 7, "routed_scaling_factor": 2.5}, "uniform"),
    ({"tokens": 300, "top_k": 2}, "zipf"),
)


@pytest.mark.share(6)
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu proves it, with its own products")
@pytest.mark.parametrize(
    ("changes", "routing", "group_size"),
    [(*case, 3) for case in _CASES] + [(*case, 64) for case in _CASES[:2]],
)
def test_cases_are_proven(
    changes: dict[str, Any],
    routing: str,
    group_size: int,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Experts are dequantized in groups of three, of which the last can be smaller, or at once."""
    problem = replace(_BASE, **changes)
    monkeypatch.setattr(
        dequantized_config, "experts_per_chunk", lambda problem: min(group_size, problem.e)
    )
    with override_config(dequantized_config.default_config(problem)):
        assert choose_config(problem, 1, ("aligned", "dequantized")).path == "dequantized"
        proof = prove(Case(_NO_EP, "TritonExperts", problem, routing), machine)
    assert proof.passed, str(proof)


def test_experts_are_split_into_equal_groups_that_fit_a_bounded_buffer() -> None:
    mixtral = Problem(tokens=1, hidden=4096, intermediate=14336, experts=8, top_k=2, quant=_INT4)
    assert dequantized_config.experts_per_chunk(mixtral) == 4
    assert dequantized_config.values_per_chunk(mixtral) == 4 * 28672 * 4096
    qwen3 = replace(mixtral, hidden=2048, intermediate=768, experts=128, top_k=8)
    assert dequantized_config.experts_per_chunk(qwen3) == 128
    wide = replace(mixtral, intermediate=1 << 17)
    assert dequantized_config.experts_per_chunk(wide) == 1
    specs = DequantizedPath(mixtral).specs(4096, 128)
    assert specs["dequantized"].nbytes <= 1 << 30
    assert "dequantized_tiles" in specs
    assert "dequantized_tiles" not in DequantizedPath(qwen3).specs(4096, 128)


@pytest.mark.parametrize(
    "changes",
    [
        {"quant": None},
        {"quant": "fp8_w8a8_block"},
        {"dtype": torch.float16},
        {"dtype": torch.float32},
        {"hidden": 156},
        {"apply_router_weight_on_input": True, "top_k": 1},
    ],
)
def test_unsupported_problems_are_refused(changes: dict[str, Any]) -> None:
    fields = {key: "none" if value is None else value for key, value in changes.items()}
    assert dequantized_config.supports(_BASE, H200)
    assert not dequantized_config.supports(replace(_BASE, **fields), H200)


def test_unsupported_gpus_are_refused() -> None:
    assert not dequantized_config.supports(_BASE, Device("NVIDIA A100"))


def test_weights_in_other_layouts_take_another_path() -> None:
    problem = replace(_BASE, quant=f"{_INT4}:group=32,zero_points=true")
    x_TH, weights, _ = random_inputs(problem, torch.device("cpu"))
    path = DequantizedPath(problem)
    assert path.supports_tensors(weights, x_TH)
    for name in ("w1", "w2", "w1_scale", "w2_zero_point"):
        tensor = getattr(weights, name)
        strided = torch.empty(2 * tensor.shape[0], *tensor.shape[1:], dtype=tensor.dtype)[::2]
        assert not path.supports_tensors(replace(weights, **{name: strided}), x_TH), name


@pytest.mark.parametrize("quant", [_INT4, _MXFP4, f"{_MXFP4}:repacked=true", "int8_w8a16_channel"])
def test_heuristics_use_the_path_for_many_rows_per_expert(quant: str) -> None:
    layer = Problem(tokens=1, hidden=4096, intermediate=14336, experts=8, top_k=2, quant=quant)
    min_tokens = dequantized_config.min_rows(layer) * 8 // 2
    steps = make_heuristic_steps(layer, H200, ("aligned", "dequantized"))
    assert steps.choose(min_tokens - 1).path != "dequantized"
    config = steps.choose(min_tokens)
    assert config == dequantized_config.default_config(layer)
    for tile, gemm in zip((config.gemm1, config.gemm2), gemms(layer), strict=True):
        assert not list(dequantized_config.violations(tile, gemm, layer, H200))
        invalid_tile = replace(tile, block_k=32)
        (violation,) = dequantized_config.violations(invalid_tile, gemm, layer, H200)
        assert "dequantized" in violation.need
