"""The permuted path's launches compile for sm_90: TMA, warpgroup products, no spills."""

from dataclasses import replace

import pytest
import torch

from experts import tile_permuted
from experts.tile_shapes import Device, Tile, TilePair
from experts.triton_path import PathCall
from experts.triton_permuted import PermutedPath
from modular_kernel import ExpertWeights, Problem
from modular_kernel.composer import random_inputs
from modular_kernel.ops.quantise import quantise_rows, quantise_specs, take_quantised
from modular_kernel.tensors import ContiguousTokens, DispatchedRouting
from modular_kernel.testing.compile import CompileRecord, check, record_compiles
from modular_kernel.types import IdSpace
from modular_kernel.workspace import Workspace

META = torch.device("meta")
BASE = Problem(tokens=600, hidden=512, intermediate=256, experts=4, top_k=2)
DEVICE = Device("sm_90", boxes=True)


def compiled(problem: Problem, tiles: TilePair) -> list[CompileRecord]:
    """Everything a call launches."""
    assert tile_permuted.serves(problem, DEVICE)
    _, weights, routing = random_inputs(problem, torch.device("cpu"))
    given = {k: None if t is None else t.to(META) for k, t in vars(weights).items()}
    path = PermutedPath(problem)
    specs = dict(path.specs(problem.tokens, tiles.gemm1.block_m))
    if problem.scheme.quantised:
        specs |= quantise_specs("x", problem.scheme, problem.tokens, problem.hidden)
    workspace = Workspace(specs, META)
    x = torch.empty(problem.tokens, problem.hidden, dtype=problem.dtype, device=META)
    with record_compiles("sm_90") as records:
        scale = None
        if problem.scheme.quantised:
            out = take_quantised(workspace, "x", problem.scheme, tuple(x.shape))
            quantise_rows(x, problem.scheme, out=out)
            x, scale = out.q_RK, out.scale
        arrived = DispatchedRouting(
            routing.topk_weights_TK.to(META),
            routing.topk_ids_TK.to(META),
            IdSpace.GLOBAL,
            problem.experts,
            None,
            torch.empty(1, dtype=torch.int32, device=META),
        )
        output = torch.empty(problem.output_shape, dtype=problem.dtype, device=META)
        tokens = ContiguousTokens(x, arrived, scale)
        path.run(PathCall(tokens, ExpertWeights(**given), workspace, output, tiles))
    return records


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": "float16", "bias": True},
        {"activation": "relu2"},
        {"activation": "gelu", "combine": "topk_weighted"},
        {"activation": "gelu_tanh"},
        {"activation": "swiglu_clamp_after:limit=7"},
        {"activation": "swiglu_clamp_before:limit=7"},
        {"activation": "swiglu_oai:alpha=1.702,limit=7,interleaved=true", "bias": True},
        {"quant": "fp8_w8a8_channel"},
        {"quant": "fp8_w8a8_channel", "activation": "relu2", "bias": True},
        {"quant": "fp8_w8a8_block"},
        {"quant": "fp8_w8a8_block", "activation": "relu2"},
    ],
    ids=str,
)
def test_every_launch_is_clean(change: dict[str, object]) -> None:
    problem = replace(BASE, **change)
    quantised = problem.scheme.quantised
    records = compiled(problem, tile_permuted.default(problem))
    products = [r for r in records if r.kernel == "sorted_gemm_kernel"]
    assert len(products) == 2
    for record in records:
        assert check(record) == ()
    for record in products:
        assert check(record, "QGMMA" if quantised else "HGMMA") == ()
        assert record.instructions["UTMALDG"] == 3  # rows, and two halves of weights
        assert record.instructions["LDGSTS"] == 0


def test_a_scale_per_block_has_registers_for_half_a_tile() -> None:
    """Why such tiles are refused: wider ones spill."""
    problem = replace(BASE, quant="fp8_w8a8_block")
    wide = TilePair(Tile(128, 128, 128, 8, 4, 4), Tile(128, 256, 128, 8, 4, 4), "permuted")
    products = [r for r in compiled(problem, wide) if r.kernel == "sorted_gemm_kernel"]
    assert all(record.stack > 0 for record in products)
