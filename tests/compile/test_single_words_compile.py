"""The single path's launches for 4-bit weights compile for sm_90: wide copies, no spills."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from experts import tile_single
from experts.tile_shapes import SINGLE, Tile, TilePair
from experts.triton_path import PathCall
from experts.triton_single_words import SingleWordsPath
from modular_kernel import ExpertWeights, Problem
from modular_kernel.quant import weight_specs
from modular_kernel.tensors import ContiguousTokens, DispatchedRouting
from modular_kernel.testing.compile import CompileRecord, check, record_compiles
from modular_kernel.types import IdSpace
from modular_kernel.workspace import Workspace

META = torch.device("meta")
MIXTRAL = Problem(tokens=1, hidden=4096, intermediate=14336, experts=8, top_k=2)
QWEN3 = Problem(tokens=4, hidden=2048, intermediate=768, experts=128, top_k=8)
GPT_OSS = Problem(
    tokens=4, hidden=2880, intermediate=2880, experts=128, top_k=4, bias=True,
    activation="swiglu_oai",
)  # fmt: skip
_NAMES = ["mixtral", "qwen3", "gpt-oss"]
ZEROS = "int4_w4a16_group:zero_points=true"


def compiled(problem: Problem, tiles: TilePair | None = None) -> list[CompileRecord]:
    """Both launches of a call, for weights and rows that have no memory."""
    tensors = {
        name: torch.empty(spec.shape, dtype=spec.dtypes[-1], device=META)
        for name, spec in weight_specs(problem).items()
    }
    if problem.bias:
        tensors["b1"] = torch.empty(problem.e, problem.w1_rows, dtype=problem.dtype, device=META)
        tensors["b2"] = torch.empty(problem.e, problem.hidden, dtype=problem.dtype, device=META)
    path, tiles = SingleWordsPath(problem), tiles or tile_single.default(problem)
    workspace = Workspace(path.specs(problem.tokens, tiles.gemm1.block_m), META)
    x = torch.empty(problem.tokens, problem.hidden, dtype=problem.dtype, device=META)
    shape = (problem.tokens, problem.top_k)
    arrived = DispatchedRouting(
        torch.empty(shape, dtype=torch.float32, device=META),
        torch.empty(shape, dtype=torch.int32, device=META),
        IdSpace.GLOBAL,
        problem.experts,
        None,
        torch.empty(1, dtype=torch.int32, device=META),
    )
    output = torch.empty(problem.output_shape, dtype=problem.dtype, device=META)
    call = PathCall(
        ContiguousTokens(x, arrived), ExpertWeights(**tensors), workspace, output, tiles
    )
    with record_compiles("sm_90") as records:
        path.run(call)
    return records


@pytest.mark.parametrize("model", [MIXTRAL, QWEN3, GPT_OSS], ids=_NAMES)
@pytest.mark.parametrize("quant", ["int4_w4a16_group", ZEROS, "mxfp4_w4a16"])
def test_defaults_are_clean(quant: str, model: Problem) -> None:
    _require_clean(compiled(replace(model, quant=quant)))


@pytest.mark.parametrize(
    "change",
    [
        {"quant": "int4_w4a16_group:group=32,zero_points=true"},
        {"quant": "int4_w4a16_group:group=64", "dtype": torch.float16},
        {"quant": "mxfp4_w4a16", "dtype": torch.float16, "activation": "relu2"},
    ],
    ids=str,
)
def test_smaller_groups(change: dict[str, Any]) -> None:
    wide = TilePair(Tile(16, 16, 1024, 1, 4, 2), Tile(16, 32, 256, 8, 8, 2), SINGLE)
    _require_clean(compiled(replace(QWEN3, **change), wide))


def _require_clean(records: list[CompileRecord]) -> None:
    names = ["single_words_up_kernel", "single_words_down_kernel"]
    assert [record.kernel for record in records] == names
    for record in records:
        assert check(record, expect="HMMA") == ()
        assert record.instructions["LDGSTS"] > 0
