"""The path of weights in registers without a GPU: its launches, interpreted, but the product.

A torch stand-in multiplies by the tiled weights. tests/gpu/test_grouped_w4_on_gpu.py proves the
kernel; how it unpacks is run in tests/test_grouped_w4_unpack.py.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from experts.triton.configs.heuristics import heuristics
from experts.triton.configs.select import choose_config, on_device, override_config
from experts.triton.contiguous import paths_of
from experts.triton.grouped.base import Rows
from experts.triton.grouped_w4 import config as grouped_w4_config
from experts.triton.grouped_w4.layout import Tiled, rows_of_tiles, untiled
from experts.triton.grouped_w4.path import GroupedW4Path
from experts.triton.launch_config import Device, LaunchConfig, gemms
from experts.triton.operands import Product
from modular_kernel.ops.activation import activation_constants
from modular_kernel.ops.sort import Sorted
from modular_kernel.reference import activation
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases.lists import BASE
from modular_kernel.types import Combine, Machine, Problem

H200 = Device("NVIDIA H200", tma=True)
_OAI = "swiglu_oai:alpha=1.702,limit=1.2,interleaved=true"
_BASE = replace(
    BASE, tokens=19, hidden=160, intermediate=96, dtype=torch.bfloat16, quant="mxfp4_w4a16"
)


def _multiply(
    self: GroupedW4Path,
    rows: Rows,
    product: Product,
    tile: LaunchConfig,
    order: Sorted,
    out: torch.Tensor,
) -> None:
    """The grouped GEMM's product in float32, tile by tile as the kernel finds them."""
    assert product.scale is not None
    assert rows.tokens is None
    gated, depth = bool(product.constants["GATED"]), rows.values.shape[1]
    tiled = Tiled(product.w, product.scale)
    taken = rows_of_tiles(product.columns, product.step, product.up_row, gated=gated).flatten()
    there = (taken >= 0).nonzero()[:, 0]
    spec = None if product.constants["KIND"] == "identity" else self.problem.act
    assert spec is None or activation_constants(spec)["KIND"] == product.constants["KIND"]
    max_tiles = order.max_tiles
    for i in range(int(order.tiles[-1])):
        expert, first, end = (int(order.tiles[j * max_tiles + i]) for j in range(3))
        one = Tiled(*(part[expert : expert + 1] for part in tiled))
        w = torch.empty(len(there), depth)
        w[taken[there]] = untiled(one)[0, there, :depth]
        at = slice(first, min(first + tile.block_m, end))
        value = rows.values[at].float() @ w.T
        if product.bias is not None:
            value = value + product.bias[expert].float()
        out[at] = (value if spec is None else activation(value, spec)).to(out.dtype)


@pytest.fixture(autouse=True)
def _there_are_boxes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(GroupedW4Path, "multiply", _multiply)
    with on_device(H200):
        yield


