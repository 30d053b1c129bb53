"""The kernel of few rows and 4-bit weights: proven in blocks of 8 and of 16 rows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from experts.triton.aligned_w4 import config as aligned_w4_config
from experts.triton.aligned_w4 import path as aligned_w4
from experts.triton.batched import BatchedTritonExperts
from experts.triton.configs.heuristics import regimes
from experts.triton.configs.select import choose_tiles, override_config
from experts.triton.contiguous import TritonExperts
from experts.triton.launch_config import ALIGNED, Device
from modular_kernel.catalog import make_kernel
from modular_kernel.composer import random_inputs
from modular_kernel.quant import quantise_weights
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases.lists import BASE
from modular_kernel.types import Combine, Machine, Problem

_NO_EP = "MoEPrepareAndFinalizeNoEP"
_OAI = "swiglu_oai:alpha=1.702,limit=1.2,interleaved=true"
_INT4 = "int4_w4a16_group"
_REPACKED = "mxfp4_w4a16:repacked=true"
# Widths that are no multiple of a block, depths that are no multiple of a step.
_BASE = replace(BASE, hidden=160, intermediate=96, dtype=torch.bfloat16, quant=_INT4)

_CASES: tuple[tuple[dict[str, Any], str, int], ...] = (
    ({"tokens": 2}, "uniform", 8),
    ({"tokens": 4, "hidden": 256, "intermediate": 256}, "uniform", 8),
    ({"tokens": 5, "quant": f"{_INT4}:zero_points=true", "hidden": 256, "intermediate": 128},
     "skips", 8),
    ({"tokens": 4, "quant": f"{_INT4}:group=64,zero_points=true", "hidden": 192,
      "intermediate": 64, "activation": _OAI, "bias": True}, "duplicates", 8),
    ({"tokens": 6, "quant": f"{_INT4}:group=32", "dtype": torch.float16, "activation": "relu2",
      "bias": True}, "out_of_range", 8),
    ({"tokens": 3, "quant": f"{_INT4}:group=32,zero_points=true", "dtype": torch.float16},
     "uniform", 8),
    ({"tokens": 7, "quant": "mxfp4_w4a16"}, "uniform", 8),
    ({"tokens": 7, "quant": "mxfp4_w4a16", "dtype": torch.float16, "activation": _OAI,
      "bias": True}, "skips", 8),
    ({"tokens": 5, "quant": "mxfp4_w4a16", "combine": Combine.TOPK_WEIGHTED}, "all_skipped", 8),
    ({"tokens": 5, "combine": Combine.TOPK_UNWEIGHTED, "expert_map": True, "local_experts": 3},
     "skips", 8),
    ({"tokens": 4, "top_k": 1, "apply_router_weight_on_input": True, "bias": True}, "uniform", 8),
    ({"tokens": 14, "quant": "mxfp4_w4a16"}, "all_to_one", 8),
    ({"tokens": 19, "quant": f"{_INT4}:zero_points=true"}, "zipf", 16),
    ({"tokens": 21, "quant": "mxfp4_w4a16", "activation": _OAI}, "all_to_one", 16),
    ({"tokens": 7, "quant": _REPACKED}, "uniform", 8),
    ({"tokens": 7, "quant": _REPACKED, "dtype": torch.float16, "activation": _OAI,
      "bias": True}, "skips", 8),
    ({"tokens": 21, "quant": _REPACKED, "hidden": 256, "activation": _OAI}, "all_to_one", 16),
    ({"tokens": 60, "quant": "mxfp4_w4a16", "top_k": 1, "hidden": 64}, "zipf", 16),
    ({"tokens": 4, "quant": "mxfp4_w4a16", "batch_invariant": True}, "uniform", 16),
)  # fmt: skip


@pytest.mark.parametrize(("changes", "routing", "block_m"), _CASES)
def test_proven(
    changes: dict[str, Any],
    routing: str,
    block_m: int,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = set[int]()
    monkeypatch.setattr(aligned_w4, "multiply", _noting(blocks))
    problem = replace(_BASE, **changes)
    case = Case(_NO_EP, "TritonExperts", problem, routing)
    # Few tokens have a path of their own, without this kernel.
    with override_config(regimes(problem, Device(), (ALIGNED,)).choose(problem.tokens)):
        proof = prove(case, machine)
    assert proof.passed, str(proof)
    assert block_m in blocks


def _noting(blocks: set[int]) -> Callable[..., None]:
    multiply = aligned_w4.multiply

    def noting(*args: Any, spread: aligned_w4_config.Spread, **named: Any) -> None:
        blocks.add(spread.block_m)
        multiply(*args, spread=spread, **named)

    return noting


def test_who_is_served() -> None:
    assert aligned_w4_config.serves(_BASE)
    assert aligned_w4_config.serves(replace(_BASE, quant="mxfp4_w4a16", dtype=torch.float16))
    assert aligned_w4_config.serves(replace(_BASE, quant="mxfp4_w4a16", batch_invariant=True))
    for changes in (
        {"batch_invariant": True},
        {"quant": "none"},
        {"quant": "int8_w8a16_group:group=32"},
        {"dtype": torch.float32},
        {"hidden": 176},  # 5.5 products of 32
        {"quant": f"{_INT4}:group=48", "hidden": 192},
    ):
        assert not aligned_w4_config.serves(replace(_BASE, **changes)), changes


def test_weights_off_16_bytes_take_the_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """And compute the same layer."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    problem = replace(_BASE, tokens=3)
    x_TH, plain, routing = random_inputs(replace(problem, quant="none"), device)
    weights = quantise_weights(plain, problem)
    blocks = set[int]()
    monkeypatch.setattr(aligned_w4, "multiply", _noting(blocks))
    expected = make_kernel(_NO_EP, "TritonExperts", problem)(x_TH, weights, routing)
    assert blocks == {8}
    blocks.clear()
    storage = torch.empty(weights.w1.numel() + 1, dtype=torch.uint8, device=device)
    shifted = storage[1:].view_as(weights.w1).copy_(weights.w1)
    moved = replace(weights, w1=shifted)
    found = make_kernel(_NO_EP, "TritonExperts", problem)(x_TH, moved, routing)
    assert not blocks
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)


