"""Calls of one path of an experts part on meta tensors."""

from dataclasses import replace

import torch

from experts.triton.launch_config import MoEConfig
from experts.triton.path import Path, PathCall
from modular_kernel.spec.problem import IdSpace, Problem
from modular_kernel.tensors import DispatchedRouting, StandardTokens
from modular_kernel.testing.compile.report import CompileRecord, record_compiles
from modular_kernel.tuning.compilation import make_meta_inputs
from modular_kernel.workspace import BufferSpec, Workspace

META = torch.device("meta")


class RecordingWorkspace(Workspace):
    """A workspace that records the names of the buffers that `take` returns."""

    def __init__(self, specs: dict[str, BufferSpec], device: torch.device) -> None:
        super().__init__(specs, device)
        self.taken_names = set[str]()

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.taken_names.add(name)
        return super().take(name, shape)


def n_major_like(w_eNK: torch.Tensor) -> torch.Tensor:
    """Return a copy that is contiguous along N."""
    return w_eNK.mT.contiguous().mT


def launches_of(
    path: Path,
    problem: Problem,
    tiles: MoEConfig,
    *,
    target: str = "sm_90",
    x_TH: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    n_major: bool = False,
) -> list[CompileRecord]:
    """Return the launches of a call, compiled for `target`.

    x_TH, scale: quantized tokens, if the dispatch quantizes them. n_major: the weights are
    contiguous along N instead of K.
    """
    unquantized_TH, weights, routing = make_meta_inputs(problem)
    if n_major:
        weights = replace(
            weights, **{name: n_major_like(getattr(weights, name)) for name in ("w1", "w2")}
        )
    dispatched = DispatchedRouting(
        routing.topk_weights_TK,
        routing.topk_ids_TK,
        IdSpace.GLOBAL,
        problem.experts,
        weights.expert_map,
        torch.empty(1, dtype=torch.int32, device=META),
    )
    tokens = StandardTokens(unquantized_TH if x_TH is None else x_TH, dispatched, scale)
    specs = path.specs(problem.tokens, tiles.gemm1.block_m)
    workspace = RecordingWorkspace(specs, META)
    output = torch.empty(problem.output_shape, dtype=problem.dtype, device=META)
    with record_compiles(target) as records:
        path.run(PathCall(tokens, weights, workspace, output, tiles))
    assert workspace.taken_names == set(specs)  # the path uses every buffer that it declares
    return records
