"""Calls under torch's modes (autocast, inference_mode, no_grad) and in torch.compile."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch

from modular_kernel.catalog import check_all, make_kernel, this_machine
from modular_kernel.integrations.fused_moe import fused_experts
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.random_inputs import random_inputs

FP32 = Problem(tokens=3, hidden=64, intermediate=32, experts=4, top_k=2, dtype=torch.float32)
W8A8 = Problem(5, 64, 32, 4, 2, quant="fp8_w8a8_channel")
MACHINE = this_machine()
DEVICE = torch.device(MACHINE.device)
CASES = [
    (verdict.prepare_finalize, verdict.experts, problem)
    # Interpreted kernels are slow, and modes do not affect them.
    for problem, machine in ((FP32, MACHINE), (W8A8, replace(MACHINE, interpreter=False)))
    for verdict in check_all(problem, machine)
    if verdict.ok
]
Call = Callable[..., torch.Tensor]


def make_call(pf: str, experts: str, problem: Problem, planned: bool) -> Call:
    kernel = make_kernel(pf, experts, problem, machine=MACHINE)
    return kernel.plan() if planned else kernel


@pytest.mark.parametrize("planned", [False, True], ids=["call", "plan"])
@pytest.mark.parametrize(("pf", "experts", "problem"), CASES, ids=str)
def test_autocast_changes_no_bit(pf: str, experts: str, problem: Problem, planned: bool) -> None:
    call, args = make_call(pf, experts, problem, planned), random_inputs(problem, DEVICE)
    expected = call(*args).clone()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert torch.equal(call(*args), expected)
        assert torch.is_autocast_enabled(DEVICE.type)
    assert torch.equal(call(*args), expected)


def test_autocast_does_not_affect_a_started_call() -> None:
    kernel = make_kernel("MoEPrepareAndFinalizeNoEP", "TorchExperts", FP32, machine=MACHINE)
    args = random_inputs(FP32, DEVICE)
    expected, pending = kernel(*args), kernel.start(*args)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert torch.equal(pending.finish(), expected)


MODES: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    torch.inference_mode,
    torch.no_grad,
    torch.enable_grad,
)


@pytest.mark.parametrize("planned", [False, True], ids=["call", "plan"])
@pytest.mark.parametrize(("pf", "experts", "problem"), CASES, ids=str)
def test_calls_alternate_between_modes(
    pf: str, experts: str, problem: Problem, planned: bool
) -> None:
    """Buffers that a first call creates in inference mode can be written in every other mode."""
    args = random_inputs(problem, DEVICE)
    expected = make_call(pf, experts, problem, planned)(*args).clone()
    with torch.inference_mode():
        call = make_call(pf, experts, problem, planned)
        assert torch.equal(call(*args), expected)
    for mode in MODES:
        with mode():
            assert torch.equal(call(*args, out=torch.empty_like(expected)), expected)


# --------------------------------------------------------------------------------- torch.compile


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Reset dynamo, so that every test compiles."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def add_operations_around(call: Call) -> Call:
    def layer(
        x_TH: torch.Tensor, weights: ExpertWeights, ids: torch.Tensor, router: torch.Tensor
    ) -> torch.Tensor:
        return call(x_TH * 2, weights, Routing(router, ids)) + 1

    return layer


@pytest.mark.parametrize("planned", [False, True], ids=["call", "plan"])
@pytest.mark.parametrize(("pf", "experts"), sorted({case[:2] for case in CASES}), ids="+".join)
def test_the_graph_breaks_at_a_call(pf: str, experts: str, planned: bool) -> None:
    x_TH, weights, routing = random_inputs(FP32, DEVICE)
    args = (x_TH, weights, routing.topk_ids_TK, routing.topk_weights_TK)
    layer = add_operations_around(make_call(pf, experts, FP32, planned))
    with torch.no_grad():
        expected = layer(*args)
        assert torch.equal(torch.compile(layer, backend="aot_eager")(*args), expected)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"not traced.*fused_experts"):
            torch.compile(layer, backend="aot_eager", fullgraph=True)(*args)


def test_fused_experts_does_not_break_the_graph() -> None:
    x_TH, weights, routing = random_inputs(FP32, DEVICE)

    def layer(x_TH: torch.Tensor) -> torch.Tensor:
        topk = (routing.topk_weights_TK, routing.topk_ids_TK)
        return fused_experts(x_TH * 2, weights.w1, weights.w2, topk, activation="gelu") + 1

    expected = layer(x_TH)
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x_TH), expected)


_AT_EXIT_PROGRAM = """
import atexit
import torch
import modular_kernel as mk
problem = mk.Problem(3, 8, 8, 2, 1, dtype=torch.float32)
kernel = mk.make_kernel("MoEPrepareAndFinalizeNoEP", "TorchExperts", problem)
weights = mk.ExpertWeights(torch.ones(2, 16, 8), torch.ones(2, 8, 8))
routing = mk.Routing(torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int32))
arguments = torch.ones(3, 8), weights, routing
plan = kernel.plan()
atexit.register(lambda: print("at exit", float(plan(*arguments).sum())))
class Last:
    def __del__(self):
        CALL
last = Last()
"""


@pytest.mark.parametrize("call", ["kernel(*arguments)", "plan(*arguments)"])
def test_a_call_while_the_interpreter_deletes_objects_is_refused(call: str) -> None:
    """Torch would abort the process. Functions of atexit run earlier, and can call kernels."""
    program = _AT_EXIT_PROGRAM.replace("CALL", call)
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("at exit ")
    assert "StateError: a kernel: got a call while objects are deleted at exit" in process.stderr