@pytest.mark.share(3)
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu proves it, with its own products")
@pytest.mark.parametrize(
    ("changes", "routing", "at_once"),
    [
        ({}, "uniform", 64),
        ({"quant": "mxfp4_w4a16:repacked=true", "hidden": 1088}, "empty_experts", 3),
        ({"bias": True, "activation": _OAI}, "uniform", 3),
        ({"intermediate": 320, "activation": "relu2", "bias": True}, "skips", 3),
        ({"expert_map": True, "local_experts": 3, "experts": 5}, "uniform", 2),
        ({"combine": Combine.TOPK_UNWEIGHTED, "top_k": 3}, "skips", 64),
        ({"tokens": 300, "top_k": 2}, "zipf", 3),
    ],
)
def test_proven(
    changes: dict[str, Any],
    routing: str,
    at_once: int,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = replace(_BASE, **changes)
    monkeypatch.setattr(
        grouped_w4_config, "experts_at_once", lambda problem: min(at_once, problem.e)
    )
    with override_config(grouped_w4_config.default(problem, 64)):
        assert choose_config(problem, 1, paths_of(problem)).path == "grouped_w4"
        case = Case("MoEPrepareAndFinalizeNoEP", "TritonExperts", problem, routing)
        proof = prove(case, machine)
    assert proof.passed, str(proof)


@pytest.mark.parametrize(
    ("rows", "taken"), [(39, 0), (40, 64), (55, 64), (56, 128), (640, 128), (641, 0)]
)
def test_calls_of_some_rows_an_expert_take_it(rows: int, taken: int) -> None:
    problem = replace(_BASE, experts=6, top_k=3)
    config = heuristics(problem, H200).choose(2 * rows)
    assert (config.gemm1.block_m if config.path == "grouped_w4" else 0) == taken


@pytest.mark.parametrize("experts", [5, 7, 128])
def test_the_first_and_last_number_of_tokens(experts: int) -> None:
    problem = replace(_BASE, experts=experts, top_k=3)
    steps = heuristics(problem, H200)
    taken = [t for t in range(700 * experts // 3) if steps.choose(t).path == "grouped_w4"]
    rows = (40 * experts / 3, 640 * experts / 3)
    assert taken == list(range(math.ceil(rows[0]), math.floor(rows[1]) + 1))
    assert {t: steps.choose(t) for t in taken} == {
        t: GroupedW4Path.default_config(problem, t, H200) for t in taken
    }


@pytest.mark.parametrize(
    ("tokens", "path"),
    [(64, "aligned_w4"), (159, "aligned_w4"), (160, "grouped_w4"), (256, "grouped_w4"),
     (384, "grouped_w4"), (1024, "grouped_w4"), (2560, "grouped_w4"), (2561, "dequantised"),
     (8192, "dequantised")],
)  # fmt: skip
def test_files_of_version_1_came_before_it(tokens: int, path: str) -> None:
    mixtral = Problem(1, 4096, 14336, 8, 2, quant="mxfp4_w4a16")
    with on_device(H200):
        assert choose_config(mixtral, tokens, paths_of(mixtral)).path == path


@pytest.mark.parametrize(
    "changes",
    [
        {"quant": "none"},
        {"quant": "int4_w4a16_group:group=32"},
        {"quant": "nvfp4_w4a16"},
        {"dtype": torch.float16},
        {"hidden": 152},
        {"intermediate": 104},
        {"apply_router_weight_on_input": True, "top_k": 1},
    ],
)
def test_it_does_not_serve(changes: dict[str, Any]) -> None:
    assert grouped_w4_config.serves(_BASE, H200)
    assert not grouped_w4_config.serves(replace(_BASE, **changes), H200)
    assert not grouped_w4_config.serves(_BASE, Device("NVIDIA A100"))


def test_weights_in_order_are_a_bounded_buffer() -> None:
    layer = Problem(
        tokens=1, hidden=2880, intermediate=2880, experts=128, top_k=4, dtype=torch.bfloat16,
        quant="mxfp4_w4a16",
    )  # fmt: skip
    assert grouped_w4_config.experts_at_once(layer) == 64
    specs = GroupedW4Path(layer).specs(4096, 128)
    held = specs["tiled_words"].nbytes + specs["tiled_scales"].nbytes
    assert (1 << 28) < held <= 1 << 30
    assert "dequantised" not in specs


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"block_m": 32}, "block_m"),
        ({"block_n": 64}, "block_n"),
        ({"block_k": 128}, "block_k"),
        ({"num_warps": 8}, "num_warps"),
        ({"num_stages": 9}, "bytes of shared memory"),
    ],
)
def test_other_launches_are_refused(change: dict[str, int], field: str) -> None:
    pair = grouped_w4_config.default(_BASE)
    for gemm, tile in zip(gemms(_BASE), (pair.gemm1, pair.gemm2), strict=True):
        assert not list(grouped_w4_config.violations(tile, gemm, H200))
        other = replace(tile, **change)
        found = list(grouped_w4_config.violations(other, gemm, H200))
        assert [violation.what for violation in found] == [field]


def test_launches_worth_timing_can_be_launched() -> None:
    problem = replace(_BASE, tokens=256)
    for block_m, pair in grouped_w4_config.candidates(problem, 256).items():
        for gemm, tiles in zip(gemms(problem), pair, strict=True):
            assert tiles
            for tile in tiles:
                assert tile.block_m == block_m
                assert not list(grouped_w4_config.violations(tile, gemm, H200))
    assert len(grouped_w4_config.candidates(problem, 256)) == 2
