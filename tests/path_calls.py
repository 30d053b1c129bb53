"""One path of an experts part, called with tensors that have no memory."""

import torch

from experts.tile_shapes import TilePair
from experts.triton_path import Path, PathCall
from modular_kernel.tensors import ContiguousTokens, DispatchedRouting
from modular_kernel.testing.compile import CompileRecord, record_compiles
from modular_kernel.tuning.compiled import meta_inputs
from modular_kernel.types import IdSpace, Problem
from modular_kernel.workspace import Workspace

META = torch.device("meta")


def launches_of(
    path: Path,
    problem: Problem,
    tiles: TilePair,
    *,
    target: str = "sm_90",
    x_TH: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> list[CompileRecord]:
    """What a call launches, compiled for `target`. x_TH, scale: tokens as they arrive, if not
    unquantised."""
    plain_TH, weights, routing = meta_inputs(problem)
    arrived = DispatchedRouting(
        routing.topk_weights_TK,
        routing.topk_ids_TK,
        IdSpace.GLOBAL,
        problem.experts,
        weights.expert_map,
        torch.empty(1, dtype=torch.int32, device=META),
    )
    tokens = ContiguousTokens(plain_TH if x_TH is None else x_TH, arrived, scale)
    workspace = Workspace(path.specs(problem.tokens, tiles.gemm1.block_m), META)
    output = torch.empty(problem.output_shape, dtype=problem.dtype, device=META)
    with record_compiles(target) as records:
        path.run(PathCall(tokens, weights, workspace, output, tiles))
    return records
