"""A call allocates exactly the memory that its parts declare, on a CPU with interpreted kernels."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from experts import GroupedGemmExperts, TritonExperts
from modular_kernel.catalog import make_kernel
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.plan import held_bytes
from modular_kernel.spec.problem import Combine, Machine, Problem
from modular_kernel.tensors import StandardShape
from modular_kernel.testing.random_inputs import random_inputs
from modular_kernel.workspace import workspace_bytes
from prepare_finalize.common.tokens import token_specs

CPU = torch.device("cpu")
NO_EP, BATCHED = "MoEPrepareAndFinalizeNoEP", "BatchedPrepareAndFinalize"
PROBLEM = Problem(tokens=12, hidden=64, intermediate=32, experts=3, top_k=2)


@pytest.fixture(autouse=True)
def hide_interpreter_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable dispatch modes during launches, so that AllocationRecorder does not record the
    interpreter's allocations.
    """
    interpret = GridExecutor.__call__

    def interpret_without_modes(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return interpret(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", interpret_without_modes)


class AllocationRecorder(TorchDispatchMode):
    """Records the sizes of all allocations by operations, in bytes.

    `alive` is the number of tensors that still exist.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {_data_ptr(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.numel()
                and _data_ptr(tensor) not in inputs
            ):
                self.sizes.append(tensor.untyped_storage().nbytes())
                self._tensors.append(weakref.ref(tensor))
        return result

    @property
    def alive(self) -> int:
        gc.collect()
        return sum(ref() is not None for ref in self._tensors)


def _data_ptr(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


CALLS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (NO_EP, "TritonExperts", {}),
    (NO_EP, "TritonExperts", {"tokens": 1}),
    (NO_EP, "TritonExperts", {"quant": "fp8_w8a8_block:block=32x32"}),
    (NO_EP, "TritonExperts", {"quant": "fp8_w8a8_tensor"}),
    (NO_EP, "TritonExperts", {"quant": "int4_w4a16_group:group=32"}),
    (NO_EP, "TritonExperts", {"chunk_tokens": 7}),
    (NO_EP, "TritonExperts", {"combine": Combine.TOPK_WEIGHTED}),
    (NO_EP, "TritonExperts", {"inplace": True}),
    (NO_EP, "GroupedGemmExperts", {"quant": "fp8_w8a8_channel"}),
    (NO_EP, "GroupedGemmExperts", {"apply_router_weight_on_input": True}),
    (BATCHED, "BatchedTritonExperts", {}),
    (BATCHED, "BatchedTritonExperts", {"quant": "fp8_w8a8_block:block=32x32"}),
)


@pytest.mark.cpu
@pytest.mark.share(6)
@pytest.mark.parametrize(("pf", "experts", "change"), CALLS, ids=str)
def test_a_call_allocates_its_declared_workspace_and_output(
    pf: str, experts: str, change: dict[str, Any]
) -> None:
    problem = replace(PROBLEM, **change)
    kernel = make_kernel(pf, experts, problem)
    x_TH, weights, routing = random_inputs(problem, CPU)
    output_bytes = 0 if problem.inplace else x_TH.new_empty(problem.output_shape).nbytes
    kernel(x_TH.clone(), weights, routing)  # reserves the workspace that calls share
    declared_bytes = workspace_bytes(kernel.workspace_specs(problem.tokens))
    for _ in range(2):
        with AllocationRecorder() as recorder:
            kernel(x_TH, weights, routing)
        assert recorder.sizes == ([output_bytes] if output_bytes else [])
        assert sum(held_bytes().values()) >= declared_bytes
        assert recorder.alive == 0  # the output was not kept
    plan = kernel.plan()
    assert plan.nbytes == declared_bytes
    plan(x_TH, weights, routing)
    with AllocationRecorder() as recorder:
        plan(x_TH, weights, routing)
        plan(x_TH[:5], weights, slice_5_tokens(routing))
    assert recorder.sizes == []


def slice_5_tokens(routing: Any) -> Any:
    return type(routing)(routing.topk_weights_TK[:5], routing.topk_ids_TK[:5])


@pytest.mark.cpu
def test_undeclared_memory_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = make_kernel(NO_EP, "TritonExperts", PROBLEM)
    inputs = random_inputs(PROBLEM, CPU)
    kernel(*inputs)
    finish = FusedMoEModularKernel.finish

    def allocate_and_finish(self: FusedMoEModularKernel, pending: Any) -> torch.Tensor:
        return finish(self, pending) + torch.empty(1000).sum().to(torch.bfloat16) * 0

    monkeypatch.setattr(FusedMoEModularKernel, "finish", allocate_and_finish)
    with AllocationRecorder() as recorder:
        kernel(*inputs)
    assert 4000 in recorder.sizes


# The name, hidden size, intermediate size, number of experts and top-k of each layer.
LAYERS = (
    ("DeepSeek-V3", 7168, 2048, 256, 8),
    ("Qwen3-30B", 2048, 768, 128, 8),
    ("Mixtral", 4096, 14336, 8, 2),
    ("gpt-oss", 2880, 2880, 32, 4),
)
GPU = Machine("cuda", (9, 0), frozenset({"triton"}), name="NVIDIA H100")


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_channel", "fp8_w8a8_block"])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer[0])
@pytest.mark.parametrize("part", [TritonExperts, GroupedGemmExperts])
def test_workspaces_stay_below_two_shared_caches(
    part: type[TritonExperts], layer: tuple[str, int, int, int, int], quant: str
) -> None:
    """One cache has max(2I, H) values per pair for the outputs of both GEMMs, and the other has I
    values per pair for the output of the activation.
    """
    _, hidden, intermediate, experts, top_k = layer
    problem = Problem(4096, hidden, intermediate, experts, top_k, quant=quant)
    if part.extra_rejections(problem, GPU):
        return
    with part.described(GPU):
        shapes = part(problem).workspace_shapes(StandardShape(4096, top_k)).buffers()
    num_pairs = 4096 * top_k
    int32_bytes = sum(spec.nbytes for spec in shapes.values() if spec.dtype is torch.int32)
    scale_bytes = sum(spec.nbytes for spec in shapes.values() if spec.dtype is torch.float32)
    cache_bytes = num_pairs * (max(2 * intermediate, hidden) + intermediate) * 2
    alignment_bytes = 256 * len(shapes)
    max_bytes = cache_bytes + int32_bytes + scale_bytes + alignment_bytes
    assert workspace_bytes(shapes) <= max_bytes
    assert workspace_bytes(token_specs(problem, 4096)) <= 4096 * (hidden + 4 * hidden // 128 + 512)
