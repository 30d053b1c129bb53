"""The single path for 4-bit weights: proven at few tokens, whatever the regimes would choose."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from experts import tile_single, tile_words
from experts.tile_shapes import SINGLE, Device, Tile, TilePair, gemms, violations
from experts.tiles import choose_tiles, override_config
from experts.triton_experts import TritonExperts
from experts.triton_gemm import words_lie_ready
from modular_kernel.testing import Case, prove
from modular_kernel.testing.cases import BASE
from modular_kernel.types import Combine, Machine, Problem

_NO_EP = "MoEPrepareAndFinalizeNoEP"
_PATHS = ("aligned", SINGLE)
_OAI = "swiglu_oai:alpha=1.702,limit=1.2,interleaved=true"
_INT4 = "int4_w4a16_group"
_ZEROS = "zero_points=true"
# Widths that are no multiple of a block, depths that are no multiple of a step.
_BASE = replace(BASE, hidden=160, intermediate=96, dtype=torch.bfloat16, quant=_INT4)
# Pairs one by one, and by four with two warps for each; parts of 64 to 256.
_ONE = TilePair(Tile(16, 16, 128, 1, 2, 1), Tile(16, 32, 64, 1, 1, 1), SINGLE)
_FOUR = TilePair(Tile(16, 32, 256, 1, 1, 2), Tile(16, 16, 512, 4, 8, 2), SINGLE)

_CASES: tuple[tuple[dict[str, Any], str, TilePair], ...] = (
    ({"tokens": 1}, "uniform", _ONE),
    ({"tokens": 2, "quant": f"{_INT4}:group=32,{_ZEROS}", "top_k": 3}, "duplicates", _FOUR),
    ({"tokens": 1, "quant": f"{_INT4}:group=64,{_ZEROS}", "hidden": 320, "intermediate": 64,
      "activation": _OAI, "bias": True}, "skips", _FOUR),
    ({"tokens": 1, "quant": f"{_INT4}:group=32,{_ZEROS}", "dtype": torch.float16,
      "activation": "relu2", "bias": True, "top_k": 3}, "out_of_range", _FOUR),
    ({"tokens": 2, "quant": "mxfp4_w4a16", "top_k": 3}, "skips", _FOUR),
    ({"tokens": 1, "quant": "mxfp4_w4a16", "dtype": torch.float16, "activation": _OAI,
      "bias": True}, "uniform", _ONE),
    ({"tokens": 2, "quant": "mxfp4_w4a16", "combine": Combine.TOPK_WEIGHTED}, "all_skipped", _ONE),
    ({"tokens": 2, "combine": Combine.TOPK_UNWEIGHTED, "expert_map": True, "local_experts": 3},
     "skips", _FOUR),
    ({"tokens": 1, "apply_router_weight_on_input": True, "bias": True,
      "routed_scaling_factor": 2.5}, "uniform", _FOUR),
)  # fmt: skip


@pytest.mark.parametrize(("changes", "routing", "pair"), _CASES)
def test_proven(changes: dict[str, Any], routing: str, pair: TilePair, machine: Machine) -> None:
    problem = replace(_BASE, **changes)
    with override_config(pair):
        assert choose_tiles(problem, 1, _PATHS) == pair
        proof = prove(Case(_NO_EP, "TritonExperts", problem, routing), machine)
    assert proof.passed, str(proof)


def test_few_tokens_take_it() -> None:
    qwen = Problem(tokens=64, hidden=2048, intermediate=768, experts=128, top_k=8, quant=_INT4)
    mixtral = Problem(tokens=64, hidden=4096, intermediate=14336, experts=8, top_k=2, quant=_INT4)
    for problem, most in ((qwen, 8), (mixtral, 2), (replace(mixtral, quant="mxfp4_w4a16"), 2)):
        assert choose_tiles(problem, most, _PATHS) == tile_single.default(problem)
        assert choose_tiles(problem, most + 1, _PATHS).path == "aligned"
        assert choose_tiles(problem, most).path == "aligned"


def test_who_is_served() -> None:
    assert tile_single.serves(_BASE)
    assert tile_single.serves(replace(_BASE, quant="mxfp4_w4a16", dtype=torch.float16))
    assert tile_single.serves(replace(_BASE, quant=f"{_INT4}:group=96", intermediate=96, hidden=96))
    for changes in (
        {"dtype": torch.float32},
        {"hidden": 176},  # 5.5 copies of 32 values
        {"quant": f"{_INT4}:group=96"},  # which no step of a power of two cuts evenly
    ):
        assert not tile_single.serves(replace(_BASE, **changes)), changes


def test_every_default_and_candidate_can_be_launched() -> None:
    for quant in (_INT4, "mxfp4_w4a16"):
        for depth in (256, 2048, 2880, 7168, 14336):
            problem = Problem(
                tokens=1, hidden=depth, intermediate=depth, experts=8, top_k=2, quant=quant
            )
            pair = tile_single.default(problem)
            for tile, gemm in zip((pair.gemm1, pair.gemm2), gemms(problem), strict=True):
                assert not list(violations(tile, tile_single.unbounded(gemm), Device()))
            space = TritonExperts.tunable(problem)
            tried = [one for one in space.candidates(1) if one.path == SINGLE]
            assert len(tried) > 6, tried


def test_warps_share_pairs_and_depth() -> None:
    tile = Tile(16, 16, 512, 8, 8, 2)
    assert [tile_words.held(tile, slots) for slots in (1, 2, 3, 8, 10)] == [1, 2, 4, 8, 8]
    assert tile_words.held(replace(tile, group_m=3), 8) == 2
    assert [tile_words.part_depth(tile, warps) for warps in (1, 2, 4, 8)] == [256, 256, 128, 64]


def test_weights_off_16_bytes_take_the_other_path() -> None:
    weights = torch.empty(4097, dtype=torch.uint8)
    assert words_lie_ready(weights[:4096].view(2, 32, 64))
    assert not words_lie_ready(weights[1:].view(2, 32, 64))
    assert not words_lie_ready(weights[:4080].view(2, 85, 24))