def test_more_rows_take_taller_blocks() -> None:
    mixtral = Problem(tokens=16, hidden=4096, intermediate=14336, experts=8, top_k=2, quant=_INT4)
    assert aligned_w4_config.block_m(mixtral, pairs=1) == 8
    assert aligned_w4_config.block_m(mixtral, pairs=48) == 8
    assert aligned_w4_config.block_m(mixtral, pairs=49) == 16


def test_experts_that_have_a_row() -> None:
    mixtral = Problem(tokens=16, hidden=4096, intermediate=14336, experts=8, top_k=2, quant=_INT4)
    spread = aligned_w4_config.Spread.of
    assert spread(mixtral, pairs=2).experts == pytest.approx(2)
    assert spread(mixtral, pairs=4).experts == pytest.approx(3.5)
    half = replace(mixtral, expert_map=True, local_experts=4)
    assert spread(half, pairs=4).experts == pytest.approx(1.75)
    assert spread(replace(mixtral, top_k=8), pairs=8).experts == 8


def test_explain_says_what_is_launched() -> None:
    problem = replace(_BASE, tokens=7, hidden=256, intermediate=384)
    tiles = choose_tiles(problem, 7)
    shapes = aligned_w4_config.launched(problem, 7, tiles)
    assert shapes is not None
    text = TritonExperts.tunable(problem).explain(7)
    assert "not launched" in text
    for index, shape in enumerate(shapes, 1):
        assert f"GEMM {index}: block_m=8 {shape}" in text
    assert aligned_w4_config.launched(problem, 70, choose_tiles(problem, 70)) is None
    assert "not launched" not in TritonExperts.tunable(problem).explain(70)
    assert "not launched" not in BatchedTritonExperts.tunable(problem).explain(7)


def test_how_many_rows_it_takes() -> None:
    """Of integers a few; of mxfp4 any, where tiles have at most 32 rows."""
    mixtral = Problem(tokens=1, hidden=4096, intermediate=14336, experts=8, top_k=2, quant=_INT4)
    mxfp4 = replace(mixtral, quant="mxfp4_w4a16")
    low, high = (
        next(pair for pair in regimes(mxfp4, Device(), (ALIGNED,)).pairs if pair.gemm1.block_m == m)
        for m in (32, 128)
    )
    sixteen = regimes(mixtral, Device(), (ALIGNED,)).choose(40)
    assert sixteen.gemm1.block_m == 16
    assert aligned_w4_config.few(mixtral, 12 * 8, sixteen)
    assert not aligned_w4_config.few(mixtral, 12 * 8 + 1, sixteen)
    assert aligned_w4_config.few(mxfp4, 1 << 20, low)
    assert not aligned_w4_config.few(mxfp4, 1, high)


def test_blocks_do_not_depend_on_tokens_where_nothing_may() -> None:
    layer = replace(_BASE, quant="mxfp4_w4a16", batch_invariant=True)
    rows = aligned_w4_config.FewRows.both(layer)
    found = {
        tuple(
            aligned_w4_config.shape(one, aligned_w4_config.Spread.of(layer, pairs)) for one in rows
        )
        for pairs in (1, 4, 64, 4096)
    }
    assert len(found) == 1
    assert {aligned_w4_config.block_m(layer, pairs) for pairs in (1, 4096)} == {16}
