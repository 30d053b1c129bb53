"""What a path declares is used, written before it is read, and is no more than lives at once: every
buffer is followed through the launches of a call.

Each buffer has memory of its own here, so that an address tells which one it is; what the layout
puts into one place is then held against when each was used.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from experts import TritonExperts
from experts.triton.aligned.aligned_path import AlignedPath
from experts.triton.aligned_w4.aligned_w4_path import AlignedW4Path
from experts.triton.configs.select import choose_config
from experts.triton.gemv.gemv_path import GemvPath
from experts.triton.gemv_w4.gemv_w4_path import GemvW4Path
from experts.triton.grouped.segments import MGroupedGemms
from experts.triton.launch_config import MoEConfig
from experts.triton.path import Path, PathCall
from modular_kernel.interpreter.access_log import ACCESS_LOG
from modular_kernel.interpreter.races import Access
from modular_kernel.ops.quantize import quantize_rows, quantize_specs, take_quantized
from modular_kernel.spec.problem import Combine, IdSpace, Machine, Problem
from modular_kernel.tensors import ContiguousShape, ContiguousTokens, DispatchedRouting
from modular_kernel.testing.random_inputs import random_inputs
from modular_kernel.workspace import BufferSpec, Workspace, workspace_bytes
from prepare_finalize.common.tokens import token_specs

CPU = torch.device("cpu")
MANY = Problem(tokens=24, hidden=256, intermediate=64, experts=4, top_k=2)
FEW = replace(MANY, tokens=1, experts=16)


@dataclass
class Use:
    """Use of one buffer: the launches that access it, by number, and the bytes accessed."""

    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    end: int = 0

    @property
    def launches(self) -> set[int]:
        return self.reads | self.writes


@dataclass
class Followed:
    """A call: the buffers that it declares, and the use of each."""

    specs: dict[str, BufferSpec]
    uses: dict[str, Use]
    launches: int

    def living(self, name: str) -> range:
        """Return the launches from the first to the last that access a buffer."""
        at = self.uses[name].launches or {0}
        return range(min(at), max(at) + 1)

    def peak(self) -> int:
        """Maximum over launches of the bytes of live buffers."""
        return max(
            sum(spec.nbytes for name, spec in self.specs.items() if at in self.living(name))
            for at in range(1, self.launches + 1)
        )


def follow(kind: Any, problem: Problem, monkeypatch: pytest.MonkeyPatch) -> Followed:
    """Run one call of a path, and record the use of its buffers."""
    path: Path = kind(problem)
    name = getattr(kind, "name", "aligned")  # products over segments are of no path
    tiles: MoEConfig = choose_config(problem, problem.tokens, ("aligned", name))
    assert tiles.path == name
    x_TH, weights, routing = random_inputs(problem, CPU)
    scale = None
    if problem.scheme.quantizes_activations:
        given = Workspace(quantize_specs("x", problem.scheme, *x_TH.shape), CPU)
        quantized = take_quantized(
            given, "x", problem.scheme, tuple(x_TH.shape), static_scale=weights.a1_scale
        )
        quantize_rows(x_TH, problem.scheme, out=quantized)
        x_TH, scale = quantized.q_RK, quantized.scale
    specs = path.specs(problem.tokens, tiles.gemm1.block_m)
    workspace = Workspace({n: replace(s, over=()) for n, s in specs.items()}, CPU)
    spans = {n: workspace.take(n, s.shape).data_ptr() for n, s in specs.items()}
    found = Followed(specs, {name: Use() for name in specs}, 0)
    begin = ACCESS_LOG.begin

    def begun(*given: Any) -> None:
        found.launches += 1
        begin(*given)

    def touched(access: Access, pointers: Any, lanes: Any, nbytes: int, program: int) -> None:
        at = np.asarray(pointers)[lanes]
        for name, start in spans.items():
            inside = at[(at >= start) & (at < start + specs[name].nbytes)]
            if inside.size:
                use = found.uses[name]
                (use.reads if access is Access.READ else use.writes).add(found.launches)
                if access is Access.ATOMIC:
                    use.reads.add(found.launches)
                use.end = max(use.end, int(inside.max()) + nbytes - start)

    monkeypatch.setattr(ACCESS_LOG, "begin", begun)
    monkeypatch.setattr(ACCESS_LOG, "record_access", touched)
    counter = torch.zeros(1, dtype=torch.int32)
    arrived = DispatchedRouting(
        routing.topk_weights_TK, routing.topk_ids_TK, IdSpace.GLOBAL, problem.experts, None, counter
    )
    output = torch.empty(problem.output_shape, dtype=problem.dtype)
    tokens = ContiguousTokens(x_TH, arrived, scale)
    path.run(PathCall(tokens, weights, workspace, output, tiles))
    monkeypatch.undo()
    return found


KEPT, ON_INPUT = {"combine": Combine.TOPK_WEIGHTED}, {"apply_router_weight_on_input": True}
SCHEMES: tuple[dict[str, Any], ...] = (
    {},
    {"quant": "fp8_w8a8_tensor"},
    {"quant": "fp8_w8a8_tensor:static=true"},
    {"quant": "fp8_w8a8_channel"},
    {"quant": "fp8_w8a8_block:block=32x32"},
    {"quant": "int8_w8a8_channel"},
    {"quant": "int8_w8a16_channel"},
)
CALLS = (
    *((kind, MANY, change) for kind in (AlignedPath, MGroupedGemms) for change in SCHEMES),
    (AlignedPath, MANY, KEPT | {"quant": "fp8_w8a8_channel"}),
    (AlignedW4Path, MANY, {"quant": "int4_w4a16_group:group=32"}),
    (MGroupedGemms, MANY, KEPT),
    (MGroupedGemms, MANY, ON_INPUT),
    *((GemvPath, FEW, change) for change in SCHEMES),
    (GemvW4Path, FEW, {"quant": "mxfp4_w4a16", "intermediate": 256}),
)


def named(value: Any) -> str | None:
    return value.__name__ if isinstance(value, type) else None


@pytest.mark.parametrize(("kind", "problem", "change"), CALLS, ids=named)
def test_declared_buffers_are_used_and_share_memory(
    kind: Any, problem: Problem, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = follow(kind, replace(problem, **change), monkeypatch)
    assert_used(found)
    assert_no_more_than_lives(found)


def assert_used(found: Followed) -> None:
    """Every byte of a buffer is written and then read."""
    for name, spec in found.specs.items():
        use = found.uses[name]
        if spec.dtype is torch.int32:  # words that say where pairs are: some for other steps
            assert spec.nbytes < 1000
            continue
        assert use.writes, name
        assert use.reads, name
        assert min(use.writes) < min(use.reads), name
        if not name.endswith("partials"):
            assert use.end == spec.nbytes, name


def assert_no_more_than_lives(found: Followed) -> None:
    """Buffers that share memory are never live together, and memory is shared where possible."""
    for name, spec in found.specs.items():
        for other in spec.over:
            if other in found.specs:
                assert found.living(other).stop <= found.living(name).start, (name, other)
    unused = sum(s.nbytes for s in found.specs.values() if s.dtype is torch.int32)
    padding = 256 * len(found.specs)
    partials = found.specs.get("h_partials", BufferSpec((0,), torch.float32)).nbytes
    assert workspace_bytes(found.specs) <= found.peak() + unused + partials + padding


def test_workspace_of_a_prefill() -> None:
    """DeepSeek-V3's layer, fp8 by blocks, 4096 tokens on an H100: rows in the order of experts are
    where GEMM 2 writes later, and so are GEMM 1's results."""
    problem = Problem(4096, 7168, 2048, 256, 8, quant="fp8_w8a8_block")
    machine = Machine("cuda", (9, 0), frozenset({"triton"}), name="NVIDIA H100")
    with TritonExperts.described(machine):
        shapes = TritonExperts(problem).workspace_shapes(ContiguousShape(4096, 8))
    own = token_specs(problem, 4096)
    assert "permuted_x" in shapes.extra
    assert workspace_bytes({**own, **shapes.buffers()}) < 605e6
