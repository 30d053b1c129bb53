"""The streamed path's launches compile for sm_90: TMA, warpgroup products of few columns."""

from dataclasses import replace

import pytest
import torch

from experts import tile_streamed
from experts.tile_shapes import Device
from experts.triton_path import PathCall
from experts.triton_streamed import StreamedPath
from modular_kernel import ExpertWeights, Problem
from modular_kernel.quant import weight_specs
from modular_kernel.tensors import ContiguousTokens, DispatchedRouting
from modular_kernel.testing.compile import CompileRecord, check, record_compiles
from modular_kernel.types import IdSpace
from modular_kernel.workspace import Workspace

META = torch.device("meta")
DEVICE = Device("sm_90", boxes=True)
BASE = Problem(
    tokens=1, hidden=2048, intermediate=768, experts=128, top_k=8, dtype=torch.bfloat16,
    quant="fp8_w8a8_channel",
)  # fmt: skip


def compiled(problem: Problem, *, given: bool = False) -> list[CompileRecord]:
    """Everything a call launches."""
    assert tile_streamed.serves(problem, DEVICE)
    fields = {
        name: torch.empty(spec.shape, dtype=spec.dtypes[0], device=META)
        for name, spec in weight_specs(problem).items()
    }
    if problem.bias:
        sizes = {"b1": problem.w1_rows, "b2": problem.hidden}
        fields |= {
            name: torch.empty(problem.e, size, dtype=problem.dtype, device=META)
            for name, size in sizes.items()
        }
    path, shape = StreamedPath(problem), (problem.tokens, problem.top_k)
    arrived = DispatchedRouting(
        torch.empty(shape, device=META),
        torch.empty(shape, dtype=torch.int64, device=META),
        IdSpace.GLOBAL,
        problem.experts,
        torch.empty(problem.experts, dtype=torch.int32, device=META)
        if problem.expert_map
        else None,
        torch.empty(1, dtype=torch.int32, device=META),
    )
    stored = torch.float8_e4m3fn if given else problem.dtype
    x = torch.empty(problem.tokens, problem.hidden, dtype=stored, device=META)
    groups = -(-problem.hidden // 128) if problem.scheme.granularity == "block" else 1
    scale = torch.empty(problem.tokens, groups, device=META) if given else None
    workspace = Workspace(path.specs(problem.tokens, 16), META)
    output = torch.empty(problem.output_shape, dtype=problem.dtype, device=META)
    tiles = tile_streamed.default(problem, DEVICE)
    tokens = ContiguousTokens(x, arrived, scale)
    with record_compiles("sm_90") as records:
        path.run(PathCall(tokens, ExpertWeights(**fields), workspace, output, tiles))
    return records


@pytest.mark.parametrize("quant", ["fp8_w8a8_channel", "fp8_w8a8_block"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tokens": 3},
        {"tokens": 9, "top_k": 6, "expert_map": True},
        {"given": True, "tokens": 2},
        {"hidden": 7168, "intermediate": 2048, "experts": 32},
        {"hidden": 4096, "intermediate": 3584, "experts": 8, "top_k": 2, "dtype": torch.float16},
        {"hidden": 2880, "intermediate": 2880, "top_k": 4, "bias": True,
         "activation": "swiglu_oai:alpha=1.702,limit=7,interleaved=true"},
    ],
    ids=str,
)  # fmt: skip
def test_every_launch_is_clean(quant: str, change: dict[str, object]) -> None:
    fields = {name: value for name, value in change.items() if name != "given"}
    problem = replace(BASE, quant=quant, **fields)
    records = compiled(problem, given="given" in change)
    assert [r.kernel for r in records] == ["streamed_up_kernel", "streamed_down_kernel"]
    for record in records:
        assert check(record, "QGMMA") == ()
        assert record.instructions["UTMALDG"] > 0
        assert record.instructions["FFMA"] < 200  # weights never meet a plain multiplication
