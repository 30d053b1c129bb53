"""Parts whose launches are recorded and replayed, on a simulated device.

Their "kernels" write host memory through its address. PyTorch does not see these writes as
operations, just as it does not see the launches of Triton kernels.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from experts import TorchExperts
from modular_kernel.compatibility.support import ExpertsRequirements
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.plan import Plan
from modular_kernel.replay import recording
from modular_kernel.spec.problem import ActivationFormat, Combine, Machine, Problem, Reduce
from modular_kernel.tensors import ExpertWeights, Routing, StandardTokens
from modular_kernel.testing.random_inputs import random_inputs
from modular_kernel.workspace import BufferSpec, WorkspaceShapes
from prepare_finalize import MoEPrepareAndFinalizeNoEP
from topk_reduce import KeepTopK, TopKWeightAndReduceNoOp

CPU = torch.device("cpu")
SMALL = Problem(tokens=8, hidden=16, intermediate=8, experts=4, top_k=2, dtype=torch.float32)
watchers: list[str] = []


def _floats(address: int, count: int) -> Any:
    return (ctypes.c_float * count).from_address(address)


def add_kernel(out: int, x: int, w1: int, topk_weights: int, count: int) -> None:
    """out[i] = x[i] + w1[0] + topk_weights[0], all float32."""
    out_values, x_values = _floats(out, count), _floats(x, count)
    w1_0, topk_weight_0 = _floats(w1, 1)[0], _floats(topk_weights, 1)[0]
    for i in range(count):
        out_values[i] = x_values[i] + w1_0 + topk_weight_0


def launch_add(tensors: Sequence[torch.Tensor], count: int) -> None:
    """Launch `add_kernel` and record it, as `modular_kernel.replay.launch.launch` does."""
    add_kernel(*(tensor.data_ptr() for tensor in tensors), count)
    recorder = recording.get_active_recorder()
    if recorder is None:
        return
    places = [recorder.locate(tensor) for tensor in tensors]
    recorded_addresses = [tensor.data_ptr() for tensor in tensors]

    def relaunch(pointers: Sequence[int]) -> None:
        addresses = [
            recorded_address if place is None else pointers[place[0]] + place[1]
            for recorded_address, place in zip(recorded_addresses, places, strict=True)
        ]
        add_kernel(*addresses, count)

    recorder.add_launch(relaunch, make_replay, is_watched)


def make_replay(launches: Sequence[Any], inputs: int) -> recording.Replay:
    def replay(stream: int, pointers: Sequence[int]) -> None:
        assert len(pointers) == inputs
        for relaunch in launches:
            relaunch(pointers)

    return replay


def is_watched() -> bool:
    return bool(watchers)


class Prepare(MoEPrepareAndFinalizeNoEP):
    replayable = True


class AddExperts(TorchExperts):
    """Computes x + 2 (w1[0] + topk_weights[0]) in two launches and counts calls of `apply`."""

    replayable = True
    requires = ExpertsRequirements(
        activation_format=ActivationFormat.STANDARD,
        reduce=Reduce.NOOP,
        keep_topk=True,
        expert_map=True,
    )

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.host_calls = 0

    def workspace_shapes(self, shape: Any) -> WorkspaceShapes:
        rows = BufferSpec((shape.tokens, self.problem.hidden), torch.float32)
        topk_dims = () if self.problem.combine is Combine.SUM else (shape.top_k,)
        output = BufferSpec((shape.tokens, *topk_dims, self.problem.hidden), self.problem.dtype)
        return WorkspaceShapes(rows, BufferSpec((0,), torch.float32), output)

    def finalize_weight_and_reduce_impl(self) -> Any:
        is_summed = self.problem.combine is Combine.SUM
        return TopKWeightAndReduceNoOp() if is_summed else KeepTopK(weighted=False)

    def apply(self, tokens: Any, *, weights: Any, workspace: Any, output: torch.Tensor) -> None:
        assert isinstance(tokens, StandardTokens)
        self.host_calls += 1
        intermediate = workspace.take("workspace13", tuple(tokens.x_TH.shape))
        topk_weights_TK = tokens.routing.topk_weights_TK
        if self.problem.dtype is not torch.float32:
            return  # tests of invalid inputs do not check values
        self.launch((intermediate, tokens.x_TH, weights.w1, topk_weights_TK), tokens.x_TH.numel())
        self.launch((output, intermediate, weights.w1, topk_weights_TK), tokens.x_TH.numel())

    def launch(self, tensors: Sequence[torch.Tensor], count: int) -> None:
        launch_add(tensors, count)


def make_plan(
    problem: Problem = SMALL, experts: type[AddExperts] = AddExperts, **options: Any
) -> tuple[Plan, AddExperts]:
    part = experts(problem)
    kernel = FusedMoEModularKernel(Prepare(problem), part, machine=Machine("cpu"), **options)
    return kernel.plan(), part


def make_inputs(tokens: int = 4, seed: int = 0) -> tuple[torch.Tensor, ExpertWeights, Routing]:
    generator = torch.Generator().manual_seed(seed)
    x_TH, weights, routing = random_inputs(SMALL.with_tokens(tokens), CPU)
    x_TH = torch.randn(x_TH.shape, generator=generator)
    weights = replace(weights, w1=torch.randn(weights.w1.shape, generator=generator))
    shape = routing.topk_weights_TK.shape
    return x_TH, weights, Routing(torch.rand(shape, generator=generator), routing.topk_ids_TK)


def expected_output(x_TH: torch.Tensor, weights: ExpertWeights, routing: Routing) -> torch.Tensor:
    w1_0, topk_weight_0 = weights.w1.flatten()[0], routing.topk_weights_TK.flatten()[0]
    return x_TH + w1_0 + topk_weight_0 + w1_0 + topk_weight_0


def assert_output(out: torch.Tensor, args: tuple[torch.Tensor, ExpertWeights, Routing]) -> None:
    torch.testing.assert_close(out, expected_output(*args))
