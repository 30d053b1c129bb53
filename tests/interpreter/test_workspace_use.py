"""Every workspace buffer of a path is written and then read, and buffers with disjoint lifetimes
share memory.

In the recorded calls, buffers do not share memory, so that an address identifies the buffer. The
launches that use a buffer are then compared with the declared layout.
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
from modular_kernel.tensors import DispatchedRouting, StandardShape, StandardTokens
from modular_kernel.testing.random_inputs import random_inputs
from modular_kernel.workspace import BufferSpec, Workspace, workspace_bytes
from prepare_finalize.common.tokens import token_specs

CPU = torch.device("cpu")
PREFILL = Problem(tokens=24, hidden=256, intermediate=64, experts=4, top_k=2)
DECODE = replace(PREFILL, tokens=1, experts=16)


@dataclass
class BufferUse:
    """The launches that read and write a buffer, and the end of the accessed bytes."""

    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    end: int = 0

    @property
    def launches(self) -> set[int]:
        return self.reads | self.writes


@dataclass
class RecordedCall:
    """The declared buffers of a call, and the use of each buffer."""

    specs: dict[str, BufferSpec]
    uses: dict[str, BufferUse]
    launches: int

    def lifetime(self, name: str) -> range:
        """Return the range of launches from the first to the last that accesses a buffer."""
        launches = self.uses[name].launches or {0}
        return range(min(launches), max(launches) + 1)

    def peak(self) -> int:
        """Return the maximum over launches of the bytes of live buffers."""
        return max(
            sum(spec.nbytes for name, spec in self.specs.items() if launch in self.lifetime(name))
            for launch in range(1, self.launches + 1)
        )


def record_call(kind: Any, problem: Problem, monkeypatch: pytest.MonkeyPatch) -> RecordedCall:
    """Run one call of a path on the CPU, and record the use of its buffers."""
    path: Path = kind(problem)
    name = getattr(kind, "name", "aligned")  # MGroupedGemms has no name.
    config: MoEConfig = choose_config(problem, problem.tokens, ("aligned", name))
    assert config.path == name
    x_TH, weights, routing = random_inputs(problem, CPU)
    scale = None
    if problem.scheme.quantizes_activations:
        x_workspace = Workspace(quantize_specs("x", problem.scheme, *x_TH.shape), CPU)
        quantized = take_quantized(
            x_workspace, "x", problem.scheme, tuple(x_TH.shape), static_scale=weights.a1_scale
        )
        quantize_rows(x_TH, problem.scheme, out=quantized)
        x_TH, scale = quantized.q_RK, quantized.scale
    specs = path.specs(problem.tokens, config.gemm1.block_m)
    workspace = Workspace({n: replace(s, over=()) for n, s in specs.items()}, CPU)
    address_by_buffer = {n: workspace.take(n, s.shape).data_ptr() for n, s in specs.items()}
    call = RecordedCall(specs, {name: BufferUse() for name in specs}, 0)
    begin = ACCESS_LOG.begin

    def count_launch(*arguments: Any) -> None:
        call.launches += 1
        begin(*arguments)

    def log_access(access: Access, pointers: Any, lanes: Any, nbytes: int, program: int) -> None:
        accessed = np.asarray(pointers)[lanes]
        for name, start in address_by_buffer.items():
            addresses = accessed[(accessed >= start) & (accessed < start + specs[name].nbytes)]
            if addresses.size:
                use = call.uses[name]
                (use.reads if access is Access.READ else use.writes).add(call.launches)
                if access is Access.ATOMIC:
                    use.reads.add(call.launches)
                use.end = max(use.end, int(addresses.max()) + nbytes - start)

    monkeypatch.setattr(ACCESS_LOG, "begin", count_launch)
    monkeypatch.setattr(ACCESS_LOG, "record_access", log_access)
    counter = torch.zeros(1, dtype=torch.int32)
    dispatched = DispatchedRouting(
        routing.topk_weights_TK, routing.topk_ids_TK, IdSpace.GLOBAL, problem.experts, None, counter
    )
    output = torch.empty(problem.output_shape, dtype=problem.dtype)
    tokens = StandardTokens(x_TH, dispatched, scale)
    path.run(PathCall(tokens, weights, workspace, output, config))
    monkeypatch.undo()
    return call


UNREDUCED = {"combine": Combine.TOPK_WEIGHTED}
WEIGHT_ON_INPUT = {"apply_router_weight_on_input": True}
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
    *((kind, PREFILL, change) for kind in (AlignedPath, MGroupedGemms) for change in SCHEMES),
    (AlignedPath, PREFILL, UNREDUCED | {"quant": "fp8_w8a8_channel"}),
    (AlignedW4Path, PREFILL, {"quant": "int4_w4a16_group:group=32"}),
    (MGroupedGemms, PREFILL, UNREDUCED),
    (MGroupedGemms, PREFILL, WEIGHT_ON_INPUT),
    *((GemvPath, DECODE, change) for change in SCHEMES),
    (GemvW4Path, DECODE, {"quant": "mxfp4_w4a16", "intermediate": 256}),
)


def get_class_name(value: Any) -> str | None:
    return value.__name__ if isinstance(value, type) else None


@pytest.mark.parametrize(("kind", "problem", "change"), CALLS, ids=get_class_name)
def test_declared_buffers_are_used_and_share_memory(
    kind: Any, problem: Problem, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = record_call(kind, replace(problem, **change), monkeypatch)
    assert_buffers_are_used(call)
    assert_memory_is_shared(call)


def assert_buffers_are_used(call: RecordedCall) -> None:
    """Check that every buffer is accessed up to its end, and is written before it is read."""
    for name, spec in call.specs.items():
        use = call.uses[name]
        if spec.dtype is torch.int32:  # A path need not use every index table.
            assert spec.nbytes < 1000
            continue
        assert use.writes, name
        assert use.reads, name
        assert min(use.writes) < min(use.reads), name
        if not name.endswith("partials"):
            assert use.end == spec.nbytes, name


def assert_memory_is_shared(call: RecordedCall) -> None:
    """Check that sharing buffers have disjoint lifetimes, and that the workspace is no larger than
    the live buffers require.
    """
    for name, spec in call.specs.items():
        for other in spec.over:
            if other in call.specs:
                assert call.lifetime(other).stop <= call.lifetime(name).start, (name, other)
    index_table_bytes = sum(s.nbytes for s in call.specs.values() if s.dtype is torch.int32)
    padding = 256 * len(call.specs)
    partials = call.specs.get("h_partials", BufferSpec((0,), torch.float32)).nbytes
    assert workspace_bytes(call.specs) <= call.peak() + index_table_bytes + partials + padding


def test_buffers_of_a_deepseek_prefill_share_memory() -> None:
    """In the layer of DeepSeek-V3, the results of GEMM 2 share memory with permuted rows and the
    results of GEMM 1.
    """
    problem = Problem(4096, 7168, 2048, 256, 8, quant="fp8_w8a8_block")
    machine = Machine("cuda", (9, 0), frozenset({"triton"}), name="NVIDIA H100")
    with TritonExperts.described(machine):
        shapes = TritonExperts(problem).workspace_shapes(StandardShape(4096, 8))
    tokens_specs = token_specs(problem, 4096)
    assert "permuted_x" in shapes.extra
    assert workspace_bytes({**tokens_specs, **shapes.buffers()}) < 605e6
